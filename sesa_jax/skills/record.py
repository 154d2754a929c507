"""A skill and what became of it: in a prompt, and as a line of a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sesa_jax import metrics, prompts
from sesa_jax.data import lines
from sesa_jax.types import Skill

STATES = ("active", "retired", "evicted")
# Beside them a distiller's MODULE:NAME.
ORIGINS = ("seed", "offline", "chat", "solver", "mined", "authored")
FIELDS = ("description", "trigger", "evidence", "avoidance", "templates")


@dataclass(frozen=True)
class Record:
  """A skill and what became of it."""

  skill: Skill
  state: str = "active"  # one of STATES
  reason: str = ""  # why it is no longer active


def embedded_text(skill: Skill) -> str:
  """The text by which a skill is found."""
  return f"{skill.description} {skill.trigger}"


def sources(text: str) -> list[str]:
  """Reads `source_question` or `source_seed`: a line each, blank ones aside."""
  return [line for line in text.split("\n") if line.strip()]


def joined(texts: Sequence[str]) -> str:
  """Writes what `sources` reads."""
  return "\n".join(dict.fromkeys(text.replace("\n", " ") for text in texts))


# --- in a prompt -----------------------------------------------------------


def render(
  skills: Sequence[Skill],
  count: Callable[[str], int],
  block_tokens: int,
  fields: Sequence[str] = FIELDS,
) -> tuple[str, tuple[Skill, ...]]:
  """Renders skills for a prompt, whole ones only, within a token budget.

  Args:
    skills: best first.
    count: tokens of a text.
    block_tokens: the block, heading and all, has at most so many.
    fields: of a skill, that are shown; some of `FIELDS`.

  Returns:
    The block ("" if not even the first fits) and the skills that stand in it:
    those alone were shown. The first that does not fit ends the block.
  """
  text, shown = "", ()
  for skill in skills:
    longer = block([*shown, skill], fields)
    if count(longer) > block_tokens:
      break
    text, shown = longer, (*shown, skill)
  return text, shown


def block(skills: Sequence[Skill], fields: Sequence[str] = FIELDS) -> str:
  """All of some skills for a prompt, below the heading."""
  # A line each: numbered ones make small models go on counting.
  lines = (rendered(skill, fields) for skill in skills)
  return "\n".join((prompts.HEADING, *lines))


_LABELS = {
  "description": "",
  "trigger": "When: ",
  "evidence": "Look for: ",
  "avoidance": "Avoid: ",
  "templates": "Search: ",
}


def rendered(skill: Skill, fields: Sequence[str] = FIELDS) -> str:
  """One skill in one line. Parts without text are left out."""
  parts = []
  for name in fields:
    value = getattr(skill, name)
    text = value if isinstance(value, str) else "; ".join(value)
    if text:
      parts.append(_LABELS[name] + text)
  return " ".join(parts)


def check_fields(fields: Sequence[str]) -> None:
  """Refuses fields that no skill has, or none at all.

  Raises:
    ValueError: names those that exist.
  """
  unknown = [name for name in fields if name not in FIELDS]
  if unknown or not fields:
    raise ValueError(
      f"bank.fields = {tuple(fields)!r}: at least one of {', '.join(FIELDS)}."
    )


# --- in a file -------------------------------------------------------------

_NUMBER = (int, float)
_KEYS = {  # of a line: its type, and whether it must be there
  "id": (str, True),
  "category": (str, True),
  "description": (str, True),
  "trigger": (str, True),
  "evidence": (str, True),
  "avoidance": (str, True),
  "templates": (list, True),
  "origin": (str, True),
  "source_question": (str, False),
  "source_seed": (str, False),
  "created_at": (int, False),
  "retrieved": (int, False),
  "helpful": (_NUMBER, False),
  "harmful": (_NUMBER, False),
  "state": (str, False),
  "reason": (str, False),
}


def row_of(
  record: Record, retrieved: int, helpful: float, harmful: float
) -> dict[str, Any]:
  """A record and its usage as a line of a file."""
  return (
    metrics.plain(record.skill)
    | dict(retrieved=retrieved, helpful=helpful, harmful=harmful)
    | dict(state=record.state, reason=record.reason)
  )


def skill_of(row: Mapping[str, Any]) -> Skill:
  """The skill of a row, which may hold more."""
  known = {f.name for f in dataclasses.fields(Skill)}
  skill = {key: row[key] for key in row if key in known}
  return Skill(**skill | {"templates": tuple(skill["templates"])})


def read_rows(path: str | Path) -> list[dict[str, Any]]:
  """Reads the rows of a JSONL file of skills, absent keys at their defaults.

  Raises:
    ValueError: the file, the line and the key that is unknown, missing, of the
      wrong type or value, or an id that occurs twice.
  """
  path = Path(path)
  if not path.is_file():
    raise ValueError(f"{path}: no such file of skills.")
  rows: dict[str, dict[str, Any]] = {}
  for where, row in lines.rows(path):
    check_row(row, where)
    if row["id"] in rows:
      raise ValueError(f"{where}, key 'id': {row['id']!r} occurs twice.")
    rows[row["id"]] = row_of(Record(skill_of(row)), 0, 0.0, 0.0) | row
  return list(rows.values())


def load(path: str | Path) -> tuple[Record, ...]:
  """Reads skills from a JSONL file, such as `bank.save_jsonl` makes.

  Usage in the file is checked and left out: it is of another run.

  Raises:
    ValueError: as `read_rows`.
  """
  return tuple(
    Record(skill_of(row), row["state"], row["reason"])
    for row in read_rows(path)
  )


def check_row(row: Any, where: str) -> None:
  """Refuses a row that is none of a skill.

  Args:
    row: what JSON held.
    where: file and line, for the error.

  Raises:
    ValueError: the key that is unknown, missing, or of the wrong type or value.
  """
  if not isinstance(row, dict):
    raise ValueError(f"{where} holds no JSON object.")
  for key in row:
    if key not in _KEYS:
      known = ", ".join(_KEYS)
      raise ValueError(f"{where}, key {key!r}: unknown. Keys: {known}.")
  for key, (kind, required) in _KEYS.items():
    if key not in row:
      if required:
        raise ValueError(f"{where}, key {key!r}: missing.")
      continue
    value = row[key]
    fits = isinstance(value, kind) and not isinstance(value, bool)
    if key == "templates":
      fits = fits and all(isinstance(item, str) for item in value)
    if not fits:
      kinds = kind if isinstance(kind, tuple) else (kind,)
      name = " or ".join(k.__name__ for k in kinds)
      name = "list of str" if key == "templates" else name
      raise ValueError(
        f"{where}, key {key!r}: {value!r} is not of type {name}."
      )
  for key in ("created_at", "retrieved", "helpful", "harmful"):
    if not 0 <= row.get(key, 0) < 2**31:  # nor NaN, which JSON may hold
      raise ValueError(f"{where}, key {key!r}: {row[key]!r} is no count.")
  for key in ("id", "description", "trigger"):
    if not row[key].strip():
      raise ValueError(f"{where}, key {key!r}: empty.")
  for key, choices in (("origin", ORIGINS), ("state", STATES)):
    value = row.get(key, choices[0])
    if value not in choices and not (key == "origin" and ":" in value):
      raise ValueError(
        f"{where}, key {key!r}: {value!r} is none of {', '.join(choices)}."
      )
