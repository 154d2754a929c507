"""The pages of one data shard, as the host counts them.

Page 0 is trash: idle rows and padding write there, and nobody owns it. Every
other page is free or has owners: the tables of episodes, and prompts that are
kept for further attempts. A page with two owners is a prompt's, and whole; it
is never written again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

TRASH = 0


def pages_for(tokens: int, page_size: int) -> int:
  """How many pages hold so many tokens."""
  return -(-tokens // page_size)


class Pages:
  """A free list with reference counts.

  Args:
    count: pages of the pool, the trash page among them.
  """

  def __init__(self, count: int):
    self._owners = [0] * count
    # Ordered: the last one given back is the next one taken, still warm.
    self._free = dict.fromkeys(range(count - 1, TRASH, -1))

  @property
  def free(self) -> int:
    """How many pages can be taken."""
    return len(self._free)

  def take(self, count: int, first: int | None = None) -> list[int]:
    """Takes free pages; the caller owns them alone.

    Args:
      count: how many.
      first: where they must begin, if they must lie in a row.
    """
    assert 0 <= count <= self.free, f"{count} pages asked for, {self.free} free"
    if first is None:
      taken = [self._free.popitem()[0] for _ in range(count)]
    else:
      taken = list(range(first, first + count))
      for page in taken:
        del self._free[page]
    for page in taken:
      self._owners[page] = 1
    return taken

  def share(self, pages: Iterable[int]) -> None:
    """Adds an owner to pages that have one."""
    for page in pages:
      assert self._owners[page] > 0, f"page {page} is free and cannot be shared"
      self._owners[page] += 1

  def give_back(self, pages: Iterable[int]) -> None:
    """Takes an owner away; pages without owners are free again."""
    for page in pages:
      assert self._owners[page] > 0, f"page {page} is given back twice"
      self._owners[page] -= 1
      if not self._owners[page]:
        self._free[page] = None

  def alone(self, pages: Iterable[int]) -> int:
    """How many of these pages would be free if one owner gave them back."""
    return sum(self._owners[page] == 1 for page in pages)

  def check(self, held: Iterable[Sequence[int]]) -> None:
    """Asserts that counts and free list are what these owners make them.

    Args:
      held: the pages of each owner.
    """
    counts = [0] * len(self._owners)
    for pages in held:
      assert len(set(pages)) == len(pages), f"a page stands twice in {pages}"
      for page in pages:
        counts[page] += 1
    assert not counts[TRASH], "somebody owns the trash page"
    assert counts == self._owners, "owners are miscounted"
    unowned = {p for p, n in enumerate(counts) if not n} - {TRASH}
    assert sorted(self._free) == sorted(unowned), "the free list is wrong"
