import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sesa_jax import distributed, types
from sesa_jax.learner import grpo, packing
from sesa_jax.learner import learner as learning
from sesa_jax.policy import backbones, model, sharding


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
    list(dict.fromkeys(item.episode.request_id for _, item in part))
    for part in parts
  ]
  assert sorted(map(len, found), reverse=True) == sizes
  assert [len(part) for part in parts] == [2 * len(names) for names in found]
  everything = sum(found, [])
  assert everything == [f"q{q}" for q in range(questions)]  # in order
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


def test_packed_rows_hold_several_and_lose_none():
  lengths = [3, 9, 4, 5, 2, 16, 7]
  batches = packing.pack(
    [(i, lesson(str(i), n, range(1, n))) for i, n in enumerate(lengths)],
    rows=2,
    row_multiple=16,
    loss="dapo",
    most_tokens=10,
    packed=True,
  )
  # 46 tokens: the least rows of 16, full ones first, and one to fill up.
  assert [batch.ids.shape for batch in batches] == [(2, 16)] * 2
  assert packing.padding_fraction(batches) == 1 - 46 / 64
  rows = [row for batch in batches for row in zip(*batch, strict=True)]
  seen = []
  for row in map(packing.Batch._make, rows):
    for segment in range(1, row.segments.max() + 1):
      (own,) = np.nonzero(row.segments == segment)
      (group,) = set(row.groups[own])
      size = lengths[group]
      # In one piece, from the start of the episode to its end.
      assert own.tolist() == list(range(own[0], own[0] + size))
      assert row.positions[own].tolist() == list(range(size))
      assert row.ids[own].tolist() == list(range(100, 100 + size))
      assert row.mask[own].tolist() == [False] + [True] * (size - 1)
      seen.append(group)
    assert not row.mask[row.segments == 0].any()
    assert (np.diff(row.segments[row.segments > 0]) >= 0).all()
  assert sorted(seen) == list(range(len(lengths)))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_packing_needs_little_more_room_than_there_are_tokens(lengths):
  batches = packing.pack(
    [(i, lesson(str(i), n, [0])) for i, n in enumerate(lengths)],
    rows=1,
    row_multiple=4,
    loss="grpo",
    most_tokens=10,
    packed=True,
  )
  filled = [int((batch.segments > 0).sum()) for batch in batches]
  assert sum(filled) == sum(lengths)
  length = packing.row_length(max(lengths), 4)
  # First fit: no two rows could be one.
  assert all(a + b > length for a, b in itertools.pairwise(sorted(filled)))
  counts = [len(set(batch.groups.ravel()) - {-1}) for batch in batches]
  assert sum(counts) == len(lengths)


# --- what packing must not change -------------------------------------------

BACKBONE = backbones.tiny(vocab_size=64)
GRAPHDEF = model.build(BACKBONE)
LENGTHS = (5, 31, 12, 9, 30, 22, 7, 17, 26)


@pytest.fixture(scope="module")
def weights():
  """Three policies: the one that learns, its start and the reference."""
  draw = jax.jit(functools.partial(model.init, BACKBONE))
  drawn = [draw(jax.random.key(seed)) for seed in range(3)]
  # Larger than usual: far from uniform.
  return jax.tree.map(lambda leaf: leaf * (3 if leaf.ndim > 2 else 1), drawn)


def taught():
  rng = np.random.default_rng(0)
  for question, length in enumerate(LENGTHS):
    sampled = np.flatnonzero(rng.random(length - 1) < 0.6) + 1
    one = lesson(str(question), length, {1, *sampled}, rng.normal())
    ids = rng.integers(1, 64, length).astype(np.int32)
    logprobs = np.where(one.episode.mask, rng.normal(-4, 0.5, length), 0)
    episode = dataclasses.replace(
      one.episode, ids=ids, logprobs=logprobs.astype(np.float32)
    )
    yield question, types.Lesson(episode, one.advantage)


def slope(
  weights,
  loss,
  dtype,
  *,
  packed,
  rows=2,
  mesh=(1, 1),
  order=1,
):
  """Returns an update's gradient and sums, divided, as one vector."""
  taken = learning.Learner(
    GRAPHDEF,
    sharding.mesh(*mesh),
    learning_rate=1e-3,
    warmup_updates=1,
    minibatch_questions=100,
    clip_low=0.2,
    clip_high=0.285,
    kl_coefficient=0.05,
    loss=loss,
    most_tokens=40,
    microbatch_rows=rows,
    chunk_tokens=24,
    compute_dtype=dtype,
    attention="blocks",  # XLA's scores are float32 whatever goes in
    remat=False,
  )
  run = taken.programs
  rates = learning.Rates(0.7, 1.0, 0.2, 0.285, 0.05, 0.0, 2.0, 1e-3, 1)
  policy, start, reference = (
    jax.tree.map(
      lambda leaf, where: distributed.place(np.asarray(leaf, dtype), where),
      tree,
      run.policy.params,
    )
    for tree in weights
  )
  gradient = jax.tree.map(jnp.zeros_like, policy)
  sums = grpo.Sums(*(jnp.zeros((), dtype) for _ in grpo.Sums._fields))
  # Of several processes, each has its own share of the lessons.
  own = distributed.share(list(taught()))
  for batch in packing.pack(
    distributed.gather(own)[::order],
    rows=rows,
    row_multiple=64,
    loss=loss,
    most_tokens=40,
    packed=packed,
  )[::order]:
    wide = (x.astype(dtype) if x.dtype == np.float32 else x for x in batch)
    placed = distributed.place(packing.Batch(*wide), run.rows)
    old, base = (run.score(w, placed, 0.7) for w in (start, reference))
    gradient, sums = run.accumulate(
      gradient, sums, policy, placed, old, base, False, rates
    )
  assert abs(float(sums.ratio / sums.tokens) - 1) > 0.01
  flat = [
    np.ravel(distributed.whole(leaf)) for leaf in jax.tree.leaves(gradient)
  ]
  means = [x / sums.tokens for x in sums[2:-1]]
  gradient = np.concatenate(flat) / float(sums.weight)
  return gradient, np.array([sums.loss / sums.weight, *means, sums.gap_max])


def check(found, expected, bound):
  for got, wanted in zip(found, expected, strict=True):
    error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
    assert error <= bound


@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_packed_equals_unpacked_in_any_order(weights, loss):
  found = functools.partial(slope, weights, loss, "float64")
  with jax.enable_x64(True):
    alone, packed = found(packed=False), found(packed=True)
    turned = found(packed=True, order=-1)
  check(packed, alone, 1e-9)
  check(turned, alone, 1e-9)


def test_packed_equals_unpacked_in_single_precision(weights):
  alone = slope(weights, "dapo", "float32", packed=False)
  check(slope(weights, "dapo", "float32", packed=True), alone, 1e-5)
  with jax.enable_x64(True):
    exact = slope(weights, "dapo", "float64", packed=True)
  check(alone, exact, 1e-5)


@pytest.mark.slow
def test_rows_and_devices_do_not_change_the_gradient(weights):
  with jax.enable_x64(True):
    few = slope(weights, "grpo", "float64", packed=True)
    one = slope(weights, "grpo", "float64", packed=True, rows=1)
    many = slope(
      weights, "grpo", "float64", packed=True, rows=4, mesh=(4, 2), order=-1
    )
  check(one, few, 1e-9)
  check(many, few, 1e-9)
