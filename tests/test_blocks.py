import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from sesa_jax.policy import attention, blocks, sharding

ROWS, LENGTH, HEADS, KV_HEADS, SIZE = 4, 45, 4, 2, 8


def inputs(seed=0, dtype=jnp.float32, rows=ROWS):
  """Returns q, k, v and the slope of a loss with regard to the output."""
  rng = np.random.default_rng(seed)
  return [
    jnp.asarray(rng.normal(size=(rows, LENGTH, heads, SIZE)), dtype)
    for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
  ]


def definition(q, k, v, segments):
  """The softmax over what each query sees, in float64; padding gives zeros."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  out = np.zeros(q.shape)
  for row, i, head in np.ndindex(q.shape[:3]):
    if not segments[row, i]:
      continue
    seen = np.flatnonzero(segments[row, : i + 1] == segments[row, i])
    kv = head // (HEADS // KV_HEADS)
    scores = k[row, seen, kv] @ q[row, i, head] / np.sqrt(SIZE)
    shares = np.exp(scores - scores.max())
    out[row, i, head] = shares @ v[row, seen, kv] / shares.sum()
  return out


@functools.partial(jax.jit, static_argnums=(5, 6))
def both(q, k, v, segments, slope, q_block, k_block):
  """Returns output and gradients."""
  attend = functools.partial(
    blocks.attention, segments=segments, q_block=q_block, k_block=k_block
  )
  out, back = jax.vjp(attend, q, k, v)
  return out, back(slope)


@jax.jit
def plain(q, k, v, segments, slope):
  """Returns the gradients of the plain attention."""

  def attend(q, k, v):
    out = attention.train_attention(q, k, v, segments)
    return jnp.where((segments > 0)[..., None, None], out, 0.0)

  return jax.vjp(attend, q, k, v)[1](slope)


lengths = st.lists(st.integers(1, LENGTH), min_size=1, max_size=6)


def packed(sizes):
  """Returns segments 1, 2, ... of these lengths, then padding."""
  row = np.repeat(np.arange(1, len(sizes) + 1), sizes)[:LENGTH]
  return np.pad(row, (0, LENGTH - len(row)))


@pytest.mark.parametrize(("q_block", "k_block"), [(8, 16), (16, 8)])
@settings(max_examples=12)
@given(st.lists(lengths, min_size=ROWS - 2, max_size=ROWS - 2))
def test_equals_the_definition_on_packed_rows(q_block, k_block, sizes):
  # All of one row is padding; in another, segments come back after others.
  mixed = np.random.default_rng(sum(map(sum, sizes))).integers(0, 4, LENGTH)
  rows = [packed(row) for row in sizes] + [np.zeros(LENGTH, int), mixed]
  segments = jnp.asarray(np.stack(rows), jnp.int32)
  *qkv, slope = inputs()
  out, gradients = both(*qkv, segments, slope, q_block, k_block)
  expected = definition(*qkv, np.stack(rows))
  np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
  for got, wanted in zip(gradients, plain(*qkv, segments, slope), strict=True):
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_blocks_that_no_query_sees_are_not_computed():
  # What the second segment does not see is NaN, and so is any product with it.
  segments = jnp.asarray([packed([16, 29])] * ROWS, jnp.int32)
  q, k, v, slope = inputs()
  k, v = (x.at[:, :16].set(jnp.nan) for x in (k, v))
  out, gradients = both(q, k, v, segments, slope, 8, 16)
  for x in out, *gradients:
    assert jnp.isnan(x[:, :16]).any()
    assert jnp.isfinite(x[:, 16:]).all()


def test_half_precision_has_a_softmax_of_single_precision():
  *qkv, slope = inputs(dtype=jnp.bfloat16)
  segments = jnp.asarray([packed([45])] * ROWS, jnp.int32)
  out, gradients = both(*qkv, segments, slope, 16, 8)
  assert {x.dtype for x in (out, *gradients)} == {jnp.dtype(jnp.bfloat16)}
  expected = definition(*qkv, np.asarray(segments))
  error = np.linalg.norm(out - expected) / np.linalg.norm(expected)
  assert error < 3e-3  # of rounding the output alone: 1.7e-3
  single = [x.astype(jnp.float32) for x in (*qkv, slope)]
  exact = both(*single[:3], segments, single[3], 16, 8)[1]
  for got, wanted in zip(gradients, exact, strict=True):
    assert jnp.linalg.norm(got - wanted) < 6e-3 * jnp.linalg.norm(wanted)


def test_on_a_mesh_rows_and_heads_stay_where_they_are():
  mesh = sharding.mesh(4, 2)
  attend = attention.training("blocks", mesh)
  *qkv, slope = inputs()
  segments = jnp.asarray([packed([9, 30])] * ROWS, jnp.int32)
  rows = NamedSharding(mesh, PartitionSpec("fsdp", None, "tensor"))
  placed = jax.device_put(qkv, rows)
  where = NamedSharding(mesh, PartitionSpec("fsdp"))

  @jax.jit
  def program(q, k, v, segments, slope):
    out, back = jax.vjp(lambda *x: attend(*x, segments), q, k, v)
    return out, back(slope)

  arguments = *placed, jax.device_put(segments, where), slope
  compiled = program.lower(*arguments).compile()
  assert not re.search(r"all-|reduce-scatter|permute", compiled.as_text())
  got = compiled(*arguments)
  for x, wanted in zip(
    jax.tree.leaves(got),
    [definition(*qkv, segments), *plain(*qkv, segments, slope)],
    strict=True,
  ):
    assert x.sharding.spec[:3:2] == ("fsdp", "tensor")
    np.testing.assert_allclose(x, wanted, rtol=1e-5, atol=1e-5)
