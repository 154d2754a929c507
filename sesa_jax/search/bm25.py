"""BM25 over passages, on the host, by the bm25s library."""

from __future__ import annotations

import dataclasses
import unicodedata
from collections.abc import Sequence

import numpy as np

from sesa_jax import language
from sesa_jax.types import Passage, SearchFailure


def terms(text: str, stopwords: frozenset[str]) -> list[str]:
  """Splits text to index terms: folded, without accents and stopwords."""
  plain = "".join(
    c
    for c in unicodedata.normalize("NFKD", text)
    if not unicodedata.combining(c)
  )
  return [t for t in language.ENGLISH.tokens(plain) if t not in stopwords]


class Bm25:
  """An exact BM25 index of titles and texts, held in memory.

  The score of a passage D for a query is, over the query's terms q,

    sum_q  ln(1 + (N - n_q + 1/2) / (n_q + 1/2))
           * f / (f + k1 (1 - b + b |D| / mean |D|))

  with N passages, n_q of them holding q, and f the times that D holds it:
  Lucene's form (Kamphuis et al. 2020). Ties go to the earlier passage.
  """

  def __init__(
    self, passages: Sequence[Passage], *, k1: float = 0.9, b: float = 0.4
  ):
    """Builds the index.

    Args:
      passages: what is searched; titles are searched with the text.
      k1: how slowly a repeated term saturates, at least 0.
      b: how much long passages are held back, 0 to 1.

    Raises:
      ValueError: no passages, or k1 or b out of range.
    """
    # Importing bm25s runs a JAX operation, which takes hold of the devices and
    # must not come before jax.distributed is initialised.
    import bm25s
    from bm25s.stopwords import STOPWORDS_EN

    if not passages:
      raise ValueError("The corpus has no passages to search.")
    if k1 < 0 or not 0 <= b <= 1:
      raise ValueError(
        f"search.k1={k1} and search.b={b} are out of range. Choose k1 >= 0 and "
        f"0 <= b <= 1, for example 0.9 and 0.4."
      )
    self._passages = tuple(passages)
    self._stopwords = frozenset(STOPWORDS_EN)
    self._index = bm25s.BM25(k1=k1, b=b, method="lucene", backend="numpy")
    self._index.index(
      [terms(f"{p.title} {p.text}", self._stopwords) for p in passages],
      show_progress=False,
    )

  def search(
    self, queries: Sequence[str], k: int
  ) -> list[tuple[Passage, ...] | SearchFailure]:
    """Returns the k best passages of each query, scores set, best first.

    Passages that share no term with the query are never returned, so a query
    of stopwords alone, or of unknown words, gives an empty tuple.
    """
    if k < 1:
      raise ValueError(f"A search for {k} passages; ask for at least 1.")
    return [self._best(query, k) for query in queries]

  def _best(self, query: str, k: int) -> tuple[Passage, ...]:
    known = self._index.vocab_dict
    words = [t for t in terms(query, self._stopwords) if t in known]
    if not words:
      return ()
    scores = self._index.get_scores(words)
    k = min(k, len(scores))
    floor = np.partition(scores, -k)[-k]
    # All passages at the k-th score take part, so that order decides ties.
    hits = np.flatnonzero((scores >= floor) & (scores > 0))
    best = hits[np.argsort(-scores[hits], kind="stable")][:k]
    return tuple(
      dataclasses.replace(self._passages[i], score=float(scores[i]))
      for i in best
    )
