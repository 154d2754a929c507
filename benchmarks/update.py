"""Update speed: the package's learner beside its peers on the same work.

    python -m benchmarks.update --runs=3 --peers=torch,tunix

What is learned stands in `lessons.py`, what the columns mean in README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import lessons, rollout
from benchmarks.sides import Process, Side, SideError, set_up

OURS = "ours"
MODULE = "benchmarks.ours_update"
# Environments are those of the rollout's peers.
PEERS = {
  "torch": ("benchmarks.peers.torch_update", "hf"),
  "tunix": ("benchmarks.peers.tunix_update", "tunix"),
}


def sides_of(
  peers: Sequence[str], questions: int, settings: rollout.Settings
) -> list[Side]:
  """Returns this package's side and those of peers, set up."""
  return [
    Side(
      name,
      module,
      {"questions": questions} | dict(settings.get(name, {})),
      set_up(home, rollout.PEERS[home].pins) if home else sys.executable,
    )
    for name, (module, home) in {OURS: (MODULE, ""), **PEERS}.items()
    if name == OURS or name in peers
  ]


def measure(
  sides: Sequence[Side],
  runs: int,
  questions: int,
  *,
  start: Callable[[Side], Any] = Process,
  tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
  """Lets sides update, one at a time: a run of each, then the next.

  Returns:
    The report, see README.md.
  """
  with contextlib.ExitStack() as stack:
    processes = [stack.enter_context(start(side)) for side in sides]
    warm, played = [], [[] for _ in processes]
    for process in processes:
      tell(f"{process.side.name}: first update")
      warm.append(process.ask("warm"))
    for run in range(1, runs + 1):
      for process, plays in zip(processes, played, strict=True):
        plays.append(process.ask("play", run=run))
        tell(
          f"{process.side.name}: run {run} of {runs}, "
          f"{_rate(plays[-1]):.1f} tokens/s"
        )
    found = [
      dict(name=process.side.name, about=process.about, warm=first, runs=plays)
      for process, first, plays in zip(processes, warm, played, strict=True)
    ]
  flops = lessons.flops(lessons.draw(questions))
  for side in found:
    _add_figures(side, flops)
  for side in found:
    ours = found[0]["tokens_per_second"]["best"]
    side["ours_is"] = ours / side["tokens_per_second"]["best"]
    padded = found[0]["padded_tokens_per_second"]
    side["ours_is_padded"] = padded / side["padded_tokens_per_second"]
  return dict(machine=rollout.machine(), sides=found)


def _rate(play: Mapping[str, Any], of: str = "tokens") -> float:
  return play[of] / (play["seconds"] - play["compile_seconds"])


def _add_figures(side: dict[str, Any], flops: int) -> None:
  """Adds what follows from a side's runs."""
  rates = [_rate(play) for play in side["runs"]]
  side["tokens_per_second"] = dict(
    best=max(rates), median=statistics.median(rates), least=min(rates)
  )
  side["padded_tokens_per_second"] = max(
    _rate(play, "padded") for play in side["runs"]
  )
  side["tokens_per_core_second"] = max(
    play["tokens"] / play["cpu_seconds"] for play in side["runs"]
  )
  last = side["runs"][-1]
  side["padding_fraction"] = 1 - last["tokens"] / last["padded"]
  side["compile_seconds"] = side["warm"]["compile_seconds"]
  side["peak_rss_bytes"] = last["peak_rss_bytes"]
  side["flops_per_second"] = flops / last["tokens"] * max(rates)


def table(report: Mapping[str, Any], title: str) -> Table:
  """Lays the report out; README.md says what the columns mean."""
  shown = Table(title=title)
  shown.add_column("side")
  for name in (
    "tokens/s",
    "least-most",
    "ours is",
    "padded",
    "ours is",
    "a core's s",
    "GFLOPs/s",
    "compile s",
    "peak GB",
  ):
    shown.add_column(name, justify="right")
  for side in report["sides"]:
    rate = side["tokens_per_second"]
    shown.add_row(
      side["name"],
      f"{rate['best']:.1f}",
      f"{rate['least']:.1f}-{rate['best']:.1f}",
      f"{side['ours_is']:.2f} x",
      f"{side['padding_fraction']:.1%}",
      f"{side['ours_is_padded']:.2f} x",
      f"{side['tokens_per_core_second']:.1f}",
      f"{side['flops_per_second'] / 1e9:.1f}",
      f"{side['compile_seconds']:.1f}",
      f"{side['peak_rss_bytes'] / 1e9:.2f}",
    )
  return shown


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns its exit status."""
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.update",
    description="Update speed beside peers; see benchmarks/README.md.",
  )
  parser.add_argument("--runs", type=int, default=3, help="that count (3)")
  parser.add_argument(
    "--questions", type=int, default=16, help="of 4 episodes each (16)"
  )
  parser.add_argument(
    "--peers",
    default=",".join(PEERS),
    help=f"of {', '.join(PEERS)}; empty for none",
  )
  parser.add_argument("--json", action="store_true", help="one JSON object")
  parser.add_argument(
    "--set",
    action="append",
    default=[],
    metavar="SIDE.NAME=VALUE",
    help="a setting, such as ours.rows=2; may be repeated",
  )
  chosen = parser.parse_args(argv)
  if min(chosen.runs, chosen.questions) < 1:
    parser.error("--runs and --questions must be at least 1.")
  peers = [name for name in chosen.peers.split(",") if name]
  for name in peers:
    if name not in PEERS:
      parser.error(f"Unknown peer {name!r}. Choices: {', '.join(PEERS)}.")
  try:
    settings = rollout.parse_settings(chosen.set, (OURS, *PEERS))
  except ValueError as error:
    parser.error(str(error))
  # What is piped on is the report alone.
  tell = Console(stderr=True, highlight=False).print
  try:
    sides = sides_of(peers, chosen.questions, settings)
    report = measure(sides, chosen.runs, chosen.questions, tell=tell)
  except SideError as error:
    print(error, file=sys.stderr)
    return 1
  if chosen.json:
    print(json.dumps(report))
    return 0
  console = Console(highlight=False)
  useful = report["sides"][0]["runs"][0]["tokens"]
  console.print(
    table(report, f"{4 * chosen.questions} episodes, {useful:,} tokens")
  )
  for line in rollout.notes(report | {"matmul": {"flops_per_second": None}}):
    console.print(line, soft_wrap=True)
  return 0


if __name__ == "__main__":
  sys.exit(main())
