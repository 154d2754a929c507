"""Skills from what was played already, and from early self-play.

`distill` reads the episodes of any run, or of any other agent, and writes a
bank; `mine` plays them first, with a frozen bank, as SESA did for its first
skills (arXiv 2607.29468).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import rich.console
from absl import logging

from sesa_jax import config as config_lib
from sesa_jax import distributed, experiment, loop, report, types
from sesa_jax import tools as tools_lib
from sesa_jax.data import lines
from sesa_jax.judge import scoring
from sesa_jax.language import as_targets, question_key
from sesa_jax.search import engines
from sesa_jax.skills import bank as skill_bank
from sesa_jax.skills import life
from sesa_jax.stages import distillation, frontier, priming, selfplay

_POSED = re.compile(r"\d+/(.+)/\d+")  # the id of a question that was posed

# Of a line of another agent: whether it must be there, and what it may be.
_KEYS: Mapping[str, tuple[bool, Any]] = {
  "question": (True, str),
  "targets": (True, str | list),
  "prediction": (True, str | None),
  "searches": (True, list),
  "question_id": (False, str),
  "seed_id": (False, str),
  "verdict": (False, str | None),
  "skill_ids": (False, list),
}


# --- reading -----------------------------------------------------------------


def read(
  paths: Sequence[str],
) -> tuple[list[types.FailureRecord], list[list[types.Attempt]]]:
  """Reads what was played: failure records as they are, attempts in groups.

  Args:
    paths: each the folder of a run (its `failures.jsonl`, or without one its
      episodes), an episode file of one, a `failures.jsonl`, or a JSONL file of
      another agent, an attempt a line (docs/skills.md).

  Returns:
    Records, and the attempts at each question. A verdict that a line does not
    give is that of exact match.

  Raises:
    ValueError: a path is none of those, or the file, line and key of a fault.
  """
  records: list[types.FailureRecord] = []
  groups: dict[tuple[str, Any, str], list[types.Attempt]] = {}
  for path in lines.files(paths, instead="failures.jsonl"):
    for where, row in lines.objects(path):
      if "passages_seen" in row:
        records.append(_of_a_run(distillation.from_json, row, where))
      elif "arm" in row:
        if row["arm"] == "solver":
          attempt = _of_a_run(_played, row, where)
          key = str(path), row.get("iteration"), attempt.question.id
          groups.setdefault(key, []).append(attempt)
      else:
        _check(row, where)
        name = row.get("question_id") or question_key(row["question"])
        group = groups.setdefault((str(path), 0, name), [])
        group.append(_told(row, name, len(group)))
  return records, list(groups.values())


def _of_a_run(parse: Callable[[Any], Any], row: Any, where: str) -> Any:
  """Parses a row that a run wrote, and says where somebody changed it."""
  try:
    return parse(row)
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f"{where} is not as a run writes it ({error!r}). Take the file as it was."
    ) from error


def _check(row: Mapping[str, Any], where: str) -> None:
  for key in row:
    if key not in _KEYS:
      raise ValueError(
        f"{where}, key {key!r}: unknown. Keys: {', '.join(_KEYS)}."
      )
  for key, (required, kind) in _KEYS.items():
    if key not in row:
      if required:
        raise ValueError(f"{where}, key {key!r}: missing.")
    elif not isinstance(row[key], kind):
      raise ValueError(f"{where}, key {key!r}: {row[key]!r} is of no use.")
  if row.get("verdict") not in (None, *types.Verdict):
    raise ValueError(
      f"{where}, key 'verdict': {row['verdict']!r} is none of "
      f"{', '.join(types.Verdict)}."
    )
  if not row["question"].strip():
    raise ValueError(f"{where}, key 'question': empty.")
  try:
    as_targets(row["targets"])
  except ValueError as error:
    raise ValueError(f"{where}, key 'targets': {error}") from error
  if not all(isinstance(id, str) for id in row.get("skill_ids", ())):
    raise ValueError(f"{where}, key 'skill_ids': each is a text.")
  for search in row["searches"]:
    if not (
      isinstance(search, dict)
      and isinstance(search.get("query"), str)
      and isinstance(search.get("passages"), list)
      and all(map(_is_page, search["passages"]))
    ):
      raise ValueError(
        f"{where}, key 'searches': each is an object with a query and its "
        "passages, objects with title and text."
      )


def _is_page(page: Any) -> bool:
  return isinstance(page, dict) and all(
    isinstance(page.get(name, default), str)
    for name, default in (("title", None), ("text", None), ("id", ""))
  )


def _told(row: Mapping[str, Any], name: str, attempt: int) -> types.Attempt:
  """An attempt of another agent."""
  turns = [
    _turn(
      search["query"],
      tuple(
        types.Passage(page.get("id", ""), page["title"], page["text"])
        for page in search["passages"]
      ),
    )
    for search in row["searches"]
  ]
  question = types.Question(
    id=name,
    text=row["question"],
    targets=as_targets(row["targets"]),
    hops=1,
    seed_id=row.get("seed_id", ""),
    origin="fixed",
  )
  return _attempt(row, question, attempt, turns)


def _played(row: Mapping[str, Any]) -> types.Attempt:
  """An attempt of a run."""
  turns = [
    _turn(
      turn["argument"],
      tuple(types.Passage(**page) for page in turn["passages"]),
    )
    for turn in row["turns"]
    if turn["action"] == "search"
  ]
  posed = _POSED.fullmatch(row["request_id"])
  question = types.Question(
    id=row["request_id"],
    text=row["question"],
    targets=tuple(row["targets"]),
    hops=1,
    seed_id=posed[1] if posed else "",
    origin="fixed",
  )
  return _attempt(row, question, row["attempt"], turns)


def _turn(query: str, passages: tuple[types.Passage, ...]) -> types.Turn:
  return types.Turn(0, 0, 0, "", "search", query, passages, "")


def _attempt(row, question, attempt, turns) -> types.Attempt:
  if row.get("verdict"):
    verdict = types.Verdict(row["verdict"])
  elif scoring.exact_match(row["prediction"], question.targets):
    verdict = types.Verdict.RIGHT
  else:
    verdict = types.Verdict.WRONG
  return types.Attempt(
    question,
    types.Episode(
      request_id=question.id,
      attempt=attempt,
      arm="solver",
      ids=np.zeros(0, np.int32),
      prompt_length=0,
      mask=np.zeros(0, bool),
      logprobs=np.zeros(0, np.float32),
      turns=tuple(turns),
      finish="given" if row.get("verdict") else "",
    ),
    row["prediction"],
    verdict,
    tuple(row.get("skill_ids", ())),
  )


def failures(
  groups: Iterable[Sequence[types.Attempt]],
  config: Any,
  count_tokens: Any,
  iteration: int = 0,
) -> list[types.FailureRecord]:
  """Records the failures that pass the config's gate.

  Args:
    groups: the attempts at each question, as many as there are.
    config: reads `frontier` and `distillation`.
    count_tokens: of a text.
    iteration: of the records.
  """
  found = []
  for group in groups:
    outcome = frontier.outcome(group)
    if any(a.verdict is types.Verdict.UNKNOWN for a in group):
      continue
    if frontier.passes(
      config.frontier.gate,
      outcome.right,
      outcome.wrong,
      min_right=config.frontier.min_right,
      min_wrong=config.frontier.min_wrong,
    ):
      found.append(
        frontier.record(
          group,
          iteration=iteration,
          passage_tokens=config.distillation.passage_tokens,
          count_tokens=count_tokens,
          language=config_lib.language(config),
          contrast=config.distillation.contrast,
        )
      )
  return found


# --- the modes ---------------------------------------------------------------


def distill(
  config: Any,
  episodes: Sequence[str],
  out: str,
  *,
  bank: str | None = None,
  origin: str | None = None,
  most: int | None = None,
) -> list[Mapping[str, Any]]:
  """Turns failures of saved episodes into skills, and writes the bank.

  Best first, `distillation.max_records` at a time, until none is left. What is
  a question of an evaluation set is left out.

  Args:
    config: names encoder, distiller, judge and gate.
    episodes: see `read`.
    out: the JSONL file to write.
    bank: to begin with, see `life.open_bank`; None is `bank.prime`'s.
    origin: of the skills; None is the distiller's name.
    most: skills to admit at most.

  Returns:
    The rows of the history, as of a run.

  Raises:
    ValueError: bad input, or nothing to distill.
    types.Stopped: the model that writes was out of reach, or its budget is
      spent; the same command goes on.
  """
  distributed.from_lead(lambda: _check_out(out))
  config_lib.check_distillation(config)
  config = config.copy_and_resolve_references()
  with config.unlocked():  # these are of runs
    config.distillation.admit, config.bank.frozen = True, False
    config.verifier.answerer = "solver"  # no evidence is checked
  distributed.by_all(lambda: tools_lib.check_judge(config))
  # The lead reads and writes the files, and asks the model; all compute.
  records, groups = distributed.from_lead(lambda: read(episodes))
  encoder = distributed.by_all(lambda: tools_lib.load_encoder(config.encoder))
  held = distributed.by_all(lambda: _bank(bank, config, encoder))
  judge = tools_lib.judge(config, f"{out.removesuffix('.jsonl')}_judge")
  if judge is not None and config.judge.verdicts:
    groups = _graded(groups, judge, config.lost_limit)
  records += failures(groups, config, lambda text: len(text.split()))
  tested = distributed.by_all(lambda: tools_lib.set_texts(config))
  queue = tuple(r for r in records if question_key(r.question) not in tested)
  if len(queue) < len(records):
    logging.info(
      "%d failures at evaluation questions are left out.",
      len(records) - len(queue),
    )
  if not queue:
    raise ValueError(
      f"Of {len(groups)} questions none passes the gate "
      f"{config.frontier.gate!r} with a failure. With one attempt a question "
      "none can under 'frontier': set frontier.gate='any_failure'."
    )
  write = _writer(config, judge)
  rows: list[Mapping[str, Any]] = []
  while queue and (most is None or _admitted(rows) < most):
    left = config.distillation.max_records
    if most is not None:
      left = min(left, most - _admitted(rows))
    cases = distillation.cases(
      held,
      queue,
      encoder=encoder,
      iteration=1,
      every=1,
      min_pending=1,
      max_records=left,
      admit=True,
      consolidate=config.distillation.consolidate,
    )
    held, after, found = distillation.land(
      held,
      queue,
      cases,
      write(cases),
      origin=origin or config.distillation.distiller,
      encoder=encoder,
      language=config_lib.language(config),
      iteration=0,
      threshold=config.encoder.threshold,
    )
    rows += found.rows
    if judge is not None:
      distributed.from_lead(judge.chat.ledger.check)
    if len(after) == len(queue):
      raise types.Stopped(
        f"None of {len(cases)} skills could be written: "
        f"{found.rows[0]['reason']}. The same command goes on; what was "
        "answered is kept."
      )
    queue = after

  def save():
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    skill_bank.save_jsonl(held, out)

  distributed.from_lead(save)
  console = rich.console.Console(quiet=not distributed.is_lead())
  console.print(report.distilled(rows))
  console.print(
    f"{_admitted(rows)} skills from {len(records)} failures, "
    f"{len(held.skills)} active in {out}.",
    highlight=False,
  )
  return rows


def _check_out(out: str) -> None:
  if not out.endswith(".jsonl"):
    raise ValueError(f"--out={out}: name a .jsonl file.")
  if Path(out).exists():
    raise ValueError(f"--out={out} exists. Name another.")


def _graded(groups, judge, limit: float) -> list[list[types.Attempt]]:
  """Asks about answers whose verdict no line gives, all at once."""
  left = [a for group in groups for a in group if not a.episode.finish]
  found = iter(selfplay.grade(left, judge))
  graded = [
    [a if a.episode.finish else next(found) for a in group] for group in groups
  ]
  lost = sum(
    a.verdict is types.Verdict.UNKNOWN and not a.episode.finish
    for group in graded
    for a in group
  )
  distributed.from_lead(judge.chat.ledger.check)
  if lost > limit * len(left):
    raise types.Stopped(
      f"{lost} of {len(left)} verdicts of the judge stayed unknown, more than "
      f"lost_limit = {limit:.0%}. The same command asks for those alone."
    )
  return graded


def _bank(path: str | None, config, encoder) -> skill_bank.SkillBank:
  if path:
    rows = life.open_bank(path).rows
    return skill_bank.from_rows(rows, encoder, config.bank.capacity)
  empty = skill_bank.create(config.bank.capacity, encoder.dim)
  return priming.prime(empty, config_lib.prime(config.bank.prime), encoder)[0]


def _admitted(rows) -> int:
  return sum(row.get("outcome") == "admitted" for row in rows)


def _writer(config, judge):
  distiller = tools_lib.distiller(config, judge)
  if distiller is not None:
    return lambda cases: distributed.from_lead(
      lambda: distiller.distill_all(cases)
    )
  # The policy itself: its engine, and nothing to search.
  nothing = tools_lib.Texts(engines.nothing(), (), (), {})
  world = distributed.by_all(lambda: tools_lib.assemble(config, nothing))
  return lambda cases: loop.write_skills(
    cases, world.references["solver"], world, config, 0
  )


def mine(
  config: Any,
  workdir: str,
  *,
  out: str | None = None,
  command: Sequence[str] = (),
) -> None:
  """Plays early self-play with a frozen bank, then distills its failures.

  The bank shows what `bank.prime` names and stays so for `mine.iterations`
  iterations, while both policies learn. Of all failures on record the best
  become at most `mine.skills` skills, beside those of `bank.prime`:
  `bank.prime='mined:FILE'` starts a run with both.

  Args:
    config: the experiment.
    workdir: the folder of the self-play; the same command resumes it.
    out: the JSONL file to write; by default `mined.jsonl` in it.
    command: for the manifest.

  Raises:
    ValueError: bad input, before any model is loaded.
    types.Stopped: the run had to stop, see `experiment.run`.
  """
  out = out or str(Path(workdir) / "mined.jsonl")
  distributed.initialize()
  distributed.from_lead(lambda: _check_out(out))
  distributed.by_all(lambda: tools_lib.check_judge(config))
  early = config.copy_and_resolve_references()
  with early.unlocked():
    early.iterations = config.mine.iterations
    early.bank.frozen = True
  experiment.run(early, workdir, command=command)
  distill(
    config,
    [str(Path(workdir) / "failures.jsonl")],
    out,
    origin="mined",
    most=config.mine.skills,
  )
