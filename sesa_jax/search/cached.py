"""Answers kept on disk, so that a query is paid, and computed, once."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from sesa_jax import remote
from sesa_jax.search import base
from sesa_jax.types import Passage, SearchEngine, SearchFailure


class Cached:
  """Keeps what an engine finds in SQLite, by diskcache.

  A query's key is a hash of what the engine is, the query and k. Failures are
  not kept. Nothing is thrown out. The folder must be on a local disk; several
  processes of a machine may share it.

  Args:
    engine: what is asked; None plays a run again from the folder alone, and
      every query that is not kept is lost.
    folder: of the answers.
    identity: what the engine is: other text, other answers.
    ledger: counts hits and misses.

  Raises:
    ValueError: the folder's database is damaged.
  """

  def __init__(
    self,
    engine: SearchEngine | None,
    folder: str | Path,
    identity: str,
    ledger: remote.Ledger,
  ):
    self._engine, self._identity, self._ledger = engine, identity, ledger
    self._cache = remote.open_cache(folder, "The search's cache")

  def search(self, queries: Sequence[str], k: int) -> list[base.Found]:
    """See `types.SearchEngine`; equal queries of a call are one."""
    base.check_k(k)
    keys = {query: self._key(query, k) for query in queries}
    found: dict[str, base.Found] = {}
    with remote.disk(self._cache):
      for query, key in keys.items():
        rows = self._cache.get(key, retry=True)
        if rows is not None:
          found[query] = tuple(Passage(**row) for row in rows)
    missed = [query for query in keys if query not in found]
    self._ledger.count("cache_hits", len(queries) - len(missed))
    self._ledger.count("cache_misses", len(missed))
    answers = self._ask(missed, k)
    for query, answer in zip(missed, answers, strict=True):
      found[query] = answer
      if not isinstance(answer, SearchFailure):
        rows = [dataclasses.asdict(passage) for passage in answer]
        with remote.disk(self._cache):
          self._cache.set(keys[query], rows, retry=True)
    return [found[query] for query in queries]

  def _ask(self, queries: list[str], k: int) -> list[base.Found]:
    if self._engine is not None:
      return self._engine.search(queries, k) if queries else []
    self._ledger.count("failures/not_kept", len(queries))
    lost = SearchFailure(
      "not_kept: search.replay_only asks no engine, and the cache does not "
      "hold the query",
      "not_kept",
    )
    return [lost] * len(queries)

  def _key(self, query: str, k: int) -> str:
    text = json.dumps([self._identity, query, k])
    return hashlib.sha256(text.encode()).hexdigest()
