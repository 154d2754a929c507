"""The skill bank: an immutable value, and the pure steps from one to the next.

Every step returns a new bank and the events that lead to it, small dicts for
the history. Row i of each array belongs to record i; records are never removed,
so rows and ids are never reused. Order within an iteration: credit, retire,
admit, evict.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from sesa_jax import metrics, prompts
from sesa_jax.distributed import host_cpu
from sesa_jax.language import question_key
from sesa_jax.retrieval.index import top_k
from sesa_jax.types import Encoder, Outcome, Question, Skill

STATES = ("active", "retired", "evicted")
ORIGINS = ("seed", "offline", "chat", "solver", "mined", "authored")
CREDITS = ("rollout", "majority", "relative")
FIELDS = ("description", "trigger", "evidence", "avoidance", "templates")

Events = tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Record:
  """A skill and what became of it."""

  skill: Skill
  state: str = "active"  # one of STATES
  reason: str = ""  # why it is no longer active


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

  @property
  def skills(self) -> tuple[Skill, ...]:
    """The active skills, oldest first."""
    return tuple(r.skill for r in self.records if r.state == "active")

  @property
  def net(self) -> Float[np.ndarray, " S"]:
    """Helpful minus harmful.

    Rounded: shares such as .1 + .2 - .3 must give 0, not less.
    """
    difference = np.asarray(self.helpful, np.float64) - np.asarray(self.harmful)
    return np.round(difference, 3)


def embedded_text(skill: Skill) -> str:
  """The text by which a skill is found."""
  return f"{skill.description} {skill.trigger}"


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


def _bank(
  capacity: int,
  next_number: int,
  records: tuple[Record, ...],
  arrays: Mapping[str, np.ndarray],
) -> SkillBank:
  """Pads the arrays to whole capacities and derives the masks from records."""
  rows = capacity * max(1, -(-len(records) // capacity))

  def put(array: np.ndarray) -> jax.Array:
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


def _arrays(bank: SkillBank) -> dict[str, np.ndarray]:
  """Copies that may be changed: the bank's own must not be."""
  names = ("embeddings", "retrieved", "helpful", "harmful")
  return {name: np.array(getattr(bank, name)) for name in names}


def _with_records(
  bank: SkillBank, records: Sequence[Record], **changes: Any
) -> SkillBank:
  next_number = changes.pop("next_number", bank.next_number)
  return _bank(
    bank.capacity, next_number, tuple(records), _arrays(bank) | changes
  )


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
  events = []
  for skill, embedding in zip(skills, embeddings, strict=True):
    bank, id = _append(bank, skill, embedding, iteration)
    events.append(_event(iteration, "prime", id))
  return bank, tuple(events)


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
    elif len(bank.skills) == bank.capacity and not _evictable(bank):
      reason = "full"
    if reason:
      events.append(
        _event(iteration, "reject", skill.id, reason=reason, **seen)
      )
      continue
    bank, id = _append(bank, skill, embedding, iteration)
    events.append(_event(iteration, "admit", id, **seen))
    bank, evicted = evict(bank, iteration, spare=id)
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
  scores, rows = top_k(embedding[None], bank.embeddings, mask, 1)
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
  bank: SkillBank, skill: Skill, embedding: np.ndarray, iteration: int
) -> tuple[SkillBank, str]:
  known = {record.skill.id for record in bank.records}
  number, id = bank.next_number, skill.id
  if not id:
    while (id := f"skill-{number:05d}") in known:
      number += 1
    number += 1
  elif id in known:
    raise ValueError(
      f"The bank has or had a skill {id!r}; ids are never reused. Give the "
      "new one another id, or none."
    )
  skill = dataclasses.replace(skill, id=id, created_at=iteration)
  arrays = _arrays(bank)
  count = len(bank.records)
  grown = {
    name: np.concatenate([array[:count], np.zeros_like(array[:1])])
    for name, array in arrays.items()
  }
  grown["embeddings"][count] = _checked(bank, embedding)
  records = (*bank.records, Record(skill))
  return _with_records(bank, records, next_number=number, **grown), id


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

  Returns:
    By question id, best first, at most k.
  """
  if not questions or k < 1 or not bank.skills:
    return {question.id: () for question in questions}
  vectors = encoder.encode([q.text for q in questions], "query")
  seeds = np.array([r.skill.source_seed for r in bank.records], object)
  texts = np.array(
    [question_key(r.skill.source_question) for r in bank.records], object
  )
  mask = np.tile(np.asarray(bank.active), (len(questions), 1))
  count = len(bank.records)
  for row, question in zip(mask, questions, strict=True):
    born = (seeds == question.seed_id) & (seeds != "")
    born |= (texts == question_key(question.text)) & (texts != "")
    row[:count] &= ~born.astype(bool)
  scores, rows = top_k(vectors, bank.embeddings, mask, k)
  floor = -np.inf if min_score is None else np.float32(min_score)
  return {
    question.id: tuple(
      bank.records[row].skill
      for row, score in zip(found, close, strict=True)
      if row >= 0 and score >= floor
    )
    for question, found, close in zip(questions, rows, scores, strict=True)
  }


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
  block, shown = prompts.HEADING, []
  for skill in skills:
    # A line each: numbered ones make small models go on counting.
    longer = f"{block}\n{rendered(skill, fields)}"
    if count(longer) > block_tokens:
      break
    block, shown = longer, [*shown, skill]
  return (block, tuple(shown)) if shown else ("", ())


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


def credit(
  bank: SkillBank,
  shown: Mapping[str, Sequence[Skill]],
  outcomes: Mapping[str, Outcome],
  rule: str,
  iteration: int,
) -> tuple[SkillBank, Events]:
  """Counts what came of the questions that skills were shown for.

  For each question and each skill shown, k of G attempts right: retrieved += 1,
  and by rule

      rollout   helpful += k, harmful += 1 if any attempt is substantively wrong
      majority  helpful += 1 if k > G - k, harmful += 1 if k < G - k
      relative  d = k/G - mean over the iteration's questions of that hop count;
                helpful += max(d, 0), harmful += max(-d, 0)

  Args:
    bank: the bank before.
    shown: skills in the prompt, by question id. A question without an outcome
      (an UNKNOWN verdict) gives no credit.
    outcomes: of all the iteration's questions, by id.
    rule: one of CREDITS.
    iteration: for the events.

  Returns:
    The bank after, and one event "credit" for each skill that was shown.

  Raises:
    ValueError: an unknown rule; lists those that exist.
  """
  if rule not in CREDITS:
    raise ValueError(
      f"Unknown bank.credit {rule!r}. Choices: {', '.join(CREDITS)}."
    )
  shares: dict[int, list[float]] = {}
  for _, outcome in sorted(outcomes.items()):
    shares.setdefault(outcome.question.hops, []).append(outcome.success)
  mean = {hops: sum(share) / len(share) for hops, share in shares.items()}
  rows = {r.skill.id: row for row, r in enumerate(bank.records)}
  arrays = _arrays(bank)
  events: dict[str, dict[str, Any]] = {}
  # Sorted: sums of fractions depend on their order, and a bank must not.
  for id in sorted(shown.keys() & outcomes.keys()):
    outcome = outcomes[id]
    helpful, harmful = _usage(outcome, rule, mean[outcome.question.hops])
    for skill in shown[id]:
      row = rows[skill.id]
      arrays["retrieved"][row] += 1
      arrays["helpful"][row] += helpful
      arrays["harmful"][row] += harmful
      event = events.setdefault(
        skill.id,
        _event(
          iteration, "credit", skill.id, helpful=0, harmful=0, questions=[]
        ),
      )
      event["helpful"] += helpful
      event["harmful"] += harmful
      event["questions"].append(id)
  return _with_records(bank, bank.records, **arrays), tuple(events.values())


def _usage(
  outcome: Outcome, rule: str, mean: float
) -> tuple[int | float, int | float]:
  right, wrong = outcome.right, outcome.total - outcome.right
  if rule == "rollout":
    return right, int(outcome.wrong > 0)
  if rule == "majority":
    return int(right > wrong), int(right < wrong)
  better = outcome.success - mean
  return max(better, 0.0), max(-better, 0.0)


def _event(iteration: int, event: str, id: str, **more: Any) -> dict[str, Any]:
  return dict(iteration=iteration, event=event, skill=id, **more)


# --- on disk ---------------------------------------------------------------


def to_tree(bank: SkillBank) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """Returns a checkpoint's two halves: numpy arrays, and what JSON holds."""
  return _arrays(bank), dict(
    capacity=bank.capacity,
    next_number=bank.next_number,
    records=[metrics.plain(record) for record in bank.records],
  )


def from_tree(
  arrays: Mapping[str, np.ndarray], document: Mapping[str, Any]
) -> SkillBank:
  """The inverse of `to_tree`, exactly."""
  records = []
  for record in document["records"]:
    skill = record["skill"] | {"templates": tuple(record["skill"]["templates"])}
    records.append(Record(Skill(**skill), record["state"], record["reason"]))
  return _bank(
    document["capacity"], document["next_number"], tuple(records), arrays
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
    metrics.plain(record.skill)
    | dict(retrieved=retrieved, helpful=helpful, harmful=harmful)
    | dict(state=record.state, reason=record.reason)
    for record, (retrieved, helpful, harmful) in zip(
      bank.records, usage, strict=False
    )
  ]


def save_jsonl(bank: SkillBank, path: str | Path) -> None:
  """Writes `rows`; the same bank gives the same bytes."""
  Path(path).write_bytes(b"".join(map(metrics.line, rows(bank))))


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


def load(path: str | Path) -> tuple[Record, ...]:
  """Reads skills from a JSONL file, such as `save_jsonl` and `rows` make.

  Usage in the file is checked and left out: it is of another run.

  Raises:
    ValueError: the file, the line and the key that is unknown, missing, of the
      wrong type or value, or an id that occurs twice.
  """
  path = Path(path)
  if not path.is_file():
    raise ValueError(f"{path}: no such file of skills.")
  records: dict[str, Record] = {}
  for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
    if not line.strip():
      continue
    where = f"{path}, line {number}"
    try:
      row = json.loads(line)
    except ValueError as error:
      raise ValueError(f"{where} is not JSON ({error}).") from error
    _check_row(row, where)
    if row["id"] in records:
      raise ValueError(f"{where}, key 'id': {row['id']!r} occurs twice.")
    fields = {f.name for f in dataclasses.fields(Skill)}
    skill = {key: row[key] for key in row if key in fields}
    skill["templates"] = tuple(skill["templates"])
    state = {key: row[key] for key in ("state", "reason") if key in row}
    records[row["id"]] = Record(Skill(**skill), **state)
  return tuple(records.values())


def _check_row(row: Any, where: str) -> None:
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
  for key in ("id", "description", "trigger"):
    if not row[key].strip():
      raise ValueError(f"{where}, key {key!r}: empty.")
  for key, choices in (("origin", ORIGINS), ("state", STATES)):
    if row.get(key, choices[0]) not in choices:
      raise ValueError(
        f"{where}, key {key!r}: {row[key]!r} is none of {', '.join(choices)}."
      )
