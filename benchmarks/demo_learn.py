"""Watches a policy learn: a run whose plots grow, and what became of it.

    python -m benchmarks.demo_learn --workdir=runs/demo_learn

Runs the main job on the microworld and draws its curves anew after each
iteration, in the folder `plots` of the run. At the end three evaluation
questions are shown as the policy played them before and after, side by side,
and two skills with the failures that they came from.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.console
import rich.table

from benchmarks import microworld
from sesa_jax import metrics, plots, show
from sesa_jax.skills import life

EPISODES, SKILLS = 3, 2


def watch(job: subprocess.Popen, workdir: Path, seconds: float) -> int:
  """Draws a run's curves until it ends; returns its exit code."""
  drawn = -1
  while job.poll() is None:
    done = microworld.last_iteration(workdir)
    if done != drawn and plots.plot_run(workdir):
      drawn = done
    time.sleep(seconds)
  plots.plot_run(workdir)
  return job.returncode


def pairs(
  cells: Sequence[Mapping[str, Any]], bank: str
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
  """Episodes of one question before and after, of those that were kept.

  First those that were wrong before and are right after.

  Args:
    cells: of a run's `eval.json`.
    bank: mode of both.
  """
  known: dict[int, dict[str, Mapping[str, Any]]] = {}
  for cell in cells:
    if cell["bank"] == bank:
      kept = [p["episode"] for p in cell["predictions"] if "episode" in p]
      of = known.setdefault(cell["iteration"], {})
      of |= {row["request_id"]: row for row in kept}
  if len(known) < 2:
    return []
  before, after = known[min(known)], known[max(known)]
  found = [(before[id], after[id]) for id in before if id in after]

  def unlike(pair):
    return [row["verdict"] for row in pair] != ["wrong", "right"]

  return sorted(found, key=unlike)


def side_by_side(
  shown: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
) -> rich.table.Table:
  """Lays episodes out, before at the left and after at the right."""
  out = rich.table.Table("before", "after", show_lines=True)
  for before, after in shown:
    out.add_row(show.render([before]), show.render([after]))
  return out


def newest(source: life.Source, count: int) -> list[str]:
  """Ids of the newest skills that were born from a failure of the run."""
  born = [e["skill"] for e in source.history if e["event"] == "admit"]
  return born[-count:]


def tell(workdir: Path, console: Any) -> None:
  """Prints the episodes and the skills of a finished run."""
  folder = metrics.RunFolder(workdir, writes=False)
  cells = folder.read_json("eval.json", [])
  shown = (found for bank in ("final", "none") if (found := pairs(cells, bank)))
  found = next(shown, [])[:EPISODES]
  console.print(side_by_side(found) if found else "No episode was kept.")
  source = life.open_bank(workdir)
  for id in newest(source, SKILLS):
    console.print(life.story(source, id))
  console.print(f"Curves: {workdir / plots.FOLDER / plots.ALL}.png")


def main(argv: Sequence[str] | None = None) -> int:
  """Runs, draws and tells; returns the exit code of the run."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--config", default=microworld.CONFIG)
  parser.add_argument("--seed", type=int, default=0, help="of the world")
  parser.add_argument("--workdir", default="runs/demo_learn")
  parser.add_argument("--seconds", type=float, default=10.0, help="a look")
  flags, others = parser.parse_known_args(argv)
  microworld.check_flags(parser, others, flags.seed)
  workdir = Path(flags.workdir).absolute()
  warm = workdir.with_name(f"{workdir.name}-warm")
  microworld.warm_start(flags.config, flags.seed, warm, microworld.launch)
  words = [f"--config={flags.config}", f"--workdir={workdir}"]
  words += [f"--config.seed={flags.seed}"]
  words += [f"--config.eval.episodes={8 * EPISODES}", *others]
  job = subprocess.Popen(
    [sys.executable, "-m", "sesa_jax.main", *words], cwd=microworld.ROOT
  )
  code = watch(job, workdir, flags.seconds)
  if code == 0:
    tell(workdir, rich.console.Console())
  return code


if __name__ == "__main__":
  sys.exit(main())
