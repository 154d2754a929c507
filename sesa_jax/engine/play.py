"""One call of `Engine.play`, over all data shards.

The host looks at the devices between two calls of the decode loop. What it
does then costs a constant an episode and a new page, whatever the lengths.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from sesa_jax import distributed, types
from sesa_jax.engine import decode, stops
from sesa_jax.engine.shard import Held, Playing, Shard, check_ids

# Of a running episode, what the devices are told in `decode.Rows`.
_STATE: dict[str, tuple[Any, Callable[[Playing], Any]]] = {
  "token": (np.int32, lambda p: p.ids[p.size - 1]),
  "position": (np.int32, lambda p: p.size - 1),
  "stop_state": (np.int32, lambda p: p.stop_state),
  "turn_left": (np.int32, lambda p: p.turn_left),
  "episode_left": (np.int32, lambda p: p.room),
  "temperature": (np.float32, lambda p: p.request.sampling.temperature),
  "top_p": (np.float32, lambda p: p.request.sampling.top_p),
  "top_k": (np.int32, lambda p: p.request.sampling.top_k),
}


class Play:
  """The episodes of one call of `Engine.play`, over all data shards.

  Args:
    layout: of the programs.
    weights: of `Engine.load`.
    automaton: of the environment's stop strings.
    stop_table: its table on the devices.
    ends: ids that end a turn, on the devices.
    environment: answers pauses.
    text: ids -> str, for `Turn.text`.
    begin: (request, attempt, number) -> `Playing`.
    cut: whether some request has a top_p or a top_k.
    deterministic: await every tool before each call of the decode loop.
    check: assert the pages' invariants after each.
  """

  def __init__(
    self,
    layout: decode.Layout,
    weights: Any,
    automaton: stops.Automaton,
    stop_table: Any,
    ends: Any,
    environment: types.Environment,
    text: Callable[[list[int]], str],
    begin: Callable[[types.Request, int, int], Playing],
    *,
    cut: bool,
    deterministic: bool,
    check: bool,
  ):
    self._layout = layout
    self._programs = decode.programs(layout)
    self._weights = weights
    self._automaton = automaton
    self._constants = stop_table, ends
    self._environment = environment
    self._text = text
    self._begin = begin
    self._decode = self._programs.decode_cut if cut else self._programs.decode
    self._deterministic = deterministic
    self._check = check
    shape = layout.data, layout.slots, layout.width
    self._tables = np.zeros(shape, np.int32)
    self._shards = [Shard(layout, table) for table in self._tables]
    self._pool = self._programs.pool()
    self.counts = collections.Counter()
    self.seconds = collections.Counter()

  def run(self, requests: Sequence[types.Request]) -> Iterator[types.Episode]:
    """Plays all attempts; yields episodes as they end."""
    waiting = collections.deque(enumerate(requests))
    while waiting or any(s.queue or s.residents() for s in self._shards):
      self._fill(waiting)
      for shard in self._shards:
        shard.reserve()
      self._prefill()
      self._run()
      yield from self._settle()
      if self._check:
        for shard in self._shards:
          shard.check()
    for shard in self._shards:
      self.counts += shard.counts
      assert shard.pages.free == self._layout.pages - 1, "pages were lost"

  def _fill(self, waiting: collections.deque) -> None:
    """Lets episodes begin; all attempts at a request on one data shard."""
    for shard in self._shards:
      shard.admit()
    while waiting:
      shard = max(self._shards, key=Shard.vacant)
      if not shard.vacant():
        return
      number, request = waiting.popleft()
      for attempt in range(request.attempts):
        shard.enqueue(self._begin(request, attempt, number))
      shard.admit()

  # --- prefill ---

  def _prefill(self) -> None:
    """Computes what decoding needs: prompts, observations, what was lost."""
    while True:
      todo = [shard.uncached() for shard in self._shards]
      while most := max(sum(h.missing() for h in held) for held in todo):
        self._compute(todo, self._bucket(most))
      copies = [shard.copies() for shard in self._shards]
      if any(copies):
        self._copy(copies)
      elif not any(shard.uncached() for shard in self._shards):
        return

  def _bucket(self, tokens: int) -> int:
    """The size of the next batch where so many tokens are to be computed."""
    sizes = self._layout.prefill_tokens
    fits = next((size for size in sizes if size >= tokens), sizes[-1])
    below = max((size for size in sizes if size <= tokens), default=fits)
    # Rather a full batch and a small one than a large one that is half empty.
    return fits if 2 * tokens > fits else below

  def _compute(self, todo: Sequence[Sequence[Held]], size: int) -> None:
    """Prefills one batch of `size` tokens on every data shard."""
    batch = decode.Batch(
      *(np.zeros((self._layout.data, size), np.int32) for _ in range(4)),
      kv_lens=self._zeros(self._layout.prefill_rows),
      tables=self._zeros(self._layout.prefill_rows, self._layout.width),
      cu=self._zeros(self._layout.prefill_rows + 1),
      rows=self._zeros(),
    )
    for shard, held in enumerate(todo):
      self._pack(batch, shard, held)
    with self._time("device"):
      self._pool = self._programs.prefill(
        self._weights, self._pool, self._sent(batch)
      )

  def _sent(self, tree: Any) -> Any:
    """Cuts arrays over the data shards: among processes jit does not."""
    if distributed.count() == 1:
      return tree
    where = NamedSharding(self._layout.mesh, PartitionSpec("data"))
    return jax.device_put(tree, where)

  def _zeros(self, *shape: int) -> np.ndarray:
    return np.zeros((self._layout.data, *shape), np.int32)

  def _pack(self, batch: decode.Batch, shard: int, todo: list[Held]) -> None:
    """Fills a shard's part of a batch, and counts it as computed."""
    size, end, row = batch.ids.shape[1], 0, 0
    for held in todo:
      count = min(held.missing(), size - end)
      if not count:
        continue
      if row == self._layout.prefill_rows:
        break
      start, stop = held.cached, held.cached + count
      positions = np.arange(start, stop)
      place = shard, slice(end, end + count)
      batch.ids[place] = held.ids[start:stop]
      batch.positions[place] = positions
      batch.pages[place] = held.table[positions // self._layout.page_size]
      batch.offsets[place] = positions % self._layout.page_size
      batch.kv_lens[shard, row] = stop
      batch.tables[shard, row] = held.table
      end, row = end + count, row + 1
      batch.cu[shard, row:] = end
      self.counts["prefilled"] += count
      self.counts["prefill_pairs"] += _pairs(start, stop)
      self.counts["recomputed"] += max(0, min(stop, held.reached) - start)
      held.cached, held.reached = stop, max(stop, held.reached)
    batch.rows[shard] = row
    self.counts["padding"] += (size - end) * (row > 0)

  def _copy(self, copies: Sequence[Sequence[tuple[int, int]]]) -> None:
    """Copies pages; those that are not used copy trash to trash."""
    source = self._zeros(self._layout.slots)
    target = self._zeros(self._layout.slots)
    for shard, pairs in enumerate(copies):
      if pairs:
        source[shard, : len(pairs)], target[shard, : len(pairs)] = zip(
          *pairs, strict=True
        )
    with self._time("device"):
      self._pool = self._programs.copy(
        self._pool, *self._sent((source, target))
      )

  # --- decode ---

  def _run(self) -> None:
    """Calls the decode loop once, and appends what it sampled."""
    running = [
      [playing for playing in shard.residents() if playing.reply is None]
      for shard in self._shards
    ]
    most = max(map(len, running))
    if not most:
      return
    count = next(size for size in self._layout.rows if size >= most)
    # Few that wait for the host are worth no look while many run. A data shard
    # that leaves would only wait for the others.
    leave = max(1, most // 16) if self._layout.data == 1 else most
    with self._time("device"):
      self._pool, decoded = self._decode(
        self._weights,
        self._pool,
        *self._sent(self._rows(running, count)),
        *self._constants,
        np.int32(leave),
      )
      decoded = jax.device_get(decoded)
    for shard, playings in enumerate(running):
      self._harvest(playings, jax.tree.map(lambda x, i=shard: x[i], decoded))
    self.counts["dispatches"] += 1

  def _rows(
    self, running: Sequence[Sequence[Playing]], count: int
  ) -> tuple[decode.Rows, np.ndarray]:
    """The running episodes' state and tables, in their order."""
    shape = self._layout.data, count
    rows = {name: np.zeros(shape, kind) for name, (kind, _) in _STATE.items()}
    key = np.zeros((*shape, 2), np.uint32)
    reason = np.full(shape, decode.STOP, np.int32)
    most = max(len(p.pages) for playings in running for p in playings)
    widths = (*self._layout.widths, self._layout.width)
    width = next(width for width in widths if width >= most)
    tables = np.zeros((*shape, width), np.int32)
    for shard, playings in enumerate(running):
      if not playings:
        continue
      here = shard, self._places(playings)
      for name, (_, value) in _STATE.items():
        rows[name][here] = [value(playing) for playing in playings]
      key[here] = [playing.key for playing in playings]
      slots = [playing.slot for playing in playings]
      tables[here] = self._tables[shard, slots, :width]
      reason[here] = decode.RUNNING
    return decode.Rows(key=key, reason=reason, **rows), tables

  def _places(self, playings: Sequence[Playing]) -> Sequence[int]:
    """The rows in which episodes are decoded."""
    if self._layout.contiguous:
      return [playing.slot for playing in playings]
    return range(len(playings))

  def _harvest(
    self, playings: Sequence[Playing], decoded: decode.Decoded
  ) -> None:
    for row, playing in zip(self._places(playings), playings, strict=True):
      count = int(decoded.counts[row])
      start = playing.cached
      self.counts["decode_pairs"] += _pairs(start, start + count)
      playing.append(
        decoded.ids[row, :count], decoded.logprobs[row, :count], sampled=True
      )
      playing.cached += count
      playing.reached = max(playing.reached, playing.cached)
      playing.reason = int(decoded.reason[row])
      playing.stop_state = int(decoded.stop_state[row])
      self.counts["sampled"] += count
    self.counts["steps"] += int(decoded.steps)
    rows = len(decoded.counts) * int(decoded.steps)
    self.counts["idle"] += rows - int(decoded.counts.sum())

  # --- pause and resume ---

  def _settle(self) -> Iterator[types.Episode]:
    """Asks about paused episodes, applies replies, gives back ended ones."""
    residents = [p for shard in self._shards for p in shard.residents()]
    for playing in residents:
      if playing.reply is None and playing.reason != decode.RUNNING:
        playing.reply = self._environment.respond(playing.pause())
    self._wait(residents)
    for shard in self._shards:
      for playing in shard.residents():
        reply = playing.reply
        if isinstance(reply, concurrent.futures.Future):
          reply = reply.result() if reply.done() else None
        if reply is None:
          continue
        playing.reply, playing.reason = None, decode.RUNNING
        if finish := self._apply(playing, reply):
          shard.release(playing)
          yield playing.episode(finish)

  def _wait(self, residents: Sequence[Playing]) -> None:
    """Waits for tools where nobody runs, or where time must not matter."""
    pending = [
      playing.reply
      for playing in residents
      if isinstance(playing.reply, concurrent.futures.Future)
    ]
    with self._time("tool_wait"):
      if self._deterministic:
        concurrent.futures.wait(pending)
      elif pending and len(pending) == len(residents):
        concurrent.futures.wait(
          pending, return_when=concurrent.futures.FIRST_COMPLETED
        )

  def _apply(self, playing: Playing, reply: types.Reply) -> str:
    """Applies a reply; returns the finish reason, or "" to play on."""
    if reply.kind == "go_on":
      if not (spent := playing.spent()):
        turn = playing.ids[playing.turn_start : playing.size]
        playing.stop_state = self._automaton.walk(turn)
        return ""
      # The stop string that meant nothing took the last id of a limit.
      reply = types.Reply("finish", finish=spent)
    end = playing.size
    if reply.kind == "append":
      assert len(reply.ids) <= playing.room, (len(reply.ids), playing.room)
      check_ids(
        f"A reply to request {playing.request.id!r}",
        reply.ids,
        self._layout.graphdef.backbone.vocab_size,
      )
      playing.append(reply.ids)
    ids = playing.ids[playing.turn_start : end].tolist()
    playing.turns.append(
      types.Turn(
        start=playing.turn_start,
        end=end,
        stop=playing.size,
        text=self._text(ids),
        action=reply.action,
        argument=reply.argument,
        passages=reply.passages,
        note=reply.note,
      )
    )
    playing.malformed += reply.action == "malformed"
    playing.turn_start = playing.size
    limit = reply.turn_tokens
    if limit is None:
      limit = playing.request.limits.turn_tokens
    playing.turn_limit = limit
    playing.stop_state = stops.START  # an observation never begins a stop
    if reply.kind == "append":
      return playing.spent()
    return reply.finish

  @contextlib.contextmanager
  def _time(self, name: str):
    began = time.perf_counter()
    yield
    self.seconds[name] += time.perf_counter() - began


def _pairs(start: int, stop: int) -> int:
  """(query, key) pairs of the tokens at positions start..stop - 1."""
  return (stop * (stop + 1) - start * (start + 1)) // 2
