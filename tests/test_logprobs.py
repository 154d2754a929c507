import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sesa_jax.learner import logprobs

ROWS, LENGTH, DIM, VOCABULARY = 2, 11, 5, 37


@pytest.fixture(scope="module")
def values():
  rng = np.random.default_rng(0)
  return (
    rng.normal(0, 2, (ROWS, LENGTH, DIM)),
    rng.normal(0, 1, (VOCABULARY, DIM)),
    rng.integers(0, VOCABULARY, (ROWS, LENGTH)),
  )


# As of a prompt, two turns and an observation; and of a row that was all
# sampled, but for what nothing precedes.
MASK = np.array([[0, 0, 0, 1, 1, 0, 0, 0, 1, 0, 0], [1] * 11], bool)


def naive(hidden, head, ids, temperature):
  """Full float64 softmax of what stands before each sampled id."""
  logits = hidden @ head.T / temperature
  q = np.exp(logits - logits.max(-1, keepdims=True))
  q /= q.sum(-1, keepdims=True)
  chosen, entropy = np.zeros(ids.shape), np.zeros(ids.shape)
  for row in range(ids.shape[0]):
    for t in np.flatnonzero(MASK[row, 1:]) + 1:
      chosen[row, t] = np.log(q[row, t - 1, ids[row, t]])
      entropy[row, t] = -(q[row, t - 1] * np.log(q[row, t - 1])).sum()
  return chosen, entropy


def chunked(hidden, head, ids, temperature, chunk_tokens, mask=MASK):
  return logprobs.token_logprobs(
    lambda h: h @ head.T,
    hidden,
    jnp.asarray(ids),
    jnp.asarray(mask),
    temperature=temperature,
    chunk_tokens=chunk_tokens,
  )


@pytest.mark.parametrize("chunk_tokens", [1, 6, 8, 1000])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_equals_the_full_softmax(values, chunk_tokens, temperature):
  hidden, head, ids = values
  got = chunked(
    jnp.float32(hidden), jnp.float32(head), ids, temperature, chunk_tokens
  )
  expected = naive(hidden, head, ids, temperature)
  np.testing.assert_allclose(got[0], expected[0], rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(got[1], expected[1], rtol=1e-5, atol=1e-5)


def test_gradient_is_that_of_softmax_and_entropy_has_none(values):
  hidden, head, ids = values
  weights = np.random.default_rng(1).normal(size=ids.shape)

  def total(hidden, head, of):
    return jnp.sum(weights * chunked(hidden, head, ids, 0.7, 6)[of])

  args = jnp.float32(hidden), jnp.float32(head)
  got = jax.grad(total, (0, 1))(*args, 0)
  # d log q_i / d logit_v = (1[v = i] - q_v) / temperature.
  logits = hidden @ head.T / 0.7
  q = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  slope = np.zeros_like(q)
  for row in range(ROWS):
    for t in np.flatnonzero(MASK[row, 1:]) + 1:
      onehot = np.arange(VOCABULARY) == ids[row, t]
      slope[row, t - 1] = weights[row, t] * (onehot - q[row, t - 1]) / 0.7
  np.testing.assert_allclose(got[0], slope @ head, rtol=1e-3, atol=1e-4)
  expected = np.einsum("btv,btd->vd", slope, hidden)
  np.testing.assert_allclose(got[1], expected, rtol=1e-3, atol=1e-4)
  for leaf in jax.grad(total, (0, 1))(*args, 1):
    assert not leaf.any()


def test_never_holds_all_logits(values):
  hidden, head, ids = values

  def total(head):
    return chunked(jnp.float32(hidden), head, ids, 1.0, 4)[0].sum()

  program = str(jax.make_jaxpr(jax.grad(total))(jnp.float32(head)))
  assert f"f32[2,2,{VOCABULARY}]" in program  # a chunk: 2 rows, 2 columns
  assert (
    f"f32[6,2,2,{VOCABULARY}]" not in program
  )  # nothing stacked over chunks
  assert f"f32[{ROWS},{LENGTH},{VOCABULARY}]" not in program


def test_a_masked_vocabulary_id_spoils_no_entropy():
  head = jnp.array([0.0, 0.0, -jnp.inf])
  got, entropy = logprobs.token_logprobs(
    lambda h: h + head,
    jnp.zeros((1, 2, 1)),
    jnp.array([[0, 1]]),
    jnp.ones((1, 2), bool),
    temperature=1.0,
    chunk_tokens=8,
  )
  assert float(got[0, 1]) == pytest.approx(np.log(0.5))
  assert float(entropy[0, 1]) == pytest.approx(np.log(2))


def test_chunks_in_which_nothing_was_sampled_are_skipped(values):
  hidden, head, ids = map(jnp.asarray, values)
  calls = []

  def project(h):
    jax.debug.callback(lambda: calls.append(h.shape))
    return jnp.float32(h @ head.T)

  def total(hidden, mask):
    return logprobs.token_logprobs(
      project, hidden, ids, mask, temperature=1.0, chunk_tokens=4
    )[0].sum()

  # Chunks of two columns: 3 and 1 sampled ids are 2 of 6, wherever they stand.
  mask = np.array(MASK)
  mask[1, :-1] = False
  jax.block_until_ready(total(hidden, jnp.asarray(mask)))
  jax.effects_barrier()
  assert calls == [(2, 2, DIM)] * 2
  calls.clear()
  nothing = jnp.zeros_like(mask)
  value, slope = jax.value_and_grad(total)(hidden, nothing)
  jax.effects_barrier()
  assert value == 0
  assert not slope.any()
  assert calls == []


def test_the_entropy_has_a_gradient_where_there_is_a_bonus_on_it(values):
  hidden, head, ids = values
  weights = np.random.default_rng(1).normal(size=ids.shape)

  def total(hidden):
    _, entropy = logprobs.token_logprobs(
      lambda h: h @ jnp.float32(head).T,
      hidden,
      jnp.asarray(ids),
      jnp.asarray(MASK),
      temperature=0.7,
      chunk_tokens=6,
      entropy_gradient=True,
    )
    return jnp.sum(weights * entropy)

  got = jax.grad(total)(jnp.float32(hidden))
  step = 1e-5
  for place in np.ndindex(hidden.shape):
    sides = []
    for sign in 1, -1:
      moved = hidden.copy()
      moved[place] += sign * step
      entropy = naive(moved, head, ids, 0.7)[1]
      sides.append((weights * entropy).sum())
    slope = (sides[0] - sides[1]) / (2 * step)
    assert got[place] == pytest.approx(slope, rel=1e-3, abs=1e-4)
