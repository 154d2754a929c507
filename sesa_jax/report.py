"""What a person is told: the budget before a run, the tables after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import rich.box
import rich.console
import rich.table

from sesa_jax import config as config_lib
from sesa_jax import evaluation, metrics
from sesa_jax.stages import distillation

# Tokens of a judge's prompt, passages aside: instructions, question, answers.
_ASKED = 600


def budget(config: Any) -> dict[str, int]:
  """Token-passes that each stage of an iteration may take at most.

  A token-pass is one token through the model once, forward; a backward pass
  counts as two, rematerialisation and the reference as one each. Replays of
  lost episodes come on top.
  """
  tasks = config.questions
  tasks *= config.challenger.group_size if config.selfplay else 1
  posed = tasks if config.selfplay else 0
  solved = tasks * config.solver.group_size
  controls = tasks * config.bank.control_attempts
  learned = 3 + config.policy.remat

  def update(role, rows):
    several = role.minibatch_questions < tasks or config.policy.shared
    passes = learned + several + (role.kl_coefficient != 0)
    return rows * role.episode_tokens * passes

  return {
    "pose": posed * config.challenger.episode_tokens,
    "verify": (config.verifier.answerer == "solver")
    * (posed + 2 * min(config.verifier.probes, posed))
    * config.verifier.max_tokens,
    "solve": (solved + controls) * config.solver.episode_tokens,
    "update challenger": (not config.challenger.frozen)
    * update(config.challenger, posed),
    "update solver": update(config.solver, solved),
    "distill": (config.distillation.distiller == "solver")
    * config.distillation.max_records
    * config_lib.slot_tokens(config)
    // config.distillation.every,
  }


def bill(config: Any) -> dict[str, int]:
  """Returns what a run's training asks of others at most, evaluations aside.

  P questions an iteration, each of a proposal, with G attempts:

    searches       P (challenger.turns - 1) + P G (solver.turns - 1)
    verdicts       P G
    evidence       P, and two probes of `verifier.probes` of them
    distillations  `max_records` every `every` iterations

  since none searches in a last turn. Verdicts, evidence and distillations are
  0 where nobody else is asked.
  """
  tasks = config.questions
  tasks *= config.challenger.group_size if config.selfplay else 1
  posed = tasks if config.selfplay else 0
  tries = config.solver.group_size + config.bank.control_attempts
  checked = posed * (config.verifier.answerer == "judge")
  graded = config.judge.verdicts and bool(config.judge.base_url)
  one = {
    "searches": posed * (config.challenger.turns - 1)
    + tasks * tries * (config.solver.turns - 1),
    "verdicts": tasks * tries * graded,
    "evidence checks": checked,
    "probes": 2 * min(config.verifier.probes, checked),
  }
  found = {name: count * config.iterations for name, count in one.items()}
  settings = config.distillation
  asked = settings.distiller == "chat" and settings.admit
  asked = asked and not config.bank.frozen and config.frontier.gate != "off"
  most = config.iterations // settings.every * settings.max_records
  return found | {"distillations": asked * most}


def judge_cost(config: Any, calls: Mapping[str, int]) -> float:
  """Returns what calls of the judge cost at most, by its prices.

  About: beside passages a prompt is taken to be `_ASKED` tokens.

  Args:
    config: an experiment.
    calls: by the names of `bill`; searches are none of the judge's.
  """
  judge, settings = config.judge, config.distillation
  clusters = settings.consolidate == "cluster"
  records = distillation.CLUSTER if clusters else 1
  tokens = {  # of passages, and of the reply
    "verdicts": (0, judge.verdict_tokens),
    "evidence checks": (config.verifier.max_tokens, judge.answer_tokens),
    "probes": (config.verifier.max_tokens, judge.answer_tokens),
    "distillations": (records * settings.passage_tokens, settings.tokens),
  }
  millions = sum(
    calls[name]
    * (
      (_ASKED + shown) * (judge.prompt_price or 0.0)
      + reply * (judge.completion_price or 0.0)
    )
    for name, (shown, reply) in tokens.items()
  )
  return millions / 1e6


def _bill(config: Any, sets: Mapping[str, Sequence]) -> str:
  """Says what a run asks of others at most, and what they cost."""
  questions = sum(map(len, sets.values())) * len(config.eval.banks)
  tested = questions * len(set(evaluations(config)))
  found = bill(config)
  said = ", ".join(f"{count:,} {name}" for name, count in found.items())
  searched = tested * (config.eval.turns - 1)
  said = (
    f"Asked for at most: {said}; evaluations on top, with {tested:,} answers "
    f"and {searched:,} searches"
  )
  if config.search.engine == "google":
    cost = (found["searches"] + searched) * config.search.google.price / 1000
    said += f". The searches cost {cost:,.2f}"
  graded = config.judge.verdicts and bool(config.judge.base_url)
  calls = found | {"verdicts": found["verdicts"] + tested * graded}
  if any(count for name, count in calls.items() if name != "searches"):
    said += (
      ". What the judge costs is not known without judge.prompt_price"
      if config.judge.prompt_price is None
      else f". The judge costs about {judge_cost(config, calls):,.2f}"
    )
  return f"{said}."


def evaluation_budget(config: Any, sets: Mapping[str, Sequence]) -> int:
  """Token-passes of one evaluation at most."""
  questions = sum(map(len, sets.values()))
  return questions * len(config.eval.banks) * config.solver.episode_tokens


def evaluations(config: Any) -> list[int]:
  """Finished iterations after which a run is evaluated."""
  every = config.eval.every
  between = range(every, config.iterations, every) if every else ()
  return [0, *between, config.iterations]


def plan(config: Any, sets: Mapping[str, Sequence]) -> rich.table.Table:
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
  one = evaluation_budget(config, sets)
  rows.append(("evaluate", one, one * len(set(evaluations(config)))))
  for name, each, all_ in rows:
    table.add_row(name, f"{each:,}", f"{all_:,}")
  table.add_row("total", "", f"{sum(row[2] for row in rows):,}")
  table.caption, table.caption_justify = _bill(config, sets), "left"
  return table


def print_report(
  config: Any, folder: metrics.RunFolder, cells: Sequence[Mapping[str, Any]]
) -> None:
  """Prints what the run did, what it distilled and where everything lies."""
  console = rich.console.Console()
  if cells:
    console.print(evaluation.table(cells))
    console.print(evaluation.caution(cells, config.eval.confidence))
    console.print(_terms(config, folder.read_json("manifest.json", {})))
  rows = folder.read("metrics.jsonl")
  console.print(_played(rows))
  console.print(distilled(folder.read("skills_history.jsonl")))
  console.print(f"\nEverything lies in {folder.path}:", highlight=False)
  for name, what in (
    ("episodes/", "what was played (--mode=show prints it)"),
    ("questions.jsonl", "every proposal, its state and its reward"),
    ("failures.jsonl", "failures at the frontier"),
    ("skills.jsonl", "the bank now; skills_history.jsonl: how it came about"),
    ("plots/", "curves: accuracy, rewards, the bank beside noise, ..."),
    ("metrics.jsonl", "one line an iteration"),
    ("eval.json", "scores and predictions"),
    ("checkpoints/", "policies, optimizers, bank, queue, pool"),
  ):
    console.print(f"  {name:<16} {what}", highlight=False)


def _terms(config: Any, manifest: Mapping[str, Any]) -> str:
  """Under what terms the scores hold: without them none can be compared."""
  hashes = manifest.get("hashes", {})
  names = ("prompts", "template", "corpus", "index", "questions")
  return (
    f"Judge: {manifest.get('judge')}. At most {config.eval.turns} turns, "
    f"{config.solver.turn_tokens} tokens a turn, "
    f"{config.solver.episode_tokens} an episode. "
    + ", ".join(f"{name} {hashes.get(name, '-')[:8]}" for name in names)
    + "."
  )


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
    "skills admitted": lambda r: f"{r['distillation/admitted']:.0f}",
    "active skills": lambda r: f"{r['bank/active']}",
  }.items():
    table.add_row(name, *(text(row) for row in rows[-10:]))
  return table


def _percent(value: float | None) -> str:
  return "-" if value is None else f"{value:.0%}"


def distilled(history: Sequence[Mapping[str, Any]]) -> rich.table.Table:
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
