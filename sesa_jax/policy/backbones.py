"""Architectures: what a Hugging Face `config.json` says about the function.

A field that changes what a model computes is read, or is an error that names
it; one that is unknown here is named in a warning.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from absl import logging


@dataclass(frozen=True)
class LlamaRope:
  """Llama-3's stretching of the slow rotations, for contexts unseen before."""

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_context: int


@dataclass(frozen=True)
class Backbone:
  """One dense decoder: RMSNorm, RoPE, grouped queries, SwiGLU."""

  vocab_size: int  # V
  dim: int  # D
  ffn: int  # F
  layers: int  # L
  heads: int  # N
  kv_heads: int  # K
  head_dim: int  # H, not always D / N
  rope_theta: float
  norm_eps: float
  tied: bool  # the head is the embedding
  qk_norm: bool  # RMSNorm over H of each query and key (Qwen3)
  qkv_bias: bool  # Qwen2
  context: int  # tokens that the weights were trained for
  rope_scaling: LlamaRope | None = None
  vocab_multiple: int = (
    1  # tables are padded to it, so that a mesh can cut them
  )

  @property
  def table_rows(self) -> int:
    """Rows of embedding and head: V, and padding that no id ever names."""
    return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

  def __post_init__(self) -> None:
    """Refuses shapes that the decoder cannot have."""
    if self.heads % self.kv_heads:
      raise ValueError(
        f"{self.heads} query heads do not divide over {self.kv_heads} "
        "key-value heads (num_attention_heads, num_key_value_heads)."
      )
    if self.head_dim < 2 or self.head_dim % 2:
      raise ValueError(f"RoPE needs an even head_dim, got {self.head_dim}.")


# What transformers assumes of a field that a config.json leaves out, and what
# a family has by its code alone.
_COMMON = {
  "num_key_value_heads": None,  # as many as query heads
  "head_dim": None,  # hidden_size / num_attention_heads
  "rms_norm_eps": 1e-6,
  "tie_word_embeddings": False,
  "hidden_act": "silu",
  "rope_theta": 10_000.0,
}
_FAMILIES = {
  "llama": {"max_position_embeddings": 2048},
  "qwen2": {"max_position_embeddings": 32_768, "num_key_value_heads": 32},
  "qwen3": {
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 32,
    "head_dim": 128,
  },
}
# What else is read.
_NEEDED = (
  "vocab_size hidden_size intermediate_size num_hidden_layers "
  "num_attention_heads"
).split()
_READ = (
  "model_type architectures rope_scaling rope_parameters layer_types "
  "original_max_position_embeddings use_sliding_window sliding_window "
  "max_window_layers"
).split()

# What a field that is read must be; null where the rule begins with it.
_COUNT = "a whole number of at least 1"
_SIZE = "a whole number of at least 0"
_REAL = "a finite number above 0"
_BOOL = "true or false"
_NAMES = "a list of strings"
_SET = "an object"
_KEPT: dict[str, Callable[[Any], bool]] = {
  _COUNT: lambda value: type(value) is int and value >= 1,
  _SIZE: lambda value: type(value) is int and value >= 0,
  _REAL: lambda value: (
    type(value) in (int, float) and 0 < value <= sys.float_info.max
  ),
  _BOOL: lambda value: isinstance(value, bool),
  _NAMES: lambda value: (
    isinstance(value, list) and all(isinstance(name, str) for name in value)
  ),
  _SET: lambda value: isinstance(value, Mapping),
}
_NULL = "null or "
_RULES = dict.fromkeys((*_NEEDED, "max_position_embeddings"), _COUNT) | {
  "rms_norm_eps": _REAL,
  "rope_theta": _REAL,
  "tie_word_embeddings": _BOOL,
  "num_key_value_heads": _NULL + _COUNT,
  "head_dim": _NULL + _COUNT,
  "original_max_position_embeddings": _NULL + _COUNT,
  "use_sliding_window": _NULL + _BOOL,
  "sliding_window": _NULL + _SIZE,
  "max_window_layers": _NULL + _SIZE,
  "layer_types": _NULL + _NAMES,
  "architectures": _NULL + _NAMES,
  "rope_scaling": _NULL + _SET,
  "rope_parameters": _NULL + _SET,
}
_LLAMA_RULES = {  # in the order of LlamaRope
  "factor": _REAL,
  "low_freq_factor": _REAL,
  "high_freq_factor": _REAL,
  "original_max_position_embeddings": _COUNT,
}
_ROPE_READ = {
  *("rope_type", "type", "rope_theta", "partial_rotary_factor"),
  *_LLAMA_RULES,
}

# Fields that change the function, with the values that leave it as it is here.
_OFF = (None, False, 0, 0.0)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
  "hidden_act": ("silu", "swish"),
  "attention_bias": _OFF,
  "mlp_bias": _OFF,
  "attention_dropout": _OFF,
  "partial_rotary_factor": (None, 1.0),
  "rope_interleaved": _OFF,
  "no_rope_layers": (None, []),
  "use_mrope": _OFF,
  "is_encoder_decoder": _OFF,
  "auto_map": (None, {}),  # code of its own
  "quantization_config": (None,),
  "num_experts": _OFF,
  "num_local_experts": _OFF,
  "attn_logit_softcapping": _OFF,
  "final_logit_softcapping": _OFF,
  "attention_multiplier": (None,),
  "embedding_multiplier": (None, 1.0),
  "residual_multiplier": (None, 1.0),
  "logits_scaling": (None, 1.0),
  "logit_scale": (None, 1.0),
}
_NEUTRAL |= dict.fromkeys(
  (
    # Experts.
    "n_routed_experts n_shared_experts num_experts_per_tok num_shared_experts "
    "moe_intermediate_size shared_expert_intermediate_size moe_layers "
    "first_k_dense_replace "
    # Queries, keys and values.
    "clip_qkv use_qk_norm qk_layernorm attention_sinks attention_chunk_size "
    "attn_temperature_tuning kv_lora_rank q_lora_rank cross_attention_layers "
    "use_alibi alibi rope_local_base_freq no_rope_layer_interval "
    "sliding_window_pattern query_pre_attn_scalar "
    # Scales, biases and the order of a block.
    "attn_logit_softcap final_logit_softcap scale_depth dim_model_base "
    "use_bias bias lm_head_bias attention_out_bias "
    "parallel_attn use_parallel_residual use_post_norm "
    "sandwich_norm"
  ).split(),
  _OFF,
)
_NEUTRAL |= dict.fromkeys(
  (
    "scale_emb embedding_scale lm_head_multiplier residual_scale "
    "logits_scale output_multiplier_scale key_multiplier"
  ).split(),
  (None, 1.0),
)
# Fields that files carry and that leave the function as it is.
_HARMLESS = frozenset(
  (
    "_name_or_path _attn_implementation_autoset transformers_version "
    "torch_dtype dtype use_cache initializer_range bos_token_id eos_token_id "
    "pad_token_id pretraining_tp is_llama_config chunk_size_feed_forward "
    "output_attentions output_hidden_states return_dict id2label label2id "
    "problem_type transformers.js_config"
  ).split()
)


def from_hf_config(config: Mapping[str, Any]) -> Backbone:
  """Reads the architecture from a parsed `config.json`.

  Args:
    config: of type llama, qwen2 or qwen3, as transformers 4 or 5 write it.

  Raises:
    ValueError: a field is missing, is of the wrong kind, or asks for what is
      not implemented.
  """
  family = config.get("model_type")
  if not isinstance(family, str) or family not in _FAMILIES:
    raise ValueError(
      f"config.json: model_type is {family!r}; implemented are "
      f"{', '.join(_FAMILIES)}."
    )
  missing = [name for name in _NEEDED if config.get(name) is None]
  if missing:
    raise ValueError(f"config.json lacks {', '.join(missing)}.")
  _check_values(config, _RULES)
  for name in config.get("architectures") or ():
    if not name.endswith("ForCausalLM"):
      raise ValueError(
        f"config.json: architectures names {name!r}; a policy needs a "
        "...ForCausalLM."
      )
  rope = _rope_fields(config)
  values = _COMMON | _FAMILIES[family] | dict(config) | rope
  for name, neutral in _NEUTRAL.items():
    if name in values and values[name] not in neutral:
      raise ValueError(
        f"config.json: {name} = {values[name]!r} is not implemented; it must "
        f"be {' or '.join(repr(value) for value in neutral)}."
      )
  _check_window(values)
  known = {*_COMMON, *_FAMILIES[family], *_NEEDED, *_READ, *_NEUTRAL}
  unknown = sorted(config.keys() - known - _HARMLESS)
  unknown += [
    f"{place}.{name}"
    for place in ("rope_scaling", "rope_parameters")
    for name in (config.get(place) or {})
    if name not in _ROPE_READ
  ]
  if unknown:
    logging.warning(
      "config.json: fields unknown here, taken to change nothing: %s",
      ", ".join(unknown),
    )
  heads = values["num_attention_heads"]
  return Backbone(
    vocab_size=values["vocab_size"],
    dim=values["hidden_size"],
    ffn=values["intermediate_size"],
    layers=values["num_hidden_layers"],
    heads=heads,
    kv_heads=values["num_key_value_heads"] or heads,
    head_dim=values["head_dim"] or values["hidden_size"] // heads,
    rope_theta=float(values["rope_theta"]),
    norm_eps=values["rms_norm_eps"],
    tied=values["tie_word_embeddings"],
    qk_norm=family == "qwen3",
    qkv_bias=family == "qwen2",
    context=values["max_position_embeddings"],
    rope_scaling=rope["rope_scaling"],
  )


def to_hf_config(backbone: Backbone) -> dict[str, Any]:
  """Returns the `config.json` of an architecture: `from_hf_config` undone.

  In the layout of the published files, which transformers 4 and 5 read. Padding
  of the vocabulary is ours alone and left out.

  Raises:
    ValueError: no family has this architecture.
  """
  if backbone.qk_norm and backbone.qkv_bias:
    raise ValueError(
      "No family has both normed queries (qwen3) and biased ones (qwen2): "
      "there is no config.json for this backbone."
    )
  family = "qwen3" if backbone.qk_norm else "llama"
  family = "qwen2" if backbone.qkv_bias else family
  scaling = backbone.rope_scaling and {
    "rope_type": "llama3",
    "factor": backbone.rope_scaling.factor,
    "low_freq_factor": backbone.rope_scaling.low_freq_factor,
    "high_freq_factor": backbone.rope_scaling.high_freq_factor,
    "original_max_position_embeddings": backbone.rope_scaling.original_context,
  }
  return {
    "architectures": [f"{family.capitalize()}ForCausalLM"],
    "model_type": family,
    "vocab_size": backbone.vocab_size,
    "hidden_size": backbone.dim,
    "intermediate_size": backbone.ffn,
    "num_hidden_layers": backbone.layers,
    "num_attention_heads": backbone.heads,
    "num_key_value_heads": backbone.kv_heads,
    "head_dim": backbone.head_dim,
    "hidden_act": "silu",
    "rms_norm_eps": backbone.norm_eps,
    "rope_theta": backbone.rope_theta,
    "rope_scaling": scaling,
    "tie_word_embeddings": backbone.tied,
    "max_position_embeddings": backbone.context,
  }


def published(name: str) -> Backbone:
  """Returns a published architecture, whose weights need not be here.

  Facts of the `config.json` beside the weights on the model hub, under the hub
  names of `architectures.json`, cut to the fields that say what is computed.

  Args:
    name: as the backbone's config is called, such as "qwen3_4b".

  Raises:
    ValueError: the name is unknown; lists those that are known.
  """
  file = Path(__file__).with_name("architectures.json")
  known = json.loads(file.read_text("utf-8"))
  if name not in known:
    raise ValueError(f"Unknown backbone {name!r}. Choices: {', '.join(known)}.")
  return from_hf_config(known[name]["config"])


def tiny(vocab_size: int = 512) -> Backbone:
  """A backbone for tests: a forward pass costs nothing."""
  return Backbone(
    vocab_size=vocab_size,
    dim=64,
    ffn=128,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    rope_theta=10_000.0,
    norm_eps=1e-5,
    tied=True,
    qk_norm=False,
    qkv_bias=False,
    context=4096,
  )


def _check_values(
  fields: Mapping[str, Any], rules: Mapping[str, str], place: str = ""
) -> None:
  """Raises at the first field that is there and breaks its rule."""
  for name, rule in rules.items():
    value = fields.get(name)
    if name not in fields or (value is None and rule.startswith(_NULL)):
      continue
    if not _KEPT[rule.removeprefix(_NULL)](value):
      raise ValueError(
        f"config.json: {place}{name} = {value!r} must be {rule}."
      )


def _rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
  """Reads RoPE of transformers 4 (rope_scaling) and 5 (rope_parameters)."""
  place = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
  fields = config.get(place) or {}
  nested = [n for n, value in fields.items() if isinstance(value, Mapping)]
  if nested:
    raise ValueError(
      f"config.json: RoPE of their own for {', '.join(nested)} is not "
      "implemented; rope_parameters must be one set for all layers."
    )
  kind = fields.get("rope_type", fields.get("type", "default"))
  found: dict[str, Any] = {"rope_scaling": None}
  if "rope_theta" in fields:
    _check_values(fields, {"rope_theta": _REAL}, f"{place}.")
    found["rope_theta"] = fields["rope_theta"]
  if "partial_rotary_factor" in fields:
    found["partial_rotary_factor"] = fields["partial_rotary_factor"]
  if kind == "llama3":
    context = "original_max_position_embeddings"
    # Where it stands outside as well, transformers goes by that one.
    if config.get(context) is not None:
      fields = {**fields, context: config[context]}
    missing = [name for name in _LLAMA_RULES if name not in fields]
    if missing:
      raise ValueError(
        f"config.json: rope scaling 'llama3' lacks {', '.join(missing)}."
      )
    _check_values(fields, _LLAMA_RULES, f"{place}.")
    low, high = fields["low_freq_factor"], fields["high_freq_factor"]
    if low >= high:
      raise ValueError(
        f"config.json: {place}.low_freq_factor = {low!r} must be below "
        f"high_freq_factor = {high!r}."
      )
    found["rope_scaling"] = LlamaRope(*(fields[name] for name in _LLAMA_RULES))
  elif kind != "default":
    raise ValueError(
      f"config.json: rope scaling {kind!r} is not implemented; implemented "
      "are 'default' and 'llama3'."
    )
  return found


def _check_window(values: Mapping[str, Any]) -> None:
  """Raises if any layer attends to a window only."""
  kinds = set(values.get("layer_types") or ()) - {"full_attention"}
  if kinds:
    raise ValueError(
      f"config.json: layer_types holds {', '.join(sorted(kinds))}; only "
      "full_attention is implemented."
    )
  # Qwen's files carry a window that is off, and llama's code knows none.
  first = values.get("max_window_layers")
  if values.get("use_sliding_window") and (
    first is None or first < values.get("num_hidden_layers", 0)
  ):
    raise ValueError(
      f"config.json: sliding_window = {values.get('sliding_window')!r} in use "
      f"from layer {first} is not implemented; set use_sliding_window to false "
      "if the context stays inside the window."
    )


def from_gguf(metadata: Mapping[str, Any], *, tied: bool) -> Backbone:
  """Reads the architecture from a GGUF file's metadata.

  Args:
    metadata: values by key, `general.architecture` and so on.
    tied: the file holds no `output.weight`.

  Raises:
    ValueError: a key is missing, or asks for what is not implemented.
  """
  kind = metadata.get("general.architecture")
  if kind != "llama":
    raise ValueError(
      f"GGUF: general.architecture is {kind!r}; only 'llama' is implemented."
    )
  scaling = metadata.get("llama.rope.scaling.type", "none")
  if scaling != "none":
    raise ValueError(f"GGUF: rope scaling {scaling!r} is not implemented.")
  needed = (
    "vocab_size embedding_length feed_forward_length block_count "
    "attention.head_count attention.head_count_kv context_length "
    "attention.layer_norm_rms_epsilon"
  ).split()
  missing = [name for name in needed if f"llama.{name}" not in metadata]
  if missing:
    raise ValueError(
      f"GGUF: the metadata lacks llama.{', llama.'.join(missing)}."
    )
  vocab, dim, ffn, layers, heads, kv_heads, context, eps = (
    metadata[f"llama.{name}"] for name in needed
  )
  head_dim = metadata.get("llama.attention.key_length", dim // heads)
  rotated = metadata.get("llama.rope.dimension_count", head_dim)
  if rotated != head_dim:
    raise ValueError(
      f"GGUF: RoPE over {rotated} of {head_dim} dimensions is not implemented."
    )
  return Backbone(
    vocab_size=vocab,
    dim=dim,
    ffn=ffn,
    layers=layers,
    heads=heads,
    kv_heads=kv_heads,
    head_dim=head_dim,
    rope_theta=float(metadata.get("llama.rope.freq_base", 10_000.0)),
    # Stored as float32: 1e-5 comes back as 9.99999975e-06.
    norm_eps=float(f"{eps:.6g}"),
    tied=tied,
    qk_norm=False,
    qkv_bias=False,
    context=context,
  )
