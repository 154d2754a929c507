"""Two processes of four devices each do what one process of eight does."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import types as namespaces
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

from sesa_jax import distributed, metrics, rollout
from sesa_jax.engine import engine as engine_lib
from sesa_jax.policy import sharding
from tests import test_learner as one
from tests import test_packing as exact

ROOT = Path(__file__).parents[1]
VALUES = ("loss", "grad_norm", "kl/mean", "logprob_gap/max", "tokens")


def flat(tree):
  return np.concatenate(
    [np.ravel(distributed.whole(leaf)) for leaf in jax.tree.leaves(tree)]
  )


def updates(own):
  """A first update, and two minibatches more, of a policy on all devices.

  Returns:
    The policy, and what is compared: gradients, weights, metrics.
  """
  params, reference = (one.draw(jax.random.key(seed)) for seed in (0, 1))
  params = jax.tree.map(
    lambda leaf: leaf * (5.0 if leaf.ndim > 2 else 1), params
  )
  learner = one.make(fsdp=4, tensor=2)
  place = learner.programs.policy.params
  params, reference = (
    jax.tree.map(
      lambda leaf, where: distributed.place(np.asarray(leaf), where), x, place
    )
    for x in (params, reference)
  )
  gathered = distributed.gather(own)
  policy, metrics = learner.update(
    learner.init(params), reference, gathered, temperature=0.8
  )
  # Adam's first moment, as its clip left it.
  scale = metrics["grad_norm"] / 0.01 / (1 - 0.9)
  found = dict(
    gradient=flat(policy.opt_state.adam[0].mu) * scale,
    weights=flat(policy.params),
    metrics=np.array([metrics[name] for name in VALUES]),
  )
  two = one.make(fsdp=4, tensor=2, minibatch_questions=2)
  policy, _ = two.update(policy, reference, gathered, temperature=0.8)
  return two, policy, found | dict(weights_later=flat(policy.params))


def taught():
  return one.lessons(lengths=range(5, 31))


def slope():
  """The gradient in float64, of lessons that the processes share."""
  with jax.enable_x64(True):
    start = [one.draw(jax.random.key(seed)) for seed in range(3)]
    start = jax.tree.map(lambda x: x * (3 if x.ndim > 2 else 1), start)
    return exact.slope(
      start, "grpo", "float64", packed=True, rows=4, mesh=(4, 2)
    )


def copies(learner, policy):
  """Whether this host's rollout weights are the masters, and act as them."""
  engine = engine_lib.Engine(
    one.GRAPHDEF,
    one.BACKBONE,
    namespaces.SimpleNamespace(decode=lambda ids: ""),
    [b"a"] * one.BACKBONE.vocab_size,
    [0],
    slots=4,
    length=96,
    prefill_chunk=16,
    steps_per_dispatch=4,
    deterministic=True,
    dtype=np.float32,
    seed=0,
    mesh=sharding.rollout_mesh(2),
  )
  copy, gap = rollout.weights(engine, learner, policy.params)
  masters = jax.tree.map(distributed.whole, policy.params)
  equal = (
    np.array_equal(np.asarray(leaf), wanted[number])
    for number, layer in enumerate(copy["layers"])
    for leaf, wanted in zip(
      jax.tree.leaves(layer), jax.tree.leaves(masters["layers"]), strict=True
    )
  )
  table = np.asarray(copy["embed"]["embedding"])[: one.BACKBONE.vocab_size]
  local = {d for leaf in jax.tree.leaves(copy) for d in leaf.devices()}
  return dict(
    copied=all(equal)
    and np.array_equal(table, masters["embed"]["embedding"])
    and np.array_equal(copy["norm"]["scale"], masters["norm"]["scale"]),
    local=local == set(jax.local_devices()),
    gap=gap,
  )


def main(folder):
  """One of the processes."""
  distributed.initialize()
  lead, everything = distributed.is_lead(), taught()
  learner, policy, found = updates(everything[:6] if lead else everything[6:])
  one_sided = updates(everything if lead else [])[-1]
  gradient, means = slope()
  np.savez(
    f"{folder}/{distributed.index()}.npz",
    **found,
    **{f"one_sided_{name}": value for name, value in one_sided.items()},
    **copies(learner, policy),
    exact=gradient,
    means=means,
  )


@pytest.fixture(scope="module")
def said(tmp_path_factory):
  """What each of two processes found."""
  folder = tmp_path_factory.mktemp("processes")
  run([sys.executable, "-m", "tests.test_processes", folder])
  return [np.load(folder / f"{rank}.npz") for rank in range(2)]


def run(command, devices=4, timeout=240, fails=False):
  """Runs a command in two processes, which know each other.

  Returns:
    Of each its exit code and what it said.
  """
  with socket.socket() as sock:
    sock.bind(("localhost", 0))
    port = sock.getsockname()[1]
  flags = os.environ["XLA_FLAGS"]
  count = f" --xla_force_host_platform_device_count={devices}"
  processes = [
    subprocess.Popen(
      list(map(str, command)),
      env=os.environ
      | {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port - 1),
        "WORLD_SIZE": "2",
        "RANK": str(rank),
        "XLA_FLAGS": flags + count,
      },
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      cwd=ROOT,
    )
    for rank in range(2)
  ]
  try:
    outs = [process.communicate(timeout=timeout)[0] for process in processes]
  finally:
    for process in processes:
      process.kill()
  codes = [process.returncode for process in processes]
  assert fails or codes == [0, 0], "\n".join(outs)
  return list(zip(codes, outs, strict=True))


def apart(got, wanted):
  return np.linalg.norm(got - wanted) / np.linalg.norm(wanted)


@pytest.mark.slow
def test_gradients_and_weights_are_those_of_one_process(said):
  *_, wanted = updates(taught())
  gradient, means = slope()
  for found in said:
    for name in ("gradient", "weights", "weights_later", "metrics"):
      assert apart(found[name], wanted[name]) <= 1e-5, name
    assert apart(found["exact"], gradient) <= 1e-9
    assert apart(found["means"], means) <= 1e-9
  for name in ("weights", "weights_later"):
    np.testing.assert_array_equal(said[0][name], said[1][name])


@pytest.mark.slow
def test_all_episodes_may_be_of_one_process(said):
  for found in said:
    for name in ("gradient", "weights", "weights_later", "metrics"):
      np.testing.assert_array_equal(found[name], found[f"one_sided_{name}"])


@pytest.mark.slow
def test_a_hosts_rollout_weights_are_the_masters(said):
  for found in said:
    assert found["copied"]
    assert found["local"]
    assert found["gap"] < 1e-5
  assert said[0]["gap"] == said[1]["gap"]


TIMED = ("seconds", "tokens_per_second", "matmul_share")
RUN = [
  *("--config=configs/tiny.py", "--config.solver.turn_tokens=160"),
  *("--config.challenger.turn_tokens=160", "--config.mesh.fsdp=0"),
  *("--config.mesh.tensor=2", "--config.pool.fixed.tiny_pool.size=2"),
  *("--config.eval.sets.tiny_eval.size=2", "--config.engine.slots=8"),
]


def driven(folder, iterations):
  """The command that trains by the script."""
  return [
    *(sys.executable, "-m", "tests.driver", "never", *RUN),
    *(f"--workdir={folder}", f"--config.iterations={iterations}"),
  ]


def comparable(value):
  """What does not depend on time."""
  if isinstance(value, list):
    return [comparable(x) for x in value]
  if isinstance(value, dict):
    return {
      k: comparable(x)
      for k, x in value.items()
      if not any(x in k for x in TIMED)
    }
  return value


def near(value):
  """Numbers of the policies, which other devices compute."""
  if isinstance(value, list):
    return [near(x) for x in value]
  if isinstance(value, dict):
    return {k: near(x) for k, x in value.items()}
  return pytest.approx(value, rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_a_run_of_two_processes_is_the_run_of_one(tmp_path):
  """Also where it was stopped and goes on: bank, metrics, scores, episodes."""
  for iterations in (1, 2):
    run(driven(tmp_path / "two", iterations))
  done = subprocess.run(
    driven(tmp_path / "one", 2),
    capture_output=True,
    text=True,
    cwd=ROOT,
    timeout=240,
  )
  assert done.returncode == 0, done.stderr
  one, two = (metrics.RunFolder(tmp_path / name) for name in ("one", "two"))
  for name in ("skills.jsonl", "skills_history.jsonl", "failures.jsonl"):
    assert (one.path / name).read_bytes() == (two.path / name).read_bytes()
  assert two.read("questions.jsonl") == one.read("questions.jsonl")
  rows = [comparable(folder.read("metrics.jsonl")) for folder in (one, two)]
  assert rows[1] == near(rows[0])
  assert sum(row["distillation/admitted"] for row in rows[0]) > 0
  cells = [
    comparable(folder.read_json("eval.json", [])) for folder in (one, two)
  ]
  assert {cell["iteration"] for cell in cells[0]} == {0, 2}
  # The one that was lengthened was also evaluated at its first end.
  assert cells[0] == [cell for cell in cells[1] if cell["iteration"] != 1]
  played = [
    [
      (row["request_id"], row["attempt"], row["ids"], row["verdict"])
      for file in metrics.episode_files(folder.path)
      for row in metrics.read_episodes(file)
    ]
    for folder in (one, two)
  ]
  assert played[0] == played[1]


@pytest.mark.slow
def test_two_processes_tune_as_one_does(tmp_path):
  """Also where they were stopped and go on."""
  rows = [
    {"id": str(n), "segments": [{"text": "2 + 2 = ", "own": False}]}
    for n in range(40)
  ]
  for n, row in enumerate(rows):
    row["segments"].append({"text": f"{n % 3} {'so ' * (n % 5)}", "own": True})
  data = tmp_path / "episodes.jsonl"
  data.write_text("\n".join(map(json.dumps, rows)))
  command = [
    *(sys.executable, "-m", "sesa_jax.main", "--mode=sft"),
    *("--config=configs/tiny.py", "--config.mesh.fsdp=0"),
    *("--config.mesh.tensor=2", "--config.sft.batch_tokens=512"),
    *("--config.learner.row_multiple=64", "--config.sft.steps=8"),
    *("--config.learner.microbatch_rows=4", "--config.sft.log_every=1"),
    *("--config.sft.validation=0.2", "--config.sft.learning_rate=0.003"),
    *("--config.sft.checkpoint_every=4", f"--episodes={data}"),
  ]

  def tune(name, *more):
    place = tmp_path / name
    return [*command, f"--workdir={place}", f"--out={place / 'out'}", *more]

  run(tune("two"))
  shutil.copytree(tmp_path / "two", tmp_path / "again")
  shutil.rmtree(tmp_path / "again/out")
  shutil.rmtree(tmp_path / "again/checkpoints/8")
  run(tune("again"))
  done = subprocess.run(
    tune("one"), capture_output=True, text=True, cwd=ROOT, timeout=240
  )
  assert done.returncode == 0, done.stderr
  one, two, again = (
    safetensors.numpy.load_file(tmp_path / name / "out/model.safetensors")
    for name in ("one", "two", "again")
  )
  before = metrics.RunFolder(tmp_path / "one").read("metrics.jsonl")
  after = metrics.RunFolder(tmp_path / "two").read("metrics.jsonl")
  assert comparable(after) == near(comparable(before))
  assert before[-1]["validation/loss"] < 0.9 * before[0]["loss"]
  for name, wanted in one.items():
    assert apart(two[name], wanted) < 1e-4, name
    np.testing.assert_array_equal(again[name], two[name])


@pytest.mark.slow
def test_two_processes_mine_together(tmp_path):
  """The lead alone writes skills and tells of them; none finds them there."""
  mode = "--mode=mine", "--config.mine.iterations=1"
  said = run([*driven(tmp_path, 9), *mode])
  assert [out.count("skills from") for _, out in said] == [1, 0]
  rows = (tmp_path / "mined.jsonl").read_text("utf-8").splitlines()
  origins = {json.loads(row)["origin"] for row in rows}
  assert origins == {"seed", "mined"}


@pytest.mark.slow
def test_a_file_that_the_lead_cannot_write_ends_all(tmp_path):
  (tmp_path / "config.json.tmp").mkdir()
  began = time.monotonic()
  for code, said in run(driven(tmp_path, 1), fails=True):
    assert code == 2
    assert "error: Is a directory: " in said
    assert "Traceback" not in said
  assert time.monotonic() - began < 120  # of which most is the start


@pytest.mark.slow
def test_what_the_lead_refuses_all_refuse(tmp_path):
  (tmp_path / "config.json").write_text('{"seed": 5}')
  for code, said in run(driven(tmp_path, 1), fails=True):
    assert code == 2
    assert "error: " in said
    assert "is the run of another config" in said


if __name__ == "__main__":
  main(sys.argv[1])
