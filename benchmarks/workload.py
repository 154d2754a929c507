"""The rollout workload: multi-turn episodes whose lengths are forced.

A model of random weights plays 64 episodes, 4 attempts at each of 16 prompts.
In each of its turns an episode samples a fixed number of ids and is then given
a fixed observation; the last turn gets none. So no engine gains or loses by
what the model happens to say, and useful work is a constant: the sampled ids.

Only the standard library is used: the peers import this file too.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_LEAST_ID = 10  # ids below are left to padding and control tokens
_MOST_ID = 30_999
_TURNS = (1, 2, 2, 3, 3, 4)


@dataclass(frozen=True)
class Shape:
  """A Qwen3-shaped decoder; its fields are named as those of `Backbone`."""

  layers: int  # L
  vocab_size: int  # V
  dim: int  # D
  ffn: int  # F
  heads: int  # N
  kv_heads: int  # K
  head_dim: int  # H
  rope_theta: float
  norm_eps: float


MODEL = Shape(
  layers=8,
  vocab_size=32_000,
  dim=512,
  ffn=1536,
  heads=8,
  kv_heads=4,
  head_dim=64,
  rope_theta=1e6,
  norm_eps=1e-6,
)


@dataclass(frozen=True)
class Turn:
  """What is forced in one turn."""

  sample: int  # ids that the model draws
  observation: tuple[int, ...]  # ids that it is given then


@dataclass(frozen=True)
class Episode:
  """One attempt at a question."""

  question: int
  prompt: tuple[int, ...]
  turns: tuple[Turn, ...]

  @property
  def sampled(self) -> int:
    """Ids that the model draws in the whole episode."""
    return sum(turn.sample for turn in self.turns)

  @property
  def length(self) -> int:
    """Ids of the whole episode, prompt and observations among them."""
    observed = sum(len(turn.observation) for turn in self.turns)
    return len(self.prompt) + self.sampled + observed


def draw(
  questions: int = 16,
  attempts: int = 4,
  seed: int = 0,
  *,
  prompt: tuple[int, int] = (192, 320),
  sample: tuple[int, int] = (24, 96),
  observation: tuple[int, int] = (150, 250),
  turns: Sequence[int] = _TURNS,
  greatest_id: int = _MOST_ID,
) -> tuple[Episode, ...]:
  """Draws the episodes, attempts at one question next to each other.

  Args:
    questions: P.
    attempts: G.
    seed: of all draws.
    prompt: least and greatest number of ids, as the following two.
    sample: of one turn.
    observation: of one turn.
    turns: an episode's number of turns is one of these, all as likely.
    greatest_id: of the ids in prompts and observations.

  Returns:
    P * G episodes. For the same seed, more questions only append.
  """
  # The order of the draws is part of the definition.
  rng = random.Random(seed)

  def ids(between: tuple[int, int]) -> tuple[int, ...]:
    size = rng.randint(*between)
    return tuple(rng.randint(_LEAST_ID, greatest_id) for _ in range(size))

  episodes = []
  for question in range(questions):
    question_ids = ids(prompt)
    for _ in range(attempts):
      own = [
        Turn(rng.randint(*sample), ids(observation))
        for _ in range(rng.choice(turns))
      ]
      own[-1] = Turn(own[-1].sample, ())
      episodes.append(Episode(question, question_ids, tuple(own)))
  return tuple(episodes)


def sampled(episodes: Sequence[Episode]) -> int:
  """Returns the useful ids: those that a model draws."""
  return sum(episode.sampled for episode in episodes)


@dataclass(frozen=True)
class Work:
  """What has to be computed at least once."""

  tokens: int  # that pass through the layers
  pairs: int  # (query, key) pairs that attention scores in a layer
  sampled: int  # ids that pass through the head


def work(episodes: Sequence[Episode]) -> Work:
  """Counts the least work of the episodes.

  A question's prompt counts once, however many attempts share it. An
  observation and a sampled id count once each, but for the last id of an
  episode, which no layer need ever see. A token at position p is scored
  against p + 1 keys, its own among them.
  """
  prompts = {e.question: len(e.prompt) for e in episodes}
  tokens = sum(prompts.values())
  pairs = sum(_triangle(size) for size in prompts.values())
  for episode in episodes:
    start, end = len(episode.prompt), episode.length - 1
    tokens += end - start
    pairs += _triangle(end) - _triangle(start)
  return Work(tokens, pairs, sampled(episodes))


def _triangle(n: int) -> int:
  return n * (n + 1) // 2


def flops(shape: Any, done: Work) -> dict[str, int]:
  """Counts floating-point operations of matmuls, 2 a multiply-add.

      projections  2 L tokens D H (2 N + 2 K)
      ffn          2 L tokens 3 D F
      attention    4 L pairs N H      (scores, and the mix of values)
      head         2 sampled D V

  Args:
    shape: a `Shape` or a `Backbone`.
    done: of `work`.

  Returns:
    The counts by part.
  """
  width = shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
  a_token = 2 * shape.layers * shape.dim
  return {
    "projections": a_token * width * done.tokens,
    "ffn": a_token * 3 * shape.ffn * done.tokens,
    "attention": 4 * shape.layers * shape.heads * shape.head_dim * done.pairs,
    "head": 2 * shape.dim * shape.vocab_size * done.sampled,
  }
