"""Statistics of paired runs: intervals over seeds and questions, areas, shares.

Pure functions of arrays. A *table* is float [n, k] of one seed: a row a
question, a column a thing that was measured on it, by one arm or by several.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.special import stdtrit

# How an attempt comes to a right answer; each stage needs those before.
STAGES = ("format", "searches", "passage", "reading")
SHARES = (*STAGES, "otherwise")  # right without all of them

Table = Float[np.ndarray, "n k"]
Statistic = Callable[[Float[np.ndarray, "*b k"]], Float[np.ndarray, "*b"]]


class Interval(NamedTuple):
  """An estimate with its interval."""

  value: float
  low: float
  high: float

  @property
  def excludes_0(self) -> bool:
    """Whether 0 lies outside."""
    return self.low > 0 or self.high < 0


def bootstrap(
  tables: Sequence[Table],
  statistic: Statistic,
  *,
  draws: int = 2000,
  confidence: float = 0.95,
  seed: int = 0,
) -> Interval:
  """Estimates a statistic of column means, averaged over seeds.

    value = mean over seeds of statistic(column means of the seed's table)

  Each draw resamples seeds with replacement, and in each drawn one questions,
  rows as a whole, so that what is paired stays paired. The interval is between
  percentiles of the draws. Of few seeds it is too narrow: of S the spread of
  the draws' means over seeds is sqrt((S - 1) / S) of what it should be, and
  Student's quantile (4.3 for S = 3) is not in it: `over_seeds` has both.

  Args:
    tables: one a seed.
    statistic: of means [..., k]; sees many draws at once.
    draws: of the bootstrap.
    confidence: 0.95, say.
    seed: of the draws.

  Source: Efron and Tibshirani 1993, An Introduction to the Bootstrap.
  """
  value = np.mean([statistic(table.mean(0)) for table in tables])
  found = np.zeros((draws, len(tables)))
  for table, (here, times) in zip(
    tables, _draws(seed, draws, tuple(map(len, tables))), strict=True
  ):
    found[here] = statistic(times @ table / len(table))
  tail, means = 100 * (1 - confidence) / 2, found.mean(1)
  means = means[~np.isnan(means)]  # of draws in which there is a statistic
  if math.isnan(value) or not means.size:
    return Interval(math.nan, math.nan, math.nan)
  low, high = np.percentile(means, (tail, 100 - tail))
  return Interval(float(value), float(low), float(high))


def over_seeds(values: Sequence[float], confidence: float = 0.95) -> Interval:
  """Student's interval of a mean, for a value a seed.

    mean +- t s / sqrt(n),  t of n - 1 degrees of freedom

  It asks whether the same would come out in other worlds, whatever the number
  of questions. NaN about the mean of a single seed.
  """
  n, mean = len(values), float(np.mean(values))
  if n < 2:
    return Interval(mean, math.nan, math.nan)
  half = stdtrit(n - 1, (1 + confidence) / 2) * np.std(values, ddof=1) / n**0.5
  return Interval(mean, float(mean - half), float(mean + half))


@functools.lru_cache(maxsize=16)  # most of the time, and alike for all tables
def _draws(
  seed: int, draws: int, sizes: tuple[int, ...]
) -> list[tuple[np.ndarray, np.ndarray]]:
  """Of each seed where it was drawn, and how often each of its rows was."""
  rng = np.random.default_rng(seed)
  picked = rng.integers(len(sizes), size=(draws, len(sizes)))
  found = []
  for number, rows in enumerate(sizes):
    here = picked == number
    times = rng.multinomial(rows, np.full(rows, 1 / rows), size=here.sum())
    found.append((here, times.astype(float)))
  return found


def difference(means: Float[np.ndarray, "*b 2"]) -> Float[np.ndarray, "*b"]:
  """The second column's mean less the first one's."""
  return means[..., 1] - means[..., 0]


def ratio_difference(
  means: Float[np.ndarray, "*b 4"],
) -> Float[np.ndarray, "*b"]:
  """d/c - b/a of columns a, b, c, d: a share among other rows, after - before.

  NaN where one of the divisors is 0.
  """
  a, b, c, d = np.moveaxis(means, -1, 0)
  with np.errstate(divide="ignore", invalid="ignore"):
    return np.where((a > 0) & (c > 0), d / c - b / a, np.nan)


def area(iterations: Sequence[float], values: Sequence[float]) -> float:
  """The mean height of a curve: its area by trapezoids, over its length.

    sum_i (x_i+1 - x_i)(y_i+1 + y_i)/2 / (x_n - x_1)

  Args:
    iterations: ascending, at least two.
    values: at each.

  Raises:
    ValueError: fewer than two points.
  """
  if len(iterations) < 2:
    raise ValueError(f"A curve of {len(iterations)} points has no area.")
  x, y = np.asarray(iterations, float), np.asarray(values, float)
  return float(np.sum(np.diff(x) * (y[1:] + y[:-1]) / 2) / (x[-1] - x[0]))


def nested(
  answered: np.ndarray,
  searched: np.ndarray,
  found: np.ndarray,
  right: np.ndarray,
) -> Table:
  """Says of each question how far its attempt came: the columns for `split`.

  Args:
    answered: whether there was a complete answer.
    searched: whether there were as many searches as hops.
    found: whether a passage with the answer was seen.
    right: whether the answer is right.

  Returns:
    [n, 5]: answered; and searched; and found; and right; right anyhow.
  """
  steps = np.logical_and.accumulate([answered, searched, found, right])
  return np.stack([*steps, right], axis=1).astype(float)


def split(means: Float[np.ndarray, "*b 10"]) -> Float[np.ndarray, "*b 5"]:
  """Splits a gain of accuracy into what `SHARES` names; they add up to it.

    accuracy = f s g r + o,  f = P(format), s = P(searches | format), ...,
    o = P(right otherwise)

  A factor's share is what its change brings, averaged over the orders in which
  the four may change (Shapley). A factor without any case, such as s where no
  attempt is well-formed, is taken not to change.

  Args:
    means: of the columns of `nested`, five before and five after.
  """
  before, after = means[..., :5], means[..., 5:]
  old, new = _factors(before), _factors(after)
  old, new = (
    np.nan_to_num(np.where(np.isnan(a), b, a))
    for a, b in ((old, new), (new, old))
  )
  shares = np.zeros(means.shape[:-1] + (5,))
  orders = list(itertools.permutations(range(4)))
  for order in orders:
    now = old.copy()
    for factor in order:
      held = now.prod(-1)
      now[..., factor] = new[..., factor]
      shares[..., factor] += (now.prod(-1) - held) / len(orders)
  otherwise = [part[..., 4] - part[..., 3] for part in (before, after)]
  shares[..., 4] = otherwise[1] - otherwise[0]
  return shares


def _factors(means: np.ndarray) -> np.ndarray:
  """f, s, g, r; NaN where nothing came so far."""
  above = np.concatenate([np.ones(means.shape[:-1] + (1,)), means[..., :3]], -1)
  with np.errstate(divide="ignore", invalid="ignore"):
    return np.where(above > 0, means[..., :4] / above, math.nan)
