"""Serves a search engine by the Search-R1 protocol, for teams that share one.

`POST /retrieve` takes `{"queries": [..], "topk": 3, "return_scores": true}` and
gives `{"result": [[{"document": {"id", "contents"}, "score"}, ..], ..]}`;
without scores the documents stand alone. `GET /health` gives 200.
"""

from __future__ import annotations

import http.server
import json
import sys
from typing import Any

from absl import logging

from sesa_jax.data import corpus
from sesa_jax.types import Passage, SearchEngine, SearchFailure

MAX_BYTES = 8 << 20  # of a request
MAX_QUERIES = 4096
MAX_TOPK = 1000


class Refused(ValueError):
  """A request that is not answered, with its HTTP status."""

  def __init__(self, status: int, detail: str):
    super().__init__(detail)
    self.status = status


def parse(body: bytes, topk: int) -> tuple[list[str], int, bool]:
  """Reads a request: its queries, how many passages, whether with scores.

  Args:
    body: JSON.
    topk: where the request names none.

  Raises:
    Refused: it is none.
  """
  try:
    asked = json.loads(body)
  except (ValueError, RecursionError):
    raise Refused(400, "The body is not JSON.") from None
  if not isinstance(asked, dict):
    raise Refused(400, "The body is no object.")
  queries = asked.get("queries")
  if not isinstance(queries, list) or not all(
    isinstance(query, str) for query in queries
  ):
    raise Refused(422, "queries must be a list of texts.")
  if len(queries) > MAX_QUERIES:
    raise Refused(
      413, f"{len(queries)} queries; at most {MAX_QUERIES} a request."
    )
  k = asked.get("topk")
  k = topk if k is None else k
  if type(k) is not int or not 1 <= k <= MAX_TOPK:
    raise Refused(422, f"topk must be an integer from 1 to {MAX_TOPK}.")
  scores = asked.get("return_scores", False)
  if not isinstance(scores, bool):
    raise Refused(422, "return_scores must be true or false.")
  return queries, k, scores


def render(passage: Passage, scores: bool) -> dict[str, Any]:
  """Returns a passage as the protocol has it."""
  document = {"id": passage.id, "contents": corpus.contents(passage)}
  if not scores:
    return document
  return {"document": document, "score": passage.score}


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"
  timeout = 60  # seconds that a connection may say nothing

  def do_GET(self) -> None:
    if self.path != "/health":
      self._say(404, {"detail": "Ask POST /retrieve or GET /health."})
    else:
      self._say(200, {"status": "ok"})

  def do_POST(self) -> None:
    try:
      body = self._body()  # read whatever is asked: the connection goes on
      if self.path != "/retrieve":
        raise Refused(404, "Ask POST /retrieve or GET /health.")
      queries, k, scores = parse(body, self.server.topk)
      self._say(200, {"result": self._search(queries, k, scores)})
    except Refused as error:
      self._say(error.status, {"detail": str(error)})

  def _body(self) -> bytes:
    size = self.headers.get("Content-Length", "")
    if not size.isdecimal():
      self.close_connection = True
      raise Refused(411, "The request must state its Content-Length.")
    if int(size) > MAX_BYTES:
      self.close_connection = True
      raise Refused(413, f"{size} bytes; a request has at most {MAX_BYTES}.")
    return self.rfile.read(int(size))

  def _search(self, queries, k, scores) -> list[list[dict[str, Any]]]:
    found = self.server.engine.search(queries, k) if queries else []
    for passages in found:
      if isinstance(passages, SearchFailure):
        status = 422 if passages.kind == "rejected" else 503
        raise Refused(status, passages.reason)
    return [[render(p, scores) for p in passages] for passages in found]

  def _say(self, status: int, value: dict[str, Any]) -> None:
    data = json.dumps(value).encode()
    self.send_response(status)
    self.send_header("Content-Type", "application/json")
    self.send_header("Content-Length", str(len(data)))
    self.end_headers()
    self.wfile.write(data)

  def log_message(self, *_: Any) -> None:
    pass


class Server(http.server.ThreadingHTTPServer):
  """Answers each connection in a thread of its own.

  Args:
    engine: joins what threads ask, as `search.base.Batched` does.
    host: address to listen at.
    port: 0 takes any that is free, which is then `server_port`.
    topk: passages a query where a request names none.
  """

  daemon_threads = True
  request_queue_size = 4096

  def __init__(self, engine: SearchEngine, host: str, port: int, topk: int = 3):
    self.engine, self.topk = engine, topk
    super().__init__((host, port), _Handler)

  def handle_error(self, *_: Any) -> None:
    """Logs what went wrong; a client that hung up is no news."""
    error = sys.exception()
    if not isinstance(error, ConnectionError | TimeoutError):
      logging.error("A request was not answered.", exc_info=error)


def main(engine: SearchEngine, host: str, port: int, topk: int) -> None:
  """Serves until Ctrl-C."""
  with Server(engine, host, port, topk) as server:
    logging.info(
      "Serving http://%s:%d/retrieve. Ctrl-C ends it.", host, server.server_port
    )
    try:
      server.serve_forever(poll_interval=0.1)
    except KeyboardInterrupt:
      logging.info("Served until interrupted.")
