"""Stage 2, asymmetric self-play: one policy poses, the other solves.

`pose` takes seeds and nothing that holds a skill: the challenger feels the
bank only through the solver's success rate. `solve` takes the skills that were
retrieved for each question, the same ones for all its attempts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from sesa_jax import distributed, prompts, types
from sesa_jax.engine import engine
from sesa_jax.judge import scoring

REPLAYS = 2  # times that an episode whose tool call was lost is played again


def play(
  weights: Any,
  requests: Sequence[types.Request],
  role: str,
  tools: types.Tools,
  iteration: int,
) -> tuple[list[types.Episode], dict[str, float]]:
  """Plays requests; an episode that lost a tool call is replayed from its key.

  Dropping such episodes would select short ones, since long ones lose more
  calls. What stays lost keeps the finish reason "lost". Every process plays its
  own share and gets the episodes of all, and what they cost together.
  """
  environment = tools.environments[role]
  requests = distributed.share(requests)

  def once(these):
    return tools.engine.play(
      weights,
      these,
      environment,
      iteration=iteration,
      on_episode=tools.on_episode,
    )

  played = once(requests)
  episodes, metrics = list(played.episodes), dict(played.metrics)
  for _ in range(REPLAYS):
    lost = {e.request_id for e in episodes if e.finish == "lost"}
    if not lost:
      break
    again = once([r for r in requests if r.id in lost])
    found = {(e.request_id, e.attempt): e for e in again.episodes}
    episodes = [
      found[e.request_id, e.attempt] if e.finish == "lost" else e
      for e in episodes
    ]
    for name, value in again.metrics.items():
      metrics[name] += value
  metrics["lost"] = sum(e.finish == "lost" for e in episodes)
  metrics = _together(distributed.gather([metrics]))
  metrics |= engine.rates(metrics)
  return distributed.gather(episodes), metrics


def _together(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
  """Joins what processes measured at the same time: counts add up."""
  joins = {
    name: max if name.startswith("seconds") else sum for name in parts[0]
  }
  return {name: join(p[name] for p in parts) for name, join in joins.items()}


def pose(
  weights: Any,
  seeds: Sequence[types.Seed],
  tools: types.Tools,
  *,
  iteration: int,
  group_size: int,
  searches: Mapping[int, int],
  sampling: types.Sampling,
  limits: types.Limits,
) -> tuple[list[types.Proposal], dict[str, float]]:
  """Lets the challenger write `group_size` questions for each seed.

  Args:
    weights: the challenger's rollout weights.
    seeds: answers and hop counts.
    tools: of the run.
    iteration: part of the sampling keys.
    group_size: proposals a seed.
    searches: hops -> searches that the prompt asks for.
    sampling: how ids are drawn.
    limits: of an episode.

  Returns:
    proposals in the order of seeds, their state not yet decided ("posed"), and
    the engine's metrics.
  """
  requests = [
    types.Request(
      id=f"{iteration}/{seed.id}",
      prompt_ids=tools.render(prompts.challenger(seed, searches[seed.hops])),
      attempts=group_size,
      sampling=sampling,
      limits=limits,
      arm="challenger",
    )
    for seed in seeds
  ]
  episodes, metrics = play(weights, requests, "challenger", tools, iteration)
  owner = {r.id: seed for r, seed in zip(requests, seeds, strict=True)}
  proposals = [
    types.Proposal(
      seed=owner[episode.request_id],
      attempt=episode.attempt,
      episode=episode,
      text=episode.last("question"),
      state="posed",
    )
    for episode in episodes
  ]
  return proposals, metrics


def solve(
  weights: Any,
  tasks: Sequence[types.Question],
  shown: Mapping[str, Sequence[types.Skill]],
  blocks: Mapping[str, str],
  tools: types.Tools,
  *,
  iteration: int,
  attempts: int,
  sampling: types.Sampling,
  limits: types.Limits,
  arm: str = "solver",
  prefix: str = "",
  judge: Any = None,
) -> tuple[list[types.Attempt], dict[str, float]]:
  """Lets the solver make `attempts` at each question, and judges them.

  Args:
    weights: the solver's rollout weights.
    tasks: questions; their ids are unique.
    shown: question id -> skills in its prompt; absent means none.
    blocks: question id -> those skills, rendered.
    tools: of the run.
    iteration: part of the sampling keys.
    attempts: episodes a question.
    sampling: how ids are drawn.
    limits: of an episode.
    arm: for the records.
    prefix: of the requests' ids, and so of the sampling keys.
    judge: `judge.verdicts.Judge`, which grades complete answers that are no
      exact match; None leaves them wrong.

  Returns:
    attempts in the order of tasks, and the engine's metrics.
  """
  requests = [
    types.Request(
      id=prefix + task.id,
      prompt_ids=tools.render(
        prompts.solver(task.text, blocks.get(task.id, ""))
      ),
      attempts=attempts,
      sampling=sampling,
      limits=limits,
      arm=arm,
    )
    for task in tasks
  ]
  episodes, metrics = play(weights, requests, "solver", tools, iteration)
  by_id = {prefix + task.id: task for task in tasks}
  found = [
    _matched(task, episode, tuple(s.id for s in shown.get(task.id, ())), tools)
    for episode in episodes
    for task in [by_id[episode.request_id]]
  ]
  return found if judge is None else grade(found, judge), metrics


def grade(attempts: Sequence[types.Attempt], judge: Any) -> list[types.Attempt]:
  """Asks a judge about complete answers that are no exact match.

  The lead alone does: every process is to know the same verdicts, paid once.

  Args:
    attempts: graded by exact match.
    judge: `judge.verdicts.Judge`.
  """
  left = [
    i
    for i, attempt in enumerate(attempts)
    if attempt.verdict is types.Verdict.WRONG and attempt.prediction is not None
  ]

  def ask():
    asked = [attempts[i] for i in left]
    return judge.judge(
      [attempt.question.text for attempt in asked],
      [attempt.question.targets for attempt in asked],
      [attempt.prediction for attempt in asked],
    )

  found = list(attempts)
  for i, verdict in zip(left, distributed.from_lead(ask), strict=True):
    found[i] = dataclasses.replace(attempts[i], verdict=verdict)
  return found


def _matched(question, episode, skill_ids, tools) -> types.Attempt:
  """Compares the last complete answer of the policy's own tokens."""
  prediction = episode.last("answer")
  if episode.finish == "lost":
    verdict = types.Verdict.UNKNOWN
  elif prediction is not None and scoring.exact_match(
    prediction, question.targets, tools.language
  ):
    verdict = types.Verdict.RIGHT
  else:
    verdict = types.Verdict.WRONG
  return types.Attempt(question, episode, prediction, verdict, skill_ids)


def as_evidence(
  weights: Any,
  questions: Sequence[tuple[str, str, Sequence[types.Passage]]],
  tools: types.Tools,
  *,
  iteration: int,
  tokens: int,
  max_tokens: int,
) -> tuple[list[str | None], list[types.Episode], dict[str, float]]:
  """Lets the solver answer from passages alone: no search, no skills, greedy.

  Args:
    weights: the solver's rollout weights.
    questions: (id, question, passages).
    tools: of the run.
    iteration: part of the sampling keys.
    tokens: sampled ids at most.
    max_tokens: prompt and answer together.

  Returns:
    The answers (all it wrote where no answer is marked, None where the episode
    was lost), the episodes, and the engine's metrics.
  """
  requests = [
    types.Request(
      id=f"evidence/{name}",
      prompt_ids=tools.render(prompts.evidence(text, passages)),
      attempts=1,
      sampling=types.Sampling(temperature=0.0),
      limits=types.Limits(tokens, max_tokens, 1),
      arm="evidence",
    )
    for name, text, passages in questions
  ]
  episodes, metrics = play(weights, requests, "evidence", tools, iteration)
  answers = []
  for episode in episodes:
    own = tools.tokenizer.decode(
      episode.ids[episode.mask], skip_special_tokens=True
    )
    answer = episode.last("answer")
    lost = episode.finish == "lost"
    answers.append(None if lost else own if answer is None else answer)
  return answers, episodes, metrics


def write(
  weights: Any,
  asked: Sequence[prompts.Prompt],
  tools: types.Tools,
  *,
  iteration: int,
  tokens: int,
  max_tokens: int,
) -> list[str | None]:
  """Lets a policy write a text to each prompt: greedy, one turn, no tools.

  Args:
    weights: the policy's rollout weights.
    asked: prompts.
    tools: of the run.
    iteration: part of the sampling keys.
    tokens: sampled ids at most.
    max_tokens: prompt and text together.

  Returns:
    The texts, None where the prompt leaves no room or a text has no end.
  """
  rendered = [tools.render(prompt) for prompt in asked]
  requests = [
    types.Request(
      id=f"text/{i}",
      prompt_ids=ids,
      attempts=1,
      sampling=types.Sampling(temperature=0.0),
      limits=types.Limits(tokens, max_tokens, 1),
      arm="text",
    )
    for i, ids in enumerate(rendered)
    if len(ids) + tokens <= max_tokens
  ]
  if not requests:
    return [None] * len(asked)
  episodes, _ = play(weights, requests, "text", tools, iteration)
  found = {e.request_id: e.last("answer") for e in episodes}
  return [found.get(f"text/{i}") for i in range(len(asked))]
