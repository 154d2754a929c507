"""Weights out: a folder that transformers, and what reads its files, opens."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from transformers import PreTrainedTokenizerFast

from sesa_jax.policy import backbones, tokenizer, weights
from sesa_jax.policy.backbones import Backbone

DTYPES = {"float32": "F32", "bfloat16": "BF16"}  # names in a file's header
_LOCK = "export.lock"  # held by the process that writes beside it
LIMIT = 5 * 10**9  # bytes of tensors a file, as transformers cuts them


def check(out: str | Path, dtype: str) -> None:
  """Refuses what `save` would, before anything is loaded.

  Raises:
    ValueError: `out` is a file, a link, the working directory or a mount,
      holds something or cannot be made; or the dtype is unknown.
  """
  if dtype not in DTYPES:
    raise ValueError(
      f"--dtype {dtype!r} is unknown. Choices: {', '.join(DTYPES)}."
    )
  out = Path(out)
  if out.exists() and (not out.is_dir() or any(out.iterdir())):
    raise ValueError(
      f"--out={out} exists and is no empty folder. Name another, or remove it."
    )
  # A rename, which is the last step, cannot replace these.
  if out.is_symlink() or out.resolve() == Path.cwd() or out.is_mount():
    raise ValueError(
      f"--out={out} is a link, the working directory or a mount, which an "
      "export cannot replace. Name a folder inside it, or a new one."
    )
  # Tried, since permissions do not tell of all places, such as /proc.
  above = next(p for p in out.resolve().parents if p.exists())
  try:
    tempfile.TemporaryDirectory(dir=above).cleanup()
  except OSError as error:
    raise ValueError(
      f"--out={out} cannot be made: {above} takes no folder "
      f"({error.strerror}). Name a place that can be written."
    ) from error


def save(
  out: str | Path,
  backbone: Backbone,
  words: PreTrainedTokenizerFast,
  read: Callable[[str], np.ndarray],
  *,
  dtype: str = "float32",
  limit: int = LIMIT,
) -> None:
  """Writes weights, configuration and tokenizer; all of it or nothing.

  Holds one leaf at a time. Values are rounded to the nearest, ties to even;
  those that came from bfloat16 and were not trained return exactly.

  Args:
    out: the folder to make.
    backbone: the architecture; padding of the vocabulary stays behind.
    words: the tokenizer.
    read: a leaf's path in the tree of `model.init`, "layers/q/kernel", to its
      values.
    dtype: one of `DTYPES`.
    limit: bytes of tensors a file at most; a larger one has its own.

  Raises:
    ValueError: as `check`, or no family has this architecture.
  """
  check(out, dtype)
  config = _config(backbone, words, dtype)
  out = Path(out).resolve()
  out.parent.mkdir(parents=True, exist_ok=True)
  with beside(out) as folder:
    folder.mkdir()
    words.save_pretrained(folder)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation(words))
    # transformers 5 alone knows its own name for the class.
    _write_json(
      folder / "tokenizer_config.json",
      weights.read_json(folder / "tokenizer_config.json")
      | {"tokenizer_class": "PreTrainedTokenizerFast"},
    )
    _write_weights(folder, backbone, read, dtype, limit)
    folder.rename(out)


@contextlib.contextmanager
def beside(out: Path) -> Iterator[Path]:
  """Yields the path of what to make, a rename from `out`; gone if that fails.

  A kill leaves it behind, but not its lock: the next one who makes `out`
  removes what is there and no longer locked.
  """
  prefix = f".{out.name}."
  for left in out.parent.iterdir():
    if left.name.startswith(prefix):
      # Somebody else's, or one that still writes.
      with contextlib.suppress(OSError), (left / _LOCK).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(left)
  with (
    tempfile.TemporaryDirectory(dir=out.parent, prefix=prefix) as made,
    (Path(made) / f"{_LOCK}.new").open("w") as lock,
  ):
    fcntl.flock(lock, fcntl.LOCK_EX)
    # Under its name only once it is locked.
    Path(lock.name).rename(Path(made) / _LOCK)
    yield Path(made) / "whole"


def _config(
  backbone: Backbone, words: PreTrainedTokenizerFast, dtype: str
) -> dict[str, Any]:
  return backbones.to_hf_config(backbone) | {
    "bos_token_id": words.bos_token_id,
    "eos_token_id": words.eos_token_id,
    "pad_token_id": words.pad_token_id,
    "torch_dtype": dtype,
  }


def _generation(words: PreTrainedTokenizerFast) -> dict[str, Any]:
  return {
    "bos_token_id": words.bos_token_id,
    "eos_token_id": list(tokenizer.end_ids(words)),
    "pad_token_id": words.pad_token_id,
  }


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
  path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _write_weights(
  folder: Path,
  backbone: Backbone,
  read: Callable[[str], np.ndarray],
  dtype: str,
  limit: int,
) -> None:
  """Writes safetensors: a length, a JSON header with offsets, the tensors."""
  places = weights.tensors(backbone)
  size = jnp.dtype(dtype).itemsize
  sizes = {n: size * math.prod(place.shape) for n, place in places.items()}
  shards = _shards(sizes, limit)
  files = [
    f"model-{number:05d}-of-{len(shards):05d}.safetensors"
    for number in range(1, len(shards) + 1)
  ]
  if len(shards) == 1:
    files = ["model.safetensors"]
  else:
    owner = {
      name: file
      for file, names in zip(files, shards, strict=True)
      for name in names
    }
    _write_json(
      folder / "model.safetensors.index.json",
      {"metadata": {"total_size": sum(sizes.values())}, "weight_map": owner},
    )
  values = _values(places, read)
  with weights.progress("Writing weights", sum(sizes.values())) as advance:
    for file, names in zip(files, shards, strict=True):
      with (folder / file).open("wb") as target:
        target.write(_header({n: places[n].shape for n in names}, dtype))
        for name in names:
          # No name for it: a view would hold its leaf while the next is read.
          target.write(_bytes(next(values), jnp.dtype(dtype)))
          advance(sizes[name])


def _bytes(values: np.ndarray, dtype: np.dtype) -> memoryview:
  return np.ascontiguousarray(values, dtype).view(np.uint8).data


def _shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
  """Fills one file after the other, in the order of the tensors."""
  shards: list[list[str]] = []
  room = -1
  for name, size in sizes.items():
    if size > room:
      shards.append([])
      room = limit
    shards[-1].append(name)
    room -= size
  return shards


def _header(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> bytes:
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  start = 0
  for name, shape in shapes.items():
    stop = start + jnp.dtype(dtype).itemsize * math.prod(shape)
    header[name] = {
      "dtype": DTYPES[dtype],
      "shape": shape,
      "data_offsets": [start, stop],
    }
    start = stop
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
  return len(text).to_bytes(8, "little") + text


def _values(
  places: Mapping[str, weights.Place], read: Callable[[str], np.ndarray]
) -> Iterator[np.ndarray]:
  """Yields the tensors in order; a leaf is dropped before the next is read."""
  path, leaf, values = "", None, None
  for name, place in places.items():
    if place.leaf != path:
      path, leaf, values = place.leaf, None, None
      leaf = np.asarray(read(path))
    values = leaf if place.layer is None else leaf[place.layer]
    if path.endswith("/embedding"):
      values = values[: place.shape[0]]  # without padding
    if path.endswith("/kernel"):
      values = values.T
    assert values.shape == place.shape, (name, values.shape, place.shape)
    yield values
