"""Does the method still learn? One short run against recorded bands.

    python -m benchmarks.learn                      # exit code 0: it does
    python -m benchmarks.learn --record=0,1,2,3,4,5,6,7,8,9

A run of the main job on the microworld, from a warm start that is cached, is
measured (accuracy before and after, rewards, valid proposals, entropy, KL,
engine against learner) and each number compared with a band. Bands are
recorded from runs of several seeds in one world, with the flags that a judged
run gets too, so that all numbers of a run as good as those lie inside 9 times
out of 10.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.special
from rich.console import Console
from rich.table import Table

from benchmarks import microworld
from configs import microworld as setting
from sesa_jax import metrics, worlds

BANDS = microworld.ROOT / "benchmarks/learn.json"
FALSE_ALARMS = 0.1  # runs of which some number lies outside, of good ones

# Of the last third of the iterations the mean.
_LAST = {
  "solver/reward/mean": "solver's reward",
  "challenger/valid_rate": "valid proposals",
  "solver/entropy/mean": "solver's entropy",
  "challenger/entropy/mean": "challenger's entropy",
  "solver/kl/mean": "solver's KL",
  "solver/logprob_gap/mean": "engine against learner",
}

# Rounding, of another size on another machine: bounded by ten times the most.
_ROUNDING = "engine against learner"

_BANKS = {"none": "accuracy without skills", "final": "accuracy with skills"}

Measured = Mapping[str, float]


def measure(workdir: Path) -> dict[str, float]:
  """Measures a finished run; what it lacks is left out."""
  folder = metrics.RunFolder(workdir, writes=False)
  found = {}
  for bank, label in _BANKS.items():
    scores: dict[int, list[float]] = {}
    for cell in folder.read_json("eval.json", []):
      if cell["bank"] == bank and cell["em"] is not None:
        scores.setdefault(cell["iteration"], []).append(cell["em"])
    if scores:
      first, last = (np.mean(scores[f(scores)]) for f in (min, max))
      found[f"{label}, after"] = float(last)
      found[f"{label}, gained"] = float(last - first)
  rows = folder.read("metrics.jsonl")
  rows = rows[-math.ceil(len(rows) / 3) :] if rows else []
  for name, label in _LAST.items():
    values = [row[name] for row in rows if row.get(name) is not None]
    if values:
      found[label] = float(np.mean(values))
  return found


def bands(runs: Sequence[Measured]) -> dict[str, tuple[float, float]]:
  """Returns where each number of a further run like these should lie.

    mean +- t s sqrt(1 + 1/n)

  with t the quantile 1 - FALSE_ALARMS / 2m of Student's distribution of n - 1
  degrees: the prediction interval of one more normal value, with Bonferroni's
  correction for m of them. What is rounding alone lies from 0 to ten times the
  largest.

  Args:
    runs: at least three, of different seeds.

  Raises:
    ValueError: fewer runs.
  """
  n = len(runs)
  if n < 3:
    raise ValueError(f"Bands of {n} runs would say nothing: record 3 or more.")
  names = [name for name in runs[0] if all(name in run for run in runs)]
  tail = FALSE_ALARMS / (2 * max(1, len(set(names) - {_ROUNDING})))
  t = float(scipy.special.stdtrit(n - 1, 1 - tail))
  found = {}
  for name in names:
    values = [run[name] for run in runs]
    if name == _ROUNDING:
      found[name] = (0.0, 10 * max(values))
      continue
    half = t * np.std(values, ddof=1) * math.sqrt(1 + 1 / n)
    middle = float(np.mean(values))
    found[name] = (middle - float(half), middle + float(half))
  return found


def outside(
  measured: Measured, known: Mapping[str, tuple[float, float]]
) -> list[str]:
  """Names the numbers that lie outside their bands, or are missing."""
  return [
    name
    for name, (low, high) in known.items()
    if not low <= measured.get(name, math.nan) <= high
  ]


def false_alarms(runs: Sequence[Measured]) -> int:
  """Counts the runs that would fail against bands of all the others."""
  return sum(
    bool(outside(run, bands([*runs[:i], *runs[i + 1 :]])))
    for i, run in enumerate(runs)
  )


def read(path: Path) -> dict[str, Any]:
  """Reads recorded bands.

  Raises:
    ValueError: there are none.
  """
  try:
    found = json.loads(path.read_text("utf-8"))
    return {name: found[name] for name in ("bands", "flags")}
  except (OSError, ValueError, TypeError, KeyError) as error:
    raise ValueError(
      f"{path} holds no bands ({error}): record some with --record=SEEDS."
    ) from error


def pinned(world: int) -> list[str]:
  """Returns flags that keep a run in one world, whatever its own seed."""
  config = setting.get_config()
  config.unlock()
  config.seed = world
  return [
    f"--config.{name}={value}"
    for name, value in _leaves(config.to_dict())
    if worlds.PREFIX in str(value)
  ]


def _leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple]:
  for name, value in tree.items():
    if isinstance(value, Mapping):
      yield from _leaves(value, f"{above}{name}.")
    else:
      yield above + name, value


def table(
  measured: Measured, known: Mapping[str, tuple[float, float]]
) -> Table:
  """Lays the numbers out beside their bands."""
  out = Table("", "measured", "from", "to", "")
  wrong = outside(measured, known)
  for name, (low, high) in known.items():
    value = measured.get(name, math.nan)
    said = "outside" if name in wrong else ""
    out.add_row(name, f"{value:.3g}", f"{low:.3g}", f"{high:.3g}", said)
  return out


def main(
  argv: Sequence[str] | None = None,
  launch: Callable[[Sequence[str]], float] = microworld.launch,
) -> int:
  """Runs and judges, or records; returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--config", default=microworld.CONFIG)
  parser.add_argument("--world", type=int, default=0)
  parser.add_argument("--seed", type=int, default=0, help="of the run")
  parser.add_argument("--workdir", default="runs/learn")
  parser.add_argument("--bands", default=str(BANDS))
  parser.add_argument(
    "--record", type=microworld.numbers, help="seeds to record bands of"
  )
  flags, others = parser.parse_known_args(argv)
  microworld.check_flags(parser, others, flags.world, flags.seed)
  if flags.record and len(flags.record) < 3:
    parser.error("bands of fewer than 3 seeds would say nothing")
  path, console = Path(flags.bands), Console(soft_wrap=True)
  try:
    recorded = {} if flags.record else read(path)
  except ValueError as error:
    console.print(str(error))
    return 2

  top = Path(flags.workdir).absolute()
  words = [f"--config={flags.config}"]
  if microworld.of_a_world(flags.config):
    words += pinned(flags.world)
    warm = top / f"warm-{worlds.digest()}-{flags.world}"
    microworld.warm_start(flags.config, flags.world, warm, launch)

  def run(seed: int, flags: Sequence[str]) -> dict[str, float]:
    workdir = top / str(seed)
    own = [f"--workdir={workdir}", f"--config.seed={seed}"]
    launch([*words, *own, *flags])
    return measure(workdir)

  if flags.record:
    runs = [run(seed, others) for seed in flags.record]
    kept = {"seeds": flags.record, "flags": others}
    kept |= {"runs": runs, "bands": bands(runs)}
    metrics.RunFolder(path.parent).write_json(path.name, kept)
    if len(runs) > 3:
      console.print(f"{false_alarms(runs)} of {len(runs)} runs fail against")
      console.print("bands of the others.")
    return 0
  known = recorded["bands"]
  # A finished run would be resumed, and say what older code has learned.
  shutil.rmtree(top / str(flags.seed), ignore_errors=True)
  measured = run(flags.seed, [*recorded["flags"], *others])
  console.print(table(measured, known))
  wrong = outside(measured, known)
  console.print("FAIL: " + ", ".join(wrong) if wrong else "pass")
  return int(bool(wrong))


if __name__ == "__main__":
  sys.exit(main())
