from __future__ import annotations

import dataclasses
import json

import pytest

from sesa_jax.judge import distiller
from sesa_jax.judge.chat import Chat
from sesa_jax.judge.distiller import (
  ChatDistiller,
  PolicyDistiller,
  messages,
  parse_skill,
)
from sesa_jax.judge.leaks import leaks
from sesa_jax.language import ENGLISH
from sesa_jax.retrieval.encoder import HashEncoder
from sesa_jax.skills import bank as skill_bank
from sesa_jax.stages import distillation
from sesa_jax.types import (
  Case,
  DistillFailure,
  FailureRecord,
  Passage,
  RightAttempt,
  Skill,
)
from tests.llm_server import (
  ATTACK,
  Naps,
  Server,
  blocks,
  body,
  no_certificates,
  says,
)

pytestmark = pytest.mark.usefixtures(no_certificates.__name__)

REPLY = dict(
  category="outlet of a lake",
  description="Read which stream leaves a lake, not which one feeds it.",
  trigger="The question asks what drains a lake.",
  evidence="A sentence with leaves, drains or outflow beside the lake.",
  avoidance="Taking the first stream that a page names.",
  templates=["{lake} outflow", "{lake} drained by"],
)
SKILL = Skill(
  id="",
  origin="",
  **REPLY | {"templates": ("{lake} outflow", "{lake} drained by")},
)


def record(id="q", **changes) -> FailureRecord:
  return dataclasses.replace(
    FailureRecord(
      question_id=id,
      seed_id="s7",
      question=f"Which river drains lake {id.upper()}?",
      targets=("Mincio", "Mincius"),
      prediction="Sarca",
      other_predictions=("Adda",),
      passages=(Passage("1", "Garda", "The Sarca feeds it."),),
      passages_seen=1,
      wrong_attempts=2,
      success_rate=0.5,
      skill_ids=("s1",),
      iteration=4,
    ),
    **changes,
  )


def writer(server, **changes) -> ChatDistiller:
  return ChatDistiller(Chat(server.url, "m", tries=2, sleep=Naps(), **changes))


# --- what is asked ---------------------------------------------------------


def test_a_record_stands_in_blocks():
  system, user = messages(Case((record(),), ()))
  assert system == {"role": "system", "content": distiller.INSTRUCTIONS}
  assert blocks(user["content"]) == {
    "question": "Which river drains lake Q?",
    "right answer": "Mincio\nMincius",
    "wrong answers": "Sarca\nAdda",
    "passages read": "Doc 1(Title: Garda) The Sarca feeds it.",
  }
  assert "Do not repeat" not in user["content"]


def test_the_skills_that_did_not_help_are_shown_and_forbidden():
  _, user = messages(Case((record(),), (SKILL, SKILL)))
  found = blocks(user["content"])
  assert found["skill shown 1"] == found["skill shown 2"]
  for text in (*REPLY["templates"], REPLY["evidence"], REPLY["trigger"]):
    assert text in found["skill shown 1"]
  assert user["content"].count("Do not repeat them") == 1


def test_several_records_and_right_attempts():
  right = RightAttempt(("mincio",), (Passage("2", "Mincio", "It leaves it."),))
  case = Case((record("a"), record("b", right=(right,))), ())
  found = blocks(messages(case)[1]["content"])
  assert found["question 1"] == "Which river drains lake A?"
  assert found["question 2"] == "Which river drains lake B?"
  assert found["right attempt 1, queries"] == "mincio"
  assert "It leaves it." in found["right attempt 1, passages"]


def test_evidence_cannot_talk_to_the_model():
  page = Passage("1", ATTACK, ATTACK)
  case = Case((record(passages=(page,), prediction=ATTACK),), ())
  text = messages(case)[1]["content"]
  assert list(blocks(text)) == [
    "question",
    "right answer",
    "wrong answers",
    "passages read",
  ]
  assert "<|" not in text
  assert "[INST]" not in text


# --- what is answered ------------------------------------------------------


def test_a_skill_is_read_field_by_field():
  assert parse_skill(json.dumps(REPLY)) == SKILL
  spaced = REPLY | {"trigger": " The question\n asks what drains a lake. "}
  assert parse_skill(json.dumps(spaced)) == SKILL
  bare = parse_skill(json.dumps(REPLY | {"templates": []}))
  assert bare.templates == ()


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"evidence": None}, '"evidence" is no text'),
    ({"evidence": 3}, '"evidence" is no text'),
    ({"description": ""}, '"description" is empty'),
    ({"trigger": " \n"}, '"trigger" is empty'),
    ({"avoidance": "..."}, '"avoidance" is empty'),
    ({"category": "x" * 61}, '"category" has 61 characters, over 60'),
    ({"description": "x" * 301}, '"description" has 301'),
    ({"trigger": "Write <answer>."}, '"trigger" holds a <tag>'),
    ({"templates": "{lake}"}, '"templates" is no list'),
    ({"templates": ["a", "b", "c", "d"]}, "at most 3"),
    ({"templates": [["a"]]}, '"templates" is no text'),
    ({"templates": [""]}, '"templates" is empty'),
    ({"templates": ["<search>"]}, '"templates" holds a <tag>'),
    ({"templates": ["x" * 121]}, '"templates" has 121'),
    ({"id": "s1"}, "missing or too many: id"),
  ],
)
def test_each_field_is_checked(changes, says):
  with pytest.raises(ValueError, match=says):
    parse_skill(json.dumps(REPLY | changes))


@pytest.mark.parametrize("name", REPLY)
def test_each_field_is_needed(name):
  reply = {k: v for k, v in REPLY.items() if k != name}
  with pytest.raises(ValueError, match=f"missing or too many: {name}"):
    parse_skill(json.dumps(reply))


def test_limits_are_inclusive():
  edge = {"category": "x" * 60, "evidence": "x" * 300, "templates": ["x"] * 3}
  assert parse_skill(json.dumps(REPLY | edge)).evidence == "x" * 300


# --- the distiller ---------------------------------------------------------


def test_writes_a_skill():
  with Server([says(json.dumps(REPLY))]) as server:
    skill = writer(server).distill(record(), [SKILL])
  assert skill == dataclasses.replace(
    SKILL,
    origin="chat",
    source_question="Which river drains lake Q?",
    source_seed="s7",
    created_at=4,
  )
  assert leaks(skill, record(), ENGLISH) is None
  text = server.requests[0]["messages"][1]["content"]
  assert "skill shown 1" in text


@pytest.mark.parametrize(
  ("act", "kind", "outage"),
  [
    (body(b"", 500), "server", True),
    (body(b"", 401), "access", True),
    (body(b"<html>"), "body", True),
    (body(b"", 400), "rejected", False),
    (says(None, refusal="no"), "refusal", False),
    (says('{"category": "x"}'), "malformed", False),
    (says('{"category": "x"', finish="length"), "length", False),
  ],
)
def test_failures_say_whether_the_record_stays(act, kind, outage):
  with Server(then=act) as server:
    failure = writer(server).distill(record(), [])
  assert isinstance(failure, DistillFailure)
  assert failure.outage == outage
  assert failure.reason.startswith(f"{kind}: ")


def test_a_repair_says_which_field():
  long = json.dumps(REPLY | {"evidence": "x" * 301})
  with Server([says(long), says(json.dumps(REPLY))]) as server:
    assert isinstance(writer(server).distill(record(), []), Skill)
  problem = server.requests[1]["messages"][-1]["content"]
  assert '"evidence" has 301 characters, over 300' in problem


def test_many_cases_at_once_keep_their_order():
  def write(handler):
    name = blocks(handler.asked)["question"][-2].lower()
    if name == "b":
      body(b"", 500)(handler)
    else:
      says(json.dumps(REPLY | {"category": name}))(handler)

  with Server(then=write) as server:
    found = writer(server).distill_all(
      [Case((record(name),), ()) for name in "abc"]
    )
  assert [getattr(f, "category", None) for f in found] == ["a", None, "c"]
  assert found[2].source_question == "Which river drains lake C?"


def test_a_policy_is_asked_in_the_same_words_and_once():
  """And what it writes is read as strictly: there is no second try."""
  asked = []

  def write(prompts):
    asked.extend(prompts)
    return [json.dumps(REPLY), "A lesson: read.", None]

  cases = [Case((record(name),), (SKILL,)) for name in "abc"]
  found = PolicyDistiller(write).distill_all(cases)
  assert found[0] == dataclasses.replace(
    SKILL,
    origin="solver",
    source_question="Which river drains lake A?",
    source_seed="s7",
    created_at=4,
  )
  assert found[1].reason.startswith("malformed: ")
  assert found[2].reason.startswith("length: ")
  assert not found[1].outage
  assert not found[2].outage
  for case, prompt in zip(cases, asked, strict=True):
    system, user = messages(case)
    assert (prompt.system, prompt.user) == (
      system["content"],
      user["content"],
    )


def test_in_stage_4_an_outage_keeps_its_record(tmp_path):
  def write(handler):
    name = blocks(handler.asked)["question"][-2].lower()
    leaky = REPLY | {"evidence": "It is the Mincio."}
    acts = {
      "a": says(json.dumps(REPLY)),
      "b": body(b"", 503),
      "c": says(json.dumps(leaky)),
      "d": says("no JSON"),
    }
    acts[name](handler)

  queue = tuple(record(name) for name in "abcd")
  bank = skill_bank.create(5, 64)
  cases = [Case((one,), ()) for one in queue]
  with Server(then=write) as server:
    written = writer(server, cache=tmp_path).distill_all(cases)
  bank, queue, report = distillation.land(
    bank,
    queue,
    cases,
    written,
    origin="chat",
    encoder=HashEncoder(64),
    language=ENGLISH,
    iteration=10,
    threshold=0.9,
  )
  assert [r.question_id for r in queue] == ["b"]
  assert [r.skill.description for r in bank.records] == [SKILL.description]
  found = report.metrics
  assert found["distillation/admitted"] == 1
  assert found["distillation/rejected/leak_target"] == 1
  assert found["distillation/failed"] == 2
  assert found["distillation/outages"] == 1


def test_digest_covers_the_whole_prompt(monkeypatch):
  before = distiller.digest()
  monkeypatch.setattr(distiller, "_shown", lambda skill: "")
  assert distiller.digest() != before
