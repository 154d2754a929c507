"""What calls of a model use: tokens, money, failures by kind, and a budget."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from sesa_jax import metrics
from sesa_jax.types import Stopped

# How a call can fail; `chat.Failure`.
TRANSIENT = ("timeout", "rate_limit", "server", "connection", "body")
# The endpoint's fault, or ours: the same call may be answered another day.
OUTAGES = (*TRANSIENT, "access", "budget", "skipped")
# Of this call: it would end so again.
KINDS = (*OUTAGES, "rejected", "refusal", "length", "malformed")

COUNTS = (
  "calls",
  "cache_hits",
  "retries",
  "repairs",
  "unmetered",  # replies that tell no usage; charged at their upper bound
  "prompt_tokens",
  "completion_tokens",
  "cost",
)


class Price(NamedTuple):
  """What a million tokens cost, in any one currency."""

  prompt: float
  completion: float
  cached_prompt: float | None = None  # of the provider's cache; None: as prompt


class Usage(NamedTuple):
  """Tokens of a reply."""

  prompt: int
  completion: int
  cached_prompt: int = 0  # part of prompt

  def cost(self, price: Price | None) -> float:
    """Returns what they cost; 0 where the price is unknown."""
    if price is None:
      return 0.0
    cached = price.cached_prompt
    cached = price.prompt if cached is None else cached
    fresh = self.prompt - self.cached_prompt
    millions = (
      fresh * price.prompt
      + self.cached_prompt * cached
      + self.completion * price.completion
    )
    return millions / 1e6


class Ledger:
  """Counts what calls use, and refuses what could pass the budget.

  Before a try its upper bound is set aside, so the sum of what replies report
  never passes the budget; with n calls at once the last ones may be refused up
  to n upper bounds early. Tries that bring no reply are not charged.

  Args:
    price: of the model; None counts no money.
    max_tokens: prompt and completion together; None is no limit.
    max_cost: in the price's currency; None is no limit.
    path: a JSON file that holds what was spent, so that a budget is one of a
      run and not of a process; "" keeps nothing.

  Raises:
    ValueError: a limit of cost without a price, or the file is damaged.
  """

  def __init__(
    self,
    price: Price | None = None,
    *,
    max_tokens: int | None = None,
    max_cost: float | None = None,
    path: str | Path = "",
  ):
    if max_cost is not None and price is None:
      raise ValueError(
        f"A judge's budget of {max_cost:g} needs the model's price a million "
        "tokens. Give the price, or a budget of tokens."
      )
    self.price, self.max_tokens, self.max_cost = price, max_tokens, max_cost
    self.refused = False  # a call, for the budget
    self._path = Path(path) if path else None
    self._lock = threading.Lock()
    self._held: Counter[str] = Counter()
    self._since: Counter[str] = Counter()
    self._spent = {"tokens": 0, "cost": 0.0}
    if self._path and self._path.exists():
      self._spent = _read_spent(self._path)

  @property
  def spent(self) -> Mapping[str, float]:
    """`tokens` and `cost` of the run so far."""
    return dict(self._spent)

  def count(self, name: str, times: float = 1) -> None:
    """Counts something; see `COUNTS` and, for failures, `KINDS`."""
    with self._lock:
      self._since[name] += times

  def reserve(self, most: Usage) -> bool:
    """Sets the upper bound of a try aside; False if it could pass a limit."""
    tokens, cost = most.prompt + most.completion, most.cost(self.price)
    with self._lock:
      for name, limit, more in (
        ("tokens", self.max_tokens, tokens),
        ("cost", self.max_cost, cost),
      ):
        if limit is not None and (
          self._spent[name] + self._held[name] + more > limit
        ):
          self.refused = True
          return False
      self._held.update(tokens=tokens, cost=cost)
    return True

  def settle(self, most: Usage, used: Usage | None) -> None:
    """Frees what was set aside and charges what was used; None is nothing."""
    with self._lock:
      self._held.subtract(
        dict(tokens=most.prompt + most.completion, cost=most.cost(self.price))
      )
      if used is None:
        return
      cost = used.cost(self.price)
      self._since.update(
        prompt_tokens=used.prompt, completion_tokens=used.completion, cost=cost
      )
      self._spent["tokens"] += used.prompt + used.completion
      self._spent["cost"] += cost
      if self._path:
        # Renamed into place: a kill at any time leaves a whole file.
        beside = self._path.with_name(self._path.name + ".tmp")
        beside.write_bytes(metrics.line(self._spent))
        os.replace(beside, self._path)

  def drain(self, path: str = "judge") -> dict[str, float]:
    """Returns what was counted since the last drain, and the run's sums."""
    with self._lock:
      since, self._since = self._since, Counter()
      names = [*COUNTS, *(f"failures/{kind}" for kind in KINDS)]
      found = {f"{path}/{name}": float(since[name]) for name in names}
      spent = {f"{path}/spent/{k}": float(v) for k, v in self._spent.items()}
    return found | spent

  def exceeded(self) -> str:
    """Says that a call was refused for the budget; "" if none was."""
    if not self.refused:
      return ""
    limits = {"tokens": self.max_tokens, "cost": self.max_cost}
    said = ", ".join(
      f"{self._spent[name]:,.6g} of {limit:,.6g} {name}"
      for name, limit in limits.items()
      if limit is not None
    )
    return (
      f"The judge's budget is used up ({said}; the next call could pass it). "
      "Raise it and give the same command again: what was answered is kept."
    )

  def check(self) -> None:
    """Raises `types.Stopped` if a call was refused for the budget."""
    if said := self.exceeded():
      raise Stopped(said)


def _read_spent(path: Path) -> dict[str, float]:
  try:
    spent = json.loads(path.read_text("utf-8"))
    return {"tokens": int(spent["tokens"]), "cost": float(spent["cost"])}
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(
      f"{path} does not hold what a judge has spent ({error}). Remove it to "
      "begin the budget anew."
    ) from error
