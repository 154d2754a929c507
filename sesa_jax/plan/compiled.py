"""One program, compiled for a target: what it needs of each device."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
import tempfile
import time
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import jax

from sesa_jax.plan import hlo, targets


@dataclasses.dataclass(frozen=True)
class Compiled:
  """A program for one device of a target; sizes are bytes."""

  seconds: float  # of compilation, on the machine that planned
  arguments: float
  temporaries: float
  outputs: float  # that no donated argument lends its memory to
  aliased: float  # outputs that take the place of a donated argument
  kernels: Mapping[str, int]  # see `hlo.kernels`
  collectives: tuple[hlo.Collective, ...]
  refused: str = ""  # the compiler's words where it did not fit

  @property
  def total(self) -> float:
    """All that exists while it runs."""
    return self.arguments + self.added

  @property
  def added(self) -> float:
    """What it needs beside its arguments."""
    return self.temporaries + self.outputs


def compile_program(
  program: Any,
  arguments: tuple[Any, ...],
  target: targets.Target,
  known: MutableMapping[str, Compiled],
) -> Compiled:
  """Compiles, unless the same program was compiled before.

  Args:
    program: jitted.
    arguments: shapes with shardings over the target's devices.
    target: names the compiler.
    known: what programs came to, by their text; one more is added.
  """
  lowered = program.lower(*arguments)
  text = f"{jax.__version__} {target.name} {lowered.as_text()}"
  key = hashlib.sha256(text.encode()).hexdigest()
  if key not in known:
    tpu = target.platform == "tpu"
    with tempfile.TemporaryDirectory() as folder:
      dump = Path(folder) if tpu else None
      known[key] = _compile(lowered, device_bytes(arguments), dump)
  return known[key]


def _compile(
  lowered: jax.stages.Lowered, arguments: float, dump: Path | None
) -> Compiled:
  """Compiles; libtpu writes its text to a folder.

  jaxlib cannot read all that a newer libtpu made of a program.
  """
  options: dict[str, Any] = {}
  if dump:
    options = {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True}
  began = time.perf_counter()
  try:
    compiled = lowered.compile(options)
  except jax.errors.JaxRuntimeError as error:
    said = str(error)
    if "RESOURCE_EXHAUSTED" not in said:
      raise
    # Of temporaries alone, or of arguments too.
    asked = re.search(r"temporaries \(([\d.]+)G\)", said)
    used = re.search(r"Used ([\d.]+)G of", said)
    temporaries = math.inf
    if asked:
      temporaries = float(asked[1]) * targets.GIB
    elif used:
      temporaries = float(used[1]) * targets.GIB - arguments
    return Compiled(
      seconds=time.perf_counter() - began,
      arguments=arguments,
      temporaries=temporaries,
      outputs=0.0,
      aliased=0.0,
      kernels={},
      collectives=(),
      refused=said.splitlines()[0][:200],
    )
  seconds = time.perf_counter() - began
  memory = compiled.memory_analysis()
  written = [*dump.glob("*after_optimizations.txt")] if dump else []
  text = written[0].read_text("utf-8") if written else compiled.as_text()
  outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
  return Compiled(
    seconds=seconds,
    arguments=float(memory.argument_size_in_bytes),
    temporaries=float(memory.temp_size_in_bytes),
    outputs=float(max(0, outputs)),
    aliased=float(memory.alias_size_in_bytes),
    kernels=hlo.kernels(text),
    collectives=hlo.collectives(text),
  )


def device_bytes(tree: Any) -> float:
  """Returns what each device's memory holds of a tree of placed shapes.

  A CPU's devices share the host's memory: there an offload frees nothing.
  """

  def held(leaf: Any) -> float:
    place = getattr(leaf, "sharding", None)
    if place is None or _elsewhere(place):
      return 0.0
    return float(math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize)

  return sum(map(held, jax.tree.leaves(tree)), 0.0)


def _elsewhere(place: jax.sharding.Sharding) -> bool:
  """Whether a placement is in memory that is not the devices'."""
  first = next(iter(place.device_set))
  return place.memory_kind == "pinned_host" and first.platform != "cpu"
