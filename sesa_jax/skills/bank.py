"""The skill bank: an immutable value, and the pure steps from one to the next.

Every step returns a new bank and the events that lead to it, small dicts for
the history. Row i of each array belongs to record i; records are never removed,
so rows and ids are never reused. Order within an iteration: credit, retire,
admit, evict.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from sesa_jax import metrics
from sesa_jax.distributed import host_cpu
from sesa_jax.language import question_key
from sesa_jax.retrieval import index as index_lib
from sesa_jax.skills import record as record_lib
from sesa_jax.skills.credit import CREDITS, difference, usage
from sesa_jax.skills.record import Record, embedded_text, row_of, skill_of
from sesa_jax.types import Encoder, Outcome, Question, Skill

Events = tuple[dict[str, Any], ...]

# Who has a bank finds here what its skills are as text.
check_fields, load = record_lib.check_fields, record_lib.load
render, rendered = record_lib.render, record_lib.rendered
joined, sources = record_lib.joined, record_lib.sources


@dataclass(frozen=True, eq=False)
class SkillBank:
  """Skills with their embeddings and usage, on the host's CPU device.

  S is a multiple of `capacity` that has room for every record: it grows only
  once the retired and evicted, which stay, fill the first `capacity` rows.
  """

  capacity: int  # of active skills
  next_number: int  # of the next id
  records: tuple[Record, ...]  # oldest first
  embeddings: Float[jax.Array, "S E"]
  retrieved: Int[jax.Array, " S"]  # questions it was shown for
  helpful: Float[jax.Array, " S"]
  harmful: Float[jax.Array, " S"]
  active: Bool[jax.Array, " S"]
  tombstones: Bool[jax.Array, " S"]  # retired: bars its like from coming back
  # By kind, built when first asked for. They are handed on by the steps that
  # change neither embeddings nor `active`, and so are rebuilt by no others.
  indexes: dict[str, index_lib.Index] = field(
    default_factory=dict, init=False, repr=False
  )

  @property
  def skills(self) -> tuple[Skill, ...]:
    """The active skills, oldest first."""
    return tuple(r.skill for r in self.records if r.state == "active")

  @property
  def net(self) -> Float[np.ndarray, " S"]:
    """Helpful minus harmful.

    Rounded: shares such as .1 + .2 - .3 must give 0, not less.
    """
    net = np.asarray(self.helpful, np.float64) - np.asarray(self.harmful)
    return np.round(net, 3)


def create(capacity: int, dim: int) -> SkillBank:
  """Returns an empty bank.

  Args:
    capacity: most skills that may be active.
    dim: E, the width of the encoder's embeddings.

  Raises:
    ValueError: a capacity below 1.
  """
  if capacity < 1:
    raise ValueError(
      f"bank.capacity = {capacity}: a bank holds at least 1 skill. For runs "
      "without skills set bank.top = 0."
    )
  return _bank(
    capacity,
    1,
    (),
    dict(
      embeddings=np.zeros((0, dim), np.float32),
      retrieved=np.zeros(0, np.int32),
      helpful=np.zeros(0, np.float32),
      harmful=np.zeros(0, np.float32),
    ),
  )


_RANKED = 32  # skills of a ranking at least, if there are so many
_ARRAYS = ("embeddings", "retrieved", "helpful", "harmful")


def _bank(
  capacity: int,
  next_number: int,
  records: tuple[Record, ...],
  arrays: Mapping[str, np.ndarray | jax.Array],
) -> SkillBank:
  """Pads the arrays to whole capacities and derives the masks from records."""
  rows = capacity * max(1, -(-len(records) // capacity))

  def put(array: np.ndarray | jax.Array) -> jax.Array:
    if isinstance(array, jax.Array) and len(array) == rows:
      return array
    padded = np.zeros((rows, *array.shape[1:]), array.dtype)
    padded[: len(records)] = array[: len(records)]
    return jax.device_put(padded, host_cpu())

  states = np.array([record.state for record in records], object)
  return SkillBank(
    capacity=capacity,
    next_number=next_number,
    records=records,
    active=put(states == "active"),
    tombstones=put(states == "retired"),
    **{name: put(array) for name, array in arrays.items()},
  )


def _with_records(
  bank: SkillBank, records: Sequence[Record], **changes: Any
) -> SkillBank:
  next_number = changes.pop("next_number", bank.next_number)
  arrays = {name: getattr(bank, name) for name in _ARRAYS} | changes
  after = _bank(bank.capacity, next_number, tuple(records), arrays)
  # Embeddings change only where an active row is new.
  if np.array_equal(bank.active, after.active):
    after.indexes.update(bank.indexes)
  return after


# --- what comes in ---------------------------------------------------------


def prime(
  bank: SkillBank,
  skills: Sequence[Skill],
  embeddings: Float[np.ndarray, "n E"],
  iteration: int = 0,
) -> tuple[SkillBank, Events]:
  """Takes in skills as they are: similarity is the business of who wrote them.

  Raises:
    ValueError: more skills than the bank has room for, or an id that it knows.
  """
  room = bank.capacity - len(bank.skills)
  if len(skills) > room:
    raise ValueError(
      f"{len(skills)} skills to prime the bank, but there is room for {room} "
      f"of bank.capacity = {bank.capacity}. Raise it or prime with fewer."
    )
  bank, new = _append(bank, skills, embeddings, iteration)
  return bank, tuple(
    _event(iteration, "prime", skill.id, fields=_fields(skill)) for skill in new
  )


def admit(
  bank: SkillBank,
  skills: Sequence[Skill],
  embeddings: Float[np.ndarray, "n E"],
  threshold: float,
  iteration: int,
) -> tuple[SkillBank, Events]:
  """Admits, in order, each skill that is unlike those the bank knows.

  Its cosine to every active skill, those admitted in the same pass included,
  and to every retired one is at most the threshold; equal is admitted. In a
  full bank it takes the place of the active skill with the lowest helpful -
  harmful, of equals the oldest; seeds are immune, a bank full of them rejects.

  Args:
    bank: the bank before.
    skills: candidates; one with id "" gets the next id.
    embeddings: float32 [n, E], unit rows, one a skill.
    threshold: of the encoder; cosines are compared as float32.
    iteration: for `created_at` and the events.

  Returns:
    The bank after, and for each skill one event "admit" or "reject" (reason
    "similar", "retired" or "full"), after "admit" perhaps an "evict".

  Raises:
    ValueError: embeddings of another width or not finite, or an id that the
      bank knows.
  """
  events = []
  for skill, embedding in zip(skills, embeddings, strict=True):
    near, row, score = nearest(bank, embedding)
    seen = dict(similarity=round(score, 6), nearest=near) if near else {}
    reason = ""
    if near and np.float32(score) > np.float32(threshold):
      retired = bank.records[row].state == "retired"
      reason = "retired" if retired else "similar"
    elif len(bank.skills) - len(_evictable(bank)) >= bank.capacity:
      reason = "full"
    if reason:
      events.append(
        _event(iteration, "reject", skill.id, reason=reason, **seen)
      )
      continue
    bank, (new,) = _append(bank, [skill], [embedding], iteration)
    events.append(
      _event(iteration, "admit", new.id, fields=_fields(new), **seen)
    )
    bank, evicted = evict(bank, iteration, spare=new.id)
    events += evicted
  return bank, tuple(events)


def nearest(
  bank: SkillBank, embedding: Float[np.ndarray, " E"]
) -> tuple[str, int, float]:
  """The active or retired skill most like an embedding: id, row and cosine.

  Returns ("", -1, -inf) where the bank knows none.
  """
  embedding = _checked(bank, embedding)
  mask = np.asarray(bank.active) | np.asarray(bank.tombstones)
  scores, rows = index_lib.top_k(embedding[None], bank.embeddings, mask, 1)
  row = int(rows[0, 0])
  id = bank.records[row].skill.id if row >= 0 else ""
  return id, row, float(scores[0, 0])


def _checked(bank: SkillBank, embedding: np.ndarray) -> np.ndarray:
  embedding = np.asarray(embedding, np.float32)
  width = bank.embeddings.shape[1]
  if embedding.shape != (width,) or not np.isfinite(embedding).all():
    raise ValueError(
      f"A skill's embedding has shape {embedding.shape}, not ({width},), or "
      "is not finite. A bank belongs to one encoder: start another with it."
    )
  return embedding


def _append(
  bank: SkillBank,
  skills: Sequence[Skill],
  embeddings: Sequence[np.ndarray],
  iteration: int,
) -> tuple[SkillBank, list[Skill]]:
  known = {record.skill.id for record in bank.records}
  number, new = bank.next_number, []
  for skill in skills:
    id = skill.id
    if not id:
      while (id := f"skill-{number:05d}") in known:
        number += 1
      number += 1
    elif id in known:
      raise ValueError(
        f"The bank has or had a skill {id!r}; ids are never reused. Give the "
        "new one another id, or none."
      )
    known.add(id)
    new.append(dataclasses.replace(skill, id=id, created_at=iteration))
  vectors = [
    _checked(bank, vector) for _, vector in zip(skills, embeddings, strict=True)
  ]
  if not new:
    return bank, []
  count, grown = len(bank.records), {}
  for name in _ARRAYS:
    old = np.asarray(getattr(bank, name))[:count]
    more = np.zeros((len(new), *old.shape[1:]), old.dtype)
    grown[name] = np.concatenate([old, more])
  grown["embeddings"][count:] = vectors
  records = (*bank.records, *map(Record, new))
  return _with_records(bank, records, next_number=number, **grown), new


def _fields(skill: Skill) -> dict[str, Any]:
  """What the history has to say of a new skill, so that it alone suffices."""
  known = metrics.plain(skill)
  return {
    name: known[name] for name in known if name not in ("id", "created_at")
  }


def inherited(bank: SkillBank, iteration: int) -> Events:
  """Returns the events by which a history begins with another run's bank."""
  return tuple(
    _event(
      iteration,
      "inherit",
      record.skill.id,
      fields=_fields(record.skill),
      **{key: value for key, value in row.items() if key in _INHERITED},
    )
    for record, row in zip(bank.records, rows(bank), strict=True)
  )


_INHERITED = (
  "created_at",
  "retrieved",
  "helpful",
  "harmful",
  "state",
  "reason",
)


# --- what goes out ---------------------------------------------------------


def retire(
  bank: SkillBank, after: int, iteration: int
) -> tuple[SkillBank, Events]:
  """Retires skills that were tried and did harm; their embeddings stay.

  Active, not a seed, retrieved >= after and helpful - harmful < 0.
  """
  retrieved, net = np.asarray(bank.retrieved), bank.net
  records, events = list(bank.records), []
  for row in _evictable(bank):
    if retrieved[row] >= after and net[row] < 0:
      records[row] = dataclasses.replace(
        records[row], state="retired", reason="harmful"
      )
      events.append(
        _event(
          iteration,
          "retire",
          records[row].skill.id,
          reason="harmful",
          retrieved=int(retrieved[row]),
          net=float(net[row]),
        )
      )
  return _with_records(bank, records), tuple(events)


def evict(
  bank: SkillBank, iteration: int, spare: str = ""
) -> tuple[SkillBank, Events]:
  """Evicts skills until no more than `capacity` are active.

  The lowest helpful - harmful goes first, of equals the oldest, never a seed
  nor the skill with the id `spare`. An evicted skill may come back.
  """
  records, events = list(bank.records), []
  net = bank.net
  rows = [r for r in _evictable(bank) if records[r].skill.id != spare]
  rows.sort(key=lambda row: (net[row], row))
  for row in rows[: max(0, len(bank.skills) - bank.capacity)]:
    records[row] = dataclasses.replace(
      records[row], state="evicted", reason="capacity"
    )
    events.append(
      _event(
        iteration,
        "evict",
        records[row].skill.id,
        reason="capacity",
        net=float(net[row]),
      )
    )
  return _with_records(bank, records), tuple(events)


def _evictable(bank: SkillBank) -> list[int]:
  return [
    row
    for row, record in enumerate(bank.records)
    if record.state == "active" and record.skill.origin != "seed"
  ]


# --- use -------------------------------------------------------------------


def top(
  bank: SkillBank,
  questions: Sequence[Question],
  encoder: Encoder,
  k: int,
  min_score: float | None = None,
  kind: str = "auto",
) -> dict[str, tuple[Skill, ...]]:
  """Picks, for each question, the k active skills nearest by cosine.

  Never a skill that was born from this question: from its seed, or from its
  text, case and punctuation aside.

  Args:
    bank: the bank of this iteration.
    questions: with ids that are unique among them.
    encoder: the one that embedded the bank.
    k: skills a question; 0 gives none.
    min_score: cosine below which a skill is left out; None is no floor.
    kind: of the index, see `retrieval.index.build`.

  Returns:
    By question id, best first, at most k.
  """
  if not questions or k < 1 or not bank.skills:
    return {question.id: () for question in questions}
  vectors = encoder.encode([q.text for q in questions], "query")
  if kind not in bank.indexes:
    bank.indexes[kind] = index_lib.build(bank.embeddings, bank.active, kind)
  scores, rows = bank.indexes[kind].search(
    vectors, k, ~born_from(bank, questions)
  )
  floor = -np.inf if min_score is None else np.float32(min_score)
  return {
    question.id: tuple(
      bank.records[row].skill
      for row, score in zip(found, close, strict=True)
      if row >= 0 and score >= floor
    )
    for question, found, close in zip(questions, rows, scores, strict=True)
  }


def ranking(
  bank: SkillBank,
  questions: Sequence[Question],
  encoder: Encoder,
  iteration: int,
  min_score: float | None = None,
) -> Events:
  """Ranks all skills that the bank has or had for each question.

  One event, for the null curve: what would have been shown had other skills
  been active. It goes deep enough for three to be found among those that are.

  Args:
    bank: of this iteration.
    questions: with ids that are unique among them.
    encoder: the one that embedded the bank.
    iteration: of the event.
    min_score: as for `top`.
  """
  if not questions or not bank.skills:
    return ()
  count = len(bank.records)
  vectors = encoder.encode([q.text for q in questions], "query")
  mask = ~born_from(bank, questions)
  mask[:, count:] = False
  depth = min(count, max(_RANKED, 10 * count // len(bank.skills)))
  scores, rows = index_lib.top_k(vectors, bank.embeddings, mask, depth)
  floor = -np.inf if min_score is None else np.float32(min_score)
  ranked = {
    question.id: found[(found >= 0) & (close >= floor)].tolist()
    for question, found, close in zip(questions, rows, scores, strict=True)
  }
  return (_event(iteration, "rank", "", ranked=ranked),)


def born_from(
  bank: SkillBank, questions: Sequence[Question]
) -> Bool[np.ndarray, "Q S"]:
  """Says which skills were born from which question, by seed or by text."""
  rows: dict[tuple[str, str], list[int]] = {}
  for row, record in enumerate(bank.records):
    for seed in record_lib.sources(record.skill.source_seed):
      rows.setdefault(("seed", seed), []).append(row)
    for text in record_lib.sources(record.skill.source_question):
      rows.setdefault(("text", question_key(text)), []).append(row)
  out = np.zeros((len(questions), len(bank.active)), bool)
  for born, question in zip(out, questions, strict=True):
    for key in (
      ("seed", question.seed_id),
      ("text", question_key(question.text)),
    ):
      born[rows.get(key, []) if key[1] else []] = True
  return out


def credit(
  bank: SkillBank,
  shown: Mapping[str, Sequence[Skill]],
  outcomes: Mapping[str, Outcome],
  rule: str,
  iteration: int,
  control: Mapping[str, Outcome] | None = None,
) -> tuple[SkillBank, Events]:
  """Counts what came of the questions that skills were shown for.

  For each question and each skill shown: retrieved += 1, and helpful and
  harmful grow by `credit.usage` under the rule.

  Args:
    bank: the bank before.
    shown: skills in the prompt, by question id. A question without an outcome
      (an UNKNOWN verdict) gives no credit.
    outcomes: of all the iteration's questions, by id.
    rule: one of CREDITS.
    iteration: for the events.
    control: outcomes of attempts at the same questions without skills, by id.
      Under the rule `control` a question that has none gives no credit; under
      the others it is only without a difference.

  Returns:
    The bank after, and one event "credit" for each skill that was shown. Where
    there are attempts without skills, it holds each question's difference of
    success rates, or None.

  Raises:
    ValueError: an unknown rule (lists those that exist), or `control` without
      such attempts.
  """
  if rule not in CREDITS:
    raise ValueError(
      f"Unknown bank.credit {rule!r}. Choices: {', '.join(CREDITS)}."
    )
  if rule == "control" and control is None:
    raise ValueError(
      "bank.credit = 'control' compares with attempts without skills: set "
      "bank.control_attempts to at least 1."
    )
  shares: dict[int, list[float]] = {}
  for _, outcome in sorted(outcomes.items()):
    shares.setdefault(outcome.question.hops, []).append(outcome.success)
  mean = {hops: sum(share) / len(share) for hops, share in shares.items()}
  events: dict[str, dict[str, Any]] = {}
  # Sorted: sums of fractions depend on their order, and a bank must not.
  for id in sorted(shown.keys() & outcomes.keys()):
    outcome, unprimed = outcomes[id], (control or {}).get(id)
    if rule == "control" and unprimed is None:
      continue
    pair = usage(outcome, rule, mean[outcome.question.hops], unprimed)
    for skill in shown[id]:
      event = events.setdefault(
        skill.id,
        _event(iteration, "credit", skill.id, helpful=0, harmful=0)
        | dict(questions=[], usage=[])
        | ({} if control is None else dict(differences=[])),
      )
      event["helpful"] += pair[0]
      event["harmful"] += pair[1]
      event["questions"].append(id)
      event["usage"].append(list(pair))
      if control is not None:
        event["differences"].append(
          None if unprimed is None else difference(outcome, unprimed)
        )
  rows = {r.skill.id: row for row, r in enumerate(bank.records)}
  names = ("retrieved", "helpful", "harmful")
  arrays = {name: np.array(getattr(bank, name)) for name in names}
  # An event's sum is added as one number, so that the history gives the same.
  for event in events.values():
    row = rows[event["skill"]]
    arrays["retrieved"][row] += len(event["questions"])
    arrays["helpful"][row] += event["helpful"]
    arrays["harmful"][row] += event["harmful"]
  return _with_records(bank, bank.records, **arrays), tuple(events.values())


def _event(iteration: int, event: str, id: str, **more: Any) -> dict[str, Any]:
  return dict(iteration=iteration, event=event, skill=id, **more)


# --- on disk ---------------------------------------------------------------


def to_tree(bank: SkillBank) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """Returns a checkpoint's two halves: numpy arrays, and what JSON holds."""
  arrays = {name: np.array(getattr(bank, name)) for name in _ARRAYS}
  return arrays, dict(
    capacity=bank.capacity,
    next_number=bank.next_number,
    records=[metrics.plain(record) for record in bank.records],
  )


def from_tree(
  arrays: Mapping[str, np.ndarray], document: Mapping[str, Any]
) -> SkillBank:
  """The inverse of `to_tree`, exactly."""
  return _bank(
    document["capacity"],
    document["next_number"],
    tuple(
      Record(skill_of(record["skill"]), record["state"], record["reason"])
      for record in document["records"]
    ),
    arrays,
  )


def rows(bank: SkillBank) -> list[dict[str, Any]]:
  """One row a skill, oldest first, with usage and state, for a JSONL file."""
  usage = zip(
    np.asarray(bank.retrieved).tolist(),
    np.asarray(bank.helpful).tolist(),
    np.asarray(bank.harmful).tolist(),
    strict=True,
  )
  return [
    row_of(record, *used)
    for record, used in zip(bank.records, usage, strict=False)
  ]


def from_rows(
  rows: Sequence[Mapping[str, Any]], encoder: Encoder, capacity: int
) -> SkillBank:
  """Makes a bank of rows such as `rows` and `history.at` give.

  Its embeddings are computed anew. The next id is above every number in use.

  Args:
    rows: with all keys.
    encoder: embeds the skills.
    capacity: of active skills.

  Raises:
    ValueError: more active skills than the capacity.
  """
  records = tuple(
    Record(skill_of(row), row["state"], row["reason"]) for row in rows
  )
  active = sum(record.state == "active" for record in records)
  if active > capacity:
    raise ValueError(
      f"{active} active skills, but bank.capacity = {capacity}. Raise it."
    )
  numbers = [re.fullmatch(r"skill-(\d{5,})", r.skill.id) for r in records]
  texts = [embedded_text(record.skill) for record in records]
  return _bank(
    capacity,
    1 + max((int(found[1]) for found in numbers if found), default=0),
    records,
    dict(
      embeddings=encoder.encode(texts, "passage"),
      retrieved=np.array([row["retrieved"] for row in rows], np.int32),
      helpful=np.array([row["helpful"] for row in rows], np.float32),
      harmful=np.array([row["harmful"] for row in rows], np.float32),
    ),
  )


def save_jsonl(bank: SkillBank, path: str | Path) -> None:
  """Writes `rows`; the same bank gives the same bytes."""
  Path(path).write_bytes(b"".join(map(metrics.line, rows(bank))))
