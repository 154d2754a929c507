"""Writes docs/plans.md: what the paper's backbones need on four machines.

    python -m benchmarks.plans                            # all of it: an hour
    python -m benchmarks.plans --target=v5e:4x4 --config=qwen3_4b

Plans are kept in docs/plans.json, so that one can be renewed alone; compiled
programs in the assets folder, by their text. Configs that differ in weights or
RoPE alone have the same programs, and are compiled once.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

os.environ |= {
  "JAX_PLATFORMS": "cpu",
  "TPU_SKIP_MDS_QUERY": "1",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
}

from sesa_jax.plan import plan, run, tables, targets  # noqa: E402
from sesa_jax.plan.compiled import Compiled  # noqa: E402
from sesa_jax.plan.hlo import Collective  # noqa: E402

DOCS = Path(__file__).parents[1] / "docs"
TARGETS = ("v5e:4x4", "v5p:2x2x1", "v6e:4x4", "a100:8")
CONFIGS = (
  "qwen3_4b",
  "qwen3_4b_instruct",
  "qwen3_8b",
  "qwen2_5_7b",
  "qwen2_5_7b_instruct",
  "llama3_1_8b",
  "search_r1_7b",
)
GIB = targets.GIB


def lengths(tokens: int, rows: int) -> dict[str, int]:
  """Shorter episodes than the paper's."""
  return {
    "challenger.episode_tokens": tokens,
    "solver.episode_tokens": tokens,
    "verifier.max_tokens": min(tokens, 8192),
    "learner.microbatch_rows": rows,
  }


# Of one policy's step: figures to compare with.
SHORTER = (
  ("qwen3_4b", "v5e:4x4", lengths(4096, 16)),
  ("qwen3_4b", "a100:8", lengths(8192, 16)),
)


class Known(MutableMapping[str, Compiled]):
  """Compiled programs by their text, in a folder."""

  def __init__(self, folder: Path):
    """Makes the folder where it is missing."""
    self._folder = folder
    folder.mkdir(parents=True, exist_ok=True)

  def _path(self, key: str) -> Path:
    return self._folder / f"{key}.json"

  def __getitem__(self, key: str) -> Compiled:
    """Reads one."""
    if not self._path(key).exists():
      raise KeyError(key)
    fields = json.loads(self._path(key).read_text("utf-8"))
    found = (Collective(*c) for c in fields.pop("collectives"))
    return Compiled(collectives=tuple(found), **fields)

  def __setitem__(self, key: str, value: Compiled) -> None:
    """Writes one, as a whole."""
    text = json.dumps(dataclasses.asdict(value))
    part = self._path(key).with_suffix(".part")
    part.write_text(text, "utf-8")
    part.replace(self._path(key))

  def __delitem__(self, key: str) -> None:
    """Forgets one."""
    self._path(key).unlink()

  def __iter__(self) -> Iterator[str]:
    """Iterates over keys."""
    return (path.stem for path in self._folder.glob("*.json"))

  def __len__(self) -> int:
    """Counts them."""
    return len(list(iter(self)))


def read(name: str, target: targets.Target, changes: Mapping[str, Any]):
  """Reads a config, changed, with RoPE and norms as all have them here."""
  config = importlib.import_module(f"configs.{name}").get_config()
  if changes:
    config = plan.changed(config, changes)
  backbone = dataclasses.replace(
    run.architecture(config),
    rope_theta=1e6,
    rope_scaling=None,
    norm_eps=1e-6,
  )
  return run.read(config, target, changes, backbone)


def make(name: str, target: targets.Target, changes, known) -> dict[str, Any]:
  """Plans one, and cuts it down to what the page shows."""
  found = json.loads(
    tables.to_json(plan.make(read(name, target, changes), known))
  )
  for program in found["programs"].values():
    sums: dict[str, float] = {}
    for c in program.pop("collectives"):
      sums[c["kind"]] = sums.get(c["kind"], 0) + c["total"]
    program["collectives"] = sums
  return found


# --- the page ----------------------------------------------------------------


def gib(size: float | None) -> str:
  """Shows bytes."""
  return "-" if size is None else f"{size / GIB:.2f}"


def page(plans: Mapping[str, Any]) -> str:
  """Renders docs/plans.md."""
  lines = [HEAD]
  for target in TARGETS:
    here = {
      name: found
      for name in CONFIGS
      if (found := plans.get(f"{name} {target}")) is not None
    }
    if here:
      lines += ["", f"## {target}", "", *_target(here)]
  shorter = [
    (name, target, changes, found)
    for name, target, changes in SHORTER
    if (found := plans.get(key(name, target, changes))) is not None
  ]
  if shorter:
    lines += ["", "## Shorter rows", "", *_rows(SHORTER_HEAD)]
    for name, target, _, found in shorter:
      rows, tokens = found["microbatch"]["solver"]
      lines.append(
        f"| {name} | {target} | {rows} x {tokens:,} | {gib(found['step'])} | "
        f"{'yes' if found['fits'] else 'no'} |"
      )
  return "\n".join([*lines, ""])


def key(name: str, target: str, changes: Mapping[str, Any]) -> str:
  """Names a plan in plans.json."""
  return " ".join([name, target, *(f"{k}={v}" for k, v in changes.items())])


def _rows(head: str) -> list[str]:
  names = head.split(",")
  return [
    f"| {' | '.join(name.strip() for name in names)} |",
    f"|{'---|' * len(names)}",
  ]


def _target(plans: Mapping[str, Any]) -> list[str]:
  lines = _rows(FIT_HEAD)
  for name, found in plans.items():
    rows, tokens = found["microbatch"]["solver"]
    phases = [p for p in found["phases"] if p["name"] != plan.ROLLOUT]
    tight = min(phases, key=lambda p: p["left"] if p["left"] else -1)
    cache = found["caches"][0]
    rate = cache["tokens_per_second"]
    lines.append(
      f"| {name} | {rows} x {tokens:,} | "
      f"{'host' if found['offload'] else 'chip'} | {gib(found['step'])} | "
      f"{gib(tight['left'])} ({tight['name']}) | {cache['tokens']:,} | "
      f"{cache['episodes']:,} | {rate or 0:,.0f} | "
      f"{found['estimate'].get('hours', 0):.2f} | "
      f"{'yes' if found['fits'] else 'with ' + _flags(found)} |"
    )
  lines += ["", *_rows(PROGRAM_HEAD)]
  for name, found in plans.items():
    for label, program in found["programs"].items():
      kernels = ", ".join(f"{n} {k}" for k, n in program["kernels"].items())
      moved = f"{sum(program['collectives'].values()) / 1e9:.1f}"
      lines.append(
        f"| {name} | {label} | {gib(program['arguments'])} | "
        f"{gib(program['temporaries'])} | {gib(program['total'])} | "
        f"{gib(program['aliased'])} | {kernels or '-'} | "
        f"{moved} |"
      )
  others = [
    (name, cache)
    for name, found in plans.items()
    for cache in found["caches"]
    if len(found["caches"]) > 1
  ]
  if others:
    lines += ["", *_rows(CACHE_HEAD)]
    for name, cache in others:
      lines.append(
        f"| {name} | {cache['kind']} | {gib(cache['temporaries'])} | "
        f"{cache['tokens']:,} | {cache['episodes']:,} | "
        f"{cache['tokens_per_second'] or 0:,.0f} |"
      )
  return lines


def _flags(found: Mapping[str, Any]) -> str:
  flags = " ".join(found["remedies"]).replace("--config.", "")
  return f"`{flags}`" if flags else "nothing: too small"


HEAD = """\
# Plans

What the paper's setting needs on machines that nobody has booked yet. Written
by `python -m benchmarks.plans`, one config after the other as

    python -m sesa_jax.main --mode=plan --config=configs/qwen3_4b.py \\
        --target=v5e:4x4

does it: the run's own programs, with its shardings, compiled for the target.
Sizes are GiB on each device, of a memory of 15.75 (v5e), 95 (v5p), 31.25 (v6e)
and 75.2 (A100 80 GB, which needs XLA_PYTHON_CLIENT_MEM_FRACTION=0.95).

*Step* is one policy's update at its worst: weights, gradient, Adam's moments
where they lie on the device, a micro-batch and the program's temporaries.
*Left* is what the tightest phase of training leaves with both policies and the
reference in memory; the cache of a rollout has columns of its own. Tokens a
second and hours are rooflines, that is estimates: they count FLOPs and bytes,
as if each of 256 + 1,280 episodes reached its 12,288 tokens and no cycle were
lost. A machine that needs twice as long does well."""
FIT_HEAD = (
  "config, micro-batch, Adam waits on, step, left, tokens of cache, longest "
  "episodes, decode tokens/s, hours an iteration, fits as it is"
)
PROGRAM_HEAD = (
  "config, program, arguments, temporaries, total, aliased, kernels, "
  "collectives GB"
)
CACHE_HEAD = (
  "config, cache, decode temporaries, tokens, longest episodes, tokens/s"
)
SHORTER_HEAD = "config, target, micro-batch, step, fits as it is"


def main() -> None:
  """Plans what was asked for, and writes the page anew."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--target", choices=TARGETS, action="append")
  parser.add_argument("--config", choices=CONFIGS, action="append")
  asked = parser.parse_args()
  root = os.environ.get("SESA_JAX_ASSETS") or "~/.cache/sesa_jax"
  known = Known(Path(root).expanduser() / "compiled" / "plans")
  file = DOCS / "plans.json"
  plans = json.loads(file.read_text("utf-8")) if file.exists() else {}
  cases = [(name, target, {}) for target in TARGETS for name in CONFIGS]
  for name, target, changes in (*cases, *SHORTER):
    if name in (asked.config or CONFIGS) and target in (
      asked.target or TARGETS
    ):
      print(key(name, target, changes), flush=True)
      found = make(name, targets.find(target), changes, known)
      plans[key(name, target, changes)] = found
      file.write_text(json.dumps(plans, indent=1) + "\n", "utf-8")
      (DOCS / "plans.md").write_text(page(plans), "utf-8")


if __name__ == "__main__":
  main()
