"""One data shard on the host: who begins, who shares, who yields. No device."""

import concurrent.futures

import jax
import numpy as np
import pytest

from sesa_jax import types
from sesa_jax.engine import decode, shard
from sesa_jax.policy import backbones, model, sharding

S = 4  # tokens a page


def make(slots=3, pages=20, width=8, steps=4):
  layout = decode.Layout(
    graphdef=model.build(backbones.tiny()),
    mesh=sharding.rollout_mesh(1, jax.devices()[:1]),
    kind="xla",
    dtype=np.dtype("float32"),
    rows=(slots,),
    pages=pages,
    page_size=S,
    width=width,
    prefill_tokens=(16,),
    prefill_rows=slots,
    steps=steps,
    ends=0,
  )
  return shard.Shard(layout, np.zeros((slots, width), np.int32))


def enqueue(one, *sizes, attempts=1, turn_tokens=100, first=0):
  """Puts requests with prompts of these sizes into the queue."""
  found = []
  for number, size in enumerate(sizes, start=first):
    request = types.Request(
      id=f"r{number}",
      prompt_ids=tuple(range(size)),
      attempts=attempts,
      sampling=types.Sampling(),
      limits=types.Limits(turn_tokens, 32, 9),
      arm="test",
    )
    for attempt in range(attempts):
      key = shard.sampling_key(0, 0, request.id, attempt)
      found.append(shard.Playing(request, attempt, number, 32, key))
      one.enqueue(found[-1])
  return found


def compute(one):
  """Does what prefill does, and what the decode loop needs."""
  copied = []
  while True:
    todo = one.uncached()
    for held in todo:
      held.cached += held.missing()
      held.reached = max(held.reached, held.cached)
    pairs = one.copies()
    copied += pairs
    if not todo and not pairs:
      break
  one.check()
  return copied


def sample(playings, count):
  for playing in playings:
    playing.append([1] * count, [-1.0] * count, sampled=True)
    playing.cached += count


def test_attempts_have_whole_pages_in_common_and_the_last_one_each():
  one = make()
  # 9 of the prompt's 10 ids are computed: two pages, and one id of a third.
  playings = enqueue(one, 10, attempts=3)
  one.admit()
  copied = compute(one)
  tables = [p.pages for p in playings]
  assert tables[0][:2] == tables[1][:2] == tables[2][:2]
  rest = [page for table in tables for page in table[2:]]
  assert len(set(rest)) == len(rest)
  assert [target for _, target in copied] == [table[2] for table in tables]
  assert len({source for source, _ in copied}) == 1
  assert not {source for source, _ in copied} & set(rest)
  assert [p.cached for p in playings] == [9] * 3
  assert not one.prompts  # all attempts have begun
  assert one.counts["shared"] == 2 * 9


def test_a_prompt_is_kept_while_attempts_at_it_queue():
  one = make(slots=2)
  playings = enqueue(one, 10, attempts=3)
  one.admit()
  compute(one)
  assert set(one.prompts) == {"r0"}
  one.release(playings[0])
  one.admit()
  assert [held.missing() for held in one.uncached()] == []
  compute(one)
  assert not one.prompts
  assert one.counts["shared"] == 2 * 9


def test_a_prompt_of_whole_pages_needs_no_copy():
  one = make()
  enqueue(one, 9, attempts=2)
  one.admit()
  assert compute(one) == []
  one = make()
  alone = enqueue(one, 10)  # no other attempt: nothing is kept or copied
  one.admit()
  assert not one.prompts
  assert compute(one) == []
  assert alone[0].cached == 9


def test_kept_prompts_go_before_anybody_yields():
  one = make(slots=2, pages=14)
  playings = enqueue(one, 10, attempts=3)
  one.admit()
  compute(one)
  # Two pages in common, a third that is kept, and two own pages each.
  assert one.pages.free == 13 - 7
  for _ in range(3):
    sample(playings[:2], 4)
    one.reserve()
    one.check()
  assert one.pages.free == 0
  assert one.counts["preempted"] == 0
  assert one.prompts
  sample(playings[:2], 4)
  one.reserve()
  one.check()
  # The older one has the page that was kept, the younger one gives way.
  assert not one.prompts
  assert one.counts["preempted"] == 1
  assert list(one.queue) == playings[1:]
  assert len(playings[0].pages) == 8


def test_an_episode_waits_until_nobody_need_yield_for_it():
  one = make(pages=9, steps=16)
  first, second, third = enqueue(one, 4, 4, 4)
  one.admit()
  # Three ids are computed and 16 may follow: five pages.
  assert len(first.pages) == 5
  assert one.slots[1:] == [None, None]
  compute(one)
  one.release(first)
  one.admit()
  assert one.residents() == [second]
  assert list(one.queue) == [third]
  assert one.vacant() == 0  # new requests are for other shards


def test_alone_an_episode_takes_all_there_is():
  """Without a kept prompt, which would not fit beside it."""
  one = make(pages=9, steps=32)
  playings = enqueue(one, 10, attempts=2)
  one.admit()
  assert one.residents() == playings[:1]
  assert not one.prompts
  assert len(playings[0].pages) == 8
  compute(one)
  one.release(playings[0])
  one.admit()
  assert [held.missing() for held in one.uncached()] == [9]
  assert playings[1].reached == 9  # it is computed a second time


def test_the_youngest_yields_with_all_that_it_has():
  one = make(pages=11)
  first, second, third = enqueue(one, 8, 8, 8)
  one.admit()
  compute(one)
  assert one.residents() == [first, second, third]
  sample((first, second), 4)
  third.reply = concurrent.futures.Future()
  one.reserve()
  one.check()
  assert one.residents() == [first, second]
  assert one.queue[0] is third
  assert third.cached == 0
  assert third.size == 8
  assert third.reply is not None
  # It comes back for its reply, and is computed when it has one.
  one.release(first)
  one.admit()
  assert third.slot == 0
  assert third not in one.uncached()
  third.reply = None
  assert third in one.uncached()
  assert third.reached == 7


def test_the_oldest_is_served_first():
  """Also where it sits in the last slot."""
  one = make(slots=2, pages=12, steps=8)
  first, second = enqueue(one, 4, 4)
  one.admit()
  one.release(first)
  (third,) = enqueue(one, 4, first=2)
  one.admit()
  assert one.slots == [third, second]
  compute(one)
  for _ in range(2):
    sample((second, third), 8)
    one.reserve()
  assert one.residents() == [second]
  assert list(one.queue) == [third]


def test_who_begins_leaves_residents_what_they_need_next():
  one = make(slots=2, pages=5)
  (first,) = enqueue(one, 4)
  one.admit()
  compute(one)
  sample([first], 4)
  (second,) = enqueue(one, 4, first=1)
  # Two pages are free; the first episode is about to take one of them.
  one.admit()
  assert one.residents() == [first]
  one.reserve()
  one.check()
  assert list(one.queue) == [second]
  assert one.counts["preempted"] == 0


def test_a_prompt_that_is_to_be_copied_makes_no_room():
  one = make(pages=9)
  playings = enqueue(one, 10, attempts=2)
  (other,) = enqueue(one, 4, first=1)
  # The prompt and its attempts own seven of eight pages; the next needs two.
  one.admit()
  assert list(one.queue) == [other]
  assert [p.prompt for p in playings] == [one.prompts["r0"]] * 2
  assert len(compute(one)) == 2


def test_the_largest_of_the_kept_prompts_goes_first():
  one = make(pages=11)
  large, small = enqueue(one, 10, 5)
  for playing in (large, small):
    one._keep(playing.request)
  assert one.pages.free == 10 - 3 - 1
  assert one._spare(8, None)
  assert set(one.prompts) == {"r1"}


def test_nothing_is_dropped_for_who_must_yield_anyway():
  """The older one, in the last slot, is asked first."""
  one = make(slots=2, pages=9, steps=8)
  first, second = enqueue(one, 4, 4)
  one.admit()
  one.release(first)
  (third,) = enqueue(one, 4, first=2)
  one.admit()
  fourth, _ = enqueue(one, 5, attempts=2, first=3)
  one._keep(fourth.request)
  compute(one)
  sample([second], 4)  # lacks one page
  sample([third], 8)  # lacks two; one is free, one is the kept prompt's
  one.reserve()
  assert one.residents() == [second]
  assert one.queue[0] is third
  assert set(one.prompts) == {"r3"}


def test_pages_are_for_what_a_turn_may_still_sample():
  one = make(steps=4)
  # Seven ids are computed, and one may follow.
  (alone,) = enqueue(one, 8, turn_tokens=1)
  one.admit()
  assert len(alone.pages) == 2


def test_check_finds_what_must_not_be():
  one = make()
  playings = enqueue(one, 10, attempts=2)
  one.admit()
  compute(one)
  playings[0].table[0] = 17
  with pytest.raises(AssertionError):
    one.check()
  playings[0].table[0] = playings[0].pages[0]
  one.check()
  page = playings[1].pages[2]
  one.pages.give_back([page])
  one.pages.share(playings[0].pages[2:3])
  playings[1].pages[2] = playings[1].table[2] = playings[0].pages[2]
  with pytest.raises(AssertionError, match="a shared page is written"):
    one.check()
