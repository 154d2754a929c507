import numpy as np
import pytest

from sesa_jax import types
from sesa_jax.learner import packing


def lesson(name, length, sampled, advantage=1.0, attempt=0):
  mask = np.zeros(length, bool)
  mask[list(sampled)] = True
  return types.Lesson(
    types.Episode(
      request_id=name,
      attempt=attempt,
      arm="solver",
      ids=np.arange(100, 100 + length, dtype=np.int32),
      prompt_length=min(sampled, default=length),
      mask=mask,
      logprobs=np.where(mask, -0.5, 0).astype(np.float32),
      turns=(),
      finish="answer",
    ),
    advantage,
  )


def test_a_row_says_what_was_read_and_what_was_sampled():
  (batch,) = packing.pack(
    [(7, lesson("q", 6, [2, 3, 5], advantage=-2.0))],
    rows=2,
    row_multiple=4,
    loss="grpo",
    most_tokens=10,
    packed=False,
  )
  assert batch.ids.tolist() == [[100, 101, 102, 103, 104, 105, 0, 0], [0] * 8]
  assert batch.positions[0].tolist() == [0, 1, 2, 3, 4, 5, 0, 0]
  assert batch.segments.tolist() == [[1] * 6 + [0] * 2, [0] * 8]
  # The prompt (0, 1) and the observation (4) count for nothing.
  assert batch.mask[0].tolist() == [0, 0, 1, 1, 0, 1, 0, 0]
  assert batch.engine[0].tolist() == [0, 0, -0.5, -0.5, 0, -0.5, 0, 0]
  assert batch.advantages[0, :6].tolist() == [-2] * 6
  third = np.float32(1 / 3)
  np.testing.assert_allclose(
    batch.weights[0], [0, 0, third, third, 0, third, 0, 0]
  )
  assert batch.groups[0].tolist() == [7] * 6 + [-1] * 2
  for name in ("mask", "weights", "advantages", "segments"):
    assert not getattr(batch, name)[1].any()
  assert packing.padding_fraction([batch]) == 1 - 6 / 16


def test_the_token_mean_weighs_every_token_alike():
  (batch,) = packing.pack(
    [(0, lesson("q", 4, [1, 3])), (0, lesson("q", 4, [2]))],
    rows=2,
    row_multiple=4,
    loss="dapo",
    most_tokens=10,
    packed=False,
  )
  assert batch.weights.tolist() == [[0, 1, 0, 1], [0, 0, 1, 0]]


def test_neighbours_in_length_share_a_shape_and_none_is_lost():
  lengths = [30, 3, 9, 4, 31, 2, 5]
  batches = packing.pack(
    [(i, lesson(str(i), n, [1])) for i, n in enumerate(lengths)],
    rows=3,
    row_multiple=8,
    loss="grpo",
    most_tokens=10,
    packed=False,
  )
  assert [batch.ids.shape for batch in batches] == [(3, 8), (3, 32), (3, 32)]
  groups = [sorted(set(batch.groups.ravel()) - {-1}) for batch in batches]
  assert groups == [[1, 3, 5], [0, 2, 6], [4]]
  places = 3 * 8 + 2 * 3 * 32
  fraction = packing.padding_fraction(batches)
  assert fraction == pytest.approx(1 - sum(lengths) / places)


def test_lengths_are_few_and_never_too_short():
  sizes = [packing.row_length(n, 10) for n in range(1, 501)]
  assert sorted(set(sizes)) == [10 * n for n in (1, 2, 3, 4, 6, 8, 12)] + [
    10 * n for n in (16, 24, 32, 48, 64)
  ]
  assert all(size >= n for n, size in enumerate(sizes, 1))
  assert packing.row_length(12_288, 512) == 12_288


@pytest.mark.parametrize(
  ("questions", "most", "sizes"),
  [(4, 4, [4]), (5, 4, [3, 2]), (256, 128, [128, 128]), (9, 4, [3, 3, 3])],
)
def test_minibatches_are_whole_questions(questions, most, sizes):
  lessons = [
    lesson(f"q{q}", 3, [1], attempt=a)
    for a in range(2)  # the attempts of a question stand far apart
    for q in range(questions)
  ]
  parts = packing.minibatches(lessons, most)
  found = [
    sorted({item.episode.request_id for _, item in part}) for part in parts
  ]
  assert sorted(map(len, found), reverse=True) == sizes
  assert [len(part) for part in parts] == [2 * len(names) for names in found]
  everything = sum(found, [])
  assert len(everything) == len(set(everything)) == questions
  assert {
    (q, item.episode.request_id) for part in parts for q, item in part
  } == {(q, f"q{q}") for q in range(questions)}


def test_no_lessons_are_no_minibatches():
  assert packing.minibatches([], 4) == []


@pytest.mark.parametrize(
  ("rows", "fsdp", "end"),
  [
    (6, 4, "6 does not divide over 4 devices on the mesh's 'fsdp' axis. "
     "The nearest that do: 4 or 8."),
    (3, 4, "The nearest that does: 4."),
    (0, 2, "The nearest that does: 2."),
  ],
)  # fmt: skip
def test_rows_that_do_not_divide_are_refused_with_those_that_do(
  rows, fsdp, end
):
  packing.check_rows(8, 4)
  with pytest.raises(ValueError, match="microbatch_rows") as error:
    packing.check_rows(rows, fsdp)
  assert str(error.value).endswith(end)
