"""What the engine runs on the device: prefill, the decode loop, sampling.

Letters: B slots, S cache positions, K key-value heads, N query heads, H head
size, V vocabulary. The cache holds keys as [B, K, H, S] and values as
[B, K, S, H], the layouts in which a CPU's matmuls read them in order.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sesa_jax.policy import model

# Why a slot stopped decoding. RUNNING must be 0.
RUNNING, STOP, EOS, TURN_TOKENS, EPISODE_TOKENS = range(5)
REASONS = ("running", "stop", "eos", "turn_tokens", "episode_tokens")
_BLOCK = 256  # of the two-level inverse CDF


class Slots(NamedTuple):
  """The state of every slot that decoding reads and changes."""

  token: jax.Array  # int32 [B], the last id, not yet in the cache
  position: jax.Array  # int32 [B], where that id goes
  stop_state: jax.Array  # int32 [B], of the stop automaton
  reason: jax.Array  # int32 [B], RUNNING or why it stopped
  turn_left: jax.Array  # int32 [B], ids that this turn may still sample
  episode_left: jax.Array  # int32 [B], ids that the episode may still hold
  key: jax.Array  # uint32 [B, 2], of (seed, iteration, question, attempt)
  temperature: jax.Array  # float32 [B]


def empty_cache(backbone, slots: int, length: int, dtype) -> list[dict]:
  """Returns a zeroed cache: one dict of keys and values a layer."""
  keys = (slots, backbone.kv_heads, backbone.head_dim, length)
  values = (slots, backbone.kv_heads, length, backbone.head_dim)
  return [
    dict(k=jnp.zeros(keys, dtype), v=jnp.zeros(values, dtype))
    for _ in range(backbone.layers)
  ]


def attend_cache(q, k, v, positions) -> jax.Array:
  """Attends from new tokens to a cache that already holds them.

  Args:
    q: [B, T, N, H].
    k: [B, K, H, S].
    v: [B, K, S, H].
    positions: int32 [B, T]; a token sees the cache up to its own position.

  Returns:
    [B, T, N, H] in q's dtype; the softmax is taken in float32.
  """
  batch, time, heads, size = q.shape
  kv_heads = k.shape[1]
  grouped = q.reshape(batch, time, kv_heads, heads // kv_heads, size)
  scores = jnp.einsum(
    "btkgh,bkhs->bkgts", grouped, k, preferred_element_type=jnp.float32
  )
  seen = jnp.arange(k.shape[-1]) <= positions[:, None, None, :, None]
  scores = jnp.where(seen, scores * size**-0.5, -jnp.inf)
  weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
  out = jnp.einsum("bkgts,bksh->btkgh", weights, v)
  return out.reshape(batch, time, heads, size).astype(q.dtype)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def prefill(graphdef, weights, cache, slot, ids, start) -> list[dict]:
  """Writes one slot's ids [C] into the cache from position `start` on.

  Ids beyond the ones that are meant may be anything: what they write lies
  behind every position that is read before it is written again.
  """
  positions = start + jnp.arange(ids.shape[0], dtype=jnp.int32)[None]
  new = list(cache)

  def attend(layer, q, k, v):
    keys = k[0].transpose(1, 2, 0)[None]  # [1, K, H, C]
    values = v[0].transpose(1, 0, 2)[None]  # [1, K, C, H]
    old = cache[layer]
    new[layer] = dict(
      k=jax.lax.dynamic_update_slice(old["k"], keys, (slot, 0, 0, start)),
      v=jax.lax.dynamic_update_slice(old["v"], values, (slot, 0, start, 0)),
    )
    row = jax.tree.map(
      lambda x: jax.lax.dynamic_slice_in_dim(x, slot, 1), new[layer]
    )
    return attend_cache(q, row["k"], row["v"], positions)

  model.decode(graphdef, weights, ids[None], positions, attend)
  return new


@functools.partial(jax.jit, donate_argnums=0)
def copy_slot(cache, source, target) -> list[dict]:
  """Copies a slot's cache, for another attempt at the same prompt."""

  def copy(x):
    row = jax.lax.dynamic_slice_in_dim(x, source, 1)
    return jax.lax.dynamic_update_slice_in_dim(x, row, target, 0)

  return jax.tree.map(copy, cache)


def sample(logits, keys, positions, temperature) -> tuple[Any, Any]:
  """Draws one id a row by a two-level inverse CDF.

  One uniform u a row; the id is the first whose cumulative probability under
  softmax(logits / temperature) exceeds u, found first among blocks of ids and
  then inside one. At temperature 0 it is the argmax.

  Args:
    logits: float32 [B, V].
    keys: uint32 [B, 2].
    positions: int32 [B], folded into the keys.
    temperature: float32 [B].

  Returns:
    ids: int32 [B].
    logprobs: float32 [B], of the ids under softmax(logits / temperature);
      where the temperature is 0, under softmax(logits).
  """
  rows, vocabulary = logits.shape
  scale = jnp.where(temperature > 0, temperature, 1.0)
  logprobs = jax.nn.log_softmax(logits / scale[:, None])

  def uniform(key, position):
    key = jax.random.wrap_key_data(key, impl="threefry2x32")
    return jax.random.uniform(jax.random.fold_in(key, position))

  draws = jax.vmap(uniform)(keys, positions)
  blocks = -(-vocabulary // _BLOCK)
  probabilities = jnp.pad(
    jnp.exp(logprobs), ((0, 0), (0, blocks * _BLOCK - vocabulary))
  ).reshape(rows, blocks, _BLOCK)
  mass = probabilities.sum(-1)
  edges = jnp.cumsum(mass, -1)
  total = edges[:, -1]  # 1 up to rounding
  target = jnp.minimum(draws * total, jnp.nextafter(total, 0.0))
  block = jnp.sum(edges <= target[:, None], -1)  # its mass is not 0
  take = jax.vmap(lambda x, i: x[i])
  before = take(edges, block) - take(mass, block)
  inside = jnp.cumsum(take(probabilities, block), -1)
  # Rounding may leave the target behind the block's last cumulative sum: then
  # the last id of the block that has any mass is meant.
  last = _BLOCK - 1 - jnp.argmax(take(probabilities, block)[:, ::-1] > 0, -1)
  place = jnp.sum(inside <= (target - before)[:, None], -1)
  drawn = block * _BLOCK + jnp.minimum(place, last)
  ids = jnp.where(temperature > 0, drawn, jnp.argmax(logits, -1))
  ids = ids.astype(jnp.int32)
  return ids, jnp.take_along_axis(logprobs, ids[:, None], 1)[:, 0]


@functools.partial(
  jax.jit, static_argnums=(0, 6, 7), donate_argnums=(2,), inline=False
)
def decode_steps(
  graphdef, weights, cache, slots, table, end_ids, steps: int, leave: int
):
  """Decodes up to `steps` ids in every running slot.

  Leaves early when `leave` slots have stopped since it began.

  Args:
    graphdef: the policy's static part.
    weights: rollout weights, see `model.unstack`.
    cache: of `empty_cache`; donated.
    slots: `Slots`.
    table: int16 [states + 1, V], of the stop automaton.
    end_ids: int32 [n], ids that end a turn.
    steps: ids at most.
    leave: slots.

  Returns:
    (cache, slots, ids [B, steps], logprobs [B, steps], counts [B]).
  """
  rows = slots.token.shape[0]
  hit = table.shape[0] - 1
  began = slots.reason

  def attend_layer(cache, new, position, layer, q, k, v):
    row = jnp.arange(rows)
    keys = cache[layer]["k"].at[row, :, :, position].set(k[:, 0])
    values = cache[layer]["v"].at[row, :, position, :].set(v[:, 0])
    new[layer] = dict(k=keys, v=values)
    return attend_cache(q, keys, values, position[:, None])

  def body(carry):
    step, cache, slots, ids, logprobs, counts = carry
    running = slots.reason == RUNNING
    new = list(cache)
    hidden = model.decode(
      graphdef,
      weights,
      slots.token[:, None],
      slots.position[:, None],
      functools.partial(attend_layer, cache, new, slots.position),
    )
    logits = model.logits(graphdef, weights, hidden[:, 0])
    drawn, logprob = sample(
      logits, slots.key, slots.position + 1, slots.temperature
    )
    state = table[slots.stop_state, drawn].astype(jnp.int32)
    turn_left = slots.turn_left - 1
    episode_left = slots.episode_left - 1
    reason = jnp.where(episode_left <= 0, EPISODE_TOKENS, RUNNING)
    reason = jnp.where(turn_left <= 0, TURN_TOKENS, reason)
    reason = jnp.where((drawn[:, None] == end_ids).any(-1), EOS, reason)
    reason = jnp.where(state == hit, STOP, reason)
    after = Slots(
      token=drawn,
      position=slots.position + 1,
      stop_state=state,
      reason=reason,
      turn_left=turn_left,
      episode_left=episode_left,
      key=slots.key,
      temperature=slots.temperature,
    )
    keep = lambda a, b: jnp.where(  # noqa: E731
      running.reshape(-1, *[1] * (a.ndim - 1)), a, b
    )
    return (
      step + 1,
      new,
      jax.tree.map(keep, after, slots),
      ids.at[:, step].set(drawn),
      logprobs.at[:, step].set(logprob),
      counts + running,
    )

  def go_on(carry):
    step, _, slots, *_ = carry
    stopped = jnp.sum((slots.reason != RUNNING) & (began == RUNNING))
    running = jnp.any(slots.reason == RUNNING)
    return (step < steps) & running & (stopped < leave)

  carry = (
    jnp.int32(0),
    cache,
    slots,
    jnp.zeros((rows, steps), jnp.int32),
    jnp.zeros((rows, steps), jnp.float32),
    jnp.zeros(rows, jnp.int32),
  )
  _, *out = jax.lax.while_loop(go_on, body, carry)
  return tuple(out)
