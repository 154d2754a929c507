"""One data shard as the host sees it: episodes, slots, a queue and pages."""

from __future__ import annotations

import collections
import concurrent.futures
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from sesa_jax import types
from sesa_jax.engine import decode, stops
from sesa_jax.engine.pages import Pages, pages_for


def sampling_key(seed: int, iteration: int, request_id: str, attempt: int):
  """Returns the uint32 [2] key of an episode; its draws fold in positions.

  An episode depends on this key, its prompt and the weights, and on nothing
  else: not on its slot, its neighbours or its host.
  """
  name = f"{seed}/{iteration}/{request_id}/{attempt}".encode()
  return np.frombuffer(hashlib.sha256(name).digest()[:8], np.uint32)


def check_ids(whose: str, ids: Sequence[int], vocabulary: int) -> None:
  """Raises a `ValueError` if an id is none of the vocabulary."""
  for token in (min(ids), max(ids)) if len(ids) else ():
    if not 0 <= token < vocabulary:
      raise ValueError(
        f"{whose} has the id {token}; ids are from 0 to {vocabulary - 1}. Make "
        "them with the backbone's own tokenizer."
      )


# --- what has pages --------------------------------------------------------


class Held:
  """Ids that hold pages; the first `cached` of them are in the pool."""

  ids: np.ndarray
  cached: int
  reached: int  # the most that `cached` has ever been
  pages: list[int]
  table: np.ndarray  # int32 [W]: the same pages, and trash

  def missing(self) -> int:
    """Ids that must be in the pool before decoding, and are not."""
    raise NotImplementedError

  def add_pages(self, pages: Sequence[int]) -> None:
    """Appends pages."""
    start = len(self.pages)
    self.table[start : start + len(pages)] = pages
    self.pages += pages


class Prompt(Held):
  """A prompt that is kept for further attempts; all but its last id."""

  def __init__(self, request: types.Request, width: int, again: bool):
    self.request_id = request.id
    self.ids = np.array(request.prompt_ids[:-1], np.int32)
    self.cached = 0
    self.reached = len(self.ids) if again else 0
    self.copied = False  # its first attempt is not counted as shared
    self.pages = []
    self.table = np.zeros(width, np.int32)

  def missing(self) -> int:
    """See `Held`."""
    return len(self.ids) - self.cached


class Playing(Held):
  """An episode: in a slot, or in a queue with all that it has so far."""

  def __init__(
    self,
    request: types.Request,
    attempt: int,
    number: int,
    limit: int,
    key: np.ndarray,
  ):
    self.request = request
    self.attempt = attempt
    self.age = (number, attempt)  # the smaller, the older
    self.key = key
    self.limit = limit  # ids
    self.size = len(request.prompt_ids)
    self.ids = np.zeros(limit, np.int32)
    self.ids[: self.size] = request.prompt_ids
    self.mask = np.zeros(limit, bool)
    self.logprobs = np.zeros(limit, np.float32)
    self.turns: list[types.Turn] = []
    self.turn_start = self.size
    self.turn_limit = request.limits.turn_tokens
    self.malformed = 0
    self.stop_state = stops.START
    self.reason = decode.RUNNING
    self.reply: concurrent.futures.Future | types.Reply | None = None
    self.slot = -1
    self.prompt: Prompt | None = None  # whose last page is still to be copied
    self.begun = False
    self.cached = self.reached = 0
    self.pages = []

  @property
  def room(self) -> int:
    """Ids that the episode may still hold."""
    return self.limit - self.size

  @property
  def turn_left(self) -> int:
    """Ids that this turn may still sample."""
    return self.turn_limit - (self.size - self.turn_start)

  def spent(self) -> str:
    """The limit that leaves this turn no further id, or ""."""
    if self.turn_left <= 0:
      return "turn_tokens"
    return "episode_tokens" if self.room <= 0 else ""

  def missing(self) -> int:
    """See `Held`."""
    return self.size - 1 - self.cached  # the last id is decoded

  def tokens_after(self, steps: int) -> int:
    """Ids that may be in the pool after `steps` more are decoded."""
    runs = self.reply is None
    return self.size - 1 + runs * min(steps, self.turn_left, self.room)

  def append(self, ids: Any, logprobs: Any = 0.0, sampled: bool = False):
    """Appends ids, sampled or observed."""
    start, self.size = self.size, self.size + len(ids)
    self.ids[start : self.size] = ids
    self.logprobs[start : self.size] = logprobs
    self.mask[start : self.size] = sampled

  def pause(self) -> types.Pause:
    """What an environment is asked."""
    return types.Pause(
      request_id=self.request.id,
      attempt=self.attempt,
      turn=len(self.turns),
      malformed=self.malformed,
      ids=tuple(self.ids[self.turn_start : self.size].tolist()),
      reason=decode.REASONS[self.reason],
      room=self.room,
      turns=self.request.limits.turns,
    )

  def episode(self, finish: str) -> types.Episode:
    """The finished episode."""
    return types.Episode(
      request_id=self.request.id,
      attempt=self.attempt,
      arm=self.request.arm,
      ids=self.ids[: self.size].copy(),
      prompt_length=len(self.request.prompt_ids),
      mask=self.mask[: self.size].copy(),
      logprobs=self.logprobs[: self.size].copy(),
      turns=tuple(self.turns),
      finish=finish,
    )


# --- one data shard --------------------------------------------------------


class Shard:
  """The slots, the pages and the queue of one data shard.

  Episodes begin in the order of their age, and when pages run out the youngest
  goes back to the front of the queue. So the oldest one that is not finished is
  in a slot, and it stays there: it alone never needs more pages than there are
  (`Engine.play` checks that), and all others yield theirs to it. Every call of
  the decode loop adds an id to it or it waits for its environment, so it ends;
  then the next one is the oldest. Hence all end.
  """

  def __init__(self, layout: decode.Layout, tables: np.ndarray):
    self._layout = layout
    self._tables = tables  # int32 [R, W] of the slots
    self.slots: list[Playing | None] = [None] * layout.slots
    self.queue: collections.deque[Playing] = collections.deque()
    self.prompts: dict[str, Prompt] = {}
    self.pages = Pages(layout.pages)
    self._queued = collections.Counter()  # attempts in the queue, by request
    self._seen: set[str] = set()  # requests whose prompts were computed
    self.counts = collections.Counter()

  def residents(self) -> list[Playing]:
    """The episodes in slots."""
    return [playing for playing in self.slots if playing is not None]

  def vacant(self) -> int:
    """How many slots are free, if nobody queues for them."""
    return 0 if self.queue else self.slots.count(None)

  def enqueue(self, playing: Playing) -> None:
    """Puts a new episode at the end of the queue."""
    self._queued[playing.request.id] += 1
    self.queue.append(playing)

  def admit(self) -> None:
    """Lets episodes of the queue into free slots while there are pages."""
    for slot, resident in enumerate(self.slots):
      if resident is None:
        if not self.queue or not self._begin(self.queue[0], slot):
          return
        playing = self.queue.popleft()
        self._queued[playing.request.id] -= 1

  def _needs(self, playing: Playing) -> int:
    """Pages that it must own before the next call of the decode loop."""
    tokens = playing.tokens_after(self._layout.steps)
    return pages_for(tokens, self._layout.page_size)

  def _lacks(self, playing: Playing) -> int:
    return max(0, self._needs(playing) - len(playing.pages))

  def _begin(self, playing: Playing, slot: int) -> bool:
    """Gives an episode a slot and pages, if there are enough of them.

    Enough means that nobody need yield before the next call is over.
    """
    size, request = self._layout.page_size, playing.request
    tokens = len(request.prompt_ids) - 1
    needs = self._needs(playing)
    others = sum(self._lacks(other) for other in self.residents())
    prompt = self.prompts.get(request.id)
    # The last page of a kept prompt is never decoded into: each attempt has a
    # copy. So a prompt without further attempts is not kept.
    more = self._queued[request.id] > 1 and not self._layout.contiguous
    keeps = more and prompt is None and tokens > 0
    shared = tokens // size if prompt or keeps else 0
    wanted = others + needs - shared + keeps * pages_for(tokens, size)
    if not self._spare(wanted, prompt):
      if self.residents():
        return False
      # It is alone: it fits without what is kept.
      prompt, keeps, shared, wanted = None, False, 0, needs
      if not self._spare(wanted, None):
        raise AssertionError(f"{needs} pages of {self._layout.pages}")
    if keeps:
      prompt = self._keep(request)
    elif prompt is None and request.id in self._seen:
      playing.reached = max(playing.reached, tokens)
    self.slots[slot], playing.slot = playing, slot
    playing.table, playing.cached = self._tables[slot], 0
    if prompt:
      self.pages.share(prompt.pages[:shared])
      playing.add_pages(prompt.pages[:shared])
      playing.prompt = prompt
    self._grow(playing, needs - shared)
    return True

  def _grow(self, playing: Playing, count: int) -> None:
    first = None
    if self._layout.contiguous:  # the first row is trash
      first = (playing.slot + 1) * self._layout.width + len(playing.pages)
    playing.add_pages(self.pages.take(count, first))

  def _keep(self, request: types.Request) -> Prompt:
    again = request.id in self._seen
    prompt = Prompt(request, self._layout.width, again)
    count = pages_for(len(prompt.ids), self._layout.page_size)
    prompt.add_pages(self.pages.take(count))
    self.prompts[request.id] = prompt
    return prompt

  def _spare(self, count: int, but: Prompt | None) -> bool:
    """Makes `count` pages free by dropping kept prompts, if that can be."""
    if self.pages.free >= count:
      return True
    idle = [(self.pages.alone(p.pages), p.request_id) for p in self._idle(but)]
    if self.pages.free + sum(alone for alone, _ in idle) < count:
      return False
    idle.sort(key=lambda pair: pair[0])
    while self.pages.free < count:
      self._drop(idle.pop()[1])
    return True

  def _idle(self, but: Prompt | None = None) -> list[Prompt]:
    """Kept prompts that no attempt is about to copy from."""
    used = {id(playing.prompt) for playing in self.residents()} | {id(but)}
    return [p for p in self.prompts.values() if id(p) not in used]

  def _drop(self, request_id: str) -> None:
    self.pages.give_back(self.prompts.pop(request_id).pages)

  def reserve(self) -> None:
    """Gives each resident the pages for what it may write next.

    Where they are short, kept prompts go first, then the youngest episodes.
    """
    for playing in sorted(self.residents(), key=lambda p: p.age):
      if playing.slot < 0:
        continue  # it has just yielded
      lacks = self._lacks(playing)
      while not self._spare(lacks, None):
        youngest = max(self.residents(), key=lambda p: p.age)
        self._yield(youngest)
        if youngest is playing:
          break
      else:
        self._grow(playing, lacks)

  def _yield(self, playing: Playing) -> None:
    self.release(playing)
    self.queue.appendleft(playing)
    self._queued[playing.request.id] += 1
    self.counts["preempted"] += 1

  def release(self, playing: Playing) -> None:
    """Takes an episode out of its slot."""
    self.pages.give_back(playing.pages)
    playing.table[:] = 0
    self.slots[playing.slot], playing.slot = None, -1
    playing.pages, playing.prompt, playing.cached = [], None, 0

  def uncached(self) -> list[Held]:
    """What prefill has to do now: prompts, and episodes about to run."""
    found: list[Held] = list(self.prompts.values())
    found += [
      playing
      for playing in self.residents()
      if playing.reply is None and playing.prompt is None
    ]
    return [sequence for sequence in found if sequence.missing() > 0]

  def copies(self) -> list[tuple[int, int]]:
    """Pages to copy, so that attempts have their prompts; forgets them then.

    A prompt goes once all attempts at it have begun.
    """
    found = []
    for playing in self.residents():
      if prompt := playing.prompt:
        tokens = len(prompt.ids)
        if tokens % self._layout.page_size:
          last = tokens // self._layout.page_size
          found.append((prompt.pages[last], playing.pages[last]))
        playing.cached, playing.prompt = tokens, None
        playing.reached = max(playing.reached, tokens)
        self.counts["shared"] += prompt.copied * tokens
        prompt.copied = True
      if playing.cached:
        self._seen.add(playing.request.id)
    for request_id in [i for i in self.prompts if not self._queued[i]]:
      self._drop(request_id)
    return found

  def check(self) -> None:
    """Asserts all that must hold between two calls of the decode loop."""
    residents = self.residents()
    held = [p.pages for p in (*residents, *self.prompts.values())]
    self.pages.check(held)
    size = self._layout.page_size
    shared = collections.Counter(page for pages in held for page in pages)
    for slot, playing in enumerate(self.slots):
      pages = playing.pages if playing else []
      assert self._tables[slot, : len(pages)].tolist() == pages
      assert not self._tables[slot, len(pages) :].any()
    for playing in residents:
      # What it writes next must be its own, and what it shares a prompt's.
      own = playing.pages[(playing.size - 1) // size :]
      assert all(shared[page] == 1 for page in own), "a shared page is written"
      assert playing.cached <= playing.size - 1
      assert pages_for(playing.cached, size) <= len(playing.pages)
    ages = [p.age for p in self.queue]
    assert ages == sorted(ages), "the queue is out of order"
    assert all(p.age < a for p in residents for a in ages[:1])
