from __future__ import annotations

import re
import string

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sesa_jax.language import ENGLISH, as_targets


def squad(text):
  """The rule as SQuAD states it, step by step."""
  text = "".join(c for c in text.lower() if c not in set(string.punctuation))
  return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


@pytest.mark.parametrize(
  "value", ["Paris", ["Paris"], ("Paris",), np.array(["Paris"])]
)
def test_one_answer_however_it_is_held(value):
  assert as_targets(value) == ("Paris",)


def test_targets_are_stripped_and_unique_in_order():
  value = np.array([" Paris ", "paris", "Paris", ""], dtype=object)
  assert as_targets(value) == ("Paris", "paris")
  assert as_targets(np.array("Paris")) == ("Paris",)


@pytest.mark.parametrize(
  "value", [3, None, {"Paris": 1}, [3], [["Paris"]], b"Paris", np.array([1])]
)
def test_other_types_are_an_error_that_names_them(value):
  with pytest.raises(ValueError, match="string"):
    as_targets(value)


@pytest.mark.parametrize("value", ["", " ", [], ["", " "], np.array([])])
def test_no_answer_is_an_error(value):
  with pytest.raises(ValueError, match="No answer"):
    as_targets(value)


@pytest.mark.parametrize(
  ("text", "count"),
  [
    ("", 0),
    ("What is the capital of Australia?", 6),
    ("Paris/London, Rome", 3),  # alternatives without spaces count too
    ("- - - ... !", 0),
    ("it's twenty-one 1,000 U.S. years", 5),
    ("Łódź is a city", 4),
  ],
)
def test_word_count(text, count):
  assert len(ENGLISH.words(text)) == count


@pytest.mark.parametrize(
  ("text", "normal"),
  [
    ("The  Beatles!", "beatles"),
    ("an apple a day", "apple day"),
    ("Theatre", "theatre"),
    ("U.S.", "us"),
    ("Beyoncé\t", "beyoncé"),
    ("A", "a"),  # SQuAD leaves nothing of these three
    ("The.", "the"),
    ("?", "?"),
    ("", ""),
  ],
)
def test_normal_form(text, normal):
  assert ENGLISH.normalize_answer(text) == normal


@given(st.text(alphabet="aA tThHeEn.,-'x1é\n"))
def test_normal_form_is_squads_where_that_leaves_anything(text):
  if squad(text):
    assert ENGLISH.normalize_answer(text) == squad(text)
  else:
    assert bool(ENGLISH.normalize_answer(text)) == bool(text.strip())


def test_contained_even_inside_a_word_whatever_the_case():
  assert ENGLISH.contains_any("Who ruled the PARISIANS?", ["Rome", "paris"])
  assert ENGLISH.contains_any("the New\n York mayor", "new york")
  assert ENGLISH.contains_any("in STRASSE 3", "Straße")
  assert not ENGLISH.contains_any("Who ruled Pari s?", "paris")
  # A string is one answer, not the letters of one.
  assert not ENGLISH.contains_any("pairs", "Paris")


def test_mentioned_only_at_token_boundaries():
  assert ENGLISH.mentions_any("Check the cat, then ask.", ["dog", "Cat"])
  assert not ENGLISH.mentions_any("Check the category.", ["cat"])
  assert ENGLISH.mentions_any("in the U S army", "U.S.")
  assert ENGLISH.mentions_any("the new-york times", ["New York"])
  assert not ENGLISH.mentions_any("newyork", ["New York"])
  assert ENGLISH.mentions_any("It has 🚁 in it", ["🚁"])
  assert not ENGLISH.mentions_any("anything", [])
  assert not ENGLISH.mentions_any("anything", ["", " "])


@pytest.mark.parametrize(
  ("text", "entities"),
  [
    (
      "Which film did Steven Spielberg direct in 1993?",
      ["Steven Spielberg", "1993"],
    ),
    # What opens a sentence may be any word; what follows it is a name.
    ("Marie Curie's husband won. Where did he live?", ["Curie"]),
    ('Who wrote "a brave new world"?', ["a brave new world"]),
    ("who wrote “the hobbit”", ["the hobbit"]),
    ("Who made the Lord of the Rings?", ["Lord of the Rings"]),
    ("Who sang in The Beatles?", ["Beatles"]),
    ("Who stars in A Beautiful Mind?", ["Beautiful Mind"]),
    ("Was it France, Germany or Spain?", ["France", "Germany", "Spain"]),
    ("Did J. R. R. Tolkien meet Dr. Watson?", ["J R R Tolkien", "Dr Watson"]),
    ("how far did Apollo 11 fly", ["Apollo 11"]),
    ("of 1,234 men, 42 in 747s took vitamin C", ["1,234", "1234", "747"]),
    ("Nothing here. Nor here! Or here", []),
  ],
)
def test_entities(text, entities):
  assert list(ENGLISH.entities(text)) == entities


@given(st.text(alphabet="aB cD.'\"’“”\n!é9&-"))
def test_what_is_named_is_mentioned(text):
  for entity in ENGLISH.entities(text):
    # A number without its separators is not.
    assert entity.isdigit() or ENGLISH.mentions_any(text, [entity])
