"""Shows a plan: tables for people, JSON for programs."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import sys
from collections.abc import Container
from typing import Any

import rich.box
import rich.console
import rich.table

from sesa_jax.plan import targets
from sesa_jax.plan.plan import Plan, make
from sesa_jax.plan.run import read
from sesa_jax.plan.targets import GIB

_RIGHT = "right"


def main(config: Any, target: str, given: Container[str], as_json: bool) -> int:
  """Plans a config for a target and prints it.

  Returns:
    The exit code: 0 where the run fits, else 1.

  Raises:
    ValueError: the target is unknown, what compiles for it is missing, or
      sizes do not go together.
  """
  plan = make(read(config, targets.find(target), given))
  if as_json:
    print(to_json(plan))
  else:
    # Where nobody looks, a table is as wide as it needs to be.
    wide = None if sys.stdout.isatty() else 140
    show(plan, rich.console.Console(width=wide))
  return 0 if plan.fits else 1


def to_json(plan: Plan) -> str:
  """Returns all of a plan; sizes in bytes, times in seconds.

  What the compiler did not say, of a program that it refused, is null.
  """
  fields = dataclasses.asdict(plan)
  for name, program in plan.programs.items():
    fields["programs"][name] |= dict(total=program.total)
    fields["programs"][name]["collectives"] = [
      c._asdict() | dict(total=c.total) for c in program.collectives
    ]
  for row, phase in zip(fields["phases"], plan.phases, strict=True):
    row |= dict(total=phase.total, left=phase.left, fits=phase.fits)
  for row, cache in zip(fields["caches"], plan.caches, strict=True):
    row |= dict(tokens=cache.tokens, episodes=cache.episodes, fits=cache.fits)
  return json.dumps(_finite(fields | dict(fits=plan.fits)), indent=1)


def _finite(value: Any) -> Any:
  if isinstance(value, dict):
    return {key: _finite(x) for key, x in value.items()}
  if isinstance(value, list | tuple):
    return [_finite(x) for x in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


def show(plan: Plan, console: rich.console.Console) -> None:
  """Prints a plan; sizes in GiB on each device."""
  for line in headline(plan):
    console.print(line, highlight=False)
  for table in _programs(plan), _phases(plan), _caches(plan), _costs(plan):
    console.print(table)
  for line in verdict(plan):
    console.print(line, highlight=False)


def headline(plan: Plan) -> list[str]:
  """Says what was planned."""
  mesh = ", ".join(f"{name} {size}" for name, size in plan.mesh.items())
  rows = dict.fromkeys(f"{r} x {t:,}" for r, t in plan.microbatch.values())
  return [
    f"{plan.config} on {plan.target}: {plan.devices} devices, {plan.hosts} "
    f"hosts; mesh {mesh}",
    f"microbatch {', '.join(rows)} tokens; attention "
    f"{plan.attention['training']} in training, {plan.attention['rollout']} in "
    f"rollouts; Adam's moments {'on the host' if plan.offload else 'resident'}",
  ]


def verdict(plan: Plan) -> list[str]:
  """Says whether it fits, and what would make it fit."""
  tight = min(plan.phases, key=lambda phase: phase.left)
  lines = [
    f"One policy's step: {_gib(plan.step)} GiB. Tightest: {tight.name}, "
    f"{_gib(tight.left)} of {_gib(tight.memory)} GiB left."
  ]
  for name, program in plan.programs.items():
    if program.refused:
      lines.append(f"The compiler refused {name}: {program.refused}")
  if plan.fits:
    return [*lines, "It fits."]
  if plan.remedies:
    return [*lines, f"It does not fit. It does with {' '.join(plan.remedies)}"]
  return [
    *lines,
    "It does not fit, and no switch makes it fit: take a larger target.",
  ]


def _gib(size: float) -> str:
  return f"{size / GIB:.2f}" if math.isfinite(size) else "?"


def _table(title: str, first: str, *names: str) -> rich.table.Table:
  table = rich.table.Table(
    title=title, title_justify="left", box=rich.box.SIMPLE_HEAD
  )
  table.add_column(first, no_wrap=True)
  for name in names:
    table.add_column(name, justify=_RIGHT)
  return table


def _programs(plan: Plan) -> rich.table.Table:
  table = _table(
    "Programs (GiB on each device)",
    "program",
    "arguments",
    "temporaries",
    "outputs",
    "total",
    "aliased",
    "kernels",
    "compiled in",
  )
  for name, program in plan.programs.items():
    kernels = (f"{count} {kind}" for kind, count in program.kernels.items())
    table.add_row(
      name,
      _gib(program.arguments),
      _gib(program.temporaries),
      _gib(program.outputs),
      _gib(program.total),
      _gib(program.aliased),
      ", ".join(kernels) or "-",
      f"{program.seconds:.0f} s",
    )
  return table


def _phases(plan: Plan) -> rich.table.Table:
  names = list(dict.fromkeys(n for p in plan.phases for n in p.resident))
  table = _table(
    "Phases (GiB on each device, at the worst moment)",
    "phase",
    *names,
    "program",
    "adds",
    "total",
    "left",
  )
  for phase in plan.phases:
    table.add_row(
      phase.name,
      *(_gib(phase.resident[n]) if n in phase.resident else "-" for n in names),
      phase.program,
      _gib(phase.added),
      _gib(phase.total),
      f"{_gib(phase.left)}{'' if phase.fits else ' !'}",
    )
  return table


def _caches(plan: Plan) -> rich.table.Table:
  table = _table(
    "Keys and values (room on all hosts; tokens/s: a roofline, an estimate)",
    "cache",
    "pages asked for",
    "pages that fit",
    "tokens",
    "longest episodes",
    "GB a decode step",
    "tokens/s",
  )
  for cache in plan.caches:
    rate = cache.tokens_per_second
    table.add_row(
      cache.kind,
      f"{cache.pages:,}",
      f"{cache.fitting:,}{'' if cache.fits else ' !'}",
      f"{cache.tokens:,}",
      f"{cache.episodes:,}",
      f"{cache.step_bytes / 1e9:,.2f}",
      "-" if rate is None else f"{rate:,.0f}",
    )
  return table


def _costs(plan: Plan) -> rich.table.Table:
  """FLOPs, bytes and hours; the bytes of collectives."""
  table = _table(
    "An iteration, if every episode reached its longest (counted; GB are what "
    "decode steps and Adam move on all devices; hours are a roofline, an "
    "estimate: no machine is faster, and half of it is good)",
    "what",
    "PFLOP",
    "GB",
    "hours",
  )
  found = plan.estimate
  for name in [n for n in found if "/flops/" in n]:
    role, _, part = name.split("/")
    seconds = found.get(f"{role}/seconds/{part}")
    moved = found.get(f"{role}/bytes/{part}")
    table.add_row(
      f"{role} {part}",
      f"{found[name] / 1e15:,.1f}",
      "-" if moved is None else f"{moved / 1e9:,.2f}",
      "-" if seconds is None else f"{seconds / 3600:.2f}",
    )
  if "hours" in found:
    table.add_row("all", "", "", f"{found['hours']:.2f}")
  table.add_section()
  for name, program in plan.programs.items():
    sums: collections.Counter[str] = collections.Counter()
    runs: collections.Counter[str] = collections.Counter()
    for c in program.collectives:
      sums[c.kind] += c.total
      runs[c.kind] += max(1, c.trips) * c.count
    for kind, size in sums.most_common():
      table.add_row(
        f"a call of {name}: {runs[kind]:,} x {kind}, each device",
        "",
        f"{size / 1e9:,.2f}",
        "",
      )
  return table
