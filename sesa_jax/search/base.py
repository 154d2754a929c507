"""What any engine may be wrapped in: counts with a budget, and batches.

Every engine and every wrapper is a `types.SearchEngine`: a call brings
passages or a typed failure for each query, and never raises for an outage.
"""

from __future__ import annotations

import collections
import datetime
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from sesa_jax import remote
from sesa_jax.types import Passage, SearchEngine, SearchFailure

KINDS = (*remote.OUTAGES, "rejected", "not_kept")
COUNTS = (
  "queries",  # that reached the engine, past the cache
  "retries",
  "cost",
  "cache_hits",
  "cache_misses",
  *(f"failures/{kind}" for kind in KINDS),
)

Found = tuple[Passage, ...] | SearchFailure


class Ledger(remote.Ledger):
  """Counts a run's searches, and money of whatever kind; see `remote.Ledger`.

  Args:
    searches: queries that may reach a server; None is no limit.
    cost: in the prices' currency; None is no limit.
    path: file that holds what was spent; "" keeps nothing.

  Raises:
    ValueError: the file is damaged.
  """

  def __init__(
    self,
    *,
    searches: int | None = None,
    cost: float | None = None,
    path: str | Path = "",
  ):
    limits = {"searches": searches, "cost": cost}
    super().__init__(limits, COUNTS, "run", path)

  def drain(self, path: str = "search") -> dict[str, float]:
    """Returns what was counted since the last drain."""
    return super().drain(path)


def total(
  drained: Sequence[Mapping[str, float]], path: str = "search"
) -> dict[str, float]:
  """Sums what several ledgers counted, and adds the cache's hit rate."""
  found = {name: sum(row[name] for row in drained) for name in drained[0]}
  hits, misses = found[f"{path}/cache_hits"], found[f"{path}/cache_misses"]
  if hits + misses:
    found[f"{path}/hit_rate"] = hits / (hits + misses)
  return found


def check_k(k: int) -> None:
  """Raises ValueError if fewer than one passage is asked for."""
  if k < 1:
    raise ValueError(f"A search for {k} passages; ask for at least 1.")


def _today() -> str:
  return datetime.datetime.now(datetime.UTC).date().isoformat()


class Counted:
  """Counts queries, failures and money; a query past the budget is not made.

  Queries that end in a failure are not charged.

  Args:
    engine: what is asked.
    ledger: counts and refuses.
    charged: whether queries use the budget up.
    price: of a thousand queries, in any one currency.
    per_day: queries a day (UTC) at most; None is no limit.
    today: the date, for tests.
  """

  def __init__(
    self,
    engine: SearchEngine,
    ledger: remote.Ledger,
    *,
    charged: bool = True,
    price: float = 0.0,
    per_day: int | None = None,
    today: Callable[[], str] = _today,
  ):
    self._engine, self._ledger = engine, ledger
    self._price, self._per_day, self._today = price / 1000, per_day, today
    self._charged = charged

  def search(self, queries: Sequence[str], k: int) -> list[Found]:
    """See `types.SearchEngine`."""
    one = {"searches": 1, "cost": self._price} if self._charged else {}
    if self._per_day is not None:
      day = f"on {self._today()}"
      self._ledger.limits[day] = self._per_day
      one[day] = 1
    allowed = [self._ledger.reserve(one) for _ in queries]
    asked = [q for q, fits in zip(queries, allowed, strict=True) if fits]
    answers = iter(self._engine.search(asked, k) if asked else ())
    found = [
      next(answers)
      if fits
      else SearchFailure("the call could pass the budget", "budget")
      for fits in allowed
    ]
    lost = [a for a in found if isinstance(a, SearchFailure)]
    for failure in lost:
      self._ledger.count(f"failures/{failure.kind}")
    answered = len(found) - len(lost)
    self._ledger.count("queries", len(asked))
    self._ledger.count("cost", answered * self._price)
    self._ledger.settle(_times(one, len(asked)), _times(one, answered))
    return found


def _times(amounts: Mapping[str, float], count: int) -> dict[str, float]:
  return {name: count * value for name, value in amounts.items()}


class Batched:
  """Joins the queries of many threads into few calls of an engine.

  While `workers` calls are made, further queries wait, and go together into
  the next ones: nothing is delayed to fill a batch.

  Args:
    engine: what is asked.
    size: queries of a call at most.
    workers: calls at once.
  """

  def __init__(self, engine: SearchEngine, *, size: int, workers: int):
    self._engine, self._size = engine, size
    self._lock = threading.Lock()
    self._waiting: collections.deque[tuple[str, int, Future]] = (
      collections.deque()
    )
    self._pool = ThreadPoolExecutor(workers, "search-batch")

  def search(self, queries: Sequence[str], k: int) -> list[Found]:
    """See `types.SearchEngine`; waits in the calling thread."""
    check_k(k)
    answers = [Future() for _ in queries]
    with self._lock:
      self._waiting.extend(
        (query, k, answer)
        for query, answer in zip(queries, answers, strict=True)
      )
    for _ in queries:
      self._pool.submit(self._run)
    return [answer.result() for answer in answers]

  def _run(self) -> None:
    """Makes one call; none if others took all that waited."""
    batch = self._take()
    if not batch:
      return
    try:
      found = self._engine.search([q for q, _, _ in batch], batch[0][1])
      for (_, _, answer), passages in zip(batch, found, strict=True):
        answer.set_result(passages)
    except BaseException as error:  # raised again in the threads that wait
      for _, _, answer in batch:
        answer.set_exception(error)

  def _take(self) -> list[tuple[str, int, Future]]:
    """The oldest that ask for as many passages as the first of them."""
    batch = []
    with self._lock:
      while (
        self._waiting
        and len(batch) < self._size
        and self._waiting[0][1] == (batch or self._waiting)[0][1]
      ):
        batch.append(self._waiting.popleft())
    return batch
