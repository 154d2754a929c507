"""Reads corpora into passages of about a hundred words.

Three layouts are known, told apart by what a path is:
* a `.jsonl` file: a document a line, `{"id", "contents"}` as in Search-R1's
  corpora (the first line of `contents` is the title in double quotes) or
  `{"id", "title", "text"}`;
* a `.json` file of Wikipedia leads: `{title: {"title", "extract", ..}}`;
* a folder of the World Factbook's country files, `<region>/<code>.json`.
"""

from __future__ import annotations

import hashlib
import html
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from sesa_jax.data import lines
from sesa_jax.types import Passage

_PAIR = ("title", "text")
_FIELDS = '{"id", "contents"} or {"id", "title", "text"}'
# A full stop after a single capital is an initial's or an abbreviation's.
_SENTENCE = re.compile(
  r"(?<=[.!?])(?<!\b[A-Z]\.)[\"'”’)]*\s+(?=[\"'“‘(]?[A-Z0-9])|\s*\n\s*"
)
_BREAK = re.compile(r"<\s*(?:br|/p|/li)\b[^>]*>", re.IGNORECASE)
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")


def load(
  paths: str | Path | Iterable[str | Path], *, passage_words: int = 100
) -> tuple[Passage, ...]:
  """Reads corpora and cuts them into passages, which must fit into memory.

  Args:
    paths: files and folders, see the module's docstring.
    passage_words: see `stream`.

  Returns:
    what `stream` yields.

  Raises:
    ValueError: see `stream`; or an id is used twice, or there is no passage.
  """
  paths = [paths] if isinstance(paths, str | Path) else list(paths)
  passages: dict[str, Passage] = {}
  for passage in stream(paths, passage_words=passage_words):
    if passages.setdefault(passage.id, passage) is not passage:
      raise repeated(passage.id, _named(paths))
  if not passages:
    raise ValueError(f"The corpus ({_named(paths)}) holds no passage.")
  return tuple(passages.values())


def stream(
  paths: Iterable[str | Path], *, passage_words: int
) -> Iterator[Passage]:
  """Yields the passages of corpora in the order of the files, one by one.

  Args:
    paths: files and folders, see the module's docstring.
    passage_words: words a passage holds at most; a short rest joins the
      passage before it, so that one may hold a quarter more.

  Yields:
    passages. A document of one passage gives it its id, a longer one gives
    `id#0`, `id#1`, ..

  Raises:
    ValueError: a missing or unknown file, or a document without id or text
      (names file and line).
  """
  if passage_words < 1:
    raise ValueError(f"search.passage_words={passage_words}; at least 1.")
  for path in map(Path, paths):
    for document in _documents(path):
      pieces = cut(document.text, passage_words)
      for i, text in enumerate(pieces):
        id = document.id if len(pieces) == 1 else f"{document.id}#{i}"
        yield Passage(id, document.title, text)


def repeated(id: str, where: str = "The corpus") -> ValueError:
  """Returns what to raise where an id is used twice."""
  return ValueError(
    f"{where}: the id {id!r} is used twice. Every document of a corpus needs "
    "an id of its own."
  )


def files(paths: Iterable[str | Path]) -> list[Path]:
  """Returns the files that corpora consist of, in order.

  Raises:
    ValueError: there is no such file or folder.
  """
  found: list[Path] = []
  for path in map(Path, paths):
    if not path.exists():
      raise ValueError(f"No corpus at {path}: there is no such file or folder.")
    found += sorted(path.rglob("*.json")) if path.is_dir() else [path]
  return found


def _named(paths: Iterable[str | Path]) -> str:
  return ", ".join(map(str, paths)) or "no path"


def digest(passages: Sequence[Passage]) -> str:
  """Returns the SHA-256 of the passages' lines, in order, as hex digits."""
  sha = hashlib.sha256()
  for passage in passages:
    sha.update(line(passage))
  return sha.hexdigest()


def line(passage: Passage) -> bytes:
  """Returns a passage's id, title and text as a line of JSON."""
  text = json.dumps([passage.id, passage.title, passage.text])
  return text.encode() + b"\n"


def contents(passage: Passage) -> str:
  """Returns Search-R1's `contents`, which `split_contents` splits again."""
  return f'"{passage.title}"\n{passage.text}'


def split_contents(contents: str) -> tuple[str, str]:
  """Splits Search-R1's `contents` into title and text.

  The title is the first line, in double quotes; one line alone is the text.
  """
  title, newline, text = contents.strip().partition("\n")
  title = title.strip()
  if not newline:
    return "", title
  return title.removeprefix('"').removesuffix('"').strip(), text.strip()


def cut(text: str, words: int) -> list[str]:
  """Cuts text into pieces of at most `words` words.

  Cuts lie at sentence or line ends where there are any. A last piece of less
  than a quarter of `words` is joined to the one before.
  """
  pieces: list[list[str]] = []  # spans of text
  counts: list[int] = []
  for span in _spans(text, words):
    count = len(span.split())
    if pieces and counts[-1] + count <= words:
      pieces[-1].append(span)
      counts[-1] += count
    elif count:
      pieces.append([span])
      counts.append(count)
  if len(pieces) > 1 and counts[-1] * 4 < words:
    rest = pieces.pop()
    pieces[-1] += rest
  return ["".join(piece).strip() for piece in pieces]


def _spans(text: str, words: int) -> Iterator[str]:
  """Yields sentences with the space behind them; cuts those of many words."""
  start = 0
  ends = [match.end() for match in _SENTENCE.finditer(text)]
  for end in [*ends, len(text)]:
    sentence = text[start:end]
    begins = [match.start() for match in re.finditer(r"\S+", sentence)]
    bounds = [0, *begins[words::words], len(sentence)]
    yield from (sentence[i:j] for i, j in itertools.pairwise(bounds))
    start = end


def _documents(path: Path) -> Iterator[Passage]:
  """Yields the documents of one path, uncut."""
  if path.is_dir():
    yield from _factbook(path)
  elif not path.is_file():
    raise ValueError(f"No corpus at {path}: there is no such file or folder.")
  elif path.suffix == ".jsonl":
    yield from _jsonl(path)
  elif path.suffix == ".json":
    yield from _leads(path)
  else:
    raise ValueError(
      f"{path} is no corpus that is known. Known: a .jsonl file of {_FIELDS}, "
      f"a .json file of Wikipedia leads, a folder of country files."
    )


def _jsonl(path: Path) -> Iterator[Passage]:
  """Yields the documents of a JSONL corpus, a line each."""
  for number, line in lines.numbered(path):
    try:
      row = json.loads(line)
    except json.JSONDecodeError as error:
      raise ValueError(f"{path}:{number}: not JSON ({error}).") from None
    if not isinstance(row, dict):
      raise ValueError(f"{path}:{number}: not an object; expected {_FIELDS}.")
    fields = ("contents",) if "contents" in row else _PAIR
    values = [row.get(key) or "" for key in fields]
    if not all(isinstance(value, str) for value in values):
      raise ValueError(
        f"{path}:{number}: {' and '.join(fields)} must be text. Expected "
        f"{_FIELDS}."
      )
    if len(values) == 1:
      title, text = split_contents(values[0])
    else:
      title, text = (value.strip() for value in values)
    if not text or str(row.get("id", "")).strip() == "":
      raise ValueError(
        f"{path}:{number}: a document without {'id' if text else 'text'}. "
        f"Expected {_FIELDS}, found the fields {sorted(row)}."
      )
    yield Passage(str(row["id"]), title, text)


def _leads(path: Path) -> Iterator[Passage]:
  """Yields the leads of Wikipedia articles."""
  for key, row in _object(path).items():
    text = row.get("extract") if isinstance(row, dict) else None
    if not isinstance(text, str) or not text.strip():
      raise ValueError(
        f"{path}: the article {key!r} has no text. Expected "
        f'{{title: {{"title", "extract"}}}}.'
      )
    yield Passage(f"leads/{key}", str(row.get("title") or key), text.strip())


def _factbook(folder: Path) -> Iterator[Passage]:
  """Yields a document for each section of each country, a line a field."""
  files = sorted(folder.rglob("*.json"))
  if not files:
    raise ValueError(f"The folder {folder} holds no .json file of a country.")
  for path in files:
    country = _object(path)
    title = _country(country) or path.parent.name.title()
    id = path.relative_to(folder).with_suffix("").as_posix()
    for section, fields in country.items():
      if not isinstance(fields, dict):
        raise ValueError(
          f"{path}: the section {section!r} has no fields. Expected country "
          f'files, {{section: {{field: {{"text"}}}}}}.'
        )
      lines = (
        f"{name.strip()}: {_flat(field, name.strip())}"
        for name, field in fields.items()
      )
      if text := "\n".join(lines):
        yield Passage(f"factbook/{id}/{section}", title, text)


def _country(country: dict) -> str:
  """Returns the name of a country file, or nothing (the world has none)."""
  government = country.get("Government", {})
  names = government.get("Country name") or government.get("Union name") or {}
  for key in ("conventional short form", "conventional long form"):
    name = _plain(names.get(key, {}).get("text", ""))
    if name not in ("", "none"):
      return name
  return ""


def _flat(field: dict | str, name: str) -> str:
  """Renders a field: its text, its parts by their names, its notes."""
  if not isinstance(field, dict):
    return _plain(str(field))
  parts = []
  for key, part in field.items():
    text = _flat(part, key)
    # Parts often repeat the field (`Exports 2024`); a note names itself.
    label = "" if key in ("text", "note") else key.removeprefix(name).strip()
    parts.append(f"{label} {text}".strip() if text else "")
  return "; ".join(part for part in parts if part)


def _plain(text: str) -> str:
  """Strips HTML: tags go, breaks become spaces, entities characters."""
  text = html.unescape(_TAG.sub("", _BREAK.sub(" ", text)))
  return " ".join(text.split())


def _object(path: Path) -> dict:
  """Reads a JSON file that holds an object."""
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except ValueError as error:  # not JSON, or not UTF-8
    raise ValueError(f"{path}: not JSON ({error}).") from None
  if not isinstance(value, dict):
    raise ValueError(f"{path}: holds a {type(value).__name__}, not an object.")
  return value
