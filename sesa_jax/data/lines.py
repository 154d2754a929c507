"""Lines of text files, numbered as people count them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sesa_jax import metrics


def numbered(path: Path) -> Iterator[tuple[int, str]]:
  r"""Yields the lines that are not blank, each with its number from 1.

  Split at \n alone: text holds other separators, such as U+2028, and \r.

  Raises:
    ValueError: a line is not UTF-8; names file and line.
  """
  with path.open("rb") as file:
    for number, line in enumerate(file, 1):
      try:
        text = line.decode("utf-8").rstrip("\n")
      except UnicodeDecodeError as error:
        raise ValueError(
          f"{path}:{number}: not UTF-8 ({error.reason}, byte {error.start} of "
          "the line). Convert the file."
        ) from None
      if text.strip():
        yield number, text


def rows(path: Path) -> Iterator[tuple[str, Any]]:
  """Yields the JSON values of a JSONL file, each with its file and line.

  Raises:
    ValueError: a line is not JSON; names file and line.
  """
  for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
    if not line.strip():
      continue
    where = f"{path}, line {number}"
    try:
      row = json.loads(line)
    except ValueError as error:
      raise ValueError(f"{where} is not JSON ({error}).") from error
    yield where, row


def objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields the objects of a JSONL file, or of a run's compressed episodes.

  Raises:
    ValueError: a line holds something else; names file and line.
  """
  found = rows(path)
  if path.suffix == ".zst":
    saved = enumerate(metrics.read_episodes(path), 1)
    found = ((f"{path}, line {number}", row) for number, row in saved)
  for where, row in found:
    if not isinstance(row, dict):
      raise ValueError(f"{where} holds no JSON object.")
    yield where, row


def files(names: Sequence[str], instead: str = "") -> Iterator[Path]:
  """Yields the files that --episodes names.

  Args:
    names: of files, and of runs' folders, which stand for their episodes.
    instead: a file that stands for them, where a run has it.

  Raises:
    ValueError: a name is neither, or a folder has no episodes.
  """
  for name in names:
    path = Path(name)
    if path.is_dir():
      whole = path / instead
      found = [whole] if whole.is_file() else metrics.episode_files(path)
      if not found:
        raise ValueError(f"--episodes={name}: a folder without episodes.")
      yield from found
    elif path.is_file():
      yield path
    else:
      raise ValueError(f"--episodes={name}: there is no such file or folder.")
