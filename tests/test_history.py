from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter

import numpy as np
import pytest

from sesa_jax.skills import bank as skill_bank
from sesa_jax.skills import credit, history
from sesa_jax.types import Outcome, Question, Skill


def skill(id, origin="offline", **more) -> Skill:
  made = Skill(id, "c", f"d {id}", "t", "e", "a", ("z",), origin)
  return dataclasses.replace(made, **more)


def born(iteration, event, id, origin="offline"):
  fields = dict(
    category="c",
    description=f"d {id}",
    trigger="t",
    evidence="e",
    avoidance="a",
    templates=["z"],
    origin=origin,
    source_question="",
    source_seed="",
  )
  return dict(iteration=iteration, event=event, skill=id, fields=fields)


def credited(iteration, id, **usage):
  return dict(
    iteration=iteration,
    event="credit",
    skill=id,
    helpful=sum(pair[0] for pair in usage.values()),
    harmful=sum(pair[1] for pair in usage.values()),
    questions=list(usage),
    usage=[list(pair) for pair in usage.values()],
  )


def ranked(iteration, **questions):
  return dict(iteration=iteration, event="rank", skill="", ranked=questions)


# Two primed skills, one shown for q1 and q2 with no success, one for q3 and q4
# with some: the first is retired. Then one more comes, and one is turned away.
STORY = [
  born(0, "prime", "seed-001", "seed"),
  born(0, "prime", "a"),
  born(0, "prime", "b"),
  ranked(1, q1=[1, 0, 2], q2=[1, 2, 0], q3=[2, 0, 1], q4=[2, 1, 0]),
  credited(1, "a", q1=(0, 1), q2=(0, 1)),
  credited(1, "b", q3=(4, 1), q4=(5, 0)),
  dict(iteration=1, event="retire", skill="a", reason="harmful", net=-2.0),
  born(1, "admit", "skill-00001"),
  dict(iteration=1, event="reject", skill="", reason="similar"),
  dict(iteration=3, event="evict", skill="b", reason="capacity", net=8.0),
]


def test_the_bank_after_each_iteration():
  def state(iteration):
    return [
      (row["id"], row["state"], row["retrieved"], row["helpful"])
      for row in history.at(STORY, iteration)
    ]

  assert state(0) == [
    ("seed-001", "active", 0, 0),
    ("a", "active", 0, 0),
    ("b", "active", 0, 0),
  ]
  after = [
    ("seed-001", "active", 0, 0),
    ("a", "retired", 2, 0),
    ("b", "active", 2, 9),
    ("skill-00001", "active", 0, 0),
  ]
  assert state(1) == state(2) == after
  assert state(None)[2] == ("b", "evicted", 2, 9)
  a = history.at(STORY)[1]
  assert (a["reason"], a["harmful"], a["origin"]) == ("harmful", 2, "offline")
  assert history.at(STORY)[3]["created_at"] == 1


def outcome(id, right, total=5) -> Outcome:
  asked = Question(id, "Which?", ("it",), 1 + right % 2, "s", "fixed")
  return Outcome(asked, right, total, total, total - right, ())


class Drawn:
  """A unit vector for each text, drawn by it."""

  dim = 6

  def encode(self, texts, kind):
    rows = np.array(
      [
        np.random.default_rng(list(text.encode())).normal(size=self.dim)
        for text in texts
      ]
    ).reshape(-1, self.dim)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows.astype(np.float32)


def live(seed, rule="majority", capacity=4, iterations=16, primed=3):
  """A run's history, and the bank's rows after each of its iterations.

  Outcomes are drawn without a look at the skills.
  """
  rng, encoder = np.random.default_rng(seed), Drawn()
  bank = skill_bank.create(capacity, encoder.dim)
  skills = [skill("seed-001", "seed")]
  skills += [skill(f"{seed}/{i}") for i in range(1, primed)]
  vectors = encoder.encode([one.description for one in skills], "passage")
  bank, events = skill_bank.prime(bank, skills, vectors)
  past, rows = list(events), [skill_bank.rows(bank)]
  for number in range(1, iterations + 1):
    ids = [f"{seed}/{number}/{q}" for q in range(8)]
    questions = [
      Question(id, f"Which {id}?", ("it",), 1 + q % 2, f"s{q % 3}", "fixed")
      for q, id in enumerate(ids)
    ]
    past += skill_bank.ranking(bank, questions, encoder, number, -0.5)
    shown = skill_bank.top(bank, questions, encoder, 2, -0.5, "exact")
    shown[ids[0]] = shown[ids[0]][:1]  # the block was full
    right = {id: int(rng.integers(6) * (rng.random() < 0.6)) for id in ids}
    outcomes = {id: outcome(id, right[id]) for id in ids[:-1]}
    control = {id: outcome(id, int(rng.integers(3)), 2) for id in ids[1:]}
    bank, done = skill_bank.credit(bank, shown, outcomes, rule, number, control)
    bank, gone = skill_bank.retire(bank, 3, number)
    new = [
      skill("", description=f"{number}.{i}", source_seed=f"s{i}")
      for i in range(number % 4)
    ]
    vectors = encoder.encode([one.description for one in new], "passage")
    bank, came = skill_bank.admit(bank, new, vectors, 0.99, number)
    past += [*done, *gone, *came]
    rows.append(skill_bank.rows(bank))
  return json.loads(json.dumps(past)), rows


@pytest.mark.parametrize("rule", credit.CREDITS)
def test_any_bank_of_a_run_is_rebuilt_exactly(rule):
  past, rows = live(3, rule)
  kinds = {event["event"] for event in past}
  assert {"prime", "rank", "credit", "retire", "admit", "evict"} <= kinds
  for number, expected in enumerate(rows):
    assert history.at(past, number) == expected


def test_a_history_that_began_with_another_runs_bank():
  past, rows = live(3, "control")
  bank = skill_bank.from_rows(rows[-1], Drawn(), capacity=4)
  inherited = skill_bank.inherited(bank, 16)
  assert {event["iteration"] for event in inherited} == {16}
  assert history.at(json.loads(json.dumps(inherited))) == rows[-1]
  both = history.curves(inherited, 17)
  assert both.iterations.tolist() == [16, 17]
  active = sum(row["state"] == "active" for row in rows[-1])
  assert both.active.tolist() == [active, active]
  assert both.active[0] < len(inherited)
  again = history.replay(
    inherited,
    capacity=4,
    retire_after=99,
    order=lambda questions, _: np.arange(questions)[None],
  )
  assert again.active.tolist() == [[active]]


@pytest.mark.parametrize("event", [STORY[1], STORY[4], STORY[6]])
def test_an_older_history_is_refused(event):
  old = {k: v for k, v in event.items() if k != "fields"}
  with pytest.raises(ValueError, match="skill 'a', but not what it is"):
    history.at([old])


def test_effects_are_of_questions_tried_without_skills():
  past = [
    credited(1, "a", q1=(1, 0)) | dict(differences=[0.5]),
    credited(2, "a", q1=(1, 0), q2=(0, 1)) | dict(differences=[None, -0.1]),
    credited(2, "b", q1=(1, 0)) | dict(differences=[None]),
    credited(3, "c", q1=(1, 0)),
  ]
  (found,) = history.effects(past).items()
  assert found == ("a", credit.Effect(pytest.approx(0.2), None, None, 2))


# --- curves ----------------------------------------------------------------


def test_curves_by_hand():
  found = history.curves(STORY, 4)
  assert found.iterations.tolist() == [0, 1, 2, 3, 4]
  assert found.active.tolist() == [3, 3, 3, 2, 2]
  assert found.admitted.tolist() == [0, 1, 1, 1, 1]
  assert found.retired.tolist() == [0, 1, 1, 1, 1]
  assert found.evicted.tolist() == [0, 0, 0, 1, 1]


def test_deals_are_permutations_by_key():
  dealt = history.deal(3, 6000, seed=1, iteration=2)
  counts = Counter(map(tuple, dealt.tolist()))
  assert counts.keys() == set(itertools.permutations(range(3)))
  # 1000 expected of each, with a deviation of 29.
  assert all(850 < count < 1150 for count in counts.values())
  again = history.deal(3, 6000, seed=1, iteration=2)
  np.testing.assert_array_equal(dealt, again)
  for other in (dict(seed=2, iteration=2), dict(seed=1, iteration=3)):
    assert (history.deal(3, 6000, **other) != dealt).any()


@pytest.mark.parametrize("rule", credit.CREDITS)
@pytest.mark.parametrize("seed", [3, 4])
def test_a_replay_without_a_permutation_is_the_run(rule, seed):
  past, rows = live(seed, rule)
  states = [[row["state"] for row in after] for after in rows]
  same = history.replay(
    past,
    capacity=4,
    retire_after=3,
    order=lambda questions, _: np.arange(questions)[None],
  )
  run = history.curves(past)
  assert run.retired[-1]
  assert run.evicted[-1]
  for name in ("active", "retired", "evicted"):
    np.testing.assert_array_equal(getattr(same, name)[0], getattr(run, name))
  for name, state in dict(active="active", retired="retired").items():
    counted = [after.count(state) for after in states]
    assert getattr(run, name).tolist() == counted
  np.testing.assert_array_equal(same.admitted, run.admitted)


def dealt(past, *orders, capacity=9, retire_after=2):
  found = history.replay(
    past,
    capacity=capacity,
    retire_after=retire_after,
    order=lambda questions, _: np.array(orders)[:, :questions],
  )
  return list(zip(found.active.tolist(), found.retired.tolist(), strict=True))


def test_outcomes_go_over_to_other_skills():
  gone, stays = ([3, 3, 3, 3], [0, 1, 1, 1]), ([3, 4, 4, 4], [0, 0, 0, 0])
  orders = [
    (0, 1, 2, 3),  # a, as it was
    (2, 3, 0, 1),  # b in its place
    (2, 1, 0, 3),  # each has a success
    (2, 3, 2, 3),
  ]
  assert dealt(STORY, *orders) == [gone, gone, stays, stays]


def test_a_replay_shows_what_it_has():
  past = [
    *(born(0, "prime", id) for id in "abc"),
    ranked(1, q1=[0, 1, 2], q2=[1, 2, 0]),
    credited(1, "a", q1=(0, 1)),
    credited(1, "b", q2=(1, 0)),
    dict(iteration=1, event="retire", skill="a", reason="harmful", net=-1.0),
    # The run has a no more, so b is shown for both.
    ranked(2, q1=[0, 1, 2], q2=[1, 0, 2]),
    credited(2, "b", q1=(0, 3), q2=(0, 3)),
  ]
  orders = [(0, 1), (1, 0)]
  assert dealt(past, *orders, retire_after=1) == [
    ([3, 2, 1], [0, 1, 2]),
    # Here b went in the first, and a is shown in its place.
    ([3, 2, 1], [0, 1, 2]),
  ]
  # Of one question two skills are shown, the second where the first is gone.
  past[3:] = [
    ranked(1, q1=[0, 1, 2], q2=[0, 2, 1]),
    credited(1, "a", q1=(0, 1), q2=(0, 1)),
    ranked(2, q1=[0, 1, 2], q2=[1, 0, 2]),
    credited(2, "b", q1=(0, 3), q2=(1, 0)),
    credited(2, "c", q1=(0, 3)),
  ]
  # q1 shows b and c, q2 b alone: b has -2, c -3.
  assert dealt(past, (0, 1), retire_after=1) == [([3, 2, 0], [0, 1, 3])]
  # Exchanged: c has the outcome of q2, 1.
  assert dealt(past, (1, 0), retire_after=1) == [([3, 2, 1], [0, 1, 2])]


def test_a_ranking_that_ends_shows_no_more():
  past = [
    *(born(0, "prime", id) for id in "ab"),
    ranked(1, q1=[0, 1], q2=[0]),
    credited(1, "a", q1=(1, 0), q2=(0, 9)),
    credited(1, "b", q2=(0, 9)),
  ]
  assert dealt(past, (0, 1), retire_after=1) == [([2, 1], [0, 1])]


def test_seeds_stay_in_a_replay():
  past = [
    born(0, "prime", "seed-001", "seed"),
    born(0, "prime", "a"),
    ranked(1, q1=[0, 1], q2=[1, 0]),
    credited(1, "seed-001", q1=(0, 9)),
    credited(1, "a", q2=(0, 9)),
  ]
  assert dealt(past, (0, 1), retire_after=1) == [([2, 1], [0, 1])]


def test_a_bank_that_is_full_evicts_in_a_replay_too():
  past = [
    born(0, "prime", "seed-001", "seed"),
    born(0, "prime", "a"),
    born(0, "prime", "b"),
    ranked(1, q1=[1, 2], q2=[2, 1]),
    credited(1, "a", q1=(3, 0)),
    credited(1, "b", q2=(1, 0)),
    born(1, "admit", "c"),
    # Nobody but a is shown for either, so that it fails where it still is.
    ranked(2, q1=[1], q2=[1]),
    credited(2, "a", q1=(0, 9), q2=(0, 9)),
  ]
  found = dealt(past, (0, 1), (1, 0), (0, 0), capacity=3)
  # The lower goes, b, then a; of equals the older, a.
  assert found == [([3, 3, 2], [0, 0, 1]), ([3, 3, 3], [0] * 3)] + [
    ([3, 3, 3], [0] * 3)
  ]


def test_the_null_curve_of_useless_and_of_harmful_skills():
  # Skill `bad` fails every time, nine others never: the run retires just it.
  ids = [f"s{i}" for i in range(9)] + ["bad"]
  past = [born(0, "prime", id) for id in ids]
  for t in range(1, 4):
    past.append(ranked(t, **{f"q{i}": [i] for i in range(10)}))
    for i, id in enumerate(ids):
      pair = (0, 1) if id == "bad" else (1, 0)
      past.append(credited(t, id, **{f"q{i}": pair}))
  past.append(
    dict(iteration=3, event="retire", skill="bad", reason="harmful", net=-3)
  )
  null = history.null_curves(past, capacity=99, retire_after=3, draws=400)
  run = history.curves(past)
  assert null.active.shape == (400, 4)
  assert run.retired.tolist() == [0, 0, 0, 1]
  # By hand: a skill goes if at least two of three failures are dealt to it.
  # One of ten gets one in each: P(2 or 3 of 3) = 3 * .01 * .9 + .001 = .028 a
  # skill, of ten .28 in the mean, with a deviation of .022 over 400 draws.
  assert null.retired[:, 3].mean() == pytest.approx(0.28, abs=0.07)
  again = history.null_curves(past, capacity=99, retire_after=3, draws=400)
  np.testing.assert_array_equal(null.active, again.active)
  other = history.null_curves(
    past, capacity=99, retire_after=3, draws=400, seed=1
  )
  assert (null.active != other.active).any()


def test_runs_of_noise_are_like_their_replays():
  distances = []
  for seed in range(5):
    past, _ = live(seed, capacity=40, iterations=12, primed=24)
    null = history.null_curves(past, capacity=40, retire_after=3, draws=40)
    run = history.curves(past)
    spread = null.retired[:, -1].std()
    distances.append((run.retired[-1] - null.retired[:, -1].mean()) / spread)
  # Five normal distances have a mean within .45 of 0, one deviation.
  assert abs(np.mean(distances)) < 1, distances
  assert max(map(abs, distances)) < 3, distances


@pytest.mark.parametrize("lacking", ["usage", "rank"])
def test_a_history_without_what_is_permuted_has_no_null_curve(lacking):
  old = [
    {key: value for key, value in event.items() if key != lacking}
    for event in STORY
    if event["event"] != lacking
  ]
  with pytest.raises(ValueError, match="no rankings of iteration 1, or not"):
    history.null_curves(old, capacity=9, retire_after=3)
  history.curves(old)
