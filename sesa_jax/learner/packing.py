"""Lessons to batches of fixed shapes.

Rows are packed with several episodes, which attention keeps apart by their
segment ids; or, for an attention that knows no segments, hold one each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from sesa_jax import types
from sesa_jax.learner import grpo


class Batch(NamedTuple):
  """A micro-batch, by token. Rows that only fill it are all zeros."""

  ids: Int[Array, "B T"]
  positions: Int[Array, "B T"]  # in the token's own episode
  segments: Int[Array, "B T"]  # number of the episode in its row; 0 is padding
  mask: Bool[Array, "B T"]  # the policy sampled it
  engine: Float[Array, "B T"]  # logprobs as sampled
  advantages: Float[Array, "B T"]
  weights: Float[Array, "B T"]  # in the loss, see `grpo.Loss`
  shares: Float[Array, "B T"]  # in what divides the loss
  groups: Int[Array, "B T"]  # question's index in the iteration; padding -1


def check_rows(microbatch_rows: int, fsdp: int) -> None:
  """Refuses rows that do not divide over the mesh.

  Raises:
    ValueError: names the nearest sizes that do.
  """
  if microbatch_rows > 0 and microbatch_rows % fsdp == 0:
    return
  below = microbatch_rows // fsdp * fsdp
  nearest = [size for size in (below, below + fsdp) if size > 0]
  raise ValueError(
    f"microbatch_rows {microbatch_rows} does not divide over {fsdp} devices on "
    f"the mesh's 'fsdp' axis. The nearest that "
    f"do{'es' if len(nearest) == 1 else ''}: "
    f"{' or '.join(map(str, nearest))}."
  )


def row_length(tokens: int, row_multiple: int) -> int:
  """Returns the length of the bucket for a row.

  Lengths are `row_multiple` times 1, 2, 3, 4, 6, 8, 12, 16 ...: few, since each
  is a program to compile, and at most a third of a row above one multiple is
  padding.
  """
  needed = max(1, math.ceil(tokens / row_multiple))
  power = 1 << (needed - 1).bit_length()  # the next power of two
  middle = power // 4 * 3
  return row_multiple * (middle if needed <= middle else power)


def empty(rows: int, length: int) -> Batch:
  """Returns a batch of padding."""
  shape = (rows, length)
  return Batch(
    ids=np.zeros(shape, np.int32),
    positions=np.zeros(shape, np.int32),
    segments=np.zeros(shape, np.int32),
    mask=np.zeros(shape, bool),
    engine=np.zeros(shape, np.float32),
    advantages=np.zeros(shape, np.float32),
    weights=np.zeros(shape, np.float32),
    shares=np.zeros(shape, np.float32),
    groups=np.full(shape, -1, np.int32),
  )


def minibatches(
  lessons: Sequence[types.Lesson], minibatch_questions: int
) -> list[list[tuple[int, types.Lesson]]]:
  """Splits lessons by question, in order, into parts as even as can be.

  Even parts, because an update from a small remainder would move the weights
  as far as any other.

  Args:
    lessons: those with one `episode.request_id` belong to one question.
    minibatch_questions: questions in one update, at most.

  Returns:
    For each update, pairs of question index and lesson.
  """
  index = {}
  for lesson in lessons:
    index.setdefault(lesson.episode.request_id, len(index))
  updates = math.ceil(len(index) / minibatch_questions)
  parts = [[] for _ in range(updates)]
  for lesson in lessons:
    question = index[lesson.episode.request_id]
    parts[question * updates // len(index)].append((question, lesson))
  return parts


def pack(
  lessons: Sequence[tuple[int, types.Lesson]],
  *,
  rows: int,
  row_multiple: int,
  loss: str,
  most_tokens: int,
  packed: bool,
) -> list[Batch]:
  """Lays lessons out in micro-batches of `rows` rows.

  Prompts and observations are in the rows, since the policy read them, with
  mask 0, since it did not write them.

  Args:
    lessons: of one minibatch, each with its question's index.
    rows: of every micro-batch; what is missing is filled up with mask 0.
    row_multiple: see `row_length`.
    loss: one of `grpo.LOSSES`.
    most_tokens: that an episode may sample, for the loss's constant divisor.
    packed: fill rows as long as the longest episode's with several; else rows
      hold one each, and neighbours in length share a micro-batch.

  Returns:
    numpy batches. Equal lengths come out in the order they came in.
  """
  ordered = sorted(lessons, key=size)
  lines = [[pair] for pair in ordered]
  if packed and ordered:
    lines = fit(ordered, row_length(size(ordered[-1]), row_multiple))
  return [
    batch(
      lines[start : start + rows],
      rows=rows,
      row_multiple=row_multiple,
      loss=loss,
      most_tokens=most_tokens,
    )
    for start in range(0, len(lines), rows)
  ]


def size(pair: tuple[int, types.Lesson]) -> int:
  """Returns the tokens of a lesson's episode."""
  return len(pair[1].episode.ids)


def fit(
  ordered: Sequence[tuple[int, types.Lesson]], length: int
) -> list[list[tuple[int, types.Lesson]]]:
  """Puts each episode, longest first, into the first row that has room.

  Args:
    ordered: by length, the shortest first; none longer than a row.
    length: of a row.
  """
  lines, room = [], []
  for pair in reversed(ordered):
    needed = size(pair)
    row = next((i for i, left in enumerate(room) if left >= needed), len(lines))
    if row == len(lines):
      lines.append([])
      room.append(length)
    lines[row].append(pair)
    room[row] -= needed
  # Fullest last: micro-batches of short rows may be shorter.
  return [line for _, line in sorted(zip(room, lines, strict=True), key=_room)]


def _room(pair) -> int:
  return -pair[0]


def batch(
  lines: Sequence[Sequence[tuple[int, types.Lesson]]],
  *,
  rows: int,
  row_multiple: int,
  loss: str,
  most_tokens: int,
) -> Batch:
  """Lays out one micro-batch.

  Args:
    lines: what each row holds, `rows` at most.
    rows: see `pack`, as all that follows.
    row_multiple: see `pack`.
    loss: see `pack`.
    most_tokens: see `pack`.
  """
  longest = max(sum(map(size, line)) for line in lines)
  batch = empty(rows, row_length(longest, row_multiple))
  for row, line in enumerate(lines):
    start = 0
    for segment, (question, lesson) in enumerate(line, 1):
      episode = lesson.episode
      place = row, slice(start, start := start + len(episode.ids))
      sampled = np.asarray(episode.mask, bool)
      count = max(1, int(sampled.sum()))
      batch.ids[place] = episode.ids
      batch.positions[place] = np.arange(len(episode.ids))
      batch.segments[place] = segment
      batch.mask[place] = sampled
      batch.engine[place] = np.where(sampled, episode.logprobs, 0.0)
      batch.advantages[place] = lesson.advantage
      batch.weights[place] = sampled * grpo.LOSSES[loss].weight(
        count, most_tokens
      )
      batch.shares[place] = sampled * grpo.LOSSES[loss].share(
        count, most_tokens
      )
      batch.groups[place] = question
  return batch


def padding_fraction(batches: Sequence[Batch]) -> float:
  """Returns the share of tokens that are only there to fill a shape."""
  places = sum(batch.segments.size for batch in batches)
  filled = sum(int((batch.segments > 0).sum()) for batch in batches)
  return 1 - filled / places if places else 0.0
