"""The update workload: the episodes of `workload` as they come to a learner.

Each has its prompt, sampled ids and observations in a row, a mask of what was
sampled, and an advantage. Useful work is a constant: all ids of all episodes,
since the policy reads each of them once.

Only the standard library is used: the peers import this file too.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import workload

# Of an id drawn from all of them alike, about what random weights do.
LOGPROB = -math.log(workload.MODEL.vocab_size)
# One update of all lessons: GRPO with a KL penalty, then AdamW.
TEMPERATURE = 1.0
CLIP_LOW, CLIP_HIGH = 0.2, 0.285
KL_COEFFICIENT = 0.01
LEARNING_RATE = 1e-6
BETAS = 0.9, 0.999
EPSILON = 1e-8
WEIGHT_DECAY = 0.01
GRADIENT_CLIP = 1.0


@dataclass(frozen=True)
class Lesson:
  """An episode that was played, and what it is worth."""

  question: int
  attempt: int
  prompt: int  # ids of it
  ids: tuple[int, ...]
  mask: tuple[bool, ...]  # the policy sampled it
  advantage: float


def draw(
  questions: int = 16, attempts: int = 4, seed: int = 0
) -> tuple[Lesson, ...]:
  """Draws lessons, attempts at one question next to each other.

  Args:
    questions: P.
    attempts: G.
    seed: of the sampled ids and the advantages.
  """
  rng = random.Random(seed)
  lessons = []
  for number, episode in enumerate(workload.draw(questions, attempts)):
    ids, mask = list(episode.prompt), [False] * len(episode.prompt)
    for turn in episode.turns:
      ids += [rng.randrange(10, 31_000) for _ in range(turn.sample)]
      ids += turn.observation
      mask += [True] * turn.sample + [False] * len(turn.observation)
    lessons.append(
      Lesson(
        episode.question,
        number % attempts,
        len(episode.prompt),
        tuple(ids),
        tuple(mask),
        rng.gauss(0, 1),
      )
    )
  return tuple(lessons)


def tokens(lessons: Sequence[Lesson]) -> int:
  """Returns the useful tokens: all ids."""
  return sum(len(lesson.ids) for lesson in lessons)


def flops(lessons: Sequence[Lesson]) -> int:
  """Counts the operations that an update takes at least.

  The reference's forward, the policy's, and a backward of twice as many; the
  head of sampled ids alone.
  """
  sizes = [len(lesson.ids) for lesson in lessons]
  done = workload.Work(
    tokens=sum(sizes),
    pairs=sum(n * (n + 1) // 2 for n in sizes),
    sampled=sum(sum(lesson.mask) for lesson in lessons),
  )
  return 4 * sum(workload.flops(workload.MODEL, done).values())
