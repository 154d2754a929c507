"""BM25 on disk: what an index takes to build, to hold and to search.

    python -m benchmarks.bm25 --passages=50000,200000

A passage is the words of two pieces of the corpus asset's Wikipedia leads in
any order, about a hundred; every second one holds a word that no other has, so
that the vocabulary grows as it does with real text. Questions of Natural
Questions are searched for, three passages each, one after another. The index is
built as `--mode=index` does, and opened by another process. Of memory two kinds
are told apart: what a process holds, and pages of files that are mapped into
it, which the system takes back when it needs room.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.bank import questions
from configs import common
from sesa_jax import config as config_lib
from sesa_jax.data import corpus
from sesa_jax.search import engines

CORPUS = "assets:wikipedia-leads/summaries_en-us.json"
PIECE_WORDS = 50
QUERIES = 256
K = 3


def write_corpus(path: Path, count: int) -> None:
  """Writes `count` passages as Search-R1's JSONL, drawn by seed."""
  pieces = [
    passage.text.split()
    for passage in corpus.stream(
      [config_lib.locate(CORPUS)], passage_words=PIECE_WORDS
    )
  ]
  rng = np.random.default_rng(0)
  with path.open("w") as file:
    for number in range(count):
      one, other = rng.integers(len(pieces), size=2)
      words = [*pieces[one], *pieces[other]]
      text = " ".join(words[i] for i in rng.permutation(len(words)))
      if number % 2:
        text += f" w{number:x}"
      row = {"id": str(number), "contents": f'"{words[0]} {words[1]}"\n{text}'}
      file.write(json.dumps(row) + "\n")


# --- memory ----------------------------------------------------------------


def held() -> dict[str, int]:
  """Returns this process's resident kB, its own and of mapped files."""
  text = Path("/proc/self/status").read_text()
  rows = dict(line.split(":", 1) for line in text.splitlines())
  return {
    "own": int(rows["RssAnon"].split()[0]),
    "mapped": int(rows["RssFile"].split()[0]),
  }


@contextlib.contextmanager
def peak() -> Iterator[dict[str, float]]:
  """Fills a dict with the most MB above those at the start, and seconds."""
  start, most, over = held(), {"own": 0, "mapped": 0}, threading.Event()

  def look() -> None:
    now = held()
    for name in most:
      most[name] = max(most[name], now[name] - start[name])

  def watch() -> None:
    while not over.wait(0.02):
      look()

  found: dict[str, float] = {}
  thread = threading.Thread(target=watch)
  began = time.perf_counter()
  thread.start()
  try:
    yield found
  finally:
    over.set()
    thread.join()
    look()
    found |= {name: kilobytes / 1e3 for name, kilobytes in most.items()}
    found["seconds"] = time.perf_counter() - began


# --- a stage, in a process of its own ---------------------------------------


def spec(folder: Path) -> dict[str, Any]:
  """The values of `search` for an index in a folder."""
  found = common.get_config().search.to_dict()
  return found | {"engine": "bm25", "index": str(folder / "index")}


def build(folder: Path) -> dict[str, float]:
  """Builds the index; returns memory, seconds and the MB of its files."""
  with peak() as found:
    engines.build(spec(folder), [str(folder / "corpus.jsonl")], None)
  files = (folder / "index").iterdir()
  found["files"] = sum(path.stat().st_size for path in files) / 1e6
  return found


def search(folder: Path) -> dict[str, float]:
  """Opens the index and searches it; returns memory and queries a second."""
  asked = questions(QUERIES)
  with peak() as found:
    library = engines.open_search(spec(folder), [], None, seed=0, budget={})
  found["open_own"] = found.pop("own")
  with peak() as searched:
    for query in asked:
      library.engine.search([query], K)
  found |= {name: searched[name] for name in ("own", "mapped")}
  found["per_second"] = len(asked) / searched["seconds"]
  return found


STAGES = {"build": build, "search": search}


def measure(count: int) -> dict[str, Any]:
  """Runs both stages on `count` passages."""
  with tempfile.TemporaryDirectory() as place:
    write_corpus(Path(place) / "corpus.jsonl", count)
    found = {"passages": count}
    for stage in STAGES:
      done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bm25", f"--stage={stage}", place],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
      )
      found[stage] = json.loads(done.stdout)
  return found


def table(rows: Sequence[dict[str, Any]]) -> Table:
  """Lays out what `measure` returns: MB, but for what says otherwise."""
  out = Table(title=f"BM25 on disk, MB; {QUERIES} queries, k = {K}")
  for name in (
    "passages", "build s", "own", "mapped", "files",
    "opened", "searched", "mapped", "queries/s",
  ):  # fmt: skip
    out.add_column(name, justify="right", no_wrap=True)
  for row in rows:
    built, searched = row["build"], row["search"]
    out.add_row(
      f"{row['passages']:,}",
      f"{built['seconds']:.0f}",
      *(f"{built[name]:.0f}" for name in ("own", "mapped", "files")),
      *(f"{searched[name]:.1f}" for name in ("open_own", "own", "mapped")),
      f"{searched['per_second']:.0f}",
    )
  return out


def main(arguments: Sequence[str] | None = None) -> int:
  """Prints the figures of each size."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--passages", default="50000,200000")
  parser.add_argument("--json", help="write the rows here, too")
  parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
  parser.add_argument("folder", nargs="?", help=argparse.SUPPRESS)
  args = parser.parse_args(arguments)
  if args.stage:
    print(json.dumps(STAGES[args.stage](Path(args.folder))))
    return 0
  try:
    rows = [measure(int(size)) for size in args.passages.split(",")]
  except ValueError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  Console().print(table(rows))
  if args.json:
    Path(args.json).write_text(json.dumps(rows, indent=2) + "\n")
  return 0


if __name__ == "__main__":
  sys.exit(main())
