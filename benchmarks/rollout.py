"""Rollout speed: the package's engine beside its peers on the same work.

    python -m benchmarks.rollout --runs=3 --peers=hf,tunix

What is played stands in `workload.py`, what the columns mean in README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import workload
from benchmarks.sides import Process, Side, SideError, set_up

OURS = "ours"
MODULE = "benchmarks.ours"


@dataclasses.dataclass(frozen=True)
class Peer:
  """Another engine: where it comes from, and settings worth a trial."""

  module: str
  pins: tuple[str, ...]
  trials: tuple[Mapping[str, Any], ...]  # the first are its defaults


PEERS = {
  "hf": Peer(
    "benchmarks.peers.hf_rollout",
    ("torch==2.13.0", "transformers==5.24.0"),
    (
      {},
      {"by_length": False},
      {"group": 32},
      {"group": 16},
      {"cache": "dynamic"},
      {"attention": "eager"},
      {"threads": 1},
    ),
  ),
  "tunix": Peer(
    "benchmarks.peers.tunix_rollout",
    ("google-tunix==0.1.7",),
    (
      {},
      {"by_length": False},
      {"group": 32},
      {"group": 16},
      {"cache": 2048},
      {"bucket": 32},
    ),
  ),
}
OUR_TRIALS = (
  {},
  {"devices": 1, "tensor": 1},
  {"tensor": 1},
  {"slots": 32},
  {"slots": 16},
  {"steps_per_dispatch": 16},
  {"steps_per_dispatch": 64},
  {"prefill_chunk": 256},
  {"page_size": 64},
)
# What is switched off, and the settings; "refill" needs episodes that wait.
ABLATIONS = {
  "page sharing": {"share": False},
  "pause and resume": {"resume": False},
  "K steps": {"steps_per_dispatch": 1},
  "refill": {"slots": 16, "refill": False},
  "sampling": {"sampling": "gumbel"},
  "attention": {"attention": "gather"},
}
WITH_REFILL = {"slots": 16}
# Keys and values are gigabytes, read in pieces: with pages of 4 KiB a third of
# the time goes into finding them. glibc asks for larger ones, for all sides.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
EPISODES = (64, 128, 256, 512, 1024)
CONTEXTS = (256, 1024, 4096)
SMOLLM2 = {
  "smollm2, the workload": {"questions": 8},
  # What a loop over a batch that starts and ends together would do.
  "smollm2, one turn": {
    "questions": 32,
    "attempts": 1,
    "turns": 1,
    "prompt": 32,
    "sample": 64,
  },
}


# --- sides -----------------------------------------------------------------

Settings = Mapping[str, Mapping[str, Any]]


def sides_of_peers(peers: Sequence[str], settings: Settings) -> list[Side]:
  """Returns this package's side and those of peers, set up."""
  return [
    Side(OURS, MODULE, settings.get(OURS, {})),
    *(
      Side(
        name,
        PEERS[name].module,
        settings.get(name, {}),
        set_up(name, PEERS[name].pins),
      )
      for name in peers
    ),
  ]


def sides_of_trials(name: str, settings: Settings) -> list[Side]:
  """Returns a side for each of the settings that are worth a trial."""
  (side,) = (
    side
    for side in sides_of_peers([name] if name != OURS else [], settings)
    if side.name == name
  )
  trials = OUR_TRIALS if name == OURS else PEERS[name].trials
  return [_change(side, f"{name} {_words(trial)}", trial) for trial in trials]


def sides_of_ablations(settings: Settings) -> list[Side]:
  """Returns sides that differ from ours by one idea each."""
  ours = Side(OURS, MODULE, settings.get(OURS, {}))
  return [
    ours,
    *(_change(ours, f"no {name}", off) for name, off in ABLATIONS.items()),
    _change(ours, f"{_words(WITH_REFILL)}", WITH_REFILL),
  ]


def sides_of_scale(settings: Settings) -> list[Side]:
  """Returns ours with more episodes, then with longer ones."""
  ours = Side(OURS, MODULE, {"model": "tiny"} | settings.get(OURS, {}))
  return [
    *(_change(ours, f"{n} episodes", {"questions": n // 4}) for n in EPISODES),
    *(
      _change(
        ours,
        f"context {n}",
        {"turns": 1, "prompt": n - 64, "sample": 64, "page_size": 128},
      )
      for n in CONTEXTS
    ),
  ]


def sides_of_smollm2(settings: Settings) -> list[Side]:
  """Returns ours with real weights."""
  base = {"model": "smollm2", "slots": 32, "devices": 1, "tensor": 1}
  base |= settings.get(OURS, {})  # 3 key-value heads do not divide by 2
  ours = Side(OURS, MODULE, base)
  return [_change(ours, name, work) for name, work in SMOLLM2.items()]


def _change(side: Side, name: str, settings: Mapping[str, Any]) -> Side:
  return dataclasses.replace(
    side, name=name, settings=dict(side.settings) | dict(settings)
  )


def _words(settings: Mapping[str, Any]) -> str:
  return ", ".join(f"{k}={v}" for k, v in settings.items()) or "as it is"


# --- measuring -------------------------------------------------------------


def _start(side: Side) -> Process:
  return Process(side, HUGE_PAGES)


def measure(
  sides: Sequence[Side],
  runs: int,
  *,
  alternate: bool = True,
  start: Callable[[Side], Any] = _start,
  tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
  """Lets sides play, one at a time.

  Args:
    sides: a side of this package must be the first, or the only kind.
    runs: plays that count, of each side.
    alternate: a run of each, then the next; all are in memory. Otherwise one
      side after the other, each alone in memory.
    start: makes a side's process.
    tell: is given progress, a line at a time.

  Returns:
    The report, see README.md.
  """
  rates: list[float] = []
  groups = [list(sides)] if alternate else [[side] for side in sides]
  measured = [
    side for group in groups for side in _group(group, runs, rates, start, tell)
  ]
  matmul = _median(rates) if rates else None
  for side in measured:
    _add_figures(side, matmul)
  return dict(
    machine=machine(),
    matmul=dict(
      size=1024, dtype="float32", flops_per_second=matmul, measured=len(rates)
    ),
    sides=measured,
  )


def _group(sides, runs, rates, start, tell) -> Iterator[dict[str, Any]]:
  with contextlib.ExitStack() as stack:
    processes = [stack.enter_context(start(side)) for side in sides]
    played: list[list[dict]] = [[] for _ in processes]
    warm = []
    for process in processes:
      tell(f"{process.side.name}: first play")
      warm.append(process.ask("warm"))
    for run in range(1, runs + 1):
      for process, plays in zip(processes, played, strict=True):
        # A process of this package measures the machine, just before.
        if processes[0].side.module == MODULE:
          rates += processes[0].ask("matmul")["flops_per_second"]
        plays.append(process.ask("play", run=run))
        rate = _rate(plays[-1])
        tell(f"{process.side.name}: run {run} of {runs}, {rate:.1f} tokens/s")
    for process, first, plays in zip(processes, warm, played, strict=True):
      yield dict(
        name=process.side.name,
        about=process.about,
        warm=first,
        runs=plays,
      )


def _seconds(play: Mapping[str, Any]) -> float:
  return play["seconds"] - play["compile_seconds"]


def _rate(play: Mapping[str, Any]) -> float:
  return play["tokens"] / _seconds(play)


def _add_figures(side: dict[str, Any], matmul: float | None) -> None:
  """Adds what follows from a side's runs."""
  rates = [_rate(play) for play in side["runs"]]
  side["tokens_per_second"] = dict(
    median=_median(rates), least=min(rates), greatest=max(rates)
  )
  side["compile_seconds"] = side["warm"]["compile_seconds"]
  side["peak_rss_bytes"] = side["runs"][-1]["peak_rss_bytes"]
  flops = sum(side["about"]["flops"].values())
  seconds = _median(map(_seconds, side["runs"]))
  side["flops_per_second"] = flops / seconds
  side["share_of_matmul"] = matmul and flops / seconds / matmul
  side["tokens_per_cpu_second"] = _median(
    play["tokens"] / play["cpu_seconds"] for play in side["runs"]
  )
  side["cores_busy"] = _median(
    play["cpu_seconds"] / play["seconds"] for play in side["runs"]
  )
  counted = [play["counts"] for play in side["runs"] if "counts" in play]
  side["host_microseconds_per_token"] = (
    _median(1e6 * c["seconds/host"] / _processed(c) for c in counted)
    if counted
    else None
  )


def _median(values: Iterable[float]) -> float:
  return statistics.median(values)


def _processed(counts: Mapping[str, float]) -> float:
  return counts["tokens/sampled"] + counts["tokens/prefilled"]


def add_ratios(report: dict[str, Any], base: Mapping[str, str]) -> None:
  """Adds, for each side, how many times as fast its base is.

  Args:
    report: of `measure`.
    base: the name of each side's base, by the side's name; the first side
      where it is not named.
  """
  named = {side["name"]: side for side in report["sides"]}
  first = report["sides"][0]["name"]
  for side in report["sides"]:
    against = named[base.get(side["name"], first)]
    side["base"] = against["name"]
    side["speedup_of_base"] = (
      against["tokens_per_second"]["median"]
      / side["tokens_per_second"]["median"]
    )


def machine() -> dict[str, Any]:
  """Says where this runs, and how busy it is."""
  cpu = platform.processor()
  if (info := Path("/proc/cpuinfo")).exists():
    names = [
      line.split(":", 1)[1].strip()
      for line in info.read_text().splitlines()
      if line.startswith("model name")
    ]
    cpu = names[0] if names else cpu
  return dict(
    cpu=cpu,
    cores=len(os.sched_getaffinity(0)),
    python=platform.python_version(),
    load=round(os.getloadavg()[0], 2),
  )


# --- showing ---------------------------------------------------------------


_Cell = Callable[[Mapping[str, Any]], str]
# Headings and cells; README.md says what they mean.
_COLUMNS: dict[str, _Cell] = {
  "side": lambda side: side["name"],
  "tokens/s": lambda side: _rounded(side["tokens_per_second"]["median"]),
  "least-most": lambda side: "-".join(
    _rounded(side["tokens_per_second"][end]) for end in ("least", "greatest")
  ),
  "base is": lambda side: f"{side['speedup_of_base']:.2f} x",
  "of matmul": lambda side: (
    f"{side['share_of_matmul']:.1%}" if side["share_of_matmul"] else ""
  ),
  "cores": lambda side: f"{side['cores_busy']:.2f}",
  "compile s": lambda side: f"{side['compile_seconds']:.1f}",
  "peak GB": lambda side: f"{side['peak_rss_bytes'] / 1e9:.2f}",
  "host us": lambda side: (
    f"{side['host_microseconds_per_token']:.1f}"
    if side["host_microseconds_per_token"]
    else ""
  ),
}


def _rounded(rate: float) -> str:
  return f"{rate:.1f}" if rate < 1000 else f"{rate:,.0f}"


def table(report: Mapping[str, Any], title: str) -> Table:
  """Lays the report out."""
  shown = Table(title=title)
  columns = dict(_COLUMNS)
  if "base" not in report["sides"][0]:
    del columns["base is"]
  for name in columns:
    shown.add_column(
      name, justify="left" if name == "side" else "right", no_wrap=True
    )
  for side in report["sides"]:
    shown.add_row(*(cell(side) for cell in columns.values()))
  return shown


def notes(report: Mapping[str, Any]) -> list[str]:
  """Says what the table leaves out: machine, settings, versions."""
  where = report["machine"]
  lines = [
    f"{where['cores']} cores of {where['cpu']}, Python {where['python']}, "
    f"load {where['load']} at the end."
  ]
  if rate := report["matmul"]["flops_per_second"]:
    lines.append(f"float32 matmul of 1024^3: {rate / 1e9:.1f} GFLOPs/s.")
  told: dict[tuple[str, ...], tuple[str, Mapping]] = {}
  for side in report["sides"]:
    settings, versions = side["about"]["settings"], side["about"]["versions"]
    # Of sides that have the same settings to make, only the first's are long.
    first, known = told.setdefault(tuple(settings), (side["name"], settings))
    if first == side["name"]:
      made = " ".join(f"{k} {v}" for k, v in versions.items())
      lines.append(f"{first}: {_words(settings)} ({made})")
    else:
      changed = {k: v for k, v in settings.items() if known[k] != v}
      lines.append(f"{side['name']}: as {first}, but {_words(changed)}")
  return lines


# --- the command line ------------------------------------------------------


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.rollout",
    description="Rollout speed beside peers; see benchmarks/README.md.",
  )
  parser.add_argument("--runs", type=int, default=3, help="that count (3)")
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
    help="a setting, such as ours.slots=32; may be repeated",
  )
  mode = parser.add_mutually_exclusive_group()
  mode.add_argument(
    "--setup", action="store_true", help="install the peers, play nothing"
  )
  mode.add_argument(
    "--trials",
    metavar="SIDE",
    choices=(OURS, *PEERS),
    help="try the settings of one side instead",
  )
  mode.add_argument(
    "--ablations", action="store_true", help="switch off an idea at a time"
  )
  mode.add_argument(
    "--scale", action="store_true", help="more and longer episodes, tiny model"
  )
  mode.add_argument(
    "--smollm2", action="store_true", help="real weights, 32 slots"
  )
  chosen = parser.parse_args(argv)
  if chosen.runs < 1:
    parser.error(f"--runs={chosen.runs}: at least one run must count.")
  chosen.peers = [name for name in chosen.peers.split(",") if name]
  for name in chosen.peers:
    if name not in PEERS:
      parser.error(f"Unknown peer {name!r}. Choices: {', '.join(PEERS)}.")
  try:
    chosen.set = parse_settings(chosen.set)
  except ValueError as error:
    parser.error(str(error))
  return chosen


def parse_settings(
  words: Sequence[str], sides: Sequence[str] = (OURS, *PEERS)
) -> dict[str, dict[str, Any]]:
  """Reads SIDE.NAME=VALUE; a value is JSON, or else a word.

  Raises:
    ValueError: it is not of this form, or there is no such side.
  """
  found: dict[str, dict[str, Any]] = {}
  for word in words:
    left, equals, value = word.partition("=")
    side, dot, name = left.partition(".")
    if not (equals and dot) or side not in sides:
      raise ValueError(
        f"--set={word}: write SIDE.NAME=VALUE, with a side of "
        f"{', '.join(sides)}."
      )
    try:
      found.setdefault(side, {})[name] = json.loads(value)
    except json.JSONDecodeError:
      found.setdefault(side, {})[name] = value
  return found


def _plan(
  chosen: argparse.Namespace,
) -> tuple[str, list[Side], bool, dict[str, str] | None]:
  """Returns title, sides, whether to alternate, and the bases of ratios.

  Without bases there are no ratios: the sides do not do the same work.
  """
  settings = chosen.set
  if chosen.trials:
    sides = sides_of_trials(chosen.trials, settings)
    return f"Settings of {chosen.trials}", sides, False, {}
  if chosen.ablations:
    base = {"no refill": _words(WITH_REFILL)}
    # One after the other: together they need more memory than they should.
    return "An idea off at a time", sides_of_ablations(settings), False, base
  if chosen.scale:
    return "Tiny model", sides_of_scale(settings), False, None
  if chosen.smollm2:
    return "SmolLM2-135M", sides_of_smollm2(settings), False, None
  sides = sides_of_peers(chosen.peers, settings)
  useful = workload.sampled(workload.draw())
  return f"64 episodes, {useful:,} tokens to sample", sides, True, {}


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns its exit status."""
  chosen = _arguments(argv)
  # What is piped on is the report alone.
  tell = Console(stderr=True, highlight=False).print
  try:
    if chosen.setup:
      for name in chosen.peers:
        tell(f"{name}: {set_up(name, PEERS[name].pins)}")
      return 0
    title, sides, alternate, base = _plan(chosen)
    report = measure(sides, chosen.runs, alternate=alternate, tell=tell)
  except SideError as error:
    print(error, file=sys.stderr)
    return 1
  if base is not None:
    add_ratios(report, base)
  if chosen.json:
    print(json.dumps(report))
    return 0
  console = Console(highlight=False)
  # What is piped into a file has no width of its own.
  console = Console(highlight=False, width=max(console.width, 100))
  console.print(table(report, title))
  for line in notes(report):
    console.print(line, soft_wrap=True)
  return 0


if __name__ == "__main__":
  sys.exit(main())
