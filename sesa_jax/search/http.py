"""Calls of search servers: one deadline, retries, fail-over, an end to waiting.

All calls run in one event loop of a thread of its own, since only there a
deadline also ends a server that sends a byte a second.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import httpx2
import tenacity

from sesa_jax import remote
from sesa_jax.types import SearchFailure

# It would write addresses at each call, and one API has its key in them.
logging.getLogger("httpx2").setLevel(logging.WARNING)

REST = 5.0  # seconds that a server which failed is asked last
PROBE = 5.0  # seconds between two calls while all others are skipped
_SHOWN = 200  # characters of a refusal that are told


class Failure(NamedTuple):
  """A try without a usable answer."""

  kind: str
  detail: str
  wait: float = 0.0  # seconds that the server asks for


class Http:
  """Some servers that answer alike.

  A try goes to the next server that has not failed within the last seconds,
  so several share the load, and one that is down is passed over at once. When
  none has answered for `patience` seconds, calls are lost without a try, but
  for one now and then: a dead service costs minutes, not a deadline a call.

  Args:
    urls: whole addresses.
    deadline: seconds for all tries of a call, pauses included.
    try_seconds: for one try.
    tries: at most, of a call.
    patience: seconds without any answer after which calls are skipped.
    ledger: counts retries.
    headers: of each request.
    secret: what no message may hold.
    sleep: waits between tries, for tests.
    clock: seconds, for tests.

  Raises:
    ValueError: no address, one that is none, or a number out of range.
  """

  def __init__(
    self,
    urls: Sequence[str],
    *,
    deadline: float,
    try_seconds: float,
    tries: int,
    patience: float,
    ledger: remote.Ledger,
    headers: Mapping[str, str] | None = None,
    secret: str = "",
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    clock: Callable[[], float] = time.monotonic,
  ):
    if not urls:
      raise ValueError("search.urls is empty: name at least one server.")
    for name, value in (
      ("deadline", deadline),
      ("try_seconds", try_seconds),
      ("tries", tries),
    ):
      if not 0 < value < math.inf:
        raise ValueError(f"search.{name} = {value}: it must be positive.")
    self.urls = tuple(remote.check_url(url, "search.urls") for url in urls)
    self._deadline, self._try_seconds = deadline, try_seconds
    self._tries, self._patience = tries, patience
    self._ledger, self._secret = ledger, secret
    self._sleep, self._clock = sleep, clock
    self._turn = 0
    self._rests: dict[str, float] = {}  # until when, by address
    self._down_since = self._next_probe = -math.inf
    self._down = False
    self._loop = asyncio.new_event_loop()
    thread = threading.Thread(
      target=self._loop.run_forever, name="search-http", daemon=True
    )
    thread.start()
    self._client = httpx2.AsyncClient(
      headers=headers, timeout=None, limits=httpx2.Limits(max_connections=None)
    )
    # Once nobody holds it, or at the end of the process.
    weakref.finalize(self, _close, self._client, self._loop, thread)

  def call(
    self,
    requests: Sequence[Mapping[str, Any]],
    read: Callable[[Any], Any],
    before: Callable[[], Awaitable[None]] | None = None,
  ) -> list[Any]:
    """Makes requests, all at once, and waits for what comes of them.

    Args:
      requests: of each `method`, and `json` or `params`.
      read: takes an answer's JSON; raises ValueError if it cannot be used.
      before: is awaited before each try, within the deadline.

    Returns:
      for each request what `read` returned, or a `types.SearchFailure`.
    """

    async def every():
      return await asyncio.gather(*(self._one(r, read, before) for r in todo))

    todo = [dict(request) for request in requests]
    return self._await(every())

  def each(
    self, request: Mapping[str, Any], read: Callable[[Any], Any]
  ) -> dict[str, SearchFailure | None]:
    """Asks every server once; returns what was wrong, by address."""

    async def one(url):
      answer = await self._send(url, dict(request), read)
      failed = isinstance(answer, Failure)
      return _failure(answer) if failed else None

    async def every():
      return await asyncio.gather(*map(one, self.urls))

    return dict(zip(self.urls, self._await(every()), strict=True))

  def _await(self, work) -> Any:
    return asyncio.run_coroutine_threadsafe(work, self._loop).result()

  async def _one(self, request, read, before) -> Any:
    began = self._clock()
    if self._skips(began):
      waited = began - self._down_since
      return SearchFailure(
        f"skipped: no server has answered for {waited:.0f} s", "skipped"
      )
    ends = self._loop.time() + self._deadline
    stop = tenacity.stop_any(
      tenacity.stop_after_attempt(self._tries),
      lambda state: self._loop.time() + state.upcoming_sleep >= ends,
    )
    trying = tenacity.AsyncRetrying(
      sleep=self._sleep,
      stop=stop,
      wait=self._wait,
      retry=tenacity.retry_if_result(self._again),
      before_sleep=lambda state: self._ledger.count("retries"),
      retry_error_callback=lambda state: state.outcome.result(),
    )
    try:
      async with asyncio.timeout_at(ends):
        answer = await trying(self._try, request, read, before)
    except TimeoutError:
      answer = Failure("timeout", f"no answer within {self._deadline:g} s")
    failed = isinstance(answer, Failure)
    self._note(answer.kind if failed else "", began)
    return _failure(answer) if failed else answer

  def _skips(self, now: float) -> bool:
    if not self._down or now - self._down_since < self._patience:
      return False
    if now >= self._next_probe:
      self._next_probe = now + PROBE
      return False
    return True

  def _note(self, kind: str, began: float) -> None:
    """Remembers since when no call was answered."""
    if not kind or kind == "rejected":
      self._down = False
    elif not self._down:
      self._down, self._down_since = True, began

  def _again(self, answer: Any) -> bool:
    """Whether another try may bring an answer."""
    if not isinstance(answer, Failure):
      return False
    # An address that refuses us may stand beside one that does not.
    elsewhere = answer.kind == "access" and bool(self._rested())
    return answer.kind in remote.TRANSIENT or elsewhere

  def _wait(self, state: tenacity.RetryCallState) -> float:
    if self._rested():
      return 0.0  # another server is asked at once
    return state.outcome.result().wait + remote.back_off(state)

  def _rested(self) -> list[str]:
    now = self._clock()
    return [url for url in self.urls if self._rests.get(url, 0) <= now]

  def _pick(self) -> str:
    rested = self._rested()
    self._turn += 1
    if rested:
      return rested[self._turn % len(rested)]
    return min(self.urls, key=self._rests.__getitem__)

  async def _try(self, request, read, before) -> Any:
    if before is not None:
      await before()
    url = self._pick()
    answer = await self._send(url, request, read)
    failed = isinstance(answer, Failure)
    if failed and answer.kind != "rejected":
      self._rests[url] = self._clock() + REST
    else:
      self._rests.pop(url, None)
    return answer

  async def _send(self, url, request, read) -> Any:
    """One request; a value, or a `Failure`."""
    try:
      async with asyncio.timeout(self._try_seconds):
        response = await self._client.request(url=url, **request)
      if response.status_code != 200:
        return self._refused(response)
      return read(json.loads(response.content))
    except TimeoutError:
      return Failure("timeout", f"no reply within {self._try_seconds:g} s")
    except (httpx2.HTTPError, httpx2.StreamError) as error:
      cause = type(error.__cause__ or error).__name__
      return Failure("connection", self._open(f"{cause}: {error}"))
    except (ValueError, RecursionError) as error:
      return Failure("body", self._open(f"an answer of no use ({error})"))

  def _refused(self, response: httpx2.Response) -> Failure:
    kind = remote.kind_of_status(response.status_code)
    said = f"HTTP {response.status_code}"
    if kind == "rejected":  # the others' text may be a page of HTML
      said += f" {self._open(response.text[:_SHOWN])}"
    header = response.headers.get("retry-after", "")
    return Failure(kind, said, remote.retry_after(header, time.time()))

  def _open(self, text: str) -> str:
    return text.replace(self._secret, "[key]") if self._secret else text


def _close(
  client: httpx2.AsyncClient,
  loop: asyncio.AbstractEventLoop,
  thread: threading.Thread,
) -> None:
  """Closes all connections and ends the thread."""
  if threading.current_thread() is thread:
    return  # which cannot wait for itself
  asyncio.run_coroutine_threadsafe(client.aclose(), loop).result()
  loop.call_soon_threadsafe(loop.stop)
  thread.join()
  loop.close()


def _failure(failure: Failure) -> SearchFailure:
  return SearchFailure(f"{failure.kind}: {failure.detail}", failure.kind)
