"""Nearest neighbours: the exact index, which is the reference, and ScaNN.

ScaNN: Guo et al., arXiv 1908.10396. What is measured, and which is the default
at which size, stands in docs/skills.md.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from sesa_jax.distributed import host_cpu

# Queries go through in blocks of this many rows: XLA gives a row the same bits
# at one shape only, so a result must not depend on who else asked.
BLOCK = 8

KINDS = ("auto", "exact", "scann")
# Vectors from which an index on disk gets a tree. A bank never has one: it
# changes every few searches, and to score all is done before a tree has grown.
TREE_FROM = 100_000
SEARCHED = 0.4  # of the leaves, for a recall of .95 and more on real text
TRAINED = 25_000  # vectors that leaves and hashes are fitted to
REORDERED = 100  # candidates whose inner products are computed
SPARE = 8  # neighbours fetched beyond k, in the place of those not allowed


class Index(Protocol):
  """Finds the nearest of some vectors."""

  def search(
    self,
    queries: Float[np.ndarray, "Q E"],
    k: int,
    allowed: Bool[np.ndarray, "Q S"] | None = None,
  ) -> tuple[Float[np.ndarray, "Q k"], Int[np.ndarray, "Q k"]]:
    """Returns scores and rows as `top_k` does.

    Args:
      queries: float32.
      k: results a query, at least 1.
      allowed: False at what a query must not find.
    """
    ...


def build(
  vectors: Float[np.ndarray | jax.Array, "S E"],
  mask: Bool[np.ndarray | jax.Array, " S"],
  kind: str = "auto",
  tree: str | Path = "",
) -> Index:
  """Builds an index of the vectors that are not masked.

  Args:
    vectors: float32.
    mask: False at rows that nobody may find.
    kind: one of KINDS; "auto" is ScaNN where it is installed.
    tree: folder of `grow`, for ScaNN: of the rows that are not masked.

  Raises:
    ValueError: an unknown kind, or ScaNN is not installed.
  """
  check(kind)
  if kind == "auto":  # ScaNN is the faster one at every size
    kind = "scann" if has_scann() else "exact"
  if kind == "exact":
    return Exact(vectors, mask)
  return Scann(vectors, mask, tree)


def check(kind: str) -> None:
  """Refuses what `build` would, before anything is loaded.

  Raises:
    ValueError: an unknown kind, or ScaNN is not installed.
  """
  if kind not in KINDS:
    raise ValueError(f"Unknown index {kind!r}. Choices: {', '.join(KINDS)}.")
  if kind == "scann" and not has_scann():
    raise ValueError(
      "The index 'scann' needs the package scann, which is not installed "
      "(there is none for this machine, or pip left it out). Choose 'exact'."
    )


def has_scann() -> bool:
  """Whether ScaNN is installed: there are wheels for Linux on x86-64 alone."""
  return importlib.util.find_spec("scann") is not None


class Exact:
  """Brute force by XLA; an `Index`."""

  def __init__(
    self,
    vectors: Float[np.ndarray | jax.Array, "S E"],
    mask: Bool[np.ndarray | jax.Array, " S"],
  ):
    self._vectors = jax.device_put(vectors, host_cpu())
    self._mask = np.asarray(mask)

  def search(
    self,
    queries: Float[np.ndarray, "Q E"],
    k: int,
    allowed: Bool[np.ndarray, "Q S"] | None = None,
  ) -> tuple[Float[np.ndarray, "Q k"], Int[np.ndarray, "Q k"]]:
    """See `Index`; scores and ties are those of `top_k`."""
    mask = self._mask if allowed is None else self._mask & allowed
    return top_k(queries, self._vectors, mask, k)


class Scann:
  """ScaNN; an `Index`.

  All vectors are scored, or with a tree of `grow` those of the leaves that are
  nearest, by anisotropic hashes, and the best of those by their inner products.
  A query whose SPARE further neighbours do not make up for those that it must
  not find is answered by the exact index.

  Raises:
    ValueError: ScaNN is not installed, or the tree is damaged.
  """

  def __init__(
    self,
    vectors: Float[np.ndarray | jax.Array, "S E"],
    mask: Bool[np.ndarray | jax.Array, " S"],
    tree: str | Path = "",
  ):
    check("scann")
    from scann.scann_ops.py import scann_ops_pybind

    self._exact, self._tree = Exact(vectors, mask), bool(tree)
    self._rows = np.flatnonzero(np.asarray(mask)).astype(np.int32)
    if not len(self._rows):
      return
    self._vectors = np.asarray(vectors, np.float32)[self._rows]
    if tree:
      try:
        self._searcher = scann_ops_pybind.load_searcher(str(tree))
      except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(
          f"{tree} holds no tree of ScaNN ({error}). Build the index again."
        ) from error
    else:
      builder = scann_ops_pybind.builder(self._vectors, SPARE, "dot_product")
      self._searcher = builder.score_brute_force().build()

  def search(
    self,
    queries: Float[np.ndarray, "Q E"],
    k: int,
    allowed: Bool[np.ndarray, "Q S"] | None = None,
  ) -> tuple[Float[np.ndarray, "Q k"], Int[np.ndarray, "Q k"]]:
    """See `Index`; of equal scores the lower row comes first."""
    if k < 1 or not len(queries) or not len(self._rows):
      return self._exact.search(queries, k, allowed)
    queries = np.asarray(queries, np.float32)
    found, near = self._near(queries, min(k + SPARE, len(self._rows)))
    # ScaNN's own last bits depend on who else is asked; these do not: each
    # query is a product of its own.
    scores = np.matmul(self._vectors[found], queries[:, :, None])[..., 0]
    scores[np.isnan(near)] = -np.inf  # it found fewer
    rows = self._rows[found]
    if allowed is not None:
      scores[~np.take_along_axis(allowed, rows, 1)] = -np.inf
    return self._best(queries, scores, rows, k, allowed)

  def _near(self, queries, number):
    """The rows that ScaNN finds, and their scores: [Q, number]."""
    if not self._tree:
      return self._searcher.search_batched_parallel(
        queries, final_num_neighbors=number
      )
    # Few queries choose their leaves by another rule than many, and parallel
    # calls divide them by the cores that there are: hence blocks of one size.
    parts = []
    for start in range(0, len(queries), BLOCK):
      block = np.zeros((BLOCK, queries.shape[1]), np.float32)
      block[: len(queries) - start] = queries[start : start + BLOCK]
      parts.append(
        self._searcher.search_batched(block, final_num_neighbors=number)
      )
    found, near = (np.concatenate(part) for part in zip(*parts, strict=True))
    return found[: len(queries)], near[: len(queries)]

  def _best(self, queries, found, rows, k, allowed):
    """Picks the k best of what was found; asks the exact index for the rest."""
    order = np.lexsort((rows, -found), axis=1)[:, :k]
    width = order.shape[1]
    scores = np.full((len(queries), k), -np.inf, np.float32)
    indices = np.full((len(queries), k), -1, np.int32)
    scores[:, :width] = np.take_along_axis(found, order, 1)
    indices[:, :width] = np.take_along_axis(rows, order, 1)
    indices[np.isneginf(scores)] = -1
    # Too few were left of those fetched: there may be more.
    short = np.flatnonzero(np.isneginf(scores[:, min(k, len(self._rows)) - 1]))
    if len(short):
      scores[short], indices[short] = self._exact.search(
        queries[short], k, None if allowed is None else allowed[short]
      )
    return scores, indices


def grow(vectors: Float[np.ndarray, "S E"], folder: str | Path) -> None:
  """Grows a tree for ScaNN over vectors, and writes it to a new folder.

  k-means leaves with anisotropic hashes. ScaNN's training does not repeat
  itself, not even in one process: a tree is grown once and kept, so that what
  is found follows from the files alone.

  Args:
    vectors: float32, all of an index.
    folder: that is not there yet; it may move.

  Raises:
    ValueError: ScaNN is not installed.
  """
  check("scann")
  from scann.scann_ops.py import scann_ops_pybind

  leaves = round(math.sqrt(len(vectors)))
  builder = scann_ops_pybind.builder(
    np.asarray(vectors, np.float32), SPARE, "dot_product"
  )
  builder.tree(
    leaves, max(1, round(leaves * SEARCHED)), training_sample_size=TRAINED
  )
  builder.score_ah(
    2, anisotropic_quantization_threshold=0.2, training_sample_size=TRAINED
  )
  builder.reorder(REORDERED)
  Path(folder).mkdir()
  builder.build().serialize(str(folder), relative_path=True)


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
