"""Stop strings as a token automaton, so that the device can see them.

An Aho-Corasick automaton over bytes (Aho and Corasick, 1975) is run over the
bytes of every token of a byte-level BPE vocabulary, which gives one table
`next_state[state, token]`. However a stop string is split over tokens, and
whatever follows it inside its last token, the table finds it at the first
token that completes it.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

START = 0


def byte_automaton(stops: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
  """Builds the automaton of some byte strings.

  Args:
    stops: the strings to find; none may be empty.

  Returns:
    goto: int32 [states, 256], the state after a byte; state 0 is the start.
    final: bool [states], True where some stop string has just ended.

  Raises:
    ValueError: a stop string is empty.
  """
  if any(not stop for stop in stops):
    raise ValueError(f"A stop string is empty in {list(stops)!r}; remove it.")
  children: list[dict[int, int]] = [{}]
  final = [False]
  for stop in stops:
    state = START
    for byte in stop:
      if byte not in children[state]:
        children[state][byte] = len(children)
        children.append({})
        final.append(False)
      state = children[state][byte]
    final[state] = True
  goto = np.zeros((len(children), 256), np.int32)
  fallback = [START] * len(children)
  queue = collections.deque([START])
  while queue:  # breadth first: a state's fallback is shorter, so it is done
    state = queue.popleft()
    if state != START:
      goto[state] = goto[fallback[state]]
      final[state] = final[state] or final[fallback[state]]
    for byte, child in children[state].items():
      fallback[child] = goto[state, byte] if state != START else START
      goto[state, byte] = child
      queue.append(child)
  return goto, np.array(final)


@dataclass(frozen=True, eq=False)
class Automaton:
  """A stop automaton over a vocabulary.

  `table[s, t]` is the state after token `t` in state `s`; the last row is the
  state in which a stop string has been completed, `hit`.
  """

  table: np.ndarray  # int16 [states + 1, V]
  hit: int
  goto: np.ndarray  # int32 [states, 256]
  token_bytes: Sequence[bytes]

  def walk(self, ids: Sequence[int]) -> int:
    """Returns the state after `ids`, as if no stop string had ended in them.

    For an episode that goes on after a stop string that meant nothing: the
    bytes behind it may be the beginning of the next one.
    """
    # A state remembers as many bytes as the longest stop string has, at most.
    start, missing = len(ids), len(self.goto)
    while start and missing > 0:
      start -= 1
      missing -= len(self.token_bytes[ids[start]])
    state = START
    for token in ids[start:]:
      for byte in self.token_bytes[token]:
        state = self.goto[state, byte]
    return int(state)


def compile_stops(
  stops: Sequence[str], token_bytes: Sequence[bytes], states: int = 32
) -> Automaton:
  """Compiles stop strings over a vocabulary.

  Args:
    stops: the strings to stop at.
    token_bytes: the bytes of each id; empty for special tokens, which leave
      the state as it is.
    states: the table is padded to a multiple of this many states, so that
      environments with other stop strings share one compiled program.

  Returns:
    The automaton.
  """
  goto, final = byte_automaton([stop.encode() for stop in stops])
  used = len(goto)
  hit = -(-(used + 1) // states) * states - 1
  byte_next = np.full((hit + 1, 256), hit, np.int32)
  byte_next[:used] = np.where(final[goto], hit, goto)
  lengths = np.array([len(b) for b in token_bytes])
  width = max(int(lengths.max(initial=0)), 1)
  padded = np.zeros((len(token_bytes), width), np.uint8)
  for token, text in enumerate(token_bytes):
    padded[token, : len(text)] = np.frombuffer(text, np.uint8)
  table = np.repeat(np.arange(hit + 1)[:, None], len(token_bytes), axis=1)
  for place in range(width):
    reach = np.flatnonzero(lengths > place)
    table[:, reach] = byte_next[table[:, reach], padded[reach, place]]
  return Automaton(table.astype(np.int16), hit, goto, tuple(token_bytes))
