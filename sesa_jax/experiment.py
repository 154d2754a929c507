"""An experiment: begins or resumes, iterates, evaluates, checkpoints, reports.

What an iteration is stands in `loop.py`; this is what lies around it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.console
from absl import logging

from sesa_jax import (
  checkpoint,
  distributed,
  evaluation,
  loop,
  manifest,
  metrics,
  plots,
  records,
  report,
  rollout,
  types,
)
from sesa_jax import config as config_lib
from sesa_jax import state as state_lib
from sesa_jax import tools as tools_lib


def run(
  config: Any,
  workdir: str,
  *,
  start_from: str | None = None,
  force_new: bool = False,
  command: Sequence[str] = (),
) -> None:
  """Runs an experiment from its last finished iteration to its end.

  Args:
    config: the experiment.
    workdir: its folder.
    start_from: RUN@ITERATION, whose state a new run begins with.
    force_new: go on in a folder of another config.
    command: for the manifest.

  Raises:
    ValueError: bad input, before any model is loaded.
    types.Stopped: the run had to stop and may be resumed.
  """
  distributed.initialize()
  distributed.by_all(lambda: config_lib.check(config))
  distributed.by_all(lambda: tools_lib.check_judge(config))
  values = metrics.plain(config.to_dict())
  reader = metrics.RunFolder(workdir, writes=False)  # makes no folder

  def look():  # before the lead changes anything
    changed = manifest.check_workdir(workdir, values, force_new=force_new)
    before = reader.read_json("manifest.json", {})
    if not start_from:
      return changed, before, None
    parent = before.get("parent")
    return (
      changed,
      before,
      state_lib.parent_of(start_from, reader.path, parent),
    )

  changed, before, parent = distributed.from_lead(look)
  lead = distributed.is_lead()
  texts = distributed.by_all(lambda: tools_lib.read(config, workdir))
  console = rich.console.Console(stderr=True, quiet=not lead)
  console.print(report.plan(config, texts.sets))
  world = distributed.by_all(lambda: tools_lib.assemble(config, texts, workdir))
  folder = distributed.by_all(lambda: metrics.RunFolder(workdir, writes=lead))
  with contextlib.ExitStack() as stack:
    distributed.from_lead(lambda: stack.enter_context(folder.lock()))
    cells = _go(
      config, world, folder, parent, changed, before, command, start_from
    )
  if lead:
    plots.plot_run(folder.path)
    report.print_report(config, folder, cells)


def _go(
  config, world, folder, parent, changed, before, command, start_from
) -> list[dict[str, Any]]:
  """Begins or resumes, and runs to the end; returns all evaluation cells."""
  values = metrics.plain(config.to_dict())
  store = checkpoint.Checkpoints(
    folder.path / "checkpoints", **config.checkpoint
  )
  _warn_of_changes(before.get("hashes", {}), world.hashes)
  state = state_lib.begin(config, world, folder, store, parent)

  def opened():
    if manifest.strict(changed):
      manifest.keep_config(folder.path)
    folder.write_json("config.json", values)
    folder.write_json(
      "manifest.json",
      manifest.build(
        command=command,
        config=values,
        hashes=world.hashes,
        judge=_judge_name(config, world.tools),
        parent=start_from or before.get("parent"),
        before=before,
      ),
    )
    cells = _cells(folder, state.iteration, changed)
    folder.write_json("eval.json", cells)
    return cells

  cells = distributed.from_lead(opened)
  left = _passes_left(config, world.texts, state.iteration, cells)
  with metrics.Progress(left) as progress:
    world = _with_progress(world, progress)
    while True:
      if _evaluation_due(config, state.iteration, cells):
        scores = _evaluate(config, world, state, progress)
        _stop_if_unknown(scores, config.lost_limit)
        cells += scores
        distributed.from_lead(
          functools.partial(folder.write_json, "eval.json", cells)
        )
      if state.iteration >= config.iterations:
        break
      state, record = loop.iteration(state, world, config, progress)
      state_lib.check_alike(state)
      distributed.from_lead(
        functools.partial(_write, folder, state, record, config)
      )
      state_lib.save(
        store, folder, state, last=state.iteration == config.iterations
      )
      loop.stop_if_spent(world)
  store.close()
  if world.tools.judge is not None:
    world.tools.judge.chat.close()
  return cells


def _judge_name(config, tools) -> str:
  if tools.judge is None or not config.judge.verdicts:
    return "exact match"
  return f"exact match, else {tools.judge.name}"


def _write(folder, state, record, config) -> None:
  """Writes an iteration, and warns of what looks like a collapse."""
  records.write(folder, state.iteration, state.bank, record)
  rows = folder.read("metrics.jsonl")
  for said in records.alarms(rows, **config.alarms):
    logging.warning("Iteration %d: %s", rows[-1]["iteration"], said)


def _warn_of_changes(old: Mapping[str, str], new: Mapping[str, str]) -> None:
  """Says if a run goes on with other prompts, texts or weights."""
  changed = sorted(n for n in old.keys() & new.keys() if old[n] != new[n])
  if changed:
    logging.warning(
      "The run goes on with other content than it began with: %s. Its numbers "
      "before and after cannot be compared.",
      ", ".join(changed),
    )


def _cells(folder, number: int, changed: Sequence[str]) -> list[dict]:
  """What was evaluated up to an iteration, under a config that still holds."""
  if manifest.strict(changed):
    return []
  cells = folder.read_json("eval.json", [])
  return [cell for cell in cells if cell["iteration"] <= number]


def _with_progress(world, progress) -> tools_lib.World:
  """Lets the engine tell the display of each episode that ends."""

  def on_episode(episode):
    progress.advance(1, int(episode.mask.sum()), len(episode.ids))

  tools = dataclasses.replace(world.tools, on_episode=on_episode)
  return dataclasses.replace(world, tools=tools)


def _passes_left(config, texts, done: int, cells) -> int:
  left = (config.iterations - done) * sum(report.budget(config).values())
  due = sum(
    _evaluation_due(config, i, cells) for i in set(report.evaluations(config))
  )
  return max(left, 0) + due * report.evaluation_budget(config, texts.sets)


def _evaluation_due(config, number: int, cells) -> bool:
  """Whether a number of finished iterations is one to evaluate, and was not."""
  known = {c["set"] for c in cells if c["iteration"] == number}
  return number in report.evaluations(config) and bool(
    set(config.eval.sets) - known
  )


def _evaluate(config, world, state, progress) -> list[dict[str, Any]]:
  sets = world.texts.sets
  loop.share_budget(config, world.texts.library.ledger)
  progress.stage(
    f"evaluate after {state.iteration} of {config.iterations} iterations",
    sum(map(len, sets.values())) * len(config.eval.banks),
    report.evaluation_budget(config, sets),
  )
  cells = evaluation.evaluate(
    rollout.weights(world.tools.engine, world.solver, state.solver.params)[0],
    state.bank,
    sets,
    world.tools,
    config,
    iteration=state.iteration,
  )
  loop.stop_if_spent(world)
  return cells


def _stop_if_unknown(cells: Sequence[Mapping[str, Any]], limit: float) -> None:
  """Stops before scores of an outage are kept as the run's own."""
  unknown, total = (
    sum(cell[name] for cell in cells) for name in ("unknown", "n")
  )
  if unknown > limit * total:
    raise types.Stopped(
      f"{unknown} of {total} attempts of the evaluation have no verdict, more "
      f"than lost_limit = {limit:.0%}. No score was kept; the same command "
      "evaluates again once the tool is back."
    )


def evaluate_checkpoint(config: Any, workdir: str) -> None:
  """Evaluates the newest checkpoint of a run; prints and keeps the scores.

  The config is the run's, but for `eval`: other sets may be tried. The scores
  go to a file of their own: `eval.json` is the run's.

  Raises:
    ValueError: bad input, or there is no checkpoint yet.
  """
  distributed.initialize()
  distributed.by_all(lambda: config_lib.check(config))
  values = metrics.plain(config.to_dict())
  distributed.from_lead(
    lambda: manifest.check_workdir(workdir, values, free=("eval.",))
  )
  if not config.eval.sets:
    raise ValueError("eval.sets is empty: there is nothing to evaluate on.")
  store = checkpoint.Checkpoints(Path(workdir) / "checkpoints", read_only=True)
  newest = store.latest()
  if newest is None:
    raise ValueError(f"{workdir} has no checkpoint yet; train first.")
  texts = distributed.by_all(lambda: tools_lib.read(config, workdir))
  world = distributed.by_all(lambda: tools_lib.assemble(config, texts))
  state, _ = state_lib.restore(world, store, newest, config.bank.capacity)
  store.close()
  state_lib.check_contamination(state, texts.sets)
  with metrics.Progress(
    report.evaluation_budget(config, texts.sets)
  ) as progress:
    cells = _evaluate(config, _with_progress(world, progress), state, progress)
  if not distributed.is_lead():
    return
  name = f"eval_{state.iteration:05d}.json"
  scores = {"eval": values["eval"], "cells": cells}
  metrics.RunFolder(workdir).write_json(name, scores)
  console = rich.console.Console()
  console.print(evaluation.table(cells))
  console.print(evaluation.caution(cells, config.eval.confidence))
