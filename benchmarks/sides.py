"""Sides of a comparison: processes that play when told to, one at a time.

A side is a long-lived process with a model in memory. It is told what to do by
a JSON object on a line of its stdin and answers by one on its stdout; while
another side plays it waits, and costs nothing. A peer's process runs in a
virtual environment of its own, made on first use.

Only the standard library is used: both ends of the line import this file.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_MARK = "installed.txt"  # in an environment: what pip put there


class SideError(Exception):
  """A side cannot be set up or has ended; one line that says why."""


# --- environments ----------------------------------------------------------


def folder() -> Path:
  """Where the peers' environments are: `benchmarks` in the assets folder."""
  root = os.environ.get("SESA_JAX_ASSETS") or "~/.cache/sesa_jax"
  return Path(root).expanduser() / "benchmarks"


def set_up(name: str, pins: Sequence[str]) -> str:
  """Makes the environment of a peer, unless it is there already.

  Args:
    name: of the peer, and of its folder.
    pins: what pip installs.

  Returns:
    The path of its Python.

  Raises:
    SideError: it cannot be made.
  """
  place = folder() / name
  python = place / "bin" / "python"
  wanted = f"{sys.version_info.major}.{sys.version_info.minor} {' '.join(pins)}"
  mark = place / _MARK
  if mark.is_file() and mark.read_text() == wanted and python.exists():
    return str(python)
  print(f"Installing {' '.join(pins)} into {place}: minutes.", file=sys.stderr)
  shutil.rmtree(place, ignore_errors=True)
  pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "-q"]
  _run(name, [sys.executable, "-m", "venv", place])
  _run(name, [*pip, *pins])
  mark.write_text(wanted)
  return str(python)


def _run(name: str, command: Sequence[Any]) -> None:
  done = subprocess.run(
    [str(part) for part in command], capture_output=True, text=True
  )
  if done.returncode:
    said = (done.stderr or done.stdout).strip().splitlines()
    raise SideError(
      f"The environment of {name} could not be made: {' '.join(said[-1:])} "
      f"(exit {done.returncode} of `{' '.join(map(str, command))}`). Check "
      "the network and pip's index, or leave the peer out with --peers."
    )


# --- the parent's end ------------------------------------------------------


@dataclass(frozen=True)
class Side:
  """What plays, and how."""

  name: str
  module: str  # run as `python -m`
  settings: Mapping[str, Any] = field(default_factory=dict)
  python: str = sys.executable


class Process:
  """A running side.

  Args:
    side: what to run. Its settings are sent in the first message, "start".
    environment: variables for it, where this process has none of that name.

  Raises:
    SideError: by any method, when the process ends instead of answering.
  """

  def __init__(self, side: Side, environment: Mapping[str, str] | None = None):
    self.side = side
    self._log = tempfile.TemporaryFile(mode="w+")
    self._process = subprocess.Popen(
      [side.python, "-m", side.module],
      cwd=ROOT,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=self._log,
      text=True,
      # The comparison is of engines on a CPU, whatever else there is.
      env={
        **(environment or {}),
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
      },
    )
    try:
      self.about = self.ask("start", settings=dict(side.settings))
    except SideError:
      self.close()
      raise

  def ask(self, order: str, **arguments: Any) -> dict[str, Any]:
    """Gives an order and waits for its answer."""
    try:
      print(
        json.dumps({"order": order} | arguments),
        file=self._process.stdin,
        flush=True,
      )
      line = self._process.stdout.readline()
    except BrokenPipeError:
      line = ""
    if not line:
      raise SideError(self._last_words(order))
    return json.loads(line)

  def _last_words(self, order: str) -> str:
    code = self._process.wait()
    self._log.seek(0)
    said = deque((line.strip() for line in self._log if line.strip()), 3)
    return (
      f"{self.side.name} ended (exit {code}) when told to {order}: "
      f"{' | '.join(said) or 'it said nothing'}"
    )

  def close(self) -> None:
    """Ends the process, if it has not ended."""
    with contextlib.suppress(BrokenPipeError):
      self._process.stdin.close()
    self._process.stdout.close()
    self._process.wait()
    self._log.close()

  def __enter__(self) -> Process:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()


# --- the side's end --------------------------------------------------------

Order = Callable[..., dict[str, Any]]


def serve(start: Callable[[dict[str, Any]], Mapping[str, Order]]) -> None:
  """Obeys orders until stdin ends.

  Args:
    start: is given the settings; returns what answers an order, by name. The
      entry "start" is called at once, without arguments.
  """
  # What libraries print must not come between the answers.
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)
  orders: Mapping[str, Order] = {}
  for line in sys.stdin:
    message = json.loads(line)
    order = message.pop("order")
    began = time.process_time()  # of all threads
    try:
      if order == "start":
        orders = start(message.pop("settings"))
      answer = orders[order](**message)
    except SideError as error:
      sys.exit(str(error))
    answer["cpu_seconds"] = time.process_time() - began
    answer["peak_rss_bytes"] = peak_rss()
    print(json.dumps(answer), file=answers, flush=True)


def peak_rss() -> int:
  """Returns the most memory that this process has held so far, in bytes."""
  status = Path("/proc/self/status")
  if status.exists():  # ru_maxrss would count what forked this process, too
    (line,) = (
      line
      for line in status.read_text().splitlines()
      if line.startswith("VmHWM:")
    )
    return int(line.split()[1]) * 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def watch_compilation() -> list[float]:
  """Returns a list that grows by the seconds of whatever jax compiles."""
  import jax.monitoring  # not every side has jax

  seconds: list[float] = []

  def listen(event: str, duration: float, **_: Any) -> None:
    # Not tracing: a trace's duration holds those of the traces inside it.
    if event.endswith(("backend_compile_duration", "mlir_module_duration")):
      seconds.append(duration)

  jax.monitoring.register_event_duration_secs_listener(listen)
  return seconds


def merged(
  defaults: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the defaults with some settings changed.

  Raises:
    SideError: a setting is unknown.
  """
  unknown = sorted(set(settings) - set(defaults))
  if unknown:
    raise SideError(
      f"Unknown setting {unknown[0]!r}. Choices: {', '.join(defaults)}."
    )
  return dict(defaults) | dict(settings)
