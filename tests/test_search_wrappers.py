"""Answers kept on disk, and engines made worse."""

from __future__ import annotations

import pytest

from sesa_jax.search import base
from sesa_jax.search.cached import Cached
from sesa_jax.search.degraded import TOPICS, Degraded
from sesa_jax.types import Passage, SearchFailure


class Fixed:
  """k passages for every query; a query that holds "lost" is lost."""

  def __init__(self):
    self.calls = []

  def search(self, queries, k):
    self.calls.append(list(queries))
    return [
      SearchFailure("down", "server")
      if "lost" in q
      else tuple(Passage(f"{q}/{i}", q, "t\u00e9xt", 1.5 - i) for i in range(k))
      for q in queries
    ]


def counts(ledger):
  return {k: v for k, v in ledger.drain("s").items() if v}


# --- cached ------------------------------------------------------------------


def test_a_query_is_asked_once(tmp_path):
  engine, ledger = Fixed(), base.Ledger()
  one = Cached(engine, tmp_path, "e1", ledger)
  first = one.search(["a", "b", "a"], 2)
  assert first == [f for q in "aba" for f in Fixed().search([q], 2)]
  assert engine.calls == [["a", "b"]]
  assert counts(ledger) == {"s/cache_hits": 1, "s/cache_misses": 2}
  assert "s/hit_rate" not in base.total([ledger.drain("s")], "s")  # of nothing
  assert Cached(engine, tmp_path, "e1", ledger).search(["b", "c"], 2)[:1] == [
    first[1]
  ]
  assert engine.calls[1:] == [["c"]]
  one.search(["a", "b", "c", "d"], 2)
  found = base.total([ledger.drain("s"), ledger.drain("s")], "s")
  assert (found["s/cache_hits"], found["s/cache_misses"]) == (4, 2)
  assert found["s/hit_rate"] == pytest.approx(4 / 6)


def test_another_engine_and_another_k_are_other_keys(tmp_path):
  engine = Fixed()
  for identity, k in (("e1", 2), ("e2", 2), ("e1", 3)):
    one = Cached(engine, tmp_path, identity, base.Ledger())
    assert len(one.search(["a"], k)[0]) == k
  assert engine.calls == [["a"]] * 3


def test_a_failure_is_not_kept(tmp_path):
  engine = Fixed()
  one = Cached(engine, tmp_path, "e", base.Ledger())
  assert one.search(["lost"], 1)[0].kind == "server"
  one.search(["lost"], 1)
  assert engine.calls == [["lost"]] * 2


def test_an_empty_answer_is_kept(tmp_path):
  class Empty(Fixed):
    def search(self, queries, k):
      super().search(queries, k)
      return [()] * len(queries)

  engine = Empty()
  one = Cached(engine, tmp_path, "e", base.Ledger())
  assert one.search(["a"], 1) == one.search(["a"], 1) == [()]
  assert len(engine.calls) == 1


def test_a_run_is_played_again_without_the_engine(tmp_path):
  first = Cached(Fixed(), tmp_path, "e", base.Ledger()).search(["a"], 2)
  ledger = base.Ledger()
  again = Cached(None, tmp_path, "e", ledger)
  assert again.search(["a"], 2) == first
  (lost,) = again.search(["b"], 2)
  assert lost.kind == "not_kept"
  assert "replay_only" in lost.reason
  assert counts(ledger) == {
    "s/cache_hits": 1, "s/cache_misses": 1, "s/failures/not_kept": 1
  }  # fmt: skip


def test_a_damaged_cache_is_one_line(tmp_path):
  (tmp_path / "cache.db").write_bytes(b"no database" * 1000)
  with pytest.raises(ValueError, match="search's cache .* cannot be opened"):
    Cached(None, tmp_path, "e", base.Ledger())


# --- degraded ----------------------------------------------------------------

QUERIES = [f"q{i}" for i in range(400)]


def degraded(**how):
  how.setdefault("seed", 1)
  return Degraded(Fixed(), **how)


def test_nothing_is_changed_without_being_asked():
  assert degraded().search(QUERIES, 5) == Fixed().search(QUERIES, 5)


def test_what_happens_depends_on_seed_and_query_alone():
  how = dict(drop=0.3, distract=0.3, shuffle=0.5)
  whole = degraded(**how).search(QUERIES, 5)
  one = degraded(**how)
  alone = [one.search([q], 5)[0] for q in reversed(QUERIES)]
  assert alone[::-1] == whole
  assert degraded(seed=2, **how).search(QUERIES, 5) != whole


def test_dropped_is_the_share_asked_for():
  found = degraded(drop=0.25).search(QUERIES, 5)
  kept = sum(map(len, found)) / (5 * len(QUERIES))
  assert kept == pytest.approx(0.75, abs=0.05)  # 5 sigma
  whole = Fixed().search(QUERIES, 5)
  for passages, before in zip(found, whole, strict=True):
    assert [p for p in before if p in passages] == list(passages)
  assert degraded(drop=1.0).search(["a"], 5) == [()]


def test_shuffled_are_as_many_queries_as_asked_for():
  found = degraded(shuffle=0.5).search(QUERIES, 5)
  whole = Fixed().search(QUERIES, 5)
  moved = sum(a != b for a, b in zip(found, whole, strict=True))
  # One order of 120 is the same.
  assert moved / len(QUERIES) == pytest.approx(0.5 * 119 / 120, abs=0.125)
  assert [set(a) for a in found] == [set(b) for b in whole]


def test_distractors_stand_in_the_place_of_passages():
  found = degraded(distract=0.4).search(QUERIES, 5)
  others = [[p for p in f if p.title in TOPICS] for f in found]
  share = sum(map(len, others)) / (5 * len(QUERIES))
  assert share == pytest.approx(0.4, abs=0.055)
  for query, passages in zip(QUERIES, found, strict=True):
    assert len(passages) == 5
    for place, p in enumerate(passages):
      assert p.id in {f"{t}/{place}" for t in (*TOPICS, query)}
  assert len({p.title for f in others for p in f}) > len(TOPICS) / 2


def test_a_delay_holds_a_call_back():
  naps = []
  one = Degraded(Fixed(), seed=1, delay=2.0, sleep=naps.append)
  for query in QUERIES:
    one.search([query], 1)
  assert sum(naps) / len(naps) == pytest.approx(1.0, abs=0.15)
  assert 0 <= min(naps) < max(naps) <= 2
  one.search(QUERIES, 1)
  assert naps[-1] == max(naps[:-1])


def test_a_failure_stays_one():
  how = dict(drop=1.0, distract=1.0, shuffle=1.0)
  (found,) = degraded(**how).search(["lost"], 2)
  assert found.kind == "server"


def test_a_lost_distractor_loses_the_query():
  class Half(Fixed):
    def search(self, queries, k):
      lost = SearchFailure("down", "server")
      found = super().search(queries, k)
      return [
        lost if q in TOPICS else f for q, f in zip(queries, found, strict=True)
      ]

  one = Degraded(Half(), seed=1, distract=0.5)
  assert one.search(["a"], 2)[0].kind == "server"


@pytest.mark.parametrize(
  "how", [dict(drop=1.1), dict(shuffle=-0.1), dict(distract=2), dict(delay=-1)]
)
def test_shares_out_of_range(how):
  with pytest.raises(ValueError, match=f"search.degrade.{next(iter(how))}"):
    degraded(**how)
