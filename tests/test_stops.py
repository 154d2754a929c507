"""The token automaton against search in text."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sesa_jax.engine import stops

STOPS = ("</search>", "</answer>", "aba", "abab")


def first_hit_in_text(ids, vocabulary, strings):
  """The definition: the first token after which a stop string is in text."""
  text = b""
  for place, token in enumerate(ids):
    text += vocabulary[token]
    if any(stop.encode() in text for stop in strings):
      return place
  return None


def first_hit(automaton, ids):
  state = stops.START
  for place, token in enumerate(ids):
    state = int(automaton.table[state, token])
    if state == automaton.hit:
      return place
  return None


VOCABULARY = [bytes([b]) for b in range(256)] + [
  b"</", b"search", b">", b"</search>x", b"h></an", b"answ", b"er>", b"ab",
  b"ba", b"", "é".encode(), b"</answer></search>",
]  # fmt: skip
interesting = st.sampled_from(range(256, len(VOCABULARY))) | st.sampled_from(
  list(b"</searchanw>b")
)


@given(st.lists(interesting, max_size=40), st.sets(st.sampled_from(STOPS)))
def test_finds_what_text_search_finds(ids, strings):
  automaton = stops.compile_stops(sorted(strings), VOCABULARY)
  expected = first_hit_in_text(ids, VOCABULARY, strings)
  assert first_hit(automaton, ids) == expected


@given(st.lists(interesting, max_size=30), st.lists(interesting, max_size=30))
def test_walk_continues_behind_a_stop_that_meant_nothing(before, after):
  automaton = stops.compile_stops(STOPS, VOCABULARY)
  state = automaton.walk(before)
  found = None
  for place, token in enumerate(after):
    state = int(automaton.table[state, token])
    if state == automaton.hit:
      found = place
      break
  # By definition: a stop string that ends behind `before`.
  text = b"".join(VOCABULARY[i] for i in before)
  expected, start = None, len(text)
  for place, token in enumerate(after):
    text += VOCABULARY[token]
    if any(
      text[:end].endswith(stop.encode())
      for stop in STOPS
      for end in range(start + 1, len(text) + 1)
    ):
      expected = place
      break
  assert found == expected


def test_a_stop_string_inside_another_ends_first():
  automaton = stops.compile_stops(["abc", "b"], [b"a", b"b", b"c"])
  assert first_hit(automaton, [0, 1, 2]) == 1


def test_walk_reads_as_much_as_the_longest_stop_string_has():
  automaton = stops.compile_stops(["abcd"], [b"a", b"b", b"c", b"d", b""])
  assert automaton.table[automaton.walk([3, 0, 1, 4, 2]), 3] == automaton.hit


def test_special_tokens_leave_the_state():
  automaton = stops.compile_stops(["ab"], [b"a", b"b", b""])
  assert first_hit(automaton, [0, 2, 1]) == 2


def test_tables_of_different_stops_share_a_shape():
  one = stops.compile_stops(["</search>", "</answer>"], VOCABULARY)
  two = stops.compile_stops(["</answer>"], VOCABULARY)
  assert one.table.shape == two.table.shape
  assert one.table.dtype == np.int16


def test_an_empty_stop_string_is_an_error():
  with pytest.raises(ValueError, match="empty"):
    stops.compile_stops(["</a>", ""], VOCABULARY)
