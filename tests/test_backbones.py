import dataclasses
import math

import jax
import pytest

from sesa_jax.policy import backbones, model

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


@pytest.mark.parametrize(
  ("config", "parameters"),
  [
    (LLAMA_3_1_8B, 8_030_261_248),
    (QWEN2_5_7B, 7_615_616_512),
    (QWEN3_0_6B, 596_049_920),
  ],
  ids=["llama", "qwen2", "qwen3"],
)
def test_published_configs_have_the_published_size(config, parameters):
  tree = model.abstract_params(backbones.from_hf_config(config))
  assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree)) == (
    parameters
  )


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
    (LLAMA_3_1_8B, {"hidden_size": None}, "hidden_size"),
    (LLAMA_3_1_8B, {"num_key_value_heads": 5}, "num_key_value_heads"),
  ],
)
def test_a_field_that_is_not_implemented_is_named(base, change, named):
  with pytest.raises(ValueError, match=named):
    backbones.from_hf_config(base | change)


def test_a_window_that_starts_after_the_last_layer_is_not_in_use():
  backbones.from_hf_config(
    QWEN2_5_7B | {"use_sliding_window": True, "max_window_layers": 28}
  )
