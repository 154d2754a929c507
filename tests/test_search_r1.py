"""A client of Search-R1 servers, against real ones that misbehave."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from sesa_jax import types
from sesa_jax.search import base, http, search_r1
from sesa_jax.types import Passage, SearchFailure
from tests import llm_server
from tests.llm_server import (
  Naps,
  Server,
  cut_off,
  drips,
  hangs,
  no_certificates,
)

pytestmark = pytest.mark.usefixtures(no_certificates.__name__)


def about(query):
  return {
    "document": {"id": f"d-{query}", "contents": f'"T {query}"\nof {query}'},
    "score": 0.5,
  }


def answers(handler):
  """What an unmodified server does."""
  assert handler.path == "/retrieve"
  assert handler.sent["return_scores"] is True
  result = [
    [about(query)] * handler.sent["topk"] for query in handler.sent["queries"]
  ]
  gives({"result": result})(handler)


def gives(value, code=200, **headers):
  return llm_server.body(json.dumps(value).encode(), code, **headers)


def passage(query):
  return Passage(f"d-{query}", f"T {query}", f"of {query}", 0.5)


def client(*servers, ledger=None, **changes):
  known = dict(
    deadline=30.0, try_seconds=10.0, tries=6, patience=300.0, sleep=Naps()
  )
  urls = [search_r1.address(server.root) for server in servers]
  return search_r1.SearchR1(
    http.Http(urls, ledger=ledger or base.Ledger(), **known | changes)
  )


def test_passages_come_back_in_the_order_of_the_queries():
  with Server(then=answers) as server:
    found = client(server).search(["a", "b"], 2)
  assert found == [(passage("a"),) * 2, (passage("b"),) * 2]
  assert server.requests == [
    {"queries": ["a", "b"], "topk": 2, "return_scores": True}
  ]


@pytest.mark.parametrize(
  ("item", "expected"),
  [
    ({"document": '"T"\ntext', "score": 1}, ("T", "text", 1.0)),
    ({"document": {"contents": '"T"\ntext\nmore'}}, ("T", "text\nmore", None)),
    ({"contents": '"T"\ntext'}, ("T", "text", None)),
    ('"T"\ntext', ("T", "text", None)),
    ({"document": {"contents": "alone"}, "score": None}, ("", "alone", None)),
    ({"document": {"contents": 'A "B"\nc'}, "score": "x"}, ('A "B', "c", None)),
    ({"document": {"contents": "\ud800\nc"}}, ("?", "c", None)),
  ],
)
def test_variants_of_a_document(item, expected):
  ((found,),) = search_r1.read({"result": [[item]]}, count=1, k=3)
  assert (found.title, found.text, found.score) == expected
  assert found.id


def test_more_and_fewer_passages_than_asked_for():
  payload = {"result": [[about("a")] * 5, [], [about("b")]]}
  found = search_r1.read(payload, count=3, k=2)
  assert list(map(len, found)) == [2, 0, 1]


@pytest.mark.parametrize(
  "wrong",
  [
    gives({"error": "down"}, 500),
    gives({"error": "slow down"}, 429, Retry_After="3"),
    llm_server.body(b"<html>gateway</html>"),
    llm_server.body(b"\xff\xfe"),
    gives([]),
    gives({"result": None}),
    gives({"result": []}),  # wrong counts
    gives({"result": [[], []]}),
    gives({"result": [{}]}),
    gives({"result": [[{"document": {"text": "x"}}]]}),
    gives({"result": [[7]]}),
    cut_off,
  ],
)
def test_what_goes_wrong_twice_is_tried_again(wrong):
  ledger, naps = base.Ledger(), Naps()
  with Server([wrong, wrong], then=answers) as server:
    found = client(server, ledger=ledger, sleep=naps).search(["a"], 1)
  assert found == [(passage("a"),)]
  assert len(server.requests) == 3
  assert ledger.drain("x")["x/retries"] == 2
  assert len(naps.seconds) == 2


def test_a_server_says_when_to_come_back():
  naps = Naps()
  late = gives({}, 503, Retry_After="7")
  with Server([late], then=answers) as server:
    client(server, sleep=naps).search(["a"], 1)
  assert naps.seconds[0] >= 7


@pytest.mark.parametrize(
  ("wrong", "kind", "tries"),
  [
    (gives({}, 500), "server", 3),
    (llm_server.body(b"no"), "body", 3),
    (gives({}, 404), "access", 1),
    (gives({}, 302), "access", 1),
    (gives({"detail": "k is missing"}, 422), "rejected", 1),
  ],
)
def test_a_lost_call_is_a_typed_failure(wrong, kind, tries):
  with Server(then=wrong) as server:
    (found,) = client(server, tries=3).search(["a"], 1)
  assert isinstance(found, SearchFailure)
  assert found.kind == kind
  assert found.reason.startswith(kind)
  assert len(server.requests) == tries


def test_the_servers_error_text_is_told_for_bad_requests_alone():
  with Server(then=gives({"detail": "k is missing"}, 422)) as server:
    (found,) = client(server).search(["a"], 1)
  assert "k is missing" in found.reason
  with Server(then=gives({"detail": "secret page"}, 500)) as server:
    (found,) = client(server, tries=1).search(["a"], 1)
  assert "secret" not in found.reason


@pytest.mark.parametrize("act", [hangs, drips])
@pytest.mark.parametrize("try_seconds", [0.2, 3.0])
def test_a_deadline_bounds_all_tries(act, try_seconds):
  began = time.monotonic()
  with Server(then=act) as server:
    slow = client(server, deadline=0.5, try_seconds=try_seconds, tries=100)
    (found,) = slow.search(["a"], 1)
    took = time.monotonic() - began
  assert found.kind == "timeout"
  assert 0.2 < took < 1.5
  assert 1 <= len(server.requests) <= 3


def test_one_that_hangs_once_costs_one_try():
  with Server([hangs], then=answers) as server:
    found = client(server, try_seconds=0.2).search(["a"], 1)
  assert found == [(passage("a"),)]


def test_a_bad_query_loses_no_other():
  def picky(handler):
    if "bad" in handler.sent["queries"]:
      gives({"detail": "no"}, 400)(handler)
    else:
      answers(handler)

  with Server(then=picky) as server:
    found = client(server).search(["a", "bad", "b"], 1)
  assert found[0::2] == [(passage("a"),), (passage("b"),)]
  assert found[1].kind == "rejected"


# --- several servers ---------------------------------------------------------


def test_the_others_are_asked_at_once_when_one_is_down():
  naps = Naps()
  with Server(then=gives({}, 500)) as down, Server(then=answers) as up:
    one = client(down, up, sleep=naps)
    for _ in range(4):
      assert one.search(["a"], 1) == [(passage("a"),)]
  assert len(down.requests) == 1  # it rests
  assert not any(naps.seconds)


def test_one_that_refuses_us_is_passed_over():
  with Server(then=gives({}, 403)) as closed, Server(then=answers) as up:
    both = client(closed, up)
    for _ in range(2):
      assert both.search(["a"], 1) == [(passage("a"),)]
  assert len(closed.requests) == 1


def test_an_address_without_a_server_is_passed_over():
  with Server(then=answers) as up:
    with Server() as gone:
      pass
    assert client(gone, up).search(["a"], 1) == [(passage("a"),)]
    assert client(up, gone).search(["a"], 1) == [(passage("a"),)]


def test_healthy_servers_share_the_load():
  with Server(then=answers) as one, Server(then=answers) as two:
    both = client(one, two)
    for _ in range(6):
      both.search(["a"], 1)
  assert len(one.requests) == len(two.requests) == 3


def test_a_server_is_asked_again_once_it_has_rested():
  now = [0.0]
  with Server([gives({}, 500)], then=answers) as one:
    with Server(then=answers) as two:
      both = client(one, two, clock=lambda: now[0])
      for _ in range(6):
        both.search(["a"], 1)
      assert len(one.requests) == 1
      now[0] = http.REST + 1
      both.search(["a"], 1)
      both.search(["a"], 1)
  assert len(one.requests) == 2


def test_the_check_names_those_that_are_down(caplog):
  with Server(then=answers) as up, Server(then=gives({}, 500)) as down:
    client(up, down).check()
    assert f"{down.root}/retrieve (server: HTTP 500)" in caplog.text
    assert f"{up.root}/retrieve (" not in caplog.text
    with pytest.raises(types.Stopped, match=r"No search server.*HTTP 500.*"):
      client(down).check()


# --- an outage ---------------------------------------------------------------


def test_calls_are_skipped_once_nobody_has_answered_for_long():
  now = [0.0]
  with Server(then=gives({}, 500)) as server:
    one = client(server, tries=1, patience=60.0, clock=lambda: now[0])

    def kind():
      (found,) = one.search(["a"], 1)
      return found.kind

    assert kind() == "server"
    now[0] = 59.0
    assert kind() == "server"
    now[0] = 61.0
    assert kind() == "server"  # the one that looks
    assert [kind() for _ in range(5)] == ["skipped"] * 5
    assert len(server.requests) == 3
    server.then = answers
    now[0] += http.PROBE
    assert one.search(["a"], 1) == [(passage("a"),)]
    assert one.search(["b"], 1) == [(passage("b"),)]  # it is over
    server.then = gives({}, 500)
    assert kind() == "server"  # patience begins anew
    assert kind() == "server"


def test_a_refusal_of_a_query_is_no_outage():
  now = [0.0]
  with Server(then=gives({}, 400)) as one, Server(then=answers) as two:
    both = client(one, two, patience=0.0, clock=lambda: now[0])
    kinds = []
    for _ in range(6):
      now[0] += 1
      (found,) = both.search(["a"], 1)
      kinds.append(getattr(found, "kind", "found"))
  # It has answered: it goes on sharing the load.
  assert sorted(kinds) == ["found"] * 3 + ["rejected"] * 3
  with Server(then=gives({}, 400)) as one:
    alone = client(one, patience=0.0)
    kinds = [alone.search(["a"], 1)[0].kind for _ in range(3)]
  assert kinds == ["rejected"] * 3


def test_down_for_a_while_is_waited_out():
  with Server([gives({}, 503)] * 4, then=answers) as server:
    assert client(server).search(["a"], 1) == [(passage("a"),)]


# --- many threads ------------------------------------------------------------


def test_two_thousand_concurrent_calls_return():
  moods = [gives({}, 500), cut_off, llm_server.body(b"no")] * 5
  with Server(moods, then=answers) as server:
    # One call may meet all the moods, where the others are slow to begin.
    patient = client(server, tries=len(moods) + 1)
    one = base.Batched(patient, size=64, workers=16)
    with ThreadPoolExecutor(2000) as pool:
      queries = [f"q{i}" for i in range(2000)]
      found = list(pool.map(lambda q: one.search([q], 1)[0], queries))
  assert found == [(passage(q),) for q in queries]
  assert len(server.requests) < 2000  # they went together
  assert server.at_once <= 16


def test_two_thousand_calls_of_a_dead_server_return():
  with Server(then=hangs) as server:
    dead = client(server, deadline=0.3, try_seconds=0.1, patience=0.0)
    one = base.Batched(dead, size=64, workers=16)
    began = time.monotonic()
    with ThreadPoolExecutor(2000) as pool:
      found = list(pool.map(lambda q: one.search([q], 1)[0], ["q"] * 2000))
    assert time.monotonic() - began < 10
  assert {f.kind for f in found} <= {"timeout", "skipped"}


def test_batches_hold_one_k_and_keep_their_order():
  calls, gate = [], threading.Event()

  class Slow:
    def search(self, queries, k):
      calls.append((list(queries), k))
      gate.wait(10)
      return [(passage(q),) * k for q in queries]

  one = base.Batched(Slow(), size=3, workers=1)
  with ThreadPoolExecutor(8) as pool:
    first = pool.submit(one.search, ["a"], 1)
    while not calls:
      time.sleep(0.001)
    many = pool.submit(one.search, ["b", "c", "d", "e"], 1)
    while len(one._waiting) < 4:
      time.sleep(0.001)
    other = pool.submit(one.search, ["f"], 2)
    while len(one._waiting) < 5:
      time.sleep(0.001)
    gate.set()
    assert first.result() == [(passage("a"),)]
    assert many.result() == [(passage(q),) for q in "bcde"]
    assert other.result() == [(passage("f"),) * 2]
  assert calls == [(["a"], 1), (["b", "c", "d"], 1), (["e"], 1), (["f"], 2)]


def test_an_error_of_ours_reaches_the_caller():
  class Wrong:
    def search(self, queries, k):
      raise KeyError("a bug")

  with pytest.raises(KeyError, match="a bug"):
    base.Batched(Wrong(), size=3, workers=1).search(["a"], 1)


# --- counts and a budget -----------------------------------------------------


class Fixed:
  """Finds something for every query but those that are lost."""

  def __init__(self):
    self.asked = []

  def search(self, queries, k):
    self.asked += queries
    return [
      SearchFailure("down", "server") if q == "lost" else (passage(q),) * k
      for q in queries
    ]


def test_queries_failures_and_money_are_counted():
  ledger = base.Ledger()
  one = base.Counted(Fixed(), ledger, price=2.0)
  one.search(["a", "lost", "b"], 1)
  found = ledger.drain("search")
  assert {name: value for name, value in found.items() if value} == {
    "search/queries": 3,
    "search/failures/server": 1,
    "search/cost": pytest.approx(0.004),
  }
  assert ledger.spent == {"searches": 2, "cost": pytest.approx(0.004)}
  assert set(ledger.drain("search")) == set(found)


def test_a_budget_stops_cleanly_and_outlives_the_process(tmp_path):
  path = tmp_path / "run" / "spent.json"
  engine = Fixed()
  ledger = base.Ledger(searches=3, path=path)
  one = base.Counted(engine, ledger)
  assert one.search(["a", "lost"], 1)[0] == (passage("a"),)
  ledger.check()
  found = one.search(["b", "c", "d"], 1)
  assert found[:2] == [(passage("b"),), (passage("c"),)]
  assert found[2].kind == "budget"
  assert engine.asked == ["a", "lost", "b", "c"]  # what is lost is free
  with pytest.raises(types.Stopped, match=r"run's budget.*3 of 3 searches"):
    ledger.check()
  again = base.Ledger(searches=4, path=path)
  assert base.Counted(engine, again).search(["e", "f"], 1)[1].kind == "budget"


def test_a_limit_of_money():
  ledger = base.Ledger(cost=0.005)
  found = base.Counted(Fixed(), ledger, price=2.0).search(["a", "b", "c"], 1)
  assert [isinstance(f, SearchFailure) for f in found] == [False, False, True]
  with pytest.raises(types.Stopped, match="0.004 of 0.005 cost"):
    ledger.check()


def test_a_daily_limit_is_free_again_the_next_day():
  day = ["2026-01-01"]
  ledger = base.Ledger()
  one = base.Counted(Fixed(), ledger, per_day=2, today=lambda: day[0])
  assert one.search(["a", "b", "c"], 1)[2].kind == "budget"
  with pytest.raises(types.Stopped, match="2 of 2 on 2026-01-01"):
    ledger.check()
  day[0] = "2026-01-02"
  assert one.search(["c"], 1) == [(passage("c"),)]


@pytest.mark.parametrize(
  ("urls", "says"),
  [
    ((), "search.urls is empty"),
    (("localhost:8000",), "no http"),
    (("http://me:secret@host/retrieve",), "would be written down"),
  ],
)
def test_addresses_that_are_none(urls, says):
  with pytest.raises(ValueError, match=says) as error:
    http.Http(
      urls, deadline=1, try_seconds=1, tries=1, patience=1, ledger=base.Ledger()
    )
  assert "secret" not in str(error.value)


@pytest.mark.parametrize(
  ("given", "whole"),
  [
    ("http://h:1", "http://h:1/retrieve"),
    ("http://h:1/", "http://h:1/retrieve"),
    ("https://h/x/retrieve", "https://h/x/retrieve"),
  ],
)
def test_an_address_gets_its_path(given, whole):
  assert search_r1.address(given) == whole
