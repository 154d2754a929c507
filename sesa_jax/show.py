"""Prints a run's episodes as a person reads them.

What the policy wrote is marked by a bar at the left, so that it is seen
without colours too: these are the tokens that the loss reads, if the episode
has an advantage. Everything else was observed.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich.console
import rich.rule
import rich.text

from sesa_jax import metrics

_Row = Mapping[str, Any]

# ChatML and Llama 3: one message of a rendered prompt.
_MESSAGE = re.compile(
  r"<\|(?:im_start|start_header_id)\|>(\w+)(?:<\|end_header_id\|>)?\n+"
  r"(.*?)(?:<\|im_end\|>|<\|eot_id\|>)?\s*"
  r"(?=<\|(?:im_start|start_header_id)\|>|\Z)",
  re.DOTALL,
)


@dataclass(frozen=True)
class Filters:
  """What to show; None is everything. All given have to hold."""

  question: str | None = None  # its id, or a part of its text
  verdict: str | None = None  # "right", "wrong" or "unknown"
  skill: str | None = None  # id of a skill that was shown
  iteration: int | None = None
  arm: str | None = None  # "solver", or "eval" for all of "eval/..."

  def match(self, row: _Row) -> bool:
    """Whether the row of an episode passes."""
    if self.question is not None and not self._asks(row):
      return False
    if self.arm is not None:
      arm = row["arm"]
      if arm != self.arm and not arm.startswith(self.arm + "/"):
        return False
    return (
      self.verdict in (None, row.get("verdict"))
      and (self.skill is None or self.skill in (row.get("skill_ids") or ()))
      and self.iteration in (None, row.get("iteration"))
    )

  def _asks(self, row: _Row) -> bool:
    text = row.get("question") or ""
    return self.question == row["request_id"] or (
      self.question.casefold() in text.casefold()
    )

  def __str__(self) -> str:
    given = {k: v for k, v in vars(self).items() if v is not None}
    return ", ".join(f"{k}={v}" for k, v in given.items()) or "none"


def select(rows: Iterable[_Row], filters: Filters, limit: int) -> list[_Row]:
  """The first `limit` rows that pass.

  Raises:
    ValueError: none does; lists the values that exist.
  """
  found: list[_Row] = []
  seen: dict[str, dict[Any, None]] = {}  # as ordered sets
  for row in rows:
    if filters.match(row):
      found.append(row)
      if len(found) == limit:
        break
    values = {
      "iteration": [row.get("iteration")],
      "arm": [row["arm"]],
      "verdict": [row.get("verdict")],
      "skill": row.get("skill_ids") or [],
      "question": [row["request_id"]],
    }
    for name, of_row in values.items():
      known = {value: None for value in of_row if value is not None}
      seen.setdefault(name, {}).update(known)
  if not found:
    exist = "; ".join(
      f"{name}: {_some(list(values))}" for name, values in seen.items()
    )
    raise ValueError(
      f"No episode matches {filters}. There are {exist or 'no episodes'}."
    )
  return found


def _some(values: Sequence[Any], most: int = 12) -> str:
  text = ", ".join(map(str, values[:most])) or "none"
  return text + (f" and {len(values) - most} more" if values[most:] else "")


def render(
  rows: Iterable[_Row], skills: Mapping[str, str] | None = None
) -> rich.console.Group:
  """Renders episodes for a rich console.

  Args:
    rows: of `metrics.episode_row`.
    skills: descriptions by skill id, for ids that were shown.
  """
  parts: list[Any] = []
  for row in rows:
    parts += _episode(row, skills or {})
  return rich.console.Group(*parts)


def _episode(row: _Row, skills: Mapping[str, str]) -> Iterator[Any]:
  where = f"iteration {row.get('iteration', '?')}, {row['arm']}"
  yield rich.rule.Rule(f"{where}: {row['request_id']} #{row['attempt']}")
  for name in ("question", "targets", "prediction", "verdict", "reward"):
    if row.get(name) is not None:
      value = row[name]
      value = " | ".join(value) if isinstance(value, list) else str(value)
      yield rich.text.Text.assemble((f"{name}: ", "bold"), value)
  yield _field("finish", row["finish"])
  for skill in row.get("skill_ids") or ():
    said = skills.get(skill)
    yield _field("skill shown", f"{skill} ({said})" if said else skill)
  yield _field("trained on", _trained(row))
  yield rich.text.Text()
  yield _field("prompt", f"{row['prompt_length']} tokens, observed")
  yield from _prompt(row.get("prompt"))
  for number, turn in enumerate(row["turns"], 1):
    yield from _turn(number, turn, row["mask"])
  yield rich.text.Text()


def _trained(row: _Row) -> str:
  sampled = sum(row["mask"])
  advantage = row.get("advantage")
  if advantage is None:
    return f"no ({sampled} tokens sampled)"
  said = f"{sampled} tokens, advantage {advantage:+.3f}"
  return said + (": no effect but the KL's" if advantage == 0 else "")


def _prompt(text: str | None) -> Iterator[Any]:
  if text is None:
    yield _indented("(its text was not recorded)", "dim")
    return
  messages = list(_MESSAGE.finditer(text))
  for message in messages:
    yield _field(f"  {message[1]}", "")
    if message[2]:  # the policy's own has not begun
      yield _indented(message[2], "dim", "    ")
  if not messages:
    yield _indented(text, "dim")


def _turn(number: int, turn: _Row, mask: Sequence[int]) -> Iterator[Any]:
  sampled, observed = turn["end"] - turn["start"], turn["stop"] - turn["end"]
  said = f"{sampled} tokens sampled, action: {turn['action'] or 'none'}"
  if turn["note"]:
    said += f" ({turn['note']})"
  yield _field(f"turn {number}", said)
  # The mask is what the loss reads; the spans only describe it.
  inside = sum(mask[turn["start"] : turn["end"]])
  outside = sum(mask[turn["end"] : turn["stop"]])
  if inside != sampled or outside:
    yield rich.text.Text(
      f"  the mask disagrees: it trains on {inside} of {sampled} sampled and "
      f"{outside} of {observed} observed tokens",
      "bold red",
    )
  yield _indented(turn["text"], "green", "  ▌ ")
  if turn["action"] == "search":
    yield _field("  query", turn["argument"])
  for passage in turn["passages"]:
    score = passage["score"]
    told = "" if score is None else f", score {score:.2f}"
    yield _field("  passage", f"{passage['id']}, {passage['title']}{told}")
  if observed:
    yield _field("  observed", f"{observed} tokens")
    text = turn.get("observation")
    if text is None:
      text = "\n".join(passage["text"] for passage in turn["passages"])
    yield _indented(text, "dim", "    ")


def _field(name: str, value: str) -> rich.text.Text:
  return rich.text.Text.assemble((f"{name}: ", "bold"), value)


def _indented(text: str, style: str, prefix: str = "  ") -> rich.text.Text:
  lines = text.strip("\n").split("\n")
  return rich.text.Text("\n".join(prefix + line for line in lines), style)


def main(
  workdir: str | Path,
  *,
  limit: int = 10,
  console: rich.console.Console | None = None,
  **filters: Any,
) -> None:
  """Prints the episodes of a run that pass the filters.

  Args:
    workdir: the run's folder.
    limit: how many at most.
    console: where to; standard output by default.
    **filters: fields of `Filters`.

  Raises:
    ValueError: no such folder, no episodes in it, or none that matches.
  """
  if limit < 1:
    raise ValueError(f"limit={limit}: show at least 1 episode.")
  if not Path(workdir).is_dir():
    raise ValueError(f"--workdir={workdir}: no such folder.")
  files, evaluated = metrics.episode_files(workdir), _evaluated(workdir)
  if not files and not evaluated:
    raise ValueError(
      f"{workdir} has no episodes. A run writes them at the end of each "
      "iteration to its folder `episodes`."
    )
  played = (row for path in files for row in metrics.read_episodes(path))
  rows = itertools.chain(played, evaluated)
  found = select(rows, Filters(**filters), limit)
  console = console or rich.console.Console()
  console.print(render(found, _descriptions(Path(workdir) / "skills.jsonl")))


def _evaluated(workdir: str | Path) -> list[_Row]:
  """The episodes that evaluations of the run have kept, `eval.episodes`."""
  cells = metrics.RunFolder(workdir, writes=False).read_json("eval.json", [])
  return [
    prediction["episode"]
    for cell in cells
    for prediction in cell["predictions"]
    if "episode" in prediction
  ]


def _descriptions(path: Path) -> dict[str, str]:
  """Skills of the bank now; one that it has lost is shown by its id alone."""
  if not path.exists():
    return {}
  rows = map(json.loads, path.read_text("utf-8").splitlines())
  return {row["id"]: row["description"] for row in rows}
