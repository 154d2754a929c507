import dataclasses
import json

import numpy as np
import pytest

from sesa_jax import types
from sesa_jax.language import English
from sesa_jax.stages import validity

ENGLISH = English()
TEXT = "Which river flows through the capital of France and then to the sea?"
KEYWORDS = dict(
  iteration=1,
  seed=0,
  slots=4,
  language=ENGLISH,
  min_searches=None,
  noise=4,
  max_tokens=10_000,
  size=lambda question, passages: sum(len(p.text.split()) for p in passages),
  refused=lambda text: None,
  embed=lambda texts: np.eye(len(texts)),
  probes=0,
  refill="replay",
  empty_every=10,
  keep_fixed=False,
)


def passage(name, words=3):
  return types.Passage(name, f"Title {name}", " ".join(["word"] * words))


def proposal(
  name="a",
  text=TEXT,
  targets=("Seine",),
  searches=("one", "two"),
  passages=2,
  hops=2,
  finish="question",
):
  """A challenger's episode with one turn for each search."""
  turns = tuple(
    types.Turn(
      0,
      1,
      1,
      "",
      "search",
      query,
      tuple(passage(f"{name}/{i}/{n}") for n in range(passages)),
      "",
    )
    for i, query in enumerate(searches)
  )
  episode = types.Episode(
    request_id=f"1/{name}",
    attempt=0,
    arm="challenger",
    ids=np.zeros(1, np.int32),
    prompt_length=1,
    mask=np.zeros(1, bool),
    logprobs=np.zeros(1, np.float32),
    turns=turns,
    finish=finish,
  )
  return types.Proposal(
    types.Seed(name, tuple(targets), hops), 0, episode, text, "posed"
  )


def named(*proposals):
  return [
    dataclasses.replace(p, question_id=validity.question_id(p.seed, 0, 1))
    for p in proposals
  ]


def question(name, text=None, origin="challenger"):
  return types.Question(
    name, text or f"Text of {name}", ("gold",), 1, name, origin
  )


def check(proposals, pool=None, answer=None, **changes):
  return validity.check(
    proposals,
    pool or validity.Pool(),
    answer or (lambda requests: ["Seine"] * len(requests)),
    **(KEYWORDS | changes),
  )


# --- rules ------------------------------------------------------------------


@pytest.mark.parametrize(
  ("changes", "broken"),
  [
    ({}, None),
    ({"text": None}, "no_question"),
    ({"text": "w " * 10 + "w"}, None),
    ({"text": "w " * 8 + "w"}, "length"),  # 9 words
    ({"text": "Seine?"}, "length"),  # the first rule that is broken counts
    ({"text": " ".join(["word"] * 200)}, None),  # 999 characters
    ({"text": " ".join(["word"] * 200) + "xx"}, "length"),  # 1001
    ({"targets": ("La Seine", "france")}, "leaks_target"),  # an alias
    ({"targets": ("FRANCE",)}, "leaks_target"),
    ({"targets": ("Franc",)}, "leaks_target"),
    ({"passages": 0}, "no_passages"),
    ({"searches": ()}, "no_passages"),
    ({"searches": ("one",)}, "few_searches"),
    ({"searches": ("one",), "hops": 1}, None),
    ({"searches": ("one", "two", "one")}, "repeated_query"),
    ({"searches": ("One", " one")}, "repeated_query"),
  ],
)
def test_the_first_rule_that_a_proposal_breaks(changes, broken):
  assert validity.rules(proposal(**changes), ENGLISH) == broken
  assert broken is None or broken in validity.STATES


@pytest.mark.parametrize(("wanted", "broken"), [(1, None), (3, "few_searches")])
def test_the_number_of_searches_may_be_set(wanted, broken):
  for hops in 1, 2:
    got = validity.rules(proposal(hops=hops), ENGLISH, min_searches=wanted)
    assert got == broken


def test_a_malformed_turn_is_no_search():
  one = proposal()
  first, second = one.episode.turns
  turns = (first, dataclasses.replace(second, action="malformed"))
  episode = dataclasses.replace(one.episode, turns=turns)
  got = validity.rules(dataclasses.replace(one, episode=episode), ENGLISH)
  assert got == "few_searches"


# --- the evidence check -----------------------------------------------------


def evidence(candidates, sources, **changes):
  keywords = dict(
    noise=4,
    seed=0,
    max_tokens=10_000,
    size=KEYWORDS["size"],
    language=ENGLISH,
  )
  return validity.evidence_sets(candidates, sources, **(keywords | changes))


def ids(passages):
  return {p.id for p in passages}


def sources(count, targets=None):
  return named(
    *(
      proposal(f"s{i}", targets=targets or (f"target {i}",))
      for i in range(count)
    )
  )


def test_own_passages_hide_among_those_of_four_others_with_another_target():
  (mine,) = named(proposal())
  alias = named(proposal("alias", targets=("x", "the seine")))
  pool = [mine, *alias, *sources(9)]
  (found,) = evidence([mine], pool)
  own = {f"a/{i}/{n}" for i in range(2) for n in range(2)}
  assert ids(found.passages) - ids(found.noise) == own
  lenders = {name.split("/")[0] for name in ids(found.noise)}
  assert len(lenders) == 4
  assert not lenders & {"a", "alias"}
  assert len(found.passages) == len(ids(found.passages)) == 5 * 4
  assert found.question == TEXT
  order = [p.id in own for p in found.passages]
  assert order != sorted(order)
  assert order != sorted(order, reverse=True)


def test_an_alias_is_no_other_target():
  """Of three lenders and one that shares an alias, all but that one lend."""
  (mine,) = named(proposal())
  alias = named(proposal("alias", targets=("x", "the seine")))
  (found,) = evidence([mine], [mine, *alias, *sources(3)])
  lenders = {name.split("/")[0] for name in ids(found.noise)}
  assert lenders == {"s0", "s1", "s2"}


def test_noise_depends_on_its_key_only():
  mine, other = named(proposal(), proposal("b", targets=("Loire",)))
  pool = [mine, other, *sources(9)]
  alone = evidence([mine], pool)
  assert evidence([other, mine], pool)[1] == alone[0]
  assert evidence([mine], pool, seed=1) != alone
  # Another question has other noise from the same trajectories.
  (twin,) = named(proposal("twin"))
  one, two = evidence([mine, twin], sources(9))
  assert ids(one.noise) != ids(two.noise)


@pytest.mark.parametrize(("others", "expected"), [(0, 0), (1, 1), (3, 3)])
def test_fewer_others_lend_less_noise(others, expected):
  (mine,) = named(proposal())
  empty = named(proposal("empty", targets=("y",), passages=0))
  (found,) = evidence([mine], [mine, *empty, *sources(others)])
  assert len(found.noise) == 4 * expected


def test_the_budget_cuts_noise_first_and_own_passages_never():
  (mine,) = named(proposal())
  pool = [mine, *sources(5)]
  full = evidence([mine], pool)[0]
  # Four own passages of 3 words, then noise of 3 words each.
  for budget in range(10, 70):
    (found,) = evidence([mine], pool, max_tokens=budget)
    if budget < 12:
      assert found is None
      continue
    assert len(found.noise) == min(16, (budget - 12) // 3)
    assert ids(found.noise) <= ids(full.noise)
    assert KEYWORDS["size"](TEXT, found.passages) <= budget


def test_a_passage_is_shown_once():
  (mine,) = named(proposal(searches=("one", "two")))
  twin = dataclasses.replace(
    mine, seed=types.Seed("t", ("other",), 1), question_id="t"
  )
  (found,) = evidence([mine], [mine, twin])
  assert sorted(p.id for p in found.passages) == sorted(
    p.id for p in mine.episode.passages
  )


@pytest.mark.parametrize(
  ("answer", "targets", "expected"),
  [
    ("Seine", ("Seine",), True),
    ("the seine.", ("Seine",), True),
    ("It is the river Seine, I think.", ("Seine",), True),
    ("Seinerly", ("Seine",), False),
    ("", ("Seine",), False),
    ("Loire", ("Seine", "Loire"), True),
    ("Seine " + "or Rhine " * 16, ("Seine",), False),  # 33 words
    ("No, the Seine", ("no",), False),  # a closed answer stands alone
    ("No.", ("no",), True),
  ],
)
def test_what_gives_the_target(answer, targets, expected):
  assert validity.gives(answer, targets, ENGLISH) == expected


def test_an_outage_is_neither_valid_nor_wrong():
  proposals = [
    proposal("a"),
    proposal("b"),
    proposal("c"),
    proposal("d", passages=9_000),
    proposal("e", text=None),
    proposal("f", text=None, finish="lost"),  # it had no chance to write one
  ]
  given = {"1/a/0": "Seine", "1/b/0": "Loire", "1/c/0": None}
  asked = []

  def answer(requests):
    asked.extend(requests)
    return [given[key] for key, _, _ in requests]

  decided, tasks, pool, report = check(proposals, answer=answer, noise=0)
  states = ["valid", "evidence", "unverified"] + [
    "over_budget",
    "no_question",
    "unverified",
  ]
  assert [p.state for p in decided] == states
  assert [p.question_id for p in decided] == [f"1/{c}/0" for c in "abcdef"]
  assert [key for key, _, _ in asked] == list(given)
  (task,) = tasks
  assert task == types.Question("1/a/0", TEXT, ("Seine",), 2, "a", "challenger")
  assert pool.questions == (task,)
  counts = {s: report.metrics[f"challenger/state/{s}"] for s in validity.STATES}
  assert counts == {s: states.count(s) for s in validity.STATES}
  assert sum(counts.values()) == len(proposals)
  assert report.metrics["challenger/valid_rate"] == pytest.approx(1 / 6)
  assert report.metrics["pool/empty_slots"] == 3
  assert [row["state"] for row in report.rows] == states
  json.dumps(report.rows)


def test_probes_are_asked_with_noise_alone_and_with_nothing():
  proposals = [proposal("a"), proposal("b", targets=("Loire",))]

  def answer(requests):  # guesses b without any evidence
    return ["Loire" if "/b/" in key else "?" for key, _, _ in requests]

  decided, _, _, report = check(proposals, answer=answer, probes=32)
  assert [p.state for p in decided] == ["evidence", "valid"]
  assert report.metrics["challenger/guessable/nothing"] == 0.5
  assert report.metrics["challenger/guessable/noise"] == 0.5
  shown = {}

  def outage(requests):
    shown.update((key, ids(passages)) for key, _, passages in requests)
    return [None] * len(requests)

  check(proposals, answer=outage, probes=1)
  (probed,) = {key.removesuffix("/noise") for key in shown if "noise" in key}
  assert shown[f"{probed}/nothing"] == set()
  assert shown[f"{probed}/noise"] < shown[probed]
  assert len(shown) == 4


def test_no_candidate_asks_nothing():
  def answer(requests):
    raise AssertionError

  decided, tasks, _, _ = check([proposal(text=None)], answer=answer)
  assert (decided[0].state, tasks) == ("no_question", [])


def test_a_seed_drawn_twice_is_an_error():
  with pytest.raises(ValueError, match=r"'1/a/0'.*different seeds"):
    check([proposal("a"), proposal("a")])


# --- diversity --------------------------------------------------------------


def test_how_much_alike_the_questions_of_a_challenger_are():
  other = "Which very old bridge of the same city has nine arches, and why?"
  proposals = [
    proposal("a", hops=1),
    proposal("b", text=TEXT.upper() + "!", searches=("one",)),
    proposal("c", text=other, searches=("one", "two", "three")),
    proposal("d", text=None, searches=(), hops=3),
  ]
  # Two at a right angle, and one between them at cosines .6 and .8.
  rows = np.array([[1, 0], [0, 1], [0.6, 0.8]], np.float32)
  seen = []

  def embed(texts):
    seen.append(texts)
    return rows[: len(texts)]

  _, _, pool, report = check(proposals, embed=embed)
  assert seen == [[TEXT, TEXT.upper() + "!", other]]
  assert report.metrics["challenger/duplicates"] == pytest.approx(1 / 3)
  cosine = report.metrics["challenger/cosine"]
  assert cosine == pytest.approx((0 + 0.6 + 0.8) / 3)
  searches = {
    name: value
    for name, value in report.metrics.items()
    if name.startswith("challenger/searches/")
  }
  assert searches == {
    "challenger/searches/hops_1": 2,
    "challenger/searches/hops_2": 2,  # one and three
    "challenger/searches/hops_3": 0,
  }
  # Against all earlier iterations, valid or not, emptied pool or not.
  pool = validity.Pool.from_json(json.loads(json.dumps(pool.to_json())))
  again = [proposal("e", text=other), proposal("f", text="w " * 10 + "new")]
  _, _, pool, report = check(again, pool, iteration=11)
  assert len(pool.questions) == 2  # it was emptied before
  assert report.metrics["challenger/duplicates"] == 0.5
  assert check(again, pool)[3].metrics["challenger/duplicates"] == 1
  assert "challenger/cosine" not in check([again[0]])[3].metrics


# --- the pool ---------------------------------------------------------------


def test_slots_without_a_question_are_filled_by_key_and_never_twice():
  pool = validity.Pool(
    tuple(question(f"q{i}") for i in range(5)),
    (question("f", origin="fixed"),),
  )
  proposals = [proposal("a"), proposal("b", text=None)]
  _, tasks, after, report = check(proposals, pool, slots=5)
  assert tasks[0].id == "1/a/0"
  assert len({task.id for task in tasks}) == 5
  assert {task.origin for task in tasks[1:]} <= {"replay", "fixed"}
  assert {q.id for q in tasks[1:]} <= {f"q{i}" for i in range(5)} | {"f"}
  assert check(proposals, pool, slots=5)[1] == tasks
  assert check(proposals, pool, slots=5, seed=1)[1] != tasks
  assert check(proposals, pool, slots=5, iteration=2)[1][1:] != tasks[1:]
  # What an iteration wrote can be drawn from the next one on.
  assert after.questions[-1].id == "1/a/0"
  assert after.questions[-1].origin == "challenger"
  assert report.metrics["pool/size"] == 7
  assert report.metrics["solver/origin/challenger"] == 1
  drawn = [report.metrics[f"solver/origin/{o}"] for o in ("replay", "fixed")]
  assert sum(drawn) == 4


def test_origins_of_what_is_drawn():
  pool = validity.Pool((question("q"),), (question("f", origin="fixed"),))
  tasks = validity.fill([], pool, 9, validity.generator(0, "x"))
  assert {task.id: task.origin for task in tasks} == {
    "q": "replay",
    "f": "fixed",
  }


def test_a_text_is_asked_once_in_an_iteration():
  pool = validity.Pool(
    (question("q0", TEXT.upper()), question("q1", "x"), question("q2", " X "))
  )
  tasks = check([proposal("a")], pool)[1]
  assert [task.id for task in tasks] == ["1/a/0", "q1"]


def test_a_masked_slot_stays_empty():
  pool = validity.Pool((question("q"),))
  _, tasks, _, report = check([proposal("a")], pool, refill="mask")
  assert [task.id for task in tasks] == ["1/a/0"]
  assert report.metrics["pool/empty_slots"] == 3
  with pytest.raises(ValueError, match=r"pool.refill 'resample'.*replay, mask"):
    check([], refill="resample")


@pytest.mark.parametrize(
  ("iteration", "keep_fixed", "left"),
  [
    (1, False, {"q", "f"}),
    (10, False, {"q", "f"}),
    (11, False, set()),
    (21, True, {"f"}),
    (22, True, {"q", "f"}),
  ],
)
def test_the_pool_is_emptied_every_ten_iterations(iteration, keep_fixed, left):
  pool = validity.Pool(
    (question("q"),), (question("f", origin="fixed"),), frozenset({"q", "f"})
  )
  _, tasks, after, _ = check(
    [], pool, iteration=iteration, keep_fixed=keep_fixed
  )
  assert {task.id for task in tasks} == left
  assert {q.id for q in after.questions + after.fixed} == left
  assert after.recorded == left


def test_records_are_remembered_and_the_pool_survives_json():
  pool = validity.Pool((question("q"),), (question("f", origin="fixed"),))
  record = types.FailureRecord(
    "q", "s", "?", ("gold",), "x", (), (), 0, 1, 0.5, (), 0
  )
  elsewhere = dataclasses.replace(record, question_id="z")
  pool = validity.remember(pool, [record, elsewhere])
  assert pool.recorded == {"q"}
  assert validity.Pool.from_json(json.loads(json.dumps(pool.to_json()))) == pool


def test_a_refused_question_takes_the_given_state():
  long = proposal("b", text="Which " + "very " * 12 + "long question is this?")
  named, tasks, *_ = check(
    [proposal("a"), long],
    refused=lambda text: "over_budget" if "very" in text else None,
  )
  assert [p.state for p in named] == ["valid", "over_budget"]
  assert [task.seed_id for task in tasks] == ["a"]
