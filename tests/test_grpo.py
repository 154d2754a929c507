import itertools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import install_import_hook

with install_import_hook("sesa_jax.learner.grpo", "beartype.beartype"):
  from sesa_jax.learner import grpo, logprobs
  from sesa_jax.plan import hlo
  from sesa_jax.policy import sharding

MOST = 20  # ids that an episode may sample
KEYWORDS = dict(
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


def test_dr_grpo_divides_by_no_standard_deviation():
  grpo.check_loss("solver.loss", "dr_grpo", scaled=False)
  for name in set(grpo.LOSSES) - {"dr_grpo"}:
    grpo.check_loss("solver.loss", name, scaled=True)
  with pytest.raises(ValueError, match="solver.loss 'dr_grpo'.*= False, or"):
    grpo.check_loss("solver.loss", "dr_grpo", scaled=True)


# --- the loss ---------------------------------------------------------------

PER_TOKEN = ("new", "old", "engine", "reference", "entropy")


@pytest.fixture(autouse=True)
def _double_precision():
  with jax.enable_x64(True):
    yield


def tokens(seed, rows=4, length=9, spread=0.7):
  """Random numbers of tokens, ragged masks, 0 to 3 episodes in a row."""
  rng = np.random.default_rng(seed)
  segments = np.sort(rng.integers(1, 4, (rows, length)), axis=1)
  ends = rng.integers(length // 2, length + 1, (rows, 1))
  segments = np.where(np.arange(length) < ends, segments, 0)
  mask = (rng.random((rows, length)) < 0.6) & (segments > 0)
  mask[-1] &= seed % 2 == 0  # a row that only fills the batch, at times
  worth = rng.normal(0, 1, (rows, 4))
  return dict(
    zip(PER_TOKEN, rng.normal(-2, spread, (5, rows, length)), strict=True),
    advantages=np.take_along_axis(worth, segments, axis=1),
    mask=mask,
    segments=segments.astype(np.int32),
  )


def run(values, name="grpo", **changes):
  """Calls `policy_loss` as the learner does."""
  loss = grpo.LOSSES[name]
  counts = np.zeros(values["mask"].shape)
  numbers = range(1, values["segments"].max() + 1)
  for row, segment in itertools.product(range(len(counts)), numbers):
    own = values["segments"][row] == segment
    counts[row][own] = max(1, (own & values["mask"][row]).sum())
  # Weights outside the mask must not matter.
  weights, shares = (
    np.vectorize(lambda n, f=f: f(n, MOST) if n else 9.0, otypes=[float])(
      counts
    )
    for f in (loss.weight, loss.share)
  )
  return grpo.policy_loss(
    *(jnp.asarray(values[name]) for name in (*PER_TOKEN, "advantages")),
    jnp.asarray(weights),
    jnp.asarray(shares),
    jnp.asarray(values["mask"]),
    jnp.asarray(values["segments"]),
    ratio=loss.ratio,
    **(KEYWORDS | changes),
  )


def clamp(x):
  return max(-20.0, min(20.0, x))


def naive(values, name, low=0.2, high=0.285, beta=0.01, eta=0.0, cap=2.0):
  """The definitions, token by token in Python's floats."""
  episodes, every = [], []
  for row, segment in itertools.product(range(len(values["mask"])), (1, 2, 3)):
    places = [
      t
      for t, mine in enumerate(values["segments"][row])
      if mine == segment and values["mask"][row, t]
    ]
    new, old, engine, reference, entropy, advantage = (
      [float(values[of][row, t]) for t in places]
      for of in (*PER_TOKEN, "advantages")
    )
    changes = [n - o for n, o in zip(new, old, strict=True)]
    if name == "gspo":
      changes = [sum(changes) / len(changes) for _ in changes]
    losses = []
    for t in range(len(places)):
      ratio = math.exp(clamp(changes[t]))
      weight = math.exp(clamp(old[t] - engine[t]))
      bound = min(max(ratio, 1 - low), 1 + high)
      d = clamp(reference[t] - new[t])
      kl = math.exp(d) - d - 1
      gain = min(ratio * advantage[t], bound * advantage[t])
      clipped = gain < ratio * advantage[t]
      if name == "reinforce":
        gain, clipped = new[t] * advantage[t], False
      losses.append(-min(weight, cap) * gain + beta * kl - eta * entropy[t])
      every.append(
        (kl, entropy[t], clipped, ratio, min(weight, cap))
        + (weight > cap, abs(engine[t] - old[t]))
      )
    if losses:
      episodes.append(losses)
  if name == "dapo":
    loss = np.mean(sum(episodes, []))
  elif name == "dr_grpo":
    loss = sum(map(sum, episodes)) / (len(episodes) * MOST)
  else:
    loss = np.mean([np.mean(losses) for losses in episodes])
  means = np.mean(np.array(every, float), axis=0)
  return loss, means, max(row[-1] for row in every)


@pytest.mark.parametrize("name", grpo.LOSSES)
@given(st.integers(0, 10_000))
def test_losses_and_metrics_equal_their_definitions(name, seed):
  values = tokens(seed)
  if not values["mask"].any():
    return
  sums = run(values, name, entropy_coefficient=0.03)
  loss, means, gap = naive(values, name, eta=0.03)
  assert float(sums.loss / sums.weight) == pytest.approx(loss, rel=1e-9)
  got = [
    getattr(sums, field) / sums.tokens for field in grpo.Sums._fields[3:10]
  ]
  np.testing.assert_allclose(got, means, rtol=1e-9, atol=1e-12)
  assert float(sums.gap_max) == pytest.approx(gap, rel=1e-9)


def test_the_examples_reach_every_branch():
  found = [naive(tokens(seed), "grpo")[1] for seed in range(6)]
  clipped, capped = np.transpose(found)[[2, 5]]
  assert ((clipped > 0) & (clipped < 1)).all()
  assert ((capped > 0) & (capped < 1)).all()


@pytest.mark.parametrize("name", grpo.LOSSES)
def test_gradient_equals_the_slope_of_the_definition(name):
  values = tokens(1)

  def loss(new):
    sums = run(values | {"new": new}, name)
    return sums.loss / sums.weight

  got = np.array(jax.grad(loss)(jnp.asarray(values["new"])))
  step = 1e-6
  for place in np.ndindex(got.shape):
    above, below = (dict(values, new=values["new"].copy()) for _ in range(2))
    above["new"][place] += step
    below["new"][place] -= step
    slope = (naive(above, name)[0] - naive(below, name)[0]) / (2 * step)
    assert got[place] == pytest.approx(slope, rel=1e-5, abs=1e-8)
  assert (got != 0).any()


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "gspo"])
def test_equals_trl(name):
  """On numbers that `trl_losses.py` gave to TRL's own trainer."""
  path = Path(__file__).with_name("trl_losses.json")
  found = json.loads(path.read_text())
  values = {key: np.array(x) for key, x in found["values"].items()}
  mask = values["mask"] > 0
  loss, counts = grpo.LOSSES[name], mask.sum(1)

  def ours(new):
    sums = grpo.policy_loss(
      new,
      *(jnp.asarray(values[key]) for key in ("old", "engine", "reference")),
      jnp.zeros(mask.shape),
      *(
        jnp.asarray(np.broadcast_to(np.array(x, float)[:, None], mask.shape))
        for x in (
          values["advantages"],
          [loss.weight(n, found["most_tokens"]) for n in counts],
          [loss.share(n, found["most_tokens"]) for n in counts],
        )
      ),
      jnp.asarray(mask),
      jnp.ones(mask.shape, jnp.int32),
      ratio=loss.ratio,
      entropy_coefficient=0.0,
      **found["settings"],
    )
    return sums.loss / sums.weight, sums.clipped

  (got, clipped), gradient = jax.value_and_grad(ours, has_aux=True)(
    jnp.asarray(values["new"])
  )
  assert clipped > 0
  expected = found["losses"][name]
  assert float(got) == pytest.approx(expected["loss"], rel=1e-12)
  np.testing.assert_allclose(
    gradient, expected["gradient"], rtol=1e-9, atol=1e-15
  )


def rows_of(segments, **given):
  """Tokens that are all sampled and, where not given, have not moved."""
  shape = np.shape(segments)
  start = {name: np.full(shape, -1.0) for name in PER_TOKEN}
  start |= dict(advantages=np.ones(shape), segments=np.int32(segments))
  start |= {name: np.array(value, float) for name, value in given.items()}
  return start | dict(mask=start["segments"] > 0)


def value(values, name, **changes):
  sums = run(values, name, **(dict(kl_coefficient=0.0) | changes))
  return float(sums.loss / sums.weight)


def test_what_divides_a_loss_worked_by_hand():
  # An episode of two ids that is worth 1, one of four that is worth -1, packed.
  values = rows_of(
    [[1, 1, 2, 2, 2, 2, 0]], advantages=[[1, 1, -1, -1, -1, -1, 5]]
  )
  assert value(values, "grpo") == pytest.approx((-1 + 1) / 2)
  assert value(values, "dapo") == pytest.approx((-2 + 4) / 6)
  assert value(values, "dr_grpo") == pytest.approx((-2 + 4) / (2 * MOST))
  assert value(values, "gspo") == pytest.approx((-1 + 1) / 2)
  # -log p = 1 for each id.
  assert value(values, "reinforce") == pytest.approx((1 - 1) / 2)


def test_a_group_in_which_all_earned_the_same_still_counts():
  """Its rows are worth 0: they carry KL, and are a part of the divisor."""
  worth = advantages([1, 0, 1, 1], [0, 0, 1, 1], epsilon=0.0)
  assert worth[2:].tolist() == [0, 0]
  values = rows_of(
    [[1, 2, 3, 4]],
    advantages=[worth],
    old=[[-1.1, -1, -1, -1]],
    engine=[[-1.1, -1, -1, -1]],
    reference=[[-1, -1, -2, -1]],
  )
  kl = math.exp(-1) + 1 - 1  # d = -2 - -1
  policy = math.sqrt(0.5) * (1 - math.exp(0.1))
  for name in "grpo", "dapo":
    got = value(values, name, kl_coefficient=0.5)
    assert got == pytest.approx((policy + 0.5 * kl) / 4)


@pytest.mark.parametrize(
  ("change", "advantage", "loss", "slope"),
  [
    (math.log(1.25), 1, -1.25, -1.25),  # rho A has the gradient rho A
    (math.log(1.3), 1, -1.285, 0),
    (math.log(1.3), -1, 1.3, 1.3),  # what grew although it is bad may shrink
    (math.log(0.75), -1, 0.8, 0),
    (math.log(0.75), 1, -0.75, -0.75),
    (math.log(0.85), -1, 0.85, 0.85),
  ],
)
def test_the_clip_worked_by_hand(change, advantage, loss, slope):
  values = rows_of([[1]], old=[[-1 - change]], advantages=[[advantage]])
  values["engine"] = values["old"]
  for name in "grpo", "gspo":
    assert value(values, name) == pytest.approx(loss)
    got = jax.grad(
      lambda new, name=name: run(values | {"new": new}, name).loss
    )(jnp.asarray(values["new"]))
    # k3 has no slope where policy and reference agree.
    assert float(got[0, 0]) == pytest.approx(slope)


def test_a_sequence_has_the_ratio_of_its_mean_worked_by_hand():
  # 56 ids a hundredth below: their sum would be a ratio of 0.57, and clipped.
  many = rows_of([[1] * 56], old=[[-0.99] * 56], engine=[[-0.99] * 56])
  assert value(many, "gspo") == pytest.approx(-math.exp(-0.01))
  assert float(run(many, "gspo").clipped) == 0
  # Two episodes in a row, and padding that has moved: each its own mean.
  old = [[-1.3, -0.9, -0.5, -0.7, 7.0]]
  two = rows_of([[1, 1, 2, 2, 0]], old=old, engine=old)
  means = math.exp((0.3 - 0.1) / 2), math.exp((-0.5 - 0.3) / 2)
  assert value(two, "gspo") == pytest.approx(-sum(means) / 2)
  got = run(two, "gspo")
  assert float(got.ratio / got.tokens) == pytest.approx(sum(means) / 2)


def test_plain_reinforce_knows_no_ratio():
  values = rows_of([[1, 1]], new=[[-3, -1]], advantages=[[2, 2]])
  values["old"] = values["engine"] = np.array([[-1.0, -9.0]])
  # -2 times the mean of -3 and -1: old logprobs, far away, change nothing.
  assert value(values, "reinforce") == pytest.approx(4)
  assert float(run(values, "reinforce").clipped) == 0
  assert float(run(values, "grpo").clipped) == 1


def test_the_entropy_bonus_is_taken_from_the_loss():
  values = rows_of([[1, 1, 2]], entropy=[[2, 4, 9]], advantages=[[0, 0, 0]])
  got = value(values, "grpo", entropy_coefficient=0.1)
  assert got == pytest.approx(-0.1 * ((2 + 4) / 2 + 9) / 2)
  assert value(values, "grpo") == 0


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_gradient_of_hidden_states_equals_the_numerical_one(name):
  """Loss, KL and entropy bonus together, through softmax and chunks."""
  rng = np.random.default_rng(0)
  values, head = tokens(4, rows=2, length=6), rng.normal(size=(7, 3))
  ids = rng.integers(0, 7, values["mask"].shape)
  values["mask"][:, 0] = False  # nothing precedes it

  def loss(hidden):
    new, entropy = logprobs.token_logprobs(
      lambda h: h @ head.T,
      hidden,
      jnp.asarray(ids),
      jnp.asarray(values["mask"]),
      temperature=0.7,
      chunk_tokens=4,
      entropy_gradient=True,
    )
    now = values | dict(new=new, entropy=entropy)
    return run(now, name, entropy_coefficient=0.3, kl_coefficient=0.2).loss

  hidden = rng.normal(size=(2, 6, 3))
  compiled = jax.jit(loss)
  got = jax.jit(jax.grad(loss))(jnp.asarray(hidden))
  for place in np.ndindex(hidden.shape):
    step = np.zeros_like(hidden)
    step[place] = 1e-6
    slope = (compiled(hidden + step) - compiled(hidden - step)) / 2e-6
    assert got[place] == pytest.approx(float(slope), rel=1e-6, abs=1e-8)
  assert (np.abs(got) > 1e-3).any()


def test_only_new_logprobs_have_a_gradient_at_an_advantage_of_one():
  # One token, nothing moved: d loss / d new = -A, whatever was clipped.
  values = rows_of([[1]], advantages=[[3]])
  gradient = jax.grad(lambda new: run(values | {"new": new}).loss)(
    jnp.asarray(values["new"])
  )
  assert float(gradient[0, 0]) == pytest.approx(-3)


def test_kl_of_observed_tokens_does_not_count():
  # Sampled [5, 6], observed [7, 8, 9], sampled [10].
  def d_of(kl):  # solves exp(d) - d - 1 = kl for d > 0
    low, high = 0.0, 10.0
    for _ in range(60):
      mid = (low + high) / 2
      low, high = (mid, high) if math.exp(mid) - mid - 1 < kl else (low, mid)
    return low

  reference = [[d_of(x) - 1 for x in (0.1, 0.1, 9, 9, 9, 0.1)]]
  values = rows_of([[1] * 6], reference=reference, advantages=[[0] * 6])
  values["mask"] = np.array([[1, 1, 0, 0, 0, 1]], bool)
  sums = run(values)
  assert float(sums.kl / sums.tokens) == pytest.approx(0.1)
  assert float(sums.loss / sums.weight) == pytest.approx(0.001)


@pytest.mark.parametrize("name", grpo.LOSSES)
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_splitting_a_batch_does_not_change_the_loss(name, cut):
  values = tokens(2)
  whole = run(values, name)
  parts = [
    run({key: value[rows] for key, value in values.items()}, name)
    for rows in (slice(0, cut), slice(cut, 4))
  ]
  joined = grpo.add_sums(*parts)
  np.testing.assert_allclose(joined, whole, rtol=1e-12)
  if name == "grpo":
    averages = [float(part.loss / part.weight) for part in parts]
    assert abs(np.mean(averages) - float(whole.loss / whole.weight)) > 1e-3


@pytest.mark.parametrize("name", ["grpo", "gspo", "reinforce"])
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e30])
def test_nothing_outside_the_mask_reaches_loss_or_gradient(name, garbage):
  values = tokens(2)
  dirty = {
    key: np.where(values["mask"], value, garbage) if key in PER_TOKEN else value
    for key, value in values.items()
  }

  def both(v):
    return jax.value_and_grad(lambda new: run(v | {"new": new}, name).loss)(
      jnp.asarray(v["new"])
    )

  clean, found = both(values), both(dirty)
  assert clean[0] == found[0]
  np.testing.assert_array_equal(clean[1], found[1])


def test_huge_ratios_are_clamped_in_policy_kl_and_importance():
  values = tokens(0)
  values["old"] -= 500
  values["reference"] += 500
  values["engine"] -= 1500
  for name in grpo.LOSSES:
    sums = run(values, name)
    assert all(np.isfinite(np.array(sums)))
    bound = math.exp(20) - 20 - 1
    assert float(sums.kl / sums.tokens) == pytest.approx(bound)
    assert float(sums.ratio / sums.tokens) == pytest.approx(math.exp(20))


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


def test_on_a_mesh_only_sums_leave_a_device():
  mesh = sharding.mesh(8, 1)
  rows = NamedSharding(mesh, PartitionSpec("fsdp", None))
  values = tokens(0, rows=8, length=16)
  ones = np.ones((8, 16))
  arguments = [
    jax.device_put(x, rows)
    for x in (*(values[key] for key in (*PER_TOKEN, "advantages")), ones, ones)
    + (values["mask"], values["segments"])
  ]

  @jax.jit
  def both(new, *rest):
    def loss(new):
      sums = grpo.policy_loss(new, *rest, ratio="sequence", **KEYWORDS)
      return sums.loss, sums

    return jax.grad(loss, has_aux=True)(new)

  compiled = both.lower(*arguments).compile()
  found = hlo.collectives(compiled.as_text())
  assert {(c.kind, c.bytes > 8 * len(grpo.Sums._fields)) for c in found} == {
    ("all-reduce", False)
  }
  assert compiled(*arguments)[0].sharding.is_equivalent_to(rows, 2)
