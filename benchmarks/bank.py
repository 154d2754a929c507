"""Skill retrieval: the exact index and ScaNN beside FAISS, on real text.

    python -m benchmarks.bank --sizes=800,100000

Vectors are MiniLM's embeddings of pieces of at most ten words of the corpus
asset's Wikipedia leads, queries those of questions of Natural Questions. The
embeddings are made once (100,000 take half an hour on two cores) and kept in
the assets folder. What is printed: recall@3 against the exact index, the
seconds that 256 queries take (the median of some runs, one side after another
in each), and the seconds that building the index took.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging
from jaxtyping import Float, Int
from rich.console import Console
from rich.table import Table

from benchmarks.sides import Process, Side, SideError, folder, set_up
from sesa_jax import config as config_lib
from sesa_jax.data import benchmarks, corpus
from sesa_jax.retrieval import encoder, index
from sesa_jax.types import Encoder

ENCODER = "assets:all-minilm-l6-v2"
CORPUS = "assets:wikipedia-leads/summaries_en-us.json"
QUESTIONS = "assets:open-qa/topics.nq.test.txt"
PIECE_WORDS = 8  # a short rest joins the piece before
PINS = ("faiss-cpu==1.15.1", "numpy==2.4.6")
K = 3
CHUNK = 4096  # texts embedded between two files of the cache


def pieces(count: int) -> list[str]:
  """Returns distinct pieces of the corpus, drawn by seed.

  Raises:
    ValueError: the corpus has fewer.
  """
  passages = corpus.load(config_lib.locate(CORPUS), passage_words=PIECE_WORDS)
  found = list(dict.fromkeys(passage.text for passage in passages))
  if count > len(found):
    raise ValueError(f"--sizes: {count}, but there are {len(found)} texts.")
  order = np.random.default_rng(0).permutation(len(found))[:count]
  return [found[i] for i in order]


def questions(count: int) -> list[str]:
  """Returns questions that people asked, drawn by seed."""
  path = config_lib.locate(QUESTIONS)
  found = [q.text for q in benchmarks.load_questions(path, source="nq")]
  order = np.random.default_rng(0).permutation(len(found))[:count]
  return [found[i] for i in order]


def embedded(
  texts: Sequence[str], kind: str, embedder: Callable[[], Encoder]
) -> Float[np.ndarray, "n E"]:
  """Embeds texts in chunks, each kept as a file under a hash of its texts.

  Args:
    texts: n strings.
    kind: "query" or "passage".
    embedder: makes the encoder, if a chunk is new.
  """
  place = folder() / "bank"
  place.mkdir(parents=True, exist_ok=True)
  made: list[Encoder] = []
  out = []
  for start in range(0, len(texts), CHUNK):
    chunk = texts[start : start + CHUNK]
    name = hashlib.sha256("\0".join([ENCODER, kind, *chunk]).encode())
    path = place / f"{name.hexdigest()[:32]}.npy"
    if not path.is_file():
      made = made or [embedder()]
      vectors = made[0].encode(chunk, kind)
      beside = path.with_suffix(".tmp.npy")
      np.save(beside, vectors)
      beside.replace(path)
      logging.info("%d of %d embedded", start + len(chunk), len(texts))
    out.append(np.load(path))
  return np.concatenate(out)


def load_encoder() -> Encoder:
  """Reads MiniLM; no prefixes."""
  return encoder.load(
    config_lib.locate(ENCODER), query_prefix="", passage_prefix=""
  )


# --- the comparison --------------------------------------------------------


def recall(
  found: Int[np.ndarray, "Q k"], exact: Int[np.ndarray, "Q k"]
) -> float:
  """Share of the exact neighbours that were found."""
  return float((found[:, :, None] == exact[:, None]).any(1).mean())


def ours(
  kind: str,
  vectors: Float[np.ndarray, "S E"],
  queries: Float[np.ndarray, "Q E"],
) -> tuple[Callable[[], dict[str, Any]], float]:
  """Builds one of our indexes: a timed search, and the seconds of building."""
  everything = np.ones(len(vectors), bool)
  with tempfile.TemporaryDirectory() as place:
    began, tree = time.perf_counter(), ""
    if kind == "scann" and len(vectors) >= index.TREE_FROM:
      tree = f"{place}/scann"
      index.grow(vectors, tree)
    built = index.build(vectors, everything, kind, tree)
    seconds = time.perf_counter() - began

  def search() -> dict[str, Any]:
    began = time.perf_counter()
    _, rows = built.search(queries, K)
    return dict(seconds=time.perf_counter() - began, rows=rows)

  search()  # compiles
  return search, seconds


def compare(
  vectors: Float[np.ndarray, "S E"],
  queries: Float[np.ndarray, "Q E"],
  runs: int,
  python: str | None,
) -> list[dict[str, Any]]:
  """Times every side on the same vectors, in turns.

  Args:
    vectors: to find.
    queries: to find them by.
    runs: of each side.
    python: of the environment that has FAISS, if it is to take part.

  Returns:
    A row a side.
  """
  searches, built = {}, {}
  for kind in ("exact", "scann"):
    searches[kind], built[kind] = ours(kind, vectors, queries)
  with contextlib.ExitStack() as stack:
    if python:
      place = stack.enter_context(tempfile.TemporaryDirectory())
      paths = {name: f"{place}/{name}.npy" for name in ("vectors", "queries")}
      np.save(paths["vectors"], vectors)
      np.save(paths["queries"], queries)
      peer = stack.enter_context(
        Process(
          Side(
            "faiss", "benchmarks.peers.faiss_bank", {**paths, "k": K}, python
          )
        )
      )
      for name in ("flat", "ivf"):
        searches[f"faiss {name}"] = functools.partial(
          peer.ask, "search", name=name
        )
        built[f"faiss {name}"] = peer.about["built"][name]
    seconds: dict[str, list[float]] = {name: [] for name in searches}
    rows: dict[str, np.ndarray] = {}
    for _ in range(runs):
      for name, search in searches.items():
        answer = search()
        seconds[name].append(answer["seconds"])
        rows[name] = np.asarray(answer["rows"])
  return [
    dict(
      size=len(vectors),
      index=name,
      recall=recall(rows[name], rows["exact"]),
      seconds=statistics.median(seconds[name]),
      fastest=min(seconds[name]),
      built=built[name],
    )
    for name in searches
  ]


def table(rows: Sequence[dict[str, Any]]) -> Table:
  """Lays out what `compare` returns."""
  out = Table(title=f"256 queries, k = {K}")
  for name in ("vectors", "index", "recall@3", "ms", "fastest ms", "built s"):
    out.add_column(name, justify="left" if name == "index" else "right")
  for row in rows:
    out.add_row(
      f"{row['size']:,}",
      row["index"],
      f"{row['recall']:.4f}",
      f"{row['seconds'] * 1e3:.2f}",
      f"{row['fastest'] * 1e3:.2f}",
      f"{row['built']:.3f}",
    )
  return out


def main(arguments: Sequence[str] | None = None) -> int:
  """Prints the comparison at each size."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--sizes", default="800,100000")
  parser.add_argument("--runs", type=int, default=7)
  parser.add_argument("--no_faiss", action="store_true")
  parser.add_argument("--json", help="write the rows here, too")
  args = parser.parse_args(arguments)
  sizes = [int(size) for size in args.sizes.split(",")]
  logging.set_verbosity("info")
  try:
    queries = embedded(questions(256), "query", load_encoder)
    vectors = embedded(pieces(max(sizes)), "passage", load_encoder)
    python = None if args.no_faiss else set_up("faiss", PINS)
    rows = []
    for size in sizes:
      rows += compare(vectors[:size], queries, args.runs, python)
  except (SideError, ValueError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  Console().print(table(rows))
  if args.json:
    Path(args.json).write_text(json.dumps(rows, indent=2) + "\n")
  return 0


if __name__ == "__main__":
  sys.exit(main())
