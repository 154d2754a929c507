"""Weights into the tree of `model.init`, from files that others wrote.

Everything about a file that can be wrong is found from its header, before a
number is read; one error lists it all.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from sesa_jax.policy import backbones, model
from sesa_jax.policy.backbones import Backbone

SOURCES = ("hf", "gguf", "random")

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
_HF, _GGUF = 0, 1
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class _Store:
  """Named tensors outside, and the architecture that they should fit."""

  place: str
  naming: int  # _HF or _GGUF
  backbone: Backbone
  shapes: Mapping[str, tuple[int, ...]]  # [out, in] for a kernel
  read: Callable[[str], np.ndarray]


def load(source: str, path: str | Path, key: jax.Array) -> tuple[Backbone, Any]:
  """Loads or, for "random", draws the weights of a policy.

  Args:
    source: one of `SOURCES`.
    path: a folder for "hf", a file for "gguf", unused for "random".
    key: of the draw.

  Returns:
    The architecture, and float32 masters with layers stacked on axis 0.

  Raises:
    ValueError: as `check`.
  """
  backbone = check(source, path)
  if source == "random":
    return backbone, model.init(backbone, key)
  return load_hf(path) if source == "hf" else load_gguf(path)


def check(source: str, path: str | Path) -> Backbone:
  """Validates headers, names and shapes without reading a weight.

  Raises:
    ValueError: the source is unknown; a file is missing, truncated or corrupt;
      the architecture is not implemented; tensors are missing, unexpected or
      mis-shaped, listed in one error.
  """
  if source == "random":
    return backbones.tiny()
  if source == "hf":
    store = _open_hf(Path(path))
  elif source == "gguf":
    store = _open_gguf(Path(path))
  else:
    raise ValueError(
      f"Unknown policy.source {source!r}. Choices: {', '.join(SOURCES)}."
    )
  _check_tensors(store)
  return store.backbone


def load_hf(folder: str | Path) -> tuple[Backbone, Any]:
  """Loads a Hugging Face folder, one or many safetensors files.

  Raises:
    ValueError: as `check`.
  """
  return _assemble(_open_hf(Path(folder)))


def load_gguf(path: str | Path) -> tuple[Backbone, Any]:
  """Loads a GGUF file of the llama architecture, dequantized to float32.

  Raises:
    ValueError: as `check`.
  """
  return _assemble(_open_gguf(Path(path)))


def _open_hf(folder: Path) -> _Store:
  if not folder.is_dir():
    raise ValueError(
      f"policy.path {str(folder)!r} is not a folder. With policy.source='hf' "
      "it is a folder with config.json, tokenizer.json and *.safetensors."
    )
  backbone = backbones.from_hf_config(read_json(folder / "config.json"))
  index = folder / "model.safetensors.index.json"
  if index.exists():
    files = sorted(set(read_json(index).get("weight_map", {}).values()))
  else:
    files = ["model.safetensors"]
  missing = [name for name in files if not (folder / name).is_file()]
  if missing or not files:
    raise ValueError(
      f"{folder} lacks {', '.join(missing) or 'weights: its index is empty'}."
    )
  handles, shapes, kinds = {}, {}, {}
  for name in files:
    try:
      handle = safe_open(folder / name, framework="numpy")
    except SafetensorError as error:
      raise ValueError(
        f"{folder / name} is truncated or corrupt ({error}). Fetch it again."
      ) from error
    for tensor in handle.keys():
      handles[tensor] = handle
      header = handle.get_slice(tensor)
      shapes[tensor] = tuple(header.get_shape())
      kinds[tensor] = header.get_dtype()
  quantized = [f"{n} is {k}" for n, k in kinds.items() if k not in _FLOATS]
  if quantized:
    raise ValueError(
      f"{folder} holds tensors that are not {', '.join(_FLOATS)}: "
      f"{_some(quantized)}."
    )
  return _Store(
    str(folder),
    _HF,
    backbone,
    shapes,
    lambda name: handles[name].get_tensor(name),
  )


def _open_gguf(path: Path) -> _Store:
  file = read_gguf(path)
  tied = "output.weight" not in file.tensors
  backbone = backbones.from_gguf(file.metadata, tied=tied)

  def read(name: str) -> np.ndarray:
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
  return _Store(str(path), _GGUF, backbone, shapes, read)


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


def _names(path: str, layers: int, naming: int) -> list[str]:
  """Outside names of a leaf of the tree, one for each layer that it stacks."""
  *_, module, leaf = path.split("/")
  suffix = ".bias" if leaf == "bias" else ".weight"
  if not path.startswith("layers/"):
    return [_ENDS[module][naming] + suffix]
  stem = f"{_BLOCK[naming]}.{_LAYER[module][naming]}{suffix}"
  return [stem.format(layer) for layer in range(layers)]


def _leaves(backbone: Backbone) -> dict[str, jax.ShapeDtypeStruct]:
  tree = model.abstract_params(backbone)
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def _check_tensors(store: _Store) -> None:
  """Raises one error that lists all tensors that are not as they should be."""
  expected = {}
  for path, leaf in _leaves(store.backbone).items():
    shape = leaf.shape[1:] if path.startswith("layers/") else leaf.shape
    shape = shape[::-1] if path.endswith("/kernel") else shape
    for name in _names(path, store.backbone.layers, store.naming):
      expected[name] = shape
  # A copy of a tied head, and a table that old files carry, say nothing new.
  unexpected = [
    name
    for name in store.shapes
    if name not in expected
    and not (store.backbone.tied and name == "lm_head.weight")
    and not name.endswith("rotary_emb.inv_freq")
  ]
  faults = [
    f"{name} is missing" for name in expected if name not in store.shapes
  ]
  faults += [f"{name} is unexpected" for name in unexpected]
  faults += [
    f"{name} is {list(store.shapes[name])}, not {list(shape)}"
    for name, shape in expected.items()
    if name in store.shapes and store.shapes[name] != shape
  ]
  if faults:
    raise ValueError(
      f"{store.place} does not hold the weights that its configuration "
      f"describes: {_some(faults)}."
    )


def _some(faults: list[str]) -> str:
  """Lists faults in one line that stays readable."""
  more = [f"and {len(faults) - 20} more"] if len(faults) > 20 else []
  return "; ".join(faults[:20] + more)


def _assemble(store: _Store) -> tuple[Backbone, Any]:
  """Reads a leaf of the tree at a time, so that one copy is held, not two."""
  _check_tensors(store)
  params: dict[str, Any] = {}
  for path, leaf in _leaves(store.backbone).items():
    stacked = path.startswith("layers/")
    values = np.empty(leaf.shape, np.float32)
    names = _names(path, store.backbone.layers, store.naming)
    for layer, name in enumerate(names):
      tensor = store.read(name)
      target = values[layer] if stacked else values
      target[...] = tensor.T if path.endswith("/kernel") else tensor
    *parents, last = path.split("/")
    node = functools.reduce(
      lambda at, key: at.setdefault(key, {}), parents, params
    )
    node[last] = jnp.array(values)
  return store.backbone, params
