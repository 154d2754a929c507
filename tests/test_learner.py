import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sesa_jax import types
from sesa_jax.learner import learner as learning
from sesa_jax.policy import backbones, model, sharding

BACKBONE = backbones.tiny(vocab_size=64)
GRAPHDEF = model.build(BACKBONE)
SETTINGS = dict(
  learning_rate=1e-3,
  warmup_updates=1,
  minibatch_questions=100,
  clip_low=0.2,
  clip_high=0.285,
  kl_coefficient=0.05,
  gradient_clip=1e9,
  weight_decay=0.0,
  microbatch_rows=4,
  row_multiple=32,
  chunk_tokens=48,
  compute_dtype="float32",
  remat=False,
)


def make(fsdp=1, tensor=1, **changes):
  mesh = sharding.mesh(fsdp, tensor)
  return learning.Learner(GRAPHDEF, mesh, **(SETTINGS | changes))


@pytest.fixture(scope="module")
def params():
  # Ten times the usual scale: the policy is far from uniform.
  drawn = model.init(BACKBONE, jax.random.key(0))
  return jax.tree.map(lambda leaf: leaf * (5.0 if leaf.ndim > 2 else 1), drawn)


@pytest.fixture(scope="module")
def reference():
  return model.init(BACKBONE, jax.random.key(1))


def episode(name, attempt, rng, length=None):
  """Prompt, sampled, observed and again sampled ids of random lengths."""
  prompt, first, observed, second = rng.integers(1, 7, 4)
  mask = np.repeat([0, 1, 0, 1], [prompt, first, observed, second]) > 0
  engine = rng.normal(-4, 0.5, mask.size)
  return types.Episode(
    request_id=name,
    attempt=attempt,
    arm="solver",
    ids=rng.integers(1, 64, mask.size).astype(np.int32),
    prompt_length=int(prompt),
    mask=mask,
    logprobs=np.where(mask, engine, 0).astype(np.float32),
    turns=(),
    finish="answer",
  )


def lessons(questions=3, attempts=3, seed=0):
  rng = np.random.default_rng(seed)
  return [
    types.Lesson(episode(f"q{q}", a, rng), float(rng.normal()))
    for q in range(questions)
    for a in range(attempts)
  ]


def naive_logprobs(params, episode, temperature):
  """Logprobs of one episode alone: no padding, no chunks, full softmax."""
  ids = jnp.asarray(episode.ids)[None]
  hidden = model.hidden(
    GRAPHDEF,
    params,
    ids,
    jnp.arange(ids.size)[None],
    jnp.ones_like(ids),
    compute_dtype=jnp.float32,
    remat=False,
  )
  logits = model.logits(GRAPHDEF, params, hidden)[0] / temperature
  rows = jax.nn.log_softmax(logits[:-1])
  return rows[jnp.arange(ids.size - 1), ids[0, 1:]]  # of ids 1, 2, ...


def sampled(episode):
  """Places, in what `naive_logprobs` returns, of sampled ids."""
  return [t - 1 for t in range(len(episode.ids)) if episode.mask[t]]


def naive_loss(params, old, reference, batch, temperature):
  """The definition, with TRL's formula: mean over rows of token means."""
  means = []
  for lesson, old_row, reference_row in zip(batch, old, reference, strict=True):
    e, where = lesson.episode, np.array(sampled(lesson.episode))
    new = naive_logprobs(params, e, temperature)[where]
    before = new if old_row is None else old_row[where]
    before = jax.lax.stop_gradient(before)
    ratio = jnp.exp(new - before)
    gain = jnp.minimum(
      ratio * lesson.advantage,
      jnp.clip(ratio, 1 - 0.2, 1 + 0.285) * lesson.advantage,
    )
    engine = e.logprobs[where + 1]
    gain = gain * jnp.minimum(jnp.exp(before - engine), 2.0)
    d = reference_row[where] - new
    kl = jnp.exp(d) - d - 1
    means.append((-gain + 0.05 * kl).mean())
  return sum(means) / len(means)


def first_moment(policy):
  """Adam's, after one update: (1 - b1) times the gradient."""
  return policy.opt_state.adam[1].mu


def distance(one, other):
  """Returns |one - other| / |other| over all leaves."""
  flat = [
    np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
    for tree in (one, other)
  ]
  return np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1])


def test_one_update_is_adam_on_the_definition(params, reference):
  batch = lessons()
  start = make(gradient_clip=0.01, weight_decay=0.1)
  after, metrics = start.update(
    start.init(params), reference, batch, temperature=0.8
  )

  frozen = [naive_logprobs(reference, b.episode, 0.8) for b in batch]
  old = [naive_logprobs(params, b.episode, 0.8) for b in batch]
  loss, gradient = jax.value_and_grad(naive_loss)(
    params, [None] * len(batch), frozen, batch, 0.8
  )
  assert metrics["loss"] == pytest.approx(float(loss), rel=1e-5)
  norm = math.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(gradient)))
  assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
  assert norm > 0.01  # so the clip has something to do

  # AdamW's first step: m / (1 - b1) = g and sqrt(v / (1 - b2)) = |g|.
  def step(path, p, g):
    g = np.float64(g) * 0.01 / norm
    pull = 0.0 if "norm" in jax.tree_util.keystr(path) else 0.1
    return p - 1e-3 * (g / (np.abs(g) + 1e-8) + pull * p)

  expected = jax.tree_util.tree_map_with_path(step, params, gradient)
  moved = jax.tree.map(np.subtract, after.params, params)
  assert distance(moved, jax.tree.map(np.subtract, expected, params)) < 1e-2
  assert distance(first_moment(after), gradient) == pytest.approx(
    1 - 0.1 * 0.01 / norm, rel=1e-5
  )

  # Metrics by their definitions, over all sampled tokens alike.
  rows = []
  for lesson, before, base in zip(batch, old, frozen, strict=True):
    for t in sampled(lesson.episode):
      engine = lesson.episode.logprobs[t + 1]
      d = float(base[t] - before[t])
      weight = math.exp(float(before[t]) - engine)
      gap = abs(engine - float(before[t]))
      rows.append((math.exp(d) - d - 1, min(weight, 2), weight > 2, gap))
  kl, importance, capped, gap = np.mean(rows, axis=0)
  assert 0 < capped < 1
  expected = {
    "kl/mean": kl,
    "importance/mean": importance,
    "importance/capped": capped,
    "logprob_gap/mean": gap,
    "logprob_gap/max": max(row[3] for row in rows),
    "tokens": len(rows),
    "ratio/mean": 1,
    "clip_fraction": 0,
    "updates": 1,
    "skipped": 0,
    "lr": 1e-3,
  }
  for name, value in expected.items():
    assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
  assert 0 < metrics["entropy/mean"] < math.log(64)
  assert 0 < metrics["padding_fraction"] < 1


def test_gradient_equals_that_of_the_definition(params, reference):
  batch = lessons(seed=5)
  learner = make()
  after, _ = learner.update(
    learner.init(params), reference, batch, temperature=1.0
  )
  frozen = [naive_logprobs(reference, b.episode, 1.0) for b in batch]
  gradient = jax.grad(naive_loss)(
    params, [None] * len(batch), frozen, batch, 1.0
  )
  scaled = jax.tree.map(lambda m: m / 0.1, first_moment(after))
  assert distance(scaled, gradient) < 2e-5


@pytest.mark.parametrize(
  "changes",
  [
    dict(microbatch_rows=1, chunk_tokens=7),
    dict(microbatch_rows=16, row_multiple=16, remat=True),
    dict(fsdp=4, tensor=2),
  ],
  ids=["one row", "one batch", "eight devices"],
)
def test_how_a_batch_is_cut_does_not_change_the_gradient(
  params, reference, changes
):
  batch = lessons()
  found = []
  for learner, order in (make(), batch), (make(**changes), batch[::-1]):
    policy, metrics = learner.update(
      learner.init(params), reference, order, temperature=1.0
    )
    found.append((first_moment(policy), metrics))
  assert distance(found[1][0], found[0][0]) < 1e-5
  for name in ("loss", "kl/mean", "tokens", "logprob_gap/max"):
    assert found[1][1][name] == pytest.approx(found[0][1][name], rel=1e-5)


def test_old_logprobs_of_all_minibatches_are_those_of_the_start(
  params, reference
):
  batch = lessons(questions=4)
  learner = make(minibatch_questions=2)
  policy, metrics = learner.update(
    learner.init(params), reference, batch, temperature=1.0
  )
  assert metrics["updates"] == int(policy.updates) == 2
  # The same first update, alone: the weights that the second one sees.
  between, _ = learner.update(
    learner.init(params), reference, batch[:6], temperature=1.0
  )
  ratios, loss = [], []
  for weights, half in (params, batch[:6]), (between.params, batch[6:]):
    old = [naive_logprobs(params, b.episode, 1.0) for b in half]
    frozen = [naive_logprobs(reference, b.episode, 1.0) for b in half]
    loss.append(float(naive_loss(weights, old, frozen, half, 1.0)))
    for lesson, row in zip(half, old, strict=True):
      new = naive_logprobs(weights, lesson.episode, 1.0)
      ratios += [float(jnp.exp(new - row)[t]) for t in sampled(lesson.episode)]
  assert max(abs(r - 1) for r in ratios) > 0.1
  assert metrics["ratio/mean"] == pytest.approx(np.mean(ratios), rel=1e-5)
  assert metrics["loss"] == pytest.approx(np.mean(loss), rel=1e-4)
  clipped = metrics["clip_fraction"]
  assert 0 < clipped < 1


def test_a_rewarded_episode_becomes_likelier_and_its_prompt_is_not_taught(
  params,
):
  learner = make(kl_coefficient=0.0)
  (one,) = lessons(questions=1, attempts=1, seed=3)
  before = naive_logprobs(params, one.episode, 1.0)
  engine = np.where(one.episode.mask, np.r_[0, before], 0).astype(np.float32)
  policy, sums = learner.init(params), []
  for _ in range(4):
    own = types.Episode(**(vars(one.episode) | {"logprobs": engine}))
    policy, metrics = learner.update(
      policy, None, [types.Lesson(own, 1.0)], temperature=1.0
    )
    row = naive_logprobs(policy.params, own, 1.0)
    engine = np.where(own.mask, np.r_[0, row], 0).astype(np.float32)
    sums.append(float(row[np.array(sampled(own))].sum()))
    # Logprobs of the right ids at the right places: no gap.
    assert metrics["logprob_gap/max"] < 1e-4
    assert "kl/mean" not in metrics
  start = float(before[np.array(sampled(one.episode))].sum())
  assert start < sums[0] < sums[1] < sums[2] < sums[3]

  # An episode of which nothing was sampled teaches nothing.
  silent = types.Episode(
    **(vars(one.episode) | {"mask": np.zeros_like(one.episode.mask)})
  )
  policy, metrics = learner.update(
    learner.init(params), None, [types.Lesson(silent, 1.0)], temperature=1.0
  )
  assert not any(leaf.any() for leaf in jax.tree.leaves(first_moment(policy)))
  assert metrics["tokens"] == 0


def test_non_finite_updates_are_skipped_bit_for_bit_and_stop_the_run(
  params, reference
):
  learner = make()
  good = lessons()
  bad = [types.Lesson(good[0].episode, math.nan), *good[1:]]
  policy, _ = learner.update(
    learner.init(params), reference, good, temperature=1.0
  )
  kept = jax.tree.map(np.array, policy)
  for expected in 1, 2:
    policy, metrics = learner.update(policy, reference, bad, temperature=1.0)
    assert (metrics["skipped"], metrics["updates"]) == (1, 0)
    assert all(math.isfinite(value) for value in metrics.values())
    assert int(policy.opt_state.skipped) == expected
    now = policy._replace(opt_state=policy.opt_state._replace(skipped=0))
    was = kept._replace(opt_state=kept.opt_state._replace(skipped=0))
    jax.tree.map(np.testing.assert_array_equal, now, was)
  # One that is applied ends the row ...
  policy, metrics = learner.update(policy, reference, good, temperature=1.0)
  assert (metrics["skipped"], int(policy.opt_state.skipped)) == (0, 0)
  for _ in range(2):
    policy, _ = learner.update(policy, reference, bad, temperature=1.0)
  # ... and the third of a row, over calls, is the end.
  with pytest.raises(learning.NonFiniteUpdate, match="3 updates in a row"):
    learner.update(policy, reference, bad, temperature=1.0)


def test_warm_up_is_linear_and_counts_applied_updates(params):
  learner = make(kl_coefficient=0.0, warmup_updates=4)
  policy, rates = learner.init(params), []
  for _ in range(5):
    policy, metrics = learner.update(policy, None, lessons(1), temperature=1.0)
    rates.append(metrics["lr"])
  np.testing.assert_allclose(rates, [2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])


def test_the_weights_that_a_policy_starts_from_survive_it(params, reference):
  learner = make()
  mine = jax.device_put(params, learner.programs.policy.params)
  policy = learner.init(mine)
  after, _ = learner.update(policy, reference, lessons(), temperature=1.0)
  leaf = jax.tree.leaves
  assert all(x.is_deleted() for x in leaf(policy.params))  # donated
  assert not any(x.is_deleted() for x in leaf(mine) + leaf(reference))
  where = jax.tree.map(lambda x: x.sharding, after)
  assert jax.tree.all(
    jax.tree.map(lambda a, b: a == b, where, learner.programs.policy)
  )


def test_rates_lengths_and_iterations_share_programs(params, reference):
  one = make()
  other = make(learning_rate=5e-4, clip_high=0.2, kl_coefficient=0.2)
  assert one.programs is other.programs
  run = one.programs
  policy, again = one.init(params), other.init(params)
  for seed in range(2):
    policy, _ = one.update(policy, reference, lessons(), temperature=1.0)
    sizes = run.accumulate._cache_size(), run.apply._cache_size()
    again, _ = other.update(
      again, reference, lessons(2, seed=seed), temperature=0.9
    )
    assert (run.accumulate._cache_size(), run.apply._cache_size()) == sizes
  assert run.apply._cache_size() == 1


def test_no_lessons_change_nothing(params, reference):
  learner = make()
  policy, metrics = learner.update(
    learner.init(params), reference, [], temperature=1.0
  )
  jax.tree.map(np.testing.assert_array_equal, policy.params, params)
  assert metrics["updates"] == metrics["skipped"] == metrics["tokens"] == 0


def test_what_no_update_could_use_is_refused():
  with pytest.raises(ValueError, match=r"learner.loss 'ppo'.*grpo, dapo"):
    make(loss="ppo")
  with pytest.raises(ValueError, match="microbatch_rows 6 .* 4 or 8"):
    make(fsdp=4, microbatch_rows=6)
