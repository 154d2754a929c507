"""Google, by Serper or by Google's own Custom Search JSON API.

Serper: `POST /search`, the key in `X-API-KEY`, `{"q", "num"}`; came
`organic[].title|link|snippet`, `answerBox`, `knowledgeGraph`.
Custom Search: `GET /customsearch/v1?key&cx&q&num`; came
`items[].title|link|snippet`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from sesa_jax.search import base
from sesa_jax.search.http import Http
from sesa_jax.types import Passage

URLS = {
  "serper": "https://google.serper.dev/search",
  "custom_search": "https://www.googleapis.com/customsearch/v1",
}
_MOST = 10  # results that Custom Search gives at once


class Google:
  """Google's results as passages; a `types.SearchEngine`.

  Args:
    provider: one of `URLS`.
    http: its one address is the provider's.
    key: for Custom Search, where it is part of the request.
    cx: of a Custom Search engine.
    per_second: requests begun at most; later ones wait within their deadline.
  """

  def __init__(
    self,
    provider: str,
    http: Http,
    *,
    key: str = "",
    cx: str = "",
    per_second: float = 10.0,
  ):
    self._provider, self._http = provider, http
    self._key, self._cx = key, cx
    self._pause, self._next = 1 / per_second, 0.0

  def search(self, queries: Sequence[str], k: int) -> list[base.Found]:
    """See `types.SearchEngine`; a request a query."""
    base.check_k(k)
    asked = [self._request(query, k) for query in queries]
    reader = functools.partial(read, provider=self._provider, k=k)
    return self._http.call(asked, reader, self._turn)

  def _request(self, query: str, k: int) -> dict[str, Any]:
    if self._provider == "serper":
      return {"method": "POST", "json": {"q": query, "num": k}}
    values = {"key": self._key, "cx": self._cx, "q": query}
    return {"method": "GET", "params": values | {"num": min(k, _MOST)}}

  async def _turn(self) -> None:
    """Waits until another request may begin."""
    now = asyncio.get_running_loop().time()
    self._next = max(now, self._next) + self._pause
    await asyncio.sleep(self._next - self._pause - now)


def read(payload: Any, *, provider: str, k: int) -> tuple[Passage, ...]:
  """Reads an answer: at most k passages, their address as id.

  Serper's answer box and knowledge graph come first, where they hold text. A
  result without a snippet is left out.

  Raises:
    ValueError: it is no answer of the provider.
  """
  if not isinstance(payload, dict):
    raise ValueError("no object")
  items = payload.get("organic" if provider == "serper" else "items", [])
  if not isinstance(items, list):
    raise ValueError("results that are no list")
  boxes = _boxes(payload) if provider == "serper" else ()
  found = [*boxes, *(_texts(item, ("snippet",)) for item in items)]
  return tuple(
    Passage(link or f"{title}: {text}"[:80], title, text)
    for title, text, link in found
    if text
  )[:k]


def _boxes(payload: dict) -> Iterator[tuple[str, str, str]]:
  for name, fields in (
    ("answerBox", ("answer", "snippet")),
    ("knowledgeGraph", ("description",)),
  ):
    if payload.get(name) is not None:
      yield _texts(payload[name], fields)


def _texts(item: Any, fields: Sequence[str]) -> tuple[str, str, str]:
  """Title, the fields' text, and address of a result."""
  if not isinstance(item, dict):
    raise ValueError("a result that is no object")
  links = ("link", "descriptionLink", "website")
  text = " ".join(filter(None, (_text(item, name) for name in fields)))
  link = next(filter(None, (_text(item, name) for name in links)), "")
  return _text(item, "title"), text, link


def _text(item: dict, name: str) -> str:
  value = item.get(name)
  if not isinstance(value, str):
    return ""
  return " ".join(value.encode("utf-8", "replace").decode("utf-8").split())
