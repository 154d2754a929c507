"""The mathematics of group relative policy optimisation, as pure functions.

Advantages are a few hundred numbers on the host, in float64. The loss runs on
the device and returns sums with the weights that divide them: sums of
micro-batches add up exactly, averages of averages do not.

Sources: GRPO, arXiv:2402.03300. PPO's clip, arXiv:1707.06347; its two sides
apart and the token mean, DAPO, arXiv:2503.14476. The constant divisor,
Dr. GRPO, arXiv:2503.20783. The sequence's ratio, GSPO, arXiv:2507.18071. k3,
Schulman 2020, "Approximating KL divergence".
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped


class Loss(NamedTuple):
  """How tokens' losses become one number, and what the ratio is of.

    loss = sum_t weight_t l_t / sum_t share_t, over all sampled tokens

  Both are given an episode's sampled ids n and the most it may sample.
  """

  weight: Callable[[int, int], float]
  share: Callable[[int, int], float]
  ratio: str  # of a "token", of a whole "sequence", or "none": plain REINFORCE


LOSSES = {
  # The mean over episodes of token means.
  "grpo": Loss(lambda n, most: 1 / n, lambda n, most: 1 / n, "token"),
  # The mean over all tokens.
  "dapo": Loss(lambda n, most: 1, lambda n, most: 1, "token"),
  # A divisor that no policy can change by writing more or less.
  "dr_grpo": Loss(lambda n, most: 1 / most, lambda n, most: 1 / n, "token"),
  "gspo": Loss(lambda n, most: 1 / n, lambda n, most: 1 / n, "sequence"),
  "reinforce": Loss(lambda n, most: 1 / n, lambda n, most: 1 / n, "none"),
}
BASELINES = ("group", "batch", "hop", "none")

Scalar = Float[Array, ""] | float  # traced, where it is an argument

MAX_LOG_RATIO = 20.0  # exp(20) is still far from float32's end


def one_of(field: str, value: str, choices: Collection[str]) -> str:
  """Returns the value, or raises a ValueError that lists the choices."""
  if value not in choices:
    raise ValueError(
      f"Unknown {field} {value!r}. Choices: {', '.join(choices)}."
    )
  return value


def check_loss(field: str, loss: str, scaled: bool) -> None:
  """Refuses a loss that would not be what its name says.

  Args:
    field: that names it, for the message.
    loss: its name.
    scaled: advantages are divided by their standard deviation.

  Raises:
    ValueError: the name is unknown, or Dr. GRPO's advantages are scaled.
  """
  one_of(field, loss, LOSSES)
  if loss == "dr_grpo" and scaled:
    raise ValueError(
      f"{field} 'dr_grpo' with advantages that are divided by their standard "
      "deviation: Dr. GRPO leaves both divisors out. Set advantage_std = "
      "False, or choose 'grpo' or 'dapo'."
    )


def check_baseline(field: str, baseline: str, group_size: int) -> None:
  """Refuses a baseline that teaches nothing.

  Raises:
    ValueError: the name is unknown, or a group of one is its own baseline.
  """
  one_of(field, baseline, BASELINES)
  if baseline == "group" and group_size < 2:
    raise ValueError(
      f"{field} 'group' with a group_size of {group_size}: every advantage "
      "would be 0. It needs at least 2; choose 'batch', 'hop' or 'none'."
    )


def advantages(
  rewards: Float[np.ndarray, " B"],
  groups: Shaped[np.ndarray, " B"],
  hops: Int[np.ndarray, " B"],
  *,
  baseline: str,
  epsilon: float,
  scaled: bool = True,
) -> Float[np.ndarray, " B"]:
  """Compares each reward with a baseline.

    A_i = (r_i - mean_j r_j) / (std_j r_j + epsilon)

  or the difference alone, unless `scaled`; with the sample standard deviation
  (divisor n - 1), over j in the baseline's set: `group` those with i's group,
  `batch` all, `hop` those with i's hop count; `none` is A_i = r_i. Where all
  rewards of a set are equal, and so for a set of one, A is exactly 0.

  Args:
    rewards: one an episode.
    groups: question ids or indices. Equal means same question.
    hops: hop counts, for `hop`.
    baseline: one of `BASELINES`.
    epsilon: added to the standard deviation.
    scaled: divide by the standard deviation; Dr. GRPO does not.

  Raises:
    ValueError: the baseline is unknown.
  """
  one_of("baseline", baseline, BASELINES)
  rewards = rewards.astype(np.float64)
  if baseline == "none" or not rewards.size:
    return rewards
  sets = {"group": groups, "batch": np.zeros_like(hops), "hop": hops}[baseline]
  _, index = np.unique(sets, return_inverse=True)
  count = np.bincount(index)
  deviation = rewards - (np.bincount(index, rewards) / count)[index]
  variance = np.bincount(index, deviation**2) / np.maximum(count - 1, 1)
  # Where all are equal, the mean's rounding must not become an advantage.
  differs = _differs(rewards, index)
  spread = np.sqrt(variance) + epsilon if scaled else 1.0
  return deviation / np.where(differs, spread, np.inf)[index]


def informative(
  rewards: Float[np.ndarray, " B"], groups: Shaped[np.ndarray, " B"]
) -> float:
  """Returns the fraction of groups whose rewards are not all equal."""
  if not rewards.size:
    return 0.0
  _, index = np.unique(groups, return_inverse=True)
  return float(_differs(rewards, index).mean())


def _differs(rewards: np.ndarray, index: np.ndarray) -> np.ndarray:
  """Returns, for each set, whether its rewards differ."""
  highest = np.full(index.max() + 1, -np.inf)
  lowest = -highest
  np.maximum.at(highest, index, rewards)
  np.minimum.at(lowest, index, rewards)
  return highest > lowest


def log_ratio(
  above: Float[Array, "*shape"], below: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
  """Returns log(p / q) = above - below, clamped to +-20: its exp is finite."""
  return jnp.clip(above - below, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def k3(
  new: Float[Array, "*shape"], reference: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
  """Estimates KL(new || reference) from a sample of `new`, never below 0.

  k3 = exp(d) - d - 1,  d = log p_reference - log p_new
  """
  d = log_ratio(reference, new)
  return jnp.exp(d) - d - 1


class Sums(NamedTuple):
  """Sums over the sampled tokens of a batch; `gap_max` alone is a maximum."""

  loss: Float[Array, ""]  # each token's loss times its weight
  weight: Float[Array, ""]  # the shares: what divides the loss
  tokens: Float[Array, ""]  # what divides all that follows
  kl: Float[Array, ""]
  entropy: Float[Array, ""]
  clipped: Float[Array, ""]  # tokens whose gradient the clip removed
  ratio: Float[Array, ""]
  importance: Float[Array, ""]
  capped: Float[Array, ""]  # tokens whose importance weight was cut
  gap: Float[Array, ""]  # |engine - learner|
  gap_max: Float[Array, ""]


def zero_sums() -> Sums:
  """Returns the sums of no tokens."""
  # One array each: a buffer that is donated may not occur twice.
  return Sums(*(np.zeros((), np.float32) for _ in Sums._fields))


def add_sums(one: Sums, other: Sums) -> Sums:
  """Joins the sums of two batches."""
  total = jax.tree.map(lambda a, b: a + b, one, other)
  return total._replace(gap_max=jnp.maximum(one.gap_max, other.gap_max))


def sequence_mean(
  x: Float[Array, "B T"],
  mask: Bool[Array, "B T"],
  segments: Int[Array, "B T"],
) -> Float[Array, "B T"]:
  """Returns, at every token, the mean of x over its segment's masked tokens."""
  length = x.shape[1]

  def row(x, mask, segments):
    total, count = (
      jax.ops.segment_sum(values, segments, num_segments=length + 1)
      for values in (jnp.where(mask, x, 0.0), mask.astype(x.dtype))
    )
    return (total / jnp.maximum(count, 1))[segments]

  return jax.vmap(row)(x, mask, segments)


def policy_loss(
  new: Float[Array, "B T"],
  old: Float[Array, "B T"],
  engine: Float[Array, "B T"],
  reference: Float[Array, "B T"],
  entropy: Float[Array, "B T"],
  advantages: Float[Array, "B T"],
  weights: Float[Array, "B T"],
  shares: Float[Array, "B T"],
  mask: Bool[Array, "B T"],
  segments: Int[Array, "B T"],
  *,
  ratio: str,
  clip_low: Scalar,
  clip_high: Scalar,
  kl_coefficient: Scalar,
  entropy_coefficient: Scalar,
  importance_cap: Scalar,
) -> Sums:
  """The policy loss with a KL penalty, as sums.

    c = min(exp(old - engine), cap),  rho = exp(new - old)
    l = -c min(rho A, clip(rho, 1 - low, 1 + high) A)
        + beta k3(new, reference) - eta entropy
    loss = sum over sampled tokens of weight * l

  With ratio "sequence", rho is exp of the mean of new - old over the episode's
  sampled tokens (the sum collapses with length). With "none" the first term is
  -c A new: no ratio, no clip.

  c is the truncated importance weight of the policy that learns against the
  engine that sampled, which differ by numerics (Yao et al. 2025, "Your
  efficient RL framework secretly brings you off-policy RL training").

  Args:
    new: logprobs of the ids under the weights that learn; alone has a gradient.
    old: under the weights at the start of the iteration.
    engine: as sampled.
    reference: under the frozen reference.
    entropy: of the distribution that each id was drawn from; has a gradient
      where there is a bonus on it.
    advantages: of each token's episode.
    weights: of each token, `Loss.weight`.
    shares: of each token in the divisor, `Loss.share`.
    mask: True where the policy sampled the id; nothing else counts.
    segments: number of each token's episode in its row; 0 is padding.
    ratio: `Loss.ratio`.
    clip_low: how far rho may fall below 1.
    clip_high: how far rho may rise above 1.
    kl_coefficient: beta.
    entropy_coefficient: eta, 0 for no bonus.
    importance_cap: of c.
  """
  # Out of the mask the inputs mean nothing. Zeroed before any exp, they cannot
  # reach a gradient, not even as 0 * inf.
  new, old, engine, reference, entropy = (
    jnp.where(mask, x, 0.0) for x in (new, old, engine, reference, entropy)
  )
  difference = new - old
  if ratio == "sequence":
    difference = sequence_mean(difference, mask, segments)
  rho = jnp.exp(jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO))
  free = rho * advantages
  bound = jnp.clip(rho, 1 - clip_low, 1 + clip_high) * advantages
  if ratio == "none":
    free = bound = new * advantages
  weight = jnp.exp(log_ratio(old, engine))
  importance = jnp.minimum(weight, importance_cap)
  kl = k3(new, reference)
  token_loss = kl_coefficient * kl - importance * jnp.minimum(free, bound)
  token_loss -= entropy_coefficient * entropy
  gap = jnp.where(mask, jnp.abs(engine - old), 0.0)

  def total(x):
    return jnp.sum(jnp.where(mask, x, 0.0))

  return Sums(
    loss=total(weights * token_loss),
    weight=total(shares),
    tokens=total(1.0),
    kl=total(kl),
    entropy=total(entropy),
    clipped=total(bound < free),
    ratio=total(rho),
    importance=total(importance),
    capped=total(weight > importance_cap),
    gap=total(gap),
    gap_max=jnp.max(gap),
  )
