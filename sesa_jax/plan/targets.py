"""Machines to compile for, most of which are not here.

A target has all its devices, for training, and those of one host, for a
rollout. Devices that are absent are descriptions: programs compile for them,
and nothing runs.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

import jax
from jax.experimental import topologies

from sesa_jax import distributed

FACTS = Path(__file__).parents[2] / "third_party" / "targets"
GIB = 2**30
HERE = "here"
_INSTALL = (
  "Install it in a checkout: pip install -e '.[plan]'. Or `make plan` makes "
  ".venv/compilers/bin/python, which has it."
)


@dataclasses.dataclass(frozen=True)
class Chip:
  """What the data sheet says of one device; rates that no program reaches."""

  memory: float  # bytes that programs may fill
  flops: float  # a second, bfloat16
  bandwidth: float  # bytes a second, of its memory
  links: float  # bytes a second, to other chips, both directions together
  source: str


@dataclasses.dataclass(frozen=True)
class Target:
  """A machine to plan for."""

  name: str  # as it was asked for
  machine: str  # as `distributed.machine_kind` calls it
  platform: str  # of JAX's devices: "tpu", "gpu", "cpu"
  devices: tuple[jax.Device, ...]  # all: the training mesh
  host: tuple[jax.Device, ...]  # of one host: a rollout's mesh
  memory: float  # bytes that programs may fill, of each device
  chip: Chip | None  # None where no rates are known

  @property
  def hosts(self) -> int:
    """Hosts, each with a rollout of its own."""
    return len(self.devices) // len(self.host)


def find(name: str) -> Target:
  """Describes a target.

  Args:
    name: `v5e:4x4`, `v5p:2x2x1`, `v6e:4x4` or another topology that libtpu
      knows; `a100:8`; or `here`, the devices that are present.

  Raises:
    ValueError: the target is unknown, or what compiles for it is missing.
  """
  if name == HERE:
    return _here()
  kind, _, size = name.partition(":")
  chips = _chips()
  if kind not in chips or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", size):
    raise ValueError(
      f"Unknown --target={name}. Choices: here, a100:8, and of TPUs "
      f"{', '.join(k for k in chips if k != 'a100')} a topology, such as "
      "v5e:4x4 or v5p:2x2x1."
    )
  if kind == "a100":
    devices = host = _gpus(name, size)
  else:
    devices, host = _tpus(name, kind)
  first = devices[0]
  return Target(
    name=name,
    machine=distributed.machine_kind(first.platform, first.device_kind),
    platform=first.platform,
    devices=devices,
    host=host,
    memory=chips[kind].memory,
    chip=chips[kind],
  )


def _chips() -> dict[str, Chip]:
  path = FACTS / "chips.toml"
  if not path.is_file():
    raise ValueError(
      f"{path} is missing: planning for absent hardware needs a checkout of "
      "the repository, with third_party/."
    )
  return {
    kind: Chip(
      memory=facts["memory"] * GIB,
      flops=facts["tflops"] * 1e12,
      bandwidth=facts["bandwidth"] * 1e9,
      links=facts["links"] * 1e9,
      source=facts["source"],
    )
    for kind, facts in tomllib.loads(path.read_text("utf-8")).items()
  }


def _tpus(name: str, kind: str) -> tuple[tuple, tuple]:
  """All chips of a slice, and those of a host-sized slice of its own.

  A host's program does not compile for devices taken out of a larger slice.
  """
  _need(name, "libtpu")
  devices = _topology(name, platform="tpu", topology_name=name)
  own = distributed.first_host(devices)
  if len(own) == len(devices):
    return devices, devices
  axes = len(name.partition(":")[2].split("x"))
  sides = [len({d.coords[axis] for d in own}) for axis in range(axes)]
  small = f"{kind}:{'x'.join(map(str, sides))}"
  return devices, _topology(name, platform="tpu", topology_name=small)


def _gpus(name: str, count: str) -> tuple:
  """The GPUs of one node; a node has at most 8."""
  if not count.isdigit() or not 1 <= int(count) <= 8:
    raise ValueError(f"--target={name}: a node has from 1 to 8 GPUs, a100:8.")
  for module in ("jax_plugins.xla_cuda12", "nvidia.cudnn", "nvidia.cuda_nvcc"):
    _need(name, module)
  importlib.import_module("jax_plugins.xla_cuda12")  # finds the plugin
  return _topology(
    name,
    platform="cuda",
    topology_name="",
    topology=f"1x{count}x1",
    target_config=(FACTS / "a100_80gb.textproto").read_text("utf-8"),
  )


def _need(name: str, module: str) -> None:
  try:
    found = importlib.util.find_spec(module)
  except ModuleNotFoundError:  # the package above it
    found = None
  if found is None:
    raise ValueError(f"--target={name} needs {module}. {_INSTALL}")


def _topology(name: str, **description) -> tuple[jax.Device, ...]:
  try:
    return tuple(topologies.get_topology_desc(**description).devices)
  except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
    said = str(error).splitlines()[0]
    raise ValueError(f"--target={name}: {said}") from error


def _here() -> Target:
  devices = jax.devices()
  first = devices[0]
  machine = distributed.machine_kind(first.platform, first.device_kind)
  chip = _chips().get(machine) if FACTS.is_dir() else None
  return Target(
    name=HERE,
    machine=machine,
    platform=first.platform,
    devices=tuple(devices),
    host=tuple(jax.local_devices()),
    memory=_memory(devices),
    chip=chip,
  )


def _memory(devices: Sequence[jax.Device]) -> float:
  """Bytes of each device; a CPU's devices share the machine's."""
  stats = devices[0].memory_stats() or {}
  if "bytes_limit" in stats:
    return float(stats["bytes_limit"])
  total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  return total / len(devices)
