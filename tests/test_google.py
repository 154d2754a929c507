"""Google's two ways in, against local servers that answer like them."""

from __future__ import annotations

import json
import logging
import time
import urllib.parse

import pytest

from sesa_jax.search import base, google, http
from sesa_jax.types import Passage
from tests import llm_server
from tests.llm_server import Naps, Server, no_certificates

pytestmark = pytest.mark.usefixtures(no_certificates.__name__)

KEY = "k3y-of-ours"


def gives(value, code=200):
  return llm_server.body(json.dumps(value).encode(), code)


def client(server, provider, ledger=None, **changes):
  known = dict(
    deadline=10.0, try_seconds=5.0, tries=3, patience=60.0, sleep=Naps()
  )
  headers = {"X-API-KEY": KEY} if provider == "serper" else {}
  connection = http.Http(
    [f"{server.root}/search"],
    ledger=ledger or base.Ledger(),
    headers=headers,
    secret=KEY,
    **known,
  )
  changes = dict(key=KEY, cx="engine-1", per_second=1000.0) | changes
  return google.Google(provider, connection, **changes)


SERPER = {
  "searchParameters": {"q": "x"},
  "answerBox": {"title": "Box", "answer": "42", "link": "https://box"},
  "knowledgeGraph": {
    "title": "Graph",
    "description": "a thing",
    "descriptionLink": "https://graph",
  },
  "organic": [
    {"title": "One", "link": "https://one", "snippet": "first\n line"},
    {"title": "Two", "link": "https://two"},
    {"title": "Three", "link": "https://three", "snippet": "third"},
  ],
}


def test_serper():
  with Server(then=gives(SERPER)) as server:
    found, _ = client(server, "serper").search(["who?", "what?"], 4)
  assert found == (
    Passage("https://box", "Box", "42"),
    Passage("https://graph", "Graph", "a thing"),
    Passage("https://one", "One", "first line"),
    Passage("https://three", "Three", "third"),
  )
  sent = sorted(server.requests, key=lambda r: r["q"])
  assert sent == [{"q": "what?", "num": 4}, {"q": "who?", "num": 4}]
  assert all(headers["x-api-key"] == KEY for headers in server.headers)


def test_custom_search():
  paths = []

  def answer(handler):
    paths.append(handler.path)
    item = {"title": "One", "link": "https://one", "snippet": "first"}
    gives({"kind": "customsearch#search", "items": [item] * 3})(handler)

  with Server(then=answer) as server:
    (found,) = client(server, "custom_search").search(["a & b"], 12)
    (two,) = client(server, "custom_search").search(["a & b"], 2)
  assert found == (Passage("https://one", "One", "first"),) * 3
  assert len(two) == 2
  asked = urllib.parse.parse_qs(urllib.parse.urlsplit(paths[0]).query)
  assert asked == {
    "key": [KEY], "cx": ["engine-1"], "q": ["a & b"], "num": ["10"]
  }  # fmt: skip


@pytest.mark.parametrize(
  ("provider", "payload"),
  [
    ("serper", {"organic": []}),
    ("serper", {}),
    ("custom_search", {"searchInformation": {"totalResults": "0"}}),
    ("serper", {"answerBox": {"title": "no text"}, "organic": []}),
  ],
)
def test_nothing_found_is_no_failure(provider, payload):
  assert google.read(payload, provider=provider, k=3) == ()


@pytest.mark.parametrize(
  ("provider", "payload"),
  [
    ("serper", []),
    ("serper", {"organic": {}}),
    ("serper", {"organic": ["x"]}),
    ("serper", {"answerBox": "x"}),
    ("custom_search", {"items": None}),
  ],
)
def test_what_is_no_answer(provider, payload):
  with pytest.raises(ValueError):  # noqa: PT011
    google.read(payload, provider=provider, k=3)


def test_a_long_answer_without_an_address_has_an_id():
  payload = {"answerBox": {"title": "T", "answer": "x" * 200}}
  (found,) = google.read(payload, provider="serper", k=3)
  assert found.id == f"T: {'x' * 200}"[:80]


def test_requests_begin_no_faster_than_they_may():
  times = []

  def answer(handler):
    times.append(time.monotonic())
    gives({})(handler)

  with Server(then=answer) as server:
    one = client(server, "serper", per_second=50.0)
    one.search([f"q{i}" for i in range(11)], 1)
  assert max(times) - min(times) >= 0.19  # ten pauses of 20 ms


@pytest.mark.parametrize("code", [400, 403, 500])
@pytest.mark.parametrize("provider", google.URLS)
def test_the_key_is_never_told(provider, code, caplog):
  caplog.set_level(logging.DEBUG)
  said = {"error": f"{KEY} is not allowed to"}
  with Server(then=gives(said, code)) as server:
    (found,) = client(server, provider).search(["q"], 1)
  assert KEY not in found.reason
  assert KEY not in caplog.text
  assert found.kind == {400: "rejected", 403: "access", 500: "server"}[code]
  if code == 400:  # Serper: not enough credits
    assert "[key] is not allowed" in found.reason
