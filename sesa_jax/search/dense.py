"""Nearest passages by embeddings: our encoder, and vectors on disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sesa_jax.data import corpus
from sesa_jax.retrieval import index as index_lib
from sesa_jax.search import base, stored
from sesa_jax.types import Encoder, Passage

_BLOCK = 1024  # passages that are embedded at a time
_TREE = "scann"  # folder of the tree


class Dense:
  """Passages whose embedding is nearest to the query's, by cosine.

  Args:
    passages: what is searched.
    vectors: float32 [N, E], a unit row a passage.
    encoder: that made them.
    neighbours: one of `retrieval.index.KINDS`.
    tree: of `retrieval.index.grow`; "" is none.

  Raises:
    ValueError: the vectors are not the encoder's, or `neighbours` is unknown.
  """

  def __init__(
    self,
    passages: Sequence[Passage],
    vectors: np.ndarray,
    encoder: Encoder,
    neighbours: str,
    tree: str | Path = "",
  ):
    if vectors.shape != (len(passages), encoder.dim):
      raise ValueError(
        f"Vectors of shape {vectors.shape} for {len(passages)} passages and an "
        f"encoder of width {encoder.dim}: they do not belong together. Build "
        "the index again."
      )
    self._passages, self._encoder = passages, encoder
    everything = np.ones(len(passages), bool)
    self._index = index_lib.build(vectors, everything, neighbours, tree)

  def search(self, queries: Sequence[str], k: int) -> list[base.Found]:
    """See `types.SearchEngine`; scores are cosines."""
    base.check_k(k)
    if not queries:
      return []
    vectors = self._encoder.encode(queries, "query")
    scores, rows = self._index.search(vectors, k)
    return [
      tuple(
        dataclasses.replace(self._passages[int(row)], score=float(score))
        for score, row in zip(*pair, strict=True)
        if row >= 0
      )
      for pair in zip(scores, rows, strict=True)
    ]


def load(folder: str | Path, encoder: Encoder, neighbours: str) -> Dense:
  """Opens what `build` wrote.

  Raises:
    ValueError: a file is missing, or belongs to another encoder.
  """
  folder = Path(folder)
  try:
    vectors = np.load(folder / "vectors.npy", mmap_mode="r")
    tree = folder / _TREE if (folder / _TREE).exists() else ""
    return Dense(stored.Passages(folder), vectors, encoder, neighbours, tree)
  except FileNotFoundError as error:
    raise ValueError(
      f"The index {folder} lacks {Path(error.filename).name}. Build it again."
    ) from None


def build(folder: Path, encoder: Encoder) -> None:
  """Embeds the passages of a folder into `vectors.npy`, float32 [N, E].

  A passage's text is Search-R1's `contents`, title and all. Many vectors get
  a tree of ScaNN, where it is installed.
  """
  passages = stored.Passages(folder)
  vectors = np.lib.format.open_memmap(
    folder / "vectors.npy", "w+", np.float32, (len(passages), encoder.dim)
  )
  blocks = range(0, len(passages), _BLOCK)
  for start in stored.progress(blocks, f"blocks of {_BLOCK} passages embedded"):
    stop = min(start + _BLOCK, len(passages))
    texts = [corpus.contents(passages[i]) for i in range(start, stop)]
    vectors[start:stop] = encoder.encode(texts, "passage")
  vectors.flush()
  if len(vectors) >= index_lib.TREE_FROM and index_lib.has_scann():
    index_lib.grow(vectors, folder / _TREE)
