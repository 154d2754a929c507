"""The statistics of paired runs, against definitions and values by hand."""

import itertools
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import paired


def test_one_seed_has_the_interval_of_a_mean():
  """Of 400 differences it is nearly the normal one, m +- 1.96 s / sqrt(n)."""
  rng = np.random.default_rng(1)
  before = rng.random(400) < 0.3
  after = before | (rng.random(400) < 0.2)
  table = np.stack([before, after], 1).astype(float)
  found = paired.bootstrap([table], paired.difference, draws=4000)
  less = [b - a for a, b in table.tolist()]
  mean = statistics.fmean(less)
  half = 1.959964 * statistics.stdev(less) / 400**0.5
  assert found.value == pytest.approx(mean)
  assert found.low == pytest.approx(mean - half, abs=0.1 * half)
  assert found.high == pytest.approx(mean + half, abs=0.1 * half)
  # Not paired, the interval would be more than half as wide again.
  apart = 1.96 * (sum(map(statistics.variance, table.T.tolist())) / 400) ** 0.5
  assert found.high - found.low < 2 * apart / 1.5
  again = paired.bootstrap([table], paired.difference, draws=4000)
  assert again == found


def test_seeds_that_differ_widen_the_interval():
  """Rows that are all alike: what is left is which seeds are drawn.

  Of two seeds with 0 and 1 the mean of a draw is 0, 1/2 or 1, with chances
  1/4, 1/2, 1/4: the 95 % interval is (0, 1), and that of 40 % is (1/2, 1/2).
  """
  tables = [np.tile([[0.0, gain]], (9, 1)) for gain in (0.0, 1.0)]
  found = paired.bootstrap(tables, paired.difference)
  assert found == (0.5, 0.0, 1.0)
  assert not found.excludes_0
  narrow = paired.bootstrap(tables, paired.difference, confidence=0.4)
  assert narrow == (0.5, 0.5, 0.5)
  assert narrow.excludes_0
  same = paired.bootstrap([tables[1]] * 3, paired.difference)
  assert same == (1.0, 1.0, 1.0)


def test_students_interval_by_hand():
  """Of 1, 2, 3: s = 1, and t of 2 degrees of freedom 4.3027 (any table)."""
  found = paired.over_seeds([1.0, 2.0, 3.0])
  half = 4.30265 / 3**0.5
  assert found == pytest.approx((2.0, 2 - half, 2 + half), abs=1e-4)
  narrow = paired.over_seeds([1.0, 2.0, 3.0], confidence=0.9)
  assert narrow.high == pytest.approx(2 + 2.91999 / 3**0.5, abs=1e-4)
  alone = paired.over_seeds([4.0])
  assert alone.value == 4.0
  assert np.isnan(alone.low)
  assert np.isnan(alone.high)


def test_seeds_count_alike_whatever_their_rows():
  tables = [np.array([[0.0, 1.0]] * 30), np.array([[0.0, 0.0]])]
  assert paired.bootstrap(tables, paired.difference).value == 0.5


def test_the_interval_covers_the_truth():
  """Of 200 intervals for a known difference about 95 % hold it."""
  rng, held = np.random.default_rng(5), 0
  for _ in range(200):
    table = (rng.random((150, 2)) < (0.4, 0.55)).astype(float)
    found = paired.bootstrap([table], paired.difference, draws=300)
    held += found.low <= 0.15 <= found.high
  assert 180 <= held <= 198


def test_ratios_among_the_answered():
  # 2 of 4 answered, 1 of them right; then 4 of 4 answered, 3 of them right.
  columns = np.array(
    [[1, 1, 1, 1], [1, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 0]], float
  )
  means = columns.mean(0)
  assert paired.ratio_difference(means) == pytest.approx(3 / 4 - 1 / 2)
  assert np.isnan(paired.ratio_difference(np.array([0.0, 0.0, 1.0, 1.0])))
  found = paired.bootstrap([columns], paired.ratio_difference)
  assert found.value == pytest.approx(0.25)
  assert found.low < 0 < found.high  # draws without an answer are left out


def test_without_a_statistic_there_is_no_interval():
  silent = np.zeros((3, 4))  # nobody ever answered
  found = paired.bootstrap([silent], paired.ratio_difference)
  assert np.isnan(found).all()
  assert not found.excludes_0


def test_areas_by_hand():
  assert paired.area([0, 10], [0.0, 1.0]) == 0.5
  # Trapezoids of 1 x (0 + 1)/2 and 3 x (1 + .5)/2, over a length of 4.
  assert paired.area([2, 3, 6], [0, 1, 0.5]) == pytest.approx(2.75 / 4)
  with pytest.raises(ValueError, match="1 points"):
    paired.area([3], [1.0])


def test_nested_columns():
  flags = np.array(list(itertools.product([False, True], repeat=4)))
  found = paired.nested(*flags.T)
  for row, (answered, searched, seen, right) in zip(found, flags, strict=True):
    assert row.tolist() == [
      answered,
      answered and searched,
      answered and searched and seen,
      answered and searched and seen and right,
      right,
    ]


def test_split_of_one_change_and_of_two():
  before = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])  # each factor 1/2
  # The first factor alone doubles: everything behind it does.
  after = 2 * before
  found = paired.split(np.concatenate([before, after]))
  np.testing.assert_allclose(found, [0.0625, 0, 0, 0, 0], atol=1e-12)
  # The first and the last double: 1/16 becomes 4/16. In one order the first
  # brings 1/16, in the other 2/16: 1.5/16 on average, as does the last.
  after = np.array([1, 0.5, 0.25, 0.25, 0.25])
  found = paired.split(np.concatenate([before, after]))
  np.testing.assert_allclose(found, [1.5 / 16, 0, 0, 1.5 / 16, 0], atol=1e-12)


def test_split_where_nothing_came_so_far():
  """No well-formed attempt before: what follows is taken as it is after."""
  before = np.zeros(5)
  after = np.array([0.8, 0.4, 0.4, 0.2, 0.3])
  found = paired.split(np.concatenate([before, after]))
  np.testing.assert_allclose(found, [0.2, 0, 0, 0, 0.1], atol=1e-12)


bits = st.lists(st.booleans(), min_size=8, max_size=8)


@given(st.lists(st.tuples(bits, bits), min_size=1, max_size=12))
def test_shares_add_up_to_the_gain(questions):
  flags = np.array([a + b for a, b in questions])
  columns = np.concatenate(
    [
      paired.nested(*(f[:, i] for i in range(4)))
      for f in (flags[:, :4], flags[:, 4:8])
    ],
    axis=1,
  )
  found = paired.split(columns.mean(0))
  gain = columns[:, 9].mean() - columns[:, 4].mean()
  assert found.sum() == pytest.approx(gain, abs=1e-9)
  # Many draws at once give what each gives alone.
  both = paired.split(np.stack([columns.mean(0)] * 2))
  np.testing.assert_allclose(both, [found] * 2)
