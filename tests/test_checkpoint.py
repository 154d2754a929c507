import logging as std_logging
import os
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl import logging
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sesa_jax import checkpoint
from sesa_jax.checkpoint import Checkpoints
from sesa_jax.types import Policy

HOST = {"queue": [{"id": "q\u00e9", "rate": 0.1}], "pool": {}, "seeds": 7}
ARRAYS = {
  "bank": {
    "embeddings": np.random.default_rng(0).normal(size=(3, 4)).astype("f4"),
    "alive": np.array([True, False, True]),
    "shown": np.array([1, 2**62], np.int64),
    "ids": np.array(["s1", "s\u00e9"]),
    "none": np.zeros((0, 4), np.float32),
  },
  "other": {},
}
FILES = {"metrics.jsonl": 12, "episodes/iteration_00000.jsonl.zst": 3}


def make_policy(seed, sharding=None):
  params = {
    "w": jax.random.normal(jax.random.key(seed), (8, 16)),
    "layers": [jnp.arange(3, dtype=jnp.bfloat16) / 3, jnp.zeros((2, 3))],
  }
  if sharding is not None:
    params["w"] = jax.device_put(params["w"], sharding)
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
  return Policy(params, optimizer.init(params), jnp.int32(seed))


def make_trees(sharding=None):
  return {
    "solver": make_policy(1, sharding),
    "challenger": make_policy(2, sharding),
  }


def abstract(tree, sharding=None):
  def leaf(x):
    place = sharding if sharding is not None and x.ndim == 2 else x.sharding
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

  return jax.tree.map(leaf, tree)


def save(checkpoints, step, **more):
  record = dict(trees=make_trees(), host=HOST, arrays=ARRAYS, files=FILES)
  checkpoints.save(step, **record | more)


@pytest.fixture
def checkpoints(tmp_path):
  checkpoints = Checkpoints(tmp_path / "checkpoints", milestone_every=2)
  yield checkpoints
  checkpoints.close()


def test_round_trip_is_exact(checkpoints):
  trees = make_trees()
  save(checkpoints, 1)
  got, host, arrays, files = checkpoints.restore(1, abstract(trees))
  assert jax.tree.structure(got) == jax.tree.structure(trees)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(trees), strict=True):
    assert a.dtype == b.dtype
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
  assert host == HOST
  assert files == FILES
  assert arrays["other"] == {}
  assert arrays["bank"].keys() == ARRAYS["bank"].keys()
  for name, want in ARRAYS["bank"].items():
    have = arrays["bank"][name]
    assert (have.dtype, have.shape) == (want.dtype, want.shape)
    assert have.tobytes() == want.tobytes()


def test_restore_into_other_shardings(checkpoints):
  auto = (jax.sharding.AxisType.Auto,) * 2
  wide = jax.make_mesh((8, 1), ("fsdp", "tensor"), axis_types=auto)
  square = jax.make_mesh((2, 4), ("fsdp", "tensor"), axis_types=auto)
  trees = make_trees(NamedSharding(wide, P("fsdp", "tensor")))
  save(checkpoints, 1, trees=trees)
  want = NamedSharding(square, P("fsdp", "tensor"))
  only_w = {"solver": abstract(make_policy(1))}
  params = only_w["solver"].params
  params["w"] = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=want)
  got = checkpoints.restore(1, only_w)[0]
  assert list(got) == ["solver"]
  w = got["solver"].params["w"]
  assert w.sharding.is_equivalent_to(want, 2)
  assert w.addressable_shards[0].data.shape == (4, 4)
  np.testing.assert_array_equal(w, make_policy(1).params["w"])


def test_the_newest_two_stay_and_milestones_all(checkpoints):
  assert checkpoints.latest() is None
  for step in range(1, 6):
    weights = {"solver": {"w": jnp.full(3, float(step))}}
    save(checkpoints, step, milestone=weights, last=step == 5)
  assert checkpoints.steps() == [4, 5]
  assert checkpoints.latest() == 5
  assert checkpoints.milestones() == [2, 4, 5]
  like = abstract(weights)
  assert checkpoints.restore_milestone(2, like)["solver"]["w"][0] == 2.0
  # A run that was killed between milestone and checkpoint does both again.
  save(checkpoints, 6, milestone=weights)
  assert checkpoints.restore_milestone(6, like)["solver"]["w"][0] == 5.0


def test_a_missing_step_lists_those_that_exist(checkpoints):
  like = abstract(make_trees())
  with pytest.raises(ValueError, match="No checkpoint of step 3 .* none"):
    checkpoints.restore(3, like)
  save(checkpoints, 1)
  save(checkpoints, 2)
  with pytest.raises(ValueError, match=r"step 3 .* Steps there: 1, 2\."):
    checkpoints.restore(3, like)


def test_a_checkpoint_of_another_model_names_the_array(checkpoints):
  save(checkpoints, 1)
  like = abstract(make_trees())
  bigger = jax.ShapeDtypeStruct((8, 17), jnp.float32)
  like["solver"].params["w"] = bigger
  with pytest.raises(
    ValueError, match=r"solver\.params\.w has shape \(8, 16\) there and \(8, 17"
  ):
    checkpoints.restore(1, like)
  del like["solver"].params["w"]
  with pytest.raises(ValueError, match="none .it is absent. here"):
    checkpoints.restore(1, like)
  with pytest.raises(ValueError, match="reference is not in it"):
    checkpoints.restore(1, {"reference": like["challenger"]})


def test_reading_another_run_leaves_it_alone(checkpoints, tmp_path):
  save(checkpoints, 1)
  torn = tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp"
  torn.mkdir()
  other = Checkpoints(tmp_path / "checkpoints", read_only=True)
  assert other.steps() == [1]
  assert other.restore(1, abstract(make_trees()))[1] == HOST
  other.close()
  assert torn.exists()
  with pytest.raises(ValueError, match="no such folder"):
    Checkpoints(tmp_path / "nothing", read_only=True)


def test_orbax_is_quiet_and_we_are_not(checkpoints, caplog):
  before = logging.get_verbosity()
  logging.set_verbosity(logging.INFO)
  try:
    save(checkpoints, 1)
    logging.info("saved")
  finally:
    logging.set_verbosity(before)
  assert [record.message for record in caplog.records] == ["saved"]


KILLED = """
import os, signal, sys
import jax.numpy as jnp
from sesa_jax.checkpoint import Checkpoints
folder, at = sys.argv[1:]
def die(event, args):
  if event == "os.rename" and str(args[1]).endswith(at):
    os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(die)
checkpoints = Checkpoints(folder)
for step in (1, 2):
  tree = {"w": jnp.full(1000, float(step))}
  checkpoints.save(step, trees={"solver": tree, "challenger": tree},
                   host={"step": step}, arrays={}, files={})
"""


def test_kill_while_writing_leaves_the_checkpoint_before(tmp_path):
  # At the last moment before step 2 is whole, and when one tree of it is.
  moments = ("/2", "/2.orbax-checkpoint-tmp/solver")
  children = [
    subprocess.Popen(
      [sys.executable, "-c", KILLED, str(tmp_path / str(i)), moment],
      env=os.environ | {"XLA_FLAGS": ""},
    )
    for i, moment in enumerate(moments)
  ]
  for i, child in enumerate(children):
    assert child.wait(timeout=120) == -signal.SIGKILL
    folder = tmp_path / str(i)
    assert any("tmp" in p.name for p in folder.iterdir())
    checkpoints = Checkpoints(folder)
    assert checkpoints.latest() == 1
    tree = {"w": jnp.full(1000, 2.0)}
    like = {"solver": abstract(tree)}
    got, host, _, _ = checkpoints.restore(1, like)
    assert host == {"step": 1}
    assert got["solver"]["w"][-1] == 1.0
    checkpoints.save(3, trees={"solver": tree}, host={}, arrays={}, files={})
    assert checkpoints.steps() == [1, 3]
    assert checkpoints.restore(3, like)[0]["solver"]["w"][0] == 2.0
    assert not any("tmp" in p.name for p in folder.iterdir())
    checkpoints.close()


def test_that_a_checkpoint_is_only_read_is_no_news():
  """Orbax warns of it; its other warnings are shown, and all of ours."""

  def shown(message, path="orbax/manager.py"):
    level = std_logging.WARNING
    record = dict(pathname=path, levelno=level, msg=message)
    return checkpoint._not_noise(std_logging.makeLogRecord(record))

  assert not shown("Options.read_only=True, setting save_interval_steps=0.")
  assert not shown("Given directory is read only=%s")
  assert shown("The disk is full.")
  assert shown("It is read only.", "sesa_jax/state.py")
