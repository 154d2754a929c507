"""Weights into the tree of `model.init`, from files that others wrote.

Everything about a file that can be wrong is found from its header, before a
number is read; one error lists it all. What is read are the parts of tensors
that this process's devices hold, leaf by leaf.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.progress
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from safetensors import SafetensorError, safe_open

from sesa_jax.policy import backbones, model, sharding
from sesa_jax.policy.backbones import Backbone

SOURCES = ("hf", "gguf", "random")
# A mesh's `tensor` axis then divides the tables. That of every published
# backbone is a multiple already, so nothing is padded there.
VOCAB_MULTIPLE = 128

# Module of the tree -> stem in safetensors, stem in GGUF.
_ENDS = {
  "embed": ("model.embed_tokens", "token_embd"),
  "norm": ("model.norm", "output_norm"),
  "head": ("lm_head", "output"),
}
_LAYER = {
  "attention_norm": ("input_layernorm", "attn_norm"),
  "q": ("self_attn.q_proj", "attn_q"),
  "k": ("self_attn.k_proj", "attn_k"),
  "v": ("self_attn.v_proj", "attn_v"),
  "o": ("self_attn.o_proj", "attn_output"),
  "q_norm": ("self_attn.q_norm", "attn_q_norm"),
  "k_norm": ("self_attn.k_norm", "attn_k_norm"),
  "ffn_norm": ("post_attention_layernorm", "ffn_norm"),
  "gate": ("mlp.gate_proj", "ffn_gate"),
  "up": ("mlp.up_proj", "ffn_up"),
  "down": ("mlp.down_proj", "ffn_down"),
}
_BLOCK = ("model.layers.{}", "blk.{}")
HF, GGUF = 0, 1
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class _Store:
  """Named tensors outside, and the architecture that they should fit."""

  place: str
  naming: int  # HF or GGUF
  backbone: Backbone
  shapes: Mapping[str, tuple[int, ...]]  # [out, in] for a kernel
  read: Callable[[str, tuple[slice, ...]], np.ndarray]  # a part of one
  faults: Mapping[str, list[str]] = dataclasses.field(default_factory=dict)
  lost: Collection[str] = ()  # tensors of files that cannot be read


class Place(NamedTuple):
  """What an outside tensor is in the tree."""

  leaf: str  # "layers/q/kernel"
  layer: int | None  # on axis 0 of the leaf, if it stacks layers
  shape: tuple[int, ...]  # outside: [out, in] for a kernel, no padded rows


def load(
  source: str,
  path: str | Path,
  key: jax.Array | None = None,
  *,
  mesh: Mesh | None = None,
  dtype: Any = jnp.float32,
  vocab_multiple: int = VOCAB_MULTIPLE,
) -> tuple[Backbone, Any]:
  """Loads or, for "random", draws the weights of a policy.

  Args:
    source: one of `SOURCES`.
    path: a folder for "hf", a file for "gguf"; for "random" a folder whose
      config.json gives the architecture, or "" for `backbones.tiny`.
    key: of the draw, which is the same on every mesh.
    mesh: where the weights go, cut as `sharding.shardings` says; each process
      reads its devices' share. None: JAX's first device.
    dtype: float32 for masters, bfloat16 for a frozen copy.
    vocab_multiple: tables get rows of zeros up to a multiple of it.

  Returns:
    The architecture, and weights with layers stacked on axis 0.

  Raises:
    ValueError: as `check`.
  """
  if source == "random":
    backbone = check(source, path, vocab_multiple)
    draw = jax.jit(
      _draw, static_argnums=(0, 1), out_shardings=_places(backbone, mesh)
    )
    return backbone, draw(backbone, jnp.dtype(dtype), key)
  store = _open(source, path)
  backbone = dataclasses.replace(store.backbone, vocab_multiple=vocab_multiple)
  return backbone, _assemble(store, backbone, mesh, jnp.dtype(dtype))


def check(
  source: str, path: str | Path, vocab_multiple: int = VOCAB_MULTIPLE
) -> Backbone:
  """Validates headers, names and shapes without reading a weight.

  Returns:
    The architecture, as `load` returns it.

  Raises:
    ValueError: the source is unknown; the architecture is not implemented; or,
      in one error, files that are missing, truncated or corrupt, and tensors
      that are missing, unexpected, mis-shaped, no floats or in two files.
  """
  if source != "random":
    backbone = _open(source, path).backbone
  elif path:
    backbone = backbones.from_hf_config(read_json(Path(path) / "config.json"))
  else:
    backbone = backbones.tiny()
  return dataclasses.replace(backbone, vocab_multiple=vocab_multiple)


def tensors(backbone: Backbone, naming: int = HF) -> dict[str, Place]:
  """Returns what lies outside for a backbone: all tensors by name.

  In the order of the tree's leaves, and of layers within one.

  Args:
    backbone: the architecture.
    naming: `HF` or `GGUF`.
  """
  places = {}
  leaves = jax.tree_util.tree_leaves_with_path(model.abstract_params(backbone))
  for path, leaf in leaves:
    name, shape = _name(path), leaf.shape
    *_, module, kind = name.split("/")
    suffix = ".bias" if kind == "bias" else ".weight"
    if kind == "embedding":
      shape = (backbone.vocab_size, *shape[1:])
    if not name.startswith("layers/"):
      places[_ENDS[module][naming] + suffix] = Place(name, None, shape)
      continue
    shape = shape[:0:-1] if kind == "kernel" else shape[1:]
    stem = f"{_BLOCK[naming]}.{_LAYER[module][naming]}{suffix}"
    for layer in range(backbone.layers):
      places[stem.format(layer)] = Place(name, layer, shape)
  return places


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
  """Shows a bar over bytes on a terminal, and nothing elsewhere.

  Args:
    what: is done.
    total: bytes of all of it.

  Yields:
    What to call with the bytes that are done since the last call.
  """
  console = rich.console.Console(stderr=True)
  with rich.progress.Progress(
    rich.progress.TextColumn("{task.description}"),
    rich.progress.BarColumn(bar_width=24),
    rich.progress.DownloadColumn(),
    rich.progress.TimeRemainingColumn(),
    console=console,
    transient=True,
    disable=not console.is_terminal,
  ) as bar:
    yield functools.partial(bar.advance, bar.add_task(what, total=total))


def _open(source: str, path: str | Path) -> _Store:
  if source not in ("hf", "gguf"):
    raise ValueError(
      f"Unknown policy.source {source!r}. Choices: {', '.join(SOURCES)}."
    )
  store = _open_hf(Path(path)) if source == "hf" else _open_gguf(Path(path))
  _check_tensors(store)
  return store


def _open_hf(folder: Path) -> _Store:
  if not folder.is_dir():
    raise ValueError(
      f"policy.path {str(folder)!r} is not a folder. With policy.source='hf' "
      "it is a folder with config.json, tokenizer.json and *.safetensors."
    )
  backbone = backbones.from_hf_config(read_json(folder / "config.json"))
  owners = _owners(folder, backbone)
  faults: dict[str, list[str]] = collections.defaultdict(list)
  handles, shapes, opened = {}, {}, set()
  for file in sorted(set(owners.values())):
    path = folder / file
    if not path.is_file():
      faults["lacks"].append(file)
      continue
    try:
      handle = safe_open(path, framework="numpy")
    except SafetensorError as error:
      faults["truncated or corrupt"].append(f"{path} ({error})")
      continue
    opened.add(file)
    for name in handle.keys():
      header = handle.get_slice(name)
      if name in handles:
        faults["in two files"].append(name)
      if header.get_dtype() not in _FLOATS:
        faults[f"not {', '.join(_FLOATS)}"].append(
          f"{name} is {header.get_dtype()}"
        )
      handles[name], shapes[name] = handle, tuple(header.get_shape())
  return _Store(
    str(folder),
    HF,
    backbone,
    shapes,
    lambda name, part: handles[name].get_slice(name)[part],
    faults,
    {name for name, file in owners.items() if file not in opened},
  )


def _owners(folder: Path, backbone: Backbone) -> dict[str, str]:
  """Returns each tensor's file; a single file goes before an index.

  As in transformers, which looks for `model.safetensors` first.
  """
  single, index = "model.safetensors", "model.safetensors.index.json"
  if (folder / single).is_file() or not (folder / index).exists():
    return dict.fromkeys(tensors(backbone), single)
  owners = read_json(folder / index).get("weight_map")
  if not owners or not isinstance(owners, dict):
    raise ValueError(f"{folder} lacks weights: {index} has no weight_map.")
  odd = [
    f"{name}: {file!r}"
    for name, file in owners.items()
    if not isinstance(file, str)
  ]
  if odd:
    raise ValueError(
      f"{folder / index}: weight_map must name a file for each tensor; "
      f"it has {_some(odd)}."
    )
  return owners


def _open_gguf(path: Path) -> _Store:
  file = read_gguf(path)
  tied = "output.weight" not in file.tensors
  backbone = backbones.from_gguf(file.metadata, tied=tied)

  # Blocks of numbers cannot be cut: devices share what is dequantized. They ask
  # for all layers of a leaf in turn.
  @functools.lru_cache(maxsize=backbone.layers)
  def whole(name: str) -> np.ndarray:
    tensor = file.tensors[name]
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    heads = {"attn_q": backbone.heads, "attn_k": backbone.kv_heads}
    count = heads.get(name.split(".")[-2])
    if count is None:
      return values
    # llama.cpp rotates neighbours (2i, 2i + 1), the model pairs (i, i + H / 2).
    rows = values.reshape(count, backbone.head_dim // 2, 2, -1)
    return rows.swapaxes(1, 2).reshape(values.shape)

  shapes = {
    name: tuple(int(size) for size in reversed(tensor.shape))
    for name, tensor in file.tensors.items()
  }
  return _Store(
    str(path), GGUF, backbone, shapes, lambda name, part: whole(name)[part]
  )


@dataclass(frozen=True)
class GgufFile:
  """What a GGUF file holds; tensors stay on the disk until they are read."""

  metadata: Mapping[str, Any]
  tensors: Mapping[str, gguf.ReaderTensor]


def read_gguf(path: str | Path) -> GgufFile:
  """Opens a GGUF file; the last one is remembered, for parsing takes seconds.

  Raises:
    ValueError: there is no such file, or it is truncated or corrupt.
  """
  path = Path(path)
  if not path.is_file():
    raise ValueError(
      f"policy.path {str(path)!r} is not a file. With policy.source='gguf' it "
      "is a .gguf file."
    )
  return _parse_gguf(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _parse_gguf(path: Path, changed: int) -> GgufFile:
  try:
    reader = gguf.GGUFReader(path)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
  # What the reader runs into, depending on where the bytes end.
  except (ValueError, IndexError, KeyError, OverflowError) as error:
    raise ValueError(
      f"{path} is not a GGUF file, or is truncated or corrupt ({error}). "
      "Fetch it again."
    ) from error
  return GgufFile(metadata, {tensor.name: tensor for tensor in reader.tensors})


def read_json(path: Path) -> dict[str, Any]:
  """Parses a JSON object.

  Raises:
    ValueError: the file is missing, or holds something else.
  """
  if not path.is_file():
    raise ValueError(f"{path.parent} lacks {path.name}.")
  try:
    value = json.loads(path.read_text("utf-8"))
  except ValueError as error:
    raise ValueError(f"{path} is not JSON: {error}.") from error
  if not isinstance(value, dict):
    raise ValueError(f"{path} holds no JSON object.")
  return value


def _name(path: Any) -> str:
  return jax.tree_util.keystr(path, simple=True, separator="/")


def _check_tensors(store: _Store) -> None:
  """Raises one error that lists all that is not as it should be."""
  expected = {
    name: place.shape
    for name, place in tensors(store.backbone, store.naming).items()
  }
  faults = dict(store.faults)
  faults["missing"] = [
    name
    for name in expected
    if name not in store.shapes and name not in store.lost
  ]
  # A copy of a tied head, and a table that old files carry, say nothing new.
  faults["unexpected"] = [
    name
    for name in store.shapes
    if name not in expected
    and not (store.backbone.tied and name == "lm_head.weight")
    and not name.endswith("rotary_emb.inv_freq")
  ]
  faults["mis-shaped"] = [
    f"{name} is {list(store.shapes[name])}, not {list(shape)}"
    for name, shape in expected.items()
    if name in store.shapes and store.shapes[name] != shape
  ]
  found = [
    f"{kind} ({len(names)}): {_some(names)}"
    for kind, names in faults.items()
    if names
  ]
  if found:
    raise ValueError(
      f"{store.place} does not hold the weights that its configuration "
      f"describes; {'; '.join(found)}. Fetch it again, or correct config.json."
    )


def _some(names: list[str]) -> str:
  """Lists a handful of names."""
  more = [f"and {len(names) - 5} more"] if len(names) > 5 else []
  return ", ".join(names[:5] + more)


def _places(backbone: Backbone, mesh: Mesh | None) -> Any:
  tree = model.abstract_params(backbone)
  if mesh is not None:
    return sharding.shardings(mesh, tree)
  return jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), tree)


def _draw(backbone: Backbone, dtype: np.dtype, key: jax.Array) -> Any:
  drawn = model.init(backbone, key)
  real = jnp.arange(backbone.table_rows)[:, None] < backbone.vocab_size
  for name in {"embed", "head"} & drawn.keys():
    drawn[name] = {"embedding": jnp.where(real, drawn[name]["embedding"], 0)}
  return jax.tree.map(lambda leaf: leaf.astype(dtype), drawn)


_Cut = tuple[tuple[int, int], ...]  # from, to on each axis of a leaf


def _cut(index: tuple[slice, ...], shape: tuple[int, ...]) -> _Cut:
  bounds = (axis.indices(size) for axis, size in zip(index, shape, strict=True))
  return tuple((start, stop) for start, stop, _ in bounds)


def _assemble(
  store: _Store, backbone: Backbone, mesh: Mesh | None, dtype: np.dtype
) -> Any:
  """Reads a leaf at a time: each share once, however many devices hold it."""
  tree, places = model.abstract_params(backbone), _places(backbone, mesh)
  outside: dict[str, list[str]] = {}  # of a leaf, in the order of layers
  for name, place in tensors(backbone, store.naming).items():
    outside.setdefault(place.leaf, []).append(name)

  def held(leaf: jax.ShapeDtypeStruct, place: Sharding) -> int:
    indices = place.addressable_devices_indices_map(leaf.shape).values()
    shares = {_cut(index, leaf.shape) for index in indices}
    share = math.prod(place.shard_shape(leaf.shape))
    return len(shares) * share * dtype.itemsize

  def read(path: Any, leaf: jax.ShapeDtypeStruct, place: Sharding) -> jax.Array:
    name = _name(path)

    @functools.cache
    def share(cut: _Cut) -> np.ndarray:
      values = np.zeros([stop - start for start, stop in cut], dtype)
      stacked = name.startswith("layers/")
      targets = values if stacked else values[None]
      layers = outside[name][slice(*cut[0])] if stacked else outside[name]
      for layer, target in zip(layers, targets, strict=True):
        _fill(target, store, layer, cut[stacked:], name.endswith("/kernel"))
        advance(target.nbytes)
      return values

    return jax.make_array_from_callback(
      leaf.shape, place, lambda index: share(_cut(index, leaf.shape))
    )

  total = sum(jax.tree.leaves(jax.tree.map(held, tree, places)))
  with progress(f"Reading {store.place}", total) as advance:
    return jax.tree_util.tree_map_with_path(read, tree, places)


def _fill(
  target: np.ndarray, store: _Store, name: str, cut: _Cut, transposed: bool
) -> None:
  """Reads a part of a tensor; rows that only our table has stay zero."""
  shape = store.shapes[name]
  part = tuple(
    slice(start, min(stop, size))
    for (start, stop), size in zip(
      cut[::-1] if transposed else cut, shape, strict=True
    )
  )
  if all(axis.start < axis.stop for axis in part):
    values = store.read(name, part)
    values = values.T if transposed else values
    target[: len(values)] = values
