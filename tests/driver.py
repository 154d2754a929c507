"""Runs the main job with a scripted policy, and kills it where it is told to.

    python tests/driver.py KILL flags...

KILL is "never" or PLACE:N: the process kills itself with SIGKILL when it
comes to PLACE for the N-th time (from 1).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

from sesa_jax import metrics
from tests import scripted

PLACES = {
  "rollout": ("sesa_jax.stages.selfplay", "solve"),
  "update": ("sesa_jax.loop", "_update"),
  "distillation": ("sesa_jax.stages.distillation", "land"),
  "writing": ("sesa_jax.state", "save"),
  "sft": ("sesa_jax.sft", "_save"),
  "checkpoint": ("sesa_jax.checkpoint", "_tree_saves"),
}


def scripted_engine(
  graphdef, backbone, tokenizer, token_bytes, end_ids, **settings
):
  return scripted.ScriptedEngine(graphdef, tokenizer, scripted.world_script)


@contextlib.contextmanager
def playing_the_script():
  """Puts the scripted policy in the place of the engine."""
  from sesa_jax.engine import engine

  real, engine.Engine = engine.Engine, scripted_engine
  try:
    yield
  finally:
    engine.Engine = real


def rows_of(folder: metrics.RunFolder, arm: str) -> list[dict]:
  """Returns the episodes of an arm, in the order in which they ended."""
  return [
    row
    for path in metrics.episode_files(folder.path)
    for row in metrics.read_episodes(path)
    if row["arm"] == arm
  ]


def kill_at(place: str, count: int) -> None:
  module, name = PLACES[place]
  target = __import__(module, fromlist=[name])
  real = getattr(target, name)
  calls = 0

  def wrapped(*args, **kwargs):
    nonlocal calls
    calls += 1
    if calls == count:
      os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **kwargs)

  setattr(target, name, wrapped)


def main(argv: list[str]) -> int:
  from sesa_jax import main as main_lib

  kill, *flags = argv
  with playing_the_script():
    if kill != "never":
      place, count = kill.split(":")
      kill_at(place, int(count))
    return main_lib.main([sys.argv[0], *flags])


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
