import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import install_import_hook

with install_import_hook("sesa_jax.learner.grpo", "beartype.beartype"):
  from sesa_jax.learner import grpo

KEYWORDS = dict(
  ratio="token",
  clip_low=0.2,
  clip_high=0.285,
  kl_coefficient=0.01,
  entropy_coefficient=0.0,
  importance_cap=2.0,
)


def advantages(rewards, groups, hops=None, baseline="group", epsilon=1e-6):
  return grpo.advantages(
    np.array(rewards, float),
    np.array(groups),
    np.array(hops if hops is not None else [1] * len(rewards), int),
    baseline=baseline,
    epsilon=epsilon,
  )


def naive_advantages(rewards, keys, epsilon):
  out = []
  for reward, key in zip(rewards, keys, strict=True):
    mine = [r for r, k in zip(rewards, keys, strict=True) if k == key]
    mean = math.fsum(mine) / len(mine)
    if len(set(mine)) == 1:
      out.append(0.0)
      continue
    square = math.fsum((r - mean) ** 2 for r in mine)
    out.append(
      (reward - mean) / (math.sqrt(square / (len(mine) - 1)) + epsilon)
    )
  return out


def test_two_groups_have_the_advantages_worked_by_hand():
  got = advantages([1, 0, 0, 1, 1, 1], ["a", "a", "a", "b", "b", "b"])
  expected = [1.155, -0.577, -0.577, 0, 0, 0]
  np.testing.assert_allclose(got, expected, atol=5e-4)
  assert got[3:].tolist() == [0, 0, 0]


def test_a_group_is_its_id_wherever_its_rows_stand():
  got = advantages([1, 1, 0, 1, 0, 1], ["a", "b", "a", "b", "a", "b"])
  expected = [1.155, 0, -0.577, 0, -0.577, 0]
  np.testing.assert_allclose(got, expected, atol=5e-4)


def test_baselines_compare_within_their_own_sets():
  rewards, groups, hops = [1, 0, 0, 1], [0, 1, 2, 3], [1, 1, 2, 2]
  # Sample std of [1, 0, 0, 1] is sqrt(1/3), of [1, 0] it is sqrt(1/2).
  batch = advantages(rewards, groups, hops, "batch", epsilon=0.0)
  np.testing.assert_allclose(batch, np.array([1, -1, -1, 1]) * math.sqrt(3) / 2)
  hop = advantages(rewards, groups, hops, "hop", epsilon=0.0)
  np.testing.assert_allclose(hop, np.array([1, -1, -1, 1]) / math.sqrt(2))
  assert advantages(rewards, groups, hops, "none").tolist() == rewards
  assert advantages(rewards, groups, hops, "group").tolist() == [0] * 4


def test_equal_rewards_give_exactly_nothing():
  # The mean of three .1s is not .1 in floating point.
  assert sum([0.1] * 3) / 3 != 0.1
  assert advantages([0.1] * 3, [0] * 3, epsilon=1e-20).tolist() == [0] * 3


@given(
  st.lists(
    st.tuples(st.sampled_from([0, 1, 0.64, -0.1]), st.integers(0, 4)),
    max_size=25,
  ),
  st.sampled_from([0.0, 1e-6, 0.1]),
)
def test_ragged_groups_equal_the_definition(pairs, epsilon):
  rewards, groups = [r for r, _ in pairs], [g for _, g in pairs]
  np.testing.assert_allclose(
    advantages(rewards, groups, epsilon=epsilon),
    naive_advantages(rewards, groups, epsilon),
    rtol=1e-9,
    atol=1e-12,
  )
  differ = [
    len({r for r, g in pairs if g == group}) > 1 for group in set(groups)
  ]
  fraction = grpo.informative(np.array(rewards, float), np.array(groups))
  assert fraction == (sum(differ) / len(differ) if differ else 0)


@pytest.mark.parametrize("name", ["grup", "", "batches"])
def test_an_unknown_baseline_lists_the_choices(name):
  with pytest.raises(ValueError, match="group, batch, hop, none"):
    advantages([1.0], [0], baseline=name)


def test_a_group_of_one_is_no_baseline():
  grpo.check_baseline("challenger.baseline", "batch", 1)
  grpo.check_baseline("challenger.baseline", "group", 2)
  with pytest.raises(ValueError, match=r"challenger.baseline 'group'.*of 1"):
    grpo.check_baseline("challenger.baseline", "group", 1)


# --- the loss ---------------------------------------------------------------


def tokens(seed, rows=4, length=9, spread=0.7):
  """Random logprobs, advantages and ragged masks."""
  rng = np.random.default_rng(seed)
  logprobs = rng.normal(-2, spread, (5, rows, length))
  mask = rng.random((rows, length)) < 0.6
  mask[:, 1] = True
  mask[-1] = seed % 2 == 0  # a row that only fills the batch, at times
  counts = np.maximum(mask.sum(1, keepdims=True), 1)
  advantages = np.broadcast_to(rng.normal(0, 1, (rows, 1)), mask.shape)
  return dict(
    zip(
      ("new", "old", "engine", "reference", "entropy"),
      np.float32(logprobs),
      strict=True,
    ),
    advantages=np.float32(advantages),
    weights=np.float32(mask / counts),
    shares=np.float32(mask / counts),
    mask=mask,
    segments=np.ones(mask.shape, np.int32),
  )


def run(values, **changes):
  return grpo.policy_loss(
    *(jnp.asarray(value) for value in values.values()), **(KEYWORDS | changes)
  )


def clamp(x):
  return max(-20.0, min(20.0, x))


def naive(values, low, high, beta, cap):
  """The definition, token by token: mean over episodes of token means."""
  v = {name: np.float64(value) for name, value in values.items()}
  episodes, every = [], []
  for row in range(v["new"].shape[0]):
    losses = []
    for t in range(v["new"].shape[1]):
      if not values["mask"][row, t]:
        continue
      new, old, engine, reference, advantage = (
        v[name][row, t]
        for name in ("new", "old", "engine", "reference", "advantages")
      )
      ratio = math.exp(clamp(new - old))
      weight = math.exp(clamp(old - engine))
      bound = min(max(ratio, 1 - low), 1 + high)
      d = clamp(reference - new)
      kl = math.exp(d) - d - 1
      gain = min(weight, cap) * min(ratio * advantage, bound * advantage)
      losses.append(-gain + beta * kl)
      clipped = (advantage > 0 and ratio > 1 + high) or (
        advantage < 0 and ratio < 1 - low
      )
      gap = abs(engine - old)
      every.append(
        (kl, v["entropy"][row, t], clipped, ratio, min(weight, cap))
        + (weight > cap, gap)
      )
    if losses:
      episodes.append(sum(losses) / len(losses))
  means = np.mean(np.array(every, float), axis=0)
  return np.mean(episodes), means, max(row[-1] for row in every)


@pytest.mark.parametrize("seed", range(6))
def test_loss_and_metrics_equal_the_definition(seed):
  values = tokens(seed)
  sums = run(values)
  loss, means, gap = naive(values, 0.2, 0.285, 0.01, 2.0)
  assert float(sums.loss / sums.weight) == pytest.approx(loss, rel=1e-5)
  got = [getattr(sums, name) / sums.tokens for name in grpo.Sums._fields[3:10]]
  np.testing.assert_allclose(got, means, rtol=1e-5)
  assert float(sums.gap_max) == pytest.approx(gap, rel=1e-5)
  # The examples reach every branch.
  assert 0 < means[2] < 1
  assert 0 < means[5] < 1


def test_gradient_equals_the_slope_of_the_definition():
  values = tokens(1)
  values["new"] = np.float64(values["new"])

  def loss(new):
    sums = run(values | {"new": new})
    return sums.loss / sums.weight

  got = np.array(jax.grad(loss)(jnp.float32(values["new"])))
  step = 1e-6
  for place in itertools.product(range(4), range(9)):
    above, below = (dict(values, new=values["new"].copy()) for _ in range(2))
    above["new"][place] += step
    below["new"][place] -= step
    args = 0.2, 0.285, 0.01, 2.0
    slope = (naive(above, *args)[0] - naive(below, *args)[0]) / (2 * step)
    assert got[place] == pytest.approx(slope, rel=1e-3, abs=1e-6)


def test_only_new_logprobs_have_a_gradient_at_an_advantage_of_one():
  # One token, nothing moved: d loss / d new = -A, whatever was clipped.
  one = jnp.ones((1, 1))
  gradient = jax.grad(
    lambda new: (
      grpo.policy_loss(
        new,
        *(-one,) * 3,
        one,
        3 * one,
        one,
        one,
        jnp.ones((1, 1), bool),
        jnp.ones((1, 1), int),
        **KEYWORDS,
      ).loss
    )
  )(-one)
  assert float(gradient[0, 0]) == pytest.approx(-3)


def test_kl_of_observed_tokens_does_not_count():
  # Sampled [5, 6], observed [7, 8, 9], sampled [10].
  mask = np.array([[1, 1, 0, 0, 0, 1]], bool)

  def d_of(kl):  # solves exp(d) - d - 1 = kl for d > 0
    low, high = 0.0, 10.0
    for _ in range(60):
      mid = (low + high) / 2
      low, high = (mid, high) if math.exp(mid) - mid - 1 < kl else (low, mid)
    return low

  reference = np.array([[d_of(x) for x in (0.1, 0.1, 9, 9, 9, 0.1)]])
  zeros = jnp.zeros((1, 6))
  sums = grpo.policy_loss(
    *(zeros,) * 3,
    jnp.float32(reference),
    zeros,
    zeros,
    jnp.float32(mask / 3),
    jnp.float32(mask / 3),
    jnp.asarray(mask),
    jnp.ones((1, 6), int),
    **KEYWORDS,
  )
  assert float(sums.kl / sums.tokens) == pytest.approx(0.1, rel=1e-5)
  assert float(sums.loss / sums.weight) == pytest.approx(0.001, rel=1e-5)


def test_splitting_a_batch_does_not_change_the_loss():
  values = tokens(3)
  whole = run(values)
  parts = [
    run({name: value[rows] for name, value in values.items()})
    for rows in (slice(0, 1), slice(1, 4))
  ]
  joined = grpo.add_sums(*parts)
  np.testing.assert_allclose(joined, whole, rtol=1e-6)
  averages = [float(part.loss / part.weight) for part in parts]
  assert abs(np.mean(averages) - float(whole.loss / whole.weight)) > 1e-3


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e30])
def test_nothing_outside_the_mask_reaches_loss_or_gradient(garbage):
  values = tokens(2)
  dirty = {
    name: np.where(values["mask"], value, garbage)
    if name in ("new", "old", "engine", "reference", "entropy")
    else value
    for name, value in values.items()
  }

  def both(v):
    return jax.value_and_grad(lambda new: run(v | {"new": new}).loss)(
      jnp.float32(v["new"])
    )

  clean, found = both(values), both(dirty)
  assert clean[0] == found[0]
  np.testing.assert_array_equal(clean[1], found[1])


def test_huge_ratios_are_clamped_in_policy_kl_and_importance():
  values = tokens(0)
  values["old"] -= 500
  values["reference"] += 500
  values["engine"] -= 1500
  sums = run(values)
  assert all(np.isfinite(np.array(sums)))
  bound = math.exp(20) - 20 - 1
  assert float(sums.kl / sums.tokens) == pytest.approx(bound, rel=1e-5)


def test_losses_differ_in_what_divides_a_token():
  # Of 4 ids, where 10 may be sampled: (in the numerator, in the divisor).
  expected = {
    "grpo": (1 / 4, 1 / 4),
    "dapo": (1, 1),
    "dr_grpo": (1 / 10, 1 / 4),
    "gspo": (1 / 4, 1 / 4),
    "reinforce": (1 / 4, 1 / 4),
  }
  assert {
    name: (loss.weight(4, 10), loss.share(4, 10))
    for name, loss in grpo.LOSSES.items()
  } == expected
  with pytest.raises(ValueError, match=r"learner.loss 'ppo'.*grpo, dapo"):
    grpo.one_of("learner.loss", "ppo", grpo.LOSSES)
