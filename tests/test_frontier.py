import itertools
import math

import beartype
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import jaxtyped

from sesa_jax import types
from sesa_jax.language import English
from sesa_jax.stages import frontier, validity

RIGHT, WRONG, UNKNOWN = types.Verdict
KEYWORDS = dict(
  iteration=3,
  group_size=5,
  reward="bell",
  low=0.0,
  high=1.0,
  endpoint_penalty=0.1,
  invalid="endpoint",
  invalid_penalty=0.3,
  solver_baseline="group",
  challenger_baseline="batch",
  std_epsilon=1e-6,
  gate="frontier",
  min_right=1,
  min_wrong=1,
  passage_tokens=1500,
  count_tokens=lambda text: len(text.split()),
  language=English(),
)

# method.md's tables for five attempts, none to all of them right.
TABLES = {
  "bell": [-0.1, 0.64, 0.96, 0.96, 0.64, -0.1],
  "bell_zero": [0, 0.64, 0.96, 0.96, 0.64, 0],
  "failure": [1, 0.8, 0.6, 0.4, 0.2, 0],
  "dr_zero": [0, 1, 0.75, 0.5, 0.25, 0],
  "r_zero": [0, 0.4, 0.8, 0.8, 0.4, 0],
  "absolute_zero": [0, 0.8, 0.6, 0.4, 0.2, 0],
  "spice": [0.044, 0.667, 0.995, 0.995, 0.667, 0.044],
}


def episode(name="q", attempt=0, passages=1, finish="answer", arm="solver"):
  turn = types.Turn(
    0,
    1,
    1,
    "",
    "search",
    "query",
    tuple(
      types.Passage(f"{name}/{attempt}/{i}", "Title", f"text {i}")
      for i in range(passages)
    ),
    "",
  )
  return types.Episode(
    request_id=name,
    attempt=attempt,
    arm=arm,
    ids=np.zeros(2, np.int32),
    prompt_length=1,
    mask=np.array([False, True]),
    logprobs=np.zeros(2, np.float32),
    turns=(turn,),
    finish=finish,
  )


def question(name="q", hops=1, origin="challenger"):
  return types.Question(name, f"What is {name}?", ("gold",), hops, "s", origin)


def attempts(verdicts, name="q", predictions=None, passages=1, **kwargs):
  """One for each letter: right, wrong, unknown, malformed."""
  made = []
  for i, letter in enumerate(verdicts):
    prediction = {"r": "gold", "w": "lead", "u": "x", "m": None}[letter]
    made.append(
      types.Attempt(
        question(name, **kwargs),
        episode(name, i, passages),
        predictions[i] if predictions else prediction,
        {"r": RIGHT, "u": UNKNOWN}.get(letter, WRONG),
        ("skill-1",),
      )
    )
  return made


def proposal(name="q", state="valid", hops=1):
  return types.Proposal(
    types.Seed(f"seed-{name}", ("gold",), hops),
    0,
    episode(f"3/seed-{name}", arm="challenger"),
    "text",
    state,
    question_id=name,
  )


def shape(proposals, tries, **changes):
  return frontier.shape(proposals, tries, **(KEYWORDS | changes))


# --- rewards ----------------------------------------------------------------


@pytest.mark.parametrize("name", frontier.REWARDS)
def test_rewards_of_five_attempts(name, monkeypatch):
  checked = jaxtyped(typechecker=beartype.beartype)(frontier.REWARDS[name])
  monkeypatch.setitem(frontier.REWARDS, name, checked)
  bounds = dict(low=0.0, high=1.0, endpoint_penalty=0.1)
  frontier.table.cache_clear()
  pay = frontier.curve(name, **bounds)
  got = pay(np.arange(6), np.full(6, 5))
  np.testing.assert_allclose(got, TABLES[name], atol=5e-4)
  compiled = frontier.table(name, 5, **bounds)
  np.testing.assert_allclose(compiled, got, rtol=1e-12)
  assert compiled is frontier.table(name, 5, **bounds)  # once in a run


def test_the_bell_between_other_ends():
  pay = frontier.curve("bell", low=0.2, high=0.8, endpoint_penalty=0.5)
  got = pay(np.arange(11), np.full(11, 10))
  expected = [-0.5] * 3 + [5 / 9, 8 / 9, 1, 8 / 9, 5 / 9] + [-0.5] * 3
  np.testing.assert_allclose(got, expected, atol=1e-9)
  zero = frontier.curve("bell_zero", low=0.2, high=0.8, endpoint_penalty=0.5)
  assert zero(np.array([1, 9]), np.array([10, 10])).tolist() == [0, 0]


def test_an_unknown_reward_lists_the_choices():
  with pytest.raises(ValueError, match="'bel'") as error:
    frontier.curve("bel", low=0.0, high=1.0, endpoint_penalty=0.1)
  assert all(name in str(error.value) for name in TABLES)
  with pytest.raises(ValueError, match=r"low = 0.5 and frontier.high = 0.5"):
    frontier.curve("bell", low=0.5, high=0.5, endpoint_penalty=0.1)


@pytest.mark.parametrize(
  ("field", "name"), [("invalid", "endpoint, mask"), ("gate", "any_failure")]
)
def test_other_unknown_choices_list_theirs(field, name):
  values = dict(reward="bell", invalid="mask", gate="off", low=0.0, high=1.0)
  frontier.check(**values)
  with pytest.raises(ValueError, match=name):
    frontier.check(**(values | {field: "nonsense"}))


# --- proposals --------------------------------------------------------------

GROUPS = {"a": "rwwww", "b": "rrrrr", "c": "wwwww", "d": "rrwwu"}


def played():
  return [a for name, word in GROUPS.items() for a in attempts(word, name)]


@pytest.mark.parametrize(
  ("invalid", "broken"),
  [("endpoint", -0.1), ("mask", None), ("zero", 0), ("penalty", -0.3)],
)
def test_each_proposal_is_paid_for_the_question_it_became(invalid, broken):
  proposals = [
    *(proposal(name) for name in "cbad"),
    proposal("e", "evidence"),
    proposal("f", "unverified"),
    proposal("g"),  # valid, but never played
  ]
  edge = shape(proposals, played(), invalid=invalid)
  expected = (-0.1, -0.1, 0.64, None, broken, None, None)
  assert edge.rewards == pytest.approx(expected)
  kept = [r for r in expected if r is not None]
  assert [lesson.episode.request_id for lesson in edge.proposals] == [
    p.episode.request_id
    for p, r in zip(proposals, expected, strict=True)
    if r is not None
  ]
  deviation = np.std(kept, ddof=1)
  got = [lesson.advantage for lesson in edge.proposals]
  np.testing.assert_allclose(got, (kept - np.mean(kept)) / deviation, rtol=1e-4)
  assert edge.report.metrics["challenger/out"] == 7 - len(kept)


def test_proposals_may_be_compared_within_their_hops():
  proposals = [
    proposal("a", hops=1),
    proposal("b", hops=2),
    proposal("c", hops=1),
    proposal("e", "evidence", hops=2),
  ]
  edge = shape(proposals, played(), challenger_baseline="hop")
  # One hop: .64 and -.1. Two: -.1 and -.1, which are equal.
  half = 0.5**0.5
  got = [lesson.advantage for lesson in edge.proposals]
  np.testing.assert_allclose(got, [half, 0, -half, 0], atol=1e-4)


def test_success_is_that_of_the_challengers_questions():
  tries = attempts("rwwww", "a") + attempts("rrrrr", "f", origin="fixed")
  found = shape([proposal("a")], tries).report.metrics
  assert found["challenger/success/mean"] == pytest.approx(0.2)
  assert found["solver/reward/mean"] == pytest.approx(0.6)


states = st.sampled_from(["valid", "evidence", "length", "unverified"])


@given(
  st.lists(st.tuples(states, st.integers(0, 5)), max_size=8),
  st.integers(1, 4),
  st.floats(0, 2),
  st.sampled_from(["batch", "hop"]),
)
def test_under_endpoint_the_invalid_lose_and_lose_like_endpoints(
  mixture, right, penalty, baseline
):
  """In every mixture with a frontier proposal."""
  mixture = [*mixture, ("valid", right), ("length", 0)]
  names = [f"q{i}" for i in range(len(mixture))]
  proposals = [
    proposal(name, state)
    for name, (state, _) in zip(names, mixture, strict=True)
  ]
  tries = [
    a
    for name, (state, k) in zip(names, mixture, strict=True)
    if state == "valid"
    for a in attempts("r" * k + "w" * (5 - k), name)
  ]
  edge = shape(
    proposals, tries, endpoint_penalty=penalty, challenger_baseline=baseline
  )
  found = {
    lesson.episode.request_id.removeprefix("3/seed-"): lesson.advantage
    for lesson in edge.proposals
  }
  lost = {
    found[name]
    for name, (state, k) in zip(names, mixture, strict=True)
    if state in ("evidence", "length") or (state == "valid" and k in (0, 5))
  }
  assert len(lost) == 1
  assert lost.pop() < 0
  assert not any(
    name in found
    for name, (state, _) in zip(names, mixture, strict=True)
    if state == "unverified"
  )


def test_a_question_without_an_id_is_our_own_bug():
  with pytest.raises(AssertionError):
    shape([proposal("")], played())


# --- attempts ---------------------------------------------------------------


def test_the_solver_learns_from_questions_with_all_verdicts():
  tries = [
    *attempts("rrwww", "a"),
    *attempts("rruww", "b"),  # out as a whole
    *attempts("rrrr", "c"),  # one attempt never came back
    *attempts("rrrrr", "d", origin="replay"),
    *attempts("rmmww", "e", origin="fixed", hops=2),
  ]
  edge = shape([proposal("a")], tries[::-1])
  assert [o.question.id for o in edge.outcomes] == ["e", "d", "a"]
  found = {(o.question.id, o.right, o.total) for o in edge.outcomes}
  assert found == {("a", 2, 5), ("d", 5, 5), ("e", 1, 5)}
  (e, _, a) = edge.outcomes
  assert (a.success, a.wrong, a.answered) == (0.4, 3, 5)
  assert (e.success, e.wrong, e.answered) == (0.2, 2, 3)
  advantages = {
    (lesson.episode.request_id, lesson.episode.attempt): lesson.advantage
    for lesson in edge.attempts
  }
  assert len(advantages) == 15
  # [1, 1, 0, 0, 0]: mean .4, sample std sqrt(.3).
  assert advantages["a", 0] == pytest.approx(0.6 / math.sqrt(0.3), rel=1e-5)
  assert advantages["a", 4] == pytest.approx(-0.4 / math.sqrt(0.3), rel=1e-5)
  assert {advantages["d", i] for i in range(5)} == {0}
  metrics = edge.report.metrics
  assert metrics["solver/questions"] == 3
  assert metrics["solver/questions_unknown"] == 2
  assert metrics["solver/informative_groups"] == pytest.approx(2 / 3)
  assert metrics["solver/reward/mean"] == pytest.approx(8 / 15)
  assert metrics["solver/success/answered"] == pytest.approx(8 / 13)
  assert metrics["challenger/success/mean"] == pytest.approx(0.4)
  # Nobody is paid for the others.
  assert edge.rewards == (pytest.approx(0.96),)


def test_nothing_at_all_is_a_report_without_means():
  edge = shape([proposal("a", "unverified")], attempts("uuuuu", "a"))
  assert edge.attempts == edge.proposals == edge.failures == ()
  assert all(math.isfinite(value) for value in edge.report.metrics.values())
  assert "solver/reward/mean" not in edge.report.metrics


# --- the gate and its records -----------------------------------------------


def test_the_gate_in_every_case():
  for right, wrong in itertools.product(range(6), range(6)):
    for gate, expected in {
      "frontier": right >= 2 and wrong >= 3,
      "any_failure": wrong >= 1,
      "off": False,
    }.items():
      got = frontier.passes(gate, right, wrong, min_right=2, min_wrong=3)
      assert got == expected
  # Without a wrong answer there is nothing to write down.
  assert not frontier.passes("frontier", 5, 0, min_right=1, min_wrong=0)
  assert frontier.passes("frontier", 4, 1, min_right=1, min_wrong=0)
  with pytest.raises(ValueError, match="frontier, any_failure, off"):
    frontier.passes("on", 1, 1, min_right=1, min_wrong=1)


@pytest.mark.parametrize(
  ("word", "passages", "gate", "recorded"),
  [
    ("rrwww", 1, "frontier", True),
    ("rrwww", 0, "frontier", False),  # no passage: not substantively wrong
    ("rrmmm", 1, "frontier", False),  # no complete answer
    ("rrrrr", 1, "frontier", False),
    ("wwwww", 1, "frontier", False),
    ("rrwwu", 1, "frontier", False),  # one verdict is missing
    ("wwwww", 1, "any_failure", True),
    ("mmmmm", 1, "any_failure", False),
    ("rrwww", 1, "off", False),
  ],
)
def test_what_leaves_a_record(word, passages, gate, recorded):
  edge = shape([], attempts(word, passages=passages), gate=gate)
  assert bool(edge.failures) == recorded
  assert edge.report.metrics["frontier/recorded"] == recorded


def test_no_second_record_of_a_question():
  tries = attempts("rrwww", "a", origin="replay") + attempts("rrwww", "b")
  edge = shape([], tries, recorded={"a"})
  assert [record.question_id for record in edge.failures] == ["b"]
  assert len(edge.attempts) == 10


def test_a_record_holds_the_most_frequent_wrong_answer():
  answers = ["Rome", "gold", "The Oslo", None, "oslo!"]
  tries = attempts("wrwmw", predictions=answers, passages=3)
  (record,) = shape([], tries[::-1]).failures
  assert record.prediction == "The Oslo"
  assert record.other_predictions == ("Rome",)
  assert [p.id for p in record.passages] == ["q/2/0", "q/2/1", "q/2/2"]
  assert (record.passages_seen, record.wrong_attempts) == (3, 3)
  assert (record.success_rate, record.iteration) == (0.2, 3)
  assert (record.question_id, record.seed_id) == ("q", "s")
  assert (record.question, record.targets) == ("What is q?", ("gold",))
  assert record.skill_ids == ("skill-1",)


def test_right_attempts_are_kept_for_contrast_alone():
  tries = attempts("wrrwr", passages=3)
  keywords = dict(passage_tokens=7)  # of each: two words a passage, and a title
  (record,) = shape([], tries, **keywords).failures
  assert record.right == ()
  (record,) = shape([], tries[::-1], contrast=True, **keywords).failures
  assert [right.queries for right in record.right] == [("query",)] * 2
  assert [[p.id for p in right.passages] for right in record.right] == [
    ["q/1/0", "q/1/1"],
    ["q/2/0", "q/2/1"],
  ]


def test_of_equally_frequent_answers_the_lowest_attempt_is_recorded():
  answers = ["gold", "Rome", "Oslo", "Oslo", "Rome"]
  (record,) = shape([], attempts("rwwww", predictions=answers)).failures
  assert record.prediction == "Rome"
  assert record.passages[0].id == "q/1/0"


@pytest.mark.parametrize(
  ("tokens", "texts"),
  [
    (0, []),
    (1, []),  # a title alone says nothing
    (2, ["a"]),
    (4, ["a b c"]),
    (6, ["a b c", "d"]),
    (7, ["a b c", "d e"]),
    (99, ["a b c", "d e"]),
  ],
)
def test_passages_are_cut_to_a_budget_of_tokens(tokens, texts):
  passages = [types.Passage("1", "T", "a b c"), types.Passage("2", "T", "d e")]
  got = frontier.cut(passages, tokens, lambda text: len(text.split()))
  assert [passage.text for passage in got] == texts


def test_both_stages_name_the_same_states():
  assert frontier.VALID in validity.STATES
  assert frontier.UNVERIFIED in validity.STATES


# --- the control --------------------------------------------------------------


def test_permuted_rewards_are_as_many_and_say_nothing():
  """What is recorded is what was earned; who learns from it is drawn by key."""
  tries = played()[:15]  # three questions, all of them judged
  proposals = [*(proposal(name) for name in "abc"), proposal("e", "evidence")]
  plain = shape(proposals, tries)
  earned = np.array([a.verdict is RIGHT for a in tries], float)
  pairs, orders = [], set()
  for iteration in range(1, 301):
    edge = shape(proposals, tries, permuted=True, seed=7, iteration=iteration)
    again = shape(proposals, tries, permuted=True, seed=7, iteration=iteration)
    found = np.array([x.advantage for x in edge.attempts])
    assert [x.advantage for x in again.attempts] == found.tolist()
    assert [x.episode for x in edge.attempts] == [
      x.episode for x in plain.attempts
    ]
    orders.add(tuple(found))
    pairs.append([found @ earned, *(x.advantage for x in edge.proposals)])
    assert edge.rewards == plain.rewards
    assert edge.outcomes == plain.outcomes
    assert edge.report.metrics["solver/reward/mean"] == 6 / 15
    posed = sorted(x.advantage for x in edge.proposals)
    assert posed == pytest.approx(sorted(x.advantage for x in plain.proposals))
  assert len(orders) > 250
  other = shape(proposals, tries, permuted=True, seed=8, iteration=300)
  assert [x.advantage for x in other.attempts] != found.tolist()
  mean, error = np.mean(pairs, 0), np.std(pairs, 0) / 300**0.5
  assert (abs(mean) < 3.5 * error).all(), (mean, error)
  kept = np.array([x.advantage for x in plain.attempts])
  assert kept @ earned > 1.5  # as earned the same sum is far from 0
