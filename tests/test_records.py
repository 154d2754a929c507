"""What is warned of, and what is not."""

import re

import pytest

from configs import common, tiny
from sesa_jax import records

LIMITS = dict(
  entropy_least=0.1,
  entropy_most=4.0,
  malformed=0.5,
  clip_fraction=0.3,
  valid_rate=0.05,
  valid_iterations=3,
)
SOUND = {
  f"{role}/{name}": value
  for role in ("challenger", "solver")
  for name, value in (
    ("entropy/mean", 1.0),
    ("rollout/malformed", 0.5),  # the limit itself is within
    ("clip_fraction", 0.3),
  )
} | {"challenger/valid_rate": 0.05}


def said(*rows, **limits):
  return records.alarms(rows, **(LIMITS | limits))


def test_what_is_within_its_limits_is_not_warned_of():
  assert said(*[SOUND] * 9) == []
  assert said({}) == []  # nothing was learned from


@pytest.mark.parametrize("role", ["challenger", "solver"])
@pytest.mark.parametrize(
  ("metric", "value", "line"),
  [
    ("entropy/mean", 0.09, "= 0.09, below 0.1: .*entropy_coefficient"),
    ("entropy/mean", 4.5, "= 4.5, above 4: .*babbles.*learning_rate"),
    ("rollout/malformed", 0.51, "= 0.51, above 0.5: .*--mode=show"),
    ("clip_fraction", 0.31, "= 0.31, above 0.3: .*minibatch_questions"),
  ],
)
def test_a_policy_that_collapses_is_named(role, metric, value, line):
  (found,) = said(SOUND, SOUND | {f"{role}/{metric}": value})
  assert re.match(f"{role}/{metric} {line}", found)
  assert f"{role}." in found
  assert said(SOUND | {f"{role}/{metric}": value}, SOUND) == []


def test_few_valid_proposals_are_warned_of_once_they_last():
  low = SOUND | {"challenger/valid_rate": 0.04}
  assert said(low, low) == []
  assert said(low, SOUND, low, low) == []
  (found,) = said(SOUND, low, low, low)
  assert found.startswith("challenger/valid_rate = 0.04, below 0.05 for 3 iter")


def test_the_papers_limits():
  alarms = common.get_config().alarms
  assert (alarms.valid_rate, alarms.valid_iterations) == (0.05, 10)
  assert set(LIMITS) == set(alarms) == set(tiny.get_config().alarms)
