"""Lines of text files, numbered as people count them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


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
