"""Every family against transformers: random weights, float32, on the CPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sesa_jax.policy import backbones, model, weights

COMMON = dict(
  vocab_size=97,
  hidden_size=32,
  intermediate_size=48,
  num_hidden_layers=3,
  num_attention_heads=4,
  max_position_embeddings=256,
  rms_norm_eps=1e-4,  # large enough to matter
)
LLAMA3 = {
  "rope_type": "llama3",
  "rope_theta": 1000.0,
  "factor": 4.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 32,
}
FAMILIES = {
  "llama": lambda: transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
      **COMMON,
      num_key_value_heads=2,
      head_dim=12,
      tie_word_embeddings=True,
      rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
  ),
  "llama3": lambda: transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
      **COMMON, num_key_value_heads=1, rope_parameters=LLAMA3
    )
  ),
  "qwen2": lambda: transformers.Qwen2ForCausalLM(
    transformers.Qwen2Config(**COMMON, num_key_value_heads=2)
  ),
  "qwen3": lambda: transformers.Qwen3ForCausalLM(
    transformers.Qwen3Config(
      **COMMON,
      num_key_value_heads=2,
      head_dim=12,
      tie_word_embeddings=True,
      rope_parameters={"rope_type": "default", "rope_theta": 3000.0},
    )
  ),
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def pair(request, tmp_path_factory):
  """A transformers model, and the same weights through a saved folder.

  97 ids do not divide by anything: the tables have 128 rows.
  """
  torch.manual_seed(0)
  reference = FAMILIES[request.param]().eval()
  with torch.no_grad():
    for name, weight in reference.named_parameters():
      weight.normal_(1.0 if "norm" in name else 0.0, 0.2)
  folder = tmp_path_factory.mktemp(request.param)
  reference.save_pretrained(folder)
  backbone, params = weights.load("hf", folder)
  return reference, model.build(backbone), params


@functools.partial(jax.jit, static_argnames=("graphdef", "dtype"))
def score(graphdef, params, ids, positions, segments, dtype=jnp.float32):
  x = model.hidden(
    graphdef,
    params,
    ids,
    positions,
    segments,
    compute_dtype=dtype,
    remat=False,
  )
  return model.logits(graphdef, params, x)


def draw(rows, length):
  return np.random.default_rng(1).integers(0, 97, (rows, length), np.int32)


def draw_params(backbone):
  return jax.jit(model.init, static_argnums=0)(backbone, jax.random.key(0))


def test_logits_are_those_of_transformers(pair):
  reference, graphdef, params = pair
  ids = draw(2, 24)
  positions = np.tile(np.arange(24, dtype=np.int32), (2, 1))
  ours = score(graphdef, params, ids, positions, np.ones_like(ids))
  with torch.no_grad():
    theirs = reference(torch.tensor(ids)).logits.numpy()
  assert np.abs(theirs).max() > 1  # the weights are not so small as to agree
  np.testing.assert_allclose(ours[..., :97], theirs, rtol=0, atol=1e-4)
  assert ours.shape == (2, 24, 128)
  assert np.isneginf(ours[..., 97:]).all()
  best = np.sort(theirs, -1)
  clear = best[..., -1] - best[..., -2] > 1e-4
  assert clear.mean() > 0.9
  np.testing.assert_array_equal(
    ours.argmax(-1)[clear], theirs.argmax(-1)[clear]
  )


def test_packed_and_padded_rows_are_those_of_transformers_alone(pair):
  reference, graphdef, params = pair
  lengths = [[7, 12, 1], [9]]
  ids = draw(2, 24)
  segments, positions = np.zeros_like(ids), np.zeros_like(ids)
  for row, row_lengths in enumerate(lengths):
    start = 0
    for number, length in enumerate(row_lengths, start=1):
      segments[row, start : start + length] = number
      positions[row, start : start + length] = np.arange(length)
      start += length
  ours = score(graphdef, params, ids, positions, segments)[..., :97]
  assert np.isfinite(ours).all()
  for row, row_lengths in enumerate(lengths):
    for number in range(1, len(row_lengths) + 1):
      own = segments[row] == number
      with torch.no_grad():
        theirs = reference(torch.tensor(ids[row, own])[None]).logits[0]
      np.testing.assert_allclose(ours[row, own], theirs, rtol=0, atol=1e-4)


def test_decode_through_a_cache_is_transformers(pair):
  """A prefill chunk, then token by token, through the simplest cache."""
  reference, graphdef, params = pair
  backbone = graphdef.backbone
  ids = draw(2, 12)

  @jax.jit
  def step(rollout, cache, chunk, start):
    positions = jnp.tile(start + jnp.arange(chunk.shape[1]), (2, 1))
    new = list(cache)

    def attend(layer, q, k, v):
      keys, values = (
        jax.lax.dynamic_update_slice(old, fresh, (0, start, 0, 0))
        for old, fresh in zip(cache[layer], (k, v), strict=True)
      )
      new[layer] = keys, values
      repeats = backbone.heads // backbone.kv_heads
      scores = jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(keys, repeats, 2))
      seen = jnp.arange(12) <= positions[:, None, :, None]
      scores = jnp.where(seen, scores / backbone.head_dim**0.5, -jnp.inf)
      return jnp.einsum(
        "bnts,bsnh->btnh",
        jax.nn.softmax(scores),
        jnp.repeat(values, repeats, 2),
      )

    x = model.decode(graphdef, rollout, chunk, positions, attend)
    return model.logits(graphdef, rollout, x), new

  rollout = jax.jit(model.unstack, static_argnums=1)(params, jnp.float32)
  empty = jnp.zeros((2, 12, backbone.kv_heads, backbone.head_dim))
  cache = [(empty, empty)] * backbone.layers
  ours = []
  for start, stop in [(0, 8), *((t, t + 1) for t in range(8, 12))]:
    scores, cache = step(rollout, cache, ids[:, start:stop], start)
    ours.append(scores)
  with torch.no_grad():
    theirs = reference(torch.tensor(ids)).logits.numpy()
  ours = np.concatenate(ours, 1)[..., :97]
  np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


def test_gradients_are_those_of_transformers(pair):
  reference, graphdef, params = pair
  ids = draw(2, 16)
  positions = jnp.tile(jnp.arange(16), (2, 1))

  @jax.jit
  @jax.grad
  def gradient(params):
    x = model.hidden(
      graphdef,
      params,
      jnp.asarray(ids),
      positions,
      jnp.ones_like(ids),
      compute_dtype=jnp.float32,
      remat=True,
    )
    return jnp.square(model.logits(graphdef, params, x)[..., :97]).mean()

  ours = gradient(params)
  reference.zero_grad()
  reference(torch.tensor(ids)).logits.square().mean().backward()
  inner = reference.model
  for mine, theirs in [
    (ours["embed"]["embedding"][:97], inner.embed_tokens.weight.grad),
    (ours["norm"]["scale"], inner.norm.weight.grad),
    (ours["layers"]["q"]["kernel"][1], inner.layers[1].self_attn.q_proj),
    (ours["layers"]["down"]["kernel"][0], inner.layers[0].mlp.down_proj),
  ]:
    if isinstance(theirs, torch.nn.Linear):
      theirs = theirs.weight.grad.T
    scale = np.abs(theirs.numpy()).max()
    np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-4 * scale)
  for name in {"embed", "head"} & ours.keys():  # padding is never moved
    assert not ours[name]["embedding"][97:].any()


def test_later_tokens_and_other_segments_change_nothing():
  backbone = backbones.tiny()
  graphdef, params = model.build(backbone), draw_params(backbone)
  ids = np.arange(10, dtype=np.int32)[None]
  segments = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 0, 0]])
  positions = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 0, 0]])
  before = score(graphdef, params, ids, positions, segments)
  changed = ids.copy()
  changed[0, [2, 8]] = 300
  after = score(graphdef, params, changed, positions, segments)
  moved = np.abs(before - after).max(-1)[0] > 0
  assert moved.tolist() == [False] * 2 + [True] * 2 + [False] * 4 + [True] * 2


def test_bfloat16_is_near_float32_and_sums_in_float32():
  backbone = backbones.tiny()
  graphdef, params = model.build(backbone), draw_params(backbone)
  ids = np.arange(10, dtype=np.int32)[None]
  segments = np.ones_like(ids)
  exact = score(graphdef, params, ids, ids, segments)
  near = score(graphdef, params, ids, ids, segments, dtype=jnp.bfloat16)
  assert near.dtype == jnp.float32
  # Rounded sums would hold bfloat16 values only.
  assert (near != near.astype(jnp.bfloat16).astype(jnp.float32)).any()
  np.testing.assert_allclose(near, exact, rtol=0, atol=0.02)


def test_unstack_casts_and_cuts():
  backbone = backbones.tiny()
  params = draw_params(backbone)
  rollout = model.unstack(params, jnp.bfloat16)
  assert {leaf.dtype for leaf in jax.tree.leaves(rollout)} == {
    jnp.dtype(jnp.bfloat16)
  }
  assert len(rollout["layers"]) == backbone.layers
  np.testing.assert_array_equal(
    rollout["layers"][1]["up"]["kernel"],
    params["layers"]["up"]["kernel"][1].astype(jnp.bfloat16),
  )


def test_init_draws_every_layer_anew():
  backbone = dataclasses.replace(backbones.tiny(), tied=False, qkv_bias=True)
  params = draw_params(backbone)
  shapes = jax.tree.map(lambda x: (x.shape, x.dtype), params)
  abstract = model.abstract_params(backbone)
  assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), abstract)
  first, second = params["layers"]["q"]["kernel"]
  assert abs(np.std(first) - 0.02) < 0.002
  assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.1
  assert not np.array_equal(
    params["head"]["embedding"], params["embed"]["embedding"]
  )
  assert not params["layers"]["q"]["bias"].any()


def test_static_half_is_hashable_and_built_once():
  assert model.build(backbones.tiny()) is model.build(backbones.tiny())
  assert hash(model.build(backbones.tiny()))
  assert model.build(backbones.tiny()) != model.build(backbones.tiny(64))


def test_llama_3_frequencies_are_those_of_transformers():
  config = transformers.LlamaConfig(
    hidden_size=4096,
    num_attention_heads=32,
    max_position_embeddings=131072,
    rope_parameters={
      "rope_type": "llama3",
      "rope_theta": 500000.0,
      "factor": 8.0,
      "low_freq_factor": 1.0,
      "high_freq_factor": 4.0,
      "original_max_position_embeddings": 8192,
    },
  )
  theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
  backbone = backbones.from_hf_config(config.to_dict())
  np.testing.assert_allclose(
    model.rope_frequencies(backbone), theirs, rtol=1e-6
  )
