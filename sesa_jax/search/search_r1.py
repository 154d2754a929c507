"""A Search-R1 retrieval server: `POST /retrieve`, as its authors serve it.

Sent: `{"queries": [..], "topk": 3, "return_scores": true}`; without scores an
unmodified server fails. Came: `{"result": [[{"document": {"contents"},
"score"}, ..], ..]}`, of which only `contents` is sure.
Source: Jin et al., arXiv 2503.09516, and their code.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

from absl import logging

from sesa_jax.data import corpus
from sesa_jax.search import base
from sesa_jax.search.http import Http
from sesa_jax.types import Passage, SearchFailure, Stopped

_PATH = "/retrieve"
_PROBE = "capital of France"


def address(url: str) -> str:
  """Returns the whole address: `http://host:8000` gets its `/retrieve`."""
  scheme, mark, rest = url.rstrip("/").partition("://")
  return f"{scheme}{mark}{rest}{'' if '/' in rest else _PATH}"


class SearchR1:
  """Search-R1 servers over one corpus; a `types.SearchEngine`.

  All queries of a call go in one request. A request that the server refuses
  as bad is made again query by query, so that one of them loses no other.

  Args:
    http: with the addresses of `address`.
  """

  def __init__(self, http: Http):
    self._http = http

  def search(self, queries: Sequence[str], k: int) -> list[base.Found]:
    """See `types.SearchEngine`."""
    base.check_k(k)
    if not queries:
      return []
    (found,) = self._http.call([_request(queries, k)], _reader(queries, k))
    if not isinstance(found, SearchFailure):
      return found
    if found.kind == "rejected" and len(queries) > 1:
      alone = [_request([query], k) for query in queries]
      answers = self._http.call(alone, _reader(queries[:1], k))
      return [a if isinstance(a, SearchFailure) else a[0] for a in answers]
    return [found] * len(queries)

  def check(self) -> None:
    """Asks every server once, and warns of those that do not answer.

    Raises:
      types.Stopped: none answers.
    """
    asked = _request([_PROBE], 1)
    faults = self._http.each(asked, _reader([_PROBE], 1))
    said = "; ".join(f"{u} ({f.reason})" for u, f in faults.items() if f)
    if all(faults.values()):
      raise Stopped(
        f"No search server answers: {said}. Start one (--mode=serve), or name "
        "another in search.urls; the same command then goes on."
      )
    if said:
      logging.warning("Search servers that do not answer: %s.", said)


def _request(queries: Sequence[str], k: int) -> dict[str, Any]:
  body = {"queries": list(queries), "topk": k, "return_scores": True}
  return {"method": "POST", "json": body}


def _reader(queries: Sequence[str], k: int):
  return functools.partial(read, count=len(queries), k=k)


def read(payload: Any, *, count: int, k: int) -> list[tuple[Passage, ...]]:
  """Reads an answer; see the module's docstring.

  A document may be a text alone, or stand where the object with document and
  score should. More than k are cut, fewer are what there is.

  Args:
    payload: the JSON that came.
    count: queries that were sent.
    k: passages a query at most.

  Raises:
    ValueError: it is no answer to so many queries.
  """
  result = payload.get("result") if isinstance(payload, dict) else None
  if not isinstance(result, list) or len(result) != count:
    came = len(result) if isinstance(result, list) else "no"
    raise ValueError(f"{count} queries, {came} results")
  return [_passages(found, k) for found in result]


def _passages(found: Any, k: int) -> tuple[Passage, ...]:
  if not isinstance(found, list):
    raise ValueError("a result that is no list")
  return tuple(_passage(item) for item in found[:k])


def _passage(item: Any) -> Passage:
  document, score = item, None
  if isinstance(item, dict) and "document" in item:
    document, score = item["document"], item.get("score")
  if isinstance(document, str):
    document = {"contents": document}
  contents = document.get("contents") if isinstance(document, dict) else None
  if not isinstance(contents, str):
    raise ValueError("a document without contents")
  # Halves of surrogate pairs: JSON may hold them, UTF-8 not.
  contents = contents.encode("utf-8", "replace").decode("utf-8")
  name = document.get("id")
  if name is None:
    name = hashlib.sha256(contents.encode()).hexdigest()[:16]
  number = isinstance(score, int | float) and not isinstance(score, bool)
  title, text = corpus.split_contents(contents)
  return Passage(str(name), title, text, float(score) if number else None)
