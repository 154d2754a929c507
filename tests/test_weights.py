import json
import os
import pathlib
import struct

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from sesa_jax.policy import backbones, model, tokenizer, weights

SMOLLM2 = (
  pathlib.Path(
    os.environ.get("SESA_JAX_ASSETS", "~/.cache/sesa_jax")
  ).expanduser()
  / "smollm2-135m-instruct"
  / "SmolLM2-135M-Instruct.Q4_1.gguf"
)


def llama(**changes):
  torch.manual_seed(0)
  sizes = dict(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
  )
  config = transformers.LlamaConfig(**(sizes | changes))
  return transformers.LlamaForCausalLM(config)


@pytest.fixture
def folder(tmp_path):
  llama().save_pretrained(tmp_path)
  return tmp_path


def rewrite(folder, change):
  """Changes the tensors of a folder with the library that wrote them."""
  path = folder / "model.safetensors"
  tensors = safetensors.torch.load_file(path)
  change(tensors)
  safetensors.torch.save_file(tensors, path)


def test_shards_and_one_file_hold_the_same(tmp_path):
  reference = llama()
  reference.save_pretrained(tmp_path / "one")
  reference.save_pretrained(tmp_path / "many", max_shard_size="6KB")
  assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
  backbone, one = weights.load_hf(tmp_path / "one")
  again, many = weights.load_hf(tmp_path / "many")
  assert backbone == again
  jax.tree.map(np.testing.assert_array_equal, one, many)
  theirs = reference.model.layers[1].mlp.down_proj.weight.detach().T
  np.testing.assert_array_equal(one["layers"]["down"]["kernel"][1], theirs)


def test_bfloat16_files_become_float32_masters(tmp_path):
  reference = llama().to(torch.bfloat16)
  reference.save_pretrained(tmp_path)
  _, params = weights.load_hf(tmp_path)
  assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {
    jnp.dtype(jnp.float32)
  }
  np.testing.assert_array_equal(
    params["head"]["embedding"], reference.lm_head.weight.detach().float()
  )


def test_structure_is_that_of_init(folder):
  backbone, params = weights.load_hf(folder)
  drawn = model.abstract_params(backbone)
  assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, drawn)


def test_check_returns_the_backbone_without_loading(folder):
  assert weights.check("hf", str(folder)).layers == 2
  assert weights.check("random", "") == backbones.tiny()


def test_random_weights_follow_the_key():
  backbone, one = weights.load("random", "", jax.random.key(0))
  _, same = weights.load("random", "", jax.random.key(0))
  _, other = weights.load("random", "", jax.random.key(1))
  assert backbone == backbones.tiny()
  jax.tree.map(np.testing.assert_array_equal, one, same)
  assert not np.array_equal(
    one["embed"]["embedding"], other["embed"]["embedding"]
  )


def test_all_wrong_tensors_are_listed_in_one_error(folder):
  def change(tensors):
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(16, 24)

  rewrite(folder, change)
  with pytest.raises(ValueError, match="does not hold") as error:
    weights.check("hf", str(folder))
  text = str(error.value)
  assert "model.norm.weight is missing" in text
  assert "model.layers.0.self_attn.q_proj.bias is unexpected" in text
  assert "model.layers.1.mlp.up_proj.weight is [16, 24], not [24, 16]" in text
  assert "\n" not in text


def test_quantized_tensors_are_named(folder):
  def change(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)

  rewrite(folder, change)
  with pytest.raises(ValueError, match="lm_head.weight is I8"):
    weights.check("hf", str(folder))


def test_a_copy_of_a_tied_head_is_no_fault(tmp_path):
  llama(tie_word_embeddings=True).save_pretrained(tmp_path)
  rewrite(
    tmp_path,
    lambda tensors: tensors.update(
      {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    ),
  )
  assert weights.check("hf", str(tmp_path)).tied


def test_missing_files_are_named(folder, tmp_path):
  with pytest.raises(ValueError, match="is not a folder"):
    weights.check("hf", str(tmp_path / "nowhere"))
  with pytest.raises(ValueError, match="is not a file"):
    weights.check("gguf", str(tmp_path / "nowhere.gguf"))
  with pytest.raises(ValueError, match="Choices: hf, gguf, random"):
    weights.check("hub", "")
  (folder / "model.safetensors").unlink()
  with pytest.raises(ValueError, match=r"lacks model\.safetensors"):
    weights.check("hf", str(folder))
  (folder / "config.json").write_text("{")
  with pytest.raises(ValueError, match=r"config\.json is not JSON"):
    weights.check("hf", str(folder))
  (folder / "config.json").unlink()
  with pytest.raises(ValueError, match=r"lacks config\.json"):
    weights.check("hf", str(folder))


def test_a_missing_shard_is_named(tmp_path):
  llama().save_pretrained(tmp_path, max_shard_size="6KB")
  shard = sorted(tmp_path.glob("*.safetensors"))[1]
  shard.unlink()
  with pytest.raises(ValueError, match=f"lacks {shard.name}"):
    weights.check("hf", str(tmp_path))


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_safetensors_file_is_an_error(folder, kept):
  path = folder / "model.safetensors"
  path.write_bytes(path.read_bytes()[:kept])
  with pytest.raises(ValueError, match="truncated or corrupt") as error:
    weights.check("hf", str(folder))
  assert str(path) in str(error.value)


def write_gguf(path, reference, **changes):
  """Writes a file as llama.cpp's converter does, q and k permuted."""
  config = reference.config
  writer = gguf.GGUFWriter(path, "llama")
  fields = dict(
    vocab_size=config.vocab_size,
    embedding_length=config.hidden_size,
    feed_forward_length=config.intermediate_size,
    block_count=config.num_hidden_layers,
    head_count=config.num_attention_heads,
    head_count_kv=config.num_key_value_heads,
    context_length=config.max_position_embeddings,
    layer_norm_rms_eps=config.rms_norm_eps,
    rope_freq_base=config.rope_parameters["rope_theta"],
    rope_dimension_count=config.head_dim,
    key_length=config.head_dim,
  )
  for name, value in (fields | changes).items():
    getattr(writer, f"add_{name}")(value)

  def permuted(weight, heads):
    halves = weight.reshape(heads, 2, config.head_dim // 2, -1)
    return halves.swapaxes(1, 2).reshape(weight.shape)

  names = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q"}
  names |= {"self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
  names |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate"}
  names |= {"mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
  names |= {"post_attention_layernorm": "ffn_norm"}
  names |= {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
  names |= {"lm_head": "output", "model.layers": "blk"}
  for name, weight in reference.state_dict().items():
    weight = weight.numpy()
    if ".q_proj" in name:
      weight = permuted(weight, config.num_attention_heads)
    if ".k_proj" in name:
      weight = permuted(weight, config.num_key_value_heads)
    for theirs, ours in names.items():
      name = name.replace(theirs, ours)
    writer.add_tensor(name, weight)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


def test_gguf_equals_the_folder_of_the_same_model(tmp_path):
  reference = llama(
    rope_parameters={"rope_type": "default", "rope_theta": 700.0}
  )
  reference.save_pretrained(tmp_path)
  write_gguf(tmp_path / "m.gguf", reference)
  backbone, params = weights.load_gguf(tmp_path / "m.gguf")
  expected_backbone, expected = weights.load_hf(tmp_path)
  assert backbone == expected_backbone
  jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize("kept", [0, 3, 30, 400, -100])
def test_a_truncated_gguf_file_is_an_error(tmp_path, kept):
  path = tmp_path / "m.gguf"
  write_gguf(path, llama())
  path.write_bytes(path.read_bytes()[:kept])
  with pytest.raises(ValueError, match="truncated or corrupt") as error:
    weights.check("gguf", str(path))
  assert str(path) in str(error.value)


def test_a_gguf_of_another_shape_is_an_error(tmp_path):
  path = tmp_path / "m.gguf"
  write_gguf(path, llama(), feed_forward_length=25)
  with pytest.raises(ValueError, match=r"ffn_up\.weight is \[24, 16\], not"):
    weights.check("gguf", str(path))
  write_gguf(path, llama(), rope_dimension_count=4)
  with pytest.raises(ValueError, match="RoPE over 4 of 8"):
    weights.check("gguf", str(path))


def test_a_corrupt_safetensors_header_is_an_error(folder):
  path = folder / "model.safetensors"
  content = path.read_bytes()
  (size,) = struct.unpack("<Q", content[:8])
  header = json.loads(content[8 : 8 + size])
  header["model.norm.weight"]["data_offsets"][1] += 4
  text = json.dumps(header).encode()
  path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])
  with pytest.raises(ValueError, match="truncated or corrupt"):
    weights.check("hf", str(folder))


needs_smollm2 = pytest.mark.skipif(
  not SMOLLM2.exists(), reason="SmolLM2 is not fetched"
)


@pytest.fixture(scope="module")
def smollm2():
  """Ours, and transformers' own reading of the same file."""
  backbone, params = weights.load_gguf(SMOLLM2)
  config = transformers.LlamaConfig(  # as published
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
  )
  reference = transformers.LlamaForCausalLM(config)
  # What from_pretrained(gguf_file=...) calls; that asks for accelerate.
  tensors = load_gguf_checkpoint(SMOLLM2, True, reference)["tensors"]
  unfilled = reference.load_state_dict(tensors, strict=False)
  assert unfilled.missing_keys == ["lm_head.weight"]  # tied
  return reference.eval(), model.build(backbone), params


@pytest.mark.slow
@needs_smollm2
def test_smollm2_scores_text_as_transformers_does(smollm2):
  reference, graphdef, params = smollm2
  text = pathlib.Path(model.__file__).read_text()
  ids = tokenizer.load("gguf", SMOLLM2)(text)["input_ids"][:512]
  ids = jnp.array(ids)[None]
  positions = jnp.arange(512)[None]

  @jax.jit
  def score(params):
    x = model.hidden(
      graphdef,
      params,
      ids,
      positions,
      jnp.ones_like(ids),
      compute_dtype=jnp.float32,
      remat=False,
    )
    return model.logits(graphdef, params, x)

  with torch.no_grad():
    theirs = reference(torch.tensor(np.array(ids))).logits.numpy()
  ours = np.asarray(score(params))
  assert ours.shape == (1, 512, 49152)
  np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-3)
  best = np.sort(theirs, -1)
  clear = best[..., -1] - best[..., -2] > 2e-3
  np.testing.assert_array_equal(
    ours.argmax(-1)[clear], theirs.argmax(-1)[clear]
  )


@pytest.mark.slow
@needs_smollm2
def test_smollm2_knows_the_capital_of_france(smollm2):
  _, graphdef, params = smollm2
  tokens = tokenizer.load("gguf", SMOLLM2)
  ids = tokens.apply_chat_template(
    [{"role": "user", "content": "What is the capital of France?"}],
    add_generation_prompt=True,
  )["input_ids"]
  length = 64
  positions = jnp.arange(length)[None]

  @jax.jit
  def best(params, row, at):
    x = model.hidden(
      graphdef,
      params,
      row,
      positions,
      jnp.ones_like(row),
      compute_dtype=jnp.float32,
      remat=False,
    )
    return model.logits(graphdef, params, x[0, at]).argmax()

  answer = []
  while len(answer) < 16:
    row = np.zeros((1, length), np.int32)
    row[0, : len(ids) + len(answer)] = [*ids, *answer]
    answer.append(int(best(params, row, len(ids) + len(answer) - 1)))
    if answer[-1] in tokenizer.end_ids(tokens):
      break
  assert tokens.decode(answer, skip_special_tokens=True) == (
    "The capital of France is Paris."
  )
