"""Causal attention in blocks, for XLA, that computes only what is seen.

Rows are packed with several episodes, and a query sees no further back than
the start of its own. For each block of queries a loop runs over blocks of
keys, from the earliest that any of the queries sees up to the diagonal; how
many those are is known when the program runs. No [T, T] ever exists.

Source: the softmax as a running sum, Milakov and Gimelshein 2018,
arXiv:1805.02867; in blocks, and computed again in the backward pass,
FlashAttention, Dao et al. 2022, arXiv:2205.14135.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

_HIDDEN = -1e30  # score of a key that is not seen: -inf - -inf would be NaN


class _Row(NamedTuple):
  """What the loops read of a row; or, with an axis in front, of all rows.

  C blocks of Q queries, blocks of S keys, G = N / K query heads for each head
  of keys; T is padded to whole blocks.
  """

  q: Array  # [C, K, G Q, H]
  k: Array  # [K, T, H]
  v: Array  # [K, T, H]
  segments: Array  # [T]
  first: Array  # [C], the first block of keys that a block of queries sees
  last: Array  # [C], the block after the last one


def attention(
  q: Float[Array, "B T N H"],
  k: Float[Array, "B T K H"],
  v: Float[Array, "B T K H"],
  segments: Int[Array, "B T"],
  *,
  q_block: int = 256,
  k_block: int = 256,
) -> Float[Array, "B T N H"]:
  """Attends to earlier tokens of the same segment.

    out_i = sum_j softmax_j(q_i . k_j / sqrt(H)) v_j,
    over j <= i with segments_j = segments_i

  Query head n reads key-value head n // (N / K). The softmax is float32.
  Padding, segment 0, gives zeros.

  Args:
    q: queries.
    k: keys.
    v: values.
    segments: of each token, as `packing.Batch.segments`.
    q_block: queries of a block.
    k_block: keys of a block.
  """
  whole = 1 << (q.shape[1] - 1).bit_length()  # short rows need no long block
  return _attention(q, k, v, segments, min(q_block, whole), min(k_block, whole))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attention(q, k, v, segments, q_block, k_block):
  return _forward(q, k, v, segments, q_block, k_block)[0]


def _forward(q, k, v, segments, q_block, k_block):
  rows = _rows(q, k, v, segments, q_block, k_block)

  def row(row):
    blocks = jnp.arange(row.q.shape[0])
    return jax.lax.map(lambda i: _attend(row, i, k_block), blocks)

  out, log_sum = jax.lax.map(row, rows)
  # A name, so that who recomputes the rest of a layer may keep these.
  out, log_sum = checkpoint_name((_tokens(out, q), log_sum), "attention")
  return out, (q, k, v, segments, out, log_sum)


def _backward(q_block, k_block, saved, d_out):
  q, k, v, segments, out, log_sum = saved
  rows = _rows(q, k, v, segments, q_block, k_block)
  # sum_j p_ij dp_ij, without any score.
  inner = jnp.sum(d_out.astype(_wide(out)) * out, -1, keepdims=True)
  d_out, inner = (
    _blocks(x, k.shape[2], q_block, k_block) for x in (d_out, inner)
  )

  def row(inputs):
    row, *rest = inputs

    def block(sums, inputs):
      i, *rest = inputs
      d_q, *sums = _slope(row, i, *rest, *sums, k_block)
      return sums, d_q

    blocks = jnp.arange(row.q.shape[0])
    zeros = jnp.zeros(row.k.shape, _wide(row.k))
    (d_k, d_v), d_q = jax.lax.scan(block, [zeros] * 2, (blocks, *rest))
    return d_q, d_k, d_v

  d_q, d_k, d_v = jax.lax.map(row, (rows, d_out, inner[..., 0], log_sum))
  d_k, d_v = (
    x.swapaxes(1, 2)[:, : k.shape[1]].astype(k.dtype) for x in (d_k, d_v)
  )
  return _tokens(d_q, q), d_k, d_v, None


_attention.defvjp(_forward, _backward)


def _attend(row: _Row, i: Array, k_block: int) -> tuple[Array, Array]:
  """Returns the output of a block of queries, and its log sum of scores."""
  q = row.q[i]

  def step(j, carry):
    out, top, total = carry
    k, v = _keys(row, j, k_block)
    scores = _scores(row, q, k, i, j)
    # What was summed up below the old maximum shrinks to the new one.
    new = jnp.maximum(top, scores.max(-1))
    shrink, p = jnp.exp(top - new), jnp.exp(scores - new[..., None])
    mixed = _dot("kqs,ksh->kqh", p.astype(v.dtype), v)
    out = out * shrink[..., None] + mixed
    return out, new, total * shrink + p.sum(-1)

  shape, dtype = q.shape[:-1], _wide(q)
  zeros = jnp.zeros(q.shape, dtype), jnp.zeros(shape, dtype)
  carry = zeros[0], jnp.full(shape, _HIDDEN, dtype), zeros[1]
  out, top, total = jax.lax.fori_loop(row.first[i], row.last[i], step, carry)
  blind = top <= _HIDDEN  # padding sees nothing; NaN stays NaN
  total = jnp.where(blind, 1.0, total)
  out = jnp.where(blind[..., None], 0.0, out / total[..., None])
  # Finite, so that the backward pass gives hidden scores exp(-1e30) = 0.
  return out, jnp.where(blind, 0.0, top + jnp.log(total))


def _slope(row, i, d_out, inner, log_sum, d_k, d_v, k_block):
  """Returns d q of a block of queries; adds to d k and d v of the row."""
  q = row.q[i]

  def step(j, carry):
    d_q, d_k, d_v = carry
    k, v = _keys(row, j, k_block)
    scores = _scores(row, q, k, i, j)
    p = jnp.exp(scores - log_sum[..., None])
    d_p = _dot("kqh,ksh->kqs", d_out, v)
    d_scores = (p * (d_p - inner[..., None]) * _scale(q)).astype(q.dtype)
    d_q += _dot("kqs,ksh->kqh", d_scores, k)
    d_k = _add(d_k, j, _dot("kqs,kqh->ksh", d_scores, q))
    d_v = _add(d_v, j, _dot("kqs,kqh->ksh", p.astype(v.dtype), d_out))
    return d_q, d_k, d_v

  carry = jnp.zeros(q.shape, _wide(q)), d_k, d_v
  return jax.lax.fori_loop(row.first[i], row.last[i], step, carry)


def _scores(row: _Row, q: Array, k: Array, i: Array, j: Array) -> Array:
  """Returns scores [K, G Q, S] of blocks i and j; hidden ones are -1e30."""
  scores = _dot("kqh,ksh->kqs", q, k) * _scale(q)
  q_block = row.segments.size // row.q.shape[0]
  places = [
    n * size + jnp.arange(size) for n, size in ((i, q_block), (j, k.shape[1]))
  ]
  mine, theirs = (row.segments[x] for x in places)
  seen = (mine[:, None] == theirs) & (mine[:, None] > 0)
  seen &= places[0][:, None] >= places[1]
  heads = scores.reshape(k.shape[0], -1, *seen.shape)
  return jnp.where(seen, heads, _HIDDEN).reshape(scores.shape)


def _scale(q: Array) -> float:
  return q.shape[-1] ** -0.5


def _wide(x: Array) -> Any:
  """The dtype of sums: float32, or that of x if it is wider."""
  return jnp.promote_types(x.dtype, jnp.float32)


def _dot(equation: str, x: Array, y: Array) -> Array:
  return jnp.einsum(equation, x, y, preferred_element_type=_wide(x))


def _keys(row: _Row, j: Array, size: int) -> tuple[Array, Array]:
  return tuple(
    jax.lax.dynamic_slice_in_dim(x, j * size, size, 1) for x in (row.k, row.v)
  )


def _add(total: Array, j: Array, x: Array) -> Array:
  start, size = j * x.shape[1], x.shape[1]
  x += jax.lax.dynamic_slice_in_dim(total, start, size, 1)
  return jax.lax.dynamic_update_slice_in_dim(total, x, start, 1)


def _rows(q, k, v, segments, q_block, k_block) -> _Row:
  """Lays the inputs out for the loops."""
  kv_heads = k.shape[2]
  k, v = (_padded(x, q_block, k_block).swapaxes(1, 2) for x in (k, v))
  segments = _padded(segments, q_block, k_block)
  first, last = jax.vmap(
    functools.partial(_range, q_block=q_block, k_block=k_block)
  )(segments)
  q = _blocks(q, kv_heads, q_block, k_block)
  return _Row(q, k, v, segments, first, last)


def _range(segments, q_block, k_block):
  """Returns, for each block of queries of a row, its `first` and `last`."""
  length = segments.size
  places = jnp.arange(length)
  starts = jax.ops.segment_min(places, segments, num_segments=length + 1)
  real = segments > 0
  # A block of padding alone gets an empty range.
  start = jnp.where(real, starts[segments], length).reshape(-1, q_block)
  end = jnp.where(real, places + 1, 0).reshape(-1, q_block)
  return start.min(1) // k_block, -(-end.max(1) // k_block)


def _padded(x: Array, q_block: int, k_block: int) -> Array:
  extra = -x.shape[1] % math.lcm(q_block, k_block)
  return jnp.pad(x, [(0, 0), (0, extra)] + [(0, 0)] * (x.ndim - 2))


def _blocks(x, kv_heads, q_block, k_block):
  """[B, T, N, H] to [B, C, K, G Q, H]."""
  x = _padded(x, q_block, k_block)
  rows, length, heads, size = x.shape
  x = x.reshape(rows, -1, q_block, heads, size).swapaxes(2, 3)
  return x.reshape(rows, length // q_block, kv_heads, -1, size)


def _tokens(x, like):
  """The inverse of `_blocks`, in the shape and dtype of `like`."""
  rows, length, heads, size = like.shape
  x = x.reshape(rows, x.shape[1], heads, -1, size).swapaxes(2, 3)
  return x.reshape(rows, -1, heads, size)[:, :length].astype(like.dtype)
