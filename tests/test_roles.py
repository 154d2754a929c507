"""A field of one role reaches that role's update, and no other's."""

import functools

import jax
import numpy as np
import pytest

from configs import tiny
from sesa_jax import config as config_lib
from sesa_jax import tools
from sesa_jax.policy import backbones, model, sharding
from tests import test_learner as one

BACKBONE = backbones.tiny()
GRAPHDEF = model.build(BACKBONE)
BASE = {
  "turns": 2,
  "turn_tokens": 5,  # with one correction, 15 tokens at most
  "minibatch_questions": 2,  # of four: old logprobs matter in the second
  "warmup_updates": 0,
  "learning_rate": 2e-2,
  "kl_coefficient": 0.05,
}


@pytest.fixture(scope="module")
def weights():
  draw = jax.jit(functools.partial(model.init, BACKBONE))
  return [draw(jax.random.key(seed)) for seed in (0, 1)]


def updated(weights, role, **changes):
  """A role's policy after one call, and its metrics."""
  config = tiny.get_config().copy_and_resolve_references()
  config.unlock()
  config.update_from_flattened_dict(
    {f"{name}.{k}": v for name in config_lib.ROLES for k, v in BASE.items()}
    | {"learner.row_multiple": 32, "learner.chunk_tokens": 64}
    | {name.replace("__", "."): value for name, value in changes.items()}
  )
  learner = tools.learner(config, config[role], GRAPHDEF, sharding.mesh(1, 1))
  params, reference = weights
  return learner.update(
    learner.init(params), reference, one.lessons(4), temperature=1.0
  )


@pytest.fixture(scope="module")
def plain(weights):
  return {role: updated(weights, role) for role in config_lib.ROLES}


def apart(got, wanted):
  return one.distance(got.params, wanted.params)


@pytest.mark.parametrize(
  ("field", "value", "metric", "factor"),
  [
    ("learning_rate", 1e-2, "lr", 0.5),
    ("warmup_updates", 8, "lr", 2 / 8),
    ("minibatch_questions", 4, "updates", 0.5),
    ("loss_scale", 0.4, None, None),
    ("clip_low", 0.1, "clip_fraction", None),
    ("clip_high", 0.0, "clip_fraction", None),
    ("kl_coefficient", 0.5, "loss", None),
    ("importance_cap", 0.05, "importance/mean", None),
    ("loss", "dapo", "loss", None),
    ("loss", "reinforce", "clip_fraction", 0.0),
    ("loss", "gspo", "ratio/mean", None),
    ("entropy_coefficient", 0.1, "loss", None),
  ],
)
@pytest.mark.parametrize("role", ["challenger", "solver"])
def test_a_roles_value_reaches_its_update(
  weights, plain, role, field, value, metric, factor
):
  (other,) = set(config_lib.ROLES) - {role}
  policy, metrics = updated(weights, role, **{f"{role}__{field}": value})
  assert apart(policy, plain[role][0]) > 1e-6
  if metric is not None:
    was = plain[role][1][metric]
    assert abs(metrics[metric] / was - 1) > 1e-3
    if factor is not None:
      assert metrics[metric] == pytest.approx(was * factor)
  same, found = updated(weights, role, **{f"{other}__{field}": value})
  jax.tree.map(np.testing.assert_array_equal, same, plain[role][0])
  assert found == plain[role][1]


def test_the_scale_of_a_loss_is_that_of_its_gradient(weights):
  """Of one update: a scaled one before would move the weights elsewhere."""
  norms = [
    updated(weights, "solver", solver__minibatch_questions=4, **scale)[1]
    for scale in ({}, {"solver__loss_scale": 0.4})
  ]
  assert norms[1]["grad_norm"] == pytest.approx(0.4 * norms[0]["grad_norm"])
  assert norms[1]["loss"] == pytest.approx(norms[0]["loss"])


@pytest.mark.parametrize(
  ("role", "changes", "most"),
  [
    ("solver", {"challenger__turn_tokens": 9}, 15),
    ("solver", {"solver__turn_tokens": 9}, 27),
    ("challenger", {"challenger__turns": 4}, 25),
    ("challenger", {"environment__max_malformed": 3}, 25),
    ("solver", {"solver__turn_tokens": 10**6}, 768),
  ],
)
def test_dr_grpo_divides_by_the_most_that_a_role_may_sample(
  weights, role, changes, most
):
  """At the start new, old and engine agree: loss = -sum A n / (most B)."""
  once = {f"{role}__loss": "dr_grpo", f"{role}__minibatch_questions": 4}
  once |= {f"{role}__kl_coefficient": 0.0}
  _, metrics = updated(weights, role, **once, **changes)
  taught, wanted = one.lessons(4), 0.0
  for lesson in taught:
    own = naive_logprobs(weights[0], lesson.episode)
    engine = lesson.episode.logprobs[lesson.episode.mask]
    weight = np.minimum(np.exp(own - engine), 2.0)
    wanted -= lesson.advantage * weight.sum() / most / len(taught)
  assert metrics["loss"] == pytest.approx(wanted, rel=1e-5)


def naive_logprobs(params, episode, temperature=1.0):
  """Of the sampled ids of one episode: no padding, no chunks."""
  hidden = model.hidden(
    GRAPHDEF,
    params,
    episode.ids[None],
    np.arange(episode.ids.size)[None],
    np.ones((1, episode.ids.size), int),
    compute_dtype=np.float32,
    remat=False,
  )
  logits = model.logits(GRAPHDEF, params, hidden)[0] / temperature
  rows = jax.nn.log_softmax(logits)[np.arange(len(episode.ids) - 1)]
  own = rows[np.arange(len(episode.ids) - 1), episode.ids[1:]]
  return np.float64(own)[episode.mask[1:]]
