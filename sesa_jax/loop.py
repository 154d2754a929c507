"""The paper's figure as code: the only file that knows the order of things.

    pose -> check -> retrieve -> solve -> shape -> update -> credit -> distill

`iteration` is one turn of it, a function from a state to the next and to what
is recorded. `run` resumes, loops, evaluates, checkpoints and reports.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.box
import rich.console
import rich.table
from absl import logging

from sesa_jax import (
  checkpoint,
  distributed,
  evaluation,
  manifest,
  metrics,
  prompts,
  types,
)
from sesa_jax import (
  tools as tools_lib,
)
from sesa_jax.data import benchmarks
from sesa_jax.data import seeds as seeds_lib
from sesa_jax.learner import learner as learner_lib
from sesa_jax.skills import bank as skill_bank
from sesa_jax.stages import (
  distillation,
  frontier,
  priming,
  selfplay,
  validity,
)


@dataclasses.dataclass(frozen=True)
class State:
  """All that changes from one iteration to the next, and nothing else."""

  iteration: int  # iterations finished
  challenger: types.Policy
  solver: types.Policy
  bank: skill_bank.SkillBank
  queue: tuple[types.FailureRecord, ...]
  pool: validity.Pool
  position: int  # in the seeds


@dataclasses.dataclass(frozen=True)
class Record:
  """What an iteration leaves in the run's folder."""

  metrics: Mapping[str, Any]
  episodes: Sequence[Mapping[str, Any]]
  questions: Sequence[Mapping[str, Any]]
  failures: Sequence[Mapping[str, Any]]
  history: Sequence[Mapping[str, Any]]


def iteration(
  state: State, world: tools_lib.World, config: Any, progress: metrics.Progress
) -> tuple[State, Record]:
  """Runs the four stages once (stage 1 filled the bank before).

  Raises:
    types.Stopped: too many episodes stayed lost, no search was executed, or
      updates had a loss that is not a number. The state is unharmed.
  """
  number = state.iteration + 1  # as people count
  tools, clock = world.tools, _Clock()
  begin = functools.partial(_begin_stage, config, number, progress, clock)

  # Stage 2, asymmetric self-play. No bank is in the challenger's reach.
  begin("pose", config.questions * config.challenger.group_size)
  seeds, position = seeds_lib.draw(
    world.texts.seeds,
    config.questions,
    seed=config.seed,
    position=state.position,
  )
  weights = tools.engine.load(state.challenger.params)
  posed, posing = _pose(weights, seeds, tools, config, number)
  begin("verify")
  weights = tools.engine.load(state.solver.params)
  checked = _check(weights, posed, state.pool, tools, config, number)
  tasks = checked.tasks
  begin("solve", len(tasks) * config.solver.group_size)
  shown, blocks = evaluation.show_skills(state.bank, tasks, tools, config)
  attempts, solving = _solve(
    weights, tasks, shown, blocks, tools, config, number
  )
  del weights  # the updates need the room
  _stop_if_broken(checked, attempts, config, first=number == 1)

  # Stage 3, frontier shaping: rewards, advantages, failures that pass the gate.
  edge = _shape(checked, attempts, tools, config, number)
  begin("update challenger", len(edge.proposals))
  challenger, learned_posing = _update(
    world.challenger,
    state.challenger,
    world.reference,
    edge.proposals,
    config.challenger.temperature,
    progress,
  )
  begin("update solver", len(edge.attempts))
  solver, learned_solving = _update(
    world.solver,
    state.solver,
    world.reference,
    edge.attempts,
    config.solver.temperature,
    progress,
  )

  # Stage 4, failure distillation. The bank changes here and nowhere else.
  begin("distill")
  bank, credited = skill_bank.credit(
    state.bank,
    shown,
    {outcome.question.id: outcome for outcome in edge.outcomes},
    config.bank.credit,
    number,
  )
  bank, retired = skill_bank.retire(bank, config.bank.retire_after, number)
  queue, dropped = distillation.enqueue(
    state.queue,
    edge.failures,
    config.distillation.queue_size,
    config.distillation.keep,
  )
  bank, queue, distilled = _distill(bank, queue, tools, config, number)
  clock.stop()

  pool = validity.remember(checked.pool, edge.failures)
  after = State(number, challenger, solver, bank, queue, pool, position)
  played = [p.episode for p in checked.proposals]
  solved = [a.episode for a in attempts]
  measured = {
    "iteration": number,
    **checked.report.metrics,
    **edge.report.metrics,
    **rollout_metrics(played + solved, "rollout"),
    **rollout_metrics(played, "challenger/rollout"),
    **rollout_metrics(solved, "solver/rollout"),
    **_prefixed("challenger/engine", posing),
    **_prefixed("solver/engine", solving),
    **_prefixed("challenger", learned_posing),
    **_prefixed("solver", learned_solving),
    **distilled.metrics,
    "distillation/dropped": dropped,
    "bank/active": len(bank.skills),
    "bank/retired": len(retired),
    "bank/shown": sum(map(len, shown.values())),
    **clock.seconds(),
  }
  return after, Record(
    measured,
    _episode_rows(checked, attempts, edge, tools, number),
    _question_rows(checked, edge),
    [metrics.plain(failure) for failure in edge.failures],
    [*credited, *retired, *distilled.rows],
  )


# --- the stages, with the config's values ------------------------------------


@dataclasses.dataclass(frozen=True)
class Checked:
  """What the validity stage decided, and what it played to decide it."""

  proposals: Sequence[types.Proposal]
  tasks: Sequence[types.Question]
  pool: validity.Pool
  report: types.Report
  episodes: Sequence[types.Episode]


def _begin_stage(config, number, progress, clock, name, episodes=0) -> None:
  label = f"iteration {number}/{config.iterations}: {name}"
  progress.stage(label, episodes, budget(config)[name])
  clock.start(name)


def _limits(role: Any) -> types.Limits:
  return types.Limits(role.turn_tokens, role.episode_tokens, role.turns)


def _pose(weights, seeds, tools, config, number):
  return selfplay.pose(
    weights,
    seeds,
    tools,
    iteration=number,
    group_size=config.challenger.group_size,
    searches={
      seed.hops: validity.searches_wanted(seed, config.challenger.min_searches)
      for seed in seeds
    },
    sampling=types.Sampling(config.challenger.temperature),
    limits=_limits(config.challenger),
  )


def _check(weights, posed, pool, tools, config, number) -> Checked:
  verifier = config.verifier
  played: list[types.Episode] = []

  def answer(requests):
    answers, episodes, _ = selfplay.as_evidence(
      weights,
      requests,
      tools,
      iteration=number,
      tokens=verifier.tokens,
      max_tokens=verifier.max_tokens,
    )
    played.extend(episodes)
    return answers

  def size(question, passages):
    prompt = prompts.evidence(question, passages)
    return len(tools.render(prompt)) + verifier.tokens

  proposals, tasks, pool, report = validity.check(
    posed,
    pool,
    answer,
    iteration=number,
    seed=config.seed,
    slots=config.questions * config.challenger.group_size,
    language=tools.language,
    min_searches=config.challenger.min_searches,
    noise=verifier.noise,
    max_tokens=verifier.max_tokens,
    size=size,
    fits=lambda text: tools_lib.fits_solver(config, tools.render, text),
    probes=verifier.probes,
    refill=config.pool.refill,
    empty_every=config.pool.empty_every,
    keep_fixed=config.pool.keep_fixed,
  )
  return Checked(proposals, tasks, pool, report, played)


def _solve(weights, tasks, shown, blocks, tools, config, number):
  return selfplay.solve(
    weights,
    tasks,
    shown,
    blocks,
    tools,
    iteration=number,
    attempts=config.solver.group_size,
    sampling=types.Sampling(config.solver.temperature),
    limits=_limits(config.solver),
  )


def _shape(checked, attempts, tools, config, number) -> frontier.Edge:
  return frontier.shape(
    checked.proposals,
    attempts,
    iteration=number,
    group_size=config.solver.group_size,
    **config.frontier,
    invalid=config.challenger.invalid,
    invalid_penalty=config.challenger.invalid_penalty,
    solver_baseline=config.solver.baseline,
    challenger_baseline=config.challenger.baseline,
    std_epsilon=config.learner.std_epsilon,
    passage_tokens=config.distillation.passage_tokens,
    count_tokens=lambda text: len(tools.tokenizer.encode(text)),
    language=tools.language,
    recorded=checked.pool.recorded,
  )


def _distill(bank, queue, tools, config, number):
  settings = config.distillation
  return distillation.distill(
    bank,
    queue,
    distiller=tools.distiller,
    encoder=tools.encoder,
    language=tools.language,
    iteration=number,
    every=settings.every,
    min_pending=settings.min_pending,
    max_records=settings.max_records,
    threshold=config.bank.threshold,
    admit=settings.admit,
  )


def _update(learner, policy, reference, lessons, temperature, progress):
  """Updates one policy; a loss that stays not a number stops the run."""
  try:
    policy, found = learner.update(
      policy, reference, lessons, temperature=temperature
    )
  except learner_lib.NonFiniteUpdate as error:
    raise types.Stopped(
      f"{error} The last good checkpoint is the newest in the run's folder."
    ) from error
  progress.advance(episodes=len(lessons), tokens=int(found["tokens"]), passes=0)
  return policy, found


def _stop_if_broken(checked, attempts, config, first: bool) -> None:
  """Stops before the update when a tool is down or its calls go unseen."""
  played = [p.episode for p in checked.proposals]
  played += [a.episode for a in attempts]
  _stop_if_lost([*played, *checked.episodes], config.lost_limit)
  if first:
    _stop_if_nothing_searched(played)


def _stop_if_lost(episodes: Sequence[types.Episode], limit: float) -> None:
  lost = [e for e in episodes if e.finish == "lost"]
  if len(lost) > limit * len(episodes):
    raise types.Stopped(
      f"{len(lost)} of {len(episodes)} episodes stayed lost, more than "
      f"lost_limit = {limit:.0%}: {lost[0].turns[-1].note}. Nothing was "
      "updated; the same command goes on from here once the tool is back."
    )


def _stop_if_nothing_searched(episodes: Sequence[types.Episode]) -> None:
  """A parser that misses every call would train on without a word."""
  turns = [turn for episode in episodes for turn in episode.turns]
  wrote = sum("</search>" in turn.text for turn in turns)
  if wrote and not any(turn.action == "search" for turn in turns):
    raise types.Stopped(
      f"{wrote} turns of the first iteration hold a search tag, but no search "
      "was executed. Look at them with --mode=show; the template or the "
      "tokenizer does not fit the policy."
    )


# --- records ---------------------------------------------------------------


def rollout_metrics(
  episodes: Sequence[types.Episode], path: str
) -> dict[str, float]:
  """What must never go unseen: searches, malformed, truncated, lost, length."""
  searches = [sum(t.action == "search" for t in e.turns) for e in episodes]
  found = metrics.describe(searches, f"{path}/searches")
  found |= metrics.describe([e.mask.sum() for e in episodes], f"{path}/tokens")
  shares = {
    "malformed": [
      any(t.action == "malformed" for t in e.turns) for e in episodes
    ],
    "truncated": [
      e.finish in ("turn_tokens", "episode_tokens", "turns") for e in episodes
    ],
    "unknown": [e.finish == "lost" for e in episodes],
  }
  total = max(len(episodes), 1)
  return found | {f"{path}/{k}": sum(v) / total for k, v in shares.items()}


def _prefixed(path: str, found: Mapping[str, Any]) -> dict[str, Any]:
  return {f"{path}/{name}": value for name, value in found.items()}


def _episode_rows(
  checked, attempts, edge, tools, number
) -> list[dict[str, Any]]:
  """A row an episode, with what became of it."""

  def decode(ids):
    return tools.tokenizer.decode(ids, skip_special_tokens=False)

  advantages = {
    (lesson.episode.arm, lesson.episode.request_id, lesson.episode.attempt): (
      lesson.advantage
    )
    for lesson in (*edge.proposals, *edge.attempts)
  }

  def row(episode, **extra):
    key = (episode.arm, episode.request_id, episode.attempt)
    known = dict(
      iteration=number,
      question=None,
      targets=(),
      prediction=None,
      verdict=None,
      reward=None,
      skill_ids=(),
      advantage=advantages.get(key),
    )
    return metrics.episode_row(episode, decode, **(known | extra))

  rows = [
    row(
      p.episode,
      question=p.text,
      targets=p.seed.targets,
      state=p.state,
      reward=reward,
    )
    for p, reward in zip(checked.proposals, edge.rewards, strict=True)
  ]
  judged = {outcome.question.id for outcome in edge.outcomes}
  rows += [
    row(
      a.episode,
      question=a.question.text,
      targets=a.question.targets,
      prediction=a.prediction,
      verdict=a.verdict,
      reward=float(a.verdict is types.Verdict.RIGHT)
      if a.question.id in judged
      else None,
      skill_ids=a.skill_ids,
    )
    for a in attempts
  ]
  return rows + [row(episode) for episode in checked.episodes]


def _question_rows(checked, edge) -> list[dict[str, Any]]:
  """Every proposal with its state, its reward and its question's success."""
  success = {o.question.id: o.success for o in edge.outcomes}
  return [
    dict(row) | dict(reward=reward, success=success.get(p.question_id))
    for row, p, reward in zip(
      checked.report.rows, checked.proposals, edge.rewards, strict=True
    )
  ]


class _Clock:
  """Seconds of each stage."""

  def __init__(self):
    self._seconds: dict[str, float] = {}
    self._name, self._began = "", 0.0

  def start(self, name: str) -> None:
    self.stop()
    self._name, self._began = name, time.perf_counter()

  def stop(self) -> None:
    if self._name:
      spent = time.perf_counter() - self._began
      self._seconds[self._name] = self._seconds.get(self._name, 0.0) + spent
    self._name = ""

  def seconds(self) -> dict[str, float]:
    return {
      f"seconds/{name.replace(' ', '_')}": s
      for name, s in self._seconds.items()
    }


# --- budget ----------------------------------------------------------------


def budget(config: Any) -> dict[str, int]:
  """Token-passes that each stage of an iteration may take at most.

  A token-pass is one token through the model once, forward; a backward pass
  counts as two, rematerialisation and the reference as one each.
  """
  posed = config.questions * config.challenger.group_size
  solved = posed * config.solver.group_size
  learned = 3 + config.policy.remat

  def update(role, rows):
    several = role.minibatch_questions < posed
    passes = learned + several + (role.kl_coefficient != 0)
    return rows * role.episode_tokens * passes

  return {
    "pose": posed * config.challenger.episode_tokens,
    "verify": posed * config.verifier.max_tokens,
    "solve": solved * config.solver.episode_tokens,
    "update challenger": update(config.challenger, posed),
    "update solver": update(config.solver, solved),
    "distill": 0,
  }


def evaluation_budget(config: Any, sets: Mapping[str, Sequence]) -> int:
  """Token-passes of one evaluation at most."""
  questions = sum(map(len, sets.values()))
  return questions * len(config.eval.banks) * config.solver.episode_tokens


def evaluations(config: Any) -> list[int]:
  """Finished iterations after which a run is evaluated."""
  every = config.eval.every
  between = range(every, config.iterations, every) if every else ()
  return [0, *between, config.iterations]


# --- the run ---------------------------------------------------------------


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
  tools_lib.check(config)
  values = metrics.plain(config.to_dict())
  changed = manifest.check_workdir(workdir, values, force_new=force_new)
  folder = metrics.RunFolder(workdir, writes=distributed.is_lead())
  before = folder.read_json("manifest.json", {})
  ancestor = before.get("parent")
  parent = _parent(start_from, folder.path, ancestor) if start_from else None
  texts = tools_lib.read(config)
  console = rich.console.Console(stderr=True)
  console.print(_plan(config, texts))
  world = tools_lib.assemble(config, texts)
  folder.write_json("config.json", values)
  store = checkpoint.Checkpoints(
    folder.path / "checkpoints", **config.checkpoint
  )
  state = _begin(config, world, folder, store, parent)
  folder.write_json(
    "manifest.json",
    manifest.build(
      command=command,
      config=values,
      hashes=world.hashes,
      judge="exact match",
      parent=start_from or ancestor,
      before=before,
    ),
  )
  cells = _cells(folder, state.iteration, changed)
  left = _passes_left(config, texts, state.iteration, cells)
  with metrics.Progress(left) as progress:
    world = _with_progress(world, progress)
    while True:
      if _evaluation_due(config, state.iteration, cells):
        cells += _evaluate(config, world, state, progress)
        folder.write_json("eval.json", cells)
      if state.iteration >= config.iterations:
        break
      state, record = iteration(state, world, config, progress)
      _write(folder, state, record)
      _save(store, folder, state, last=state.iteration == config.iterations)
  store.close()
  report(config, folder, cells)


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


def _plan(config: Any, texts: tools_lib.Texts) -> rich.table.Table:
  """The budget, printed before anything expensive starts."""
  table = rich.table.Table(
    title=f"{config.name} ({config.preset}): token-passes at most",
    box=None,
    title_justify="left",
  )
  table.add_column("stage")
  table.add_column("one", justify="right")
  table.add_column("run", justify="right")
  rows = [(n, p, p * config.iterations) for n, p in budget(config).items()]
  one = evaluation_budget(config, texts.sets)
  rows.append(("evaluate", one, one * len(set(evaluations(config)))))
  for name, each, all_ in rows:
    table.add_row(name, f"{each:,}", f"{all_:,}")
  table.add_row("total", "", f"{sum(row[2] for row in rows):,}")
  return table


def _passes_left(config, texts, done: int, cells) -> int:
  left = (config.iterations - done) * sum(budget(config).values())
  due = sum(_evaluation_due(config, i, cells) for i in set(evaluations(config)))
  return max(left, 0) + due * evaluation_budget(config, texts.sets)


def _evaluation_due(config, number: int, cells) -> bool:
  known = any(cell["iteration"] == number for cell in cells)
  return bool(config.eval.sets) and number in evaluations(config) and not known


def _evaluate(config, world, state, progress) -> list[dict[str, Any]]:
  sets = world.texts.sets
  progress.stage(
    f"evaluate after {state.iteration} of {config.iterations} iterations",
    sum(map(len, sets.values())) * len(config.eval.banks),
    evaluation_budget(config, sets),
  )
  return evaluation.evaluate(
    world.tools.engine.load(state.solver.params),
    state.bank,
    sets,
    world.tools,
    config,
    iteration=state.iteration,
  )


# --- begin, write, save ----------------------------------------------------


def _begin(config, world, folder, store, parent) -> State:
  """Restores the newest checkpoint, or another run's, or starts afresh."""
  newest = store.latest()
  if newest is not None:
    state, files = _restore(world, store, newest)
    folder.truncate(files)
    logging.info("Resumed after iteration %d.", newest)
  elif parent:
    source = checkpoint.Checkpoints(parent[0], read_only=True)
    state, _ = _restore(world, source, parent[1])
    source.close()
    folder.truncate({})
  else:
    state, events = _start(config, world)
    folder.truncate({})
    folder.append("skills_history.jsonl", events)
  _check_contamination(state, world.texts.sets)
  folder.write_lines("skills.jsonl", skill_bank.rows(state.bank))
  return state


def _check_contamination(state: State, sets: Mapping[str, Sequence]) -> None:
  """Refuses a state that holds an evaluation question, by normalised text.

  A fresh one cannot; a restored one may, where the sets are new.
  """
  held = [q.text for q in state.pool.questions + state.pool.fixed]
  held += [record.question for record in state.queue]
  held += [record.skill.source_question for record in state.bank.records]
  seen = {benchmarks.normalized_text(text) for text in held if text}
  for name, questions in sets.items():
    for question in questions:
      if benchmarks.normalized_text(question) in seen:
        raise ValueError(
          f"The evaluation question {question.id} of {name} is in the run's "
          f"pool, queue or bank: {question.text!r}. Evaluate on other sets, or "
          "start a new run."
        )


def _start(config, world) -> tuple[State, skill_bank.Events]:
  """Stage 1, memory priming, and two policies from the same weights."""
  empty = skill_bank.create(config.bank.capacity, world.tools.encoder.dim)
  bank, events = priming.prime(empty, config.bank.prime, world.tools.encoder)
  return State(
    iteration=0,
    challenger=world.challenger.init(world.reference),
    solver=world.solver.init(world.reference),
    bank=bank,
    queue=(),
    pool=validity.Pool(fixed=world.texts.fixed),
    position=0,
  ), events


def _restore(world, store, step: int) -> tuple[State, Mapping[str, int]]:
  abstract = {
    "challenger": world.challenger.abstract(),
    "solver": world.solver.abstract(),
  }
  trees, host, arrays, files = store.restore(step, abstract)
  return State(
    iteration=host["iteration"],
    challenger=types.Policy(*trees["challenger"]),
    solver=types.Policy(*trees["solver"]),
    bank=skill_bank.from_tree(arrays["bank"], host["bank"]),
    queue=tuple(map(distillation.from_json, host["queue"])),
    pool=validity.Pool.from_json(host["pool"]),
    position=host["position"],
  ), files


def _write(folder: metrics.RunFolder, state: State, record: Record) -> None:
  """Writes an iteration. Until it is checkpointed a resume takes it back."""
  folder.write_episodes(state.iteration, record.episodes)
  folder.append("questions.jsonl", record.questions)
  folder.append("failures.jsonl", record.failures)
  folder.append("skills_history.jsonl", record.history)
  folder.append("metrics.jsonl", [record.metrics])
  folder.write_lines("skills.jsonl", skill_bank.rows(state.bank))


def _save(store, folder, state: State, last: bool) -> None:
  arrays, records = skill_bank.to_tree(state.bank)
  store.save(
    state.iteration,
    trees={"challenger": state.challenger, "solver": state.solver},
    host=dict(
      iteration=state.iteration,
      bank=records,
      queue=[metrics.plain(record) for record in state.queue],
      pool=state.pool.to_json(),
      position=state.position,
    ),
    arrays={"bank": arrays},
    files=folder.lengths(),
    milestone={
      "challenger": state.challenger.params,
      "solver": state.solver.params,
    },
    last=last,
  )


def _parent(
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


def evaluate_checkpoint(config: Any, workdir: str) -> None:
  """Evaluates the newest checkpoint of a run, and prints and keeps the cells.

  The config is the run's, but for `eval`: other sets may be tried.

  Raises:
    ValueError: bad input, or there is no checkpoint yet.
  """
  tools_lib.check(config)
  values = metrics.plain(config.to_dict())
  manifest.check_workdir(workdir, values, free=("eval.",))
  if not config.eval.sets:
    raise ValueError("eval.sets is empty: there is nothing to evaluate on.")
  store = checkpoint.Checkpoints(Path(workdir) / "checkpoints", read_only=True)
  newest = store.latest()
  if newest is None:
    raise ValueError(f"{workdir} has no checkpoint yet; train first.")
  texts = tools_lib.read(config)
  world = tools_lib.assemble(config, texts)
  state, _ = _restore(world, store, newest)
  store.close()
  _check_contamination(state, texts.sets)
  with metrics.Progress(evaluation_budget(config, texts.sets)) as progress:
    cells = _evaluate(config, _with_progress(world, progress), state, progress)
  folder = metrics.RunFolder(workdir)
  new = {(c["iteration"], c["set"], c["bank"]) for c in cells}
  kept = [
    cell
    for cell in folder.read_json("eval.json", [])
    if (cell["iteration"], cell["set"], cell["bank"]) not in new
  ]
  folder.write_json("eval.json", kept + cells)
  console = rich.console.Console()
  console.print(evaluation.table(cells))
  console.print(evaluation.caution(cells, config.eval.confidence))


# --- report ----------------------------------------------------------------


def report(
  config: Any, folder: metrics.RunFolder, cells: Sequence[Mapping[str, Any]]
) -> None:
  """Prints what the run did, what it distilled and where everything lies."""
  console = rich.console.Console()
  if cells:
    console.print(evaluation.table(cells))
    console.print(evaluation.caution(cells, config.eval.confidence))
  rows = folder.read("metrics.jsonl")
  console.print(_played(rows))
  console.print(_distilled(folder.read("skills_history.jsonl")))
  console.print(f"\nEverything lies in {folder.path}:", highlight=False)
  for name, what in (
    ("episodes/", "what was played (--mode=show prints it)"),
    ("questions.jsonl", "every proposal, its state and its reward"),
    ("failures.jsonl", "failures at the frontier"),
    ("skills.jsonl", "the bank now; skills_history.jsonl: how it came about"),
    ("metrics.jsonl", "one line an iteration"),
    ("eval.json", "scores and predictions"),
    ("checkpoints/", "policies, optimizers, bank, queue, pool"),
  ):
    console.print(f"  {name:<16} {what}", highlight=False)


def _played(rows: Sequence[Mapping[str, Any]]) -> rich.table.Table:
  """A column an iteration (the last ten): what was posed, solved, learned."""
  table = rich.table.Table(title="Self-play", box=rich.box.SIMPLE_HEAD)
  table.add_column("iteration")
  for row in rows[-10:]:
    table.add_column(str(row["iteration"]), justify="right")
  for name, text in {
    "proposals, of them valid": lambda r: (
      f"{r['challenger/proposals']}, {r['challenger/state/valid']}"
    ),
    "solver questions": lambda r: f"{r['solver/questions']}",
    "  posed just now": lambda r: f"{r['solver/origin/challenger']}",
    "  posed earlier, replayed": lambda r: f"{r['solver/origin/replay']}",
    "  real ones, from the pool": lambda r: f"{r['solver/origin/fixed']}",
    "attempts right": lambda r: _percent(r.get("solver/reward/mean")),
    "informative groups": lambda r: _percent(
      r.get("solver/informative_groups")
    ),
    "searches an episode": lambda r: f"{r['rollout/searches/mean']:.2f}",
    "episodes with a malformed turn": lambda r: _percent(
      r["rollout/malformed"]
    ),
    "failures recorded": lambda r: f"{r['frontier/recorded']}",
    "skills admitted": lambda r: f"{r['distillation/admitted']}",
    "active skills": lambda r: f"{r['bank/active']}",
  }.items():
    table.add_row(name, *(text(row) for row in rows[-10:]))
  return table


def _percent(value: float | None) -> str:
  return "-" if value is None else f"{value:.0%}"


def _distilled(history: Sequence[Mapping[str, Any]]) -> rich.table.Table:
  """Every record that was taken for distillation, and what came of it."""
  table = rich.table.Table(
    title="Distillation", box=rich.box.SIMPLE_HEAD, show_lines=False
  )
  for name in ("iteration", "outcome", "skill"):
    table.add_column(name)
  rows = [row for row in history if "outcome" in row]
  for row in rows:
    why = f": {row['reason']}" if row["reason"] else ""
    table.add_row(
      str(row["iteration"]), row["outcome"] + why, row["text"] or row["skill"]
    )
  if not rows:
    table.add_row("-", "nothing", "No failure passed the gate.")
  return table
