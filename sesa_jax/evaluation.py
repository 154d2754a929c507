"""Questions x policy x bank: scores, intervals, predictions, a table.

One attempt a question. A bank mode says what is in the prompt: `none` is the
policy alone, `final` is the bank as it stands, `placebo` and `scrambled` are
blocks of it that should not help (`skills.arms`), `other` is another bank.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import rich.box
import rich.table

from sesa_jax import config as config_lib
from sesa_jax import metrics, types
from sesa_jax.judge import scoring
from sesa_jax.skills import arms
from sesa_jax.skills import bank as skill_bank
from sesa_jax.stages import priming, selfplay

PROVES = 385  # questions that bring a 95 % interval near 50 % to +-5 points


def interval(right: int, total: int, confidence: float) -> tuple[float, float]:
  """Wilson's score interval of a share.

    (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)

  Source: Wilson, JASA 22 (1927).

  Args:
    right: successes.
    total: trials; with none the interval is (0, 1).
    confidence: 0.95, say.
  """
  if total == 0:
    return 0.0, 1.0
  z = statistics.NormalDist().inv_cdf(0.5 + confidence / 2)
  p = right / total
  middle = p + z * z / (2 * total)
  half = z * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
  scale = 1 + z * z / total
  return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def evaluate(
  weights: Any,
  bank: skill_bank.SkillBank,
  sets: Mapping[str, Sequence[types.Question]],
  tools: types.Tools,
  config: Any,
  *,
  iteration: int,
) -> list[dict[str, Any]]:
  """Plays every set under every bank mode.

  Args:
    weights: the solver's rollout weights.
    bank: for all modes but "none".
    sets: name -> questions.
    tools: of the run.
    config: the run's; reads `eval`, `solver`, `bank`.
    iteration: iterations that the policy has learned from.

  Returns:
    One cell a set and bank mode: scores, interval, cost and predictions.
  """
  limits = types.Limits(
    config.solver.turn_tokens, config.solver.episode_tokens, config.eval.turns
  )
  everything = [q for questions in sets.values() for q in questions]
  cells = []
  for mode in config.eval.banks:
    began = time.perf_counter()
    shown, blocks, missed = {}, {}, 0
    if mode != "none":
      shown, blocks, missed = show_skills(
        _other_bank(tools, config) if mode == "other" else bank,
        everything,
        tools,
        config,
        arm=mode if mode in ("placebo", "scrambled") else "skills",
        iteration=iteration,
      )
    attempts, _ = selfplay.solve(
      weights,
      everything,
      shown,
      blocks,
      tools,
      iteration=iteration,
      attempts=1,
      sampling=types.Sampling(config.eval.temperature),
      limits=limits,
      arm=f"eval/{mode}",
    )
    seconds = (time.perf_counter() - began) / max(len(everything), 1)
    for name, questions in sets.items():
      ids = {question.id for question in questions}
      cells.append(
        dict(
          iteration=iteration,
          set=name,
          bank=mode,
          temperature=config.eval.temperature,
        )
        | score(
          [a for a in attempts if a.question.id in ids],
          tools.language,
          config.eval.confidence,
        )
        | {"seconds/question": seconds}
        | ({"placebo_missed": missed} if mode == "placebo" else {})
      )
      for row in cells[-1]["predictions"][: config.eval.episodes]:
        row["episode"] = _episode_row(
          next(a for a in attempts if a.question.id == row["id"]),
          row,
          iteration,
          tools,
        )
  return cells


def _episode_row(attempt, row, iteration, tools) -> dict[str, Any]:
  """What `--mode=show` prints, as of a training episode."""
  names = ("question", "targets", "prediction", "verdict", "skill_ids")
  return metrics.episode_row(
    attempt.episode,
    lambda ids: tools.tokenizer.decode(ids, skip_special_tokens=False),
    iteration=iteration,
    reward=None,
    advantage=None,
    **{name: row[name] for name in names},
  )


def _other_bank(tools: types.Tools, config: Any) -> skill_bank.SkillBank:
  empty = skill_bank.create(config.bank.capacity, tools.encoder.dim)
  source = config_lib.prime(config.eval.other)
  return priming.prime(empty, source, tools.encoder)[0]


def show_skills(
  bank: skill_bank.SkillBank,
  questions: Sequence[types.Question],
  tools: types.Tools,
  config: Any,
  *,
  arm: str = "skills",
  iteration: int = 0,
) -> tuple[dict[str, tuple[types.Skill, ...]], dict[str, str], int]:
  """Retrieves each question's skills and renders them within the budget.

  Args:
    bank: of the iteration.
    questions: with ids that are unique among them.
    tools: of the run.
    config: the run's; reads `bank` and `seed`.
    arm: `skills`, or one of `skills.arms`: `placebo`, `scrambled`.
    iteration: with the seed the key of the other arms' draws.

  Returns:
    question id -> the skills that are shown, question id -> their block, and
    the number of placebo blocks that are not of the real one's length.
  """
  found = skill_bank.top(
    bank,
    questions,
    tools.encoder,
    k=config.bank.top,
    min_score=config.bank.min_score,
    kind=config.bank.index,
  )
  shown, blocks = {}, {}
  for name, skills in found.items():
    block, kept = skill_bank.render(
      skills,
      tools.count_tokens,
      config.bank.block_tokens,
      config.bank.fields,
    )
    if kept:
      shown[name], blocks[name] = kept, block
  drawn = dict(fields=config.bank.fields, seed=config.seed, iteration=iteration)
  if arm == "placebo":
    return arms.placebo(
      bank,
      questions,
      tools.encoder,
      blocks,
      shown,
      tools.count_tokens,
      **drawn,
    )
  if arm == "scrambled":
    return *arms.scrambled(shown, **drawn), 0
  return shown, blocks, 0


def score(
  attempts: Sequence[types.Attempt], language: Any, confidence: float
) -> dict[str, Any]:
  """Scores attempts: exact match with its interval, F1, unknown, cost.

  A lost attempt is neither right nor wrong: `em_low` counts it as wrong,
  `em_high` as right, and `em` is null above 1 % of them.
  """
  total = len(attempts)
  right = sum(a.verdict == types.Verdict.RIGHT for a in attempts)
  unknown = sum(a.verdict == types.Verdict.UNKNOWN for a in attempts)
  low, _ = interval(right, total, confidence)
  _, high = interval(right + unknown, total, confidence)

  def mean(values):
    return sum(values) / total if total else math.nan

  return dict(
    n=total,
    em=right / total if total and unknown <= 0.01 * total else None,
    em_low=right / total if total else None,
    em_high=(right + unknown) / total if total else None,
    em_interval=[low, high],
    f1=mean(
      scoring.f1(a.prediction or "", a.question.targets, language)
      for a in attempts
    ),
    unknown=unknown,
    answered=sum(a.prediction is not None for a in attempts),
    prompt_tokens=mean(a.episode.prompt_length for a in attempts),
    searches=mean(
      sum(t.action == "search" for t in a.episode.turns) for a in attempts
    ),
    predictions=[
      dict(
        id=a.question.id,
        question=a.question.text,
        targets=a.question.targets,
        prediction=a.prediction,
        verdict=a.verdict,
        finish=a.episode.finish,
        searches=sum(t.action == "search" for t in a.episode.turns),
        found=_saw_answer(a, language),
        skill_ids=a.skill_ids,
      )
      for a in attempts
    ],
  )


def _saw_answer(attempt: types.Attempt, language: Any) -> bool:
  """Says whether a target was mentioned in a passage that it saw."""
  return any(
    language.mentions_any(f"{p.title}\n{p.text}", attempt.question.targets)
    for p in attempt.episode.passages
  )


def table(cells: Sequence[Mapping[str, Any]]) -> rich.table.Table:
  """Lays cells out: a row a set, a column a moment and bank mode."""
  columns = list(dict.fromkeys((c["iteration"], c["bank"]) for c in cells))
  last = max((c["iteration"] for c in cells), default=0)
  hot = max((cell.get("temperature", 0.0) for cell in cells), default=0.0)
  how = f"temperature {hot:g}" if hot else "greedy"
  out = rich.table.Table(
    title=f"Evaluation: exact match (F1), {how}", box=rich.box.SIMPLE_HEAD
  )
  out.add_column("set")
  out.add_column("n", justify="right")
  for number, mode in columns:
    moment = {0: "before", last: "after"}.get(number, f"iteration {number}")
    out.add_column(f"{moment}\nbank {_MODES.get(mode, mode)}", justify="right")
  for name in dict.fromkeys(cell["set"] for cell in cells):
    row = {(c["iteration"], c["bank"]): c for c in cells if c["set"] == name}
    out.add_row(
      name,
      str(next(iter(row.values()))["n"]),
      *(_cell_text(row[column]) if column in row else "" for column in columns),
    )
  return out


_MODES = {"none": "off", "final": "on"}


def _cell_text(cell: Mapping[str, Any]) -> str:
  if cell["em"] is None:
    return f"[{cell['em_low']:.0%}, {cell['em_high']:.0%}] unknown"
  low, high = cell["em_interval"]
  return f"{cell['em']:.0%} ({cell['f1']:.2f})\n{low:.0%} to {high:.0%}"


def caution(cells: Sequence[Mapping[str, Any]], confidence: float) -> str:
  """Says how much so many questions can show."""
  columns: dict[tuple, int] = {}
  for cell in cells:
    key = (cell["iteration"], cell["bank"])
    columns[key] = columns.get(key, 0) + cell["n"]
  total = max(columns.values(), default=0)
  if not total:
    return "Nothing was evaluated."
  low, high = interval(total // 2, total, confidence)
  said = (
    f"{total} questions a column: one share near 50 % has a "
    f"{confidence:.0%} interval of about {low:.0%} to {high:.0%}."
  )
  if total < PROVES:
    said += " So few questions prove nothing about which column is better."
  return said
