"""What a question's outcome says about the skills that were shown for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.special

from sesa_jax.types import Outcome

CREDITS = ("rollout", "majority", "relative", "control")
LEAST = 5  # questions without which an effect gets no interval


def usage(
  outcome: Outcome,
  rule: str,
  mean: float = math.nan,
  unprimed: Outcome | None = None,
) -> tuple[int | float, int | float]:
  """Returns (helpful, harmful), to be added to each skill that was shown.

  k of G attempts are right, p = k/G:

      rollout   k, and 1 if any attempt is substantively wrong, else 0
      majority  1 to one side: (1, 0) if k > G - k, (0, 1) if k < G - k
      relative  d = p - mean: (max(d, 0), max(-d, 0))
      control   d = p - p', p' of the attempts without skills; as relative

  Args:
    outcome: of the attempts with the skills in their prompt.
    rule: one of CREDITS.
    mean: of the iteration's success rates at this hop count, for `relative`.
    unprimed: of attempts at the same question without skills, for `control`.

  Sources: `rollout` and `majority` are readings of SESA, arXiv 2607.29468; the
  others are ours.
  """
  right, wrong = outcome.right, outcome.total - outcome.right
  if rule == "rollout":
    return right, int(outcome.wrong > 0)
  if rule == "majority":
    return int(right > wrong), int(right < wrong)
  if rule == "control":
    better = difference(outcome, unprimed)
  else:
    better = outcome.success - mean
  return max(0.0, better), max(0.0, -better)  # in this order: never -0.0


def difference(primed: Outcome, unprimed: Outcome) -> float:
  """The success rate with skills less that without, on one question."""
  return primed.success - unprimed.success


class Effect(NamedTuple):
  """What showing a skill changed: mean difference of success rates."""

  mean: float
  low: float | None  # None: too few questions, or all alike
  high: float | None
  questions: int


def effect(
  differences: Sequence[float], confidence: float = 0.95
) -> Effect | None:
  """Estimates a skill's effect from its questions, with Student's interval.

      m +- t s / sqrt(n), t the quantile (1 + confidence) / 2 of n - 1 degrees

  cut to [-1, 1]. Skills of one prompt share its differences: the effect is
  that of the prompts that a skill stood in. No interval is given for fewer
  than LEAST questions, nor where all differences are the same: their spread
  says nothing.

  Args:
    differences: of each question, see `difference`.
    confidence: 0.95, say.

  Returns:
    The effect, or None without any question.
  """
  n = len(differences)
  if not n:
    return None
  mean, spread = float(np.mean(differences)), 0.0
  if n >= LEAST:
    spread = float(np.std(differences, ddof=1))
  if spread < 1e-9:
    return Effect(mean, None, None, n)
  t = float(scipy.special.stdtrit(n - 1, 0.5 + confidence / 2))
  half = t * spread / math.sqrt(n)
  return Effect(mean, max(-1.0, mean - half), min(1.0, mean + half), n)
