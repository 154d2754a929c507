import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sesa_jax import checkpoint, types
from sesa_jax.learner import learner as learning
from sesa_jax.policy import backbones, model, sharding

BACKBONE = backbones.tiny(vocab_size=64)
GRAPHDEF = model.build(BACKBONE)
draw = jax.jit(functools.partial(model.init, BACKBONE))
SETTINGS = dict(
  learning_rate=1e-3,
  warmup_updates=1,
  minibatch_questions=100,
  clip_low=0.2,
  clip_high=0.285,
  kl_coefficient=0.05,
  gradient_clip=0.01,  # so low that it always clips
  weight_decay=0.1,
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
  drawn = draw(jax.random.key(0))
  return jax.tree.map(lambda leaf: leaf * (5.0 if leaf.ndim > 2 else 1), drawn)


@pytest.fixture(scope="module")
def reference():
  return draw(jax.random.key(1))


def episode(name, attempt, rng, lengths):
  """Prompt, sampled, observed and again sampled ids."""
  length = int(rng.choice(lengths))
  cuts = np.sort(rng.choice(np.arange(1, length), 3, replace=False))
  mask = np.repeat([0, 1, 0, 1], np.diff([0, *cuts, length])) > 0
  engine = rng.normal(-4, 0.5, length)
  return types.Episode(
    request_id=name,
    attempt=attempt,
    arm="solver",
    ids=rng.integers(1, 64, length).astype(np.int32),
    prompt_length=int(cuts[0]),
    mask=mask,
    logprobs=np.where(mask, engine, 0).astype(np.float32),
    turns=(),
    finish="answer",
  )


def lessons(questions=3, attempts=3, seed=0, lengths=(22,)):
  """One length, unless told otherwise: `naive_slope` is compiled for each."""
  rng = np.random.default_rng(seed)
  return [
    types.Lesson(episode(f"q{q}", a, rng, lengths), float(rng.normal()))
    for q in range(questions)
    for a in range(attempts)
  ]


@jax.jit
def naive_row(params, ids, temperature):
  """Logprobs of ids 1, 2, ...: no padding, no chunks, the full softmax."""
  hidden = model.hidden(
    GRAPHDEF,
    params,
    ids[None],
    jnp.arange(ids.size)[None],
    jnp.ones_like(ids)[None],
    compute_dtype=jnp.float32,
    remat=False,
  )
  logits = model.logits(GRAPHDEF, params, hidden)[0] / temperature
  rows = jax.nn.log_softmax(logits[:-1])
  return rows[jnp.arange(ids.size - 1), ids[1:]]


def naive_logprobs(params, episode, temperature=1.0):
  """Logprobs of the sampled ids of one episode alone, float64."""
  row = naive_row(params, episode.ids, temperature)
  return np.float64(row)[episode.mask[1:]]


@jax.jit
def naive_row_loss(
  params, ids, mask, advantage, engine, old, base, temperature
):
  """TRL's formula for one row: the masked mean of its token losses."""
  new = naive_row(params, ids, temperature)
  ratio = jnp.exp(new - old)
  gain = jnp.minimum(
    ratio * advantage, jnp.clip(ratio, 1 - 0.2, 1 + 0.285) * advantage
  )
  gain = gain * jnp.minimum(jnp.exp(old - engine), 2.0)
  kl = jnp.exp(base - new) - (base - new) - 1
  return ((-gain + 0.05 * kl) * mask).sum() / mask.sum()


naive_slope = jax.jit(jax.value_and_grad(naive_row_loss))


def naive_loss(params, start, reference, batch, temperature=1.0):
  """The mean over rows of the definition, and its gradient."""
  values, gradients = [], []
  for lesson in batch:
    e = lesson.episode
    value, gradient = naive_slope(
      params,
      e.ids,
      e.mask[1:],
      lesson.advantage,
      e.logprobs[1:],
      naive_row(start, e.ids, temperature),
      naive_row(reference, e.ids, temperature),
      temperature,
    )
    values.append(float(value))
    gradients.append(jax.tree.map(np.float64, gradient))
  mean = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *gradients)
  return np.mean(values), mean


def learned(policy, metrics):
  """The gradient of a first update, from Adam's first moment."""
  scale = metrics["grad_norm"] / 0.01 / (1 - 0.9)
  moment = policy.opt_state.adam[0].mu
  return jax.tree.map(lambda leaf: np.float64(leaf) * scale, moment)


def distance(one, other):
  """Returns |one - other| / |other| over all leaves."""
  flat = [
    np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
    for tree in (one, other)
  ]
  return np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1])


def test_one_update_is_adam_on_the_definition(params, reference):
  batch = lessons()
  learner = make()
  after, metrics = learner.update(
    learner.init(params), reference, batch, temperature=0.8
  )

  loss, gradient = naive_loss(params, params, reference, batch, 0.8)
  assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
  norm = math.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(gradient)))
  assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
  assert norm > 0.01  # so the clip has something to do
  assert distance(learned(after, metrics), gradient) < 2e-5

  # AdamW's first step: m / (1 - b1) = g and sqrt(v / (1 - b2)) = |g|.
  def step(path, p, g):
    g = g * 0.01 / norm
    pull = 0.0 if "norm" in jax.tree_util.keystr(path) else 0.1
    return -1e-3 * (g / (np.abs(g) + 1e-8) + pull * p)

  expected = jax.tree_util.tree_map_with_path(step, params, gradient)
  moved = jax.tree.map(np.subtract, after.params, params)
  assert distance(moved, expected) < 1e-3

  # Metrics by their definitions, over all sampled tokens alike.
  rows = []
  for e in (lesson.episode for lesson in batch):
    engine = e.logprobs[e.mask]
    before = naive_logprobs(params, e, 0.8)
    base = naive_logprobs(reference, e, 0.8)
    for one, own, frozen in zip(engine, before, base, strict=True):
      d, weight = frozen - own, math.exp(own - one)
      kl = math.exp(d) - d - 1
      rows.append((kl, min(weight, 2), weight > 2, abs(one - own)))
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


@pytest.mark.parametrize(
  "changes",
  [
    dict(microbatch_rows=1, chunk_tokens=7, remat=True),
    dict(microbatch_rows=16, fsdp=4, tensor=2),
  ],
  ids=["one row at a time", "all rows on eight devices"],
)
def test_how_a_batch_is_cut_does_not_change_the_gradient(
  params, reference, changes
):
  batch = lessons(lengths=range(5, 31))
  found = []
  for learner, order in (make(), batch), (make(**changes), batch[::-1]):
    policy, metrics = learner.update(
      learner.init(params), reference, order, temperature=1.0
    )
    found.append((learned(policy, metrics), metrics))
  assert distance(found[1][0], found[0][0]) < 1e-5
  for name in ("loss", "kl/mean", "tokens", "logprob_gap/max"):
    assert found[1][1][name] == pytest.approx(found[0][1][name], rel=1e-5)


def test_old_logprobs_of_all_minibatches_are_those_of_the_start(
  params, reference
):
  batch = lessons(questions=4)
  learner = make(minibatch_questions=2, learning_rate=1e-2)
  policy, metrics = learner.update(
    learner.init(params), reference, batch, temperature=0.7
  )
  assert metrics["updates"] == int(policy.updates) == 2
  # The same first update, alone: the weights that the second one sees.
  between, _ = learner.update(
    learner.init(params), reference, batch[:6], temperature=0.7
  )
  second = jax.device_get(between.params)  # as `params`: one compilation
  ratios, losses = [], []
  for weights, half in (params, batch[:6]), (second, batch[6:]):
    losses.append(naive_loss(weights, params, reference, half, 0.7)[0])
    for lesson in half:
      new = naive_logprobs(weights, lesson.episode, 0.7)
      ratios += list(np.exp(new - naive_logprobs(params, lesson.episode, 0.7)))
  assert max(abs(r - 1) for r in ratios) > 0.3
  assert metrics["ratio/mean"] == pytest.approx(np.mean(ratios), rel=1e-5)
  assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
  assert 0 < metrics["clip_fraction"] < 1


def with_logprobs(episode, logprobs):
  row = np.zeros(len(episode.ids), np.float32)
  row[episode.mask] = logprobs
  return dataclasses.replace(episode, logprobs=row)


def test_a_rewarded_episode_becomes_likelier(params):
  learner = make(kl_coefficient=0.0)
  (one,) = lessons(questions=1, attempts=1, seed=3)
  policy, own = learner.init(params), naive_logprobs(params, one.episode)
  sums = [own.sum()]
  for _ in range(4):
    played = with_logprobs(one.episode, own)
    policy, metrics = learner.update(
      policy, None, [types.Lesson(played, 1.0)], temperature=1.0
    )
    # Logprobs of the right ids, at the right places: no gap.
    assert metrics["logprob_gap/max"] < 1e-4
    assert "kl/mean" not in metrics
    own = naive_logprobs(jax.device_get(policy.params), one.episode)
    sums.append(own.sum())
  assert sums == sorted(sums)
  assert sums[4] > sums[0] + 1


def test_an_episode_of_which_nothing_was_sampled_teaches_nothing(params):
  learner = make(kl_coefficient=0.0)
  (one,) = lessons(questions=1, attempts=1)
  silent = dataclasses.replace(
    one.episode, mask=np.zeros_like(one.episode.mask)
  )
  policy, metrics = learner.update(
    learner.init(params), None, [types.Lesson(silent, 1.0)], temperature=1.0
  )
  assert metrics["grad_norm"] == metrics["tokens"] == 0
  assert metrics["skipped"] == 0


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


@pytest.mark.parametrize(
  ("loss", "slope", "applied"),
  [(1.0, 1.0, 1), (math.nan, 1.0, 0), (1.0, math.inf, 0), (1.0, math.nan, 0)],
)
def test_a_loss_or_a_gradient_alone_skips_an_update(
  params, loss, slope, applied
):
  """A gradient may overflow, and a loss hold what has no gradient."""
  learner = make(gradient_clip=0.9)  # programs of its own: others count theirs
  run = learner.programs
  rates = learning.Rates(1.0, 1.0, 0.2, 0.285, 0.05, 0.0, 2.0, 1e-3, 1)
  policy = learner.init(params)
  gradient, sums = run.zeros(policy.params)
  gradient = jax.tree.map(lambda leaf: leaf + slope, gradient)
  sums = sums._replace(loss=jnp.float32(loss), weight=jnp.float32(1))
  after, (finite, *_) = run.apply(policy, gradient, sums, rates)
  assert bool(finite) == bool(applied)
  assert (int(after.updates), int(after.opt_state.skipped)) == (
    applied,
    1 - applied,
  )


def test_narrow_moments_are_right_on_average():
  """Rounded to the nearest, b2 = 0.999 would keep them where they are."""
  drawn = np.random.default_rng(0).lognormal(-9, 2, 20_000).astype(np.float32)
  tx = optax.chain(optax.scale_by_adam(mu_dtype="bfloat16"))
  params = {"x": jnp.zeros(drawn.size)}
  (scale,) = tx.init(params)
  start = (scale._replace(nu={"x": jnp.array(drawn)}),)

  @jax.jit
  def steps(adam):
    def step(adam, _):
      _, moved = tx.update(params, learning.widened(adam), params)
      return learning.narrowed(moved, "bfloat16"), None

    adam = learning.narrowed(adam, "bfloat16")
    return jax.lax.scan(step, adam, length=500)[0]

  (end,) = steps(start)
  assert end.nu["x"].dtype == end.mu["x"].dtype == jnp.bfloat16
  left = np.float64(end.nu["x"]) / drawn
  assert left.mean() == pytest.approx(0.999**500, rel=5e-3)
  # Large and small alike: it is not a few that fall.
  assert np.quantile(left, 0.99) < 0.8


def test_moments_in_half_the_memory(params, reference):
  wide, narrow = make(), make(moments="bfloat16")
  ends = []
  for learner in wide, narrow:
    policy = learner.init(params)
    for seed in range(3):
      policy, _ = learner.update(
        policy, reference, lessons(seed=seed), temperature=1.0
      )
    ends.append(policy)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), policy)
    assert shapes == jax.tree.map(
      lambda x: (x.shape, x.dtype), learner.abstract()
    )
  moments = ends[1].opt_state.adam[0]
  kinds = {leaf.dtype for leaf in jax.tree.leaves((moments.mu, moments.nu))}
  assert kinds == {jnp.dtype("bfloat16")}
  assert {leaf.dtype.name for leaf in jax.tree.leaves(ends[1].params)} == {
    "float32"
  }
  moved = [jax.tree.map(np.subtract, end.params, params) for end in ends]
  assert 0 < distance(moved[1], moved[0]) < 0.05


def test_weight_decay_alone_spares_the_norms(params):
  learner = make(kl_coefficient=0.0)
  batch = [types.Lesson(one.episode, 0.0) for one in lessons()]
  after, metrics = learner.update(
    learner.init(params), None, batch, temperature=1.0
  )
  assert metrics["grad_norm"] == 0

  def expected(path, leaf):
    spared = "norm" in jax.tree_util.keystr(path)
    return leaf if spared else leaf * (1 - 1e-3 * 0.1)

  jax.tree.map(
    lambda got, leaf: np.testing.assert_allclose(got, leaf, rtol=2e-7),
    after.params,
    jax.tree_util.tree_map_with_path(expected, params),
  )


def test_no_bias_decays_either():
  tree = model.abstract_params(backbones.published("qwen2_5_7b"))
  for path, pulled in jax.tree.leaves_with_path(learning.decayed(tree)):
    name = jax.tree_util.keystr(path)
    assert pulled == ("kernel" in name or "embedding" in name), name


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
  with pytest.raises(ValueError, match=r"loss 'ppo'.*grpo, dapo"):
    make(loss="ppo")
  with pytest.raises(ValueError, match="microbatch_rows 6 .* 4 or 8"):
    make(fsdp=4, microbatch_rows=6)


def test_every_micro_batch_is_reported(params, reference):
  """Episodes, of which a row holds two; what only fills a batch is none."""
  learner = make(microbatch_rows=2, row_multiple=64)
  taught, seen = lessons(3, 3), []
  _, metrics = learner.update(
    learner.init(params),
    reference,
    taught,
    temperature=1.0,
    on_batch=lambda episodes, tokens: seen.append((episodes, tokens)),
  )
  # Of the five rows, the one with room left stands first.
  assert [episodes for episodes, _ in seen] == [1 + 2, 2 + 2, 2]
  assert sum(tokens for _, tokens in seen) == metrics["tokens"]
  assert metrics["tokens"] == sum(t.episode.mask.sum() for t in taught)


def test_an_offload_moves_memory_and_no_bit(params, reference, tmp_path):
  """Two minibatches on a mesh, and a restart from the disk between calls."""
  ends = []
  for offload in False, True:
    learner = make(fsdp=4, tensor=2, minibatch_questions=2, offload=offload)
    run = learner.programs
    frozen = jax.device_put(reference, run.reference)
    policy = learner.init(params)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(frozen)}
    assert kinds == {"pinned_host" if offload else "device"}
    policy, metrics = learner.update(policy, frozen, lessons(), temperature=1.0)
    assert metrics["updates"] == 2
    moments = policy.opt_state.adam[0]
    for leaf in jax.tree.leaves((moments.mu, moments.nu)):
      assert {leaf.sharding.memory_kind} == kinds
    store = checkpoint.Checkpoints(tmp_path / str(offload))
    trees = {"solver": policy}
    store.save(1, trees=trees, host={}, arrays={}, files={})
    restored = store.restore(1, {"solver": learner.abstract()})[0]["solver"]
    store.close()
    restored = types.Policy(*restored)
    assert jax.tree.map(lambda x: x.sharding, restored) == run.policy
    last, _ = learner.update(restored, frozen, lessons(seed=1), temperature=1.0)
    # Donated, wherever it was.
    assert all(x.is_deleted() for x in jax.tree.leaves(restored))
    ends.append(jax.device_get((policy.params, last)))
  jax.tree.map(np.testing.assert_array_equal, *ends)
