"""Paged attention against the TPU kernel's own reference, on ragged batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as rpa

from sesa_jax.engine import attention

S = 8  # tokens a page

# Of each row: tokens of the batch, positions of its sequence. Together: one
# token, a full page, one more, one less, no history, and a chunk in the middle.
RAGGED = ((1, 1), (8, 8), (1, 9), (37, 40), (5, 17), (1, 64), (9, 16), (3, 23))


def batch(rows, *, spare=0, kv_heads=2, group=2, head_dim=16, width=8, seed=0):
  """Random q, keys and values of each row, tables, and a pool full of junk."""
  rng = np.random.default_rng(seed)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
  pages = 1 + sum(-(-kv // S) for _, kv in rows)
  free = list(rng.permutation(np.arange(1, pages)))
  tables = np.zeros((len(rows) + spare, width), np.int32)
  for row, (_, kv) in enumerate(rows):
    count = -(-kv // S)
    tables[row, :count] = [free.pop() for _ in range(count)]
  lens = [n for n, _ in rows]
  return dict(
    q=draw(sum(lens) + 2 * spare, kv_heads * group, head_dim),
    kv=[draw(2, kv, kv_heads, head_dim) for _, kv in rows],
    junk=1e4 * draw(pages + 2, S, 2 * kv_heads, head_dim),
    kv_lens=np.int32([kv for _, kv in rows] + [0] * spare),
    tables=tables,
    cu_q_lens=np.int32([0, *np.cumsum(lens + [0] * spare)]),
    rows=np.int32(len(rows)),
  )


def reference(case):
  """`ref_ragged_paged_attention`, its pool filled by plain loops."""
  pages = case["junk"].copy()
  for row, kv in enumerate(case["kv"]):
    for position in range(kv.shape[1]):
      page = case["tables"][row, position // S]
      pages[page, position % S, 0::2] = kv[0, position]
      pages[page, position % S, 1::2] = kv[1, position]
  return rpa.ref_ragged_paged_attention(
    case["q"],
    pages,
    case["kv_lens"],
    case["tables"],
    case["cu_q_lens"],
    case["rows"][None],
    sm_scale=case["q"].shape[-1] ** -0.5,
  )


def filled(kind, case):
  """A pool of junk into which each row's keys and values were written."""
  pages, page_size, heads, head_dim = case["junk"].shape
  pool = kind.pool(pages, page_size, heads // 2, head_dim, jnp.float32)
  write = jax.jit(kind.write, donate_argnums=0)

  def put(pool, kv, pages, offsets):
    k, v = kv
    return write(pool, k, v, np.int32(pages), np.int32(offsets))

  spots = np.stack(np.indices((pages, page_size))).reshape(2, -1)
  junk = case["junk"].reshape(-1, heads // 2, 2, head_dim)
  pool = put(pool, (junk[:, :, 0], junk[:, :, 1]), *spots)
  for row, kv in enumerate(case["kv"]):
    positions = np.arange(kv.shape[1])
    pool = put(pool, kv, case["tables"][row, positions // S], positions % S)
  return pool


def attended(kind, case, decode):
  return jax.jit(functools.partial(kind.attend, decode=decode))(
    case["q"],
    filled(kind, case),
    case["kv_lens"],
    case["tables"],
    case["cu_q_lens"],
    case["rows"],
  )


@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_ragged_prefill(group):
  case = batch(RAGGED, spare=2, group=group)
  real = case["cu_q_lens"][-1]
  out = attended(attention.KINDS["xla"], case, decode=False)
  np.testing.assert_allclose(out[:real], reference(case), atol=2e-5)
  assert np.isfinite(out).all()


@pytest.mark.parametrize("group", [1, 4])
def test_decode(group):
  lens = [1, 7, 8, 9, 16, 33, 64]
  case = batch([(1, n) for n in lens], group=group)
  out = attended(attention.KINDS["xla"], case, decode=True)
  np.testing.assert_allclose(out, reference(case), atol=2e-5)
