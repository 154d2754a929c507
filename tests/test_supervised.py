"""Imitation: its loss and gradient, its rows, its rates, its optimizers."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import transformers

from sesa_jax import types
from sesa_jax.learner import learner as learning
from sesa_jax.learner import packing, supervised
from sesa_jax.policy import backbones, export, model, sharding, tokenizer

BACKBONE = backbones.tiny()
GRAPHDEF = model.build(BACKBONE)
SETTINGS = dict(
  learning_rate=1.0,
  warmup_updates=1000,  # of the policy's own updates: not to be seen here
  minibatch_questions=1,
  clip_low=0.2,
  clip_high=0.2,
  kl_coefficient=0.0,
  loss_scale=3.0,
  weight_decay=0.1,
  gradient_clip=1e9,
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
  # Far from uniform, so that places differ.
  drawn = jax.jit(functools.partial(model.init, BACKBONE))(jax.random.key(0))
  return jax.tree.map(lambda leaf: leaf * (5.0 if leaf.ndim > 2 else 1), drawn)


def episode(ids, mask):
  mask = np.asarray(mask, bool)
  return types.Episode(
    request_id="",
    attempt=0,
    arm="",
    ids=np.asarray(ids, np.int32),
    prompt_length=int(np.argmax(mask)),
    mask=mask,
    logprobs=np.broadcast_to(np.float32(0), mask.shape),
    turns=(),
    finish="",
  )


def episodes(count=7, seed=0):
  """Prompt, own, read and again own ids; the first is never own."""
  rng = np.random.default_rng(seed)
  found = []
  for length in rng.integers(6, 20, count):
    cuts = np.sort(rng.choice(np.arange(1, length), 3, replace=False))
    mask = np.repeat([0, 1, 0, 1], np.diff([0, *cuts, length]))
    # Not the tokenizer's padding, whose row torch leaves alone.
    found.append(episode(rng.integers(4, 512, length), mask))
  return found


def rows(found, count, length=32):
  """Rows in order, as a step takes them."""
  lessons = [(i, types.Lesson(e, 0.0)) for i, e in enumerate(found)]
  lines = packing.fit(sorted(lessons, key=packing.size), length)
  return supervised.batches(lines, rows=count, length=length)


def gradient_of(learner, params, batches):
  run = learner.programs
  gradient, sums = run.zeros(jax.device_put(params, run.policy.params))
  for batch in batches:
    gradient, sums = run.imitate(gradient, sums, params, batch)
  mean = jax.tree.map(lambda g: np.float64(g) / float(sums.weight), gradient)
  return mean, sums


def distance(one, other):
  flat = [
    np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
    for tree in (one, other)
  ]
  return np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1])


# --- the loss ----------------------------------------------------------------


def test_the_loss_is_its_definition():
  rng = np.random.default_rng(0)
  logprobs = rng.normal(-3, 1, (3, 5))
  mask = rng.random((3, 5)) < 0.4
  logprobs[1, 1] = -np.inf if not mask[1, 1] else logprobs[1, 1]
  sums = supervised.next_token_loss(
    jnp.asarray(logprobs, jnp.float32), *(jnp.asarray(mask, jnp.float32),) * 2
  )
  assert float(sums.weight) == float(sums.tokens) == mask.sum()
  expected = -np.float64(logprobs)[mask].mean()
  assert float(sums.loss / sums.weight) == pytest.approx(expected, rel=1e-6)


@pytest.fixture(scope="module")
def in_torch(params, tmp_path_factory):
  """The exported policy in float64, and its loss's gradient on each episode."""
  folder = tmp_path_factory.mktemp("torch") / "model"
  export.save(
    folder,
    BACKBONE,
    tokenizer.tiny(),
    lambda path: np.asarray(
      functools.reduce(lambda node, key: node[key], path.split("/"), params)
    ),
  )
  return transformers.LlamaForCausalLM.from_pretrained(
    folder, dtype=torch.float64
  )


def torch_loss(policy, found):
  """transformers' own cross-entropy, an episode at a time, then one mean."""
  policy.zero_grad()
  total, count = 0.0, 0
  for e in found:
    labels = np.where(e.mask, e.ids, -100)
    loss = policy(
      input_ids=torch.tensor(e.ids[None], dtype=torch.long),
      labels=torch.tensor(labels[None], dtype=torch.long),
    ).loss  # shifted inside, a mean over what is not -100
    total = total + loss * int(e.mask.sum())
    count += int(e.mask.sum())
  (total / count).backward()
  return float(total.detach()) / count


def test_loss_and_gradient_are_those_of_torch_in_float64(params, in_torch):
  found = episodes()
  gradient, sums = gradient_of(make(), params, rows(found, 4))
  expected = torch_loss(in_torch, found)
  assert float(sums.loss / sums.weight) == pytest.approx(expected, rel=1e-6)
  layers = in_torch.model.layers
  for name, theirs in (
    ("q", lambda layer: layer.self_attn.q_proj),
    ("o", lambda layer: layer.self_attn.o_proj),
    ("down", lambda layer: layer.mlp.down_proj),
  ):
    stacked = np.stack([theirs(x).weight.grad.numpy().T for x in layers])
    assert distance(gradient["layers"][name]["kernel"], stacked) < 1e-5
  table = in_torch.model.embed_tokens.weight.grad.numpy()
  assert distance(gradient["embed"]["embedding"], table) < 1e-5


def test_a_step_is_adamw_on_the_mean(params):
  learner = make()
  found = episodes()
  gradient, _ = gradient_of(learner, params, rows(found, 4))
  policy, (sums, (finite, norm, rate)) = learner.imitate(
    learner.init(params), rows(found, 4), 1e-3
  )
  assert bool(finite)
  assert float(rate) == pytest.approx(1e-3)  # nor warm-up, nor loss scale
  assert int(policy.updates) == 1
  assert float(sums.tokens) == sum(e.mask.sum() for e in found)
  flat = np.concatenate([np.ravel(g) for g in jax.tree.leaves(gradient)])
  assert float(norm) == pytest.approx(np.linalg.norm(flat), rel=1e-5)

  def step(path, p, g):
    pull = 0.0 if "norm" in jax.tree_util.keystr(path) else 0.1
    return -1e-3 * (g / (np.abs(g) + 1e-8) + pull * np.float64(p))

  expected = jax.tree_util.tree_map_with_path(step, params, gradient)
  moved = jax.tree.map(np.subtract, policy.params, params)
  assert distance(moved, expected) < 1e-3


@pytest.mark.parametrize(
  "changes",
  [
    dict(count=2),
    dict(count=1, length=64),
    dict(count=4, length=20, attention="blocks"),
    dict(count=4, remat=True, chunk_tokens=8),
    dict(count=4, fsdp=2, tensor=2),
    dict(count=4, fsdp=4, attention="blocks"),
  ],
  ids=str,
)
def test_rows_micro_batches_and_devices_change_nothing(params, changes):
  found = episodes()
  expected, whole = gradient_of(make(), params, rows(found, 4))
  sizes = {"count", "length"} & changes.keys()
  count, length = changes["count"], changes.get("length", 32)
  changes = {name: changes[name] for name in changes.keys() - sizes}
  learner = make(microbatch_rows=count, **changes)
  gradient, sums = gradient_of(learner, params, rows(found, count, length))
  assert float(sums.tokens) == float(whole.tokens)
  assert float(sums.loss) == pytest.approx(float(whole.loss), rel=1e-5)
  assert distance(gradient, expected) < 1e-5


def test_episodes_of_a_row_do_not_see_each_other(params):
  one, two, other = episodes(3, seed=5)
  learner = make(microbatch_rows=1, row_multiple=64)
  (together,) = rows([one, two], 1, 64)
  (changed,) = rows([one, other], 1, 64)
  score = learner.programs.score

  def of(batch, e):
    size = len(e.ids)
    at = next(
      start
      for start in range(64 - size + 1)
      if batch.ids[0, start : start + size].tolist() == e.ids.tolist()
    )
    return np.asarray(score(params, batch, 1.0))[0, at : at + size]

  (alone,) = rows([one], 1, 64)
  np.testing.assert_allclose(of(together, one), of(alone, one), atol=1e-5)
  np.testing.assert_allclose(of(changed, one), of(alone, one), atol=1e-5)
  assert of(alone, one)[one.mask].all()


def test_what_is_read_carries_no_loss(params):
  """Ids behind the last own one, and those of no own place, are no targets."""
  learner = make(microbatch_rows=1)
  ids = np.arange(10, 20)
  mask = [0, 0, 1, 1, 0, 0, 0, 0, 0, 0]
  expected, sums = gradient_of(learner, params, rows([episode(ids, mask)], 1))
  assert float(sums.tokens) == 2
  ids = np.concatenate([ids[:4], np.arange(100, 106)])
  found, _ = gradient_of(learner, params, rows([episode(ids, mask)], 1))
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_step_that_is_not_finite_is_left_out(params):
  learner = make()
  broken = jax.tree.map(lambda leaf: leaf * np.inf, params)
  policy = learner.init(broken)
  policy, (_, (finite, *_)) = learner.imitate(policy, rows(episodes(), 4), 1e-3)
  policy, _ = learner.imitate(policy, rows(episodes(), 4), 1e-3)
  assert not bool(finite)
  assert int(policy.opt_state.skipped) == 2
  assert int(policy.updates) == 0


# --- rows and rates ----------------------------------------------------------


def lessons(count, seed=0):
  rng = np.random.default_rng(seed)
  return [
    (i, types.Lesson(episode(np.full(n, i), [0, *[1] * (n - 1)]), 0.0))
    for i, n in enumerate(rng.integers(2, 33, count))
  ]


def test_an_epoch_has_each_episode_once():
  found = lessons(1500)
  lines = list(supervised.lines(found, length=32, seed=3, epochs=2))
  for epoch in (0, 1):
    numbers = [i for e, line in lines for i, _ in line if e == epoch]
    assert sorted(numbers) == list(range(1500))
  tokens = [sum(map(packing.size, line)) for _, line in lines]
  assert max(tokens) <= 32
  assert sum(tokens) / (32 * len(tokens)) > 0.97  # next to no padding


def test_the_order_follows_seed_and_epoch_alone():
  found = lessons(100)

  def order(seed, **options):
    lines = supervised.lines(found, length=32, seed=seed, **options)
    return [[i for i, _ in line] for _, line in itertools.islice(lines, 80)]

  assert order(1) == order(1)
  assert order(1) == order(1, epochs=2)
  assert order(1) != order(2)
  rows_of_one = len(list(supervised.lines(found, length=32, seed=1, epochs=1)))
  twice = order(1)
  assert twice[:20] != twice[rows_of_one : rows_of_one + 20]


def test_long_and_short_episodes_are_mixed():
  """Packing alone sorts rows by the longest that they hold."""
  lines = supervised.lines(lessons(900), length=32, seed=1, epochs=1)
  longest = [max(map(packing.size, line)) for _, line in lines]
  steps = np.corrcoef(np.arange(len(longest)), longest)[0, 1]
  assert abs(steps) < 0.2


def test_the_last_step_of_all_is_filled_with_padding():
  lines = [
    line
    for _, line in supervised.lines(lessons(30), length=32, seed=0, epochs=1)
  ]
  found = supervised.batches(lines[:5], rows=4, length=32)
  assert [b.ids.shape for b in found] == [(4, 32)] * 2
  assert found[1].segments[1:].sum() == 0
  assert found[1].weights[1:].sum() == 0


def test_rates_by_hand():
  def rates(**options):
    return [supervised.rate(s, steps=8, peak=2.0, **options) for s in range(8)]

  assert rates(warmup=0, decay=0.0) == [2.0] * 8
  assert rates(warmup=4, decay=0.0) == [0.5, 1.0, 1.5, *[2.0] * 5]
  assert rates(warmup=0, decay=0.5) == [*[2.0] * 5, 1.5, 1.0, 0.5]
  assert rates(warmup=2, decay=1.0)[:3] == [1.0, 1.75, 1.5]


# --- Muon --------------------------------------------------------------------


def updates(optimizer, params, gradient):
  tx = supervised.OPTIMIZERS[optimizer](0.9, 0.999, 1e-8, "float32")
  return tx.update(gradient, tx.init(params), params)[0]


def test_muon_takes_each_layers_matrix_by_itself(params):
  gradient, _ = gradient_of(make(), params, rows(episodes(), 4))
  gradient = jax.tree.map(jnp.float32, gradient)
  found = updates("muon", params, gradient)
  adam = updates("adamw", params, gradient)
  for path, leaf in jax.tree_util.tree_leaves_with_path(found):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    g, a = (
      functools.reduce(lambda node, key: node[key], name.split("/"), tree)
      for tree in (gradient, adam)
    )
    if not name.endswith("kernel"):
      # Nesterov's first step of Adam has the same direction.
      assert leaf.ndim < 3
      np.testing.assert_allclose(np.sign(leaf), np.sign(a), atol=0)
      continue
    for one, slope in zip(np.asarray(leaf), np.asarray(g), strict=True):
      u, _, v = np.linalg.svd(slope, full_matrices=False)
      scale = max(1, one.shape[1] / one.shape[0]) ** 0.5
      inner = u.T @ one @ v.T / scale  # near the identity
      strong = np.linalg.svd(slope)[1] > 1e-2 * np.linalg.norm(slope)
      assert strong.sum() > 4
      diagonal = np.diag(inner)[strong]
      assert (diagonal > 0.6).all()
      assert (diagonal < 1.3).all()
      off = inner - np.diag(np.diag(inner))
      assert np.abs(off).max() < 0.05


def test_muon_leaves_vectors_to_adam_with_its_own_numbers():
  """Nesterov's Adam of slopes 1, then 0, by hand: b1 = 0.8, b2 = 0.99.

  m = 0.2, 0.16, of which the step looks one ahead, 0.8 m / (1 - 0.8^3);
  v = 0.01, 0.0099, over 1 - 0.99^2.
  """
  tx = supervised.OPTIMIZERS["muon"](0.8, 0.99, 0.0, "float32")
  one = {"norm": {"scale": jnp.ones(1)}}
  state = tx.init(one)
  for slope in (1.0, 0.0):
    gradient = jax.tree.map(lambda leaf, s=slope: s * leaf, one)
    found, state = tx.update(gradient, state, one)
  ahead, size = 0.8 * 0.16 / (1 - 0.8**3), 0.0099 / (1 - 0.99**2)
  assert float(found["norm"]["scale"][0]) == pytest.approx(
    ahead / size**0.5, rel=1e-5
  )


def test_muon_on_a_mesh_is_muon(params):
  batches = rows(episodes(), 4)

  def tuned(**sizes):
    learner = make(optimizer="muon", **sizes)
    policy = learner.init(params)
    for _ in range(2):
      policy, _ = learner.imitate(policy, batches, 1e-2)
    return policy.params

  assert distance(tuned(fsdp=2, tensor=2), tuned()) < 1e-5


def test_muon_keeps_moments_in_half_the_memory(params):
  learner = make(optimizer="muon", moments="bfloat16")
  policy, _ = learner.imitate(learner.init(params), rows(episodes(), 4), 1e-2)
  leaves = jax.tree_util.tree_leaves_with_path(policy.opt_state.adam)
  moments = {
    leaf.dtype.name
    for path, leaf in leaves
    if "mu" in (text := jax.tree_util.keystr(path)) or "nu" in text
    if leaf.ndim > 1
  }
  assert moments == {"bfloat16"}


def test_an_optimizer_that_is_none():
  with pytest.raises(
    ValueError, match="optimizer 'lion'. Choices: adamw, muon"
  ):
    make(optimizer="lion")
  assert isinstance(
    supervised.matrices({"q": {"kernel": 0, "bias": 0}})["q"]["kernel"],
    optax.contrib.MuonDimensionNumbers,
  )
