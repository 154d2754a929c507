"""What calls of a model use: tokens, money, failures by kind, and a budget."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from sesa_jax import remote

# How a call can fail; `chat.Failure`. The last four are of this call: it would
# end so again.
KINDS = (*remote.OUTAGES, "rejected", "refusal", "length", "malformed")

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


class Ledger(remote.Ledger):
  """Tokens and money of a model's calls; see `remote.Ledger`.

  Tries that bring no reply are not charged.

  Args:
    price: of the model; None counts no money.
    max_tokens: prompt and completion together; None is no limit.
    max_cost: in the price's currency; None is no limit.
    path: a JSON file that holds what was spent; "" keeps nothing.
    within: the run's ledger, whose limit of cost holds as well.

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
    within: remote.Ledger | None = None,
  ):
    if max_cost is not None and price is None:
      raise ValueError(
        f"A judge's budget of {max_cost:g} needs the model's price a million "
        "tokens. Give the price, or a budget of tokens."
      )
    names = [*COUNTS, *(f"failures/{kind}" for kind in KINDS)]
    limits = {"tokens": max_tokens, "cost": max_cost}
    super().__init__(limits, names, "judge", path, within)
    self.price = price

  def reserve(self, most: Usage) -> bool:
    """Sets the upper bound of a try aside; False if it could pass a limit."""
    return super().reserve(self._amounts(most))

  def settle(self, most: Usage, used: Usage | None) -> None:
    """Frees what was set aside and charges what was used; None is nothing."""
    if used is not None:
      self.count("prompt_tokens", used.prompt)
      self.count("completion_tokens", used.completion)
      self.count("cost", used.cost(self.price))
    super().settle(self._amounts(most), used and self._amounts(used))

  def drain(self, path: str = "judge") -> dict[str, float]:
    """Returns what was counted since the last drain, and the run's sums."""
    spent = {f"{path}/spent/{k}": float(v) for k, v in self.spent.items()}
    return super().drain(path) | spent

  def _amounts(self, usage: Usage) -> dict[str, float]:
    tokens = usage.prompt + usage.completion
    return {"tokens": tokens, "cost": usage.cost(self.price)}
