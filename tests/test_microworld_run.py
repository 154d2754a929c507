"""The microworld's commands, cut short: the warm start, then the main job."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sesa_jax import metrics

pytestmark = pytest.mark.slow

FEW = (
  "--config.questions=2",
  "--config.iterations=2",
  "--config.solver.group_size=2",
  "--config.engine.slots=8",
  "--config.verifier.probes=0",
  "--config.distillation.every=1",
  *(
    f"--config.eval.sets.{name}.size=3"
    for name in ("taught_1", "taught_2", "held_out_1", "held_out_2")
  ),
)


# The command line, in a world of few scripted episodes.
PROGRAM = (
  "import runpy; from sesa_jax import worlds; worlds.EPISODES = 60;"
  "runpy.run_module('sesa_jax.main', run_name='__main__', alter_sys=True)"
)


def test_warm_start_then_main_job(tmp_path):
  env = os.environ | {"SESA_JAX_ASSETS": str(tmp_path / "assets")}

  def run(*flags):
    return subprocess.run(
      [sys.executable, "-c", PROGRAM, *flags],
      cwd=Path(__file__).parents[1],
      env=env,
      capture_output=True,
      text=True,
    )

  config = "--config=configs/microworld.py"
  play = (config, "--config.seed=5", f"--workdir={tmp_path / 'run'}", *FEW)
  refused = run(*play)
  assert refused.returncode == 2
  assert "its policy is what --mode=sft makes" in refused.stderr.lower()
  for command in (
    (
      "--mode=sft",
      f"{config}:warm_start",
      "--config.seed=5",
      f"--workdir={tmp_path / 'warm'}",
      "--config.sft.steps=120",  # enough to write whole turns
      "--config.sft.batch_tokens=576",
    ),
    play,
  ):
    done = run(*command)
    assert done.returncode == 0, done.stderr
  folder = metrics.RunFolder(tmp_path / "run", writes=False)
  assert [row["iteration"] for row in folder.read("metrics.jsonl")] == [1, 2]
  cells = folder.read_json("eval.json", [])
  assert {(c["iteration"], c["bank"]) for c in cells} == {
    (n, bank) for n in (0, 2) for bank in ("none", "final")
  }
  shown = {
    id
    for cell in cells
    for prediction in cell["predictions"]
    for id in prediction["skill_ids"]
  }
  assert shown  # of the world's own seed skills
  # Another world has no policy yet: it does not begin with this one's.
  other = run(config, "--config.seed=6", f"--workdir={tmp_path / 'b'}")
  assert other.returncode == 2
