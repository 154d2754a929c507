"""Stage 3, frontier shaping: what an outcome is worth, and what is kept of it.

The challenger is paid for questions that the solver sometimes answers, the
solver for right answers; failures at the frontier are recorded for the bank.
Everything here is a pure function of proposals and attempts.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from sesa_jax import distributed, types
from sesa_jax.language import Language
from sesa_jax.learner import grpo

VALID, UNVERIFIED = "valid", "unverified"  # of `Proposal.state`

Count = Int[np.ndarray | jax.Array, "..."]
Reward = Float[np.ndarray | jax.Array, "..."]


# --- what a success rate pays the challenger, k right of n ------------------
#
# Of numpy's arrays or jax's: `table` compiles them.


def failure(right: Count, total: Count) -> Reward:
  """1 - k/n: the harder, the better (SSP, arXiv:2510.18821)."""
  return 1 - right / total


def bell(
  right: Count,
  total: Count,
  *,
  low: float,
  high: float,
  endpoint_penalty: float,
) -> Reward:
  """Pays most for a coin toss (SESA, arXiv:2607.29468).

  4 (p - low)(high - p) / (high - low)^2   if low < p < high, p = k/n
  -endpoint_penalty                        otherwise
  """
  p = right / total
  inside = 4 * (p - low) * (high - p) / (high - low) ** 2
  xp = p.__array_namespace__()
  return xp.where((low < p) & (p < high), inside, 0.0 - endpoint_penalty)


def bell_zero(right: Count, total: Count, *, low: float, high: float) -> Reward:
  """The bell with 0 at and beyond its ends (an option of SSP's code)."""
  return bell(right, total, low=low, high=high, endpoint_penalty=0.0)


def dr_zero(right: Count, total: Count) -> Reward:
  """(n - k)/(n - 1) if 0 < k < n, else 0: the hardest solvable (Dr. Zero)."""
  xp = total.__array_namespace__()
  inside = (0 < right) & (right < total)
  return xp.where(inside, (total - right) / xp.maximum(total - 1, 1), 0.0)


def r_zero(right: Count, total: Count) -> Reward:
  """1 - 2 |k/n - 1/2| (R-Zero, arXiv:2508.05004)."""
  return 1 - 2 * abs(right / total - 0.5)


def absolute_zero(right: Count, total: Count) -> Reward:
  """1 - k/n if k > 0, else 0 (Absolute Zero, arXiv:2505.03335)."""
  xp = right.__array_namespace__()
  return xp.where(right > 0, 1 - right / total, 0.0)


def spice(right: Count, total: Count) -> Reward:
  """exp(-(v - 1/4)^2 / 0.02), v = p (1 - p), p = k/n.

  Source: SPICE, arXiv:2510.24684.
  """
  p = right / total
  xp = p.__array_namespace__()
  return xp.exp(-((p * (1 - p) - 0.25) ** 2) / 0.02)


REWARDS = {
  "bell": bell,
  "bell_zero": bell_zero,
  "failure": failure,
  "dr_zero": dr_zero,
  "r_zero": r_zero,
  "absolute_zero": absolute_zero,
  "spice": spice,
}
INVALID = ("endpoint", "mask", "zero", "penalty")
GATES = ("frontier", "any_failure", "off")
RIGHT = 2  # right attempts that a record holds at most, for contrast


def curve(
  name: str, *, low: float, high: float, endpoint_penalty: float
) -> Callable[[Count, Count], Reward]:
  """Returns the reward (right, total) of a name.

  Args:
    name: one of `REWARDS`.
    low: success rate at which the bells begin.
    high: success rate at which the bells end.
    endpoint_penalty: of `bell` alone.

  Raises:
    ValueError: the name is unknown, or not 0 <= low < high <= 1.
  """
  grpo.one_of("frontier.reward", name, REWARDS)
  if not 0 <= low < high <= 1:
    raise ValueError(
      f"frontier.low = {low} and frontier.high = {high} must satisfy "
      "0 <= low < high <= 1."
    )
  keywords = {
    "bell": dict(low=low, high=high, endpoint_penalty=endpoint_penalty),
    "bell_zero": dict(low=low, high=high),
  }.get(name, {})
  return functools.partial(REWARDS[name], **keywords)


@functools.cache
def table(
  name: str, total: int, *, low: float, high: float, endpoint_penalty: float
) -> tuple[float, ...]:
  """Returns what k = 0, .., n right attempts of n = total pay.

  Compiled, once in a run: all groups have one size. On the host and in float64,
  since a chip's division may put n/n inside the bell.

  Args:
    name: see `curve`, as the keywords.
    total: attempts at a question.
    low: see `curve`.
    high: see `curve`.
    endpoint_penalty: see `curve`.
  """
  pay = curve(name, low=low, high=high, endpoint_penalty=endpoint_penalty)
  with jax.default_device(distributed.host_cpu()), jax.enable_x64(True):
    right = jnp.arange(total + 1)
    return tuple(jax.jit(pay)(right, jnp.full_like(right, total)).tolist())


def check(*, reward: str, invalid: str, gate: str, low: float, high: float):
  """Refuses what `shape` would refuse, before anything is loaded.

  Raises:
    ValueError: an unknown choice, or bounds that are not in order.
  """
  curve(reward, low=low, high=high, endpoint_penalty=0.0)
  grpo.one_of("challenger.invalid", invalid, INVALID)
  grpo.one_of("frontier.gate", gate, GATES)


# --- what became of a question ---------------------------------------------


@dataclasses.dataclass(frozen=True)
class Edge:
  """What the frontier teaches: whom, with what advantage, and the bank."""

  proposals: tuple[types.Lesson, ...]  # for the challenger
  attempts: tuple[types.Lesson, ...]  # for the solver
  outcomes: tuple[types.Outcome, ...]  # in the order of the questions
  failures: tuple[types.FailureRecord, ...]
  rewards: tuple[float | None, ...]  # of each proposal; None is out
  report: types.Report


def substantively_wrong(attempt: types.Attempt) -> bool:
  """Says whether it saw a passage, answered in full, and was wrong."""
  return (
    attempt.verdict is types.Verdict.WRONG
    and attempt.prediction is not None
    and bool(attempt.episode.passages)
  )


def judged(
  attempts: Sequence[types.Attempt], group_size: int
) -> dict[str, list[types.Attempt]]:
  """Groups attempts by question id, without questions that lack a verdict.

  A question with an UNKNOWN attempt, or with fewer than `group_size`, is out as
  a whole: exact match finds right answers first, so what an outage leaves over
  looks easy.
  """
  groups: dict[str, list[types.Attempt]] = {}
  for attempt in attempts:
    groups.setdefault(attempt.question.id, []).append(attempt)
  return {
    key: sorted(group, key=lambda attempt: attempt.episode.attempt)
    for key, group in groups.items()
    if len(group) == group_size
    and all(a.verdict is not types.Verdict.UNKNOWN for a in group)
  }


def outcome(group: Sequence[types.Attempt]) -> types.Outcome:
  """Counts a question's attempts."""
  return types.Outcome(
    question=group[0].question,
    right=sum(a.verdict is types.Verdict.RIGHT for a in group),
    total=len(group),
    answered=sum(a.prediction is not None for a in group),
    wrong=sum(map(substantively_wrong, group)),
    skill_ids=group[0].skill_ids,
  )


def passes(
  gate: str, right: int, wrong: int, *, min_right: int, min_wrong: int
) -> bool:
  """Says whether a question's failure is recorded.

  Args:
    gate: `frontier` wants at least min_right right and min_wrong substantively
      wrong attempts; `any_failure` one substantively wrong; `off` nothing.
    right: attempts that are right.
    wrong: attempts that are substantively wrong.
    min_right: for `frontier`.
    min_wrong: for `frontier`.

  Raises:
    ValueError: the gate is unknown.
  """
  grpo.one_of("frontier.gate", gate, GATES)
  if gate == "off":
    return False
  if gate == "any_failure":
    return wrong >= 1
  return right >= min_right and wrong >= max(min_wrong, 1)


def record(
  group: Sequence[types.Attempt],
  *,
  iteration: int,
  passage_tokens: int,
  count_tokens: Callable[[str], int],
  language: Language,
  contrast: bool = False,
) -> types.FailureRecord:
  """Writes down a question's most frequent wrong answer, and its passages.

  Predictions are compared normalised. The record's text and passages are those
  of the lowest attempt that gave the answer; of equally frequent answers, the
  one with the lowest attempt.

  Args:
    group: a question's attempts by number, one of them substantively wrong.
    iteration: of the run.
    passage_tokens: to which the passages are cut, titles included.
    count_tokens: of a text.
    language: normalises predictions.
    contrast: the first RIGHT right attempts are kept too.
  """
  firsts: dict[str, types.Attempt] = {}
  times: Counter[str] = Counter()
  for attempt in filter(substantively_wrong, group):
    key = language.normalize_answer(attempt.prediction)
    firsts.setdefault(key, attempt)
    times[key] += 1
  worst = firsts[max(firsts, key=times.__getitem__)]  # max keeps the first
  seen = worst.episode.passages
  found = outcome(group)
  return types.FailureRecord(
    question_id=found.question.id,
    seed_id=found.question.seed_id,
    question=found.question.text,
    targets=found.question.targets,
    prediction=worst.prediction,
    other_predictions=tuple(
      a.prediction for a in firsts.values() if a is not worst
    ),
    passages=cut(seen, passage_tokens, count_tokens),
    passages_seen=len(seen),
    wrong_attempts=found.wrong,
    success_rate=found.success,
    skill_ids=worst.skill_ids,
    iteration=iteration,
    right=tuple(
      types.RightAttempt(
        tuple(t.argument for t in a.episode.turns if t.action == "search"),
        cut(a.episode.passages, passage_tokens, count_tokens),
      )
      for a in group
      if contrast and a.verdict is types.Verdict.RIGHT
    )[:RIGHT],
  )


def cut(
  passages: Sequence[types.Passage],
  tokens: int,
  count_tokens: Callable[[str], int],
) -> tuple[types.Passage, ...]:
  """Keeps the first `tokens` tokens of passages, the last one cut at a word."""
  kept, left = [], tokens
  for passage in passages:
    size = count_tokens(passage.title) + count_tokens(passage.text)
    if size <= left:
      kept.append(passage)
      left -= size
      continue
    words = passage.text.split()
    room = left - count_tokens(passage.title)
    fitting = bisect.bisect_right(
      range(1, len(words) + 1),
      room,
      key=lambda n, words=words: count_tokens(" ".join(words[:n])),
    )
    if fitting:
      text = " ".join(words[:fitting])
      kept.append(dataclasses.replace(passage, text=text))
    break
  return tuple(kept)


def proposal_rewards(
  proposals: Sequence[types.Proposal],
  outcomes: Collection[types.Outcome],
  pay: Callable[[int], Sequence[float]],
  *,
  invalid: str,
  endpoint_penalty: float,
  invalid_penalty: float,
) -> list[float | None]:
  """Pays each proposal for the question that it became.

  Args:
    proposals: with their states decided.
    outcomes: of questions; those of no proposal pay nobody.
    pay: from n, the row of `table`.
    invalid: what a proposal that broke a rule gets: `endpoint`
      -endpoint_penalty, `zero` 0, `penalty` -invalid_penalty; `mask` leaves it
      out of loss and baseline.
    endpoint_penalty: for `endpoint`.
    invalid_penalty: for `penalty`.

  Returns:
    A reward each; None for what is out: unverified, or without all verdicts.

  Raises:
    ValueError: the treatment is unknown.
  """
  broken = {
    "endpoint": 0.0 - endpoint_penalty,
    "mask": None,
    "zero": 0.0,
    "penalty": 0.0 - invalid_penalty,
  }[grpo.one_of("challenger.invalid", invalid, INVALID)]
  # An id that is missing would leave its proposal out without a word.
  assert all(p.question_id for p in proposals if p.state == VALID)
  paid = {o.question.id: pay(o.total)[o.right] for o in outcomes}
  return [
    None
    if proposal.state == UNVERIFIED
    else paid.get(proposal.question_id)
    if proposal.state == VALID
    else broken
    for proposal in proposals
  ]


def shape(
  proposals: Sequence[types.Proposal],
  attempts: Sequence[types.Attempt],
  *,
  iteration: int,
  group_size: int,
  reward: str,
  low: float,
  high: float,
  endpoint_penalty: float,
  invalid: str,
  invalid_penalty: float,
  solver_baseline: str,
  challenger_baseline: str,
  std_epsilon: float,
  gate: str,
  min_right: int,
  min_wrong: int,
  passage_tokens: int,
  count_tokens: Callable[[str], int],
  language: Language,
  recorded: Collection[str] = (),
  contrast: bool = False,
  solver_scaled: bool = True,
  challenger_scaled: bool = True,
  permuted: bool = False,
  seed: int = 0,
) -> Edge:
  """Turns outcomes into lessons for both policies, and records for the bank.

  Replayed and fixed questions train the solver only: no proposal has their id.

  Args:
    proposals: with states and question ids, as the validity stage left them.
    attempts: at all questions of the iteration.
    iteration: of the run.
    group_size: attempts at each question.
    reward: see `curve`.
    low: see `curve`.
    high: see `curve`.
    endpoint_penalty: see `curve` and `proposal_rewards`.
    invalid: see `proposal_rewards`.
    invalid_penalty: see `proposal_rewards`.
    solver_baseline: see `grpo.advantages`.
    challenger_baseline: see `grpo.advantages`; groups are those of a seed.
    std_epsilon: see `grpo.advantages`.
    gate: see `passes`.
    min_right: see `passes`.
    min_wrong: see `passes`.
    passage_tokens: see `record`.
    count_tokens: see `record`.
    language: see `record`.
    recorded: ids of questions that have a record already; no second one is
      made.
    contrast: see `record`.
    solver_scaled: see `grpo.advantages`.
    challenger_scaled: see `grpo.advantages`.
    permuted: a control. Advantages come of rewards that are permuted over the
      iteration's episodes of each policy: as many are paid, for nothing.
      Outcomes, records and `Edge.rewards` are those that were earned.
    seed: of the run; with the iteration the key of the permutations.

  Raises:
    ValueError: an unknown choice.
  """
  check(reward=reward, invalid=invalid, gate=gate, low=low, high=high)
  groups = judged(attempts, group_size)
  outcomes = tuple(map(outcome, groups.values()))

  played = list(itertools.chain.from_iterable(groups.values()))
  solver_rewards = np.array(
    [a.verdict is types.Verdict.RIGHT for a in played], float
  )
  rng = np.random.default_rng([seed, iteration])
  dealt = rng.permutation if permuted else lambda rewards: rewards
  solver_rewards = dealt(solver_rewards)
  solved = _lessons(
    [a.episode for a in played],
    solver_rewards,
    [a.question.hops for a in played],
    solver_baseline,
    std_epsilon,
    solver_scaled,
  )

  pay = functools.partial(
    table, reward, low=low, high=high, endpoint_penalty=endpoint_penalty
  )
  rewards = proposal_rewards(
    proposals,
    outcomes,
    pay,
    invalid=invalid,
    endpoint_penalty=endpoint_penalty,
    invalid_penalty=invalid_penalty,
  )
  kept = [
    (p, r) for p, r in zip(proposals, rewards, strict=True) if r is not None
  ]
  challenger_rewards = dealt(np.array([r for _, r in kept], float))
  posed = _lessons(
    [p.episode for p, _ in kept],
    challenger_rewards,
    [p.seed.hops for p, _ in kept],
    challenger_baseline,
    std_epsilon,
    challenger_scaled,
  )

  failures = tuple(
    record(
      groups[o.question.id],
      iteration=iteration,
      passage_tokens=passage_tokens,
      count_tokens=count_tokens,
      language=language,
      contrast=contrast,
    )
    for o in outcomes
    if o.question.id not in recorded
    and passes(gate, o.right, o.wrong, min_right=min_right, min_wrong=min_wrong)
  )

  asked = {a.question.id for a in attempts}
  answered = sum(o.answered for o in outcomes)
  metrics = {
    "solver/questions": len(outcomes),
    "solver/questions_unknown": len(asked) - len(outcomes),
    "solver/informative_groups": grpo.informative(
      solver_rewards, np.array([a.question.id for a in played])
    ),
    "challenger/judged": len(kept),
    "challenger/out": len(proposals) - len(kept),
    "frontier/recorded": len(failures),
  }
  metrics |= _means(
    {
      "solver/reward/mean": solver_rewards,
      # p without malformed and truncated attempts.
      "solver/success/answered": [solver_rewards.sum() / answered]
      if answered
      else [],
      "frontier/fraction": [0 < o.right < o.total for o in outcomes],
      "challenger/reward/mean": challenger_rewards,
      "challenger/success/mean": [
        o.success for o in outcomes if o.question.origin == "challenger"
      ],
    }
  )
  return Edge(
    proposals=posed,
    attempts=solved,
    outcomes=outcomes,
    failures=failures,
    rewards=tuple(rewards),
    report=types.Report(metrics),
  )


def _lessons(episodes, rewards, hops, baseline, epsilon, scaled):
  """Gives each episode its advantage; a group is the episodes of a request."""
  found = grpo.advantages(
    rewards,
    np.array([episode.request_id for episode in episodes]),
    np.array(hops, int),
    baseline=baseline,
    epsilon=epsilon,
    scaled=scaled,
  )
  return tuple(
    types.Lesson(episode, float(advantage))
    for episode, advantage in zip(episodes, found, strict=True)
  )


def _means(series) -> dict[str, float]:
  """Means of what has values; nothing has a mean that is not a number."""
  return {name: float(np.mean(s)) for name, s in series.items() if len(s)}
