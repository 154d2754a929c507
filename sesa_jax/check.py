"""Before paying: does all that a run needs answer, fit and work together?

    python -m sesa_jax.main --config=FILE --workdir=W --mode=check

Reads what a run reads, calls each endpoint once, writes and deletes a file
where the run's folder will be, compares the disk with its checkpoints, renders
a prompt, and plays one iteration of this very config with scripted policies,
search and judge. No weight is loaded and no accelerator is used.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.markup
import rich.table

from sesa_jax import config as config_lib
from sesa_jax import loop, metrics, prompts, report, types
from sesa_jax import state as state_lib
from sesa_jax import tools as tools_lib
from sesa_jax.engine import engine as engine_lib
from sesa_jax.judge import offline
from sesa_jax.learner import packing
from sesa_jax.policy import model, weights
from sesa_jax.search import engines
from sesa_jax.stages import validity

_PROBE = types.Passage("check", "Paris", "Paris is the capital of France.")
_ASKED = "What is the capital of France?"


class Check(NamedTuple):
  """One thing that was looked at."""

  name: str
  passed: bool
  said: str


def main(
  config: Any, workdir: str, console: rich.console.Console | None = None
) -> int:
  """Checks everything, prints a table; returns the exit code, 1 if any fails.

  Args:
    config: an experiment, for its machine.
    workdir: of the run to come; nothing stays in it.
    console: that prints.
  """
  console = console or rich.console.Console()
  table = rich.table.Table("check", "", "what was found")
  failed = []
  for check in run(config, workdir):
    mark = "[green]ok[/]" if check.passed else "[red]FAILED[/]"
    table.add_row(check.name, mark, rich.markup.escape(check.said))
    if not check.passed:
      failed.append(check.name)
  console.print(table)
  console.print(
    f"{len(failed)} failed: {', '.join(failed)}. Nothing was spent but one "
    "call to each endpoint."
    if failed
    else "All passed. The same command without --mode=check begins the run."
  )
  return 1 if failed else 0


def run(config: Any, workdir: str) -> Iterator[Check]:
  """Yields each check as it is done; one that fails leaves the others."""
  yield _tried("config and keys", _check_config, config)
  yield _tried("disk", _check_disk, config, workdir)
  yield _tried("workdir", _check_workdir, workdir)
  yield _tried("tokenizer and template", _check_template, config)
  yield _tried("judge", _check_judge, config)
  texts: list[tools_lib.Texts] = []
  yield _tried("search and texts", _check_texts, config, texts)
  if texts:
    yield _tried("an iteration", _check_iteration, config, texts[0])


def _tried(name, check, *values) -> Check:
  """Turns what a check raises into a row."""
  try:
    return Check(name, True, check(*values))
  except (ValueError, OSError, types.Stopped) as error:
    return Check(name, False, " ".join(str(error).split()))


# --- what a run needs --------------------------------------------------------


def _check_config(config) -> str:
  config_lib.check(config)
  tools_lib.check_judge(config)
  return "every value is one that a run can begin with"


def _check_workdir(workdir) -> str:
  folder = _nearest(workdir)
  with tempfile.NamedTemporaryFile(dir=folder) as file:
    file.write(bytes(2**20))
    file.flush()
    os.fsync(file.fileno())
  return f"a MiB was written to {folder} and deleted"


def _nearest(workdir: str) -> Path:
  """The folder, or where it will be made."""
  if "://" in workdir:
    raise ValueError(f"{workdir} is no local or mounted folder, as logs need.")
  folder = Path(workdir).absolute()
  return next(f for f in (folder, *folder.parents) if f.exists())


def checkpoint_bytes(config: Any) -> int:
  """Bytes on the disk of a run's checkpoints at most.

    n (4 + 2 m) p (keep + 1) + 4 n p milestones

  for p parameters of n policies with two moments of m bytes each, since the
  next checkpoint is whole before the oldest goes. The last milestone is the
  run's end.
  """
  backbone = weights.check(
    config.policy.source, config_lib.locate(config.policy.path)
  )
  tree = jax.tree.leaves(model.abstract_params(backbone))
  policies = 1 if config.policy.shared else 2
  parameters = policies * sum(leaf.size for leaf in tree)
  every = config.checkpoint.milestone_every
  milestones = 1 + (config.iterations - 1) // every if every else 1
  moment = jnp.dtype(config.learner.moments).itemsize
  full = parameters * (4 + 2 * moment)
  return full * (config.checkpoint.keep + 1) + 4 * parameters * milestones


def _check_disk(config, workdir) -> str:
  wanted = checkpoint_bytes(config)
  free = shutil.disk_usage(_nearest(workdir)).free
  said = f"{wanted / 1e9:,.1f} GB of checkpoints, {free / 1e9:,.1f} GB free"
  if wanted > free:
    raise ValueError(
      f"{said}. Free some, or lower checkpoint.keep or the number of "
      "milestones (checkpoint.milestone_every)."
    )
  return said


def _check_template(config) -> str:
  words = tools_lib.load_words(config)
  ids = prompts.render(
    words,
    prompts.solver(_ASKED),
    config.policy.template,
    config.policy.example,
  )
  return f"a prompt of {len(ids)} tokens, template {config.policy.template!r}"


def _check_judge(config) -> str:
  judge = tools_lib.judge(config)
  if judge is None:
    return "nobody is asked"
  (answer,) = judge.answer([("check", _ASKED, [_PROBE])])
  spent = judge.chat.ledger.drain()
  judge.chat.close()
  if answer is None:
    kinds = [name for name, times in spent.items() if "fail" in name and times]
    raise ValueError(
      f"{judge.name} did not answer ({', '.join(kinds)}). See judge.base_url,"
      " judge.model and the key."
    )
  return f"{judge.name} answered {answer!r}"


def _check_texts(config, found: list) -> str:
  texts = tools_lib.read(config)
  found.append(texts)
  (answer,) = texts.library.engine.search(
    [_ASKED], config.environment.passages_per_search
  )
  if config.search.replay_only:
    answer = ()  # the cache alone answers, and need not hold this query
  if isinstance(answer, types.SearchFailure):
    raise ValueError(f"A search was lost: {answer.reason}")
  questions = sum(map(len, texts.sets.values()))
  return (
    f"{len(answer)} passages for one query; {len(texts.seeds):,} seeds, "
    f"{len(texts.fixed):,} fixed questions, {questions:,} for evaluation"
  )


# --- one iteration with a script ----------------------------------------------


def _check_iteration(config, texts) -> str:
  world = scripted(config, texts)
  state, _ = state_lib.start(config, world)
  with metrics.Progress(sum(report.budget(config).values())) as progress:
    after, record = loop.iteration(state, world, config, progress)
  found = record.metrics
  if not found["solver/questions"]:
    raise ValueError(
      f"No question came of {found['challenger/proposals']} scripted proposals"
      f": {_states(found)}. Raise challenger.turn_tokens, episode_tokens or "
      "verifier.max_tokens."
    )
  return (
    f"{found['challenger/proposals']} proposals ({_states(found)}), "
    f"{found['solver/questions']} questions played, "
    f"{found['solver/reward/mean']:.0%} of the attempts right, "
    f"{found['frontier/recorded']} failures recorded, "
    f"{len(after.bank.skills)} skills"
  )


def _states(found: Mapping[str, Any]) -> str:
  states = {
    name.rpartition("/")[2]: count
    for name, count in found.items()
    if name.startswith("challenger/state/") and count
  }
  return (
    ", ".join(f"{count} {name}" for name, count in states.items()) or "none"
  )


def scripted(config: Any, texts: tools_lib.Texts) -> tools_lib.World:
  """Returns a world whose policies, search and judge follow a script.

  Prompts, grammar, budgets, rules, rewards, bank and records are the run's.
  """
  words = tools_lib.load_words(config)
  script = Script(config, texts)
  embedder = tools_lib.load_encoder(config.encoder)
  engine = Engine(words, script)
  tools = tools_lib.equip(config, words, engine, Library(), embedder)
  distiller = offline.OfflineDistiller(tools.language)
  if config.distillation.distiller == "solver":
    distiller = None
  if config.judge.base_url or config.verifier.answerer == "judge":
    tools = dataclasses.replace(tools, judge=Judge(script))
  tools = dataclasses.replace(tools, distiller=distiller)
  library = dataclasses.replace(engines.nothing(), engine=tools.search)
  return tools_lib.World(
    dataclasses.replace(texts, library=library),
    tools,
    Learner(config.challenger.minibatch_questions),
    Learner(config.solver.minibatch_questions),
    dict.fromkeys(config_lib.ROLES, ()),
    config.policy.shared,
    {},
  )


class Script:
  """What policies write: valid questions, right and wrong answers."""

  def __init__(self, config: Any, texts: tools_lib.Texts):
    self._wanted = {
      f"1/{seed.id}": validity.searches_wanted(
        seed, config.challenger.min_searches
      )
      for seed in texts.seeds
    }
    self._targets = {f"1/{s.id}": s.targets[0] for s in texts.seeds}
    self._targets |= {q.id: q.targets[0] for q in texts.fixed}

  def target(self, name: str) -> str:
    """The answer of a seed, or of a question that was made of one."""
    name = name.removeprefix("evidence/").removeprefix("control/")
    while name not in self._targets:
      name = name.rpartition("/")[0]
    return self._targets[name]

  def write(self, request: types.Request, attempt: int, turn: int) -> str:
    """The text of a turn."""
    if request.arm == "text":
      return "{}"
    target = self.target(request.id)
    if request.arm == "evidence":
      return f"<answer>{target}</answer>"
    if request.arm == "challenger":
      if turn < self._wanted[request.id]:
        return f"<search>{target} {turn}</search>"
      number = zlib.crc32(request.id.encode())
      return (
        "<question>Which one is it that the pages found just now are all "
        f"about, page {number}?</question>"
      )
    if turn == 0:
      return f"<search>{target}</search>"
    right = attempt % 2 == 0
    return f"<answer>{target if right else 'something else'}</answer>"


class Library:
  """Finds a page about whatever is asked."""

  def search(self, queries: Sequence[str], k: int):
    """Returns one passage a query."""
    return [
      (types.Passage(f"page/{query}", query, f"This is about {query}."),)
      for query in queries
    ]


class Judge:
  """Answers evidence with the target, and finds wrong what is no match."""

  name = "a script"

  def __init__(self, script: Script):
    ledger = engines.nothing().ledger
    self.chat = SimpleNamespace(ledger=ledger)
    self._script = script

  def answer(self, requests) -> list[str]:
    """The target of each question."""
    return [self._script.target(key) for key, _, _ in requests]

  def judge(self, questions, targets, answers) -> list[types.Verdict]:
    """WRONG, each of them."""
    return [types.Verdict.WRONG] * len(questions)


class Learner:
  """Takes lessons as a learner does, and changes nothing."""

  compute_dtype = "float32"

  def __init__(self, minibatch_questions: int):
    self._minibatch = minibatch_questions

  def init(self, reference) -> types.Policy:
    """A policy without weights."""
    return types.Policy((), (), 0)

  def score(self, params, episodes, temperature) -> list:
    """No score: a script has no copy that could be wrong."""
    return [np.zeros(len(e.ids), np.float32) for e in episodes]

  def prepare(self, params, reference, lessons, *, temperature, first=True):
    """Divides lessons into minibatches."""
    assert all(np.isfinite(lesson.advantage) for lesson in lessons)
    return list(packing.minibatches(lessons, self._minibatch))

  def learn(self, policy, prepared, *, on_batch=None):
    """Returns the policy as it is."""
    return policy, {"updates": len(prepared)}


class Engine:
  """Plays a script through the run's tokenizer and environment."""

  def __init__(self, words: Any, script: Script):
    self._words, self._script = words, script

  def load(self, params):
    """Nothing is cast."""
    return params

  def probe(self, weights) -> tuple:
    """No episode to compare."""
    return ()

  def play(
    self,
    weights: Any,
    requests: Sequence[types.Request],
    environment: types.Environment,
    *,
    iteration: int,
    on_episode=lambda episode: None,
  ) -> engine_lib.Played:
    """Plays every attempt to its end."""
    episodes = []
    for request in requests:
      for attempt in range(request.attempts):
        episodes.append(self._episode(request, attempt, environment))
        on_episode(episodes[-1])
    sampled = sum(int(e.mask.sum()) for e in episodes)
    counted = {"tokens/sampled": sampled, "slot_steps": sampled}
    nothing = {"tokens/prefilled": 0, "seconds": 1.0, "seconds/matmul": 0.0}
    return engine_lib.Played(tuple(episodes), counted | nothing)

  def _episode(self, request, attempt, environment) -> types.Episode:
    ids, own = list(request.prompt_ids), [False] * len(request.prompt_ids)
    turns: list[types.Turn] = []
    finish = ""
    while not finish:
      text = self._script.write(request, attempt, len(turns))
      written = self._words.encode(text, add_special_tokens=False)
      room = request.limits.episode_tokens - len(ids)
      limit = min(request.limits.turn_tokens, room)
      reason = "stop" if environment.stops else "eos"
      if len(written) > limit:
        reason = "episode_tokens" if limit == room else "turn_tokens"
      written = written[: max(limit, 0)]
      start, end = len(ids), len(ids) + len(written)
      reply = environment.respond(
        types.Pause(
          request.id,
          attempt,
          len(turns),
          sum(turn.action == "malformed" for turn in turns),
          tuple(written),
          reason,
          request.limits.episode_tokens - end,
          request.limits.turns,
        )
      )
      if isinstance(reply, Future):
        reply = reply.result()
      ids += [*written, *reply.ids]
      own += [True] * len(written) + [False] * len(reply.ids)
      did = (reply.action, reply.argument, reply.passages, reply.note)
      turns.append(types.Turn(start, end, len(ids), text, *did))
      finish = reply.finish
    assert len(ids) <= request.limits.episode_tokens
    return types.Episode(
      request.id,
      attempt,
      request.arm,
      np.array(ids, np.int32),
      len(request.prompt_ids),
      np.array(own),
      np.zeros(len(ids), np.float32),
      tuple(turns),
      finish,
    )
