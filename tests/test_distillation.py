from __future__ import annotations

import dataclasses
import json
import logging

import numpy as np
import pytest

from sesa_jax import metrics
from sesa_jax.judge.offline import OfflineDistiller
from sesa_jax.language import ENGLISH
from sesa_jax.retrieval.encoder import HashEncoder
from sesa_jax.skills import bank as skill_bank
from sesa_jax.skills import record as record_lib
from sesa_jax.stages import distillation
from sesa_jax.types import (
  Case,
  DistillFailure,
  FailureRecord,
  Passage,
  Question,
  RightAttempt,
  Skill,
)

ENCODER = HashEncoder(64)


def record(id="q", **changes) -> FailureRecord:
  return dataclasses.replace(
    FailureRecord(
      question_id=id,
      seed_id=f"seed of {id}",
      question=f"Where is {id.upper()} kept?",
      targets=("Rome",),
      prediction="Bonn",
      other_predictions=(),
      passages=(Passage("1", "Bonn", "Bonn lies on a river."),),
      passages_seen=1,
      wrong_attempts=1,
      success_rate=0.5,
      skill_ids=(),
      iteration=1,
    ),
    **changes,
  )


def skill(description, **changes) -> Skill:
  return dataclasses.replace(
    Skill("", "c", description, "t", "e", "a", ("z",), "made up"), **changes
  )


@dataclasses.dataclass
class Scripted:
  """Answers by question id, and remembers what it was asked."""

  answers: dict
  name: str = "chat"
  asked: list = dataclasses.field(default_factory=list)

  def distill_all(self, cases):
    for case in cases:
      ids = [record.question_id for record in case.records]
      self.asked.append((" ".join(ids), [s.id for s in case.shown]))
    return [self.answers[case.records[0].question_id] for case in cases]


def distill(bank, queue, distiller, **changes):
  """Chooses, writes and lands, as the loop does."""
  settings = dict(
    iteration=10, every=10, min_pending=1, max_records=30, admit=True
  )
  cases = distillation.cases(bank, queue, encoder=ENCODER, **settings | changes)
  return distillation.land(
    bank,
    queue,
    cases,
    distiller.distill_all(cases) if cases else [],
    origin=distiller.name,
    encoder=ENCODER,
    language=ENGLISH,
    iteration=changes.get("iteration", 10),
    threshold=0.9,
  )


def empty(capacity=10):
  return skill_bank.create(capacity, ENCODER.dim)


# --- the queue -------------------------------------------------------------


@pytest.mark.parametrize(
  ("changes", "points"),
  [
    ({}, 0),
    ({"skill_ids": ("a",)}, 10),
    ({"wrong_attempts": 2}, 5),
    ({"passages_seen": 6}, 0),
    ({"passages_seen": 7}, 3),
    ({"skill_ids": ("a", "b"), "wrong_attempts": 5, "passages_seen": 9}, 18),
  ],
)
def test_priority(changes, points):
  assert distillation.priority(record(**changes)) == points


def test_queue_keeps_the_newest_or_the_best():
  good = record("good", wrong_attempts=2)
  old, new, last = record("old"), record("new", iteration=2), record("last")
  queue, dropped = distillation.enqueue((), [good, old], 3, "newest")
  assert (queue, dropped) == ((good, old), 0)
  queue, dropped = distillation.enqueue(queue, [new, last], 2, "newest")
  assert (queue, dropped) == ((new, last), 2)
  queue, dropped = distillation.enqueue((old, good), [new], 2, "best")
  assert (queue, dropped) == ((good, new), 1)  # in order of arrival
  with pytest.raises(ValueError, match="'oldest'.*newest, best"):
    distillation.enqueue((), [], 1, "oldest")


def test_due():
  assert [i for i in range(31) if distillation.due(i, 10)] == [10, 20, 30]
  assert [i for i in range(3) if distillation.due(i, 1)] == [1, 2]
  with pytest.raises(ValueError, match=r"distillation\.every = 0"):
    distillation.due(1, 0)


# --- distillation ----------------------------------------------------------


@pytest.mark.parametrize(
  "changes", [{"iteration": 9}, {"min_pending": 2}, {"admit": False}]
)
def test_not_now(changes):
  bank, queue, distiller = empty(), (record(),), Scripted({})
  after, left, report = distill(bank, queue, distiller, **changes)
  assert after.records == bank.records
  assert left == queue
  assert distiller.asked == []
  assert report.rows == []
  assert report.metrics["distillation/pending"] == 1


def test_as_many_as_must_wait_are_enough():
  distiller = Scripted(dict.fromkeys("ab", DistillFailure("no", outage=False)))
  _, left, _ = distill(
    empty(), (record("a"), record("b")), distiller, min_pending=2
  )
  assert left == ()


def test_best_first_and_no_more_than_asked_for():
  queue = (
    record("a"),
    record("c", iteration=2),
    record("b", iteration=2),
    record("best", skill_ids=("s", "gone")),
  )
  bank = empty()
  vector = ENCODER.encode(["x"], "passage")
  bank, _ = skill_bank.prime(bank, [skill("s", id="s")], vector)
  answers = dict.fromkeys("abc", DistillFailure("no", outage=False))
  distiller = Scripted({**answers, "best": DistillFailure("no", False)})
  _, left, _ = distill(bank, queue, distiller, max_records=3)
  # Priority, then newest, then question id; shown are those the bank knows.
  assert distiller.asked == [("best", ["s"]), ("b", []), ("c", [])]
  assert left == (record("a"),)


def test_what_becomes_of_each_record():
  # Of equal priority: in the order of their ids.
  queue = tuple(record(id) for id in ("e", "d", "c", "b", "a"))
  answers = {
    "a": skill("read the page again", source_seed="forgotten", id="mine"),
    "b": skill("read the page again"),
    "c": skill("go to rome"),
    "d": DistillFailure("timeout", outage=True),
    "e": DistillFailure("refused", outage=False),
  }
  bank, left, report = distill(empty(), queue, Scripted(answers))
  assert left == (record("d"),)
  born = skill(
    "read the page again",
    id="skill-00001",
    origin="chat",  # the distiller's name; and where it came from, always:
    source_question="Where is A kept?",
    source_seed="seed of a",
    created_at=10,
  )
  assert bank.skills == (born,)
  rows = {row["question"]: row for row in report.rows}
  assert {id: (row["outcome"], row["reason"]) for id, row in rows.items()} == {
    "a": ("admitted", ""),
    "b": ("rejected", "similar"),
    "c": ("rejected", "leak_target"),
    "d": ("failed", "timeout"),
    "e": ("failed", "refused"),
  }
  assert len(report.rows) == 5
  assert rows["a"]["skill"] == "skill-00001"
  assert rows["a"]["text"] == skill_bank.rendered(born)
  assert (rows["b"]["similarity"], rows["b"]["nearest"]) == (1, "skill-00001")
  assert {k: v for k, v in report.metrics.items() if v} == {
    "distillation/pending": 1,
    "distillation/outages": 1,
    "distillation/admitted": 1,
    "distillation/rejected": 2,
    "distillation/failed": 2,
    "distillation/rejected/similar": 1,
    "distillation/rejected/leak_target": 1,
  }


def test_all_lost_changes_nothing_and_none_is_lost():
  bank, queue = empty(), (record("a"), record("b"))
  outage = Scripted(dict.fromkeys("ab", DistillFailure("down", outage=True)))
  after, left, _ = distill(bank, queue, outage)
  assert left == queue
  assert after.records == bank.records
  works = Scripted({"a": skill("first lesson"), "b": skill("other matter")})
  after, left, _ = distill(after, left, works, iteration=20)
  assert left == ()
  assert [s.source_question for s in after.skills] == [
    "Where is A kept?",
    "Where is B kept?",
  ]


def test_same_question_id_of_two_iterations():
  queue = (record("a", iteration=1), record("a", iteration=2))
  distiller = Scripted({"a": DistillFailure("no", outage=False)})
  _, left, _ = distill(empty(), queue, distiller, max_records=1)
  assert left == (record("a", iteration=1),)


def test_records_of_two_sources_may_share_their_id():
  """Of two runs, say: one that is written leaves the other where it is."""
  queue = (record("a"), record("a", question="Where is Z kept?"))
  distiller = Scripted({"a": skill("first lesson")})
  _, left, _ = distill(empty(), queue, distiller, max_records=1)
  assert left == queue[1:]


def test_evictions_stand_among_the_rows():
  queue = (record("a"), record("b"))
  answers = {"a": skill("first lesson"), "b": skill("other matter")}
  bank, left, report = distill(empty(1), queue, Scripted(answers))
  assert left == ()
  assert [(row["event"], row["skill"]) for row in report.rows] == [
    ("admit", "skill-00001"),
    ("admit", "skill-00002"),
    ("evict", "skill-00001"),
  ]
  assert report.metrics["distillation/admitted"] == 2


def test_warns_when_most_leak(caplog):
  queue = (record("a"), record("b"))
  half = {"a": skill("go to rome"), "b": skill("other matter")}
  most = {"a": skill("go to rome"), "b": skill("the bonn page")}
  with caplog.at_level(logging.WARNING, "absl"):
    distill(empty(), queue, Scripted(half))
    assert not caplog.records
    _, _, report = distill(empty(), queue, Scripted(most))
  assert "rejected 2 of 2" in caplog.text
  assert report.metrics["distillation/rejected/leak_title"] == 1


def test_offline_distiller_all_the_way():
  queue = tuple(record(id) for id in "abc")
  once = distill(empty(), queue, OfflineDistiller())
  bank, left, report = once
  assert left == ()
  assert [s.origin for s in bank.skills] == ["offline"]  # one text for all
  assert report.metrics["distillation/rejected/similar"] == 2
  again = distill(empty(), queue, OfflineDistiller())
  assert skill_bank.rows(again[0]) == skill_bank.rows(bank)
  assert again[2] == report


def test_record_survives_a_checkpoint():
  page = Passage("2", "Rome", "Rome has seven hills.", 0.5)
  right = RightAttempt(("hills of rome", "rome"), (page,))
  waits = record("a", skill_ids=("s",), other_predictions=("Köln", "Ulm"))
  for one in (waits, record("b", right=(right, right))):
    text = json.dumps(metrics.plain(one))
    assert distillation.from_json(json.loads(text)) == one
  alone = metrics.plain(waits) | {"targets": "Rome"}
  assert distillation.from_json(alone) == waits  # one answer, not its letters
  older = metrics.plain(waits)
  del older["right"]
  assert distillation.from_json(older) == waits


# --- clusters --------------------------------------------------------------


class Angles:
  """Question "d" lies at the angle d degrees."""

  dim = 2

  def encode(self, texts, kind):
    assert kind == "query"
    angles = np.radians([float(text) for text in texts])
    return np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)


def at(degrees, **changes):
  return record(str(degrees), question=str(degrees), **changes)


def test_clusters_are_the_best_with_its_nearest():
  queue = tuple(at(d) for d in (0, 10, 90, 21, 31, 40, 50, 100))
  queue += (at(35, wrong_attempts=2), at(93, wrong_attempts=2))
  settings = dict(
    encoder=Angles(), iteration=1, every=1, min_pending=1, admit=True
  )
  found = distillation.cases(
    empty(), queue, max_records=9, consolidate="cluster", **settings
  )
  # "90" is the worst by its id, and left out by max_records.
  assert [[r.question for r in case.records] for case in found] == [
    ["35", "31", "40", "21", "50"],
    ["93", "100", "10", "0"],
  ]
  single = distillation.cases(empty(), queue, max_records=9, **settings)
  assert [len(case.records) for case in single] == [1] * 9
  with pytest.raises(ValueError, match="'all'.*single, cluster"):
    distillation.cases(
      empty(), queue, max_records=9, consolidate="all", **settings
    )


def test_a_cluster_shows_the_skills_of_all_once():
  bank = empty()
  vectors = ENCODER.encode(["x", "y"], "passage")
  skills = [skill("s", id="s"), skill("t", id="t")]
  bank, _ = skill_bank.prime(bank, skills, vectors)
  queue = (
    record("a", skill_ids=("s", "gone")),
    record("b", skill_ids=("t", "s")),
  )
  (case,) = distillation.cases(
    bank, queue, encoder=ENCODER, iteration=1, every=1, min_pending=1,
    max_records=2, admit=True, consolidate="cluster",
  )  # fmt: skip
  assert [s.id for s in case.shown] == ["s", "t"]


def test_a_cluster_lands_or_stays_as_a_whole(tmp_path):
  """Its skill is born from all its questions, and holds nothing of any."""
  records = [
    record("a", question="Where\nis A kept?"),
    record("b", targets=("Oslo",)),
    record("c", targets=("Riga",), passages=(Passage("2", "Pula", ""),)),
  ]
  queue = (*records, record("d"))
  case = Case(tuple(records), ())

  def land(written):
    return distillation.land(
      empty(), queue, [case], [written], origin="chat", encoder=ENCODER,
      language=ENGLISH, iteration=10, threshold=0.9,
    )  # fmt: skip

  bank, left, report = land(skill("read the page again"))
  assert left == (record("d"),)
  (born,) = bank.skills
  assert born.source_question == (
    "Where is A kept?\nWhere is B kept?\nWhere is C kept?"
  )
  assert born.source_seed == "seed of a\nseed of b\nseed of c"
  (row,) = report.rows
  assert (row["question"], row["others"]) == ("a", [(1, "b"), (1, "c")])
  assert report.metrics["distillation/admitted"] == 1
  by_text = [f"Where is {name} kept" for name in "ABCD"]
  asked = [
    *(Question(t[9], t, ("y",), 1, "", "fixed") for t in by_text),
    *(Question(s, "Whose?", ("y",), 1, f"seed of {s}", "") for s in "abcd"),
  ]
  skill_bank.save_jsonl(bank, tmp_path / "skills.jsonl")
  rows = record_lib.read_rows(tmp_path / "skills.jsonl")
  for known in bank, skill_bank.from_rows(rows, ENCODER, 10):
    shown = skill_bank.top(known, asked, ENCODER, k=1)
    assert [name for name, found in shown.items() if found] == ["D", "d"]
  for told in ("go to rome", "it is in oslo", "as in riga", "see pula"):
    assert land(skill(told))[0].skills == (), told
  assert land(DistillFailure("down", outage=True))[1] == queue
  assert land(DistillFailure("refused", outage=False))[1] == (record("d"),)
