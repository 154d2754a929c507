"""The self-test passes here, and fails where something is wrong."""

import dataclasses

import jax
import pytest
import rich.console

from sesa_jax import selftest
from sesa_jax.engine import engine as engine_lib


@pytest.mark.slow
def test_it_passes_on_this_machine(capsys):
  console = rich.console.Console(width=120)
  assert selftest.main(console) == 0
  said = capsys.readouterr().out
  assert "8 x cpu" in said
  for mesh in ("8 x 1", "2 x 4", "1 x 8"):
    assert f"engine on {mesh} devices" in said
  assert "FAILED" not in said


def test_a_check_that_fails_is_named_and_is_the_exit_code(monkeypatch, capsys):
  checks = [
    selftest.Check("right", 0.1, 0.1),
    selftest.Check("too far", 0.2, 0.1),
    selftest.Check("no number", float("nan"), 1.0),
  ]
  monkeypatch.setattr(selftest, "run", lambda devices: iter(checks))
  assert selftest.main(rich.console.Console(width=120)) == 1
  said = capsys.readouterr().out
  assert "2 of 3 failed: too far; no number." in said


@pytest.mark.slow
def test_an_engine_with_other_weights_fails(monkeypatch):
  load = engine_lib.Engine.load

  def stale(self, params):
    return load(self, jax.tree.map(lambda x: x * 1.01, params))

  monkeypatch.setattr(engine_lib.Engine, "load", stale)
  found = {
    check.name: check.passed for check in selftest.run(jax.devices()[:1])
  }
  assert not found["engine on 1 x 1 devices (xla): mean gap to a plain forward"]
  assert not found["learner (blocks): mean gap to the engine"]
  assert found["engine on 1 x 1 devices (xla): two runs differ in episodes"]


def test_the_splits_cut_no_head():
  backbone = selftest._backbone(cpu=False)
  assert selftest._splits(backbone, 8) == [1, 4, 8]
  assert selftest._splits(backbone, 1) == [1]
  odd = dataclasses.replace(backbone, heads=12, kv_heads=6)
  assert selftest._splits(odd, 4) == [1, 2]
