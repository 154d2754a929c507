"""The state of a run: how it begins, goes on, and lies on the disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from sesa_jax import checkpoint, distributed, manifest, metrics, types
from sesa_jax import config as config_lib
from sesa_jax import tools as tools_lib
from sesa_jax.language import question_key
from sesa_jax.learner import grpo
from sesa_jax.policy import export as export_lib
from sesa_jax.policy import model, tokenizer, weights
from sesa_jax.skills import bank as skill_bank
from sesa_jax.stages import distillation, priming, validity

SHARED = "shared"  # in a checkpoint: the policy of both roles
TUNED = "policy"  # in one of `--mode=sft`


@dataclasses.dataclass(frozen=True)
class State:
  """All that changes from one iteration to the next, and nothing else."""

  iteration: int  # iterations finished
  challenger: types.Policy  # where weights are shared, the solver itself
  solver: types.Policy
  bank: skill_bank.SkillBank
  queue: tuple[types.FailureRecord, ...]
  pool: validity.Pool
  position: int  # in the seeds


def begin(config, world, folder, store, parent) -> State:
  """Restores the newest checkpoint, or another run's, or starts afresh.

  The folder is touched only once the state is known to be good.

  Raises:
    ValueError: a checkpoint is of another model, or holds an evaluation
      question.
  """
  newest, files, events = store.latest(), {}, ()
  if newest is not None:
    state, files = restore(world, store, newest, config.bank.capacity)
    logging.info("Resumed after iteration %d.", newest)
  elif parent:
    source = checkpoint.Checkpoints(parent[0], read_only=True)
    state, _ = restore(world, source, parent[1], config.bank.capacity)
    source.close()
    # The history alone is to tell what the bank is.
    events = skill_bank.inherited(state.bank, state.iteration)
  else:
    state, events = start(config, world)
  check_contamination(state, world.texts.sets)
  # Only the lead's folder counts, and only before the lead changes it.
  done = distributed.from_lead(lambda: len(folder.read("metrics.jsonl")))
  if newest is None and done > 1:  # one may have been cut off at its save
    raise ValueError(
      f"{folder.path} holds {done} iterations, but no checkpoint to go on from."
      " Restore its checkpoints, or name a new --workdir."
    )
  if state.iteration > config.iterations:
    raise ValueError(
      f"iterations = {config.iterations}, but {state.iteration} are finished. "
      "Name as many, or more to go on."
    )

  def opened():
    folder.truncate(files)
    folder.append("skills_history.jsonl", events)
    folder.write_lines("skills.jsonl", skill_bank.rows(state.bank))

  distributed.from_lead(opened)
  return state


def check_contamination(state: State, sets: Mapping[str, Sequence]) -> None:
  """Refuses a state that holds an evaluation question, by normalised text.

  A restored one may, where the sets are new, and so may mined skills.
  """
  held = [q.text for q in state.pool.questions + state.pool.fixed]
  held += [record.question for record in state.queue]
  for record in state.bank.records:
    held += skill_bank.sources(record.skill.source_question)
  seen = {question_key(text) for text in held if text}
  for name, questions in sets.items():
    for question in questions:
      if question_key(question.text) in seen:
        raise ValueError(
          f"The evaluation question {question.id} of {name} is in the run's "
          f"pool, queue or bank: {question.text!r}. Evaluate on other sets, or "
          "start a new run."
        )


def start(config, world) -> tuple[State, skill_bank.Events]:
  """Stage 1, memory priming, and the policies from their first weights."""
  empty = skill_bank.create(config.bank.capacity, world.tools.encoder.dim)
  solver = world.solver.init(world.references["solver"])
  challenger = solver
  if not world.shared:
    challenger = world.challenger.init(world.references["challenger"])
  bank, events = priming.prime(
    empty, config_lib.prime(config.bank.prime), world.tools.encoder
  )
  return State(
    iteration=0,
    challenger=challenger,
    solver=solver,
    bank=bank,
    queue=(),
    # Without self-play they are not what fills slots, but what is played.
    pool=validity.Pool(fixed=world.texts.fixed if config.selfplay else ()),
    position=0,
  ), events


def check_alike(state: State) -> None:
  """Stops where processes hold different banks, queues, pools or seeds.

  Each computes them from the same episodes. One that came to another result
  would show other skills, and in the end wait for the others for ever.

  Raises:
    types.Stopped: they differ.
  """
  if distributed.count() == 1:
    return
  arrays, records = skill_bank.to_tree(state.bank)
  parts = {
    "bank": [records, {n: a.tobytes().hex() for n, a in arrays.items()}],
    "queue": [metrics.plain(record) for record in state.queue],
    "pool": state.pool.to_json(),
    "position": state.position,
  }
  own = {name: manifest.sha256(part) for name, part in parts.items()}
  every = distributed.gather([own])
  differs = [n for n in own if len({found[n] for found in every}) > 1]
  if differs:
    raise types.Stopped(
      f"After iteration {state.iteration} processes differ in their "
      f"{' and '.join(differs)}: hosts of one kind, with the same assets and "
      "packages, do not. The same command goes on from the last checkpoint."
    )


def restore(
  world: tools_lib.World,
  store: checkpoint.Checkpoints,
  step: int,
  capacity: int,
) -> tuple[State, Mapping[str, int]]:
  """Reads a checkpoint: the state, and the lengths of the run's files then.

  Bank and pool are the checkpoint's (`pool.fixed` of a config is for a fresh
  start), but the bank has room for `capacity` skills from now on.

  Raises:
    ValueError: there is no such step, or it is of another model.
  """
  abstract = (
    {SHARED: world.solver.abstract()}
    if world.shared
    else {
      "challenger": world.challenger.abstract(),
      "solver": world.solver.abstract(),
    }
  )
  try:
    trees, host, arrays, files = store.restore(step, abstract)
  except (KeyError, OSError, ValueError) as error:
    raise _unreadable(store, step, error) from error
  policies = {name: types.Policy(*tree) for name, tree in trees.items()}
  shared = policies.get(SHARED)
  return State(
    iteration=host["iteration"],
    challenger=shared or policies["challenger"],
    solver=shared or policies["solver"],
    bank=skill_bank.from_tree(
      arrays["bank"], host["bank"] | {"capacity": capacity}
    ),
    queue=tuple(map(distillation.from_json, host["queue"])),
    pool=validity.Pool.from_json(host["pool"]),
    position=host["position"],
  ), files


def _unreadable(
  store: checkpoint.Checkpoints, step: int, error: Exception
) -> ValueError:
  others = [number for number in store.steps() if number != step]
  return ValueError(
    f"The checkpoint of iteration {step} in {store.folder} is damaged, or of "
    f"another model: {error} If it is damaged, remove its folder; whole ones "
    f"may be those of iterations {others or 'none'}."
  )


def save(
  store: checkpoint.Checkpoints,
  folder: metrics.RunFolder,
  state: State,
  last: bool,
) -> None:
  """Writes a checkpoint, and a milestone of the weights where one is due."""
  arrays, records = skill_bank.to_tree(state.bank)
  try:
    _save(store, folder, state, arrays, records, last)
  except (OSError, ValueError) as error:  # Orbax's own, of a full disk
    raise types.Stopped(
      f"The checkpoint of iteration {state.iteration} could not be written to "
      f"{store.folder}: {str(error)[:300]} The same command goes on from the "
      "one before."
    ) from error


def _save(store, folder, state, arrays, records, last) -> None:
  policies = {"challenger": state.challenger, "solver": state.solver}
  if state.challenger is state.solver:
    policies = {SHARED: state.solver}

  def ready():
    store.check_room(policies)
    return folder.lengths()

  store.save(
    state.iteration,
    trees=policies,
    host=dict(
      iteration=state.iteration,
      bank=records,
      queue=[metrics.plain(record) for record in state.queue],
      pool=state.pool.to_json(),
      position=state.position,
    ),
    arrays={"bank": arrays},
    files=distributed.from_lead(ready),
    milestone={name: policy.params for name, policy in policies.items()},
    last=last,
  )


def parent_of(
  start_from: str, folder: Path, ancestor: str | None
) -> tuple[Path, int] | None:
  """Reads RUN@ITERATION; None where the run began with it and resumes.

  Raises:
    ValueError: it is not of that form, there is no such checkpoint, or the
      folder has checkpoints of another run.
  """
  run_, at, number = start_from.rpartition("@")
  if not at or not number.isdigit() or not run_:
    raise ValueError(
      f"--start_from={start_from} is not RUN@ITERATION, such as runs/a@10."
    )
  if checkpoint.has_steps(folder / "checkpoints"):
    if ancestor == manifest.without_home(start_from):
      return None
    raise ValueError(
      f"--start_from begins a new run, but {folder} has checkpoints of its "
      "own. Name a new --workdir, or leave --start_from out to resume."
    )
  source = checkpoint.Checkpoints(Path(run_) / "checkpoints", read_only=True)
  steps = source.steps()
  source.close()
  if int(number) not in steps:
    raise ValueError(
      f"--start_from={start_from}: {run_} has no checkpoint of iteration "
      f"{number}. It has: {', '.join(map(str, steps)) or 'none'}."
    )
  return Path(run_) / "checkpoints", int(number)


def export(
  workdir: str,
  policy: str | None,
  out: str,
  dtype: str,
  config: Any = None,
  iteration: int | None = None,
) -> None:
  """Writes a policy of a run's checkpoint as a Hugging Face folder.

  Args:
    workdir: the run's folder; its `config.json` says what the policy began as.
    policy: "challenger" or "solver", which may be one; None of a folder of
      `--mode=sft`, which has one policy.
    out: the folder to make.
    dtype: "float32" or "bfloat16".
    config: the run's config, if it should be checked.
    iteration: of the checkpoint, or its step of `--mode=sft`; None is the
      newest.

  Raises:
    ValueError: a choice is unknown, `out` holds something, or there is no such
      run, no such checkpoint in it, or the config is another run's.
  """
  export_lib.check(out, dtype)
  reader = metrics.RunFolder(workdir, writes=False)
  run = reader.read_json("config.json", {})
  if not run:
    raise ValueError(f"{workdir} is not the folder of a run: no config.json.")
  tuned = "episodes" in reader.read_json("manifest.json", {}).get("hashes", {})
  if tuned and policy:
    raise ValueError(
      f"--policy={policy}: {workdir} is a folder of --mode=sft, which has one "
      "policy. Leave it out."
    )
  if not tuned and policy is None:
    raise ValueError("--policy is missing: name challenger or solver.")
  if not tuned:
    grpo.one_of("--policy", policy, ("challenger", "solver"))
  given = metrics.plain(config.to_dict()) if config else run
  differs = [
    field
    for field in manifest.config_diff(run, given)
    if field.startswith(("policy.source:", "policy.path:"))
  ]
  if differs:
    raise ValueError(
      f"{workdir} is the run of another config: {'; '.join(differs)}. Leave "
      "--config out, or give the run's own."
    )
  if not checkpoint.has_steps(Path(workdir) / "checkpoints"):
    raise ValueError(f"{workdir} has no checkpoint yet; train first.")
  store = checkpoint.Checkpoints(Path(workdir) / "checkpoints", read_only=True)
  steps = store.steps()
  step = max(steps) if iteration is None else iteration
  if step not in steps:
    raise ValueError(
      f"--iteration={step}: {workdir} keeps the checkpoints of "
      f"{', '.join(map(str, steps))}. checkpoint.keep says how many."
    )
  source, path = run["policy"]["source"], run["policy"]["path"]
  backbone = weights.check(source, config_lib.locate(path))
  tree = {"params": model.abstract_params(backbone)}
  try:
    saved = SHARED if run["policy"].get("shared") else policy
    read = store.reader(step, TUNED if tuned else saved, tree)
  except (KeyError, OSError, ValueError) as error:
    raise _unreadable(store, step, error) from error
  export_lib.save(
    out,
    backbone,
    tokenizer.load(source, config_lib.locate(path)),
    lambda leaf: read(f"params/{leaf}"),
    dtype=dtype,
  )
  store.close()
  logging.info(
    "The %s after %s %d, in %s: %s",
    *(("policy", "step") if tuned else (policy, "iteration")),
    *(step, dtype, out),
  )
