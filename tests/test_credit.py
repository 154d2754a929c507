from __future__ import annotations

import numpy as np
import pytest

from sesa_jax.skills import credit


def test_students_interval_by_hand():
  # Mean .2, deviation .2; t(.975, 4 degrees) = 2.776 by the tables.
  found = credit.effect([0.2, 0.4, 0.0, 0.4, 0.0])
  assert found.mean == pytest.approx(0.2)
  half = 2.776 * 0.2 / 5**0.5
  ends = (0.2 - half, 0.2 + half)
  assert (found.low, found.high) == pytest.approx(ends, abs=1e-4)
  assert found.questions == 5
  # t(.95, 4 degrees) = 2.132.
  low = credit.effect([0.2, 0.4, 0.0, 0.4, 0.0], confidence=0.9).low
  assert low == pytest.approx(0.2 - 2.132 * 0.2 / 5**0.5, abs=1e-4)


def test_an_interval_stays_among_differences():
  found = credit.effect([1.0, -1.0, 1.0, -1.0, 1.0])
  assert (found.low, found.high) == (-1.0, 1.0)


@pytest.mark.parametrize(
  "differences", [[0.1, 0.2, 0.3, 0.4], [0.3] * 9, [0.0] * 40]
)
def test_too_little_for_an_interval(differences):
  found = credit.effect(differences)
  assert found.mean == pytest.approx(np.mean(differences))
  assert (found.low, found.high) == (None, None)
  assert found.questions == len(differences)


def test_no_question_no_effect():
  assert credit.effect([]) is None


def test_the_interval_covers_what_it_says():
  rng = np.random.default_rng(0)
  # p = .6 of 5 with skills, .4 of 2 without: the effect is .2.
  drawn = (
    rng.binomial(5, 0.6, (2000, 12)) / 5 - rng.binomial(2, 0.4, (2000, 12)) / 2
  )
  found = [credit.effect(row.tolist()) for row in drawn]
  inside = np.mean([one.low <= 0.2 <= one.high for one in found])
  assert 0.93 < inside < 0.97
