"""Blocks of skills that should not help: what a real block is compared with.

`placebo` shows as much text of the same kind, about something else; `scrambled`
shows the same text, put together wrongly. What a real block gains over them is
neither the length of the prompt nor its style.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from sesa_jax import prompts
from sesa_jax.skills.bank import SkillBank, born_from
from sesa_jax.skills.record import FIELDS, block, rendered
from sesa_jax.types import Encoder, Question, Skill

TOLERANCE = 0.1  # share of a real block's tokens that a placebo may be off by
_DRAWS = 64  # of each number of skills, before another is tried

Shown = dict[str, tuple[Skill, ...]]  # by question id


def placebo(
  bank: SkillBank,
  questions: Sequence[Question],
  encoder: Encoder,
  blocks: Mapping[str, str],
  shown: Mapping[str, Sequence[Skill]],
  count: Callable[[str], int],
  *,
  fields: Sequence[str] = FIELDS,
  seed: int,
  iteration: int = 0,
) -> tuple[Shown, dict[str, str], int]:
  """Draws, for each question with skills, others that are far from it.

  They are active, of the lower half of the bank by cosine to the question (of
  an odd number the smaller half), not among those of its real block and not
  born from it. As many as the real block has are drawn at random until their
  block is within TOLERANCE of its tokens; then one fewer or one more. Where no
  draw is, the nearest one is taken, and counted.

  Args:
    bank: that the real skills are of.
    questions: with ids that are unique among them.
    encoder: the one that embedded the bank.
    blocks: question id -> the real block.
    shown: question id -> its skills.
    count: tokens of a text.
    fields: of a skill, that are shown.
    seed: of the run; with iteration and question id the key of each draw.
    iteration: of the run.

  Returns:
    By question id, the skills and their block, and the number of questions
    whose block is not within TOLERANCE. A question without a real block, or
    with fewer than two skills to draw from in the whole bank, has none.
  """
  asked = [question for question in questions if blocks.get(question.id)]
  if not asked:
    return {}, {}, 0
  active = np.flatnonzero(np.asarray(bank.active))
  vectors = encoder.encode([q.text for q in asked], "query")
  # Summed in double, row by row: who else is asked must not matter.
  scores = np.einsum(
    "qe,se->qs",
    vectors.astype(np.float64),
    np.asarray(bank.embeddings)[active].astype(np.float64),
  )
  born = born_from(bank, asked)[:, active]
  skills = [bank.records[row].skill for row in active]
  sizes = [count(f"\n{rendered(skill, fields)}") for skill in skills]
  drawn, texts, missed = {}, {}, 0
  for question, score, own in zip(asked, scores, born, strict=True):
    far = np.argsort(score, kind="stable")[: len(skills) // 2]
    real = {skill.id for skill in shown[question.id]}
    free = [i for i in far if not own[i] and skills[i].id not in real]
    if not free:
      continue
    tokens = count(blocks[question.id])

    def off(some: Sequence[int], tokens: int = tokens) -> int:
      text = block([skills[i] for i in some], fields)
      return abs(count(text) - tokens)

    picked = _draw(
      {i: sizes[i] for i in free},
      len(real),
      tokens - count(prompts.HEADING),
      off,
      TOLERANCE * tokens,
      _rng("placebo", seed, iteration, question.id),
    )
    drawn[question.id] = tuple(skills[i] for i in picked)
    texts[question.id] = block(drawn[question.id], fields)
    missed += off(picked) > TOLERANCE * tokens
  return drawn, texts, missed


def _draw(
  sizes: Mapping[int, int],
  number: int,
  wanted: int,
  off: Callable[[Sequence[int]], int],
  most: float,
  rng: np.random.Generator,
) -> tuple[int, ...]:
  """Draws some of `sizes`, about `number` of them, that are `off` by `most`."""
  nearest: tuple[float, tuple[int, ...]] = (math.inf, ())
  for some_number in (number, number - 1, number + 1):
    size = min(max(some_number, 1), len(sizes))
    for _ in range(_DRAWS):
      some = tuple(rng.permutation(list(sizes))[:size].tolist())
      about = abs(sum(sizes[i] for i in some) - wanted)
      nearest = min(nearest, (about, some))
      # Sizes add up but for a token or two; what counts is the whole block.
      if about <= most and off(some) <= most:
        return some
  return nearest[1]


def scrambled(
  shown: Mapping[str, Sequence[Skill]],
  *,
  fields: Sequence[str] = FIELDS,
  seed: int,
  iteration: int = 0,
) -> tuple[Shown, dict[str, str]]:
  """Permutes the fields of each question's skills across those skills.

  Every field but the first is handed on by 1 to n - 1 places of the n skills,
  drawn by field: each text is still there, none beside the first field of its
  own skill. One skill alone stays as it is. Ids go with the first field.

  Args:
    shown: question id -> its skills.
    fields: that are shown; more than one, or there is nothing to permute.
    seed: of the run; with iteration and question id the key of each draw.
    iteration: of the run.

  Returns:
    By question id, the skills and their block.
  """
  mixed: Shown = {}
  for id, skills in shown.items():
    rng, n = _rng("scrambled", seed, iteration, id), len(skills)
    changes: list[dict] = [{} for _ in skills]
    for name in FIELDS:
      if name == fields[0] or n < 2:
        continue
      places = int(rng.integers(1, n))
      for i, change in enumerate(changes):
        change[name] = getattr(skills[(i + places) % n], name)
    mixed[id] = tuple(
      dataclasses.replace(skill, **change)
      for skill, change in zip(skills, changes, strict=True)
    )
  return mixed, {
    id: block(skills, fields) for id, skills in mixed.items() if skills
  }


def _rng(name: str, seed: int, iteration: int, id: str) -> np.random.Generator:
  key = hashlib.sha256(f"{name}/{seed}/{iteration}/{id}".encode()).digest()
  return np.random.default_rng(list(key))
