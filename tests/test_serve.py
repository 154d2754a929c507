"""Serving by the Search-R1 protocol: our own client, and anybody's."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sesa_jax import serve
from sesa_jax.search import base, http, search_r1
from sesa_jax.types import Passage, SearchFailure
from tests.llm_server import no_certificates

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.usefixtures(no_certificates.__name__)


class Fixed:
  def search(self, queries, k):
    return [
      SearchFailure(f"{q}: no", q)
      if q in ("rejected", "server")
      else tuple(Passage(f"{q}{i}", f'"{q}"', "a\nb", 2.0) for i in range(k))
      for q in queries
    ]


@pytest.fixture
def server():
  with serve.Server(
    base.Batched(Fixed(), size=64, workers=2), "127.0.0.1", 0
  ) as found:
    thread = threading.Thread(target=found.serve_forever, args=(0.01,))
    thread.start()
    yield found
    found.shutdown()
    thread.join()


def root(server):
  return f"http://127.0.0.1:{server.server_port}"


def post(server, body, path="/retrieve"):
  data = body if isinstance(body, bytes) else json.dumps(body).encode()
  asked = urllib.request.Request(
    root(server) + path, data, {"Content-Type": "application/json"}
  )
  try:
    with urllib.request.urlopen(asked, timeout=30) as response:
      return response.status, json.load(response)
  except urllib.error.HTTPError as error:
    return error.code, json.load(error)


def test_the_published_request(server):
  asked = {"queries": ["x", "y"], "topk": 2, "return_scores": True}
  status, found = post(server, asked)
  assert status == 200
  assert found == {
    "result": [
      [
        {
          "document": {"id": f"{q}{i}", "contents": f'""{q}""\na\nb'},
          "score": 2.0,
        }
        for i in range(2)
      ]
      for q in "xy"
    ]
  }


def test_without_scores_the_documents_stand_alone(server):
  _, found = post(server, {"queries": ["x"], "topk": None})
  assert found["result"][0][0] == {"id": "x0", "contents": '""x""\na\nb'}
  assert len(found["result"][0]) == 3


def test_a_server_has_a_number_of_passages_of_its_own():
  for asked in ({}, {"topk": None}, {"topk": 2}):
    body = json.dumps({"queries": ["x"]} | asked).encode()
    assert serve.parse(body, 5) == (["x"], asked.get("topk") or 5, False)


def test_our_own_client_gets_the_passages_back(server):
  client = search_r1.SearchR1(
    http.Http(
      [search_r1.address(root(server))],
      deadline=30, try_seconds=30, tries=1, patience=60, ledger=base.Ledger(),
    )
  )  # fmt: skip
  client.check()
  assert client.search(["x", "y"], 2) == Fixed().search(["x", "y"], 2)
  found = client.search(["x", "rejected"], 1)
  assert found[0] == Fixed().search(["x"], 1)[0]
  assert found[1].kind == "rejected"
  assert client.search(["server"], 1)[0].kind == "server"


def test_two_thousand_plain_requests_are_answered(server):
  def ask(i):
    status, found = post(server, {"queries": [f"q{i}"], "topk": 1})
    return status == 200 and found["result"][0][0]["id"] == f"q{i}0"

  with ThreadPoolExecutor(200) as pool:
    assert all(pool.map(ask, range(2000)))


@pytest.mark.parametrize(
  ("body", "status", "says"),
  [
    (b"{", 400, "not JSON"),
    (b"\xff", 400, "not JSON"),
    ([], 400, "no object"),
    ({}, 422, "queries must be a list of texts"),
    ({"queries": "x"}, 422, "list of texts"),
    ({"queries": [1]}, 422, "list of texts"),
    ({"queries": ["x"], "topk": 0}, 422, "topk must be"),
    ({"queries": ["x"], "topk": True}, 422, "topk must be"),
    ({"queries": ["x"], "topk": "3"}, 422, "topk must be"),
    ({"queries": ["x"], "topk": 1001}, 422, "topk must be"),
    ({"queries": ["x"], "return_scores": 1}, 422, "true or false"),
    ({"queries": ["x"] * 4097}, 413, "4097 queries"),
    ({"queries": ["x", "rejected"]}, 422, "rejected: no"),
    ({"queries": ["x", "server"]}, 503, "server: no"),
  ],
)
def test_a_bad_request_is_one_line(server, body, status, says):
  code, found = post(server, body)
  assert code == status
  assert says in found["detail"]
  assert "\n" not in found["detail"]
  assert post(server, {"queries": ["x"]})[0] == 200  # it goes on


def test_no_query_is_no_result(server):
  assert post(server, {"queries": []}) == (200, {"result": []})


def test_other_addresses(server):
  assert post(server, {"queries": ["x"]}, "/search")[0] == 404
  assert post(server, {"queries": ["x"]}, "/retrieves")[0] == 404
  with urllib.request.urlopen(f"{root(server)}/health", timeout=30) as found:
    assert found.status == 200
  with pytest.raises(urllib.error.HTTPError, match="404"):
    urllib.request.urlopen(f"{root(server)}/retrieve", timeout=30)


def test_a_client_that_hangs_up_is_no_news(server, capfd):
  for text in (
    b"POST /retrieve HTTP/1.1\r\nContent-Length: 9\r\n\r\n{",
    b"\0\n",
  ):
    with socket.create_connection(("127.0.0.1", server.server_port)) as raw:
      raw.sendall(text)
  assert post(server, {"queries": ["x"]})[0] == 200
  assert capfd.readouterr().err == ""


def test_an_error_of_ours_is_logged(server, monkeypatch, caplog):
  def search(queries, k):
    raise KeyError("a bug")

  monkeypatch.setattr(server.engine, "search", search)
  with pytest.raises(ConnectionError):
    post(server, {"queries": ["x"]})
  deadline = time.monotonic() + 10
  while not caplog.records and time.monotonic() < deadline:
    time.sleep(0.01)
  assert "KeyError: 'a bug'" in caplog.text


@pytest.mark.parametrize(
  ("header", "status"),
  [
    ("", b"411"),
    ("Content-Length: -1", b"411"),
    ("Content-Length: 8388609", b"413"),
  ],
)
def test_a_length_must_be_stated_and_not_too_much(server, header, status):
  with socket.create_connection(("127.0.0.1", server.server_port)) as raw:
    raw.sendall(f"POST /retrieve HTTP/1.1\r\n{header}\r\n\r\n".encode())
    assert status in raw.recv(1000)


@pytest.mark.slow
def test_the_command_serves_an_index_until_ctrl_c(tmp_path):
  env = os.environ | {"PYTHONPATH": str(ROOT)}
  index = f"--config.search.index={tmp_path / 'index'}"
  # Where the tests run in the background, their children ignore Ctrl-C.
  program = (
    "import runpy, signal;"
    "signal.signal(signal.SIGINT, signal.default_int_handler);"
    "runpy.run_module('sesa_jax.main', run_name='__main__', alter_sys=True)"
  )
  command = [sys.executable, "-c", program, "--config=configs/tiny.py"]
  kwargs = dict(cwd=ROOT, env=env, text=True)
  build = [*command, "--mode=index", "--engine=bm25", index]
  done = subprocess.run(build, **kwargs, capture_output=True, check=True)
  assert "The index lies in" in done.stderr
  with subprocess.Popen(
    [*command, "--mode=serve", "--engine=bm25", "--port=0", index],
    **kwargs,
    stderr=subprocess.PIPE,
  ) as serving:
    for line in serving.stderr:
      if found := re.search(r"http://[\d.:]+/retrieve", line):
        break
    asked = {"queries": ["capital of France"], "topk": 1, "return_scores": True}
    request = urllib.request.Request(found[0], json.dumps(asked).encode())
    with urllib.request.urlopen(request, timeout=30) as response:
      (((first,),),) = (json.load(response)["result"],)
    assert "Paris" in first["document"]["contents"]
    serving.send_signal(signal.SIGINT)
    rest = serving.stderr.read()
    assert serving.wait(30) == 0
  assert "Traceback" not in rest
