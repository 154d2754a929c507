"""An index's folder: passages on disk, and of which corpus they are.

    meta.json            what the index was made of; written last
    passages.jsonl       a passage a line, `corpus.line`
    passages.npy         int64 [N + 1]: where lines begin

and the files of BM25 (`bm25.build`) or of vectors (`dense.build`). All are read
through memory maps: of millions of passages only those found are in memory.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import json
import mmap
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from sesa_jax.data import corpus
from sesa_jax.types import Passage

_META = "meta.json"
_LOG_SECONDS = 10.0


class Lines(Sequence[bytes]):
  """The lines of a file, without their newlines, by number."""

  def __init__(self, path: Path):
    """Opens `path` and the `.npy` beside it, which `write_lines` made."""
    self._path = path
    self._starts = np.load(path.with_suffix(".npy"), mmap_mode="r")
    with path.open("rb") as file:
      size = path.stat().st_size
      access = mmap.ACCESS_READ
      self._data = mmap.mmap(file.fileno(), 0, access=access) if size else b""

  def __len__(self) -> int:
    return len(self._starts) - 1

  def __getitem__(self, number: int) -> bytes:
    if not 0 <= number < len(self):
      raise IndexError(number)
    start, stop = self._starts[number : number + 2]
    return self._data[int(start) : int(stop) - 1]

  def __iter__(self) -> Iterator[bytes]:
    with self._path.open("rb") as file:  # a map would come to hold it all
      for line in file:
        yield line[:-1]


class Passages(Sequence[Passage]):
  """The passages of an index's folder, by number."""

  def __init__(self, folder: Path):
    self._lines = Lines(folder / "passages.jsonl")

  def __len__(self) -> int:
    return len(self._lines)

  def __getitem__(self, number: int) -> Passage:
    return Passage(*json.loads(self._lines[number]))

  def __iter__(self) -> Iterator[Passage]:
    return (Passage(*json.loads(line)) for line in self._lines)


def write_lines(path: Path, lines: Iterable[bytes]) -> None:
  """Writes lines, each with its newline, and where they begin."""
  starts = array.array("q", [0])
  with path.open("wb") as file:
    for line in lines:
      starts.append(starts[-1] + file.write(line))
  np.save(path.with_suffix(".npy"), np.asarray(starts))


def write_passages(folder: Path, passages: Iterable[Passage]) -> str:
  """Writes passages, one at a time; returns their `corpus.digest`.

  Raises:
    ValueError: an id is used twice, or there is no passage.
  """
  sha, ids = hashlib.sha256(), array.array("Q")

  def lines():
    for passage in progress(passages, "passages written"):
      code = hashlib.blake2b(
        passage.id.encode("utf-8", "surrogatepass"), digest_size=8
      ).digest()
      ids.append(int.from_bytes(code, "little"))
      line = corpus.line(passage)
      sha.update(line)
      yield line

  write_lines(folder / "passages.jsonl", lines())
  if not ids:
    raise ValueError("The corpus holds no passage.")
  codes = np.sort(np.asarray(ids))
  same = codes[1:] == codes[:-1]
  if same.any():
    second = np.flatnonzero(np.asarray(ids) == codes[1:][same][0])[1]
    raise corpus.repeated(Passages(folder)[int(second)].id)
  return sha.hexdigest()


def progress(items: Iterable[Any], what: str) -> Iterator[Any]:
  """Yields items, and says every ten seconds how many there were."""
  began = said = time.monotonic()
  count = 0
  for count, item in enumerate(items, 1):
    yield item
    now = time.monotonic()
    if now - said >= _LOG_SECONDS:
      said = now
      logging.info("%s: %d, %.0f/s", what, count, count / (now - began))
  logging.info("%s: %d, all, %.1f s", what, count, time.monotonic() - began)


# --- the folder ------------------------------------------------------------


@contextlib.contextmanager
def building(folder: str | Path) -> Iterator[Path]:
  """Gives a folder to build in, which gets its name once it is whole.

  Raises:
    ValueError: there is something at `folder`.
  """
  folder = Path(folder)
  if folder.exists():
    raise ValueError(
      f"{folder} exists already. Remove it, or name another in search.index."
    )
  beside = folder.with_name(folder.name + ".tmp")
  shutil.rmtree(beside, ignore_errors=True)  # of a build that was cut off
  beside.mkdir(parents=True)
  try:
    yield beside
  except ValueError:  # bad input leaves nothing behind
    shutil.rmtree(beside)
    raise
  beside.rename(folder)


def write_meta(folder: Path, meta: Mapping[str, Any]) -> None:
  """Writes what an index was made of."""
  text = json.dumps(meta, indent=2, sort_keys=True)
  (folder / _META).write_text(text + "\n", "utf-8")


def fingerprint(paths: Sequence[str]) -> list[dict[str, Any]]:
  """Returns size, time of change and SHA-256 of a corpus's files.

  Raises:
    ValueError: there is no such file or folder.
  """
  return [_file(path, None) for path in corpus.files(paths)]


def _file(path: Path, known: Mapping[str, Any] | None) -> dict[str, Any]:
  """Describes a file; one that seems as it was known is not read."""
  stat = path.stat()
  found = {"size": stat.st_size, "changed": stat.st_mtime_ns}
  if known and all(known.get(name) == found[name] for name in found):
    return dict(known)
  with path.open("rb") as file:
    return found | {"sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def open_meta(
  folder: str | Path, wanted: Mapping[str, Any], paths: Sequence[str]
) -> dict[str, Any]:
  """Reads what an index was made of, and checks that it is what is wanted.

  Args:
    folder: of the index.
    wanted: values that it must have been made with.
    paths: files and folders of the corpus; empty takes the index's own.

  Raises:
    ValueError: there is no whole index, or it is another one.
  """
  path = Path(folder) / _META
  try:
    meta = json.loads(path.read_text("utf-8"))
  except FileNotFoundError:
    raise ValueError(
      f"{folder} holds no index. Build it with --mode=index and the same "
      "config, or name another folder in search.index."
    ) from None
  except ValueError as error:
    raise ValueError(f"{path} is not JSON ({error}). Build it again.") from None
  for name, value in wanted.items():
    if meta.get(name) != value:
      raise ValueError(
        f"The index {folder} was built with {name} = {meta.get(name)!r}, and "
        f"the config has {value!r}. Build it anew into another folder with "
        "--mode=index, or change the config."
      )
  if paths:
    _check_corpus(folder, meta, paths)
  return meta


def _check_corpus(folder, meta, paths) -> None:
  files, known = corpus.files(paths), meta["files"]
  same = len(files) == len(known) and all(
    _file(path, row)["sha256"] == row["sha256"]
    for path, row in zip(files, known, strict=True)
  )
  if not same:
    raise ValueError(
      f"The index {folder} belongs to another corpus than "
      f"{', '.join(map(str, paths))}. Build it anew into another folder with "
      "--mode=index, or name the corpus that it was built from."
    )
