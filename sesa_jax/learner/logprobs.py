"""Logprobs of the sampled ids, without ever holding all logits."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def token_logprobs(
  project: Callable[[Array], Array],
  hidden_BTD: Float[Array, "B T D"],
  ids_BT: Int[Array, "B T"],
  mask_BT: Bool[Array, "B T"],
  *,
  temperature: Float[Array, ""] | float,
  chunk_tokens: int,
  entropy_gradient: bool = False,
  skip_chunks: bool = True,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  """Returns the logprob of each sampled id, and the entropy it was drawn from.

    logprobs[t] = log softmax(project(hidden[t - 1]) / temperature)[ids[t]]
    entropy[t] = -sum_v q_v log q_v, q that softmax

  Both are float32, and 0 where the mask is False and at t = 0, which nothing
  precedes. Logits exist for `chunk_tokens` tokens at a time, and are computed
  again in the backward pass. (All logits of 8k tokens at 152k ids are 4.6 GiB.)
  In each row the sampled ids come first, so that chunks in which no row has any
  cost nothing: most of an episode was read, not sampled.

  Args:
    project: hidden [..., D] to logits [..., V].
    hidden_BTD: after the last norm.
    ids_BT: what was read or sampled at each place.
    mask_BT: the places whose logprobs are wanted.
    temperature: of the sampling, above 0.
    chunk_tokens: tokens whose logits exist at once; at least one column.
    entropy_gradient: the entropy has one, for a bonus on it.
    skip_chunks: leave chunks out that nobody wants. Several devices of XLA:CPU
      wait for each other for ever in a branch with collectives.
  """
  dtype = jnp.promote_types(hidden_BTD.dtype, jnp.float32)
  rows, length = ids_BT.shape
  columns = min(length, max(1, chunk_tokens // rows))
  chunks = -(-length // columns)

  def split(x):  # [B, T, ...] to [chunks, B, columns, ...]
    x = jnp.pad(
      x, [(0, 0), (0, chunks * columns - length)] + [(0, 0)] * (x.ndim - 2)
    )
    x = x.reshape(rows, chunks, columns, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)

  def score(hidden, targets):
    logits = project(hidden).astype(dtype) / temperature
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    log_q = logits - log_sum[..., None]
    if not entropy_gradient:
      log_q = jax.lax.stop_gradient(log_q)
    q = jnp.exp(log_q)
    # 0 log 0 is 0, also where a masked id has a logit of -inf.
    entropy = -jnp.sum(q * jnp.where(q > 0, log_q, 0.0), axis=-1)
    return chosen - log_sum, entropy

  # Around the condition: inside, a branch's residuals, the head among them,
  # would leave it as outputs and be kept once for each chunk.
  @jax.checkpoint
  def chunk(_, inputs):
    hidden, targets, wanted = inputs

    def skip(hidden, targets):
      return (jnp.zeros(targets.shape, dtype),) * 2

    if not skip_chunks:
      return None, score(hidden, targets)
    return None, jax.lax.cond(wanted.any(), score, skip, hidden, targets)

  # From the place predicted to the place that predicts, the wanted ones first.
  wanted_BT = mask_BT.at[:, 0].set(False)
  order_BT = jnp.argsort(~jnp.roll(wanted_BT, -1, axis=1), axis=1)  # stable
  targets_BT, wanted_in_order = (
    jnp.take_along_axis(jnp.roll(x, -1, axis=1), order_BT, axis=1)
    for x in (ids_BT, wanted_BT)
  )
  hidden_BTD = jnp.take_along_axis(hidden_BTD, order_BT[..., None], axis=1)
  _, outputs = jax.lax.scan(
    chunk, None, tuple(map(split, (hidden_BTD, targets_BT, wanted_in_order)))
  )

  back_BT = jnp.argsort(order_BT, axis=1)

  def join(x):  # and back
    x = jnp.moveaxis(x, 0, 1).reshape(rows, chunks * columns)[:, :length]
    x = jnp.roll(jnp.take_along_axis(x, back_BT, axis=1), 1, axis=1)
    return jnp.where(wanted_BT, x, 0.0)

  logprobs_BT, entropy_BT = outputs
  return join(logprobs_BT), join(entropy_BT)
