"""Drawing ids on the device, from a vocabulary that a mesh may have cut.

Letters: B rows, V vocabulary, of which a device may hold a share, n blocks.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

# Ids whose probabilities are added up first. A share of the vocabulary is a
# multiple of it, so sums do not depend on how the vocabulary is cut.
BLOCK = 256


def sample(
  logits: Float[Array, "B V"],
  keys: UInt32[Array, "B 2"],
  positions: Int[Array, " B"],
  temperature: Float[Array, " B"],
  cut: tuple[Array, Array] | None = None,
  axis: str | None = None,
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
  """Draws one id a row by a two-level inverse CDF.

  One uniform u a row; the id is the first whose cumulative probability under
  softmax(logits / temperature) exceeds u, found first among blocks of ids and
  then inside one. At temperature 0 it is the likeliest id, the lowest of equal
  ones. An id without probability is never drawn.

  Args:
    logits: float32; of padding, -inf.
    keys: of the rows.
    positions: folded into the keys.
    temperature: of the rows.
    cut: top_p float32 [B] and top_k int32 [B], or None. The k likeliest ids
      stay; of these the fewest likeliest whose share of the mass reaches p.
      Ids as likely as the last that stays stay too. 1 and 0 are off.
    axis: of the `shard_map` around that cuts the vocabulary.

  Returns:
    ids, and their logprobs under softmax(logits / temperature), or
    softmax(logits) where the temperature is 0; of the whole vocabulary, also
    where it is cut off.
  """
  # Three passes over [B, V], of which XLA fuses two: nothing of that size is
  # written but the logits themselves.
  scaled = logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]
  blocks = _blocks(scaled)
  tops = _whole(blocks.max(-1), axis)
  peak = tops.max(-1)
  weigh = lambda x: jnp.exp(x - peak.reshape(-1, *[1] * (x.ndim - 1)))  # noqa: E731
  mass = _whole(weigh(blocks).sum(-1), axis)
  logprob_of_peak = -jnp.log(mass.sum(-1))
  kept = None
  if cut is not None:
    kept = _likeliest(scaled, weigh(scaled), *cut, axis)
    kept = _blocks(kept, False)
    mass = _whole(jnp.where(kept, weigh(blocks), 0.0).sum(-1), axis)

  block, before = _first_above(mass, _uniform(keys, positions), share=True)
  greedy = temperature <= 0
  block = jnp.where(greedy, jnp.argmax(tops == peak[:, None], -1), block)

  held = blocks.shape[1]
  first = jax.lax.axis_index(axis) * held if axis else 0
  own = block - first
  mine = (own >= 0) & (own < held)
  take = jax.vmap(lambda x, i: x[jnp.clip(i, 0, held - 1)])
  values = take(blocks, own)
  inside = weigh(values)
  if kept is not None:
    inside = jnp.where(take(kept, own), inside, 0.0)
  place, _ = _first_above(inside, before, share=False)
  place = jnp.where(greedy, jnp.argmax(values == peak[:, None], -1), place)
  value = jnp.take_along_axis(values, place[:, None], 1)[:, 0]

  ids = (block * BLOCK + _sum(jnp.where(mine, place, 0), axis)).astype(
    jnp.int32
  )
  gap = _sum(jnp.where(mine, value - peak, 0.0), axis)
  return ids, gap + logprob_of_peak


def _uniform(keys: Array, positions: Array) -> Array:
  def draw(key: Array, position: Array) -> Array:
    key = jax.random.wrap_key_data(key, impl="threefry2x32")
    return jax.random.uniform(jax.random.fold_in(key, position))

  return jax.vmap(draw)(keys, positions)


def _first_above(
  mass: Float[Array, "B n"], target: Float[Array, " B"], share: bool
) -> tuple[Array, Array]:
  """Finds where a cumulative sum exceeds a target; never where mass is 0.

  Args:
    mass: not negative; of a row that counts, not all 0.
    target: a share of the sum, or a sum itself; if rounding put it beyond the
      end, the last place with mass is meant.
    share: which of the two.

  Returns:
    the place, and how far the target lies above the sum before it.
  """
  # A parallel sum may grow by an ulp where nothing is added: such places and
  # empty ones must not be found.
  edges = jnp.where(mass > 0, jnp.cumsum(mass, -1), -jnp.inf)
  end = edges.max(-1)
  target = target * end if share else target
  target = jnp.minimum(target, jnp.nextafter(end, 0.0))
  place = jnp.argmax(edges > target[:, None], -1)
  found = jax.vmap(lambda x, i: x[i])
  return place, target - (found(edges, place) - found(mass, place))


def _likeliest(
  scaled: Array, weights: Array, top_p: Array, top_k: Array, axis: str | None
) -> Array:
  """Which ids may be drawn, bool [B, V]; equal ones stay or go together."""
  ordered = _ordered(scaled)
  least = _threshold(ordered, jnp.ones_like(scaled), top_k, axis)
  likely = ordered >= jnp.where(top_k > 0, least, 0)[:, None]
  weights = jnp.where(likely, weights, 0.0)
  needed = top_p * _sum(weights.sum(-1), axis)
  least = _threshold(ordered, weights, needed, axis)
  return likely & (ordered >= jnp.where(top_p < 1, least, 0)[:, None])


def _threshold(
  ordered: Array, weights: Array, needed: Array, axis: str | None
) -> Array:
  """The greatest t at which the weights of `ordered >= t` reach `needed`.

  Bit by bit: a sort of 64 x 32k takes XLA a second on a CPU.
  """

  def bit(i: Array, found: Array) -> Array:
    higher = found | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
    weight = jnp.where(ordered >= higher[:, None], weights, 0.0).sum(-1)
    return jnp.where(_sum(weight, axis) >= needed, higher, found)

  none = jnp.zeros(len(ordered), jnp.uint32)
  return jax.lax.fori_loop(0, 32, bit, none)


def _ordered(x: Float[Array, "B V"]) -> UInt32[Array, "B V"]:
  """Integers in the order of the numbers."""
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
  sign = jnp.uint32(1 << 31)
  return jnp.where(bits >= sign, ~bits, bits | sign)


def _blocks(x: Array, padding: Any = -jnp.inf) -> Array:
  rows, size = x.shape
  missing = -size % BLOCK
  if missing:
    x = jnp.pad(x, ((0, 0), (0, missing)), constant_values=padding)
  return x.reshape(rows, -1, BLOCK)


def _whole(x: Array, axis: str | None) -> Array:
  """Joins the devices' shares of the last axis."""
  if not axis:
    return x
  return jax.lax.all_gather(x, axis, axis=x.ndim - 1, tiled=True)


def _sum(x: Array, axis: str | None) -> Array:
  return jax.lax.psum(x, axis) if axis else x
