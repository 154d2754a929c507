"""The one writer of a run's folder, and the progress display.

Everything else returns small dicts, named by path (`solver/reward/mean`).
What is appended is JSONL; what is replaced is written beside its place and
renamed, so that a kill at any time leaves whole files.

Schema of an episode's row (`SCHEMA` 1): the fields of `types.Episode` under
their names, `mask` as 0 and 1, `turns` with their passages, and
`prompt` and each turn's `observation`: text views of the observed ids.
The caller adds what it knows, and `show` reads: `iteration`, `question`,
`targets`, `prediction`, `verdict`, `reward`, `advantage` (None: not trained
on), `skill_ids`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import rich.console
import rich.progress
import zstandard
from absl import logging

from sesa_jax.types import Episode, Passage, Turn

SCHEMA = 1

# What is appended to, and so cut back to a checkpoint's lengths on resume.
LOGS = (
  "metrics.jsonl",
  "questions.jsonl",
  "failures.jsonl",
  "skills_history.jsonl",
)

_LOG_SECONDS = 10.0  # between progress lines when nobody watches a terminal


def plain(value: Any) -> Any:
  """Turns a value into what JSON holds; a number that is not finite is null."""
  if isinstance(value, Mapping):
    return {str(key): plain(item) for key, item in value.items()}
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    fields = dataclasses.fields(value)
    return {f.name: plain(getattr(value, f.name)) for f in fields}
  if hasattr(value, "__array__"):  # of numpy or jax
    return plain(np.asarray(value).tolist())
  if isinstance(value, list | tuple):
    return [plain(item) for item in value]
  if isinstance(value, float):
    return value if math.isfinite(value) else None
  if isinstance(value, Path):
    return str(value)
  return value


def line(row: Mapping[str, Any]) -> bytes:
  """One JSONL line. Keys are sorted: a row restored from JSON reads alike."""
  return _dump(row, separators=(",", ":"))


def _dump(value: Any, **layout: Any) -> bytes:
  text = json.dumps(
    plain(value), sort_keys=True, ensure_ascii=False, allow_nan=False, **layout
  )
  # A model may write half of a surrogate pair; it must not stop a run.
  return (text + "\n").encode("utf-8", "backslashreplace")


def describe(values: Iterable[float], path: str) -> dict[str, float]:
  """Returns `path/mean` and `path/max`; NaN (null in files) if empty."""
  values = np.asarray(list(values), np.float64)
  if not values.size:
    return {f"{path}/mean": math.nan, f"{path}/max": math.nan}
  mean, most = float(values.mean()), float(values.max())
  return {f"{path}/mean": mean, f"{path}/max": most}


# --- the folder ------------------------------------------------------------


class RunFolder:
  """The folder of a run on a local or mounted disk.

  Args:
    path: of the folder; it is made if absent.
    writes: False in all processes but the lead; every write is then a no-op.

  Raises:
    ValueError: `path` is a URL, or a file.
  """

  def __init__(self, path: str | Path, writes: bool = True):
    if "://" in str(path):
      raise ValueError(
        f"The run's folder {path} is a URL, and its JSONL files grow, which "
        "object stores cannot do. Mount the bucket and give the local path."
      )
    self.path = Path(path)
    self._writes = writes
    if self.path.exists() and not self.path.is_dir():
      raise ValueError(f"The run's folder {path} is a file. Name another.")
    if writes:
      self.path.mkdir(parents=True, exist_ok=True)

  @contextlib.contextmanager
  def lock(self) -> Iterator[None]:
    """Keeps other processes from writing here; a kill ends it too.

    Raises:
      ValueError: another process writes here.
    """
    if not self._writes:
      yield
      return
    with (self.path / "run.lock").open("w") as file:
      try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError as error:
        raise ValueError(
          f"Another process runs in {self.path}. Wait for it, or name another "
          "--workdir."
        ) from error
      yield

  def append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Appends rows to one of `LOGS`, and waits until the disk has them."""
    assert name in LOGS, f"{name} is not one of the logs {LOGS}"
    if not self._writes:
      return
    path = self.path / name
    whole = _whole(path)
    with path.open("ab") as file:
      file.truncate(whole)  # of a torn last line
      file.writelines(line(row) for row in rows)
      file.flush()
      os.fsync(file.fileno())

  def read(self, name: str) -> list[dict[str, Any]]:
    """Rows of a JSONL file; [] if there is none. A torn last line is left out.

    Raises:
      ValueError: a line is not JSON; names the file and the line.
    """
    path = self.path / name
    if not path.exists():
      return []
    rows = []
    data = path.read_bytes()[: _whole(path)]
    for number, text in enumerate(data.splitlines(), 1):
      try:
        rows.append(json.loads(text))
      except ValueError as error:
        raise ValueError(
          f"{path}, line {number} is not JSON ({error}). Remove the line, or "
          "restore the file."
        ) from error
    return rows

  def read_json(self, name: str, default: Any) -> Any:
    """The value of a JSON file; `default` if there is none.

    Raises:
      ValueError: the file is not JSON, or not of the default's type.
    """
    path = self.path / name
    if not path.exists():
      return default
    try:
      value = json.loads(path.read_bytes())
    except ValueError as error:
      raise ValueError(
        f"{path} is not JSON ({error}). Restore the file, or remove it."
      ) from error
    if type(value) is not type(default):
      raise ValueError(
        f"{path} holds a {type(value).__name__}, not a "
        f"{type(default).__name__}. Restore the file, or remove it."
      )
    return value

  def write_json(self, name: str, value: Any) -> None:
    """Replaces a JSON file: at any time the old or the new one is whole."""
    self._replace(name, _dump(value, indent=2))

  def write_lines(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replaces a JSONL file that is not one of `LOGS`, as `write_json` does."""
    assert name not in LOGS, f"{name} only grows: append to it"
    self._replace(name, b"".join(map(line, rows)))

  def write_episodes(
    self, iteration: int, rows: Iterable[Mapping[str, Any]]
  ) -> None:
    """Writes an iteration's episodes; the same rows give the same bytes."""
    compressor = zstandard.ZstdCompressor(level=9, write_checksum=True)
    data = compressor.compress(b"".join(map(line, rows)))
    self._replace(f"episodes/iteration_{iteration:05d}.jsonl.zst", data)

  def lengths(self) -> dict[str, int]:
    """Bytes of every log and episode file, for a checkpoint to hold."""
    logs = [self.path / name for name in LOGS if (self.path / name).exists()]
    lengths = {path.name: _whole(path) for path in logs}
    for path in episode_files(self.path):
      lengths[path.relative_to(self.path).as_posix()] = path.stat().st_size
    return lengths

  def truncate(self, lengths: Mapping[str, int]) -> None:
    """Goes back to the state that `lengths` describes.

    Cuts the logs; removes logs and episode files that it does not name. With
    {} the run starts anew. Episode files that someone removed stay so.

    Raises:
      ValueError: a log is shorter than it was at the checkpoint.
    """
    if not self._writes:
      return
    for name in LOGS:
      path = self.path / name
      size = path.stat().st_size if path.exists() else 0
      if size < lengths.get(name, 0):
        raise ValueError(
          f"{path} has {size} bytes, but {lengths[name]} when the checkpoint "
          "was written: it was changed since. Restore it, or start a new "
          "folder with --start_from."
        )
    for name in LOGS:
      if name in lengths:
        os.truncate(self.path / name, lengths[name])
      else:
        (self.path / name).unlink(missing_ok=True)
    for path in episode_files(self.path):
      if path.relative_to(self.path).as_posix() not in lengths:
        path.unlink()

  def _replace(self, name: str, data: bytes) -> None:
    if not self._writes:
      return
    path = self.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".tmp")
    with beside.open("wb") as file:
      file.write(data)
      file.flush()
      os.fsync(file.fileno())
    beside.replace(path)


def _whole(path: Path) -> int:
  """Bytes of a file's finished lines; 0 if there is no file."""
  if not path.exists():
    return 0
  with path.open("rb") as file:
    end = file.seek(0, os.SEEK_END)
    while end:
      start = max(0, end - 65536)
      file.seek(start)
      newline = file.read(end - start).rfind(b"\n")
      if newline >= 0:
        return start + newline + 1
      end = start
  return 0


# --- episodes --------------------------------------------------------------


def episode_files(folder: str | Path) -> list[Path]:
  """A run's episode files, in the order of iterations."""
  return sorted(Path(folder).glob("episodes/iteration_*.jsonl.zst"))


def read_episodes(path: str | Path) -> Iterator[dict[str, Any]]:
  """Yields the rows of an episode file.

  Raises:
    ValueError: the file is damaged.
  """
  try:
    data = zstandard.ZstdDecompressor().decompress(Path(path).read_bytes())
    yield from map(json.loads, data.splitlines())
  except (zstandard.ZstdError, json.JSONDecodeError) as error:
    raise ValueError(
      f"{path} is damaged ({error}). Remove it: no training needs it."
    ) from error


def episode_row(
  episode: Episode,
  decode: Callable[[list[int]], str] | None = None,
  **extra: Any,
) -> dict[str, Any]:
  """Returns an episode's row; see the module's docstring.

  Args:
    episode: what was played.
    decode: ids to text with special tokens kept, for the views of what was
      observed; without it there are none.
    **extra: what else is known of it.
  """
  row = plain(
    {f.name: getattr(episode, f.name) for f in dataclasses.fields(episode)}
  )
  row["mask"] = episode.mask.astype(int).tolist()
  # Shortest decimals that name the float32, where a double of them does.
  exact = episode.logprobs.astype(np.float64)
  short = episode.logprobs.astype(str).astype(np.float64)
  row["logprobs"] = plain(
    np.where(short.astype(np.float32) == episode.logprobs, short, exact)
  )
  row["schema"] = SCHEMA
  if decode is not None:
    row["prompt"] = decode(row["ids"][: episode.prompt_length])
    for turn in row["turns"]:
      turn["observation"] = decode(row["ids"][turn["end"] : turn["stop"]])
  assert not extra.keys() & row.keys(), sorted(extra.keys() & row.keys())
  return row | extra


def episode_from_row(row: Mapping[str, Any]) -> Episode:
  """The episode of a row of `episode_row`, exactly; extras are left out.

  Raises:
    ValueError: the row has another schema.
  """
  if row.get("schema") != SCHEMA:
    raise ValueError(
      f"Episode row of schema {row.get('schema')}; this version reads "
      f"{SCHEMA}. Use the version that the run's manifest.json names."
    )
  turns = []
  for turn in row["turns"]:
    fields = {f.name: turn[f.name] for f in dataclasses.fields(Turn)}
    fields["passages"] = tuple(Passage(**p) for p in turn["passages"])
    turns.append(Turn(**fields))
  fields = {f.name: row[f.name] for f in dataclasses.fields(Episode)}
  return Episode(
    **fields
    | dict(
      ids=np.asarray(row["ids"], np.int32),
      mask=np.asarray(row["mask"], bool),
      logprobs=np.asarray(row["logprobs"], np.float32),
      turns=tuple(turns),
    )
  )


# --- progress --------------------------------------------------------------


class Progress:
  """Says where a run is: stage, episodes, tokens/s, time left for all of it.

  A live display on a terminal; else a log line at the start and the end of
  each stage, and one every 10 s in between.

  Args:
    total_passes: token-passes that are still to be done: tokens that go
      through the model, however often. Time left = time so far x passes left
      / passes done. A finished stage counts what it was budgeted, since its
      episodes may end early.
    console: where to; standard error by default.
    clock: seconds; for tests.
  """

  def __init__(
    self,
    total_passes: int,
    console: rich.console.Console | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    self.total_passes = total_passes
    self.passes: dict[str, int] = {}  # counted, by stage
    self._console = console or rich.console.Console(stderr=True)
    self._clock = clock
    self._started = self._logged = clock()
    self._done = 0  # of finished stages
    self._name = ""
    self.note = ""  # of this stage, what else a person wants to see
    self._live = None
    if self._console.is_terminal:
      self._live = rich.progress.Progress(
        rich.progress.SpinnerColumn(),
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(bar_width=24),
        rich.progress.TextColumn("{task.fields[status]}"),
        console=self._console,
        refresh_per_second=2,
        transient=True,
      )
      self._task = self._live.add_task("", total=None, status="")

  def __enter__(self) -> Progress:
    if self._live:
      self._live.start()
    return self

  def __exit__(self, *_: Any) -> None:
    self._finish()
    if self._live:
      self._live.stop()

  def stage(
    self,
    name: str,
    episodes: int = 0,
    passes: int = 0,
    *,
    done: int = 0,
    unit: str = "episodes",
  ) -> None:
    """Ends the stage before and begins one.

    Args:
      name: what a person calls it.
      episodes: how many it plays or learns from; 0 if that says nothing.
      passes: token-passes it was budgeted, part of `total_passes`.
      done: how many of the episodes were, in an earlier process.
      unit: what is counted in the place of episodes.
    """
    self._finish()
    self._name, self._episodes, self._budget = name, episodes, passes
    self._unit, self.note = unit, ""
    self._played = done
    self._tokens = self._passed = 0
    self._begun = self._clock()
    self._show("begins", now=True)

  def advance(
    self, episodes: int = 0, tokens: int = 0, passes: int | None = None
  ) -> None:
    """Counts what was done in this stage since the last call.

    Args:
      episodes: finished.
      tokens: sampled, or learned from.
      passes: token-passes; as many as tokens if None.
    """
    assert self._name, "advance() before stage()"
    passes = tokens if passes is None else passes
    self._played += episodes
    self._tokens += tokens
    self._passed += passes
    self.passes[self._name] = self.passes.get(self._name, 0) + passes
    self._show("")

  def seconds_left(self) -> float | None:
    """Estimate for the whole run; None before anything was done."""
    done = self._done + (self._passed if self._name else 0)
    if not done:
      return None
    left = max(0, self.total_passes - done)
    return (self._clock() - self._started) * left / done

  def status(self) -> str:
    """One line: episodes, note, tokens/s of the stage, time left of all."""
    parts = []
    if self._episodes:
      parts.append(f"{self._played}/{self._episodes} {self._unit}")
    if self.note:
      parts.append(self.note)
    seconds = self._clock() - self._begun
    if self._tokens and seconds > 0:
      parts.append(f"{self._tokens / seconds:.1f} tokens/s")
    left = self.seconds_left()
    if left is not None:
      minutes, seconds = divmod(round(left), 60)
      parts.append(f"{minutes}:{seconds:02d} left")
    return ", ".join(parts)

  def _finish(self) -> None:
    if not self._name:
      return
    self._show(f"done in {self._clock() - self._begun:.1f} s", now=True)
    self._done += max(self._passed, self._budget)
    self._name = ""

  def _show(self, event: str, now: bool = False) -> None:
    if self._live:
      self._live.update(
        self._task,
        description=self._name,
        completed=self._played,
        total=self._episodes or None,
        status=self.status(),
      )
    elif now or self._clock() - self._logged >= _LOG_SECONDS:
      self._logged = self._clock()
      said = ", ".join(filter(None, (event, self.status())))
      logging.info("%s: %s", self._name, said)
