import dataclasses
import json
import math
import re
import tomllib
from pathlib import Path

import jax
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from sesa_jax.policy import backbones, model

ROOT = Path(__file__).parents[1]

# As published beside the weights, cut to what matters and some of what does
# not; the parameter counts are those of the model cards' safetensors headers.
LLAMA_3_1_8B = {
  "architectures": ["LlamaForCausalLM"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "bos_token_id": 128000,
  "hidden_act": "silu",
  "hidden_size": 4096,
  "intermediate_size": 14336,
  "max_position_embeddings": 131072,
  "mlp_bias": False,
  "model_type": "llama",
  "num_attention_heads": 32,
  "num_hidden_layers": 32,
  "num_key_value_heads": 8,
  "pretraining_tp": 1,
  "rms_norm_eps": 1e-05,
  "rope_scaling": {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
  },
  "rope_theta": 500000.0,
  "tie_word_embeddings": False,
  "torch_dtype": "bfloat16",
  "vocab_size": 128256,
}
QWEN2_5_7B = {
  "architectures": ["Qwen2ForCausalLM"],
  "hidden_act": "silu",
  "hidden_size": 3584,
  "intermediate_size": 18944,
  "max_position_embeddings": 131072,
  "max_window_layers": 28,
  "model_type": "qwen2",
  "num_attention_heads": 28,
  "num_hidden_layers": 28,
  "num_key_value_heads": 4,
  "rms_norm_eps": 1e-06,
  "rope_theta": 1000000.0,
  "sliding_window": 131072,
  "tie_word_embeddings": False,
  "use_sliding_window": False,
  "vocab_size": 152064,
}
QWEN3_0_6B = {
  "architectures": ["Qwen3ForCausalLM"],
  "attention_bias": False,
  "head_dim": 128,
  "hidden_act": "silu",
  "hidden_size": 1024,
  "intermediate_size": 3072,
  "max_position_embeddings": 40960,
  "max_window_layers": 28,
  "model_type": "qwen3",
  "num_attention_heads": 16,
  "num_hidden_layers": 28,
  "num_key_value_heads": 8,
  "rms_norm_eps": 1e-06,
  "rope_scaling": None,
  "rope_theta": 1000000,
  "sliding_window": None,
  "tie_word_embeddings": True,
  "use_sliding_window": False,
  "vocab_size": 151936,
}


# Of the model cards: layers, D, F, N, K, V, tied, theta, context, and the
# parameters, where a tied head counts once. H is 128 in all but the last.
PUBLISHED = {
  "qwen3_0_6b": (28, 1024, 3072, 16, 8, 151936, True, 1e6, 40960, 596049920),
  "qwen3_1_7b": (28, 2048, 6144, 16, 8, 151936, True, 1e6, 40960, 1720574976),
  "qwen3_4b": (36, 2560, 9728, 32, 8, 151936, True, 1e6, 40960, 4022468096),
  "qwen3_4b_instruct": (
    *(36, 2560, 9728, 32, 8, 151936, True, 5e6, 262144, 4022468096),
  ),
  "qwen3_8b": (36, 4096, 12288, 32, 8, 151936, False, 1e6, 40960, 8190735360),
  "qwen2_5_7b": (
    *(28, 3584, 18944, 28, 4, 152064, False, 1e6, 131072, 7615616512),
  ),
  "qwen2_5_7b_instruct": (
    *(28, 3584, 18944, 28, 4, 152064, False, 1e6, 32768, 7615616512),
  ),
  "search_r1_7b": (
    *(28, 3584, 18944, 28, 4, 152064, False, 1e6, 131072, 7615616512),
  ),
  "llama3_1_8b": (
    *(32, 4096, 14336, 32, 8, 128256, False, 5e5, 131072, 8030261248),
  ),
  "smollm2_135m": (30, 576, 1536, 9, 3, 49152, True, 1e5, 8192, 134515008),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_architectures(name):
  backbone = backbones.published(name)
  tree = model.abstract_params(backbone)
  parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
  assert PUBLISHED[name] == (
    *(backbone.layers, backbone.dim, backbone.ffn),
    *(backbone.heads, backbone.kv_heads, backbone.vocab_size, backbone.tied),
    *(backbone.rope_theta, backbone.context, parameters),
  )
  assert backbone.head_dim == (64 if name == "smollm2_135m" else 128)
  assert backbone.norm_eps == (1e-6 if "qwen" in name or "r1" in name else 1e-5)
  assert backbone.qk_norm == ("qwen3" in name)
  assert backbone.qkv_bias == ("qwen2" in name or "r1" in name)
  assert (backbone.rope_scaling is not None) == (name == "llama3_1_8b")
  # Nothing is padded by a multiple that lets every mesh cut the tables.
  assert backbone.vocab_size % 128 == 0


def test_published_architectures_are_those_of_configs_and_assets():
  file = ROOT / "sesa_jax" / "policy" / "architectures.json"
  known = json.loads(file.read_text())
  assert known.keys() == PUBLISHED.keys()
  assert all((ROOT / "configs" / f"{name}.py").is_file() for name in known)
  assets = tomllib.loads((ROOT / "third_party" / "assets.toml").read_text())
  for name, asset in assets.items():
    if asset["what"].startswith("backbone"):
      assert known[name.replace("-", "_")]["hub"] == asset["package"]


def test_an_unknown_architecture_lists_those_that_are_known():
  with pytest.raises(
    ValueError, match=r"'qwen3_5b'. Choices: qwen3_0_6b, .*8b"
  ):
    backbones.published("qwen3_5b")


@pytest.mark.parametrize(
  ("name", "config"),
  [
    ("llama3_1_8b", LLAMA_3_1_8B),
    ("qwen2_5_7b", QWEN2_5_7B),
    ("qwen3_0_6b", QWEN3_0_6B),
  ],
)
def test_the_published_files_are_read_alike(name, config):
  assert backbones.published(name) == backbones.from_hf_config(config)


def test_fields_are_read():
  backbone = backbones.from_hf_config(LLAMA_3_1_8B)
  assert dataclasses.asdict(backbone) == {
    "vocab_size": 128256,
    "dim": 4096,
    "ffn": 14336,
    "layers": 32,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "rope_theta": 500000.0,
    "norm_eps": 1e-5,
    "tied": False,
    "qk_norm": False,
    "qkv_bias": False,
    "context": 131072,
    "vocab_multiple": 1,
    "rope_scaling": {
      "factor": 8.0,
      "low_freq_factor": 1.0,
      "high_freq_factor": 4.0,
      "original_context": 8192,
    },
  }


def test_transformers_5_spelling_of_rope_is_read():
  new = dict(QWEN3_0_6B)
  del new["rope_theta"], new["rope_scaling"]
  new["rope_parameters"] = {"rope_theta": 1000000, "rope_type": "default"}
  new["layer_types"] = ["full_attention"] * 28
  assert backbones.from_hf_config(new) == backbones.from_hf_config(QWEN3_0_6B)


@pytest.mark.parametrize(
  ("base", "change", "named"),
  [
    (LLAMA_3_1_8B, {"model_type": "mistral"}, "model_type"),
    (LLAMA_3_1_8B, {"hidden_act": "gelu"}, "hidden_act"),
    (LLAMA_3_1_8B, {"attention_bias": True}, "attention_bias"),
    (QWEN3_0_6B, {"attention_bias": True}, "attention_bias"),
    (LLAMA_3_1_8B, {"mlp_bias": True}, "mlp_bias"),
    (LLAMA_3_1_8B, {"attention_dropout": 0.1}, "attention_dropout"),
    (LLAMA_3_1_8B, {"quantization_config": {"bits": 4}}, "quantization_config"),
    (LLAMA_3_1_8B, {"rope_scaling": {"type": "yarn", "factor": 4}}, "yarn"),
    (LLAMA_3_1_8B, {"rope_scaling": {"rope_type": "llama3"}}, "lacks factor"),
    (LLAMA_3_1_8B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    (
      QWEN3_0_6B,
      {"rope_parameters": {"partial_rotary_factor": 0.5}},
      "partial_rotary_factor",
    ),
    (
      QWEN2_5_7B,
      {"use_sliding_window": True, "max_window_layers": 20},
      "sliding_window",
    ),
    (
      QWEN3_0_6B,
      {"layer_types": ["full_attention", "sliding_attention"]},
      "sliding_attention",
    ),
    (QWEN3_0_6B, {"num_experts": 8}, "num_experts"),
    (
      LLAMA_3_1_8B,
      {"architectures": ["LlamaForSequenceClassification"]},
      "architectures",
    ),
    (QWEN2_5_7B, {"auto_map": {"AutoModel": "mine.Model"}}, "auto_map"),
    (QWEN2_5_7B, {"use_mrope": True}, "use_mrope"),
    (
      QWEN3_0_6B,
      {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
      "full_attention",
    ),
    (LLAMA_3_1_8B, {"hidden_size": None}, "hidden_size"),
    (LLAMA_3_1_8B, {"num_key_value_heads": 5}, "num_key_value_heads"),
    (LLAMA_3_1_8B, {"n_routed_experts": 8}, "n_routed_experts = 8"),
    (LLAMA_3_1_8B, {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
    (LLAMA_3_1_8B, {"attention_multiplier": 0.1}, "attention_multiplier = 0.1"),
    (LLAMA_3_1_8B, {"scale_emb": 12}, "scale_emb = 12"),
    (LLAMA_3_1_8B, {"logit_scale": 0.0625}, "logit_scale = 0.0625"),
  ],
)
def test_a_field_that_is_not_implemented_is_named(base, change, named):
  with pytest.raises(ValueError, match=named):
    backbones.from_hf_config(base | change)


COUNT = "must be a whole number of at least 1."
REAL = "must be a finite number above 0."


def scaling(**changes):
  return {"rope_scaling": LLAMA_3_1_8B["rope_scaling"] | changes}


@pytest.mark.parametrize(
  ("change", "says"),
  [
    ({"num_hidden_layers": "2"}, f"num_hidden_layers = '2' {COUNT}"),
    ({"num_hidden_layers": 2.0}, f"num_hidden_layers = 2.0 {COUNT}"),
    ({"num_hidden_layers": -1}, f"num_hidden_layers = -1 {COUNT}"),
    ({"num_hidden_layers": True}, f"num_hidden_layers = True {COUNT}"),
    ({"vocab_size": "9"}, f"vocab_size = '9' {COUNT}"),
    ({"num_attention_heads": 0}, f"num_attention_heads = 0 {COUNT}"),
    ({"num_key_value_heads": "8"}, "num_key_value_heads = '8' must be null or"),
    ({"head_dim": 0}, "head_dim = 0 must be null or"),
    ({"max_position_embeddings": None}, f"embeddings = None {COUNT}"),
    ({"rms_norm_eps": "1e-6"}, f"rms_norm_eps = '1e-6' {REAL}"),
    ({"rms_norm_eps": None}, f"rms_norm_eps = None {REAL}"),
    ({"rope_theta": None}, f"rope_theta = None {REAL}"),
    ({"rope_theta": math.nan}, f"rope_theta = nan {REAL}"),
    ({"rope_theta": math.inf}, f"rope_theta = inf {REAL}"),
    ({"rope_theta": 10**309}, f"0 {REAL}"),
    ({"tie_word_embeddings": "false"}, "= 'false' must be true or false."),
    ({"architectures": [1]}, "= [1] must be null or a list of strings."),
    ({"model_type": []}, "model_type is []"),
    ({"layer_types": "full"}, "layer_types = 'full' must be null or"),
    ({"use_sliding_window": "no"}, "use_sliding_window = 'no' must be null or"),
    ({"max_window_layers": "2"}, "max_window_layers = '2' must be null or"),
    ({"rope_scaling": "yarn"}, "rope_scaling = 'yarn' must be null or an obj"),
    ({"rope_scaling": []}, "rope_scaling = [] must be null or an object."),
    ({"rope_parameters": [1]}, "rope_parameters = [1] must be null or an obj"),
    (scaling(rope_theta=None), f"rope_scaling.rope_theta = None {REAL}"),
    (scaling(factor="8"), f"rope_scaling.factor = '8' {REAL}"),
    (scaling(low_freq_factor=0), f"low_freq_factor = 0 {REAL}"),
    (scaling(original_max_position_embeddings=0), f"embeddings = 0 {COUNT}"),
    (scaling(high_freq_factor=1.0), "1.0 must be below high_freq_factor = 1.0"),
  ],
)
def test_a_value_of_the_wrong_kind_is_named(change, says):
  with pytest.raises(ValueError, match=re.escape(says)) as error:
    backbones.from_hf_config(LLAMA_3_1_8B | change)
  assert "\n" not in str(error.value)


def test_heads_of_no_width_are_an_error():
  with pytest.raises(ValueError, match="even head_dim, got 0"):
    backbones.from_hf_config(LLAMA_3_1_8B | {"hidden_size": 16})


def test_a_window_that_starts_after_the_last_layer_is_not_in_use():
  backbones.from_hf_config(
    QWEN2_5_7B | {"use_sliding_window": True, "max_window_layers": 28}
  )


def test_an_unknown_field_is_said(caplog):
  rope = {"rope_type": "default", "twist": 2}
  odd = QWEN3_0_6B | {"swirl": 2, "use_cache": True, "rope_scaling": rope}
  with caplog.at_level("WARNING", logger="absl"):
    assert backbones.from_hf_config(odd) == backbones.published("qwen3_0_6b")
  assert "change nothing: swirl, rope_scaling.twist" in caplog.text
  assert "use_cache" not in caplog.text


# --- every field of transformers' configurations ---------------------------

CONFIGS = {
  "llama": transformers.LlamaConfig,
  "qwen2": transformers.Qwen2Config,
  "qwen3": transformers.Qwen3Config,
}
SMALL = dict(
  vocab_size=97,
  hidden_size=32,
  intermediate_size=24,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  max_position_embeddings=64,
)
# Another value for each field; a field that transformers adds needs one here.
OTHER = dict(
  vocab_size=101,
  hidden_size=64,
  intermediate_size=40,
  num_hidden_layers=3,
  num_attention_heads=8,
  num_key_value_heads=4,
  head_dim=16,
  hidden_act="gelu",
  max_position_embeddings=128,
  rms_norm_eps=0.1,
  tie_word_embeddings=True,
  rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
  attention_bias=True,
  mlp_bias=True,
  attention_dropout=0.5,
  use_sliding_window=True,
  sliding_window=2,
  max_window_layers=0,
  layer_types=["sliding_attention"] * 2,
  initializer_range=0.5,
  use_cache=False,
  pretraining_tp=2,
  bos_token_id=5,
  eos_token_id=6,
  pad_token_id=7,
  model_type="mistral",
  architectures=["LlamaForSequenceClassification"],
  chunk_size_feed_forward=1,
  is_encoder_decoder=True,
  output_attentions=True,
  output_hidden_states=True,
  return_dict=False,
  id2label={0: "a"},
  label2id={"a": 0},
  problem_type="regression",
  dtype="float16",
  transformers_version="4.40.0",
  _name_or_path="elsewhere",
)


def fields(family):
  config = CONFIGS[family](**SMALL)
  declared = {field.name for field in dataclasses.fields(config)}
  return sorted(config.to_dict().keys() | declared)


def logits(family, config, weights):
  # How weights are stored and outputs packed is no part of the function.
  apart = ("model_type", "dtype", "return_dict")
  own = {n: value for n, value in config.items() if n not in apart}
  reference = transformers.AutoModelForCausalLM.from_config(
    CONFIGS[family](**own), attn_implementation="eager"
  ).eval()
  weights = reference.state_dict() if weights is None else weights
  reference.load_state_dict(weights)
  with torch.no_grad():
    return weights, reference(torch.arange(12)[None]).logits


def outcome(config):
  try:
    return backbones.from_hf_config(config)
  except ValueError as error:
    return str(error)


@pytest.mark.parametrize("family", CONFIGS)
def test_no_field_of_transformers_is_ignored(family):
  """What is neither read nor refused changes nothing in transformers."""
  torch.manual_seed(0)
  base = CONFIGS[family](**SMALL).to_dict()
  backbone = backbones.from_hf_config(base)
  weights, expected = logits(family, base, None)
  ignored = []
  for name in fields(family):
    assert name in OTHER, f"transformers has a new field, {name}: is it read?"
    changed = base | {name: OTHER[name]}
    if changed == base:
      changed[name] = not OTHER[name]
    read = outcome(changed)
    if read != backbone:
      said = str(read).replace("rope scaling", "rope_parameters")
      assert isinstance(read, backbones.Backbone) or name in said
      continue
    ignored.append(name)
    _, found = logits(family, changed, weights)
    assert torch.equal(found, expected), name
  assert "use_cache" in ignored
  assert not {"rms_norm_eps", "rope_parameters", "hidden_act"} & set(ignored)


@pytest.mark.parametrize("name", ["llama3_1_8b", "qwen2_5_7b", "qwen3_4b"])
def test_a_field_left_out_means_what_it_means_in_transformers(name):
  file = ROOT / "sesa_jax" / "policy" / "architectures.json"
  config = json.loads(file.read_text())[name]["config"]
  needed = set(backbones._NEEDED) | {"model_type"}
  for left_out in config.keys() - needed:
    part = {n: value for n, value in config.items() if n != left_out}
    theirs = CONFIGS[part["model_type"]](**part).to_dict()
    assert outcome(part) == outcome(theirs), left_out
  for null in ("num_key_value_heads", "rope_scaling", "sliding_window"):
    part = config | {null: None}
    theirs = CONFIGS[part["model_type"]](**part).to_dict()
    assert outcome(part) == outcome(theirs), null
  assert outcome(config | {"head_dim": None}).head_dim == (
    config["hidden_size"] // config["num_attention_heads"]
  )


def test_a_llama_context_outside_the_scaling_counts():
  outside = LLAMA_3_1_8B | {"original_max_position_embeddings": 4096}
  theirs = transformers.LlamaConfig(**outside).to_dict()
  assert outcome(outside) == outcome(theirs)
  assert outcome(outside).rope_scaling.original_context == 4096


@st.composite
def architectures(draw):
  kv_heads = draw(st.sampled_from([1, 2, 3, 8]))
  heads = kv_heads * draw(st.integers(1, 4))
  family = draw(st.sampled_from(["llama", "qwen2", "qwen3"]))
  scaling = backbones.LlamaRope(8.0, 1.0, 4.0, draw(st.sampled_from([32, 64])))
  return backbones.Backbone(
    vocab_size=draw(st.integers(10, 200_000)),
    dim=heads * draw(st.sampled_from([8, 24])),  # transformers needs it so
    ffn=draw(st.integers(1, 9000)),
    layers=draw(st.integers(1, 40)),
    heads=heads,
    kv_heads=kv_heads,
    head_dim=draw(st.sampled_from([2, 16, 128])),
    rope_theta=draw(st.floats(2.0, 1e8)),
    norm_eps=draw(st.floats(1e-8, 1e-2)),
    tied=draw(st.booleans()),
    qk_norm=family == "qwen3",
    qkv_bias=family == "qwen2",
    context=draw(st.integers(128, 300_000)),
    rope_scaling=draw(st.sampled_from([None, scaling])),
    vocab_multiple=draw(st.sampled_from([1, 128])),
  )


@given(architectures())
def test_a_config_that_was_written_is_read_back(backbone):
  written = json.loads(json.dumps(backbones.to_hf_config(backbone)))
  plain = dataclasses.replace(backbone, vocab_multiple=1)
  assert backbones.from_hf_config(written) == plain
  # And transformers, which gives its own names to RoPE, reads the same.
  theirs = transformers.AutoConfig.for_model(**written)
  assert type(theirs) is CONFIGS[written["model_type"]]
  assert theirs.rms_norm_eps == backbone.norm_eps
  assert theirs.rope_parameters["rope_theta"] == backbone.rope_theta
  assert backbones.from_hf_config(theirs.to_dict()) == plain


def test_what_no_family_has_cannot_be_written():
  both = dataclasses.replace(backbones.tiny(), qk_norm=True, qkv_bias=True)
  with pytest.raises(ValueError, match="both normed queries"):
    backbones.to_hf_config(both)
