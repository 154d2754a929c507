import dataclasses

import jax
import numpy as np
import pytest

from sesa_jax import rollout, types
from sesa_jax.engine import engine as engine_lib
from sesa_jax.learner import learner as learner_lib
from sesa_jax.policy import backbones, model, sharding

BACKBONE = dataclasses.replace(backbones.tiny(), vocab_size=300)
GRAPHDEF = model.build(BACKBONE)


@pytest.fixture(scope="module")
def sides():
  """An engine on 2 x 2 devices, and a learner on 4 x 2."""
  engine = engine_lib.Engine(
    GRAPHDEF,
    BACKBONE,
    None,
    [b""] * 300,
    (299,),
    mesh=sharding.rollout_mesh(2, jax.devices()[:4]),
    slots=4,
    length=128,
    page_size=16,
    prefill_chunk=32,
    steps_per_dispatch=8,
    deterministic=True,
    dtype="float32",
    seed=0,
  )
  engine._tokenizer = type("NoText", (), dict(decode=lambda self, ids: ""))()
  learner = learner_lib.Learner(
    GRAPHDEF,
    sharding.mesh(4, 2),
    learning_rate=0.1,
    warmup_updates=0,
    minibatch_questions=4,
    clip_low=0.2,
    clip_high=0.2,
    kl_coefficient=0.0,
    microbatch_rows=4,
    row_multiple=64,
    compute_dtype="float32",
  )
  params = jax.jit(model.init, static_argnums=0)(BACKBONE, jax.random.key(0))
  return engine, learner, learner.init(params)


def test_a_right_copy_differs_by_numerics_alone(sides):
  engine, learner, policy = sides
  copy, gap = rollout.weights(engine, learner, policy.params)
  assert 0 < gap < 1e-5
  assert len(copy["layers"]) == BACKBONE.layers


@pytest.mark.parametrize("fault", ["layer", "head", "nan"])
def test_a_wrong_copy_stops_the_run(sides, fault, monkeypatch):
  engine, learner, policy = sides
  load = engine.load

  def wrong(params):
    copy = load(params)
    if fault == "layer":  # as if two layers were exchanged
      copy["layers"] = copy["layers"][::-1]
    elif fault == "head":
      table = copy["embed"]["embedding"]
      copy["embed"] = {"embedding": table.at[:20].set(table[20:40])}
    else:
      copy["norm"] = {"scale": copy["norm"]["scale"] * np.nan}
    return copy

  # A draw at initialisation hardly tells one token from another.
  large = jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, policy.params)
  rollout.weights(engine, learner, large)
  monkeypatch.setattr(engine, "load", wrong)
  with pytest.raises(types.Stopped, match=r"differ by .* nats.*selftest"):
    rollout.weights(engine, learner, large)


def test_gaps_look_at_sampled_ids_alone():
  def episode(logprobs, mask):
    return types.Episode(
      request_id="q",
      attempt=0,
      arm="solver",
      ids=np.arange(3),
      prompt_length=1,
      mask=np.array(mask),
      logprobs=np.array(logprobs, np.float32),
      turns=(),
      finish="answer",
    )

  episodes = [
    episode([0, -1, -2], [False, True, False]),
    episode([0, -3, -4], [False, True, True]),
  ]
  scores = [np.array([9, -1.5, 9]), np.array([9, -3.0, -3.75])]
  assert rollout.gaps(episodes, scores) == (0.25, 0.5)
  assert rollout.gaps([], []) == (0.0, 0.0)
