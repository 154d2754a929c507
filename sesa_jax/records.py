"""What an iteration leaves in the run's folder: metrics and rows."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sesa_jax import metrics, types
from sesa_jax.skills import bank as skill_bank


@dataclasses.dataclass(frozen=True)
class Record:
  """What an iteration leaves in the run's folder."""

  metrics: Mapping[str, Any]
  episodes: Sequence[Mapping[str, Any]]
  questions: Sequence[Mapping[str, Any]]
  failures: Sequence[Mapping[str, Any]]
  history: Sequence[Mapping[str, Any]]


def rollout_metrics(
  episodes: Sequence[types.Episode], path: str
) -> dict[str, float]:
  """What must never go unseen: searches, malformed, truncated, lost, length."""
  searches = [sum(t.action == "search" for t in e.turns) for e in episodes]
  found = metrics.describe(searches, f"{path}/searches")
  found |= metrics.describe([e.mask.sum() for e in episodes], f"{path}/tokens")
  shares = {
    "malformed": [
      any(t.action == "malformed" for t in e.turns) for e in episodes
    ],
    "truncated": [
      e.finish in ("turn_tokens", "episode_tokens", "turns") for e in episodes
    ],
    "unknown": [e.finish == "lost" for e in episodes],
  }
  total = max(len(episodes), 1)
  return found | {f"{path}/{k}": sum(v) / total for k, v in shares.items()}


def prefixed(path: str, found: Mapping[str, Any]) -> dict[str, Any]:
  """Puts metrics below a path."""
  return {f"{path}/{name}": value for name, value in found.items()}


UNKNOWN = 0.02  # share of attempts above which no success rate is reported
_SUCCESS = (
  "solver/reward/mean",
  "solver/success/answered",
  "challenger/success/mean",
  "frontier/fraction",
)


def edge_metrics(
  found: Mapping[str, float], attempts: Sequence[types.Attempt]
) -> dict[str, float]:
  """The frontier's metrics, and the share of attempts without a verdict.

  Exact match finds right answers without a judge: what an outage leaves over
  looks easy. Where too many are unknown no success rate is given at all.
  """
  unknown = sum(a.verdict is types.Verdict.UNKNOWN for a in attempts)
  share = unknown / max(len(attempts), 1)
  kept = {
    name: value
    for name, value in found.items()
    if share <= UNKNOWN or name not in _SUCCESS
  }
  return kept | {"solver/verdicts/unknown": share}


def effect_metrics(credited: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  """What showing skills changed, on average, where questions tell it."""
  found = {
    name: difference
    for event in credited
    for name, difference in zip(
      event["questions"], event.get("differences", ()), strict=False
    )
    if difference is not None
  }
  if not found:
    return {}
  return {
    "bank/effect/mean": sum(found.values()) / len(found),
    "bank/effect/questions": len(found),
  }


def episode_rows(
  checked, attempts, controls, edge, tools, number
) -> list[dict[str, Any]]:
  """A row an episode, with what became of it."""

  def decode(ids):
    return tools.tokenizer.decode(ids, skip_special_tokens=False)

  advantages = {
    (lesson.episode.arm, lesson.episode.request_id, lesson.episode.attempt): (
      lesson.advantage
    )
    for lesson in (*edge.proposals, *edge.attempts)
  }

  def row(episode, **extra):
    key = (episode.arm, episode.request_id, episode.attempt)
    known = dict(
      iteration=number,
      question=None,
      targets=(),
      prediction=None,
      verdict=None,
      reward=None,
      skill_ids=(),
      advantage=advantages.get(key),
    )
    return metrics.episode_row(episode, decode, **(known | extra))

  rows = [
    row(
      p.episode,
      question=p.text,
      targets=p.seed.targets,
      state=p.state,
      reward=reward,
    )
    for p, reward in zip(checked.proposals, edge.rewards, strict=True)
  ]
  judged = {outcome.question.id for outcome in edge.outcomes}

  def tried(attempt, paid):
    return row(
      attempt.episode,
      question=attempt.question.text,
      targets=attempt.question.targets,
      prediction=attempt.prediction,
      verdict=attempt.verdict,
      reward=float(attempt.verdict is types.Verdict.RIGHT) if paid else None,
      skill_ids=attempt.skill_ids,
    )

  rows += [tried(a, a.question.id in judged) for a in attempts]
  rows += [tried(a, False) for a in controls]
  return rows + [row(episode) for episode in checked.episodes]


def question_rows(checked, edge) -> list[dict[str, Any]]:
  """Every proposal with its state, its reward and its question's success."""
  success = {o.question.id: o.success for o in edge.outcomes}
  return [
    dict(row) | dict(reward=reward, success=success.get(p.question_id))
    for row, p, reward in zip(
      checked.report.rows, checked.proposals, edge.rewards, strict=True
    )
  ]


def alarms(
  rows: Sequence[Mapping[str, Any]],
  *,
  entropy_least: float,
  entropy_most: float,
  malformed: float,
  clip_fraction: float,
  valid_rate: float,
  valid_iterations: int,
) -> list[str]:
  """Says what looks like a collapse, and what to do: a line for each.

  Args:
    rows: metrics of the iterations so far; the last is judged.
    entropy_least: nats a token, below which a policy samples one thing.
    entropy_most: above which it babbles.
    malformed: greatest share of episodes with a malformed turn.
    clip_fraction: greatest share of tokens whose gradient was clipped away.
    valid_rate: share of valid proposals, below which no more than
      `valid_iterations` - 1 iterations may be on end.
    valid_iterations: see `valid_rate`.
  """
  found = []

  def judge(name, least, most, advice, span=1):
    values = [row[name] for row in rows[-span:] if name in row]
    if len(values) < span:
      return
    for limit, beyond, side in (
      (least, max(values) < least, "below"),
      (most, min(values) > most, "above"),
    ):
      if beyond:
        said = f"{name} = {values[-1]:.3g}, {side} {limit:g}"
        said += f" for {span} iterations" if span > 1 else ""
        found.append(f"{said}: {advice.get(side)}")

  for role in ("challenger", "solver"):
    judge(
      f"{role}/entropy/mean",
      entropy_least,
      entropy_most,
      {
        "below": f"it samples the same again and again. Raise {role}."
        f"entropy_coefficient or {role}.temperature.",
        "above": f"it babbles. Lower {role}.learning_rate or raise {role}."
        "kl_coefficient, and go on from an earlier checkpoint.",
      },
    )
    judge(
      f"{role}/rollout/malformed",
      0.0,
      malformed,
      {
        "above": "look at episodes with --mode=show. The template may not fit; "
        f"if the policy lost the format, raise {role}.kl_coefficient."
      },
    )
    judge(
      f"{role}/clip_fraction",
      0.0,
      clip_fraction,
      {
        "above": f"its updates go too far. Lower {role}.learning_rate or raise "
        f"{role}.minibatch_questions."
      },
    )
  judge(
    "challenger/valid_rate",
    valid_rate,
    1.0,
    {
      "below": "challenger/state/... in metrics.jsonl says which rule they "
      "break. Meanwhile the solver learns from the pool alone."
    },
    valid_iterations,
  )
  return found


class Clock:
  """Seconds of each stage."""

  def __init__(self):
    self._seconds: dict[str, float] = {}
    self._name, self._began = "", 0.0

  def start(self, name: str) -> None:
    """Ends the stage before and begins one."""
    self.stop()
    self._name, self._began = name, time.perf_counter()

  def stop(self) -> None:
    """Ends the stage."""
    if self._name:
      spent = time.perf_counter() - self._began
      self._seconds[self._name] = self._seconds.get(self._name, 0.0) + spent
    self._name = ""

  def seconds(self) -> dict[str, float]:
    """Returns `seconds/<stage>`; the only metrics that two runs differ in."""
    return {
      f"seconds/{name.replace(' ', '_')}": s
      for name, s in self._seconds.items()
    }


def write(
  folder: metrics.RunFolder, number: int, bank: Any, record: Record
) -> None:
  """Writes an iteration. Until it is checkpointed a resume takes it back."""
  folder.write_episodes(number, record.episodes)
  folder.append("questions.jsonl", record.questions)
  folder.append("failures.jsonl", record.failures)
  folder.append("skills_history.jsonl", record.history)
  folder.append("metrics.jsonl", [record.metrics])
  folder.write_lines("skills.jsonl", skill_bank.rows(bank))
