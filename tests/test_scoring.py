from __future__ import annotations

import re
import string
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sesa_jax.judge import scoring
from sesa_jax.language import English


def squad(text):
  text = "".join(c for c in text.lower() if c not in set(string.punctuation))
  return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def naive_f1(prediction, target):
  """Precision and recall of words, as in the official SQuAD script."""
  p, t = squad(prediction).split(), squad(target).split()
  if squad(prediction) != squad(target):
    for closed in ("yes", "no", "noanswer"):
      if closed in (squad(prediction), squad(target)):
        return 0
  common = sum((Counter(p) & Counter(t)).values())
  if common == 0:
    return 0
  precision, recall = common / len(p), common / len(t)
  return 2 * precision * recall / (precision + recall)


answers = st.lists(
  st.sampled_from("The a cat Cat, dog dog yes no 1.5 x'y".split()), min_size=1
).map(" ".join)


@given(answers, st.lists(answers, min_size=1, max_size=3))
def test_scores_equal_the_definition(prediction, targets):
  sound = [t for t in [prediction, *targets] if squad(t)]
  if len(sound) == 1 + len(targets):  # see test_language for the others
    assert scoring.exact_match(prediction, targets) == (
      squad(prediction) in [squad(t) for t in targets]
    )
    assert scoring.f1(prediction, targets) == pytest.approx(
      max(naive_f1(prediction, t) for t in targets), abs=1e-12
    )


@pytest.mark.parametrize(
  ("prediction", "targets", "match", "f1"),
  [
    ("the Eiffel Tower", ["Eiffel tower."], True, 1.0),
    ("Eiffel", ["Eiffel tower"], False, 2 / 3),
    # 2 words of 3 shared with the second alias, 1 of 4 with the first.
    ("big red dog", ["dog", "red dog"], False, 0.8),
    ("dog dog", ["dog"], False, 2 / 3),  # a repeated word counts once
    ("yes indeed", ["yes"], False, 0.0),
    ("yes", ["yes it is"], False, 0.0),
    ("Yes.", ["yes"], True, 1.0),
    ("", ["Paris"], False, 0.0),
    (None, ["Paris"], False, 0.0),
    ("", ["the"], False, 0.0),  # nothing is no answer
    ("the", ["a"], False, 0.0),
    ("a", ["A"], True, 1.0),
  ],
)
def test_values_worked_out_by_hand(prediction, targets, match, f1):
  assert scoring.exact_match(prediction, targets) is match
  assert scoring.f1(prediction, targets) == pytest.approx(f1, abs=1e-12)


@pytest.mark.parametrize(
  "targets", ["New York", ["New York"], np.array(["New York"])]
)
def test_string_list_and_array_of_targets_mean_the_same(targets):
  assert scoring.exact_match("new york", targets)
  assert not scoring.exact_match("N", targets)
  assert scoring.f1("York", targets) == pytest.approx(2 / 3)


def test_the_language_decides():
  french = English(articles=frozenset({"le", "la"}))
  assert scoring.exact_match("la Seine", "Seine", french)
  assert not scoring.exact_match("the Seine", "Seine", french)
  assert scoring.normalize("la Seine", french) == "seine"


def test_no_answer_matches_nothing_even_if_a_language_erases_targets():
  class Mute(English):
    def normalize_answer(self, text):
      return ""

  assert not scoring.exact_match("", "Seine", Mute())
  assert scoring.f1("", "Seine", Mute()) == 0
