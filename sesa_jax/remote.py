"""What calls to servers share: kinds of failure, retries, counts, a budget.

A call is answered, or it ends in a failure of a kind that says whether the
same call may be answered another time. Nothing here knows what is asked.
"""

from __future__ import annotations

import contextlib
import email.utils
import errno
import json
import math
import os
import sqlite3
import threading
import urllib.parse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import diskcache
import tenacity

from sesa_jax import metrics
from sesa_jax.types import Stopped

# Tried again within a call.
TRANSIENT = ("timeout", "rate_limit", "server", "connection", "body")
# The server's fault, or ours: the same call may be answered another day.
OUTAGES = (*TRANSIENT, "access", "budget", "skipped")

_ACCESS = (401, 402, 403, 404, 405, 407)

# Seconds between tries, drawn at random.
back_off = tenacity.wait_random_exponential(multiplier=0.5, max=20)


def kind_of_status(code: int) -> str:
  """Returns the kind of failure that an HTTP status other than 200 is."""
  if code == 429:
    return "rate_limit"
  if code >= 500 or code in (408, 409, 425):
    return "server"
  return "access" if code < 400 or code in _ACCESS else "rejected"


def retry_after(header: str, now: float) -> float:
  """Seconds that a Retry-After header asks for: a number or a date; else 0."""
  try:
    seconds = float(header)
  except ValueError:
    try:
      date = email.utils.parsedate_to_datetime(header)
    except ValueError:
      return 0.0
    seconds = date.timestamp() - now
  return max(0.0, seconds) if math.isfinite(seconds) else 0.0


def check_url(url: str, what: str) -> str:
  """Returns a server's address without a slash at its end.

  Args:
    url: http or https.
    what: whose it is, for the message.

  Raises:
    ValueError: it is none, or holds what must not be written down.
  """
  parts = urllib.parse.urlsplit(url)
  if parts.username or parts.password or parts.query:
    raise ValueError(
      f"{what} holds a user, a password or a query, and would be written down. "
      "Put the key into an environment variable."
    )
  if parts.scheme not in ("http", "https") or not parts.hostname:
    raise ValueError(
      f"{what} {url!r} is no http:// or https:// URL, such as "
      "http://localhost:8000/v1."
    )
  return url.rstrip("/")


def read_key(name: str, what: str) -> str:
  """Returns the key that the environment variable `name` holds.

  Raises:
    ValueError: it is not set, or empty.
  """
  key = os.environ.get(name, "").strip()
  if not key:
    raise ValueError(
      f"{what} is to be in the environment variable {name or '(none named)'}, "
      f"which is not set. Set it (export {name or 'NAME'}=...), or name no "
      "variable if the endpoint needs no key."
    )
  return key


# --- answers on disk -------------------------------------------------------


def open_cache(folder: str | Path, what: str) -> diskcache.Cache:
  """Opens a folder of answers. They are JSON, and none is ever thrown out.

  Raises:
    ValueError: it is damaged.
  """
  try:
    return diskcache.Cache(
      str(folder), disk=diskcache.JSONDisk, eviction_policy="none"
    )
  except sqlite3.DatabaseError as error:
    raise ValueError(
      f"{what} {folder} cannot be opened ({error}). Remove it, or name another "
      "folder."
    ) from error


@contextlib.contextmanager
def disk(cache: diskcache.Cache) -> Iterator[None]:
  """Makes an error of a cache's database one of the disk."""
  try:
    yield
  except sqlite3.Error as error:
    raise OSError(errno.EIO, str(error), cache.directory) from error


# --- counts and a budget ---------------------------------------------------


class Ledger:
  """Counts what calls use, and refuses what could pass the budget.

  Before a try its upper bound is set aside, so the sum of what is charged
  never passes a limit; with n calls at once the last ones may be refused up
  to n upper bounds early.

  Args:
    limits: by the name of what is used, such as "cost"; None is no limit.
    counts: names that `drain` always returns.
    what: whose budget it is, for messages.
    path: a JSON file that holds what was used, so that a budget is one of a
      run and not of a process; "" keeps nothing.
    within: another ledger, whose limits this one's use counts against too,
      where both have a limit's name.

  Raises:
    ValueError: the file is damaged.
  """

  def __init__(
    self,
    limits: Mapping[str, float | None],
    counts: Sequence[str],
    what: str,
    path: str | Path = "",
    within: Ledger | None = None,
  ):
    self.limits = dict(limits)
    self._within = within
    self.refused = False  # a call, for the budget
    self._counts, self._what = tuple(counts), what
    self._path = Path(path) if path else None
    self._lock = threading.Lock()
    self._held: Counter[str] = Counter()
    self._since: Counter[str] = Counter()
    self._spent: dict[str, float] = dict.fromkeys(limits, 0)
    if self._path and self._path.exists():
      self._spent |= _read_spent(self._path, what)

  @property
  def spent(self) -> dict[str, float]:
    """What was used of each limit's kind, by the run so far."""
    return dict(self._spent)

  def count(self, name: str, times: float = 1) -> None:
    """Counts something."""
    with self._lock:
      self._since[name] += times

  def reserve(self, most: Mapping[str, float]) -> bool:
    """Sets the upper bound of a try aside; False if it could pass a limit."""
    with self._lock:
      for name, more in most.items():
        limit, spent = self.limits.get(name), self._spent.get(name, 0)
        if limit is not None and spent + self._held[name] + more > limit:
          self.refused = True
          return False
      self._held.update(most)
    if self._within is None or self._within.reserve(self._shared(most)):
      return True
    with self._lock:
      self._held.subtract(most)
    return False

  def _shared(self, amounts: Mapping[str, float]) -> dict[str, float]:
    names = self._within.limits.keys() if self._within else ()
    return {name: n for name, n in amounts.items() if name in names}

  def settle(
    self, most: Mapping[str, float], used: Mapping[str, float] | None
  ) -> None:
    """Frees what was set aside and charges what was used; None is nothing."""
    if self._within is not None:
      self._within.settle(self._shared(most), used and self._shared(used))
    with self._lock:
      self._held.subtract(most)
      if not used:
        return
      for name, value in used.items():
        self._spent[name] = self._spent.get(name, 0) + value
      if self._path:
        # Renamed into place: a kill at any time leaves a whole file.
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_name(self._path.name + ".tmp")
        beside.write_bytes(metrics.line(self._spent))
        os.replace(beside, self._path)

  def share(
    self,
    limits: Mapping[str, float | None],
    spent: Sequence[Mapping[str, float]],
  ) -> None:
    """Takes an equal part of what several ledgers may still use together.

    Args:
      limits: of all of them.
      spent: by each of them so far, this one included.
    """
    for name, limit in limits.items():
      if limit is not None and len(spent) > 1:
        left = max(0, limit - sum(one[name] for one in spent))
        limit = self._spent[name] + left / len(spent)
      self.limits[name] = limit

  def drain(self, path: str) -> dict[str, float]:
    """Returns what was counted since the last drain."""
    with self._lock:
      since, self._since = self._since, Counter()
    return {f"{path}/{name}": float(since[name]) for name in self._counts}

  def exceeded(self) -> str:
    """Says that a call was refused for the budget; "" if none was."""
    if not self.refused:
      return self._within.exceeded() if self._within else ""
    said = ", ".join(
      f"{self._spent.get(name, 0):,.6g} of {limit:,.6g} {name}"
      for name, limit in self.limits.items()
      if limit is not None
    )
    return (
      f"The {self._what}'s budget is used up ({said}; the next call could pass "
      "it). Raise it and give the same command again: what was answered is "
      "kept."
    )

  def check(self) -> None:
    """Raises `types.Stopped` if a call was refused for the budget."""
    if said := self.exceeded():
      raise Stopped(said)


def _read_spent(path: Path, what: str) -> dict[str, float]:
  try:
    spent = json.loads(path.read_text("utf-8"))
    return {str(name): float(value) for name, value in spent.items()}
  except (ValueError, AttributeError, TypeError) as error:
    raise ValueError(
      f"{path} does not hold what a {what} has spent ({error}). Remove it to "
      "begin the budget anew."
    ) from error
