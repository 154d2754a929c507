"""One policy for both roles, and policies that start apart."""

import jax
import numpy as np
import pytest

from sesa_jax import config as config_lib
from sesa_jax import experiment, loop, metrics, tools
from sesa_jax import state as state_lib
from sesa_jax.policy import backbones, export, model, tokenizer, weights
from tests import driver, test_loop, test_roles
from tests.test_learner import distance

at_root = test_loop.at_root  # every test runs there
SHARED = test_loop.SCRIPTED | {
  "policy.shared": True,
  "challenger.learning_rate": 1e-2,  # so that it moves the solver's weights
}


def assembled(**changes):
  config = test_loop.tiny_config(**changes)
  with driver.playing_the_script():
    world = tools.assemble(config, tools.read(config))
  return config, world, state_lib.start(config, world)[0]


def played(monkeypatch, **changes):
  """One iteration: its world, what was learned from, its end, its metrics."""
  config, world, state = assembled(**(SHARED | changes))
  assert state.challenger is state.solver
  edges, real = [], loop._learn
  monkeypatch.setattr(
    loop,
    "_learn",
    lambda world, state, edge, *rest: (
      edges.append(edge) or real(world, state, edge, *rest)
    ),
  )
  with test_loop.silent() as progress:
    after, record = loop.iteration(state, world, config, progress)
  assert after.challenger is after.solver
  (edge,) = edges
  lessons = {"challenger": edge.proposals, "solver": edge.attempts}
  return world, lessons, after, record.metrics


@pytest.mark.parametrize("order", [("challenger", "solver"), None])
def test_both_roles_teach_the_one_policy_in_turn(monkeypatch, order):
  """Old logprobs of the second are taken after the first has learned."""
  order = order or ("solver", "challenger")
  world, lessons, after, found = played(
    monkeypatch,
    **{"learner.order": order, "learner.old_logprobs": "turn"},
  )
  policy = world.solver.init(world.references["solver"])
  for role in order:
    learner = getattr(world, role)
    policy, own = learner.update(
      policy,
      world.references[role],
      lessons[role],
      temperature={"challenger": 1.25, "solver": 0.8}[role],
    )
    assert found[f"{role}/loss"] == own["loss"]
    assert found[f"{role}/tokens"] > 0
    assert found[f"{role}/ratio/mean"] == pytest.approx(1, abs=1e-6)
  jax.tree.map(np.testing.assert_array_equal, after.solver, policy)
  assert int(after.solver.updates) == 2
  # The engine played other weights than the second's update began with.
  assert found[f"{order[0]}/logprob_gap/max"] < 1e-4
  assert found[f"{order[1]}/logprob_gap/max"] > 1e-3


def test_old_logprobs_of_both_roles_are_those_of_the_start(monkeypatch):
  world, lessons, after, found = played(monkeypatch)
  between, _ = world.challenger.update(
    world.challenger.init(world.references["challenger"]),
    world.references["challenger"],
    lessons["challenger"],
    temperature=1.25,
  )
  ratios = []
  for lesson in lessons["solver"]:
    episode = lesson.episode
    now = test_roles.naive_logprobs(between.params, episode, 0.8)
    ratios += list(np.exp(now - episode.logprobs[episode.mask]))
  assert found["solver/ratio/mean"] == pytest.approx(np.mean(ratios), rel=1e-4)
  assert abs(np.mean(ratios) - 1) > 1e-3
  for role in config_lib.ROLES:
    assert found[f"{role}/logprob_gap/max"] < 1e-4
  assert found["challenger/ratio/mean"] == pytest.approx(1, abs=1e-6)
  assert int(after.solver.updates) == 2
  # And the optimizer's state has seen both.
  only = distance(
    after.solver.opt_state.adam[0].mu, between.opt_state.adam[0].mu
  )
  assert only > 0.1


def test_a_checkpoint_holds_the_one_policy(tmp_path):
  changes = SHARED | {"eval.sets": {}, "checkpoint.keep": 2}
  for name, lengths in ("straight", (2,)), ("resumed", (1, 2)):
    for iterations in lengths:
      config = test_loop.tiny_config(**changes, iterations=iterations)
      with driver.playing_the_script():
        experiment.run(config, str(tmp_path / name))
  rows = [
    metrics.RunFolder(tmp_path / name).read("metrics.jsonl")
    for name in ("straight", "resumed")
  ]
  timed = ("seconds", "tokens_per_second", "matmul_share")
  for one, other in zip(*rows, strict=True):
    assert one.keys() == other.keys()
    for key, value in one.items():
      assert any(t in key for t in timed) or value == other[key], key
  # Both roles played the weights that both had taught.
  for role in config_lib.ROLES:
    assert rows[0][1][f"{role}/logprob_gap/max"] < 1e-4
  for folder in ("2", "milestones/2"):
    held = (tmp_path / "resumed" / "checkpoints" / folder).iterdir()
    names = {path.name for path in held if path.is_dir()}
    assert names - {"record"} == {"shared"}
  for role in config_lib.ROLES:
    state_lib.export(
      str(tmp_path / "resumed"), role, str(tmp_path / role), "float32"
    )
  one, other = (
    weights.load("hf", tmp_path / role)[1] for role in config_lib.ROLES
  )
  jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
  """Two folders of weights, and the weights."""
  folder, drawn = tmp_path_factory.mktemp("apart"), []
  for seed in (0, 1):
    params = model.init(backbones.tiny(), jax.random.key(seed))
    export.save(
      folder / str(seed),
      backbones.tiny(),
      tokenizer.tiny(),
      lambda path, params=params: leaf_of(params, path),
    )
    drawn.append(params)
  return folder, drawn


def leaf_of(tree, path):
  for key in path.split("/"):
    tree = tree[key]
  return np.asarray(tree)


def test_policies_that_start_apart_have_references_of_their_own(apart):
  folder, drawn = apart
  starts = {
    "policy.source": "hf",
    "policy.path": str(folder / "0"),
    "challenger.path": str(folder / "1"),
  }
  config, world, state = assembled(**(test_loop.SCRIPTED | starts))
  config_lib.check(config)
  for role, params in (("solver", drawn[0]), ("challenger", drawn[1])):
    for got in world.references[role], getattr(state, role).params:
      vocabulary = params["embed"]["embedding"].shape[0]
      table = got["embed"]["embedding"][:vocabulary]
      np.testing.assert_array_equal(table, params["embed"]["embedding"])
      jax.tree.map(
        np.testing.assert_array_equal, got["layers"], params["layers"]
      )
  assert {"weights", "weights/challenger"} <= world.hashes.keys()
  with test_loop.silent() as progress:
    _, record = loop.iteration(state, world, config, progress)
  for role in config_lib.ROLES:  # each is where its reference is
    assert record.metrics[f"{role}/kl/mean"] == pytest.approx(0, abs=1e-6)


def test_weights_that_roles_cannot_start_from_are_refused(apart):
  folder, _ = apart
  path = str(folder / "1")
  hf = {"policy.source": "hf", "policy.path": str(folder / "0")}
  for changes, says in (
    ({"solver.path": path}, "solver.path.*'random' reads none"),
    (hf | {"solver.path": path, "policy.shared": True}, "policy.shared"),
    (hf | {"challenger.path": "nowhere"}, "nowhere"),
    ({"learner.order": ("solver", "solver")}, "each of challenger, solver"),
    ({"learner.old_logprobs": "x"}, "Choices: start, turn"),
  ):
    with pytest.raises(ValueError, match=says):
      config_lib.check(test_loop.tiny_config(**changes))


@pytest.mark.parametrize("preset", ["ssp_paper", "ssp_code", "shared_weights"])
def test_presets_of_one_policy_run(preset, tmp_path):
  from configs import tiny

  config = tiny.get_config(preset).copy_and_resolve_references()
  config.unlock()
  config.update_from_flattened_dict(
    {"iterations": 1, "eval.sets": {}, "solver.turn_tokens": 160}
    | {"challenger.turn_tokens": 160}
  )
  with driver.playing_the_script():
    experiment.run(config, str(tmp_path / "run"))
  (row,) = metrics.RunFolder(tmp_path / "run").read("metrics.jsonl")
  assert row["solver/updates"] == row["challenger/updates"] == 1
  if preset != "shared_weights":
    assert row["bank/active"] == row["bank/shown"] == 0
    assert ("challenger/kl/mean" in row) == (preset == "ssp_code")
    # The reward is the advantage.
    files = metrics.episode_files(tmp_path / "run")
    for episode in metrics.read_episodes(files[0]):
      if episode["arm"] == "challenger":
        assert episode["advantage"] == episode["reward"] >= 0
