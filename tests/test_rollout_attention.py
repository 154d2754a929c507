"""Paged attention on ragged batches, against its definition.

And against the reference of the TPU's kernel, which also receives all that the
kernel would. The kernels themselves are only compiled here.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from sesa_jax.engine import attention
from sesa_jax.plan import targets
from sesa_jax.policy import sharding

S = 8  # tokens a page
W = 12  # pages of the longest sequence

# Of each row: tokens of the batch, positions of its sequence. One token; a full
# page; the first and the last token of a page; a prompt of more than two blocks
# of queries; chunks in the middle; a row of all its pages.
RAGGED = ((1, 1), (8, 8), (1, 9), (1, 16), (70, 70), (5, 17), (37, 96), (9, 23))
# 50 pages, more than one step of the loop; every position of a page.
LENGTHS = (1, 7, 8, 9, 10, 11, 12, 13, 14, 16, 17, 33, 64, 96)


def draw(rng, *shape):
  return rng.normal(size=shape).astype(np.float32)


def batch(rows, *, spare=0, kv_heads=2, group=2, head_dim=16, contiguous=False):
  """Queries, keys and values of each row, pages drawn at random, and junk.

  `spare` rows at the end are not real, nor is the padding behind the tokens.
  """
  rng = np.random.default_rng(len(rows) + spare)
  many = len(rows) + spare
  tables = np.zeros((many, W), np.int32)
  pages = (many + 1) * W
  free = list(rng.permutation(np.arange(1, pages)))
  for row, (_, kv) in enumerate(rows):
    used = -(-kv // S)
    tables[row, :used] = [free.pop() for _ in range(used)]
  if contiguous:
    tables = W + np.arange(many * W, dtype=np.int32).reshape(many, W)
  lens = [n for n, _ in rows]
  return dict(
    q=draw(rng, sum(lens) + spare, kv_heads * group, head_dim),
    kv=[draw(rng, 2, kv, kv_heads, head_dim) for _, kv in rows],
    junk=1e4 * draw(rng, 2, pages * S, kv_heads, head_dim),
    kv_lens=np.int32([kv for _, kv in rows] + [0] * spare),
    tables=tables,
    cu_q_lens=np.int32([0, *np.cumsum(lens + [0] * spare)]),
    rows=np.int32(len(rows)),
  )


def decoding(lengths=LENGTHS, *, idle=(), **sizes):
  """One query a row; `idle` rows have no positions."""
  case = batch([(1, n) for n in lengths], **sizes)
  case["kv_lens"][list(idle)] = 0
  return case


def definition(case):
  """softmax(q k^T / sqrt(H)) v of each query alone, in float64."""
  out = []
  for row, (k, v) in enumerate(case["kv"]):
    start, end = case["cu_q_lens"][row : row + 2]
    for token in range(start, end):
      seen = case["kv_lens"][row] - (end - 1 - token)
      for n, q in enumerate(case["q"][token].astype(np.float64)):
        head = n // (case["q"].shape[1] // k.shape[1])
        scores = k[:seen, head] @ q / np.sqrt(len(q))
        weights = np.exp(scores - scores.max(initial=-1e9))
        out.append(weights @ v[:seen, head] / (weights.sum() or 1))
  return np.reshape(out, (-1, *case["q"].shape[1:]))


def filled(kind, case):
  """A pool full of junk, to which the rows' keys and values were written."""
  heads, head_dim = case["junk"].shape[2:]
  pages = case["junk"].shape[1] // S
  pool = kind.pool(pages, S, heads, head_dim, jnp.float32)
  rows = range(len(case["kv"]))
  spots = [np.arange(kv.shape[1]) for kv in case["kv"]]
  own = [case["tables"][row, spots[row] // S] for row in rows]
  every = np.arange(pages * S)
  pool = kind.write(pool, *case["junk"], every // S, every % S)
  return kind.write(
    pool,
    *np.concatenate(case["kv"], axis=1),
    np.concatenate(own).astype(np.int32),
    np.concatenate(spots).astype(np.int32) % S,
  )


def attended(kind, case, decode, wrap=jax.jit):
  attend = wrap(functools.partial(kind.attend, decode=decode))
  out = attend(
    case["q"],
    filled(kind, case),
    case["kv_lens"],
    case["tables"],
    case["cu_q_lens"],
    case["rows"],
  )
  assert out.dtype == case["q"].dtype
  assert np.isfinite(out).all()
  return np.asarray(out)


def close(out, expected):
  np.testing.assert_allclose(out[: len(expected)], expected, atol=2e-5)


# --- xla -------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_ragged_prefill(group):
  case = batch(RAGGED, spare=2, group=group)
  close(attended(attention.KINDS["xla"], case, False), definition(case))


@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_ragged_decode(group):
  case = decoding(group=group, spare=2, idle=[3])
  out = attended(attention.KINDS["xla"], case, True)
  close(out, definition(case))
  assert not out[[3, -2, -1]].any()


def test_large_scores_neither_overflow_nor_vanish():
  """The first page has the greatest scores, or the last one has."""
  for sign in (1, -1):
    case = batch([(40, 40)])
    k = case["kv"][0][0]
    k[:] = sign * np.linspace(300, -300, 40, dtype=np.float32)[:, None, None]
    case["q"] = np.abs(case["q"])
    close(attended(attention.KINDS["xla"], case, False), definition(case))
    case = batch([(1, 40)]) | dict(kv=case["kv"], q=case["q"][-1:])
    close(attended(attention.KINDS["xla"], case, True), definition(case))


def test_bfloat16_pages_are_summed_in_float32():
  kind, case = attention.KINDS["xla"], decoding((96,) * 3)
  exact = definition(case)
  pool = jax.tree.map(lambda x: x.astype(jnp.bfloat16), filled(kind, case))
  rest = [
    jnp.asarray(case[n]) for n in ("kv_lens", "tables", "cu_q_lens", "rows")
  ]
  q = jnp.asarray(case["q"], jnp.bfloat16)
  out = kind.attend(q, pool, *rest, decode=True)
  assert out.dtype == jnp.bfloat16
  # bfloat16 has 8 bits; sums in it would be off by several times as much.
  np.testing.assert_allclose(np.float32(out), exact, atol=0.02)


# --- TPU -------------------------------------------------------------------


def referee(*arguments, **settings):
  """The kernel's own checks and reference, and its uninitialised memory."""
  kernel.dynamic_validate_inputs(*arguments, **settings)
  assert (arguments[2] > 0).all(), "the kernel waits for a page of every row"
  out = kernel.ref_ragged_paged_attention(
    *arguments, sm_scale=settings["sm_scale"]
  )
  unset = len(arguments[0]) - len(out)
  return jnp.pad(out, ((0, unset), (0, 0), (0, 0)), constant_values=jnp.nan)


@pytest.mark.parametrize("decode", [False, True])
def test_kernel_s_arguments_give_the_definition(decode):
  rows = [(1, n) for n in (1, 8, 9, 96)] if decode else RAGGED[2:6]
  case = batch(rows, spare=2, head_dim=128)
  out = attended(attention.rpa(referee), case, decode, wrap=lambda f: f)
  close(out, definition(case))
  assert not out[case["cu_q_lens"][-1] :].any()
  # The same pages, read by the loop.
  other = attended(attention.KINDS["xla"], case, decode)
  real = case["cu_q_lens"][-1]
  np.testing.assert_allclose(other[:real], out[:real], atol=2e-5)


def test_kernel_gets_no_row_without_positions():
  case = decoding((1, 9, 17), idle=[1], head_dim=128)
  out = attended(attention.rpa(referee), case, True, wrap=lambda f: f)
  close(out, definition(case))
  assert not out[1].any()


def test_blocks_of_keys_fit_the_kernel_s_memory():
  """Pages of a block: by tokens, by the table's width, by bytes."""
  seen = []

  def spy(q, *arguments, **settings):
    seen.append(settings)
    return q

  def blocks(decode, page_size, width, kv_heads, dtype=jnp.bfloat16):
    kind = attention.rpa(spy)
    pool = kind.pool(2, page_size, kv_heads, 128, dtype)
    ints = jnp.zeros(64, jnp.int32)
    tables = jnp.zeros((64, width), jnp.int32)
    q = jnp.zeros((64, kv_heads, 128), dtype)
    cu = jnp.arange(65, dtype=jnp.int32)
    kind.attend(q, pool, ints, tables, cu, jnp.int32(64), decode=decode)
    return seen[-1]["num_kv_pages_per_block"]

  assert blocks(True, 128, 64, 8) == 8  # 1024 tokens
  assert blocks(False, 128, 64, 8) == 16  # 2048 tokens
  assert blocks(False, 64, 64, 2) == 32
  assert blocks(False, 128, 5, 8) == 5
  # 2 x 16 MiB would be too much: 2 blocks x 16 heads x 128 x 4 bytes a token.
  assert blocks(False, 128, 64, 8, jnp.float32) == 8
  assert blocks(False, 4096, 64, 8) == 1


@pytest.mark.parametrize(
  ("kv_heads", "head_dim", "dtype"),
  [(3, 128, "bfloat16"), (8, 64, "bfloat16"), (3, 128, "float32")],
)
def test_kernel_s_rules_for_heads(kv_heads, head_dim, dtype):
  with pytest.raises(ValueError, match=f"{kv_heads} key-value heads of size"):
    attention.KINDS["rpa"].pool(2, 128, kv_heads, head_dim, dtype)


# --- NVIDIA GPU ------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("contiguous", [False, True])
def test_cudnn_decode(contiguous, group):
  case = decoding(group=group, spare=2, idle=[3], contiguous=contiguous)
  kind = attention.cudnn(contiguous, implementation="xla")
  out = attended(kind, case, True)
  close(out, definition(case))
  assert not out[[3, -2, -1]].any()


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("row", [(1, 9), (8, 8), (37, 96), (70, 70)])
def test_cudnn_prefill(contiguous, row):
  case = batch([row], spare=3, contiguous=contiguous)
  kind = attention.cudnn(contiguous, implementation="xla")
  assert not kind.packs_prefill
  out = attended(kind, case, False)
  close(out, definition(case))
  assert not out[row[0] :].any()


def test_contiguous_rows_need_their_number_of_pages():
  case = decoding(contiguous=True)
  case["junk"] = case["junk"][:, S:]
  case["tables"] = case["tables"] - 1
  kind = attention.cudnn(contiguous=True, implementation="xla")
  with pytest.raises(ValueError, match="179 pages: .* = 180 of them"):
    attended(kind, case, True)


# --- all -------------------------------------------------------------------


def test_rows_that_are_not_real_do_not_count():
  def five(*arguments, **settings):
    assert arguments[5].tolist() == [5]
    return referee(*arguments, **settings)

  case = decoding((1, 7, 8, 9, 30, 12, 16), head_dim=128)
  case["rows"] = np.int32(5)
  for kind, wrap in (
    (attention.KINDS["xla"], jax.jit),
    (attention.rpa(five), lambda f: f),
    (attention.cudnn(implementation="xla"), jax.jit),
  ):
    out = attended(kind, case, True, wrap)
    close(out[:5], definition(case)[:5])
    assert not out[5:].any()


@pytest.mark.parametrize("name", attention.KINDS)
def test_a_device_s_share_of_the_heads_is_whole_heads(name):
  """What a device would hold of a pool is the pool of its heads."""
  kind, rng = attention.KINDS[name], np.random.default_rng(0)
  k, v = draw(rng, 2, 12, 4, 128)
  spots = np.arange(12, dtype=np.int32)

  def written(heads):
    pool = kind.pool(3, S, heads.stop - heads.start, 128, jnp.float32)
    return kind.write(pool, k[:, heads], v[:, heads], spots // S, spots % S)

  mesh = jax.make_mesh(
    (1, 2),
    ("data", "tensor"),
    axis_types=(AxisType.Auto,) * 2,
    devices=jax.devices()[:2],
  )
  whole = jax.tree.map(
    lambda x, spec: jax.device_put(x[None], NamedSharding(mesh, spec)),
    written(slice(0, 4)),
    kind.pool_spec,
  )
  for device in range(2):
    share = jax.tree.map(
      lambda x, d=device: x.addressable_shards[d].data[0], whole
    )
    own = written(slice(2 * device, 2 * device + 2))
    jax.tree.map(np.testing.assert_array_equal, share, own)


@pytest.mark.parametrize("name", ["xla", "cudnn"])
def test_a_donated_pool_is_written_in_place(name):
  """In a loop, as decoding does: a copy a step would cost more than the rest.

  The memory beside it is less than the smallest copy, that of one leaf.
  """
  kind = attention.cudnn(implementation="xla") if name == "cudnn" else None
  kind = kind or attention.KINDS[name]
  case = decoding((9, 30))
  pool = jax.eval_shape(lambda: kind.pool(2000, S, 2, 16, jnp.float32))

  def loop(pool, q, k, v, pages, *rest):
    def step(_, carry):
      pool, x = carry
      pool = kind.write(pool, k + x[:, :2], v, pages, pages)
      return pool, kind.attend(q + x, pool, *rest, decode=True)

    return jax.lax.fori_loop(0, 3, step, (pool, q))

  kv = jnp.zeros((2, 2, 16))
  rest = [case[n] for n in ("kv_lens", "tables", "cu_q_lens", "rows")]
  arguments = (pool, case["q"], kv, kv, case["kv_lens"], *rest)
  memory = (
    jax.jit(loop, donate_argnums=0)
    .lower(*arguments)
    .compile()
    .memory_analysis()
  )
  sizes = [leaf.size * 4 for leaf in jax.tree.leaves(pool)]
  assert memory.alias_size_in_bytes == sum(sizes)
  assert memory.temp_size_in_bytes < min(sizes) / 2


def test_auto_is_what_the_machine_has():
  for platform, head_dim, dtype, kind in (
    ("tpu", 128, "bfloat16", "rpa"),
    ("tpu", 64, "bfloat16", "xla"),
    ("gpu", 128, "bfloat16", "cudnn"),
    ("gpu", 64, "float16", "cudnn"),
    ("gpu", 128, "float32", "xla"),
    ("gpu", 256, "bfloat16", "xla"),
    ("gpu", 36, "bfloat16", "xla"),
    ("cpu", 128, "bfloat16", "xla"),
  ):
    asked = attention.resolve("auto", platform, head_dim, dtype, 1)
    assert asked == kind, (platform, head_dim, dtype)
  for name in ("cudnn", "cudnn_contiguous"):
    assert attention.resolve(name, "gpu", 128, "bfloat16", 4) == name


@pytest.mark.parametrize(
  ("kind", "platform", "message"),
  [
    ("rpa", "cpu", "'rpa' needs a TPU and a head size of 128; here: cpu"),
    ("cudnn", "tpu", "'cudnn' needs an NVIDIA GPU, bfloat16 or float16"),
    (
      "cudnn_contiguous",
      "cpu",
      r"^engine\.cache = 'contiguous' needs an NVIDIA .* 'paged' takes",
    ),
    ("flash", "gpu", "'flash' is unknown. Choices: auto, xla, rpa, cudnn"),
  ],
)
def test_a_kind_that_cannot_run_is_refused(kind, platform, message):
  with pytest.raises(ValueError, match=message):
    attention.resolve(kind, platform, 128, "bfloat16", 1)


# --- compiled for absent hardware ------------------------------------------

# A program for a machine that is absent cannot come out of the cache again.
uncached = pytest.mark.filterwarnings("ignore:Error reading persistent")


def compiled(target, kind, decode, kv_heads, group, tensor):
  """Writes and attends in a loop on each device of a host; 64 rows."""
  mesh = sharding.rollout_mesh(tensor, devices=targets.find(target).host)
  shards, rows, tokens = mesh.shape["data"], 64, 64 if decode else 256
  pages = (rows + 1) * W
  heads = PartitionSpec("data", None, "tensor")
  data = PartitionSpec("data")
  pool = jax.eval_shape(
    lambda: kind.pool(pages, 128, kv_heads * tensor, 128, jnp.bfloat16)
  )

  def shape(spec, *sizes, dtype=jnp.int32):
    where = NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct((shards, *sizes), dtype, sharding=where)

  def device(*arguments):
    pool, q, k, v, pages, *rest = jax.tree.map(lambda x: x[0], arguments)

    def step(_, carry):
      pool, x = carry
      pool = kind.write(pool, k + x[:, : k.shape[1]], v, pages, pages)
      return pool, kind.attend(q + x, pool, *rest, decode=decode)

    out = jax.lax.fori_loop(0, rest[-1], step, (pool, q))
    return jax.tree.map(lambda x: x[None], out)

  half = functools.partial(shape, heads, tokens, dtype=jnp.bfloat16)
  arguments = (
    jax.tree.map(
      lambda x, spec: shape(spec, *x.shape, dtype=x.dtype), pool, kind.pool_spec
    ),
    *(half(n * kv_heads * tensor, 128) for n in (group, 1, 1)),
    shape(data, tokens),
    shape(data, rows),
    shape(data, rows, W),
    shape(data, rows + 1),
    shape(data),
  )
  program = jax.shard_map(
    device,
    mesh=mesh,
    in_specs=(kind.pool_spec, heads, heads, heads, *[data] * 5),
    out_specs=(kind.pool_spec, heads),
    check_vma=False,
  )
  done = jax.jit(program, donate_argnums=0).lower(*arguments).compile()
  owned = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pool))
  memory = done.memory_analysis()
  assert memory.alias_size_in_bytes >= owned // tensor
  return done.as_text(), memory.temp_size_in_bytes / (owned // tensor)


@pytest.mark.slow
@pytest.mark.compiles
@uncached
@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize(
  ("target", "kv_heads", "group"),
  [
    *itertools.product(["v5e:2x2"], [1, 2, 4, 8], [4, 7]),
    *(("v5p:2x2x1", 8, 4), ("v5p:2x2x1", 1, 7)),
    *(("v6e:2x2", 8, 4), ("v6e:2x2", 1, 7)),
  ],
)
def test_compiles_for_tpu(target, kv_heads, group, decode):
  pytest.importorskip("libtpu")
  kind = attention.KINDS["rpa"]
  text, beside = compiled(target, kind, decode, kv_heads, group, tensor=2)
  assert 'custom_call_target="tpu_custom_call"' in text
  assert beside < 0.05


@pytest.mark.slow
@pytest.mark.compiles
@uncached
@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize(("kv_heads", "group"), [(8, 4), (4, 7), (1, 7)])
@pytest.mark.parametrize("name", ["cudnn", "cudnn_contiguous"])
def test_compiles_for_a100(name, kv_heads, group, decode):
  for module in ("jax_plugins.xla_cuda12", "nvidia.cudnn", "nvidia.cuda_nvcc"):
    pytest.importorskip(module)
  kind = attention.KINDS[name]
  text, beside = compiled("a100:8", kind, decode, kv_heads, group, tensor=1)
  assert 'custom_call_target="__cudnn$fmha' in text
  if name == "cudnn_contiguous":  # no copy of the pages
    assert beside < 0.1
