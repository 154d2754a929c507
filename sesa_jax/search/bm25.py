"""BM25 over passages, on the host, scored by the bm25s library.

`Bm25` indexes passages in memory. `build` writes an index of any number of
them to a folder, `load` reads it through memory maps.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sesa_jax import language
from sesa_jax.search import base, stored
from sesa_jax.types import Passage

_BLOCK = 50_000  # passages whose postings are in memory at once, in a build


def terms(text: str, stopwords: frozenset[str]) -> list[str]:
  """Splits text to index terms: folded, without accents and stopwords."""
  plain = "".join(
    c
    for c in unicodedata.normalize("NFKD", text)
    if not unicodedata.combining(c)
  )
  return [t for t in language.ENGLISH.tokens(plain) if t not in stopwords]


def _library(k1: float, b: float) -> tuple[Any, frozenset[str]]:
  """Returns an empty index of bm25s, and its stopwords.

  Raises:
    ValueError: k1 or b out of range.
  """
  # Importing bm25s runs a JAX operation, which takes hold of the devices and
  # must not come before jax.distributed is initialised.
  import bm25s
  from bm25s.stopwords import STOPWORDS_EN

  if k1 < 0 or not 0 <= b <= 1:
    raise ValueError(
      f"search.k1={k1} and search.b={b} are out of range. Choose k1 >= 0 and "
      f"0 <= b <= 1, for example 0.9 and 0.4."
    )
  index = bm25s.BM25(k1=k1, b=b, method="lucene", backend="numpy")
  return index, frozenset(STOPWORDS_EN)


class Bm25:
  """An exact BM25 index of titles and texts.

  The score of a passage D for a query is, over the query's terms q,

    sum_q  ln(1 + (N - n_q + 1/2) / (n_q + 1/2))
           * f / (f + k1 (1 - b + b |D| / mean |D|))

  with N passages, n_q of them holding q, and f the times that D holds it:
  Lucene's form (Kamphuis et al. 2020). Ties go to the earlier passage.
  """

  def __init__(
    self, passages: Sequence[Passage], *, k1: float = 0.9, b: float = 0.4
  ):
    """Builds the index in memory.

    Args:
      passages: what is searched; titles are searched with the text.
      k1: how slowly a repeated term saturates, at least 0.
      b: how much long passages are held back, 0 to 1.

    Raises:
      ValueError: no passages, or k1 or b out of range.
    """
    if not passages:
      raise ValueError("The corpus has no passages to search.")
    index, stopwords = _library(k1, b)
    index.index(
      [terms(f"{p.title} {p.text}", stopwords) for p in passages],
      show_progress=False,
    )
    self._set(tuple(passages), index, stopwords, index.vocab_dict.get)

  def _set(
    self,
    passages: Sequence[Passage],
    index: Any,
    stopwords: frozenset[str],
    number: Callable[[str], int | None],
  ) -> None:
    self._passages, self._index = passages, index
    self._stopwords, self._number = stopwords, number

  def search(self, queries: Sequence[str], k: int) -> list[base.Found]:
    """Returns the k best passages of each query, scores set, best first.

    Passages that share no term with the query are never returned, so a query
    of stopwords alone, or of unknown words, gives an empty tuple.
    """
    base.check_k(k)
    return [self._best(query, k) for query in queries]

  def _best(self, query: str, k: int) -> tuple[Passage, ...]:
    numbers = [self._number(t) for t in terms(query, self._stopwords)]
    known = [number for number in numbers if number is not None]
    if not known:
      return ()
    scores = self._index.get_scores_from_ids(known)
    k = min(k, len(scores))
    floor = np.partition(scores, -k)[-k]
    # All passages at the k-th score take part, so that order decides ties.
    hits = np.flatnonzero((scores >= floor) & (scores > 0))
    best = hits[np.argsort(-scores[hits], kind="stable")][:k]
    return tuple(
      dataclasses.replace(self._passages[int(i)], score=float(scores[i]))
      for i in best
    )


# --- on disk ---------------------------------------------------------------


def load(folder: str | Path, *, k1: float, b: float) -> Bm25:
  """Opens an index that `build` wrote; what is searched stays on disk.

  Raises:
    ValueError: a file is missing.
  """
  folder = Path(folder)
  index, stopwords = _library(k1, b)
  try:
    index.scores = {
      name: np.load(folder / f"{name}.npy", mmap_mode="r")
      for name in ("data", "indices", "indptr")
    }
    words = stored.Lines(folder / "terms.txt")
    passages = stored.Passages(folder)
  except FileNotFoundError as error:
    raise ValueError(
      f"The index {folder} lacks {Path(error.filename).name}. Build it again."
    ) from None
  index.scores["num_docs"] = len(passages)
  index.nonoccurrence_array = None

  def number(word: str) -> int | None:
    code = word.encode()
    place = bisect.bisect_left(words, code)
    return place if place < len(words) and words[place] == code else None

  engine = Bm25.__new__(Bm25)
  engine._set(passages, index, stopwords, number)
  return engine


def build(folder: Path, *, k1: float, b: float) -> None:
  """Indexes the passages of a folder, of which a block is in memory at a time.

  Beside the block the vocabulary is, and 4 bytes a passage. Files: `terms.txt`,
  sorted, a term's number being its line; `indptr.npy`, where its postings
  begin; `indices.npy` and `data.npy`, its passages and their scores.

  Args:
    folder: holds `stored.Passages`; the index is written beside them.
    k1: see `Bm25`.
    b: see `Bm25`.

  Raises:
    ValueError: k1 or b out of range.
  """
  _, stopwords = _library(k1, b)
  passages = stored.Passages(folder)
  numbers: dict[str, int] = {}  # in the order in which terms were seen
  blocks, lengths = [], []
  for start in range(0, len(passages), _BLOCK):
    texts = (passages[i] for i in range(start, len(passages)))
    block = itertools.islice(texts, _BLOCK)
    words = stored.progress(
      (terms(f"{p.title} {p.text}", stopwords) for p in block),
      f"passages indexed from {start}",
    )
    path = folder / f"block{len(blocks)}.npy"
    lengths.append(_postings(words, start, numbers, path))
    blocks.append(path)
  if not numbers:
    raise ValueError("The corpus has no words to search.")
  order = np.array(sorted(range(len(numbers)), key=list(numbers).__getitem__))
  stored.write_lines(
    folder / "terms.txt", (w.encode() + b"\n" for w in sorted(numbers))
  )
  rank = np.empty(len(numbers), np.int32)
  rank[order] = np.arange(len(numbers), dtype=np.int32)
  numbers.clear()
  _invert(folder, blocks, rank, np.concatenate(lengths), k1, b)
  for path in blocks:
    path.unlink()


def _postings(
  documents: Iterable[list[str]],
  start: int,
  numbers: dict[str, int],
  path: Path,
) -> np.ndarray:
  """Writes a block's (term, passage, count) rows; returns passages' lengths."""
  rows, lengths = [], []
  for number, words in enumerate(documents, start):
    lengths.append(len(words))
    counts = Counter(words)
    row = np.empty((len(counts), 3), np.int32)
    row[:, 0] = [numbers.setdefault(w, len(numbers)) for w in counts]
    row[:, 1] = number
    row[:, 2] = list(counts.values())
    rows.append(row)
  np.save(path, np.concatenate(rows))
  return np.array(lengths, np.int32)


def _invert(
  folder: Path,
  blocks: Sequence[Path],
  rank: np.ndarray,
  lengths: np.ndarray,
  k1: float,
  b: float,
) -> None:
  """Sorts the blocks' rows by term into the index's files, with scores."""
  holding = np.zeros(len(rank), np.int64)  # passages that hold a term
  for path in blocks:
    terms_of = rank[np.load(path, mmap_mode="r")[:, 0]]
    holding += np.bincount(terms_of, minlength=len(rank))
  indptr = np.concatenate([[0], np.cumsum(holding)])
  np.save(folder / "indptr.npy", indptr)
  idf = np.log(1 + (len(lengths) - holding + 0.5) / (holding + 0.5))
  norm = k1 * (1 - b + b * lengths / max(lengths.mean(), 1e-9))
  indices, data = (
    np.lib.format.open_memmap(
      folder / f"{name}.npy", "w+", kind, (int(indptr[-1]),)
    )
    for name, kind in (("indices", np.int32), ("data", np.float32))
  )
  free = indptr[:-1].copy()  # of each term's places, the first that is
  for path in stored.progress(blocks, "blocks sorted by term"):
    rows = np.load(path)
    term = rank[rows[:, 0]]
    order = np.argsort(term, kind="stable")  # passages of a term stay in order
    term, passage, f = term[order], rows[order, 1], rows[order, 2]
    first = np.searchsorted(term, term)  # of the term's rows in this block
    place = free[term] + np.arange(len(term)) - first
    indices[place] = passage
    data[place] = idf[term] * (f / (f + norm[passage]))
    free += np.bincount(term, minlength=len(free))
  indices.flush()
  data.flush()
