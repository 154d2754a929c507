"""Two banks: how they differ, and one made of both."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import rich.box
import rich.markup
import rich.table

from sesa_jax.skills import bank as bank_lib
from sesa_jax.skills.record import FIELDS, skill_of
from sesa_jax.types import Encoder

Row = Mapping[str, Any]


def net(row: Row) -> float:
  """Helpful less harmful, rounded as in `SkillBank.net`."""
  return round(row["helpful"] - row["harmful"], 3)


def diff(first: Sequence[Row], second: Sequence[Row]) -> list[tuple[str, str]]:
  """Says, by id, what differs: (id, what), in the order of the files.

  Ids name the same skill in one run and its descendants only; another text
  under an id is said to be that.
  """
  before = {row["id"]: row for row in first}
  after = {row["id"]: row for row in second}
  out = []
  for id in {**before, **after}:
    if id not in after:
      out.append((id, "only in the first"))
    elif id not in before:
      out.append((id, f"only in the second, {after[id]['state']}"))
    else:
      out += [(id, what) for what in _changes(before[id], after[id])]
  return out


def _changes(old: Row, new: Row) -> list[str]:
  fields = [name for name in FIELDS if list(old[name]) != list(new[name])]
  if fields:
    return [f"another text: {', '.join(fields)}"]
  found = []
  if old["state"] != new["state"]:
    found.append(f"{old['state']} -> {new['state']}")
  for name in ("retrieved", "helpful", "harmful"):
    if old[name] != new[name]:
      found.append(f"{name} {old[name]:g} -> {new[name]:g}")
  return ["; ".join(found)] if found else []


def merge(
  first: Sequence[Row],
  second: Sequence[Row],
  encoder: Encoder | None = None,
  threshold: float | None = None,
) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
  """Makes one bank of two.

  The first's skills stay as they are. The second's inactive ones follow, then
  its active ones, but for those that say what is there already: word for word,
  or, with an encoder, by a cosine above the threshold to a skill that is active
  or retired. One whose id is taken gets a number above all that either file
  uses. Usage stays that of each file.

  Args:
    first: rows of a bank.
    second: rows of the other.
    encoder: finds restatements; None finds only equal texts.
    threshold: of the encoder, as for `bank.admit`.

  Returns:
    The rows, and what became of each skill of the second: (id, what).
  """
  rows = [dict(row) for row in first]
  texts = {_text(row): row["id"] for row in reversed(rows)}
  taken = {row["id"] for row in rows}
  known = taken | {row["id"] for row in second}
  numbers = [re.fullmatch(r"skill-(\d{5,})", id) for id in known]
  number = max((int(found[1]) for found in numbers if found), default=0)
  bank = None
  told = []
  for row in sorted(second, key=lambda row: row["state"] == "active"):
    if _text(row) in texts:
      told.append((row["id"], f"same as {texts[_text(row)]}"))
      continue
    new = dict(row)
    if new["id"] in taken:
      new["id"] = f"skill-{number + 1:05d}"
    if encoder and row["state"] == "active":
      # Made late: what the second retired bars its like, too.
      bank = bank or bank_lib.from_rows(rows, encoder, len(first) + len(second))
      bank, like = _admitted(bank, new, encoder, threshold)
      if like:
        told.append((row["id"], like))
        continue
    same = new["id"] == row["id"]
    number += not same
    taken.add(new["id"])
    texts[_text(new)] = new["id"]
    rows.append(new)
    told.append((row["id"], "kept" if same else f"kept as {new['id']}"))
  return rows, told


def _text(row: Row) -> tuple[Any, ...]:
  return tuple(tuple(row[name]) for name in FIELDS)


def _admitted(bank, row: Row, encoder: Encoder, threshold: float):
  """Admits a skill, or says what it is like."""
  skill = skill_of(row)
  vectors = encoder.encode([bank_lib.embedded_text(skill)], "passage")
  bank, (event, *_) = bank_lib.admit(bank, [skill], vectors, threshold, 0)
  if event["event"] == "admit":
    return bank, ""
  state = "retired " if event["reason"] == "retired" else ""
  return bank, (
    f"left out: like the {state}skill {event['nearest']} "
    f"({event['similarity']:.3f})"
  )


def table(rows: Sequence[tuple[str, str]], title: str) -> rich.table.Table:
  """Lays out what `diff` or `merge` says."""
  out = rich.table.Table(box=rich.box.SIMPLE_HEAD)
  out.add_column("skill", no_wrap=True)
  out.add_column(rich.markup.escape(title), overflow="fold")
  for id, what in rows:
    out.add_row(rich.markup.escape(id), rich.markup.escape(what))
  return out
