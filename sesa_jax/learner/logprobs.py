"""Logprobs of given ids without ever holding all logits."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def token_logprobs(
  project: Callable[[Array], Array],
  hidden_BTD: Float[Array, "B T D"],
  ids_BT: Int[Array, "B T"],
  *,
  temperature: Float[Array, ""] | float,
  chunk_tokens: int,
  entropy_gradient: bool = False,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  """Returns the logprob of each id, and the entropy that it was drawn from.

    logprobs[t] = log softmax(project(hidden[t - 1]) / temperature)[ids[t]]
    entropy[t] = -sum_v q_v log q_v, q that softmax

  Both are float32 and 0 at t = 0, which nothing precedes. Logits exist for
  `chunk_tokens` tokens at a time: a scan over columns of the rows, recomputed
  in the backward pass. (All logits of 8k tokens at 152k ids are 4.6 GiB.)

  Args:
    project: hidden [..., D] to logits [..., V].
    hidden_BTD: after the last norm.
    ids_BT: what was read or sampled at each place.
    temperature: of the sampling, above 0.
    chunk_tokens: tokens whose logits exist at once; at least one column.
    entropy_gradient: the entropy has one, for a bonus on it.
  """
  rows, length = ids_BT.shape
  columns = min(length, max(1, chunk_tokens // rows))
  chunks = -(-length // columns)

  def split(x):  # [B, T, ...] to [chunks, B, columns, ...]
    x = jnp.pad(
      x, [(0, 0), (0, chunks * columns - length)] + [(0, 0)] * (x.ndim - 2)
    )
    x = x.reshape(rows, chunks, columns, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)

  @jax.checkpoint
  def chunk(_, inputs):
    hidden, targets = inputs
    logits = project(hidden).astype(jnp.float32) / temperature
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    log_q = logits - log_sum[..., None]
    if not entropy_gradient:
      log_q = jax.lax.stop_gradient(log_q)
    q = jnp.exp(log_q)
    # 0 log 0 is 0, also where a masked id has a logit of -inf.
    entropy = -jnp.sum(q * jnp.where(q > 0, log_q, 0.0), axis=-1)
    return None, (chosen - log_sum, entropy)

  targets_BT = jnp.roll(ids_BT, -1, axis=1)
  _, outputs = jax.lax.scan(chunk, None, (split(hidden_BTD), split(targets_BT)))

  def join(x):  # and from the place that predicts to the place predicted
    x = jnp.moveaxis(x, 0, 1).reshape(rows, chunks * columns)[:, :length]
    return jnp.roll(x, 1, axis=1).at[:, 0].set(0.0)

  logprobs_BT, entropy_BT = outputs
  return join(logprobs_BT), join(entropy_BT)
