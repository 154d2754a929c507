"""One process here; two over Gloo in subprocesses."""

import json
import os
import socket
import subprocess
import sys

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sesa_jax import distributed

TORCHRUN = {"MASTER_ADDR": "10.0.0.1", "WORLD_SIZE": "4", "RANK": "2"}


def test_one_process_is_a_no_op():
  distributed.initialize()
  assert not jax.distributed.is_initialized()
  assert (distributed.index(), distributed.count()) == (0, 1)
  assert distributed.is_lead()
  assert distributed.gather([{"a": 1}, 2]) == [{"a": 1}, 2]
  assert distributed.by_all(lambda: 3) == 3
  assert distributed.host_cpu().platform == "cpu"


def test_launch_maps_torchrun_variables():
  assert distributed.launch(TORCHRUN | {"MASTER_PORT": "1234"}, False) == {
    "coordinator_address": "10.0.0.1:1235",
    "num_processes": 4,
    "process_id": 2,
  }
  one_a_gpu = TORCHRUN | {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}
  launched = distributed.launch(one_a_gpu, False)
  assert launched["local_device_ids"] == [1]


def test_launch_needs_all_of_torchrun():
  with pytest.raises(ValueError, match="MASTER_ADDR, RANK not set"):
    distributed.launch({"WORLD_SIZE": "2"}, False)


@pytest.mark.parametrize(
  ("environ", "tpu", "several"),
  [
    ({}, False, False),
    (TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}, False, False),
    ({"SLURM_NTASKS": "2"}, False, False),  # a batch script, not its steps
    ({"SLURM_STEP_NUM_TASKS": "1"}, False, False),
    ({"SLURM_STEP_NUM_TASKS": "2"}, False, True),
    ({"TPU_WORKER_HOSTNAMES": "a,b"}, True, True),
    ({"TPU_WORKER_HOSTNAMES": "a,b"}, False, False),  # JAX_PLATFORMS=cpu
    ({"TPU_WORKER_HOSTNAMES": "a"}, True, False),
    ({"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, True, True),
    ({}, True, True),  # the metadata server knows
  ],
)
def test_launch_leaves_clusters_to_jax(environ, tpu, several):
  assert distributed.launch(environ, tpu) == ({} if several else None)


@pytest.mark.parametrize(
  ("platform", "device_kind", "kind"),
  [
    ("tpu", "TPU v5 lite", "v5e"),
    ("tpu", "TPU v5", "v5p"),
    ("tpu", "TPU v5p", "v5p"),
    ("tpu", "TPU v6 lite", "v6e"),
    ("gpu", "NVIDIA A100-SXM4-80GB", "a100"),
    ("gpu", "NVIDIA H100 80GB HBM3", "h100"),
    ("gpu", "NVIDIA H200", "h100"),
    ("cpu", "cpu", "cpu"),
    ("gpu", "NVIDIA L4", "gpu"),
    ("tpu", "TPU v4", "tpu"),
  ],
)
def test_machines_are_known_by_their_devices(platform, device_kind, kind):
  assert distributed.machine_kind(platform, device_kind) == kind


def test_this_machine_is_a_cpu():
  assert distributed.machine() == "cpu"
  assert distributed.MACHINES == ("v5e", "v5p", "v6e", "a100", "h100", "cpu")


@given(st.lists(st.integers(), max_size=30), st.integers(1, 7))
def test_shares_are_a_partition_in_order(items, count):
  parts = []
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax, "process_count", lambda: count)
    for process in range(count):
      patch.setattr(jax, "process_index", lambda process=process: process)
      parts.append(distributed.share(items))
  assert [item for part in parts for item in part] == items
  sizes = [len(part) for part in parts]
  assert max(sizes) - min(sizes) <= 1


PROGRAM = """
import json
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from sesa_jax import distributed, types
distributed.initialize()
distributed.initialize()
me = distributed.index()
mine = [{"process": me, "text": "\\u00e9" * me * 500}] * (1 + 2 * me)
gathered = distributed.gather(mine)
led = distributed.from_lead(lambda: [me, 1 // (me == 0)])
none = distributed.gather([] if me else [np.float32(0.1), types.Verdict.RIGHT])

def outcome(collective, error, *who):
  def compute():
    if me in who:
      raise error
    return me
  try:
    return collective(compute)
  except (OSError, ValueError, types.Stopped) as error:
    return repr(error)

full = OSError(28, "No space left on device", "folder/file")
bad = ValueError("bad")
refused = [
  outcome(distributed.from_lead, full, 0),
  outcome(distributed.from_lead, types.Stopped("spent"), 0),
  outcome(distributed.from_lead, bad, 1),
  outcome(distributed.by_all, full, 1),
  outcome(distributed.by_all, bad, 0, 1),
  outcome(distributed.by_all, bad),
]

def on(devices, shape, names, *spec):
  grid, auto = np.reshape(devices, shape), (AxisType.Auto,) * len(shape)
  mesh = Mesh(grid, names, axis_types=auto)
  return NamedSharding(mesh, PartitionSpec(*spec))

values = np.arange(32.0).reshape(4, 8)
here = jax.local_devices()[::-1]
own = on(here, (1, 2), ("data", "tensor"), None, "tensor")
double = distributed.onto_host_mesh(lambda tree: [2 * tree[0]], [own])
copies = []
for devices in (sorted(jax.devices(), key=lambda d: (d.process_index, -d.id)),
                jax.devices()[::-1]):
  spread = on(devices, (2, 2), ("fsdp", "tensor"), "fsdp", "tensor")
  x = jax.make_array_from_callback(values.shape, spread, lambda i: values[i])
  (copy,) = double([x])
  copies.append([copy.sharding == own, bool((copy == 2 * values).all())])
print("SAID", json.dumps(dict(
  index=me, count=distributed.count(), lead=distributed.is_lead(),
  processes=[row["process"] for row in gathered],
  lengths=[len(row["text"]) for row in gathered],
  whole=distributed.gather(distributed.share(list(range(5)))),
  none=[repr(x) for x in none], led=led, refused=refused,
  cpu=distributed.host_cpu().process_index, copies=copies,
)))
"""


def test_two_processes_over_gloo():
  with socket.socket() as sock:
    sock.bind(("localhost", 0))
    port = sock.getsockname()[1]
  processes = []
  for rank in range(2):
    environ = os.environ | {
      "MASTER_ADDR": "localhost",
      "MASTER_PORT": str(port - 1),
      "WORLD_SIZE": "2",
      "RANK": str(rank),
      "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    process = subprocess.Popen(
      [sys.executable, "-c", PROGRAM],
      env=environ,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    processes.append(process)
  try:
    outs = [process.communicate(timeout=120) for process in processes]
  finally:
    for process in processes:
      process.kill()
  said = []
  for out, err in outs:
    lines = [line for line in out.splitlines() if line.startswith("SAID")]
    assert lines, err
    said.append(json.loads(lines[0].removeprefix("SAID")))
  for me, one in enumerate(said):
    assert (one["index"], one["count"], one["cpu"]) == (me, 2, me)
    assert one["lead"] == (me == 0)
    assert one["processes"] == [0, 1, 1, 1]
    assert one["lengths"] == [0, 500, 500, 500]
    assert one["whole"] == [0, 1, 2, 3, 4]
    assert one["none"] == ["np.float32(0.1)", "<Verdict.RIGHT: 'right'>"]
    assert one["led"] == [0, 1]  # the other process did not even compute it
    # What one refuses all do; only what the lead computes is the lead's.
    full = "OSError(28, 'No space left on device')"
    assert one["refused"] == [
      *(full, "Stopped('spent')", 0),
      *(full, "ValueError('bad')", me),
    ]
    # In the order of the rollout's mesh, and in another.
    assert one["copies"] == [[True, True], [True, True]]
