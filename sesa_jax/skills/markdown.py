"""Skills as SKILL.md folders, the convention of coding agents, and back.

A folder a skill, named as the skill is: `NAME/SKILL.md` opens with front matter
(YAML: name, description, metadata), then says when to use the skill, what to
look for, what to avoid and what to search for. What is written is read back
exactly; what others wrote is read if it has those sections.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from sesa_jax.skills.record import Record, check_row, row_of, skill_of
from sesa_jax.types import Skill

FILE = "SKILL.md"
_NAME = 64  # characters of a name, by the convention
_DESCRIPTION = 1024

# Sections, and the fields that they hold.
_SECTIONS = {
  "When to use": "trigger",
  "What to look for": "evidence",
  "What to avoid": "avoidance",
  "Query templates": "templates",
}
_METADATA = ("id", "category", "origin", "source_question", "source_seed")


def text_of(skill: Skill, name: str) -> str:
  """Renders a skill as the text of a SKILL.md.

  The front matter's description is what an agent chooses by: it says what the
  skill does and when to use it. The skill's own opens the body.

  Args:
    skill: with an id.
    name: of its folder.
  """
  told = f"{skill.description} When: {skill.trigger}"
  metadata = {key: getattr(skill, key) for key in _METADATA}
  if skill.created_at:
    metadata["created_at"] = str(skill.created_at)
  front = [
    f"name: {_quoted(name)}",
    f"description: {_quoted(told[:_DESCRIPTION])}",
    "metadata:",
    *(f"  {key}: {_quoted(value)}" for key, value in metadata.items() if value),
  ]
  parts = [_escaped(skill.description)]
  for title, field in _SECTIONS.items():
    value = getattr(skill, field)
    if field == "templates":
      value = [f"- {item}".replace("\n", "\n  ") for item in value]
    else:
      value = [_escaped(value)] if value else []
    if value:
      parts.append("\n".join([f"## {title}", "", *value]))
  return "\n".join(["---", *front, "---", "", "\n\n".join(parts), ""])


def _quoted(text: str) -> str:
  """A YAML scalar on one line, in double quotes: all else loses some text."""
  return yaml.safe_dump(
    text, default_style='"', allow_unicode=True, width=float("inf")
  ).rstrip("\n")


def _escaped(text: str) -> str:
  r"""Puts a backslash before what would open a section or get lost."""
  lines = text.split("\n")
  for i, line in enumerate(lines):
    outer = i in (0, len(lines) - 1) and not line.strip()
    if outer or line.startswith(("#", "\\")):
      lines[i] = f"\\{line}"
  return "\n".join(lines)


def _unescaped(lines: Sequence[str]) -> str:
  """The text of a section: blank lines around it go, backslashes go."""
  full = [i for i, line in enumerate(lines) if line.strip()]
  lines = lines[full[0] : full[-1] + 1] if full else []
  return "\n".join(line.removeprefix("\\") for line in lines)


def parse(text: str, where: str) -> dict[str, Any]:
  """Reads the text of a SKILL.md as a row of a bank's file.

  Args:
    text: of the file.
    where: the file, for errors.

  Raises:
    ValueError: no front matter, no name, or no section "When to use"; or what
      `record.check_row` refuses.
  """
  if text.startswith("---\r\n"):  # written on Windows
    text = text.replace("\r\n", "\n")
  found = re.match(r"---\n(.*?\n)---[ \t]*\n(.*)\Z", text, re.DOTALL)
  try:
    front = yaml.safe_load(found[1]) if found else None
  except yaml.YAMLError as error:
    raise ValueError(f"{where}: its front matter is not YAML: {error}") from (
      error
    )
  if not isinstance(front, dict) or not isinstance(front.get("name"), str):
    raise ValueError(
      f"{where}: a SKILL.md opens with front matter between two lines ---, "
      "which holds at least a name."
    )
  body, sections = _sections(found[2])
  if "trigger" not in sections:
    raise ValueError(f"{where}: no section '## When to use'.")
  metadata = front.get("metadata") or {}
  if not isinstance(metadata, dict):
    raise ValueError(f"{where}: its metadata are no mapping.")
  created = str(metadata.get("created_at", "0"))
  if not created.isdigit():
    raise ValueError(f"{where}: created_at {created!r} is no iteration.")
  row = dict(
    id=front["name"],
    category="",
    description=body or str(front.get("description", "")),
    evidence="",
    avoidance="",
    templates=[],
    origin="authored",
  )
  row |= {key: str(metadata[key]) for key in _METADATA if key in metadata}
  row |= sections | {"created_at": int(created)}
  check_row(row, where)
  return row_of(Record(skill_of(row)), 0, 0.0, 0.0)


def _sections(body: str) -> tuple[str, dict[str, Any]]:
  """The text before the first section, and the fields of those known."""
  parts: list[tuple[str, list[str]]] = [("", [])]
  for line in body.split("\n"):
    if line.startswith("## "):
      parts.append((line.removeprefix("## ").strip().casefold(), []))
    elif not line.startswith("# "):  # a title says nothing that the name lacks
      parts[-1][1].append(line)
  fields = {title.casefold(): field for title, field in _SECTIONS.items()}
  found: dict[str, Any] = {}
  for title, lines in parts[1:]:
    field = fields.get(title)
    if field == "templates":
      found[field] = _items(lines)
    elif field:
      found[field] = _unescaped(lines)
  return _unescaped(parts[0][1]), found


def _items(lines: Sequence[str]) -> list[str]:
  """The items of a Markdown list; other lines are none."""
  items: list[str] = []
  for line in lines:
    if line == "-" or line.startswith(("- ", "* ")):
      items.append(line[2:])
    elif line.startswith("  ") and items:
      items[-1] += f"\n{line[2:]}"
  return items


def names(skills: Sequence[Skill]) -> list[str]:
  """Names for folders: of lower case, digits and hyphens, each once."""
  taken: set[str] = set()
  out = []
  for skill in skills:
    plain = re.sub(r"[^a-z0-9]+", "-", skill.id.casefold())
    plain = plain[: _NAME - 8].strip("-") or "skill"
    name, number = plain, 2
    while name in taken:
      name, number = f"{plain}-{number}", number + 1
    taken.add(name)
    out.append(name)
  return out


def write(skills: Sequence[Skill], folder: str | Path) -> None:
  """Writes a folder of SKILL.md folders.

  Raises:
    ValueError: the folder holds something.
  """
  folder = Path(folder)
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    raise ValueError(
      f"{folder} exists and is not an empty folder. Name another."
    )
  for skill, name in zip(skills, names(skills), strict=True):
    (folder / name).mkdir(parents=True)
    data = text_of(skill, name).encode("utf-8", "backslashreplace")
    (folder / name / FILE).write_bytes(data)


def read(folder: str | Path) -> list[dict[str, Any]]:
  """Reads a folder of SKILL.md folders as rows, in the order of their ids.

  Raises:
    ValueError: there is none, one is malformed (see `parse`) or not UTF-8, or
      two have one id.
  """
  rows: dict[str, Mapping[str, Any]] = {}
  for path in sorted(Path(folder).glob(f"*/{FILE}")):
    try:
      text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
      raise ValueError(f"{path} is not UTF-8 ({error}).") from error
    row = parse(text, str(path))
    if row["id"] in rows:
      raise ValueError(f"{path}: a second skill {row['id']!r}.")
    rows[row["id"]] = row
  if not rows:
    raise ValueError(f"{folder} holds no folder with a {FILE}.")
  return [rows[id] for id in sorted(rows)]
