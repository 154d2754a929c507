"""What `--mode=skills` does: look into a bank, compare, merge, convert.

A bank is a JSONL file, the folder of a run, or a folder of SKILL.md folders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich.box
import rich.console
import rich.markup
import rich.rule
import rich.table
import rich.text

from sesa_jax import metrics
from sesa_jax.skills import compare, history, markdown
from sesa_jax.skills.credit import Effect
from sesa_jax.skills.record import read_rows, skill_of
from sesa_jax.types import Encoder

_LABELS = {
  "category": "category",
  "description": "what",
  "trigger": "when",
  "evidence": "look for",
  "avoidance": "avoid",
  "templates": "search",
}

_Row = Mapping[str, Any]


@dataclass(frozen=True)
class Source:
  """A bank on disk, and what its run left of how it came about."""

  rows: Sequence[_Row]
  history: Sequence[_Row] = ()
  failures: Sequence[_Row] = ()
  folder: Path | None = None  # of the run


def open_bank(path: str | Path, iteration: int | None = None) -> Source:
  """Reads a bank: a JSONL file, a run's folder, or SKILL.md folders.

  Args:
    path: of one of the three.
    iteration: the bank as it was after it; of a run's folder alone.

  Raises:
    ValueError: there is no such bank, it is malformed, or it has no history.
  """
  path = Path(path)
  run = path / "skills.jsonl"
  if not run.is_file():
    if iteration is not None:
      raise ValueError(
        f"--iteration={iteration}: {path} is not the folder of a run, whose "
        "history would be needed."
      )
    return Source(markdown.read(path) if path.is_dir() else read_rows(path))
  folder = metrics.RunFolder(path, writes=False)
  events = folder.read("skills_history.jsonl")
  failures = folder.read("failures.jsonl")
  if iteration is None:
    return Source(read_rows(run), events, failures, path)
  last = max((event["iteration"] for event in events), default=0)
  if not 0 <= iteration <= max(last, len(folder.read("metrics.jsonl"))):
    raise ValueError(
      f"--iteration={iteration}: the run in {path} went from 0 to {last}."
    )
  events = [event for event in events if event["iteration"] <= iteration]
  return Source(history.at(events), events, failures, path)


# --- one bank --------------------------------------------------------------


def table(
  rows: Sequence[_Row], effects: Mapping[str, Effect], title: str = "Skills"
) -> rich.table.Table:
  """Lays out skills by net, the best first; of equals by id."""
  out = rich.table.Table(title=title, box=rich.box.SIMPLE_HEAD)
  out.add_column("skill", no_wrap=True)
  out.add_column("state")
  for name in ("shown", "helpful", "harmful", "net"):
    out.add_column(name, justify="right")
  if effects:
    out.add_column("effect, 95 %", justify="right")
  out.add_column("description")
  for row in sorted(rows, key=lambda row: (-compare.net(row), row["id"])):
    numbers = [row["helpful"], row["harmful"], compare.net(row)]
    out.add_row(
      rich.markup.escape(row["id"]),
      row["state"],
      str(row["retrieved"]),
      *(f"{number:g}" for number in numbers),
      *([_effect(effects.get(row["id"]))] if effects else []),
      rich.markup.escape(row["description"]),
    )
  return out


def _effect(found: Effect | None) -> str:
  if found is None:
    return ""
  if found.low is None:
    return f"{found.mean:+.2f} (n = {found.questions})"
  return f"{found.mean:+.2f} [{found.low:+.2f}, {found.high:+.2f}]"


def story(source: Source, id: str) -> rich.console.Group:
  """Tells a skill's life: where it came from, when shown, what came of it.

  Raises:
    ValueError: the bank has no such skill.
  """
  known = {row["id"]: row for row in source.rows}
  if id not in known:
    raise ValueError(
      f"--skill={id}: the bank has no such skill. It has {len(known)}, from "
      f"{min(known, default='none')} to {max(known, default='none')}."
    )
  events = [event for event in source.history if event["skill"] == id]
  parts = [
    rich.rule.Rule(rich.markup.escape(id)),
    *_says(known[id]),
    *_origin(known[id], events, source.failures),
  ]
  shown = [event for event in events if event["event"] == "credit"]
  if shown:
    parts.append(_showings(shown, _asked(source.folder, shown, id)))
  for event in events:
    if event["event"] in ("retire", "evict"):
      gone = {"retire": "retired", "evict": "evicted"}[event["event"]]
      told = f"in iteration {event['iteration']}, {event['reason']}"
      parts.append(_field(gone, f"{told}: net {event['net']:g}"))
  row = known[id]
  parts.append(
    _field(
      "now",
      f"{row['state']}; shown for {row['retrieved']} questions, helpful "
      f"{row['helpful']:g}, harmful {row['harmful']:g}, net "
      f"{compare.net(row):g}",
    )
  )
  effect = history.effects(events).get(id)
  if effect:
    parts.append(
      _field(
        "effect",
        f"{_effect(effect)}: success with its prompts less without skills, "
        f"mean of {effect.questions} questions",
      )
    )
  return rich.console.Group(*parts)


def _says(row: _Row) -> Iterator[rich.text.Text]:
  for name, label in _LABELS.items():
    value = row[name]
    for text in [value] if isinstance(value, str) else value:
      if text:
        yield _field(label, text)


def _origin(row: _Row, events, failures) -> Iterator[rich.text.Text]:
  came = [e for e in events if e["event"] in ("prime", "admit", "inherit")]
  how = {"prime": "primed", "inherit": "inherited"}
  for event in came:
    told = how.get(event["event"], "admitted")
    told += f" in iteration {event['iteration']}"
    if event.get("nearest"):
      told += f"; nearest was {event['nearest']} ({event['similarity']:.3f})"
    yield _field("origin", f"{row['origin']}, {told}")
  if not came:
    yield _field("origin", row["origin"])
  if row["source_question"]:
    yield _field("born from", row["source_question"])
  born = {(e.get("question"), e.get("asked_at")) for e in came}
  born |= {(id, number) for e in came for number, id in e.get("others", ())}
  for failure in failures:
    if (failure["question_id"], failure["iteration"]) in born:
      right = " | ".join(failure["targets"])
      yield _field(
        "the failure",
        f"iteration {failure['iteration']}, {failure['wrong_attempts']} wrong "
        f"attempts, success {failure['success_rate']:.0%}: "
        f"{failure['prediction']!r} for {right!r}",
      )
      if failure["skill_ids"]:
        yield _field("shown then", ", ".join(failure["skill_ids"]))


def _asked(folder, shown, id) -> dict[tuple[int, str], tuple[str, int, int]]:
  """(iteration, question id) -> text, right attempts, all attempts."""
  found: dict[tuple[int, str], tuple[str, int, int]] = {}
  iterations = {event["iteration"] for event in shown}
  for path in metrics.episode_files(folder) if folder else ():
    if int(path.name.split("_")[1].split(".")[0]) not in iterations:
      continue
    for row in metrics.read_episodes(path):
      if id in row["skill_ids"]:
        key = row["iteration"], row["request_id"]
        _, right, total = found.get(key, ("", 0, 0))
        right += row["verdict"] == "right"
        found[key] = row["question"], right, total + 1
  return found


def _showings(shown, asked) -> rich.table.Table:
  out = rich.table.Table(title="shown", box=rich.box.SIMPLE_HEAD)
  for name in ("iteration", "right", "helpful", "harmful", "less without"):
    out.add_column(name, justify="right")
  out.add_column("question")
  for event in shown:
    questions = event["questions"]
    usage = event.get("usage") or [("", "")] * len(questions)
    less = event.get("differences") or [None] * len(questions)
    for id, (helpful, harmful), d in zip(questions, usage, less, strict=True):
      text, right, total = asked.get((event["iteration"], id), (id, 0, 0))
      out.add_row(
        str(event["iteration"]),
        f"{right} of {total}" if total else "",
        f"{helpful:g}" if usage is event.get("usage") else "",
        f"{harmful:g}" if usage is event.get("usage") else "",
        "" if d is None else f"{d:+.2f}",
        rich.markup.escape(text),
      )
  return out


def _field(name: str, value: str) -> rich.text.Text:
  return rich.text.Text.assemble((f"{name}: ", "bold"), value)


# --- the mode --------------------------------------------------------------


def main(
  bank: str | None = None,
  workdir: str | None = None,
  *,
  skill: str | None = None,
  iteration: int | None = None,
  other: str | None = None,
  merge: bool = False,
  out: str | None = None,
  encoder: Encoder | None = None,
  threshold: float | None = None,
  console: rich.console.Console | None = None,
) -> None:
  """Shows a bank, or what is asked of it.

  Args:
    bank: a JSONL file, a run's folder or SKILL.md folders.
    workdir: the run's folder, where no bank is given.
    skill: tell the life of this one.
    iteration: the bank as it was after it.
    other: another bank; by itself for their differences.
    merge: put the other into the bank, to `out`.
    out: what to write: a file that ends in .jsonl, or a folder for SKILL.md
      folders of the active skills.
    encoder: finds restatements in a merge.
    threshold: of the encoder.
    console: where to; standard output by default.

  Raises:
    ValueError: bad input; see `open_bank`.
  """
  place = bank or workdir
  if not place:
    raise ValueError("--bank is missing; --mode=skills needs it, or --workdir.")
  if merge and not (other and out):
    raise ValueError(
      "--merge puts --other into --bank, to --out: give all three."
    )
  if out and Path(out).exists() and not Path(out).is_dir():
    raise ValueError(f"--out={out} exists. Name another.")
  source = open_bank(place, iteration)
  console = console or rich.console.Console()
  rows = source.rows
  if merge:
    rows, told = compare.merge(rows, open_bank(other).rows, encoder, threshold)
    console.print(compare.table(told, f"what became of those of {other}"))
  elif other:
    found = compare.diff(rows, open_bank(other).rows)
    console.print(
      compare.table(found, f"{place} and {other}")
      if found
      else "No difference."
    )
  elif skill:
    console.print(story(source, skill))
  elif not out:
    effects = history.effects(source.history)
    console.print(table(rows, effects, f"Skills of {place}"))
  if out:
    console.print(f"{_write(rows, out)} written to {out}")


def _write(rows: Sequence[_Row], out: str) -> str:
  if out.endswith(".jsonl"):
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_bytes(b"".join(map(metrics.line, rows)))
    return f"{len(rows)} skills"
  skills = [skill_of(row) for row in rows if row["state"] == "active"]
  markdown.write(skills, out)
  return f"{len(skills)} SKILL.md folders"
