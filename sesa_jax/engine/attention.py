"""Rollout attention: the page pool of one layer, what writes and reads it.

Letters: P pages, S tokens a page, K key-value heads and N query heads of this
device, H head size, R rows (sequences of a batch), W pages of the longest
sequence, T tokens of a flat batch. Page 0 is trash: idle rows and padding write
there, and nothing reads it for a result.

A batch is ragged: row r holds the tokens cu_q_lens[r]:cu_q_lens[r + 1], which
are the last of the kv_lens[r] positions of its sequence; position p lies in
page tables[r, p // S] at p % S. What a pool holds beyond that may be anything
finite.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

Pool = Any  # a tree of arrays of one layer, per kind

_QUERIES = 32  # of a block of the prefill
_RPA_BUFFERS = 16 * 2**20  # bytes
_RPA_MEMORY = 48 * 2**20  # bytes; a v5p has 64 MiB, others more
_MASKED = -1e30  # not -inf: a difference of two must be a number


@dataclass(frozen=True)
class Kind:
  """One way to lay out a layer's pages and to attend to them.

  Attributes:
    pool: (pages, page_size, kv_heads, head_dim, dtype) -> zeros of one layer.
    pool_spec: the pool's `PartitionSpec`s where it has a leading data axis.
    write: (pool, k [T,K,H], v [T,K,H], pages [T], offsets [T]) -> pool; in
      place where the pool is donated.
    attend: (q [T,N,H], pool, kv_lens [R], tables [R,W], cu_q_lens [R+1], rows)
      -> [T,N,H], causal, softmax in float32 at scale H^-0.5. Only the first
      `rows` rows count; what belongs to none gives something finite. With
      `decode=True` each row has one query, cu_q_lens is arange(R + 1), and
      a row of no positions gives zeros.
    packs_prefill: whether a prefill batch may hold several rows.
  """

  pool: Callable[..., Pool]
  pool_spec: Any
  write: Callable[..., Pool]
  attend: Callable[..., Array]
  packs_prefill: bool


def _xla_pool(pages, page_size, kv_heads, head_dim, dtype) -> Pool:
  # The layouts in which a CPU's matmuls read a page in order.
  return dict(
    k=jnp.zeros((pages, kv_heads, head_dim, page_size), dtype),
    v=jnp.zeros((pages, kv_heads, page_size, head_dim), dtype),
  )


def _xla_write(pool, k, v, pages, offsets) -> Pool:
  return dict(
    k=pool["k"].at[pages, :, :, offsets].set(k.astype(pool["k"].dtype)),
    v=pool["v"].at[pages, :, offsets].set(v.astype(pool["v"].dtype)),
  )


def _xla_attend(
  q: Float[Array, "T N H"],
  pool: Pool,
  kv_lens: Int[Array, " R"],
  tables: Int[Array, "R W"],
  cu_q_lens: Int[Array, " R+1"],
  rows: Int[Array, ""],
  *,
  decode: bool,
) -> Float[Array, "T N H"]:
  grouped = q.reshape(len(q), pool["k"].shape[1], -1, q.shape[-1])
  if decode:
    out = _xla_decode(grouped, pool, kv_lens, tables, rows)
  else:
    out = _xla_prefill(grouped, pool, kv_lens, tables, cu_q_lens, rows)
  return out.astype(q.dtype).reshape(q.shape)


class _Part(NamedTuple):
  """What some of the keys add to averages of values over all of them."""

  top: Float[Array, "... Q"]  # the greatest score
  total: Float[Array, "... Q"]  # of exp(score - top)
  mixed: Float[Array, "... Q H"]  # values, each times exp(score - top)

  @classmethod
  def none(cls, *shape: int) -> _Part:
    """Of no keys, for queries of a shape [..., Q, H]."""
    rest = jnp.zeros(shape[:-1])
    return cls(rest + _MASKED, rest, jnp.zeros(shape))


def _part(
  q: Float[Array, "... Q H"],
  k: Float[Array, "... H S"],
  v: Float[Array, "... S H"],
  seen: Bool[Array, "... Q S"],
) -> _Part:
  matmul = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
  scores = jnp.where(seen, matmul(q, k) * q.shape[-1] ** -0.5, _MASKED)
  top = scores.max(-1)
  weights = jnp.exp(scores - top[..., None])
  return _Part(top, weights.sum(-1), matmul(weights.astype(v.dtype), v))


def _average(parts: _Part, axis: int) -> Float[Array, "... Q H"]:
  """The averages of which there are parts along an axis; 0 over no keys."""
  scale = jnp.exp(parts.top - parts.top.max(axis, keepdims=True))
  total = (scale * parts.total).sum(axis)
  mixed = (scale[..., None] * parts.mixed).sum(axis)
  return mixed / jnp.where(total > 0, total, 1.0)[..., None]


def _xla_decode(q, pool, kv_lens, tables, rows) -> Float[Array, "R K G H"]:
  """Goes through a list of all rows' pages, several of them a step.

  Reading them is the bound: a gather of several pages is shared by all cores,
  where that of one keeps one core waiting for memory.
  """
  count, width = tables.shape
  page_size = pool["v"].shape[2]
  pages = _xla_step(pool)
  counts = -(-kv_lens // page_size) * (jnp.arange(count) < rows)
  ends = jnp.cumsum(counts)
  # Of each place in the list: its row, and which of the row's pages it is. The
  # places behind the last page get a row that is not there: what is read for
  # it is another's, what is written is dropped.
  places = jnp.arange(count * width + pages)
  row = jnp.sum(ends <= places[:, None], axis=1)
  index = places - (ends - counts)[row]
  page = tables[row, index]
  left = kv_lens[row] - index * page_size

  def step(i: Array, parts: _Part) -> _Part:
    r, w, p, n = (
      jax.lax.dynamic_slice_in_dim(x, i * pages, pages)
      for x in (row, index, page, left)
    )
    seen = jnp.arange(page_size) < n[:, None, None, None]
    new = _part(q[r], pool["k"][p], pool["v"][p], seen)
    return jax.tree.map(lambda x, y: x.at[r, w].set(y, mode="drop"), parts, new)

  parts = jax.lax.fori_loop(
    0, -(-ends[-1] // pages), step, _Part.none(count, width, *q.shape[1:])
  )
  return _average(parts, axis=1)


def _xla_step(pool: Pool) -> int:
  """Pages that `_xla_decode` reads in a step: as many as caches hold."""
  return max(1, min(32, 2**22 // pool["k"][0].nbytes))


def _xla_prefill(
  q, pool, kv_lens, tables, cu_q_lens, rows
) -> Float[Array, "T K G H"]:
  """Takes blocks of a row's queries, each over the pages that it sees."""
  tokens, kv_heads, group, size = q.shape
  page_size = pool["v"].shape[2]
  queries = min(_QUERIES, tokens)
  # A block that begins near the end would be moved to fit, so there is room.
  q = jnp.pad(q, ((0, queries - 1), (0, 0), (0, 0), (0, 0)))

  def block(row: Array, start: Array, out: Array) -> Array:
    first = kv_lens[row] - cu_q_lens[row + 1] + start  # its position
    x = jax.lax.dynamic_slice_in_dim(q, start, queries)
    x = x.transpose(1, 0, 2, 3).reshape(kv_heads, queries * group, size)
    positions = first + jnp.repeat(jnp.arange(queries), group)

    def page(index: Array, part: _Part) -> _Part:
      k, v = (pool[name][tables[row, index]] for name in ("k", "v"))
      keys = index * page_size + jnp.arange(page_size)
      new = _part(x, k, v, keys <= positions[:, None])
      top = jnp.maximum(part.top, new.top)
      old_scale, new_scale = jnp.exp(part.top - top), jnp.exp(new.top - top)
      return _Part(
        top,
        old_scale * part.total + new_scale * new.total,
        old_scale[..., None] * part.mixed + new_scale[..., None] * new.mixed,
      )

    last = jnp.minimum(first + queries, kv_lens[row])
    part = jax.lax.fori_loop(
      0, -(-last // page_size), page, _Part.none(*x.shape)
    )
    mixed = part.mixed / part.total[..., None]
    mixed = mixed.reshape(kv_heads, queries, group, size).transpose(1, 0, 2, 3)
    # What stands behind the row's own tokens is overwritten by the next row.
    return jax.lax.dynamic_update_slice_in_dim(out, mixed, start, 0)

  def one_row(row: Array, out: Array) -> Array:
    begin, end = cu_q_lens[row], cu_q_lens[row + 1]
    return jax.lax.fori_loop(
      0,
      -(-(end - begin) // queries),
      lambda i, out: block(row, begin + i * queries, out),
      out,
    )

  out = jnp.zeros(q.shape, jnp.float32)
  return jax.lax.fori_loop(0, rows, one_row, out)[:tokens]


def xla() -> Kind:
  """A loop over rows and pages, for any device; written for a CPU's caches."""
  spec = PartitionSpec("data", None, "tensor")
  return Kind(
    pool=_xla_pool,
    pool_spec=dict(k=spec, v=spec),
    write=_xla_write,
    attend=_xla_attend,
    packs_prefill=True,
  )


# --- TPU ---------------------------------------------------------------------


def _rpa_pool(pages, page_size, kv_heads, head_dim, dtype) -> Pool:
  packed = 4 // jnp.dtype(dtype).itemsize
  tiles, rest = divmod(2 * kv_heads, packed)
  if head_dim != 128 or rest or (tiles not in (1, 2, 4) and tiles % 8):
    raise ValueError(
      f"{kv_heads} key-value heads of size {head_dim} a device in "
      f"{jnp.dtype(dtype).name}: ragged paged attention takes heads of size "
      f"128, and 2 x heads / {packed} must be 1, 2, 4 or a multiple of 8. "
      "Choose another mesh.rollout_tensor."
    )
  # Heads alternate: key 0, value 0, key 1, value 1, ...
  return jnp.zeros((pages, page_size, 2 * kv_heads, head_dim), dtype)


def _rpa_write(pool, k, v, pages, offsets) -> Pool:
  both = jnp.stack([k, v], axis=2).reshape(len(k), *pool.shape[2:])
  return pool.at[pages, offsets].set(both.astype(pool.dtype))


def _rpa_attend(
  kernel, q, pool, kv_lens, tables, cu_q_lens, rows, *, decode
) -> Float[Array, "T N H"]:
  _, page_size, heads, size = pool.shape
  # A block of keys is read whole even where a sequence ends before it does, so
  # decode's are shorter. Every row of a block of queries has all of the block
  # multiplied by its keys, which fill the matrix unit in prefill alone.
  keys, queries = (1024, 8) if decode else (2048, 32)
  # Two blocks of keys are in flight; the limit leaves room for float32 copies.
  fit = _RPA_BUFFERS // (2 * heads * size * pool.dtype.itemsize)
  pages = max(1, min(keys, fit) // page_size)
  out = kernel(
    q,
    pool,
    jnp.maximum(kv_lens, 1),  # the kernel waits for a page of every row
    tables,
    cu_q_lens,
    jnp.reshape(rows, 1),
    sm_scale=size**-0.5,
    num_kv_pages_per_block=min(pages, tables.shape[1]),
    num_queries_per_block=min(queries, len(q)),
    vmem_limit_bytes=_RPA_MEMORY,
  )
  # The kernel leaves what is no query of a row as it found the memory.
  real = jnp.arange(len(q)) < cu_q_lens[rows]
  if decode:
    real &= kv_lens > 0
  return jnp.where(real[:, None, None], out, 0)


def rpa(kernel: Callable[..., Array] | None = None) -> Kind:
  """Ragged paged attention of a TPU; inside `shard_map` only.

  Args:
    kernel: called with the arguments of `ragged_paged_attention`, its default.
  """
  if kernel is None:
    from jax.experimental.pallas.ops.tpu import ragged_paged_attention

    kernel = ragged_paged_attention.ragged_paged_attention
  return Kind(
    pool=_rpa_pool,
    pool_spec=PartitionSpec("data", None, None, "tensor"),
    write=_rpa_write,
    attend=functools.partial(_rpa_attend, kernel),
    packs_prefill=True,
  )


# --- NVIDIA GPU --------------------------------------------------------------


def _cudnn_pool(pages, page_size, kv_heads, head_dim, dtype) -> Pool:
  shape = (pages, page_size, kv_heads, head_dim)
  return dict(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))


def _cudnn_write(pool, k, v, pages, offsets) -> Pool:
  return dict(
    k=pool["k"].at[pages, offsets].set(k.astype(pool["k"].dtype)),
    v=pool["v"].at[pages, offsets].set(v.astype(pool["v"].dtype)),
  )


def _gathered(pool: Pool, tables: Int[Array, "R W"]) -> list[Array]:
  """Keys and values of whole rows, [R, W * S, K, H]."""
  rows = len(tables)
  return [
    pool[name][tables].reshape(rows, -1, *pool[name].shape[2:])
    for name in ("k", "v")
  ]


def _cudnn_attend(
  implementation,
  contiguous,
  q,
  pool,
  kv_lens,
  tables,
  cu_q_lens,
  rows,
  *,
  decode,
) -> Float[Array, "T N H"]:
  attention = functools.partial(
    jax.nn.dot_product_attention, implementation=implementation
  )
  if decode:
    # An empty softmax is no number.
    seen = jnp.maximum(kv_lens, 1)
    if contiguous:
      k, v = _in_place(pool, tables)
      # Row 0 of the pool is trash.
      pad = lambda x: jnp.concatenate([x[:1], x])  # noqa: E731
      out = attention(pad(q)[:, None], k, v, key_value_seq_lengths=pad(seen))
      out = out[1:, 0]
    else:
      k, v = _gathered(pool, tables)
      out = attention(q[:, None], k, v, key_value_seq_lengths=seen)[:, 0]
    real = (jnp.arange(len(q)) < rows) & (kv_lens > 0)
  else:
    k, v = _gathered(pool, tables[:1])
    # cuDNN's own causal mask has query 0 at position 0.
    positions = kv_lens[0] - cu_q_lens[1] + jnp.arange(len(q))
    mask = jnp.arange(k.shape[1]) <= positions[:, None]
    out = attention(q[None], k, v, mask=mask[None, None])[0]
    real = jnp.arange(len(q)) < cu_q_lens[1]
  return jnp.where(real[:, None, None], out, 0)


def _in_place(pool: Pool, tables: Int[Array, "R W"]) -> list[Array]:
  """The pool as [R + 1, W * S, K, H], without a copy."""
  rows, width = tables.shape
  pages = pool["k"].shape[0]
  if pages != (rows + 1) * width:
    raise ValueError(
      f"{pages} pages: contiguous rows need (rows + 1) x width = "
      f"{(rows + 1) * width} of them."
    )
  return [
    pool[name].reshape(rows + 1, -1, *pool[name].shape[2:])
    for name in ("k", "v")
  ]


def cudnn(contiguous: bool = False, implementation: str = "cudnn") -> Kind:
  """cuDNN attention, which reads a row's keys and values in one piece.

  A prefill batch holds one row.

  Args:
    contiguous: row r always owns the pages (r + 1) * W + arange(W), and the
      pool has (R + 1) * W of them; decode then reads in place. Otherwise it
      gathers the pages of each row first, which needs that much memory.
    implementation: of `jax.nn.dot_product_attention`; "xla" runs anywhere.
  """
  spec = PartitionSpec("data", None, None, "tensor")
  return Kind(
    pool=_cudnn_pool,
    pool_spec=dict(k=spec, v=spec),
    write=_cudnn_write,
    attend=functools.partial(_cudnn_attend, implementation, contiguous),
    packs_prefill=False,
  )


KINDS = dict(
  xla=xla(),
  rpa=rpa(),
  cudnn=cudnn(),
  cudnn_contiguous=cudnn(contiguous=True),
)


def resolve(
  kind: str, platform: str, head_dim: int, dtype: Any, tensor: int
) -> str:
  """Returns the kind that "auto" means, or a named one that can run.

  Args:
    kind: one of `KINDS` or "auto".
    platform: of JAX's devices: "tpu", "gpu" or "cpu".
    head_dim: H of the backbone.
    dtype: of weights and pages.
    tensor: devices that share the heads.

  Raises:
    ValueError: the kind is unknown or cannot run there.
  """
  dtype = jnp.dtype(dtype)
  gpu = platform in ("gpu", "cuda")
  half = dtype in (jnp.bfloat16, jnp.float16)
  cudnn = gpu and half and head_dim <= 128 and head_dim % 8 == 0
  can = dict(
    rpa=platform == "tpu" and head_dim == 128,
    cudnn=cudnn,
    cudnn_contiguous=cudnn,
    xla=True,
  )
  if kind == "auto":
    return next(name for name, runs in can.items() if runs)
  if kind not in KINDS:
    raise ValueError(
      f"The attention {kind!r} is unknown. Choices: auto, {', '.join(KINDS)}."
    )
  if not can[kind]:
    rule = (
      "a TPU and a head size of 128"
      if kind == "rpa"
      else "an NVIDIA GPU, bfloat16 or float16, and a head size that is a "
      "multiple of 8 up to 128"
    )
    asked, other = f"The attention {kind!r}", "'auto'"
    if kind == "cudnn_contiguous":
      asked, other = "engine.cache = 'contiguous'", "'paged'"
    raise ValueError(
      f"{asked} needs {rule}; here: {platform}, {dtype.name}, head size "
      f"{head_dim}. {other} takes what can run."
    )
  return kind
