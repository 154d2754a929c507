"""The microworld's commands, cut short: the warm start, then the main job."""

import pytest

from sesa_jax import main, metrics, worlds

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


def run(*flags):
  return main.main(["main", *flags])


def test_warm_start_then_main_job(tmp_path, monkeypatch, capsys):
  monkeypatch.setenv("SESA_JAX_ASSETS", str(tmp_path / "assets"))
  monkeypatch.setattr(worlds, "EPISODES", 60)
  config = "--config=configs/microworld.py"
  play = (config, "--config.seed=5", f"--workdir={tmp_path / 'run'}", *FEW)
  assert run(*play) == 2
  assert (
    "its policy is what --mode=sft makes" in capsys.readouterr().err.lower()
  )
  assert (
    run(
      "--mode=sft",
      f"{config}:warm_start",
      "--config.seed=5",
      f"--workdir={tmp_path / 'warm'}",
      "--config.sft.steps=3",
    )
    == 0
  )
  assert run(*play) == 0
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
  assert run(*play[:1], "--config.seed=6", f"--workdir={tmp_path / 'b'}") == 2
