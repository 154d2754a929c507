"""Lines of text files, numbered as people count them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


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
