"""What runs on the devices: sampling by its definition, programs by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from sesa_jax.engine import decode, sampling
from sesa_jax.policy import backbones, model, sharding

BACKBONE = dataclasses.replace(backbones.tiny(), vocab_size=300)
GRAPHDEF = model.build(BACKBONE)


# --- sampling --------------------------------------------------------------


def draws(keys, positions):
  """The uniform numbers of rows, one at a time."""
  found = []
  for key, position in zip(keys, positions, strict=True):
    key = jax.random.wrap_key_data(key, impl="threefry2x32")
    found.append(float(jax.random.uniform(jax.random.fold_in(key, position))))
  return found


def rows(count, size, seed=0, scale=3.0):
  rng = np.random.default_rng(seed)
  logits = rng.normal(size=(count, size)).astype(np.float32) * scale
  keys = rng.integers(0, 2**32, (count, 2), np.uint32)
  return logits, keys, np.arange(count, dtype=np.int32)


def softmax(row):
  shares = np.exp(row.astype(np.float64) - row.max())
  return shares / shares.sum()


def inverse(shares, draw):
  """The id that a draw means, and whether it is too near an edge to tell."""
  edges = np.cumsum(shares) / shares.sum()
  return np.searchsorted(edges, draw, side="right"), abs(edges - draw).min()


sample = jax.jit(sampling.sample)


def test_sample_follows_the_distribution():
  logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
  logits = np.pad(logits, (0, 600), constant_values=-np.inf)
  _, keys, positions = rows(4000, 1)
  ids, logprobs = sample(
    np.tile(logits, (4000, 1)), keys, positions, np.full(4000, 0.5, np.float32)
  )
  # At temperature 1/2 probabilities go with their squares.
  expected = np.array([16, 4, 1, 1]) / 22
  seen = np.bincount(np.asarray(ids), minlength=4)
  assert len(seen) == 4
  sigma = np.sqrt(expected * (1 - expected) / 4000)
  assert (abs(seen / 4000 - expected) < 4 * sigma).all()
  np.testing.assert_allclose(
    logprobs, np.log(expected)[np.asarray(ids)], atol=1e-5
  )


@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_sample_is_the_plain_inverse_cdf_however_it_is_cut(tensor):
  """One level of cumulative sums in float64 picks the same id."""
  logits, keys, positions = rows(64, 4096)
  logits[:, 4000:] = -np.inf  # padding
  logits[:, 700:1100] = -np.inf  # an empty block, and parts of its neighbours
  temperature = np.linspace(0.5, 2, 64).astype(np.float32)
  mesh = sharding.rollout_mesh(tensor, jax.devices()[:tensor])
  whole, cut = PartitionSpec(), PartitionSpec(None, "tensor")
  ids, logprobs = jax.jit(
    jax.shard_map(
      functools.partial(sampling.sample, axis="tensor"),
      mesh=mesh,
      in_specs=(cut, whole, whole, whole),
      out_specs=whole,
      check_vma=False,
    )
  )(logits, keys, positions, temperature)
  near = 0
  for row, draw in enumerate(draws(keys, positions)):
    shares = softmax(logits[row] / temperature[row])
    expected, distance = inverse(shares, draw)
    near += distance < 1e-6
    assert distance < 1e-6 or ids[row] == expected
    assert logprobs[row] == pytest.approx(np.log(shares[ids[row]]), abs=1e-5)
  assert near < 4


def test_greedy_takes_the_lowest_of_the_likeliest_ids():
  logits, keys, positions = rows(4, 1024)
  logits[0, [300, 301, 900]] = 50
  logits[1, [1, 1023]] = 50
  logits[2, 1023] = 50
  cold = np.zeros(4, np.float32)
  mesh = sharding.rollout_mesh(4, jax.devices()[:4])
  whole, cut = PartitionSpec(), PartitionSpec(None, "tensor")
  ids, logprobs = jax.jit(
    jax.shard_map(
      functools.partial(sampling.sample, axis="tensor"),
      mesh=mesh,
      in_specs=(cut, whole, whole, whole),
      out_specs=whole,
      check_vma=False,
    )
  )(logits, keys, positions, cold)
  assert ids.tolist() == [300, 1, 1023, logits[3].argmax()]
  np.testing.assert_allclose(
    logprobs,
    [np.log(softmax(logits[row])[ids[row]]) for row in range(4)],
    atol=1e-5,
  )


find = jax.jit(sampling._first_above, static_argnames="share")


def sparse(rows, places):
  rng = np.random.default_rng(0)
  mass = rng.random((rows, places)).astype(np.float32)
  mass[rng.random(mass.shape) < 0.6] = 0
  mass[:, 5] = 1e-3
  return mass


@pytest.mark.parametrize("draw", [0.0, 0.3, 0.999999, 1.0])
def test_places_without_mass_are_never_found(draw):
  mass = sparse(256, 37)
  place, _ = find(mass, jnp.full(256, draw, jnp.float32), share=True)
  assert (mass[np.arange(256), place] > 0).all()
  # A target beyond the end means the last place with mass.
  place, _ = find(mass, jnp.full(256, 1e6, jnp.float32), share=False)
  last = 36 - (mass[:, ::-1] > 0).argmax(-1)
  assert place.tolist() == last.tolist()


def test_nor_where_a_parallel_sum_grows_for_nothing():
  """By an ulp, since two sums of the same numbers are added up otherwise."""
  mass = sparse(1024, 600)
  edges = np.asarray(jax.jit(lambda x: jnp.cumsum(x, -1))(mass))
  grown = (np.diff(edges) > 0) & (mass[:, 1:] == 0)
  assert grown.any(1).sum() > 100
  target = edges[np.arange(1024), grown.argmax(1)]  # just below the growth
  place, _ = find(mass, target, share=False)
  assert (mass[np.arange(1024), place] > 0).all()


def kept(row, top_p, top_k):
  """The ids that stay, by sorting."""
  order = sorted(range(len(row)), key=lambda i: -row[i])
  if top_k:
    order = [i for i in order if row[i] >= row[order[top_k - 1]]]
  shares = softmax(row)
  reached, needed = 0.0, top_p * shares[order].sum()
  if top_p < 1:
    for place, i in enumerate(order):
      if reached >= needed:
        order = [j for j in order if row[j] >= row[order[place - 1]]]
        break
      reached += shares[i]
  return sorted(order)


CUTS = [(1.0, 0), (0.9, 0), (0.3, 0), (1.0, 1), (1.0, 7), (0.8, 50), (1e-9, 0)]


@pytest.mark.parametrize("tensor", [1, 4])
def test_cut_offs_are_those_of_a_sort(tensor):
  logits, keys, positions = rows(len(CUTS) * 8, 1024, scale=2.0)
  logits[:, 1000:] = -np.inf
  logits[8:, 17] = logits[8:, 901]  # equal ones stay or go together
  logits[3 * 8 : 4 * 8, [5, 400]] = 30  # two are the likeliest
  top_p, top_k = (np.repeat(column, 8) for column in zip(*CUTS, strict=True))
  warm = np.full(len(logits), 0.7, np.float32)
  mesh = sharding.rollout_mesh(tensor, jax.devices()[:tensor])
  whole, cut = PartitionSpec(), PartitionSpec(None, "tensor")
  ids, logprobs = jax.jit(
    jax.shard_map(
      functools.partial(sampling.sample, axis="tensor"),
      mesh=mesh,
      in_specs=(cut, whole, whole, whole, (whole, whole)),
      out_specs=whole,
      check_vma=False,
    )
  )(
    logits,
    keys,
    positions,
    warm,
    (top_p.astype(np.float32), top_k.astype(np.int32)),
  )
  sizes = set()
  for row, draw in enumerate(draws(keys, positions)):
    scaled = logits[row] / np.float32(0.7)
    shares = softmax(scaled)
    stay = kept(scaled, top_p[row], top_k[row])
    sizes.add(len(stay))
    expected, distance = inverse(shares[stay], draw)
    assert distance < 1e-5 or ids[row] == stay[expected]
    # Of the whole vocabulary: a cut-off changes what is drawn, no logprob.
    assert logprobs[row] == pytest.approx(np.log(shares[ids[row]]), abs=1e-5)
  assert {1, 2, 7} <= sizes
  assert max(sizes) >= 1000


def test_greedy_is_not_cut_off():
  logits, keys, positions = rows(3, 512)
  cut = np.full(3, 0.1, np.float32), np.full(3, 2, np.int32)
  ids, _ = sample(logits, keys, positions, np.zeros(3, np.float32), cut)
  assert ids.tolist() == logits.argmax(-1).tolist()


# --- programs --------------------------------------------------------------


def layout(tensor=1, data=1, pages=9):
  mesh = sharding.rollout_mesh(tensor, jax.devices()[: data * tensor])
  return decode.Layout(
    graphdef=decode.cut_vocabulary(GRAPHDEF, tensor),
    mesh=mesh,
    kind="xla",
    dtype=jnp.dtype("float32"),
    rows=(3,),
    pages=pages,
    page_size=8,
    width=4,
    prefill_tokens=(16,),
    prefill_rows=3,
    steps=6,
    ends=1,
  )


@pytest.fixture(scope="module")
def weights():
  params = jax.jit(model.init, static_argnums=0)(BACKBONE, jax.random.key(0))
  cut = decode.cut_vocabulary(GRAPHDEF, 1)
  return decode.cast(params, cut, jnp.float32)


def run(weights, **changes):
  """Calls the decode loop on three rows, of which the last one is idle.

  Their pages are 1 to 3, 4 to 6 and 7 to 8, and nothing is cached yet.
  """
  here = layout()
  programs = decode.programs(here)
  tables = np.array([[[1, 2, 3, 0], [4, 5, 6, 0], [7, 8, 0, 0]]], np.int32)
  state = dict(
    token=[5, 6, 7],
    position=[0, 0, 3],
    stop_state=[0, 0, 0],
    reason=[decode.RUNNING, decode.RUNNING, decode.STOP],
    turn_left=[100, 100, 100],
    episode_left=[100, 100, 100],
    key=[[1, 2], [3, 4], [5, 6]],
    temperature=[1.0, 1.0, 1.0],
    top_p=[1.0, 1.0, 1.0],
    top_k=[0, 0, 0],
  )
  stops = changes.pop("stops", np.zeros((32, 300), np.int16))
  ends = changes.pop("ends", -1)
  leave = changes.pop("leave", 3)
  shapes = decode.arguments(here)["decode"][2]
  state = decode.Rows(
    **{
      name: np.array([value], getattr(shapes, name).dtype)
      for name, value in (state | changes).items()
    }
  )
  pool, decoded = programs.decode(
    weights,
    programs.pool(),
    state,
    tables,
    stops,
    np.array([ends], np.int32),
    np.int32(leave),
  )
  return jax.device_get(pool), jax.tree.map(lambda x: x[0], decoded)


def test_rows_that_do_not_run_write_to_the_trash_page_alone(weights):
  """Idle from the start, or stopped on the way."""
  pool, decoded = run(weights, turn_left=[2, 100, 100])
  assert decoded.counts.tolist() == [2, 6, 0]
  assert decoded.steps == 6
  written = {page for x in jax.tree.leaves(pool) for page in np.nonzero(x)[0]}
  assert written == {0, 1, 4}
  # Row 0 wrote at positions 0 and 1, row 1 at 0 to 5, of pages of 8.
  values = pool[0]["v"]  # [P, K, S, H]
  assert [(values[page] != 0).any((0, 2)).sum() for page in (1, 4)] == [2, 6]


def test_reasons_to_stop_and_their_order(weights):
  _, decoded = run(weights)
  first = decoded.ids[:2, 0].tolist()
  assert decoded.reason.tolist() == [
    decode.RUNNING,
    decode.RUNNING,
    decode.STOP,
  ]
  hits = np.zeros((32, 300), np.int16)
  hits[0, first[0]] = 31  # completes a stop string
  one = [1, 1, 1]
  _, decoded = run(weights, stops=hits, ends=first[0], turn_left=one)
  assert decoded.reason[0] == decode.STOP
  assert decoded.stop_state[0] == 31
  assert decoded.reason[1] == decode.TURN_TOKENS
  _, decoded = run(weights, ends=first[1], turn_left=one, episode_left=one)
  assert decoded.reason[:2].tolist() == [decode.TURN_TOKENS, decode.EOS]
  _, decoded = run(weights, episode_left=one)
  assert decoded.reason[:2].tolist() == [decode.EPISODE_TOKENS] * 2
  assert decoded.counts.tolist() == [1, 1, 0]
  assert decoded.steps == 1  # nobody runs any more


@pytest.mark.parametrize(("leave", "steps"), [(1, 2), (2, 4), (3, 4)])
def test_leaves_when_enough_rows_have_stopped(weights, leave, steps):
  """The idle row does not count: it had stopped before."""
  _, decoded = run(weights, leave=leave, turn_left=[2, 4, 100])
  assert decoded.steps == steps
  assert decoded.counts.tolist() == [2, min(4, steps), 0]


def test_the_copy_of_the_weights_is_cast_and_padded():
  params = model.init(BACKBONE, jax.random.key(0))
  for tensor, padded in ((1, 512), (2, 512), (4, 1024)):
    cut = decode.cut_vocabulary(GRAPHDEF, tensor)
    assert cut.backbone.table_rows == padded
    copy = decode.cast(params, cut, jnp.bfloat16)
    table = np.asarray(copy["embed"]["embedding"], np.float32)
    assert table.shape == (padded, BACKBONE.dim)
    masters = params["embed"]["embedding"]
    np.testing.assert_allclose(table[:300], masters, rtol=2**-8)
    assert not table[300:].any()


def test_a_vocabulary_may_be_padded_before():
  """Training cuts it over another number of devices."""
  wide = dataclasses.replace(BACKBONE, vocab_multiple=96)  # 384 rows
  graphdef = decode.cut_vocabulary(model.build(wide), 2)
  assert graphdef.backbone.table_rows == 1536  # the least common multiple
  copy = decode.cast(model.init(wide, jax.random.key(0)), graphdef, jnp.float32)
  assert len(copy["embed"]["embedding"]) == 1536


@pytest.mark.parametrize(("tensor", "data"), [(1, 1), (2, 2)])
def test_pools_are_donated(tensor, data):
  """All of it is written in place, and nothing of its size beside it."""
  here = layout(tensor, data, pages=4000)
  programs, arguments = decode.programs(here), decode.arguments(here)
  pool = sum(x.size * 4 for x in jax.tree.leaves(arguments["copy"][0]))
  assert pool == data * 2 * 4000 * 8 * 2 * 2 * 16 * 4
  for name in ("prefill", "copy", "decode"):
    compiled = getattr(programs, name).lower(*arguments[name]).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pool / (data * tensor)
    assert memory.temp_size_in_bytes < pool / (data * tensor) / 10
