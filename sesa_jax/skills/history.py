"""What a bank was at any iteration, and the curves of its size.

All of it is computed from the rows of `skills_history.jsonl` alone.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from sesa_jax.skills import credit as credit_lib
from sesa_jax.skills.record import Record, row_of, skill_of

History = Sequence[Mapping[str, Any]]

_BIRTHS = ("prime", "inherit", "admit")
_USAGE = ("retrieved", "helpful", "harmful", "state", "reason")


def at(history: History, iteration: int | None = None) -> list[dict[str, Any]]:
  """Rebuilds the rows of a bank as they were after an iteration.

  Args:
    history: events, in order.
    iteration: the last one that counts; None is the newest.

  Returns:
    What `bank.rows` gave then, exactly: counters are added as float32, one
    event at a time, as `bank.credit` does.

  Raises:
    ValueError: the history does not say what a skill is, as those of older
      versions and of runs that began with another's state do not.
  """
  rows: dict[str, dict[str, Any]] = {}
  for event in history:
    if iteration is not None and event["iteration"] > iteration:
      break
    kind, id = event["event"], event["skill"]
    if kind in _BIRTHS:
      rows[id] = _born(event)
    elif kind in ("credit", "retire", "evict") and id not in rows:
      raise _unsaid(id)
    elif kind == "credit":
      row = rows[id]
      row["retrieved"] += len(event["questions"])
      for name in ("helpful", "harmful"):
        row[name] = float(np.float32(row[name]) + np.float32(event[name]))
    elif kind in ("retire", "evict"):
      state = {"retire": "retired", "evict": "evicted"}[kind]
      rows[id] |= dict(state=state, reason=event["reason"])
  return list(rows.values())


def _born(event: Mapping[str, Any]) -> dict[str, Any]:
  if "fields" not in event:
    raise _unsaid(event["skill"])
  known = dict(id=event["skill"], created_at=event["iteration"])
  row = row_of(Record(skill_of(event["fields"] | known)), 0, 0.0, 0.0)
  return row | {
    name: event[name] for name in (*_USAGE, "created_at") if name in event
  }


def _unsaid(id: str) -> ValueError:
  return ValueError(
    f"The history has an event of the skill {id!r}, but not what it is: it is "
    "of an older version. Only the bank as it is now, skills.jsonl, can be had."
  )


def effects(
  history: History, confidence: float = 0.95
) -> dict[str, credit_lib.Effect]:
  """Estimates what showing each skill changed, see `credit.effect`.

  Returns:
    By skill id, of those shown for questions that were tried without skills,
    too.
  """
  found: dict[str, list[float]] = {}
  for event in history:
    if event["event"] == "credit":
      known = [d for d in event.get("differences", ()) if d is not None]
      found.setdefault(event["skill"], []).extend(known)
  return {
    id: credit_lib.effect(differences, confidence)
    for id, differences in found.items()
    if differences
  }


# --- curves ----------------------------------------------------------------


@dataclass(frozen=True)
class Curves:
  """Sizes of a bank after each iteration; T of them, or [N, T] of N draws."""

  iterations: Int[np.ndarray, " T"]
  active: Int[np.ndarray, "*N T"]
  admitted: Int[np.ndarray, " T"]  # since the first one, primed ones aside
  retired: Int[np.ndarray, "*N T"]  # since the first one
  evicted: Int[np.ndarray, "*N T"]


def curves(history: History, last: int | None = None) -> Curves:
  """Counts a run's active, admitted, retired and evicted skills.

  Args:
    history: events, in order.
    last: iteration to count to; None is the last one with an event.
  """
  iterations = _iterations(history, last)
  kinds = {
    name: np.zeros(len(iterations), np.int64)
    for name in ("prime", "inherit", "admit", "retire", "evict")
  }
  for event in history:
    known = event["event"] in kinds and event.get("state", "active") == "active"
    if known and event["iteration"] <= iterations[-1]:
      kinds[event["event"]][event["iteration"] - iterations[0]] += 1
  sums = {name: np.cumsum(found) for name, found in kinds.items()}
  came = sums["prime"] + sums["inherit"] + sums["admit"]
  return Curves(
    iterations,
    came - sums["retire"] - sums["evict"],
    sums["admit"],
    sums["retire"],
    sums["evict"],
  )


def _iterations(history: History, last: int | None) -> Int[np.ndarray, " T"]:
  numbers = [event["iteration"] for event in history]
  first = min(numbers, default=0)
  return np.arange(first, max(first, *numbers, last or 0) + 1)


def deal(
  questions: int, draws: int, *, seed: int, iteration: int
) -> Int[np.ndarray, "N Q"]:
  """Draws permutations of an iteration's questions, by key.

  Question q is dealt the outcome of question `deal(...)[n, q]` in draw n. The
  skills that were shown for one question go on sharing one outcome.

  Args:
    questions: Q.
    draws: N, independent of each other.
    seed: with the iteration the key.
    iteration: whose questions these are.
  """
  rng = np.random.default_rng([seed, iteration])
  order = np.tile(np.arange(questions), (draws, 1))
  return rng.permuted(order, axis=1)


def null_curves(
  history: History,
  *,
  capacity: int,
  retire_after: int,
  draws: int = 100,
  seed: int = 0,
  last: int | None = None,
) -> Curves:
  """Replays a run with outcomes that say nothing about its skills.

  The same skills are admitted and the same questions asked, but in each
  iteration the questions' outcomes are permuted over them, see `deal`, and then
  the same rules retire and evict. A question shows, of its ranking of all
  skills, the nearest that the replay has, as many as the run showed. (With the
  showings of the run itself a skill that it retired could no longer be retired
  in a replay, and a run of pure noise would lie below all of them.)

  Args:
    history: events, in order, rankings included.
    capacity: `bank.capacity` of the run.
    retire_after: `bank.retire_after` of the run.
    draws: N replays.
    seed: of the permutations.
    last: iteration to go to; None is the last one with an event.

  Returns:
    Curves [N, T] but for `admitted` [T].

  Raises:
    ValueError: as `replay`.
  """
  return replay(
    history,
    capacity=capacity,
    retire_after=retire_after,
    last=last,
    order=lambda questions, iteration: deal(
      questions, draws, seed=seed, iteration=iteration
    ),
  )


def replay(
  history: History,
  *,
  capacity: int,
  retire_after: int,
  order: Callable[[int, int], Int[np.ndarray, "N Q"]],
  last: int | None = None,
) -> Curves:
  """Runs a history's rules again with outcomes handed on between questions.

  Args:
    history: events, in order, rankings included.
    capacity: `bank.capacity` of the run.
    retire_after: `bank.retire_after` of the run.
    order: (Q, iteration) -> in draw n, question q of the iteration gets the
      outcome of question `order[n, q]`, questions sorted by id. The identity
      gives the run's own curves.
    last: iteration to go to; None is the last one with an event.

  Raises:
    ValueError: the history lacks rankings, or is of an older version, without
      each question's credit.
  """
  iterations = _iterations(history, last)
  born = [e for e in history if e["event"] in _BIRTHS]
  immune = np.array([_born(e)["origin"] == "seed" for e in born], bool)
  bank = _Counters.none(len(order(1, int(iterations[0]))), len(born))
  sizes = {name: [] for name in ("active", "admitted", "retired", "evicted")}
  retired, evicted = np.zeros((2, len(bank.active)), np.int64)
  admitted, known, events = 0, 0, collections.deque(history)
  for iteration in iterations:
    now = []
    while events and events[0]["iteration"] == iteration:
      now.append(events.popleft())
    _credit(bank, now, order)
    net = bank.net()
    tried = bank.active & ~immune & (bank.retrieved >= retire_after)
    bank.active &= ~(tried & (net < 0))
    retired += (tried & (net < 0)).sum(1)
    for event in now:
      if event["event"] not in _BIRTHS:
        continue
      row, s = _born(event), known
      bank.active[:, s] = row["state"] == "active"
      for name in ("retrieved", "helpful", "harmful"):
        getattr(bank, name)[:, s] = row[name]
      if event["event"] == "admit":
        admitted += 1
        evicted += _evict(bank, net, immune, capacity, spare=s)
      known += 1
    sizes["active"].append(bank.active.sum(1))
    sizes["admitted"].append(admitted)
    sizes["retired"].append(retired.copy())
    sizes["evicted"].append(evicted.copy())
  return Curves(iterations, **{k: np.stack(v, -1) for k, v in sizes.items()})


@dataclass
class _Counters:
  """Usage of S skills in N replays at once."""

  active: Bool[np.ndarray, "N S"]
  retrieved: Int[np.ndarray, "N S"]
  helpful: Float[np.ndarray, "N S"]
  harmful: Float[np.ndarray, "N S"]

  @classmethod
  def none(cls, draws: int, skills: int) -> _Counters:
    shape = (draws, skills)
    return cls(
      np.zeros(shape, bool),
      np.zeros(shape, np.int32),
      np.zeros(shape, np.float32),
      np.zeros(shape, np.float32),
    )

  def net(self) -> Float[np.ndarray, "N S"]:
    """As `SkillBank.net`."""
    return np.round(self.helpful.astype(np.float64) - self.harmful, 3)


def _credit(bank: _Counters, events: History, order) -> None:
  """Counts an iteration's outcomes, in every draw by its own order."""
  credits = [event for event in events if event["event"] == "credit"]
  if not credits:
    return
  ranked = [e["ranked"] for e in events if e["event"] == "rank"]
  if not ranked or any("usage" not in event for event in credits):
    raise ValueError(
      f"The history holds no rankings of iteration {credits[0]['iteration']}, "
      "or not the credit of each question: it is of an older version, and has "
      "no null curve."
    )
  pairs = [
    (question, pair)
    for event in credits
    for question, pair in zip(event["questions"], event["usage"], strict=True)
  ]
  outcome, shown = dict(pairs), collections.Counter(q for q, _ in pairs)
  asked = sorted(outcome)
  usage = np.array([outcome[question] for question in asked], np.float64)
  dealt = usage[order(len(asked), credits[0]["iteration"])]  # [N, Q, 2]
  rows = [ranked[0][question] for question in asked]
  table = np.full((len(rows), max(map(len, rows), default=0)), -1)
  for q, row in enumerate(rows):
    table[q, : len(row)] = row
  alive = bank.active[:, table] & (table >= 0)  # [N, Q, R]
  most = np.array([shown[question] for question in asked])
  n, q, r = np.nonzero(alive & (alive.cumsum(2) <= most[:, None]))
  place = n, table[q, r]
  np.add.at(bank.retrieved, place, 1)
  for side, counter in enumerate((bank.helpful, bank.harmful)):
    more = np.zeros(counter.shape)
    np.add.at(more, place, dealt[n, q, side])
    counter += more.astype(np.float32)


def _evict(bank, net, immune, capacity, spare) -> Int[np.ndarray, " N"]:
  """Evicts as `bank.evict` does; returns how many in each draw."""
  evicted = np.maximum(bank.active.sum(1) - capacity, 0)
  for n in np.flatnonzero(evicted):
    free = np.flatnonzero(bank.active[n] & ~immune)
    free = free[free != spare]
    worst = free[np.argsort(net[n, free], kind="stable")][: evicted[n]]
    bank.active[n, worst] = False
    evicted[n] = len(worst)
  return evicted
