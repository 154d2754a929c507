"""Makes any engine worse, by key: how much does a policy lean on its search?"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from sesa_jax.search import base
from sesa_jax.types import Passage, SearchEngine, SearchFailure

# What is searched for in the place of a query, for passages beside the point.
TOPICS = (
  "alpine glacier", "baroque organ", "bridge engineering", "chess opening",
  "coral reef", "cotton trade", "desert caravan", "fermented milk",
  "harbour crane", "honey bee", "iron furnace", "lunar calendar",
  "medieval guild", "mountain railway", "naval signal", "opera house",
  "paper mill", "polar expedition", "postal stamp", "rice terrace",
  "river dam", "rowing race", "salt mine", "silk weaving", "solar eclipse",
  "stained glass", "steam locomotive", "tax reform", "theatre mask",
  "tropical fever", "volcanic island", "wooden ship",
)  # fmt: skip


class Degraded:
  """An engine that is worse in four ways; a `types.SearchEngine`.

  What happens to a query depends on the seed and the query alone: the same
  query is degraded alike whenever, and by whomever, it is asked.

  Args:
    engine: what is asked.
    seed: of the run.
    drop: share of passages that are left out.
    distract: share of passages in whose place one stands that was found for
      a topic of `TOPICS`.
    shuffle: share of queries whose passages come in any order.
    delay: seconds that a query is held back at most; half of it on average.
    sleep: holds back, for tests.

  Raises:
    ValueError: a share or the delay is out of range.
  """

  def __init__(
    self,
    engine: SearchEngine,
    *,
    seed: int,
    drop: float = 0.0,
    distract: float = 0.0,
    shuffle: float = 0.0,
    delay: float = 0.0,
    sleep: Callable[[float], None] = time.sleep,
  ):
    shares = {"drop": drop, "distract": distract, "shuffle": shuffle}
    for name, share in shares.items():
      if not 0 <= share <= 1:
        raise ValueError(
          f"search.degrade.{name} = {share}: a share is from 0 to 1."
        )
    if delay < 0:
      raise ValueError(f"search.degrade.delay = {delay}: seconds, at least 0.")
    self._engine, self._seed = engine, seed
    self._drop, self._distract, self._shuffle = drop, distract, shuffle
    self._delay, self._sleep = delay, sleep

  def search(self, queries: Sequence[str], k: int) -> list[base.Found]:
    """See `types.SearchEngine`; a failure stays one."""
    draws = [self._generator(query) for query in queries]
    if self._delay:
      self._sleep(max(draw.random() * self._delay for draw in draws))
    topics = [TOPICS[draw.integers(len(TOPICS))] for draw in draws]
    # In one call: an engine that joins queries needs no second round.
    others = topics if self._distract else []
    found = self._engine.search([*queries, *others], k)
    asked, beside = found[: len(queries)], found[len(queries) :]
    return [
      self._worse(draw, passages, beside[i] if beside else ())
      for i, (draw, passages) in enumerate(zip(draws, asked, strict=True))
    ]

  def _generator(self, query: str) -> np.random.Generator:
    code = query.encode("utf-8", "surrogatepass")
    return np.random.default_rng([self._seed, *code])

  def _worse(
    self, draw: np.random.Generator, found: base.Found, beside: base.Found
  ) -> base.Found:
    if isinstance(found, SearchFailure):
      return found
    if isinstance(beside, SearchFailure):
      return beside
    passages: list[Passage] = list(found)
    for place in range(len(passages)):
      if draw.random() < self._distract and place < len(beside):
        passages[place] = beside[place]
    keep = draw.random(len(passages)) >= self._drop
    passages = [p for p, kept in zip(passages, keep, strict=True) if kept]
    if draw.random() < self._shuffle:
      passages = [passages[i] for i in draw.permutation(len(passages))]
    return tuple(passages)
