"""One dense decoder for every backbone, as pure functions over its weights.

NNX serves narrowly: modules say what a layer holds and computes; they are
built once, abstractly, and split. From then on there is a static `Decoder` and
a plain dict of arrays:

    {"embed": {"embedding": [V, D]}, "layers": {...: [L, ...]},
     "norm": {"scale": [D]}, "head": {"embedding": [V, D]}  # if untied}

`hidden` (training) and `decode` (rollout) run the same `Block`; they differ in
who does the attention, and in who cuts the weights: the compiler in training,
`decode` itself under `shard_map`. V is padded to `Backbone.table_rows`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from sesa_jax.policy.attention import train_attention
from sesa_jax.policy.backbones import Backbone

Params = dict[str, Any]
Attend = Callable[[Array, Array, Array], Array]

_normal = nnx.initializers.normal(0.02)
_KEPT = jax.checkpoint_policies.save_from_both_policies(
  jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  jax.checkpoint_policies.save_only_these_names("attention"),
)


class Block(nnx.Module):
  """Pre-norm attention and SwiGLU, each added to the residual stream."""

  def __init__(self, backbone: Backbone, rngs: nnx.Rngs):
    """Makes the weights of one layer."""
    dim, head_dim = backbone.dim, backbone.head_dim
    linear = functools.partial(
      nnx.Linear, use_bias=False, kernel_init=_normal, rngs=rngs
    )
    norm = functools.partial(nnx.RMSNorm, epsilon=backbone.norm_eps, rngs=rngs)
    bias = backbone.qkv_bias
    self.head_dim = head_dim
    self.qk_norm = backbone.qk_norm
    self.attention_norm = norm(dim)
    self.q = linear(dim, backbone.heads * head_dim, use_bias=bias)
    self.k = linear(dim, backbone.kv_heads * head_dim, use_bias=bias)
    self.v = linear(dim, backbone.kv_heads * head_dim, use_bias=bias)
    self.o = linear(backbone.heads * head_dim, dim)
    if self.qk_norm:
      self.q_norm = norm(head_dim)
      self.k_norm = norm(head_dim)
    self.ffn_norm = norm(dim)
    self.gate = linear(dim, backbone.ffn)
    self.up = linear(dim, backbone.ffn)
    self.down = linear(backbone.ffn, dim)

  def __call__(
    self,
    x: Array,
    rope: tuple[Array, Array],
    attend: Attend,
    total: Callable[[Array], Array],
  ) -> Array:
    """Maps [..., D] to [..., D]; `total` adds up over devices with a share."""
    y = self.attention_norm(x)
    q, k, v = (
      projection(y).reshape(*x.shape[:-1], -1, self.head_dim)
      for projection in (self.q, self.k, self.v)
    )
    if self.qk_norm:
      q, k = self.q_norm(q), self.k_norm(k)
    mixed = attend(_rotate(q, rope), _rotate(k, rope), v)
    x = x + total(self.o(mixed.reshape(*x.shape[:-1], -1)))
    y = self.ffn_norm(x)
    return x + total(self.down(jax.nn.silu(self.gate(y)) * self.up(y)))


class Ends(nnx.Module):
  """What stands before and after the layers."""

  def __init__(self, backbone: Backbone, rngs: nnx.Rngs):
    """Makes embedding, last norm and, where it is not tied, the head."""
    table = functools.partial(
      nnx.Embed,
      backbone.table_rows,
      backbone.dim,
      embedding_init=_normal,
      rngs=rngs,
    )
    self.embed = table()
    self.norm = nnx.RMSNorm(backbone.dim, epsilon=backbone.norm_eps, rngs=rngs)
    if not backbone.tied:
      self.head = table()


@dataclass(frozen=True)
class Decoder:
  """The static half of a policy; hashable, an argument for `static_argnums`."""

  backbone: Backbone
  block: nnx.GraphDef
  norm: nnx.GraphDef


@functools.cache
def build(backbone: Backbone) -> Decoder:
  """Returns the static half of a policy. No array is made."""
  block = nnx.eval_shape(lambda: Block(backbone, nnx.Rngs(0)))
  ends = nnx.eval_shape(lambda: Ends(backbone, nnx.Rngs(0)))
  return Decoder(backbone, nnx.graphdef(block), nnx.graphdef(ends.norm))


def init(backbone: Backbone, key: Array) -> Params:
  """Draws float32 weights: kernels N(0, 0.02^2), norms 1, biases 0."""
  ends_key, layers_key = jax.random.split(key)

  def layer(key: Array) -> Params:
    return nnx.to_pure_dict(nnx.state(Block(backbone, nnx.Rngs(key))))

  ends = nnx.to_pure_dict(nnx.state(Ends(backbone, nnx.Rngs(ends_key))))
  keys = jax.random.split(layers_key, backbone.layers)
  return ends | {"layers": jax.vmap(layer)(keys)}


def abstract_params(backbone: Backbone) -> Params:
  """The tree of `init` with a `jax.ShapeDtypeStruct` for each array."""
  return jax.eval_shape(functools.partial(init, backbone), jax.random.key(0))


def hidden(
  graphdef: Decoder,
  params: Params,
  ids_BT: Int[Array, "B T"],
  positions_BT: Int[Array, "B T"],
  segments_BT: Int[Array, "B T"],
  *,
  compute_dtype: Any,
  remat: bool,
  attention: Callable[[Array, Array, Array, Array], Array] = train_attention,
) -> Float[Array, "B T D"]:
  """The training forward, up to the last norm.

  Args:
    graphdef: of `build`.
    params: float32 masters, layers stacked on axis 0.
    ids_BT: token ids.
    positions_BT: of a token in its own sequence, for RoPE.
    segments_BT: sequences packed in a row, in order; 0 is padding. A token sees
      earlier tokens of its own segment only.
    compute_dtype: of activations, and of weights when they are used.
    remat: keep only each layer's input for the backward pass; else what its
      matmuls and its attention gave. The cheap rest is computed again.
    attention: (q, k, v, segments) as `attention.train_attention`.
  """
  # Tokens on one axis: with two, XLA on CPU transposes what a kernel's gradient
  # reads, and fuses into that, column by column, all that leads to it.
  rope = _rope(graphdef.backbone, positions_BT.reshape(-1))

  def attend(q: Array, k: Array, v: Array) -> Array:
    q, k, v = (x.reshape(*ids_BT.shape, *x.shape[1:]) for x in (q, k, v))
    return attention(q, k, v, segments_BT).reshape(-1, *q.shape[2:])

  def step(x: Array, layer: Params) -> tuple[Array, None]:
    block = nnx.merge(graphdef.block, _cast(layer, compute_dtype))
    return block(x, rope, attend, _whole), None

  # Inside a scan nothing can be merged with the forward pass anyway.
  policy = None if remat else _KEPT
  body = jax.checkpoint(step, prevent_cse=False, policy=policy)
  # Rows are cast after the lookup: their gradients then add up in float32.
  x = params["embed"]["embedding"][ids_BT.reshape(-1)].astype(compute_dtype)
  x, _ = jax.lax.scan(body, x, params["layers"])
  x = nnx.merge(graphdef.norm, _cast(params["norm"], compute_dtype))(x)
  return x.reshape(*ids_BT.shape, -1)


def logits(
  graphdef: Decoder,
  params: Params,
  hidden: Float[Array, "... D"],
  axis: str | None = None,
) -> Float[Array, "... V"]:
  """Scores every token: hidden @ head^T, float32 sums of hidden's dtype.

  Takes the masters as well as the rollout's copy of `unstack`. Padded rows of
  the table score -inf: they are in no sum and never drawn.

  Args:
    graphdef: of `build`.
    params: of `init` or `unstack`.
    hidden: after the last norm.
    axis: of the `shard_map` around that cuts the table; V is then a share.
  """
  name = "embed" if graphdef.backbone.tied else "head"
  table = params[name]["embedding"]
  scores = jnp.einsum(
    "...d,vd->...v",
    hidden,
    table.astype(hidden.dtype),
    preferred_element_type=_wide(hidden.dtype),
  )
  backbone = graphdef.backbone
  if backbone.table_rows == backbone.vocab_size:
    return scores
  ids = jnp.arange(table.shape[0]) + _first_row(table, axis)
  return jnp.where(ids < backbone.vocab_size, scores, -jnp.inf)


def _first_row(table: Array, axis: str | None) -> Array | int:
  return jax.lax.axis_index(axis) * table.shape[0] if axis else 0


def _lookup(table: Array, ids: Array, axis: str | None) -> Array:
  """Rows of a table that `axis` may have cut: each id has one owner."""
  if not axis:
    return table[ids]
  own = ids - _first_row(table, axis)
  mine = (own >= 0) & (own < table.shape[0])
  rows = table[jnp.where(mine, own, 0)]
  return jax.lax.psum(jnp.where(mine[..., None], rows, 0), axis)


def unstack(params: Params, dtype: Any) -> Params:
  """The rollout's copy: cast, `layers` a tuple with one dict a layer."""
  depth = jax.tree.leaves(params["layers"])[0].shape[0]
  cast = _cast(params, dtype)
  layers = tuple(
    jax.tree.map(lambda leaf, i=i: leaf[i], cast["layers"])
    for i in range(depth)
  )
  return cast | {"layers": layers}


def decode(
  graphdef: Decoder,
  rollout: Params,
  ids: Int[Array, " *n"],
  positions: Int[Array, " *n"],
  attend: Callable[[int, Array, Array, Array], Array],
  axis: str | None = None,
) -> Float[Array, "... D"]:
  """The rollout's forward, in the dtype of its weights.

  Args:
    graphdef: of `build`.
    rollout: of `unstack`; under `shard_map`, a device's share.
    ids: new token ids.
    positions: of each in its sequence.
    attend: (layer, q [...,N,H], k [...,K,H], v [...,K,H]) -> [...,N,H]; q and
      k are normed and rotated. The cache is the caller's: it writes k and v
      into it and reads from it here.
    axis: of the `shard_map` around that cuts heads, ffn and vocabulary; N and K
      are then this device's.
  """
  rope = _rope(graphdef.backbone, positions)
  x = _lookup(rollout["embed"]["embedding"], ids, axis)
  total = functools.partial(jax.lax.psum, axis_name=axis) if axis else _whole
  for index, layer in enumerate(rollout["layers"]):
    block = nnx.merge(graphdef.block, layer)
    x = block(x, rope, functools.partial(attend, index), total)
  return nnx.merge(graphdef.norm, rollout["norm"])(x)


def _whole(x: Array) -> Array:
  return x


def _wide(dtype: Any) -> Any:
  """The dtype of sums: float32, or that of the operands if it is wider."""
  return jnp.promote_types(dtype, jnp.float32)


def _cast(params: Params, dtype: Any) -> Params:
  return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def _rope(backbone: Backbone, positions: Array) -> tuple[Array, Array]:
  """Cosines and sines [..., 1, H / 2] of each position, float32.

  Source: Su et al. 2021, arXiv:2104.09864.
  """
  frequencies = jnp.asarray(rope_frequencies(backbone), jnp.float32)
  angles = positions[..., None, None].astype(jnp.float32) * frequencies
  return jnp.cos(angles), jnp.sin(angles)


def rope_frequencies(backbone: Backbone) -> np.ndarray:
  """Radians a token of each pair of dimensions, theta^(-2i / H), [H / 2].

  With Llama-3's scaling, waves longer than original_context / low_freq_factor
  are slowed by `factor`, those shorter than original_context /
  high_freq_factor are kept, and those between are interpolated.

  Source: Llama 3, arXiv:2407.21783; as in its published configs.
  """
  exponents = np.arange(0, backbone.head_dim, 2) / backbone.head_dim
  plain = backbone.rope_theta**-exponents
  scaling = backbone.rope_scaling
  if scaling is None:
    return plain
  turns = scaling.original_context * plain / (2 * math.pi)
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
  return plain * (kept + (1 - kept) / scaling.factor)


def _rotate(x: Array, rope: tuple[Array, Array]) -> Array:
  """Rotates the pairs (i, i + H / 2) of the last axis, in float32."""
  cos, sin = rope
  first, second = jnp.split(x.astype(_wide(x.dtype)), 2, axis=-1)
  return jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  ).astype(x.dtype)
