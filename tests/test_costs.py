"""Counts by hand against published numbers and against the compiler's."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from sesa_jax import costs
from sesa_jax.learner import learner as learning
from sesa_jax.policy import attention, backbones, model, sharding
from tests import test_learner

# Weights as the hub states them for each model, in its safetensors header.
PUBLISHED = {
  "qwen3_0_6b": 596_049_920,
  "qwen3_1_7b": 1_720_574_976,
  "qwen3_4b": 4_022_468_096,
  "qwen3_4b_instruct": 4_022_468_096,
  "qwen3_8b": 8_190_735_360,
  "qwen2_5_7b": 7_615_616_512,
  "qwen2_5_7b_instruct": 7_615_616_512,
  "llama3_1_8b": 8_030_261_248,
  "search_r1_7b": 7_615_616_512,
  "smollm2_135m": 134_515_008,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name):
  assert costs.parameters(backbones.published(name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", ["qwen3_8b", "qwen2_5_7b", "smollm2_135m"])
def test_parameters_are_those_of_the_tree(name):
  backbone = backbones.published(name)
  leaves = jax.tree.leaves(model.abstract_params(backbone))
  assert costs.parameters(backbone) == sum(leaf.size for leaf in leaves)


def test_context_by_hand():
  assert costs.context_of(0, 4) == 1 + 2 + 3 + 4
  assert costs.context_of(2, 5) == 3 + 4 + 5
  assert costs.context_of(7, 7) == 0


BACKBONE = backbones.Backbone(
  vocab_size=1536,
  dim=512,
  ffn=1280,
  layers=1,
  heads=8,
  kv_heads=2,
  head_dim=96,
  rope_theta=1e4,
  norm_eps=1e-6,
  tied=False,
  qk_norm=True,
  qkv_bias=False,
  context=4096,
)
ROWS, TOKENS = 2, 256


def unrolled(depth, remat):
  """Returns a plain loop over `depth` layers, and what it is called with."""
  graphdef = model.build(BACKBONE)
  layers = jax.eval_shape(
    lambda: tuple(
      nnx.to_pure_dict(nnx.state(model.Block(BACKBONE, nnx.Rngs(0))))
      for _ in range(depth)
    )
  )
  segments = jnp.ones((ROWS, TOKENS), jnp.int32)
  positions = jnp.broadcast_to(jnp.arange(TOKENS), (ROWS, TOKENS))

  def forward(layers, x):
    rope = model._rope(BACKBONE, positions)

    def layer(weights, x):
      return nnx.merge(graphdef.block, weights)(
        x,
        rope,
        lambda q, k, v: attention.train_attention(q, k, v, segments),
        lambda y: y,
      )

    for weights in layers:
      x = (jax.checkpoint(layer) if remat else layer)(weights, x)
    return x

  x = jax.ShapeDtypeStruct((ROWS, TOKENS, BACKBONE.dim), jnp.float32)
  return forward, (layers, x)


def compiled_flops(function, arguments):
  return jax.jit(function).lower(*arguments).compile().cost_analysis()["flops"]


@functools.cache
def flops_of_a_layer(direction):
  """The compiler's count of a second layer."""
  counts = []
  for depth in 1, 2:
    function, arguments = unrolled(depth, remat=direction == "remat")
    if direction != "forward":
      forward = function

      def function(layers, x, forward=forward):
        # Not linear in the output, so that the last matmul is needed too.
        return jax.grad(
          lambda layers, x: jnp.sum(forward(layers, x) ** 2), (0, 1)
        )(layers, x)

    counts.append(compiled_flops(function, arguments))
  return counts[1] - counts[0]


@pytest.mark.parametrize(
  ("kind", "matmuls"), [("xla", 4), ("cudnn", 5), ("blocks", 5), ("splash", 7)]
)
def test_attentions_backward_is_its_kernels_matmuls(kind, matmuls):
  """Scores again but for XLA; dP, dV, dQ, dK; splash: scores and dP twice."""
  counted = costs.gradient(BACKBONE, 0, 100, 0, remat=False, attention=kind)
  assert counted.attention == (2 + matmuls) * 2 * 8 * 96 * 100


# XLA's attention multiplies the whole square, masked or not.
SQUARE = ROWS * TOKENS * TOKENS


def test_a_layers_forward_is_what_the_compiler_counts():
  counted = costs.forward(BACKBONE, ROWS * TOKENS, SQUARE, 0)
  assert counted.total == pytest.approx(flops_of_a_layer("forward"), rel=0.02)


@pytest.mark.parametrize("remat", [False, True])
def test_a_layers_gradient_is_what_the_compiler_counts(remat):
  counted = costs.gradient(
    BACKBONE, ROWS * TOKENS, SQUARE, 77, remat=remat, attention="xla"
  )
  found = flops_of_a_layer("remat" if remat else "backward")
  assert counted.total - counted.head == pytest.approx(found, rel=0.02)
  # Chunk by chunk: forward, again, and for the inputs and the weights.
  assert counted.head == 4 * 2 * 77 * BACKBONE.dim * BACKBONE.vocab_size


def test_an_updates_gradient_is_what_its_own_program_counts():
  """The learner's, where each loop runs once: one layer, all ids one chunk."""
  taught = learning.Learner(
    model.build(BACKBONE),
    sharding.mesh(1, 1),
    **test_learner.SETTINGS
    | dict(microbatch_rows=ROWS, chunk_tokens=ROWS * TOKENS, remat=True),
  )
  arguments = taught.arguments(TOKENS)["accumulate"]
  program = taught.programs.accumulate.lower(*arguments).compile()
  counted = costs.gradient(
    BACKBONE,
    ROWS * TOKENS,
    SQUARE,
    ROWS * TOKENS,
    remat=True,
    attention="xla",
  )
  found = program.cost_analysis()["flops"]
  assert counted.total == pytest.approx(found, rel=0.1)


def test_a_part_has_the_compilers_count_each():
  """Twice the tokens or twice the heads: no error of one hides another's."""
  dot = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
  width = BACKBONE.heads * BACKBONE.head_dim
  counted = costs.forward(BACKBONE, ROWS * TOKENS, SQUARE, 77)
  q = dot((BACKBONE.heads, TOKENS, BACKBONE.head_dim))
  mixed = compiled_flops(lambda q, k, v: (q @ k.swapaxes(1, 2)) @ v, (q, q, q))
  assert counted.attention == pytest.approx(ROWS * mixed, rel=0.001)
  head = compiled_flops(
    jnp.matmul, (dot((77, BACKBONE.dim)), dot((BACKBONE.dim, 1536)))
  )
  assert counted.head == pytest.approx(head, rel=0.001)
  assert counted.layers == 2 * 512 * ROWS * TOKENS * (
    2 * width + 2 * 192 + 3840
  )


def test_bytes_by_hand():
  eight = backbones.published("qwen3_8b")
  kib = {"qwen3_4b": 144, "qwen3_8b": 144, "qwen2_5_7b": 56, "llama3_1_8b": 128}
  for name, size in kib.items():
    assert costs.kv_bytes(backbones.published(name)) == size * 1024
  # 8.19e9 weights less an embedding of 151,936 x 4,096, two bytes each.
  weights = 2 * (8_190_735_360 - 151_936 * 4_096)
  assert costs.step_weight_bytes(eight) == weights
  moved = costs.decode_bytes(eight, 128, 128 * 2048)
  assert moved == weights + 144 * 1024 * 128 * 2049
  assert costs.apply_bytes(eight) == 8 * 4 * 8_190_735_360
  assert costs.apply_bytes(eight, 2) == (4 * 4 + 4 * 2) * 8_190_735_360


def test_a_roofline_is_the_slower_of_both():
  assert costs.seconds(6.0, 1.0, peak=2.0, bandwidth=4.0) == 3.0
  assert costs.seconds(6.0, 16.0, peak=2.0, bandwidth=4.0) == 4.0


def test_decode_rooflines_of_one_chip():
  """Qwen3-4B, context 2,048, 128 rows a chip: figures made without this."""
  four = backbones.published("qwen3_4b")
  moved = costs.decode_bytes(four, 128, 128 * 2048)
  assert 128 / (moved / 2.039e12) == pytest.approx(5589, rel=0.02)
  assert 128 / (moved / 2.765e12) == pytest.approx(7579, rel=0.02)
