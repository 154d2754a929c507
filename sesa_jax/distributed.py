"""The only file that knows that there are several processes.

One process drives one host. Rollouts are local to a process; what they
produced on the host is gathered here, so that every process computes the same
bank, the same batch and the same decision to stop.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding

from sesa_jax import types

_TORCHRUN = ("MASTER_ADDR", "WORLD_SIZE", "RANK")

# What a device's own name holds, and its kind of machine; the first that fits.
_KINDS = (
  ("TPU v5 lite", "v5e"),
  ("TPU v5", "v5p"),
  ("TPU v6", "v6e"),
  ("A100", "a100"),
  ("H100", "h100"),
  ("H200", "h100"),  # its chip, with more memory
)
# Seconds that a process which ends waits for the others to end too, before jax
# ends them.
_PATIENCE = 60
# What ends in one line, and so can be told to other processes.
_REFUSALS = (OSError, ValueError, types.Stopped)
# Kinds of machines that a config may have values for.
MACHINES = (*dict.fromkeys(kind for _, kind in _KINDS), "cpu")


def launch(environ: Mapping[str, str], tpu: bool) -> dict[str, Any] | None:
  """Reads from the environment how this process was launched.

  torchrun's variables are mapped by hand; SLURM and TPU pods are left to jax,
  which asks for no arguments there.

  Args:
    environ: the environment variables.
    tpu: whether this host has TPU chips that jax may use.

  Returns:
    The arguments of `jax.distributed.initialize`, or None for one process.

  Raises:
    ValueError: some of torchrun's variables are set and others are not.
  """
  if "RANK" in environ or "WORLD_SIZE" in environ:
    missing = [name for name in _TORCHRUN if name not in environ]
    if missing:
      raise ValueError(
        f"{', '.join(missing)} not set, although RANK or WORLD_SIZE is. Set "
        "all of MASTER_ADDR, WORLD_SIZE and RANK for several processes, none "
        "for one."
      )
    if int(environ["WORLD_SIZE"]) == 1:
      return None
    # torchrun's own store listens on MASTER_PORT.
    port = int(environ.get("MASTER_PORT", "29500")) + 1
    arguments: dict[str, Any] = dict(
      coordinator_address=f"{environ['MASTER_ADDR']}:{port}",
      num_processes=int(environ["WORLD_SIZE"]),
      process_id=int(environ["RANK"]),
    )
    if int(environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
      arguments["local_device_ids"] = [int(environ["LOCAL_RANK"])]
    return arguments
  # A batch script has SLURM_NTASKS too; only what srun started has a step.
  if int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
    return {}
  if tpu:
    # Unset on a plain TPU VM, where jax asks the metadata server.
    names = environ.get("TPU_WORKER_HOSTNAMES")
    several = names is None or "," in names
    return {} if several or "MEGASCALE_NUM_SLICES" in environ else None
  return None


def initialize() -> None:
  """Joins the other processes, if there are any; before any use of jax."""
  if jax.distributed.is_initialized():
    return
  arguments = launch(os.environ, _has_tpu())
  if arguments is not None:
    jax.distributed.initialize(**arguments, shutdown_timeout_seconds=_PATIENCE)


def _has_tpu() -> bool:
  """Whether jax may use TPU chips here, without waking them."""
  platforms = os.environ.get("JAX_PLATFORMS", "tpu").split(",")
  return (
    "tpu" in platforms
    and importlib.util.find_spec("libtpu") is not None
    and bool(glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*"))
  )


def index() -> int:
  """This process's number, from 0."""
  return jax.process_index()


def count() -> int:
  """How many processes there are."""
  return jax.process_count()


def is_own(device: jax.Device) -> bool:
  """Whether this process drives a device."""
  return device.process_index == index()


def is_lead() -> bool:
  """Whether this process writes the run's files."""
  return index() == 0


def machine_kind(platform: str, device_kind: str) -> str:
  """Names the kind of a machine, one of `MACHINES` where it is known.

  Args:
    platform: of a device: "tpu", "gpu", "cpu".
    device_kind: as a device names itself, such as "TPU v5 lite".

  Returns:
    "v5e", for that one; the platform where nothing more is known.
  """
  fitting = (kind for mark, kind in _KINDS if mark in device_kind)
  return next(fitting, platform)


def machine() -> str:
  """The kind of this machine; after `initialize`."""
  device = jax.devices()[0]
  return machine_kind(device.platform, device.device_kind)


def first_host(devices: Sequence[jax.Device]) -> list[jax.Device]:
  """Those that are on the first one's host."""
  return [d for d in devices if d.process_index == devices[0].process_index]


def host_cpu() -> jax.Device:
  """The host's own CPU device; the first of all would be the lead's."""
  return jax.local_devices(backend="cpu")[0]


def share(items: Sequence[Any]) -> list[Any]:
  """This process's contiguous part; sizes differ by one at most.

  `gather(share(items)) == list(items)` on every process.
  """
  return list(items[_bound(index(), items) : _bound(index() + 1, items)])


def _bound(part: int, items: Sequence[Any]) -> int:
  return len(items) * part // count()


def gather(rows: Sequence[Any]) -> list[Any]:
  """Concatenates all processes' host records, in the order of processes.

  A collective: every process must call it, with as many rows as it likes.

  Args:
    rows: anything that pickles.
  """
  if count() == 1:
    return list(rows)
  payload = np.frombuffer(pickle.dumps(list(rows)), np.uint8)
  # Every process has to bring the same shape: exchange sizes first. The
  # process's number travels along, since devices need not be sorted by it.
  header = np.array([index(), payload.size], np.int32)
  headers = multihost_utils.process_allgather(header)
  padded = np.zeros(headers[:, 1].max(), np.uint8)
  padded[: payload.size] = payload
  payloads = multihost_utils.process_allgather(padded)
  gathered = []
  for row in np.argsort(headers[:, 0]):
    gathered += pickle.loads(payloads[row, : headers[row, 1]].tobytes())
  return gathered


def from_lead(compute: Callable[[], Any]) -> Any:
  """Computes something on the lead alone; every process gets its value.

  A collective: for what costs money or comes from outside, which is asked for
  once, and for a folder that the lead writes. What the lead refuses, all
  refuse: one that went on would wait for ever.

  Args:
    compute: without arguments; its value pickles.

  Raises:
    OSError, ValueError, types.Stopped: `compute` raised it on the lead.
  """
  value, fault = gather([_tried(compute)] if is_lead() else [])[0]
  if fault is not None:
    raise fault
  return value


def by_all(compute: Callable[[], Any]) -> Any:
  """Computes something on every process, for itself.

  A collective: for what one host may lack and another have, such as an asset
  or a key. What one refuses, all refuse.

  Args:
    compute: without arguments.

  Raises:
    OSError, ValueError, types.Stopped: `compute` raised it on some process.
  """
  value, fault = _tried(compute)
  for found in gather([fault]):
    if found is not None:
      raise found
  return value


def _tried(compute: Callable[[], Any]) -> tuple[Any, Exception | None]:
  """Returns a value, or the refusal in its place."""
  try:
    return compute(), None
  except _REFUSALS as error:
    return None, error


def place(tree: Any, sharding: NamedSharding) -> Any:
  """Puts arrays of the host onto the devices of all processes.

  Args:
    tree: arrays that every process holds, whole and alike.
    sharding: of each of them. A process reads what its own devices hold.
  """

  def put(x: Any) -> jax.Array:
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)

  return jax.tree.map(put, tree)


def whole(array: jax.Array) -> np.ndarray:
  """Returns an array of all devices on every host: a collective."""
  if array.is_fully_addressable or array.is_fully_replicated:
    return np.asarray(array)
  return multihost_utils.process_allgather(array, tiled=True)


def onto_host_mesh(
  function: Callable[[Any], Any], shardings: Any
) -> Callable[[Any], Any]:
  """Jits a function of global arrays whose result every host needs whole.

  Args:
    function: of a tree on the devices of all processes; jitted once.
    shardings: of the result, on a mesh of this process's devices.

  Returns:
    A collective function: the same result, on each process's own mesh.
  """
  mesh = jax.tree.leaves(shardings)[0].mesh
  over_all = mesh if count() == 1 else _all_hosts(mesh)
  placed = jax.tree.map(lambda s: NamedSharding(over_all, s.spec), shardings)
  at_once = jax.jit(function, out_shardings=placed)
  in_place = jax.jit(function)

  def local(x: Any, sharding: NamedSharding) -> Any:
    held = {shard.device: shard.data for shard in x.addressable_shards}
    arrays = [held[device] for device in _order(mesh)]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, arrays)

  def run(tree: Any) -> Any:
    source = getattr(jax.tree.leaves(tree)[0].sharding, "mesh", None)
    # One program cannot mix orders of devices, and a mesh may have its own.
    if source is not None and _order(source) == _order(over_all):
      result = at_once(tree)
    else:
      result = jax.device_put(in_place(tree), placed)
    if over_all is mesh:
      return result
    return jax.tree.map(local, result, shardings)

  return run


def _order(mesh: Mesh) -> list[jax.Device]:
  return list(mesh.devices.flat)


def _all_hosts(mesh: Mesh) -> Mesh:
  """This process's mesh, once for each process, along an axis "host"."""
  everyone = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
  here = sorted(jax.local_devices(), key=lambda d: d.id)
  order = [here.index(device) for device in _order(mesh)]
  grid = np.array(everyone).reshape(count(), len(here))[:, order]
  return Mesh(
    grid.reshape(count(), *mesh.devices.shape),
    ("host", *mesh.axis_names),
    axis_types=(AxisType.Auto,) * (1 + mesh.devices.ndim),
  )
