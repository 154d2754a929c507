"""Pages against a plain count of who owns what."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sesa_jax.engine import pages

actions = st.lists(
  st.tuples(st.sampled_from(("take", "share", "give")), st.integers(0, 9)),
  max_size=60,
)


@given(actions)
def test_counts_are_those_of_owners(steps):
  """Owners hold lists; a page is free when it stands in none of them."""
  pool = pages.Pages(12)
  owners = []
  for action, number in steps:
    if action == "take":
      count = min(number, pool.free)
      owners.append(pool.take(count))
    elif owners:
      held = owners[number % len(owners)]
      if action == "share":
        pool.share(held)
        owners.append(list(held))
      else:
        pool.give_back(held)
        owners.remove(held)
    everywhere = {page for held in owners for page in held}
    assert pool.free == 11 - len(everywhere)
    assert pages.TRASH not in everywhere
    for held in owners:
      others = [p for other in owners if other is not held for p in other]
      assert pool.alone(held) == sum(page not in others for page in held)
    pool.check(owners)


def test_what_is_taken_was_free():
  pool = pages.Pages(6)
  first = pool.take(3)
  assert not set(first) & set(pool.take(2))
  pool.give_back(first[:1])
  assert pool.take(1) == first[:1]  # the last one given back
  with pytest.raises(AssertionError, match="1 pages asked for, 0 free"):
    pool.take(1)


def test_pages_in_a_row():
  pool = pages.Pages(9)
  assert pool.take(2, first=4) == [4, 5]
  assert pool.take(1, first=6) == [6]
  with pytest.raises(KeyError):
    pool.take(2, first=3)  # 4 is not free


def test_misuse_is_an_assertion():
  pool = pages.Pages(4)
  held = pool.take(1)
  pool.give_back(held)
  with pytest.raises(AssertionError, match="given back twice"):
    pool.give_back(held)
  with pytest.raises(AssertionError, match="free and cannot be shared"):
    pool.share(held)


@pytest.mark.parametrize(
  ("owners", "fault"),
  [
    ([[1, 2]], "miscounted"),  # 3 has leaked
    ([[1, 2], [3], [3]], "miscounted"),  # 3 was never shared
    ([[1, 2], [3, 0]], "the trash page"),
    ([[1, 2], [3, 3]], "stands twice"),
  ],
)
def test_check_finds(owners, fault):
  pool = pages.Pages(5)
  taken = pool.take(3)
  assert sorted(taken) == [1, 2, 3]
  pool.check([[1, 2], [3]])
  with pytest.raises(AssertionError, match=fault):
    pool.check(owners)


def test_check_finds_a_lost_page():
  pool = pages.Pages(4)
  (held,) = pool.take(1)
  pool.check([[held]])
  del pool._free[next(iter(pool._free))]
  with pytest.raises(AssertionError, match="free list is wrong"):
    pool.check([[held]])


@pytest.mark.parametrize(
  ("tokens", "count"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)]
)
def test_pages_for(tokens, count):
  assert pages.pages_for(tokens, 16) == count
