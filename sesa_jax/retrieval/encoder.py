"""Text embeddings: BERT with mean pooling (E5, MiniLM), on the host's CPU.

The forward is a pure function of a dict of arrays, named as in the Hugging Face
file. BERT: Devlin et al., arXiv 1810.04805; E5: Wang et al., arXiv 2212.03533.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
import tokenizers
from jaxtyping import Array, Bool, Float, Int

from sesa_jax.distributed import host_cpu

KINDS = ("query", "passage")

# Rows of a batch, always: XLA gives a row the same bits at one shape only, so
# an embedding must not depend on how many texts came with it.
ROWS = 8
SHORTEST = 16  # tokens of the smallest length bucket; the others double it

_LAYER = {  # tensors of a layer; D is the model's width, F the feed-forward's
  "attention.self.query": "DD",
  "attention.self.key": "DD",
  "attention.self.value": "DD",
  "attention.output.dense": "DD",
  "attention.output.LayerNorm": "D",
  "intermediate.dense": "FD",
  "output.dense": "DF",
  "output.LayerNorm": "D",
}

_CONFIG_KEYS = (
  "hidden_size",
  "intermediate_size",
  "layer_norm_eps",
  "max_position_embeddings",
  "num_attention_heads",
  "num_hidden_layers",
  "type_vocab_size",
  "vocab_size",
)


class BertEncoder:
  """Embeds text by BERT, mean pooling and L2; a `types.Encoder`.

  What it returns for a text is the same, byte for byte, whatever else is in the
  call: a text's length alone picks its bucket and with it every shape.

  Args:
    params: arrays named as in the file; those of the layers stacked on axis 0.
    tokenizer: without padding, truncating at the model's length.
    heads: attention heads.
    epsilon: of the layer norms.
    prefixes: what goes before a text, by kind.
    cache_texts: embeddings kept, by a hash of prefix and text; oldest go first.
  """

  def __init__(
    self,
    params: Mapping[str, np.ndarray | Array],
    tokenizer: tokenizers.Tokenizer,
    *,
    heads: int,
    epsilon: float,
    prefixes: Mapping[str, str],
    cache_texts: int = 65_536,
  ):
    self._params = jax.device_put(dict(params), host_cpu())
    self._tokenizer = tokenizer
    self._forward = functools.partial(embed, heads=heads, epsilon=epsilon)
    self._prefixes = dict(prefixes)
    self._cache: dict[bytes, np.ndarray] = {}
    self._cache_texts = cache_texts

  @property
  def dim(self) -> int:
    """E, the width of an embedding."""
    return self._params["embeddings.LayerNorm.bias"].shape[0]

  def encode(self, texts: Sequence[str], kind: str) -> Float[np.ndarray, "n E"]:
    """Embeds texts, from the cache where they were seen before.

    Args:
      texts: n strings; one longer than the model's length is truncated.
      kind: "query" or "passage", which picks the prefix.

    Returns:
      float32 [n, E], rows of length 1.

    Raises:
      ValueError: an unknown kind.
    """
    check_kind(kind)
    full = [self._prefixes[kind] + text for text in texts]
    keys = [hashlib.sha256(text.encode()).digest() for text in full]
    new = {
      k: t for k, t in zip(keys, full, strict=True) if k not in self._cache
    }
    rows = dict(zip(new, self._embed(list(new.values())), strict=True))
    found = [rows[k] if k in rows else self._cache[k] for k in keys]
    self._cache.update(rows)
    for key in list(self._cache)[
      : max(0, len(self._cache) - self._cache_texts)
    ]:
      del self._cache[key]
    return np.stack(found) if found else np.zeros((0, self.dim), np.float32)

  def _embed(self, texts: list[str]) -> np.ndarray:
    out = np.zeros((len(texts), self.dim), np.float32)
    buckets: dict[int, list[int]] = {}
    encoded = [e.ids for e in self._tokenizer.encode_batch(texts)]
    longest = self._tokenizer.truncation["max_length"]
    for i, ids in enumerate(encoded):
      length = SHORTEST
      while length < len(ids):
        length *= 2
      buckets.setdefault(min(length, longest), []).append(i)
    for length, members in sorted(buckets.items()):
      for start in range(0, len(members), ROWS):
        chunk = members[start : start + ROWS]
        ids = np.zeros((ROWS, length), np.int32)
        mask = np.zeros((ROWS, length), bool)
        for row, i in enumerate(chunk):
          ids[row, : len(encoded[i])] = encoded[i]
          mask[row, : len(encoded[i])] = True
        out[chunk] = self._forward(self._params, ids, mask)[: len(chunk)]
    return out


@functools.partial(jax.jit, static_argnames=("heads", "epsilon"))
def embed(
  params: Mapping[str, Array],
  ids: Int[np.ndarray | Array, "B T"],
  mask: Bool[np.ndarray | Array, "B T"],
  *,
  heads: int,
  epsilon: float,
) -> Float[Array, "B E"]:
  """BERT, then the mean over tokens, then length 1.

  e = m / |m|, m = sum_t mask_t h_t / sum_t mask_t, h the last layer's output.

  Args:
    params: as `load` makes them.
    ids: token ids.
    mask: False at padding.
    heads: attention heads.
    epsilon: of the layer norms.
  """
  normalise = functools.partial(_layer_norm, epsilon=epsilon)
  B, T = ids.shape
  x = (
    params["embeddings.word_embeddings.weight"][ids]
    + params["embeddings.position_embeddings.weight"][:T]
    + params["embeddings.token_type_embeddings.weight"][0]
  )
  x = normalise(params, "embeddings.LayerNorm", x)

  def layer(x, w):
    q, k, v = (
      _dense(w, f"attention.self.{name}", x).reshape(B, T, heads, -1)
      for name in ("query", "key", "value")
    )
    y = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None, None, :])
    y = _dense(w, "attention.output.dense", y.reshape(B, T, -1))
    x = normalise(w, "attention.output.LayerNorm", x + y)
    y = jax.nn.gelu(_dense(w, "intermediate.dense", x), approximate=False)
    y = _dense(w, "output.dense", y)
    return normalise(w, "output.LayerNorm", x + y), None

  stacked = {k: v for k, v in params.items() if not k.startswith("embeddings.")}
  x, _ = jax.lax.scan(layer, x, stacked)
  mean = (x * mask[..., None]).sum(1) / jnp.maximum(mask.sum(1), 1)[:, None]
  return mean / jnp.maximum(jnp.linalg.norm(mean, axis=1, keepdims=True), 1e-12)


def _dense(w, name, x):
  return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def _layer_norm(w, name, x, epsilon):
  x = x - x.mean(-1, keepdims=True)
  x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + epsilon)
  return x * w[f"{name}.weight"] + w[f"{name}.bias"]


def load(
  folder: str | Path, *, query_prefix: str, passage_prefix: str
) -> BertEncoder:
  """Reads an encoder as Hugging Face stores one.

  Args:
    folder: holds `config.json`, `model.safetensors`, `tokenizer.json` and, if
      texts are cut shorter than the model could, `sentence_bert_config.json`.
    query_prefix: put before a question ("query: " for E5, "" for MiniLM).
    passage_prefix: put before a skill or passage ("passage: " for E5).

  Raises:
    ValueError: a file is missing or damaged, or the architecture is another.
  """
  folder = Path(folder)
  for name in ("config.json", "model.safetensors", "tokenizer.json"):
    if not (folder / name).is_file():
      raise ValueError(
        f"The encoder's folder {folder} has no {name}. Fetch the encoder, or "
        "set encoder.path to a folder that holds one."
      )
  config = _read_json(folder / "config.json")
  wanted = dict(
    model_type="bert", hidden_act="gelu", position_embedding_type="absolute"
  )
  for key, value in wanted.items():
    if config.get(key, value) != value:
      raise ValueError(
        f"{folder / 'config.json'}: {key} is {config[key]!r}; only {value!r} "
        "is implemented. Choose a BERT encoder such as E5-base-v2 or MiniLM."
      )
  missing = [key for key in _CONFIG_KEYS if key not in config]
  if missing:
    raise ValueError(
      f"{folder / 'config.json'} lacks {', '.join(missing)}. A BERT encoder's "
      "config.json states them all; fetch it again."
    )
  longest = config["max_position_embeddings"]
  if (folder / "sentence_bert_config.json").is_file():
    cut = _read_json(folder / "sentence_bert_config.json")
    longest = min(longest, cut.get("max_seq_length") or longest)
  # Read as JSON first: a damaged file then is a ValueError that names it.
  text = json.dumps(_read_json(folder / "tokenizer.json"))
  tokenizer = tokenizers.Tokenizer.from_str(text)
  tokenizer.no_padding()
  tokenizer.enable_truncation(longest)
  return BertEncoder(
    _read_params(folder / "model.safetensors", config),
    tokenizer,
    heads=config["num_attention_heads"],
    epsilon=config["layer_norm_eps"],
    prefixes={"query": query_prefix, "passage": passage_prefix},
  )


def _read_params(path: Path, config: Mapping) -> dict[str, np.ndarray]:
  sizes = {"D": config["hidden_size"], "F": config["intermediate_size"]}
  sizes |= {"V": config["vocab_size"], "P": config["max_position_embeddings"]}
  sizes |= {"U": config["type_vocab_size"]}
  try:
    tensors = safetensors.numpy.load_file(path)
  except safetensors.SafetensorError as error:
    raise ValueError(
      f"{path} is not a readable safetensors file ({error}). Fetch it again."
    ) from error

  def read(name: str, axes: str) -> np.ndarray:
    shape = tuple(sizes[axis] for axis in axes)
    if name not in tensors or tensors[name].shape != shape:
      found = tensors[name].shape if name in tensors else "nothing"
      raise ValueError(
        f"{path}: expected {name} of shape {shape}, found {found}. The file "
        "does not belong to the config.json beside it."
      )
    return tensors[name].astype(np.float32)

  params = {}
  for name, axes in {
    "embeddings.word_embeddings.weight": "VD",
    "embeddings.position_embeddings.weight": "PD",
    "embeddings.token_type_embeddings.weight": "UD",
    "embeddings.LayerNorm.weight": "D",
    "embeddings.LayerNorm.bias": "D",
  }.items():
    params[name] = read(name, axes)
  for name, axes in _LAYER.items():
    for part, of in (("weight", axes), ("bias", axes[0])):
      params[f"{name}.{part}"] = np.stack(
        [
          read(f"encoder.layer.{i}.{name}.{part}", of)
          for i in range(config["num_hidden_layers"])
        ]
      )
  return params


class HashEncoder:
  """Signed bag of hashed words, for tiny configs; a `types.Encoder`.

  Words that BM25 leaves out of English are left out here, too: questions and
  skills share them whatever they are about.

  e = v / |v|, v_j = sum over words w with h(w) = j of sign(w). No weights, the
  same on every machine. Weinberger et al., arXiv 0902.2206.

  Args:
    dim: E, the width of an embedding.
  """

  def __init__(self, dim: int):
    if dim < 1:
      raise ValueError(f"An embedding of width {dim}: at least 1 is needed.")
    # Not at the top: importing bm25s takes hold of JAX's devices.
    from bm25s.stopwords import STOPWORDS_EN

    self._dim = dim
    self._left_out = frozenset(STOPWORDS_EN)

  @property
  def dim(self) -> int:
    """E, the width of an embedding."""
    return self._dim

  def encode(self, texts: Sequence[str], kind: str) -> Float[np.ndarray, "n E"]:
    """Embeds texts; both kinds alike. A text without words gives (1, 0, ...).

    Raises:
      ValueError: an unknown kind.
    """
    check_kind(kind)
    out = np.zeros((len(texts), self._dim), np.float32)
    for row, text in zip(out, texts, strict=True):
      for word in re.findall(r"\w+", text.casefold()):
        if word in self._left_out:
          continue
        code = hashlib.blake2b(word.encode(), digest_size=8).digest()
        number = int.from_bytes(code, "little")
        row[(number >> 1) % self._dim] += 1 if number & 1 else -1
      if not row.any():
        row[0] = 1
      row /= np.linalg.norm(row)
    return out


def check_kind(kind: str) -> None:
  """Raises ValueError unless `kind` is one of `KINDS`."""
  if kind not in KINDS:
    raise ValueError(
      f"Unknown kind of text {kind!r}. Choices: {', '.join(KINDS)}."
    )


def _read_json(path: Path) -> dict:
  try:
    return json.loads(path.read_text(encoding="utf-8"))
  except (json.JSONDecodeError, UnicodeDecodeError) as error:
    raise ValueError(
      f"{path} is not readable JSON ({error}). Fetch it again."
    ) from error
