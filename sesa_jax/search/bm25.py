"""BM25 over passages, on the host, scored by the bm25s library.

`Bm25` indexes passages in memory. `build` writes an index of any number of
them to a folder, `load` reads it through memory maps.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
import logging
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sesa_jax import language
from sesa_jax.search import base, stored
from sesa_jax.types import Passage

_BLOCK = 50_000  # passages whose postings are in memory at once, in a build
_PART = 1 << 21  # postings that are, when its blocks are merged


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
  # It asks for DEBUG by itself, and would tell each index that is built.
  logging.getLogger("bm25s").setLevel(logging.WARNING)
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
    hits = np.flatnonzero(scores)
    if len(hits) > k:
      # All passages at the k-th score take part, so that order decides ties.
      hits = hits[scores[hits] >= np.partition(scores[hits], -k)[-k]]
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

  Beside the block the vocabulary is, and some bytes a passage. Files:
  `terms.txt`, sorted, a term's number being its line; `indptr.npy`, where its
  postings begin; `indices.npy` and `data.npy`, its passages and their scores.

  Args:
    folder: holds `stored.Passages`; the index is written beside them.
    k1: see `Bm25`.
    b: see `Bm25`.

  Raises:
    ValueError: k1 or b out of range.
  """
  _, stopwords = _library(k1, b)
  passages = stored.Passages(folder)
  texts = iter(passages)
  numbers: dict[str, int] = {}  # in the order in which terms were seen
  blocks, lengths = [], []
  for start in range(0, len(passages), _BLOCK):
    words = stored.progress(
      (
        terms(f"{p.title} {p.text}", stopwords)
        for p in itertools.islice(texts, _BLOCK)
      ),
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
  """Writes a block's terms, passages and counts; returns passages' lengths."""
  columns, lengths = [], []
  for number, words in enumerate(documents, start):
    lengths.append(len(words))
    counts = Counter(words)
    column = np.empty((3, len(counts)), np.int32)
    column[0] = [numbers.setdefault(w, len(numbers)) for w in counts]
    column[1] = number
    column[2] = list(counts.values())
    columns.append(column)
  np.save(path, np.concatenate(columns, axis=1))
  return np.array(lengths, np.int32)


def _invert(
  folder: Path,
  blocks: Sequence[Path],
  rank: np.ndarray,
  lengths: np.ndarray,
  k1: float,
  b: float,
) -> None:
  """Merges the blocks by term into the index's files, with scores.

  Each block is sorted; then the postings of some terms at a time are taken from
  all blocks, and written behind those before.
  """
  holding = np.zeros(len(rank), np.int64)  # passages that hold a term
  for path in stored.progress(blocks, "blocks sorted by term"):
    postings = np.load(path)
    postings[0] = rank[postings[0]]
    np.save(path, _by_term(postings))
    holding += np.bincount(postings[0], minlength=len(rank))
  indptr = np.concatenate([[0], np.cumsum(holding)])
  np.save(folder / "indptr.npy", indptr)
  idf = np.log(1 + (len(lengths) - holding + 0.5) / (holding + 0.5))
  norm = k1 * (1 - b + b * lengths / max(lengths.mean(), 1e-9))
  with (
    _array(folder / "indices.npy", np.int32, int(indptr[-1])) as indices,
    _array(folder / "data.npy", np.float32, int(indptr[-1])) as data,
  ):
    for first, last in stored.progress(_parts(indptr), "parts merged"):
      # Of equal terms those of earlier blocks come first, as passages do.
      term, passage, f = _by_term(
        np.concatenate([_between(p, first, last) for p in blocks], axis=1)
      )
      passage.tofile(indices)
      scores = idf[term] * (f / (f + norm[passage]))
      scores.astype(np.float32).tofile(data)


def _by_term(postings: np.ndarray) -> np.ndarray:
  return np.take(postings, np.argsort(postings[0], kind="stable"), axis=1)


def _between(path: Path, first: int, last: int) -> np.ndarray:
  """Reads a sorted block's postings of the terms first, .., last - 1."""
  block = np.load(path, mmap_mode="r")
  start, stop = np.searchsorted(block[0], np.array([first, last], np.int32))
  return np.array(block[:, start:stop])


def _parts(indptr: np.ndarray) -> Iterator[tuple[int, int]]:
  """Yields ranges of terms that have `_PART` postings, or are a term alone."""
  first, terms_ = 0, len(indptr) - 1
  while first < terms_:
    full = np.searchsorted(indptr, indptr[first] + _PART, side="right") - 1
    last = max(first + 1, int(full))
    yield first, last
    first = last


@contextlib.contextmanager
def _array(path: Path, kind: type, size: int) -> Iterator[BinaryIO]:
  """Opens a .npy file of so many numbers, which are then written in order."""
  with path.open("wb") as file:
    np.lib.format.write_array_header_1_0(
      file,
      {
        "descr": np.lib.format.dtype_to_descr(np.dtype(kind)),
        "fortran_order": False,
        "shape": (size,),
      },
    )
    yield file
