"""Which admission threshold an encoder needs: `encoder.threshold`.

    python -m benchmarks.admission --encoder=assets:all-minilm-l6-v2

Pairs of texts by which skills are found, description and trigger, some of them
restatements of one skill, the others of two related ones. A threshold errs on a
restatement whose cosine is at most that, which the bank would admit, and on two
skills whose cosine is above it, of which it would reject one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from sesa_jax import config as config_lib
from sesa_jax.retrieval import encoder
from sesa_jax.types import Encoder

FILES = ("tests/restatements.jsonl", "tests/restatements_heldout.jsonl")
STEP = 0.005  # 60 pairs say no more about a threshold


def cosines(
  path: str | Path, embedder: Encoder
) -> tuple[Float[np.ndarray, " r"], Float[np.ndarray, " d"]]:
  """Embeds the pairs of a file as a bank does.

  Args:
    path: JSONL, `{"same": bool, "first": str, "second": str}` a line.
    embedder: of the bank.

  Returns:
    The cosines of r restatements and of d pairs of different skills.
  """
  rows = [json.loads(s) for s in Path(path).read_text("utf-8").splitlines()]
  first, second = (
    embedder.encode([row[key] for row in rows], "passage")
    for key in ("first", "second")
  )
  found = (first * second).sum(1)
  same = np.array([row["same"] for row in rows], bool)
  return found[same], found[~same]


def errors(
  same: Float[np.ndarray, " r"],
  different: Float[np.ndarray, " d"],
  threshold: float,
) -> tuple[float, float]:
  """Shares of restatements admitted and of different skills rejected.

  As in `bank.admit`, a cosine equal to the threshold is admitted.
  """
  limit = np.float32(threshold)
  return float((same <= limit).mean()), float((different > limit).mean())


def best_threshold(
  same: Float[np.ndarray, " r"], different: Float[np.ndarray, " d"]
) -> float:
  """The multiple of STEP with the lowest sum of both shares of errors.

  Of several equals the middle one.
  """
  grid = np.round(np.arange(0, 1 + STEP / 2, STEP), 3)
  sums = np.array([sum(errors(same, different, t)) for t in grid])
  best = grid[np.isclose(sums, sums.min())]
  return float(best[len(best) // 2])


def spread(
  same: Float[np.ndarray, " r"], different: Float[np.ndarray, " d"]
) -> tuple[float, float]:
  """The 5th and 95th percentile of the best threshold, pairs resampled."""
  rng = np.random.default_rng(0)
  found = [
    best_threshold(*(rng.choice(x, len(x)) for x in (same, different)))
    for _ in range(1000)
  ]
  low, high = np.percentile(found, (5, 95))
  return float(low), float(high)


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints distributions, the best threshold and its errors."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--encoder", required=True, help="folder, assets:NAME")
  parser.add_argument("--passage_prefix", default="", help="'passage: ' for E5")
  parser.add_argument("--pairs", nargs="+", default=FILES)
  args = parser.parse_args(arguments)
  embedder = encoder.load(
    config_lib.locate(args.encoder),
    query_prefix="",
    passage_prefix=args.passage_prefix,
  )
  sets = {path: cosines(path, embedder) for path in args.pairs}
  calibration = next(iter(sets.values()))
  best = best_threshold(*calibration)
  for path, pair in sets.items():
    print(path)
    for name, x in zip(("restatements", "different"), pair, strict=True):
      quartiles = " ".join(
        f"{q:.2f}" for q in np.percentile(x, range(0, 101, 25))
      )
      print(f"  {len(x)} {name}: mean {x.mean():.3f}, quartiles {quartiles}")
    for threshold in sorted({best, 0.5, 0.6, 0.65, 0.7, 0.75, 0.93}):
      admitted, rejected = errors(*pair, threshold)
      print(
        f"  {threshold:.3f}  restatements admitted {admitted:.3f}  "
        f"different rejected {rejected:.3f}"
      )
  low, high = spread(*calibration)
  print(f"best on the first: {best:.3f}, by resampling {low:.3f} to {high:.3f}")


if __name__ == "__main__":
  main()
