"""Stage 4, failure distillation: failures wait, then some become skills."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from sesa_jax.judge import leaks
from sesa_jax.language import Language, as_targets
from sesa_jax.skills import bank as skill_bank
from sesa_jax.types import (
  Case,
  DistillFailure,
  Encoder,
  FailureRecord,
  Passage,
  Report,
  RightAttempt,
  Skill,
)

KEEPS = ("newest", "best")
CONSOLIDATES = ("single", "cluster")
CLUSTER = 5  # records of a case at most

# Why a skill was not admitted, as the metrics count it.
REASONS = (
  *(f"leak_{reason}" for reason in leaks.REASONS),
  "similar",
  "retired",
  "full",
)

Queue = tuple[FailureRecord, ...]  # oldest first


def priority(record: FailureRecord) -> int:
  """How much a record has to teach.

  +10 skills were shown and it failed all the same, +5 at least two wrong
  attempts, +3 more than 6 passages (SESA).
  """
  return (
    10 * bool(record.skill_ids)
    + 5 * (record.wrong_attempts >= 2)
    + 3 * (record.passages_seen > 6)
  )


def _best_first(record: FailureRecord) -> tuple[int, int, str]:
  return -priority(record), -record.iteration, record.question_id


def enqueue(
  queue: Queue, records: Sequence[FailureRecord], size: int, keep: str
) -> tuple[Queue, int]:
  """Appends records and drops what is too many.

  Args:
    queue: what waits, oldest first.
    records: an iteration's.
    size: most that may wait.
    keep: "newest" drops the oldest, "best" those of the lowest priority.

  Returns:
    The queue after, oldest first, and how many were dropped.

  Raises:
    ValueError: an unknown `keep`; lists the choices.
  """
  if keep not in KEEPS:
    raise ValueError(
      f"Unknown distillation.keep {keep!r}. Choices: {', '.join(KEEPS)}."
    )
  waiting = (*queue, *records)
  dropped = max(0, len(waiting) - size)
  if keep == "newest":
    return waiting[dropped:], dropped
  order = sorted(range(len(waiting)), key=lambda i: _best_first(waiting[i]))
  return tuple(waiting[i] for i in sorted(order[:size])), dropped


def from_json(row: Mapping[str, Any]) -> FailureRecord:
  """Reads a record that went through JSON."""
  tuples = ("other_predictions", "skill_ids")

  def passages(rows):
    return tuple(Passage(**passage) for passage in rows)

  return FailureRecord(
    **dict(row)
    | {name: tuple(row[name]) for name in tuples}
    | {"targets": as_targets(row["targets"])}
    | {"passages": passages(row["passages"])}
    | {
      "right": tuple(
        RightAttempt(tuple(right["queries"]), passages(right["passages"]))
        for right in row.get("right", ())
      )
    }
  )


def due(iteration: int, every: int) -> bool:
  """Says whether an iteration, counted from 1, ends with a distillation.

  Raises:
    ValueError: `every` below 1.
  """
  if every < 1:
    raise ValueError(
      f"distillation.every = {every}: it counts iterations, at least 1. For a "
      "run without new skills set distillation.admit=False."
    )
  return iteration > 0 and iteration % every == 0


def cases(
  bank: skill_bank.SkillBank,
  queue: Queue,
  *,
  encoder: Encoder,
  iteration: int,
  every: int,
  min_pending: int,
  max_records: int,
  admit: bool,
  consolidate: str = "single",
) -> list[Case]:
  """Chooses what skills are written from, if it is time.

  Best first: priority, then newest, then question id.

  Args:
    bank: knows the skills that did not help.
    queue: what waits.
    encoder: embeds questions, for clusters.
    iteration: counted from 1.
    every: iterations from one distillation to the next.
    min_pending: fewer records wait on.
    max_records: taken at once.
    admit: False leaves all as it is.
    consolidate: "single", a case a record; "cluster", a case for the best
      record and up to CLUSTER - 1 of the others, the nearest by the cosine of
      their questions, then for the best one left, and so on.

  Raises:
    ValueError: an unknown `consolidate`; lists the choices.
  """
  check_consolidate(consolidate)
  if not (admit and due(iteration, every) and len(queue) >= min_pending):
    return []
  chosen = sorted(queue, key=_best_first)[:max_records]
  known = {record.skill.id: record.skill for record in bank.records}
  groups = [[record] for record in chosen]
  if consolidate == "cluster":
    groups = _clusters(chosen, encoder)
  found = []
  for group in groups:
    ids = dict.fromkeys(id for record in group for id in record.skill_ids)
    shown = tuple(known[id] for id in ids if id in known)
    found.append(Case(tuple(group), shown))
  return found


def check_consolidate(name: str) -> None:
  """Raises a ValueError if the name is not one of `CONSOLIDATES`."""
  if name not in CONSOLIDATES:
    raise ValueError(
      f"Unknown distillation.consolidate {name!r}. Choices: "
      f"{', '.join(CONSOLIDATES)}."
    )


def _clusters(
  records: Sequence[FailureRecord], encoder: Encoder
) -> list[list[FailureRecord]]:
  vectors = encoder.encode([record.question for record in records], "query")
  left, groups = list(range(len(records))), []
  while left:
    first, *rest = left
    near = sorted(rest, key=lambda i: (-float(vectors[first] @ vectors[i]), i))
    taken = [first, *near[: CLUSTER - 1]]
    groups.append([records[i] for i in taken])
    left = [i for i in left if i not in taken]
  return groups


def land(
  bank: skill_bank.SkillBank,
  queue: Queue,
  cases: Sequence[Case],
  written: Sequence[Skill | DistillFailure],
  *,
  origin: str,
  encoder: Encoder,
  language: Language,
  iteration: int,
  threshold: float,
) -> tuple[skill_bank.SkillBank, Queue, Report]:
  """Admits what was written, if it gives nothing away and is new.

  A record leaves the queue once its call was answered, whatever became of the
  skill; an outage leaves it there. The bank changes at the end, in one pass.

  Args:
    bank: the bank, after credit and retirement.
    queue: what waits, those of the cases and perhaps more.
    cases: of `cases`.
    written: by a distiller, from each case.
    origin: of the skills.
    encoder: embeds them.
    language: of the leak guard.
    iteration: counted from 1.
    threshold: of the encoder; see `bank.admit`.

  Returns:
    The bank and the queue after, and a report. Its rows are the bank's events;
    each case has one with the first record's `question` and `asked_at`,
    `others` of a cluster, `outcome` ("admitted", "rejected" or "failed"),
    `reason` and the skill's `text`.
  """
  rows, lost = [], set()
  candidates: list[tuple[Case, Skill]] = []
  for case, skill in zip(cases, written, strict=True):
    if isinstance(skill, DistillFailure):
      rows.append(_row(iteration, case, "failed", skill.reason))
      if skill.outage:
        lost.update(case.records)
      continue
    # Set here: the rule that a skill is not shown for a question that it was
    # born from must not hang on what a distiller remembers.
    skill = dataclasses.replace(
      skill,
      id="",
      origin=origin,
      source_question=skill_bank.joined([r.question for r in case.records]),
      source_seed=skill_bank.joined([r.seed_id for r in case.records]),
    )
    found = (leaks.leaks(skill, record, language) for record in case.records)
    leak = next(filter(None, found), None)
    if leak:
      rows.append(_row(iteration, case, "rejected", f"leak_{leak}", skill))
    else:
      candidates.append((case, skill))
  skills = [skill for _, skill in candidates]
  texts = [skill_bank.embedded_text(skill) for skill in skills]
  vectors = encoder.encode(texts, "passage")
  bank, events = skill_bank.admit(bank, skills, vectors, threshold, iteration)
  left = iter(candidates)
  for event in events:
    if event["event"] == "evict":
      rows.append(event)
      continue
    case, skill = next(left)
    outcome = {"admit": "admitted", "reject": "rejected"}[event["event"]]
    row = _row(iteration, case, outcome, event.get("reason", ""), skill)
    rows.append(row | event)
  used = {record for case in cases for record in case.records} - lost
  queue = tuple(record for record in queue if record not in used)
  metrics = _metrics(rows, pending=len(queue), lost=len(lost))
  return bank, queue, Report(metrics, rows)


def _row(
  iteration: int,
  case: Case,
  outcome: str,
  reason: str,
  skill: Skill | None = None,
) -> dict:
  first, *more = case.records
  others = [(record.iteration, record.question_id) for record in more]
  return dict(
    iteration=iteration,
    event="fail" if outcome == "failed" else "reject",
    skill="",
    question=first.question_id,
    asked_at=first.iteration,
    outcome=outcome,
    reason=reason,
    category=skill.category if skill else "",
    text=skill_bank.rendered(skill) if skill else "",
    **({"others": others} if others else {}),
  )


def _metrics(rows: Sequence[dict], pending: int, lost: int) -> dict[str, float]:
  results = [row for row in rows if "outcome" in row]
  metrics = {
    "distillation/pending": float(pending),
    "distillation/outages": float(lost),
  }
  for outcome in ("admitted", "rejected", "failed"):
    metrics[f"distillation/{outcome}"] = float(
      sum(row["outcome"] == outcome for row in results)
    )
  for reason in REASONS:
    metrics[f"distillation/rejected/{reason}"] = float(
      sum(
        row["outcome"] == "rejected" and row["reason"] == reason
        for row in results
      )
    )
  written = metrics["distillation/admitted"] + metrics["distillation/rejected"]
  leaked = sum(
    metrics[f"distillation/rejected/leak_{reason}"] for reason in leaks.REASONS
  )
  if leaked > written / 2:
    logging.warning(
      "The leak guard rejected %d of %d distilled skills. See their reasons in "
      "the skills' history; the distiller's instructions may need sharpening.",
      leaked,
      written,
    )
  return metrics
