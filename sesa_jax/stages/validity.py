"""Stage 2, validity: which proposals become questions, and what fills the rest.

Every proposal ends in one of `STATES`: the first rule that it breaks,
`unverified` where an outage left the evidence check without an answer, or
`valid`. Slots without a valid question are filled from a pool of earlier ones.

Source: Search Self-play, arXiv:2510.18821.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from sesa_jax import types
from sesa_jax.judge import scoring
from sesa_jax.language import Language, question_key

REFILLS = ("replay", "mask")
MAX_ANSWER_WORDS = 32  # a longer one lists alternatives

# (key, question, passages) -> an answer each, None where an outage took it.
Answer = Callable[
  [Sequence[tuple[str, str, Sequence[types.Passage]]]], Sequence[str | None]
]
# Tokens of the check's whole prompt for (question, passages).
Size = Callable[[str, Sequence[types.Passage]], int]


def question_id(seed: types.Seed, attempt: int, iteration: int) -> str:
  """Names the question of a proposal, uniquely in a run.

  Seeds are distinct within an iteration, but return in later ones.
  """
  return f"{iteration}/{seed.id}/{attempt}"


def searches_wanted(seed: types.Seed, min_searches: int | None) -> int:
  """Returns `min_searches`; where that is None, 1 for one hop, else 2."""
  if min_searches is not None:
    return min_searches
  return 1 if seed.hops == 1 else 2


# --- rules 1 to 6: each says whether a proposal breaks it -------------------


def no_question(proposal, language, min_searches) -> bool:
  """There is no complete `<question>` block of its own."""
  return proposal.text is None


def length(proposal, language, min_searches) -> bool:
  """It is not 10 to 1000 characters, or has fewer than 10 words."""
  text = proposal.text.strip()
  return not 10 <= len(text) <= 1000 or len(language.words(text)) < 10


def leaks_target(proposal, language, min_searches) -> bool:
  """The target or an alias, case-folded, is in the question."""
  return language.contains_any(proposal.text, proposal.seed.targets)


def no_passages(proposal, language, min_searches) -> bool:
  """No search returned a passage."""
  return not proposal.episode.passages


def few_searches(proposal, language, min_searches) -> bool:
  """It searched less than `searches_wanted`."""
  return len(queries(proposal)) < searches_wanted(proposal.seed, min_searches)


def repeated_query(proposal, language, min_searches) -> bool:
  """A query was used twice, case and whitespace aside."""
  used = [" ".join(query.casefold().split()) for query in queries(proposal)]
  return len(set(used)) < len(used)


RULES = (
  no_question,
  length,
  leaks_target,
  no_passages,
  few_searches,
  repeated_query,
)
STATES = (
  "valid",
  *(rule.__name__ for rule in RULES),
  "over_budget",  # too long for the solver, or its passages for the check
  "contaminated",  # it is an evaluation question
  "evidence",  # its passages do not give the target
  "unverified",
)


def queries(proposal: types.Proposal) -> list[str]:
  """Returns the queries that were searched for, in order."""
  turns = proposal.episode.turns
  return [turn.argument for turn in turns if turn.action == "search"]


def rules(
  proposal: types.Proposal,
  language: Language,
  *,
  min_searches: int | None = None,
) -> str | None:
  """Returns the name of the first of `RULES` that is broken, or None."""
  return next(
    (rule.__name__ for rule in RULES if rule(proposal, language, min_searches)),
    None,
  )


# --- rule 7: the evidence check --------------------------------------------


@dataclasses.dataclass(frozen=True)
class Evidence:
  """What the answerer of the check is shown about one proposal."""

  key: str
  question: str
  targets: tuple[str, ...]
  passages: tuple[types.Passage, ...]  # own and noise, shuffled
  noise: tuple[types.Passage, ...]


def generator(seed: int, *names: str | int) -> np.random.Generator:
  """Returns a random generator that depends on its arguments only."""
  name = "/".join(map(str, (seed, *names))).encode()
  return np.random.default_rng(list(hashlib.sha256(name).digest()))


def evidence_sets(
  candidates: Sequence[types.Proposal],
  sources: Sequence[types.Proposal],
  *,
  noise: int,
  seed: int,
  max_tokens: int,
  size: Size,
  language: Language,
) -> list[Evidence | None]:
  """Hides each candidate's passages among those of other trajectories.

  Noise comes from `noise` sources with another target, or as many as there
  are, drawn by key; a passage is shown once. To fit, noise is dropped, from the
  last drawn; own passages never.

  Args:
    candidates: with question ids.
    sources: all proposals of the iteration.
    noise: trajectories that lend their passages.
    seed: of the run.
    max_tokens: of the whole prompt.
    size: of a prompt, in tokens; grows with the passages.
    language: normalises targets.

  Returns:
    For each candidate its evidence, or None if its own passages alone are over
    the budget.
  """

  def names(proposal):
    return {language.normalize_answer(t) for t in proposal.seed.targets}

  found: list[Evidence | None] = []
  for candidate in candidates:
    rng = generator(seed, "evidence", candidate.question_id)
    own = {p.id: p for p in candidate.episode.passages}
    others = [
      source
      for source in sources
      if source.episode.passages and not names(source) & names(candidate)
    ]
    lent = {}
    drawn = rng.choice(len(others), min(noise, len(others)), replace=False)
    for index in drawn if others else ():
      lent |= {
        p.id: p for p in others[index].episode.passages if p.id not in own
      }
    rest = list(lent.values())
    fitting = _fitting(
      len(rest),
      lambda n, c=candidate, o=own, r=rest: (
        size(c.text, [*o.values(), *r[:n]]) <= max_tokens
      ),
    )
    if fitting is None:
      found.append(None)
      continue
    shown = [*own.values(), *rest[:fitting]]
    found.append(
      Evidence(
        key=candidate.question_id,
        question=candidate.text,
        targets=candidate.seed.targets,
        passages=tuple(shown[i] for i in rng.permutation(len(shown))),
        noise=tuple(rest[:fitting]),
      )
    )
  return found


def _fitting(most: int, fits: Callable[[int], bool]) -> int | None:
  """Returns the greatest n <= most that fits, None if not even 0 does."""
  if fits(most):  # as nearly always
    return most
  first_too_many = bisect.bisect_left(
    range(most), True, key=lambda n: not fits(n)
  )
  return first_too_many - 1 if first_too_many else None


def gives(answer: str, targets: Any, language: Language) -> bool:
  """Says whether an answer gives the target.

  It equals the target, both normalised, or it has at most `MAX_ANSWER_WORDS`
  words and mentions it at token boundaries: an answerer that may not search
  answers in a sentence. A closed answer (yes, no) must match as a whole.
  """
  if scoring.exact_match(answer, targets, language):
    return True
  if len(language.words(answer)) > MAX_ANSWER_WORDS:
    return False
  open_targets = [
    target
    for target in targets
    if language.normalize_answer(target) not in language.closed_answers
  ]
  return language.mentions_any(answer, open_targets)


def settle(
  evidence: Sequence[Evidence | None],
  answers: Mapping[str, str | None],
  language: Language,
) -> list[str]:
  """Turns the answers into states.

  Args:
    evidence: of `evidence_sets`.
    answers: by key; None is an outage, never a label.
    language: see `gives`.
  """
  states = []
  for item in evidence:
    if item is None:
      states.append("over_budget")
    elif answers[item.key] is None:
      states.append("unverified")
    else:
      given = gives(answers[item.key], item.targets, language)
      states.append("valid" if given else "evidence")
  return states


# --- the replay pool -------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pool:
  """Questions that can fill a slot."""

  questions: tuple[types.Question, ...] = ()  # valid ones of challengers
  fixed: tuple[types.Question, ...] = ()  # that a run starts with
  recorded: frozenset[str] = frozenset()  # ids that have a failure record
  asked: frozenset[str] = frozenset()  # digests of all texts ever proposed

  def to_json(self) -> dict[str, Any]:
    """Returns the pool as what JSON can hold."""
    sets = dict(recorded=sorted(self.recorded), asked=sorted(self.asked))
    return dataclasses.asdict(self) | sets

  @classmethod
  def from_json(cls, tree: Mapping[str, Any]) -> Pool:
    """Reads what `to_json` returned, also after a trip through JSON."""

    def read(rows):
      return tuple(
        types.Question(**(row | {"targets": tuple(row["targets"])}))
        for row in rows
      )

    return cls(
      read(tree["questions"]),
      read(tree["fixed"]),
      frozenset(tree["recorded"]),
      frozenset(tree.get("asked", ())),  # older checkpoints have none
    )


def emptied(pool: Pool, *, keep_fixed: bool) -> Pool:
  """Drops the challengers' questions, and the fixed ones unless kept."""
  fixed = pool.fixed if keep_fixed else ()
  recorded = pool.recorded & {q.id for q in fixed}
  return Pool((), fixed, recorded, pool.asked)


def remember(pool: Pool, failures: Iterable[types.FailureRecord]) -> Pool:
  """Notes which of the pool's questions have a failure record by now."""
  inside = {q.id for q in pool.questions + pool.fixed}
  new = {record.question_id for record in failures} & inside
  return dataclasses.replace(pool, recorded=pool.recorded | new)


def fill(
  tasks: Sequence[types.Question],
  pool: Pool,
  count: int,
  rng: np.random.Generator,
) -> list[types.Question]:
  """Adds questions of the pool until there are `count`, or no more.

  None is drawn twice, nor one whose text is among the tasks. What a challenger
  wrote comes back with origin "replay".
  """
  texts = {question_key(task.text) for task in tasks}
  left = []
  for question in pool.questions + pool.fixed:
    if question_key(question.text) not in texts:
      texts.add(question_key(question.text))
      left.append(question)
  wanted = max(0, min(count - len(tasks), len(left)))
  if not wanted:
    return list(tasks)
  drawn = [left[i] for i in rng.choice(len(left), wanted, replace=False)]
  return [
    *tasks,
    *(
      dataclasses.replace(q, origin="replay") if q.origin != "fixed" else q
      for q in drawn
    ),
  ]


# --- the stage -------------------------------------------------------------


def check(
  proposals: Sequence[types.Proposal],
  pool: Pool,
  answer: Answer,
  *,
  iteration: int,
  seed: int,
  slots: int,
  language: Language,
  min_searches: int | None,
  noise: int,
  max_tokens: int,
  size: Size,
  refused: Callable[[str], str | None],
  embed: Callable[[Sequence[str]], Float[np.ndarray, "n E"]],
  probes: int,
  refill: str,
  empty_every: int,
  keep_fixed: bool,
) -> tuple[list[types.Proposal], list[types.Question], Pool, types.Report]:
  """Decides every proposal's state and fills the iteration's slots.

  Args:
    proposals: of the iteration, as posed.
    pool: questions of earlier iterations.
    answer: plays the evidence check: no search, no skills, greedy. Called once,
      with probes among the requests.
    iteration: of the run, from 1.
    seed: of the run.
    slots: questions that the solver gets at most.
    language: counts words, finds and normalises targets.
    min_searches: see `few_searches`.
    noise: see `evidence_sets`.
    max_tokens: see `evidence_sets`.
    size: see `evidence_sets`.
    refused: the state of a question that may not be played although it keeps
      the rules: "over_budget", "contaminated" or None.
    embed: see `diversity`.
    probes: candidates that are also asked with the noise alone and with
      nothing, for the metrics only; 0 is off.
    refill: `replay` fills slots from the pool, `mask` leaves them empty.
    empty_every: iterations after which the pool is emptied.
    keep_fixed: whether fixed questions stay then.

  Returns:
    proposals with states and question ids, the tasks, the new pool and a report
    with one row a proposal.

  Raises:
    ValueError: the refill is unknown, or two proposals have one id.
  """
  check_refill(refill)
  ids = [question_id(p.seed, p.attempt, iteration) for p in proposals]
  twice = [name for name, times in Counter(ids).items() if times > 1]
  if twice:
    raise ValueError(
      f"Two proposals have the id {twice[0]!r}: a seed was drawn twice. An "
      "iteration needs as many different seeds as it has questions."
    )
  named = [
    dataclasses.replace(p, question_id=name)
    for p, name in zip(proposals, ids, strict=True)
  ]

  states = {}
  for proposal in named:
    lost = proposal.episode.finish == "lost"
    broken = rules(proposal, language, min_searches=min_searches)
    if broken is None:
      broken = refused(proposal.text)
    states[proposal.question_id] = "unverified" if lost else broken
  candidates = [p for p in named if states[p.question_id] is None]
  evidence = evidence_sets(
    candidates,
    named,
    noise=noise,
    seed=seed,
    max_tokens=max_tokens,
    size=size,
    language=language,
  )
  answers = _ask(evidence, answer, generator(seed, "probe", iteration), probes)
  settled = settle(evidence, answers, language)
  states |= {
    p.question_id: state for p, state in zip(candidates, settled, strict=True)
  }
  decided = [dataclasses.replace(p, state=states[p.question_id]) for p in named]

  valid = [
    types.Question(
      id=p.question_id,
      text=p.text.strip(),
      targets=p.seed.targets,
      hops=p.seed.hops,
      seed_id=p.seed.id,
      origin="challenger",
    )
    for p in decided
    if p.state == "valid"
  ]
  if iteration > 1 and (iteration - 1) % empty_every == 0:
    pool = emptied(pool, keep_fixed=keep_fixed)
  tasks = valid
  if refill == "replay":
    rng = generator(seed, "replay", iteration)
    tasks = fill(valid, pool, slots, rng)
  # Afterwards, so that nothing is drawn in the iteration that it came from.
  varied, asked = diversity(decided, pool.asked, embed)
  pool = dataclasses.replace(
    pool, questions=(*pool.questions, *valid), asked=asked
  )

  metrics = _counts(decided, tasks, pool, slots)
  metrics |= varied | _guessable(evidence, answers, language)
  rows = [_row(proposal, iteration) for proposal in decided]
  return decided, tasks, pool, types.Report(metrics, rows)


def given(tasks: Sequence[types.Question], pool: Pool) -> types.Report:
  """Reports tasks that nobody posed, as `check` reports posed ones."""
  return types.Report(_counts((), tasks, pool, len(tasks)))


def _counts(decided, tasks, pool: Pool, slots: int) -> dict[str, float]:
  counts = Counter(proposal.state for proposal in decided)
  metrics = {f"challenger/state/{s}": counts[s] for s in STATES}
  metrics |= {
    "challenger/proposals": len(decided),
    "pool/size": len(pool.questions) + len(pool.fixed),
    "pool/empty_slots": max(0, slots - len(tasks)),
  }
  origins = Counter(task.origin for task in tasks)
  for origin in ("challenger", "replay", "fixed"):
    metrics[f"solver/origin/{origin}"] = origins[origin]
  if decided:
    metrics["challenger/valid_rate"] = counts["valid"] / len(decided)
  return metrics


def diversity(
  proposals: Sequence[types.Proposal],
  asked: frozenset[str],
  embed: Callable[[Sequence[str]], Float[np.ndarray, "n E"]],
) -> tuple[dict[str, float], frozenset[str]]:
  """Says how much alike what the challenger writes is, valid or not.

  * `challenger/duplicates`: the share of written questions whose normalised
    text was proposed before, in this iteration or an earlier one.
  * `challenger/cosine`: the mean over pairs of written questions,
    (|sum_i e_i|^2 - n) / (n (n - 1)).
  * `challenger/searches/hops_H`: searches made where the seed asks for H hops.

  Args:
    proposals: of an iteration.
    asked: digests of the texts of earlier iterations.
    embed: texts to unit rows [n, E].

  Returns:
    The metrics, and the digests with those of this iteration.
  """
  texts = [p.text for p in proposals if p.text is not None]
  keys = [_digest(question_key(text)) for text in texts]
  metrics = {}
  if texts:
    new = len(set(keys) - asked)
    metrics["challenger/duplicates"] = 1 - new / len(texts)
  if len(texts) > 1:
    n, total = len(texts), embed(texts).sum(0, dtype=np.float64)
    metrics["challenger/cosine"] = float(total @ total - n) / (n * (n - 1))
  for hops in sorted({p.seed.hops for p in proposals}):
    made = [len(queries(p)) for p in proposals if p.seed.hops == hops]
    metrics[f"challenger/searches/hops_{hops}"] = float(np.mean(made))
  return metrics, asked.union(keys)


def _digest(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_refill(refill: str) -> None:
  """Raises a ValueError if the name is not one of `REFILLS`."""
  if refill not in REFILLS:
    raise ValueError(
      f"Unknown pool.refill {refill!r}. Choices: {', '.join(REFILLS)}."
    )


def _ask(
  evidence: Sequence[Evidence | None],
  answer: Answer,
  rng: np.random.Generator,
  probes: int,
) -> dict[str, str | None]:
  """Plays the check and its probes; returns answers by key."""
  shown = [item for item in evidence if item is not None]
  requests = [(e.key, e.question, e.passages) for e in shown]
  for index in rng.permutation(len(shown))[:probes]:
    e = shown[index]
    requests.append((f"{e.key}/nothing", e.question, ()))
    if e.noise:
      requests.append((f"{e.key}/noise", e.question, e.noise))
  if not requests:
    return {}
  keys = [key for key, _, _ in requests]
  return dict(zip(keys, answer(requests), strict=True))


def _guessable(
  evidence: Collection[Evidence | None],
  answers: Mapping[str, str | None],
  language: Language,
) -> dict[str, float]:
  """Returns how often a probe gave the target; it should not have."""
  metrics = {}
  for probe in ("nothing", "noise"):
    found = [
      gives(given, e.targets, language)
      for e in evidence
      if e is not None
      and (given := answers.get(f"{e.key}/{probe}")) is not None
    ]
    if found:
      metrics[f"challenger/guessable/{probe}"] = float(np.mean(found))
  return metrics


def _row(proposal: types.Proposal, iteration: int) -> dict[str, Any]:
  """Returns a proposal's line for `questions.jsonl`."""
  return {
    "id": proposal.question_id,
    "iteration": iteration,
    "seed_id": proposal.seed.id,
    "attempt": proposal.attempt,
    "targets": list(proposal.seed.targets),
    "hops": proposal.seed.hops,
    "state": proposal.state,
    "text": proposal.text,
    "queries": queries(proposal),
    "finish": proposal.episode.finish,
  }
