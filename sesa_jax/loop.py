"""The paper's figure as code: the only file that knows the order of things.

    pose -> check -> retrieve -> solve -> shape -> update -> credit -> distill

`iteration` is one turn of it, a function from a state to the next and to what
is recorded. `experiment.py` turns it to the end.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from sesa_jax import config as config_lib
from sesa_jax import (
  distributed,
  evaluation,
  metrics,
  prompts,
  records,
  report,
  rollout,
  types,
)
from sesa_jax import state as state_lib
from sesa_jax import tools as tools_lib
from sesa_jax.data import seeds as seeds_lib
from sesa_jax.judge import distiller as distiller_lib
from sesa_jax.language import question_key
from sesa_jax.learner import learner as learner_lib
from sesa_jax.search import base
from sesa_jax.skills import bank as skill_bank
from sesa_jax.stages import (
  distillation,
  frontier,
  selfplay,
  validity,
)


def iteration(
  state: state_lib.State,
  world: tools_lib.World,
  config: Any,
  progress: metrics.Progress,
) -> tuple[state_lib.State, records.Record]:
  """Runs the four stages once (stage 1 filled the bank before).

  Raises:
    types.Stopped: too many episodes stayed lost, no search was executed, or
      updates had a loss that is not a number. The checkpoint before is whole;
      the given state's policies may be donated by then.
  """
  number = state.iteration + 1  # as people count
  tools, clock = world.tools, records.Clock()
  ahead = _distill_ahead(state, tools, config)
  ledger = world.texts.library.ledger
  ledger.drain()  # of what an evaluation searched
  share_budget(config, ledger)
  begin = functools.partial(_begin_stage, config, number, progress, clock)

  # Stage 2, asymmetric self-play. No bank is in the challenger's reach.
  begin("pose", config.questions * config.challenger.group_size)
  drawn, position = seeds_lib.draw(
    world.texts.seeds if config.selfplay else world.texts.fixed,
    config.questions,
    seed=config.seed,
    position=state.position,
  )
  posed, posing = (), {}
  if config.selfplay:
    posed, posing = _pose(drawn, state, world, config, number)
  planned = len(posed) * (1 + config.solver.group_size)
  stop_if_spent(world)
  _stop_if_lost([p.episode for p in posed], config.lost_limit, planned)
  begin("verify")
  weights, solving_gap = rollout.weights(
    tools.engine, world.solver, state.solver.params
  )
  if config.selfplay:
    checked = _check(weights, posed, state.pool, world, config, number)
  else:
    found = validity.given(drawn, state.pool)
    checked = Checked((), drawn, state.pool, found, ())
  tasks = checked.tasks
  tried = config.solver.group_size + config.bank.control_attempts
  stop_if_spent(world)
  _stop_if_unjudged(checked, (), config.lost_limit, len(tasks) * tried)
  begin("solve", len(tasks) * tried)
  shown, blocks, missed = evaluation.show_skills(
    state.bank, tasks, tools, config, arm=config.bank.arm, iteration=number
  )
  ranked = _rank(state.bank, tasks, tools, config, number)
  attempts, solving = _solve(
    weights, tasks, shown, blocks, tools, config, number
  )
  controls = _control(weights, tasks, shown, tools, config, number)
  del weights  # the updates need the room
  _stop_if_broken(checked, attempts, controls, world, config, number == 1)

  # Stage 3, frontier shaping: rewards, advantages, failures that pass the gate.
  edge = _shape(checked, attempts, tools, config, number)
  policies, learned = _learn(world, state, edge, config, begin, progress)

  # Stage 4, failure distillation. The bank changes here and nowhere else.
  begin("distill")
  bank, credited, retired = _count(
    state.bank, shown, edge, _unprimed(controls, config), config, number
  )
  queue, dropped = distillation.enqueue(
    state.queue,
    edge.failures,
    config.distillation.queue_size,
    config.distillation.keep,
  )
  bank, queue, distilled = _distill(
    bank, queue, ahead, policies["solver"], world, config, number
  )
  clock.stop()

  pool = validity.remember(checked.pool, edge.failures)
  after = state_lib.State(
    number, **policies, bank=bank, queue=queue, pool=pool, position=position
  )
  played = [p.episode for p in checked.proposals]
  solved = [a.episode for a in attempts]
  measured = {
    "iteration": number,
    **checked.report.metrics,
    **records.edge_metrics(edge.report.metrics, attempts),
    **records.rollout_metrics(played + solved, "rollout"),
    **records.rollout_metrics(played, "challenger/rollout"),
    **records.rollout_metrics(solved, "solver/rollout"),
    **records.prefixed("challenger/engine", posing),
    **records.prefixed("solver/engine", solving),
    "solver/engine/copy_gap": solving_gap,
    **records.prefixed("challenger", learned.get("challenger", {})),
    **records.prefixed("solver", learned["solver"]),
    **base.total(distributed.gather([ledger.drain()])),
    **distilled.metrics,
    "distillation/dropped": dropped,
    "bank/active": len(bank.skills),
    "bank/retired": len(retired),
    "bank/shown": sum(map(len, shown.values())),
    "bank/placebo_missed": missed,
    **records.effect_metrics(credited),
    **(tools.judge.chat.ledger.drain() if tools.judge else {}),
    **clock.seconds(),
  }
  return after, records.Record(
    measured,
    records.episode_rows(checked, attempts, controls, edge, tools, number),
    records.question_rows(checked, edge),
    [metrics.plain(failure) for failure in edge.failures],
    [*ranked, *credited, *retired, *distilled.rows],
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
  asked: int = 0  # answers that the judge was asked for
  unanswered: int = 0


def _begin_stage(config, number, progress, clock, name, episodes=0) -> None:
  label = f"iteration {number}/{config.iterations}: {name}"
  progress.stage(label, episodes, report.budget(config)[name])
  clock.start(name)


def _limits(role: Any) -> types.Limits:
  return types.Limits(role.turn_tokens, role.episode_tokens, role.turns)


def _pose(seeds, state, world, config, number):
  weights, gap = rollout.weights(
    world.tools.engine, world.challenger, state.challenger.params
  )
  posed, found = selfplay.pose(
    weights,
    seeds,
    world.tools,
    iteration=number,
    group_size=config.challenger.group_size,
    searches={
      seed.hops: validity.searches_wanted(seed, config.challenger.min_searches)
      for seed in seeds
    },
    sampling=types.Sampling(config.challenger.temperature),
    limits=_limits(config.challenger),
  )
  return posed, found | {"copy_gap": gap}


def _check(weights, posed, pool, world, config, number) -> Checked:
  tools, verifier = world.tools, config.verifier
  tested = tools_lib.tested_texts(world.texts.sets)
  played: list[types.Episode] = []
  judged: list[str | None] = []

  def answer(requests):
    if verifier.answerer == "judge":
      judged.extend(distributed.from_lead(lambda: tools.judge.answer(requests)))
      return judged
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

  def refused(text):
    if question_key(text) in tested:
      return "contaminated"
    fits = tools_lib.fits_solver(config, tools.render, text)
    return None if fits else "over_budget"

  proposals, tasks, pool, found = validity.check(
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
    refused=refused,
    embed=lambda texts: tools.encoder.encode(texts, "query"),
    probes=verifier.probes,
    refill=config.pool.refill,
    empty_every=config.pool.empty_every,
    keep_fixed=config.pool.keep_fixed,
  )
  return Checked(
    proposals, tasks, pool, found, played, len(judged), judged.count(None)
  )


def _solve(weights, tasks, shown, blocks, tools, config, number, **others):
  ways = {"attempts": config.solver.group_size} | others
  return selfplay.solve(
    weights,
    tasks,
    shown,
    blocks,
    tools,
    iteration=number,
    sampling=types.Sampling(config.solver.temperature),
    limits=_limits(config.solver),
    judge=tools.judge if config.judge.verdicts else None,
    **ways,
  )


def _control(weights, tasks, shown, tools, config, number):
  """Tries what was tried with skills without them: no lesson, part of no p."""
  primed = [task for task in tasks if shown.get(task.id)]
  if not config.bank.control_attempts or not primed:
    return []
  attempts, _ = _solve(
    weights,
    primed,
    {},
    {},
    tools,
    config,
    number,
    attempts=config.bank.control_attempts,
    arm="control",
    prefix="control/",  # draws of their own
  )
  return attempts


def _unprimed(controls, config) -> dict[str, types.Outcome] | None:
  """Outcomes of the attempts without skills; None where none are made."""
  if not config.bank.control_attempts:
    return None
  groups = frontier.judged(controls, config.bank.control_attempts)
  return {name: frontier.outcome(group) for name, group in groups.items()}


def _count(bank, shown, edge, unprimed, config, number):
  """Credits what was shown and retires what did harm; a frozen bank stays."""
  if config.bank.frozen:
    return bank, (), ()
  bank, credited = skill_bank.credit(
    bank,
    shown,
    {outcome.question.id: outcome for outcome in edge.outcomes},
    config.bank.credit,
    number,
    control=unprimed,
  )
  bank, retired = skill_bank.retire(bank, config.bank.retire_after, number)
  return bank, credited, retired


def _rank(bank, tasks, tools, config, number) -> skill_bank.Events:
  """What the null curve needs; blocks of the other arms have none."""
  if not config.bank.top or config.bank.arm != "skills":
    return ()
  return skill_bank.ranking(
    bank, tasks, tools.encoder, number, config.bank.min_score
  )


def _shape(checked, attempts, tools, config, number) -> frontier.Edge:
  return frontier.shape(
    checked.proposals,
    attempts,
    iteration=number,
    group_size=config.solver.group_size,
    **config.frontier,
    seed=config.seed,
    invalid=config.challenger.invalid,
    invalid_penalty=config.challenger.invalid_penalty,
    solver_baseline=config.solver.baseline,
    challenger_baseline=config.challenger.baseline,
    solver_scaled=config.solver.advantage_std,
    challenger_scaled=config.challenger.advantage_std,
    std_epsilon=config.learner.std_epsilon,
    passage_tokens=config.distillation.passage_tokens,
    count_tokens=tools.count_tokens,
    language=tools.language,
    recorded=checked.pool.recorded,
    contrast=config.distillation.contrast,
  )


def _distill_ahead(state, tools, config):
  """Begins what was due after the iteration before, beside this one's rollouts.

  It follows from the state alone: a run that is resumed begins it again, and
  what was answered by then is kept. It lands at the end of this iteration.

  Returns:
    The cases and the future of what is written; None where runs wait.
  """
  if config.distillation.wait:
    return None
  cases = _cases(state.bank, state.queue, tools, config, state.iteration)
  if not cases or not distributed.is_lead():
    return cases, None
  executor = concurrent.futures.ThreadPoolExecutor(1, "distill")
  written = executor.submit(tools.distiller.distill_all, cases)
  executor.shutdown(wait=False)
  return cases, written


def _cases(bank, queue, tools, config, number) -> list[types.Case]:
  settings = config.distillation
  return distillation.cases(
    bank,
    queue,
    encoder=tools.encoder,
    iteration=number,
    every=settings.every,
    min_pending=settings.min_pending,
    max_records=settings.max_records,
    admit=settings.admit and not config.bank.frozen,
    consolidate=settings.consolidate,
  )


def _distill(bank, queue, ahead, solver, world, config, number):
  """Writes skills from the best failures, or takes those written meanwhile."""
  tools = world.tools
  if ahead is None:
    cases = _cases(bank, queue, tools, config, number)
    written = write_skills(cases, solver.params, world, config, number)
  else:
    cases, future = ahead
    written = []
    if cases:  # on the lead alone there is a future
      written = distributed.from_lead(lambda: future.result())
  return distillation.land(
    bank,
    queue,
    cases,
    written,
    origin=config.distillation.distiller,
    encoder=tools.encoder,
    language=tools.language,
    iteration=number,
    threshold=config.encoder.threshold,
  )


def write_skills(
  cases: Sequence[types.Case],
  params: Any,
  world: tools_lib.World,
  config: Any,
  number: int,
) -> list[types.Skill | types.DistillFailure]:
  """Lets the run's distiller, or the policy itself, write skills.

  Args:
    cases: of `distillation.cases`.
    params: the solver's masters.
    world: of the run.
    config: of the run; reads `distillation`.
    number: of the iteration, part of the sampling keys.
  """
  tools = world.tools
  if not cases:
    return []
  if tools.distiller is not None:
    return distributed.from_lead(lambda: tools.distiller.distill_all(cases))
  weights, _ = rollout.weights(tools.engine, world.solver, params)
  write = functools.partial(
    selfplay.write,
    weights,
    tools=tools,
    iteration=number,
    tokens=config.distillation.tokens,
    max_tokens=config_lib.slot_tokens(config),
  )
  return distiller_lib.PolicyDistiller(write).distill_all(cases)


def _learn(world, state, edge, config, begin, progress):
  """Updates both policies in turn; one that is shared learns in each turn.

  Returns:
    Policies and metrics, by role; a frozen challenger has none.
  """
  policies = {"challenger": state.challenger, "solver": state.solver}
  lessons = {"challenger": edge.proposals, "solver": edge.attempts}
  learners = {"challenger": world.challenger, "solver": world.solver}

  def prepare(role, first=True):
    return learners[role].prepare(
      policies[role].params,
      world.references[role],
      lessons[role],
      temperature=config[role].temperature,
      first=first,
    )

  frozen = config.challenger.frozen or not config.selfplay
  order = [r for r in config.learner.order if r == "solver" or not frozen]
  prepared, learned = {}, {}
  for role in order:
    begin(f"update {role}", len(lessons[role]))
    if role not in prepared:
      prepared[role] = prepare(role)
    if world.shared and config.learner.old_logprobs == "start":
      # The weights that played are about to move.
      for later in order[order.index(role) + 1 :]:
        prepared[later] = prepare(later, first=False)
    policies[role], learned[role] = _update(
      learners[role], policies[role], prepared.pop(role), progress, state
    )
    if world.shared:
      policies = dict.fromkeys(policies, policies[role])
  return policies, learned


def _update(learner, policy, prepared, progress, state):
  """Updates one policy; a loss that stays not a number stops the run."""
  try:
    return learner.learn(
      policy,
      prepared,
      on_batch=lambda episodes, tokens: progress.advance(
        episodes, tokens, passes=0
      ),
    )
  except learner_lib.NonFiniteUpdate as error:
    last = (
      f"The last good checkpoint is the one of iteration {state.iteration}, in "
      "the run's folder; the same command goes on from it."
      if state.iteration
      else "There is no checkpoint yet; the same command begins anew."
    )
    raise types.Stopped(f"{error} {last}") from error


def _stop_if_broken(checked, attempts, controls, world, config, first) -> None:
  """Stops before the update when a tool is down or its calls go unseen."""
  stop_if_spent(world)
  played = [p.episode for p in checked.proposals]
  played += [a.episode for a in (*attempts, *controls)]
  _stop_if_lost([*played, *checked.episodes], config.lost_limit)
  _stop_if_unjudged(checked, [*attempts, *controls], config.lost_limit)
  if first:
    _stop_if_nothing_searched(played)


def _stop_if_lost(
  episodes: Sequence[types.Episode],
  limit: float,
  planned: int = 0,
) -> None:
  """Stops for too many lost episodes.

  Args:
    episodes: that were played.
    limit: share of them that may stay lost.
    planned: how many there will be in the iteration, if there are more.

  Raises:
    types.Stopped: with the cause.
  """
  lost = [e for e in episodes if e.finish == "lost"]
  if len(lost) > limit * max(len(episodes), planned):
    raise types.Stopped(
      f"{len(lost)} of {len(episodes)} episodes stayed lost, more than "
      f"lost_limit = {limit:.0%}: {lost[0].turns[-1].note}. Nothing was "
      "updated; the same command goes on from here once the tool is back."
    )


def _stop_if_unjudged(
  checked, attempts, limit: float, planned: int = 0
) -> None:
  """Exact match finds right answers first: what is left over looks easy."""
  lost = checked.unanswered + sum(
    a.verdict is types.Verdict.UNKNOWN and a.episode.finish != "lost"
    for a in attempts
  )
  asked = checked.asked + max(len(attempts), planned)
  if lost > limit * asked:
    raise types.Stopped(
      f"{lost} of {asked} verdicts and answers of the judge stayed unknown, "
      f"more than lost_limit = {limit:.0%}; judge_failures.jsonl in the run's "
      "folder tells why. Nothing was updated; the same command goes on from "
      "here once the judge is back, and asks for nothing twice."
    )


def share_budget(config, ledger) -> None:
  """Divides among processes what the run may still spend; one has it all."""
  ledger.share(config.budget, distributed.gather([ledger.spent]))


def stop_if_spent(world) -> None:
  """Stops where a call was refused for the budget."""
  said = distributed.gather([world.texts.library.ledger.exceeded()])
  if world.tools.judge is not None:
    ledger = world.tools.judge.chat.ledger
    said.append(distributed.from_lead(ledger.exceeded))
  if any(said):
    raise types.Stopped(next(filter(None, said)))


def _stop_if_nothing_searched(episodes: Sequence[types.Episode]) -> None:
  """A parser that misses every call would train on without a word."""
  turns = [turn for episode in episodes for turn in episode.turns]
  wrote = sum(
    "</search>" in turn.text and "not executed" not in turn.note
    for turn in turns
  )
  if wrote and not any(turn.action == "search" for turn in turns):
    raise types.Stopped(
      f"{wrote} turns of the first iteration hold a search tag, but no search "
      "was executed. Look at them with --mode=show; the template or the "
      "tokenizer does not fit the policy."
    )
