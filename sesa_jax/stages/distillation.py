"""Stage 4, failure distillation: failures wait, then some become skills."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from sesa_jax.judge import leaks
from sesa_jax.language import Language
from sesa_jax.skills import bank as skill_bank
from sesa_jax.types import (
  Distiller,
  DistillFailure,
  Encoder,
  FailureRecord,
  Passage,
  Report,
  Skill,
)

KEEPS = ("newest", "best")

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
  tuples = ("targets", "other_predictions", "skill_ids")
  return FailureRecord(
    **dict(row)
    | {name: tuple(row[name]) for name in tuples}
    | {"passages": tuple(Passage(**p) for p in row["passages"])}
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


def distill(
  bank: skill_bank.SkillBank,
  queue: Queue,
  *,
  distiller: Distiller,
  encoder: Encoder,
  language: Language,
  iteration: int,
  every: int,
  min_pending: int,
  max_records: int,
  threshold: float,
  admit: bool,
) -> tuple[skill_bank.SkillBank, Queue, Report]:
  """Turns the best records into skills and admits those that are new.

  Best first: priority, then newest, then question id. One record, one call, at
  most one skill, which must pass the leak guard and then the bank's admission.
  A record leaves the queue once its call was answered, whatever became of the
  skill; an outage leaves it there. The bank changes at the end, in one pass.

  Args:
    bank: the bank, after credit and retirement.
    queue: what waits.
    distiller: writes the skills.
    encoder: embeds them.
    language: of the leak guard.
    iteration: counted from 1.
    every: iterations from one distillation to the next.
    min_pending: fewer records wait on.
    max_records: taken at once.
    threshold: of the encoder; see `bank.admit`.
    admit: False leaves all as it is.

  Returns:
    The bank and the queue after, and a report. Its rows are the bank's events;
    each record taken has one with `question`, `outcome` ("admitted", "rejected"
    or "failed"), `reason` and the skill's `text`.
  """
  chosen: list[FailureRecord] = []
  if admit and due(iteration, every) and len(queue) >= min_pending:
    chosen = sorted(queue, key=_best_first)[:max_records]
  known = {record.skill.id: record.skill for record in bank.records}
  rows, lost = [], set()
  candidates: list[tuple[FailureRecord, Skill]] = []
  for record in chosen:
    shown = [known[id] for id in record.skill_ids if id in known]
    skill = distiller.distill(record, shown)
    if isinstance(skill, DistillFailure):
      rows.append(_row(iteration, record, "failed", skill.reason))
      if skill.outage:
        lost.add(_key(record))
      continue
    # Set here: the rule that a skill is not shown for the question that it was
    # born from must not hang on what a distiller remembers.
    skill = dataclasses.replace(
      skill,
      id="",
      origin=distiller.name,
      source_question=record.question,
      source_seed=record.seed_id,
    )
    leak = leaks.leaks(skill, record, language)
    if leak:
      rows.append(_row(iteration, record, "rejected", f"leak_{leak}", skill))
    else:
      candidates.append((record, skill))
  skills = [skill for _, skill in candidates]
  texts = [skill_bank.embedded_text(skill) for skill in skills]
  vectors = encoder.encode(texts, "passage")
  bank, events = skill_bank.admit(bank, skills, vectors, threshold, iteration)
  left = iter(candidates)
  for event in events:
    if event["event"] == "evict":
      rows.append(event)
      continue
    record, skill = next(left)
    outcome = {"admit": "admitted", "reject": "rejected"}[event["event"]]
    row = _row(iteration, record, outcome, event.get("reason", ""), skill)
    rows.append(row | event)
  used = {_key(record) for record in chosen} - lost
  queue = tuple(record for record in queue if _key(record) not in used)
  metrics = _metrics(rows, pending=len(queue), lost=len(lost))
  return bank, queue, Report(metrics, rows)


def _key(record: FailureRecord) -> tuple[int, str]:
  """Question ids are unique within an iteration only."""
  return record.iteration, record.question_id


def _row(
  iteration: int,
  record: FailureRecord,
  outcome: str,
  reason: str,
  skill: Skill | None = None,
) -> dict:
  return dict(
    iteration=iteration,
    event="fail" if outcome == "failed" else "reject",
    skill="",
    question=record.question_id,
    asked_at=record.iteration,
    outcome=outcome,
    reason=reason,
    category=skill.category if skill else "",
    text=skill_bank.rendered(skill) if skill else "",
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
