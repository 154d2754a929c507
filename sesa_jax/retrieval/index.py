"""Exact nearest neighbours: the reference for every faster index."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from sesa_jax.distributed import host_cpu

# Queries go through in blocks of this many rows: XLA gives a row the same bits
# at one shape only, so a result must not depend on who else asked.
BLOCK = 8


def top_k(
  queries: Float[np.ndarray, "Q E"],
  vectors: Float[np.ndarray | jax.Array, "S E"],
  mask: Bool[np.ndarray | jax.Array, " S"] | Bool[np.ndarray, "Q S"],
  k: int,
) -> tuple[Float[np.ndarray, "Q k"], Int[np.ndarray, "Q k"]]:
  """Finds the k vectors with the greatest inner product, by brute force.

  score[q, s] = sum_e queries[q, e] vectors[s, e] where mask[s], else -inf.
  Of equal scores the lower index comes first.

  Args:
    queries: float32 [Q, E].
    vectors: float32 [S, E], kept where it lies if it is on the host's CPU.
    mask: bool [S], or [Q, S] for a mask of its own for each query.
    k: results a query, at least 1.

  Returns:
    Scores float32 [Q, k], descending, and their indices int32 [Q, k]. Where
    fewer than k rows are unmasked the rest is -inf and -1.

  Raises:
    ValueError: k < 1.
  """
  Q, S = len(queries), len(vectors)
  if k < 1:
    raise ValueError(f"k = {k}: ask for at least 1 neighbour.")
  scores = np.full((Q, k), -np.inf, np.float32)
  indices = np.full((Q, k), -1, np.int32)
  if not S:
    return scores, indices
  found = min(k, S)
  vectors = jax.device_put(vectors, host_cpu())
  masks = np.broadcast_to(np.asarray(mask), (Q, S))
  for start in range(0, Q, BLOCK):
    stop = min(start + BLOCK, Q)
    block = np.zeros((BLOCK, queries.shape[1]), np.float32)
    block[: stop - start] = queries[start:stop]
    allowed = np.zeros((BLOCK, S), bool)
    allowed[: stop - start] = masks[start:stop]
    best, where = _top_k(block, vectors, allowed, found)
    scores[start:stop, :found] = best[: stop - start]
    indices[start:stop, :found] = where[: stop - start]
  return scores, indices


@functools.partial(jax.jit, static_argnames="k")
def _top_k(queries, vectors, mask, k):
  scores = jnp.matmul(queries, vectors.T, precision=jax.lax.Precision.HIGHEST)
  # Of equal elements `lax.top_k` puts the one with the lower index first.
  best, where = jax.lax.top_k(jnp.where(mask, scores, -jnp.inf), k)
  return best, jnp.where(jnp.isneginf(best), -1, where)
