"""Attention of the training forward against its definition.

The TPU's kernel runs interpreted, cuDNN's with XLA in its place; both compile
for machines that are absent.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from sesa_jax.plan import targets
from sesa_jax.policy import attention, sharding

# One row of two sequences and padding, one of a single sequence; or one
# sequence and padding each, as cuDNN's rows must be, and a row of padding.
PACKED = np.repeat([[1, 2, 0], [1, 1, 1]], (100, 90, 66), axis=1)
PADDED = np.repeat([[1, 1, 0], [1, 0, 0]], (100, 90, 66), axis=1)
EMPTY = np.repeat([[1, 1, 1], [0, 0, 0]], (100, 90, 66), axis=1)


def inputs(segments, heads=2, kv_heads=1, size=128):
  """q, k, v, segments, and weights of a loss that padding has no part in."""
  rng = np.random.default_rng(0)
  q, k, v, mix = (
    rng.normal(size=(*segments.shape, n, size)).astype(np.float32)
    for n in (heads, kv_heads, kv_heads, heads)
  )
  return q, k, v, np.int32(segments), mix * (segments > 0)[..., None, None]


def definition(q, k, v, segments):
  """Each real query's softmax over what it sees, in float64."""
  out = np.zeros(q.shape)
  for row, token, n in np.argwhere(np.ones(q.shape[:3])):
    seen = np.arange(q.shape[1]) <= token
    seen &= segments[row] == segments[row, token]
    head = n // (q.shape[2] // k.shape[2])
    scores = np.float64(k[row, seen, head]) @ q[row, token, n]
    weights = np.exp(scores / np.sqrt(q.shape[-1]))
    out[row, token, n] = weights @ v[row, seen, head] / weights.sum()
  return out


@functools.partial(jax.jit, static_argnums=0)
def values_and_gradients(attend, q, k, v, segments, mix):
  def loss(q, k, v):
    out = attend(q, k, v, segments)
    return jnp.sum(out * mix), out

  return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)


def check(attend, case):
  """Values by the definition, gradients by the plain way."""
  (_, out), gradients = values_and_gradients(attend, *case)
  real = case[3] > 0
  np.testing.assert_allclose(out[real], definition(*case[:4])[real], atol=2e-5)
  assert np.isfinite(out).all()
  _, expected = values_and_gradients(attention.train_attention, *case)
  for gradient, plain in zip(gradients, expected, strict=True):
    np.testing.assert_allclose(gradient, plain, atol=2e-5)


@pytest.fixture
def small(monkeypatch):
  """The kernels' stand-ins that a CPU can run, in small blocks."""
  swaps = dict(
    splash=functools.partial(attention.splash, interpret=True),
    cudnn=functools.partial(attention.cudnn, implementation="xla"),
    _BLOCK_Q=128,
    _BLOCK_KV=256,
  )
  for name, value in swaps.items():
    monkeypatch.setattr(attention, name, value)
  attention.training.cache_clear()
  yield
  attention.training.cache_clear()


@pytest.mark.parametrize("segments", [PACKED, PADDED, EMPTY])
def test_plain_attention(segments):
  case = inputs(segments, heads=6, kv_heads=2, size=16)
  check(attention.train_attention, case)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
  ("shape", "sizes"),
  # The second length is no multiple of the block of keys.
  [((2, 2), (100, 90, 66)), ((1, 1), (150, 130, 104))],
)
def test_splash(shape, sizes):
  segments = np.repeat([[1, 2, 0], [1, 1, 1]], sizes, axis=1)
  case = inputs(segments, heads=2 * shape[1], kv_heads=shape[1])
  check(attention.training("splash", sharding.mesh(*shape)), case)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("segments", [PADDED, EMPTY])
@pytest.mark.parametrize("shape", [(1, 1), (2, 2)])
def test_cudnn(shape, segments):
  case = inputs(segments, heads=4, kv_heads=2, size=16)
  check(attention.training("cudnn", sharding.mesh(*shape)), case)


@pytest.mark.usefixtures("small")
def test_a_device_keeps_its_rows_and_heads():
  """No collective: what a device has is enough for its share."""
  mesh = sharding.mesh(2, 2)
  spec = NamedSharding(mesh, PartitionSpec("fsdp", None, "tensor"))
  case = inputs(PADDED, heads=4, kv_heads=2, size=16)[:4]
  placed = [jax.device_put(x, spec) for x in case[:3]]
  rows = NamedSharding(mesh, PartitionSpec("fsdp"))
  program = jax.jit(attention.training("cudnn", mesh))
  text = program.lower(*placed, jax.device_put(case[3], rows)).compile()
  for collective in ("all-gather", "all-reduce", "all-to-all", "permute"):
    assert collective not in text.as_text()


def test_equal_choices_are_the_same_function():
  """As an argument of `jax.jit`, it must not compile a program again."""
  for kind in attention.KINDS:
    one = attention.training(kind, sharding.mesh(2, 1))
    assert attention.training(kind, sharding.mesh(2, 1)) is one
  assert attention.training("xla", sharding.mesh(2, 1)) is (
    attention.train_attention
  )
  kinds = {attention.training(k, sharding.mesh(2, 1)) for k in attention.KINDS}
  assert len(kinds) == len(attention.KINDS)


def test_splash_needs_a_multiple_of_128_tokens():
  case = inputs(PACKED[:, :200])[:4]
  with pytest.raises(
    ValueError, match="Rows of 200 tokens.* next one is 256"
  ) as e:
    attention.splash(*case, interpret=True)
  assert "learner.row_multiple" in str(e.value)


def test_cudnn_is_told_of_no_empty_row(monkeypatch):
  """An empty row is one token long; a softmax of nothing is no number."""
  told = {}

  def stand_in(q, k, v, **options):
    told.update(options)
    return q

  monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
  q = jnp.zeros((3, 4, 2, 8))
  segments = jnp.array([[0, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]])
  attention.cudnn(q, q, q, segments)
  for name in "query_seq_lengths", "key_value_seq_lengths":
    assert told[name].tolist() == [1, 3, 4]


def test_auto_is_what_the_machine_has():
  for platform, head_dim, dtype, kind in (
    ("tpu", 128, "bfloat16", "splash"),
    ("tpu", 256, "float32", "splash"),
    ("tpu", 64, "bfloat16", "xla"),
    ("gpu", 128, "bfloat16", "cudnn"),
    ("gpu", 64, "float16", "cudnn"),
    ("gpu", 128, "float32", "xla"),
    ("gpu", 136, "bfloat16", "xla"),
    ("gpu", 36, "bfloat16", "xla"),
  ):
    asked = attention.resolve("auto", platform, head_dim, dtype)
    assert asked == kind, (platform, head_dim, dtype)


@pytest.mark.parametrize(
  ("kind", "platform", "head_dim", "message"),
  [
    ("splash", "cpu", 128, "'splash' needs a TPU and .* multiple of 128"),
    ("splash", "tpu", 64, "here: tpu, bfloat16, head size 64"),
    ("cudnn", "tpu", 128, "'cudnn' needs an NVIDIA GPU, bfloat16 or float16"),
    ("flash", "gpu", 128, "'flash' is unknown. Choices: auto, xla, splash"),
  ],
)
def test_a_kind_that_cannot_run_is_refused(kind, platform, head_dim, message):
  with pytest.raises(ValueError, match=message):
    attention.resolve(kind, platform, head_dim, "bfloat16")


# --- compiled for absent hardware ------------------------------------------

# A program for a machine that is absent cannot come out of the cache again.
uncached = pytest.mark.filterwarnings("ignore:Error reading persistent")


def compiled(target, kind, tensor, length, heads, kv_heads):
  """Gradients of two layers, recomputed as in training; the program's text."""
  devices = targets.find(target).devices
  mesh = sharding.mesh(len(devices) // tensor, tensor, devices)
  attend = attention.training(kind, mesh)

  def shape(*sizes, dtype=jnp.bfloat16, spec=("fsdp", None, "tensor")):
    where = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(
      (len(devices), length, *sizes), dtype, sharding=where
    )

  def loss(q, k, v, segments):
    def layer(x, _):
      return attend(x, k, v, segments), None

    layer = jax.checkpoint(layer, prevent_cse=False)
    out, _ = jax.lax.scan(layer, q, None, length=2)
    return jnp.sum(out.astype(jnp.float32))

  q, k = shape(heads, 128), shape(kv_heads, 128)
  segments = shape(dtype=jnp.int32, spec=("fsdp",))
  program = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
  return program.lower(q, k, k, segments).compile().as_text()


@pytest.mark.slow
@pytest.mark.compiles
@uncached
@pytest.mark.parametrize(
  ("target", "tensor", "length", "heads", "kv_heads"),
  [
    ("v5e:2x2", 1, 512, 16, 8),
    ("v5e:2x2", 2, 12288, 32, 8),
    ("v5p:2x2x1", 4, 4096, 28, 4),
    ("v6e:2x2", 1, 640, 28, 4),
  ],
)
def test_splash_compiles(target, tensor, length, heads, kv_heads):
  pytest.importorskip("libtpu")
  text = compiled(target, "splash", tensor, length, heads, kv_heads)
  for kernel in ("fwd", "dq", "dkv"):
    assert f"splash_mha_{kernel}" in text
  assert 'custom_call_target="tpu_custom_call"' in text


@pytest.mark.slow
@pytest.mark.compiles
@uncached
@pytest.mark.parametrize(
  ("tensor", "length", "heads", "kv_heads"),
  [(1, 4096, 32, 8), (4, 1000, 28, 4)],
)
def test_cudnn_compiles(tensor, length, heads, kv_heads):
  for module in ("jax_plugins.xla_cuda12", "nvidia.cudnn", "nvidia.cuda_nvcc"):
    pytest.importorskip(module)
  text = compiled("a100:8", "cudnn", tensor, length, heads, kv_heads)
  assert "__cudnn$fmhaSoftmax" in text
  assert "__cudnn$fmhaSoftmaxBackward" in text
