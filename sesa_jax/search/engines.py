"""From the values of a config to a search engine, its corpus and its ledger."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from sesa_jax import remote
from sesa_jax.data import corpus
from sesa_jax.search import base, bm25, dense, google, http, search_r1, stored
from sesa_jax.search.cached import Cached
from sesa_jax.search.degraded import Degraded
from sesa_jax.types import Encoder, Passage, SearchEngine

LOCAL = ("bm25", "dense")
REMOTE = ("search_r1", "google")
ENGINES = (*LOCAL, *REMOTE)


@dataclasses.dataclass(frozen=True)
class Search:
  """An engine with what belongs to it."""

  engine: SearchEngine | None
  passages: Sequence[Passage]  # that it searches; empty where they are remote
  digest: str  # of the passages, `corpus.digest`
  identity: str  # of all that its answers depend on
  ledger: remote.Ledger


def nothing() -> Search:
  """Returns what those have who never search."""
  return Search(None, (), "", "", base.Ledger())


def open_search(
  spec: Mapping[str, Any],
  paths: Sequence[str],
  encoder: Callable[[], tuple[Encoder, str]],
  *,
  seed: int,
  budget: Mapping[str, Any],
  spent: str | Path = "",
) -> Search:
  """Builds what `search` of a config describes, wrappers and all.

  Args:
    spec: the values of `search`.
    paths: files and folders of the corpus.
    encoder: loads the encoder of `dense`, and returns what identifies it.
    seed: of the run, for `degrade`.
    budget: `searches`, of servers alone, and `cost`.
    spent: the file that holds what was spent; "" keeps nothing.

  Returns:
    the engine; with a server among those named, one has answered.

  Raises:
    ValueError: a value, a file, an index or a key is missing or wrong.
    types.Stopped: no server answers.
  """
  kind, ledger = spec["engine"], base.Ledger(**budget, path=spent)
  if kind not in ENGINES:
    raise ValueError(
      f"Unknown search.engine {kind!r}. Choices: {', '.join(ENGINES)}."
    )
  if spec["replay_only"] and not spec["cache"]:
    raise ValueError(
      "search.replay_only needs search.cache, the folder to play from."
    )
  replays = spec["replay_only"] and kind in REMOTE
  if kind in LOCAL:
    engine, passages, digest, described = _local(spec, paths, encoder)
  else:
    passages = corpus.load(paths) if paths else ()
    digest = corpus.digest(passages)
    engine, described = _remote(spec, ledger, asked=not replays)
  identity = json.dumps(described, sort_keys=True)
  price, per_day = 0.0, None
  if kind == "google":
    price, per_day = spec["google"]["price"], spec["google"]["per_day"]
  if engine is not None:
    charged = kind in REMOTE
    engine = base.Counted(
      engine, ledger, charged=charged, price=price, per_day=per_day
    )
  if spec["cache"]:
    asked = None if spec["replay_only"] else engine
    engine = Cached(asked, spec["cache"], identity, ledger)
  engine = base.Batched(engine, **_batches(spec))
  degrade = dict(spec["degrade"])
  if any(degrade.values()):
    engine = Degraded(engine, seed=seed, **degrade)
    identity += json.dumps(degrade, sort_keys=True)
  return Search(engine, passages, digest, identity, ledger)


def _batches(spec: Mapping[str, Any]) -> dict[str, int]:
  """How many queries go together, and how many calls are made at once."""
  if spec["engine"] == "dense":  # a call uses every core
    return dict(size=spec["batch"], workers=1)
  if spec["engine"] == "bm25":  # which holds a score a passage in each call
    return dict(size=1, workers=min(os.cpu_count() or 1, 8))
  size = spec["batch"] if spec["engine"] == "search_r1" else 1
  return dict(size=size, workers=spec["concurrency"])


def _local(spec, paths, encoder):
  """Opens or makes an index on this machine."""
  wanted = _made_with(spec)
  if spec["engine"] == "bm25" and not spec["index"]:
    if not paths:
      raise ValueError("corpus is empty: name at least one file to search.")
    passages = corpus.load(paths, passage_words=spec["passage_words"])
    engine = bm25.Bm25(passages, k1=spec["k1"], b=spec["b"])
    digest = corpus.digest(passages)
    return engine, passages, digest, wanted | {"corpus": digest}
  if not spec["index"]:
    raise ValueError(
      "search.engine = 'dense' needs search.index, the folder of an index. "
      "Build it with --mode=index and the same config."
    )
  folder = spec["index"]
  if spec["engine"] == "dense":
    embedder, name = encoder()
    wanted |= {"encoder": name}
  meta = stored.open_meta(folder, wanted, paths)
  if spec["engine"] == "dense":
    engine = dense.load(folder, embedder, spec["neighbours"])
  else:
    engine = bm25.load(folder, k1=spec["k1"], b=spec["b"])
  passages, digest = stored.Passages(Path(folder)), meta["corpus"]
  described = wanted | {"corpus": digest}
  if spec["engine"] == "dense":  # ScaNN's answers are not the exact ones
    described["neighbours"] = spec["neighbours"]
  return engine, passages, digest, described


def _made_with(spec: Mapping[str, Any]) -> dict[str, Any]:
  """What an index on disk must have been made with, by name in its meta."""
  kind = spec["engine"]
  made = {"engine": kind, "passage_words": spec["passage_words"]}
  return made | ({"k1": spec["k1"], "b": spec["b"]} if kind == "bm25" else {})


def _remote(spec, ledger, *, asked: bool):
  """Returns a client, and what its answers depend on.

  Nothing is asked where a run is only played again; keys need not be there.
  """
  limits = dict(
    deadline=spec["deadline"],
    try_seconds=spec["try_seconds"],
    tries=spec["tries"],
    patience=spec["patience"],
    ledger=ledger,
  )
  if spec["engine"] == "search_r1":
    urls = [search_r1.address(url) for url in spec["urls"]]
    described = {"engine": "search_r1", "urls": sorted(urls)}
    if not asked:
      return None, described
    engine = search_r1.SearchR1(http.Http(urls, **limits))
    engine.check()
    return engine, described
  given = spec["google"]
  provider = given["provider"]
  if provider not in google.URLS:
    raise ValueError(
      f"Unknown search.google.provider {provider!r}. Choices: "
      f"{', '.join(google.URLS)}."
    )
  if provider == "custom_search" and not given["cx"]:
    raise ValueError(
      "search.google.cx is empty: a Custom Search engine has an id of its own."
    )
  described = {"engine": "google", "provider": provider, "cx": given["cx"]}
  if not asked:
    return None, described
  key = remote.read_key(given["key_env"], "The key of search.google")
  url = given["url"] or google.URLS[provider]
  headers = {"X-API-KEY": key} if provider == "serper" else {}
  client = http.Http([url], headers=headers, secret=key, **limits)
  engine = google.Google(
    provider, client, key=key, cx=given["cx"], per_second=given["per_second"]
  )
  return engine, described


def build(
  spec: Mapping[str, Any],
  paths: Sequence[str],
  encoder: Callable[[], tuple[Encoder, str]],
) -> None:
  """Builds the index that `search` of a config names, once.

  Args:
    spec: the values of `search`; `engine` is one of `LOCAL`.
    paths: files and folders of the corpus.
    encoder: see `open_search`.

  Raises:
    ValueError: a value or a file is missing or wrong, or the folder exists.
  """
  if spec["engine"] not in LOCAL:
    raise ValueError(
      f"search.engine = {spec['engine']!r} has no index of ours. Choices: "
      f"{', '.join(LOCAL)}."
    )
  if not spec["index"] or not paths:
    raise ValueError(
      "--mode=index needs config.search.index, the folder to make, and "
      "config.corpus, what to index."
    )
  meta = _made_with(spec)
  with stored.building(spec["index"]) as folder:
    files = stored.fingerprint(paths)
    found = corpus.stream(paths, passage_words=spec["passage_words"])
    digest = stored.write_passages(folder, found)
    if spec["engine"] == "dense":
      embedder, name = encoder()
      meta |= {"encoder": name}
      dense.build(folder, embedder)
    else:
      bm25.build(folder, k1=spec["k1"], b=spec["b"])
    stored.write_meta(folder, meta | {"corpus": digest, "files": files})
  logging.info("The index lies in %s.", spec["index"])
