"""Attention of the training forward, by what runs it.

All of them compute the same; what differs is the machine and what a row may
hold. Each is a callable (q [B,T,N,H], k [B,T,K,H], v [B,T,K,H],
segments [B,T]) -> [B,T,N,H]. Padding, segment 0, gives finite values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from sesa_jax.policy import blocks

KINDS = ("xla", "splash", "cudnn", "blocks")
Attention = Callable[[Array, Array, Array, Array], Array]

_LANES = 128  # of a TPU's registers
# Tokens of a block. The larger, the fewer steps; its scores in float32 are
# 2 MiB, and a kernel holds a few of those.
_BLOCK_Q, _BLOCK_KV = 512, 1024


def train_attention(
  q: Float[Array, "B T N H"],
  k: Float[Array, "B T K H"],
  v: Float[Array, "B T K H"],
  segments: Int[Array, "B T"],
) -> Float[Array, "B T N H"]:
  """Attends to earlier tokens of the same segment.

    out_i = sum_j softmax_j(q_i . k_j / sqrt(H)) v_j,
    over j <= i with segments_j = segments_i

  Query head n reads key-value head n // (N / K). The softmax is float32.
  Order is that of the row, so positions need not be known here.
  """
  same = segments[:, None, :, None] == segments[:, None, None, :]
  return jax.nn.dot_product_attention(
    q, k, v, mask=same, is_causal=True, implementation="xla"
  )


def resolve(kind: str, platform: str, head_dim: int, dtype: Any) -> str:
  """Returns the kind that "auto" means, or a named one that can run.

  Args:
    kind: one of `KINDS` or "auto".
    platform: of JAX's devices: "tpu", "gpu" or "cpu".
    head_dim: H of the backbone.
    dtype: of activations.

  Raises:
    ValueError: the kind is unknown or cannot run there.
  """
  dtype = jnp.dtype(dtype)
  half = dtype in (jnp.bfloat16, jnp.float16)
  can = dict(
    splash=platform == "tpu" and head_dim % _LANES == 0,
    cudnn=platform in ("gpu", "cuda")
    and half
    and head_dim <= 128
    and head_dim % 8 == 0,
    blocks=True,
    xla=True,
  )
  if kind == "auto":
    # Loops over blocks of a size for a CPU's caches are no gain elsewhere.
    auto = can | dict(blocks=platform == "cpu")
    return next(name for name, runs in auto.items() if runs)
  if kind not in KINDS:
    raise ValueError(
      f"attention = {kind!r} is unknown. Choices: auto, {', '.join(KINDS)}."
    )
  if not can[kind]:
    rule = dict(
      splash=f"a TPU and a head size that is a multiple of {_LANES}",
      cudnn="an NVIDIA GPU, bfloat16 or float16, and a head size that is a "
      "multiple of 8 up to 128",
    )[kind]
    raise ValueError(
      f"attention = {kind!r} needs {rule}; here: {platform}, {dtype.name}, "
      f"head size {head_dim}. 'auto' takes what can run."
    )
  return kind


@functools.lru_cache(maxsize=32)
def training(kind: str, mesh: Mesh) -> Attention:
  """Returns the attention of a kind on a mesh; the same one for equal ones.

  * xla: anywhere. Holds T^2 scores a head.
  * splash: on TPU. Cut over `fsdp` (rows) and `tensor` (heads). T must be a
    multiple of 128.
  * cudnn: on NVIDIA GPUs, cut the same way. A row holds one sequence, from its
    first token on, and then padding: segments are not looked at beyond their
    being 0.
  * blocks: anywhere, made for CPUs. Cut the same way. Computes what is seen and
    holds the scores of one block: T is as long as you like.

  Args:
    kind: one of `KINDS`, as `resolve` returns it.
    mesh: of `sharding.mesh`.
  """
  if kind == "xla":
    return train_attention
  kinds = dict(splash=splash, cudnn=cudnn, blocks=blocks.attention)
  return _mapped(kinds[kind], mesh)


def _mapped(attention: Attention, mesh: Mesh) -> Attention:
  rows = PartitionSpec("fsdp", None, "tensor")
  return jax.shard_map(
    attention,
    mesh=mesh,
    in_specs=(rows, rows, rows, PartitionSpec("fsdp")),
    out_specs=rows,
    check_vma=False,  # a kernel's outputs do not say how they vary
  )


def splash(
  q: Float[Array, "B T N H"],
  k: Float[Array, "B T K H"],
  v: Float[Array, "B T K H"],
  segments: Int[Array, "B T"],
  *,
  interpret: bool = False,
) -> Float[Array, "B T N H"]:
  """`train_attention` by the TPU kernel that skips what the mask hides.

  Args:
    q: queries.
    k: keys.
    v: values.
    segments: of each token.
    interpret: run the kernel's text on any device, slowly.

  Raises:
    ValueError: T is not a multiple of 128.
  """
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as kernel,
  )
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
  )

  _, length, heads, size = q.shape
  block_q = _block(length, _BLOCK_Q)
  block_kv = _block(length, _BLOCK_KV)
  attend = kernel.make_splash_mha(
    masks.MultiHeadMask([masks.CausalMask((length, length))] * heads),
    head_shards=1,
    q_seq_shards=1,
    residual_checkpoint_name="attention",  # as of `blocks`
    interpret=interpret,
    block_sizes=kernel.BlockSizes(
      block_q=block_q,
      block_kv=block_kv,
      block_q_dkv=block_q,
      block_kv_dkv=block_kv,
      block_q_dq=block_q,
      block_kv_dq=block_kv,
    ),
  )

  def one_row(q: Array, k: Array, v: Array, segments: Array) -> Array:
    return attend(q, k, v, kernel.SegmentIds(segments, segments))

  # The kernel does not scale; heads come first.
  q = (q.astype(jnp.float32) * size**-0.5).astype(q.dtype)
  q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
  return jax.vmap(one_row)(q, k, v, segments).swapaxes(1, 2)


def _block(length: int, most: int) -> int:
  """The largest multiple of 128 up to `most` that divides a length."""
  if length % _LANES:
    near = -(-length // _LANES) * _LANES
    raise ValueError(
      f"Rows of {length} tokens: on TPU a row's length must be a multiple of "
      f"{_LANES}. The next one is {near}; set learner.row_multiple to a "
      f"multiple of {_LANES}."
    )
  return next(n for n in range(most, 0, -_LANES) if length % n == 0)


def cudnn(
  q: Float[Array, "B T N H"],
  k: Float[Array, "B T K H"],
  v: Float[Array, "B T K H"],
  segments: Int[Array, "B T"],
  *,
  implementation: str = "cudnn",
) -> Float[Array, "B T N H"]:
  """`train_attention` by cuDNN, of rows that hold one sequence each.

  Args:
    q: queries.
    k: keys.
    v: values.
    segments: not 0 for the first tokens of a row, 0 for all others.
    implementation: of `jax.nn.dot_product_attention`; "xla" runs anywhere.
  """
  lengths = jnp.sum(segments > 0, axis=1, dtype=jnp.int32)
  lengths = jnp.maximum(lengths, 1)  # an empty softmax is no number
  return jax.nn.dot_product_attention(
    q,
    k,
    v,
    is_causal=True,
    query_seq_lengths=lengths,
    key_value_seq_lengths=lengths,
    implementation=implementation,
  )
