"""What each preset changes, and what each outcome is worth under it."""

import functools
import operator
from pathlib import Path

import jax
import numpy as np
import pytest

from configs import baselines, common, tiny
from sesa_jax import config as config_lib
from sesa_jax import loop, metrics, tools
from sesa_jax import state as state_lib
from sesa_jax.language import ENGLISH
from sesa_jax.skills import bank as skill_bank
from sesa_jax.stages import validity
from tests import driver, scripted, test_frontier
from tests.test_loop import SCRIPTED

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
  monkeypatch.chdir(ROOT)


def preset_config(preset, **changes):
  config = tiny.get_config(preset).copy_and_resolve_references().unlock()
  config.update_from_flattened_dict(SCRIPTED | changes)
  # The preset has the last word here too.
  config.update_from_flattened_dict(common.PRESETS[preset])
  return config


# What one iteration changes. The bank's skills come from distillation; its
# counters from credit.
BOTH = {"challenger", "solver"}
CHANGES = {
  "sesa": BOTH | {"skills", "counters", "pool", "queue"},
  "no_priming": BOTH | {"skills", "pool", "queue"},  # none to be shown yet
  "no_distillation": BOTH | {"counters", "pool", "queue"},
  "no_frontier": BOTH | {"skills", "counters", "pool", "queue"},
  "no_bell": BOTH | {"skills", "counters", "pool", "queue"},
  "no_gate": BOTH | {"skills", "counters", "pool", "queue"},
  "placebo": BOTH | {"skills", "counters", "pool", "queue"},
  "permuted_rewards": BOTH | {"skills", "counters", "pool", "queue"},
  "shared_weights": BOTH | {"skills", "counters", "pool", "queue"},
  "ssp_paper": BOTH | {"pool"},
  "ssp_code": BOTH | {"pool"},
  "search_r1": BOTH,  # one policy, which solves
  "fixed_questions": BOTH | {"skills", "counters", "queue"},
  "fixed_challenger": {"solver", "skills", "counters", "pool", "queue"},
}
SHARED = {
  "shared_weights",
  "ssp_paper",
  "ssp_code",
  "search_r1",
  "fixed_questions",
}
FIXED = {"search_r1", "fixed_questions"}


def scripted_engine(graphdef, backbone, tokenizer, *rest, **settings):
  return scripted.ScriptedEngine(graphdef, tokenizer, two_searches)


def copied(policy):
  return jax.tree.map(np.array, policy.params)


def differs(one, other):
  pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
  return any((np.asarray(a) != np.asarray(b)).any() for a, b in pairs)


def two_searches(request, attempt, turn):
  """The script of tests/world, but for a second search of the challenger."""
  if request.arm != "challenger":
    return scripted.world_script(request, attempt, turn)
  if turn == 1:
    return f"<search>what is {scripted._target(request.id)}</search>"
  return scripted.world_script(request, attempt, max(turn - 1, 0))


@pytest.mark.parametrize("preset", common.PRESETS)
def test_what_an_iteration_of_a_preset_changes(preset, monkeypatch):
  # More failures than are distilled, so that the queue shows them too; and as
  # many fixed questions as an iteration plays.
  config = preset_config(
    preset,
    **{"distillation.max_records": 1, "pool.fixed.tiny_pool.size": 4},
  )
  monkeypatch.setattr(driver, "scripted_engine", scripted_engine)
  with driver.playing_the_script():
    world = tools.assemble(config, tools.read(config), "")
  state, _ = state_lib.start(config, world)
  before = {role: copied(getattr(state, role)) for role in config_lib.ROLES}
  assert (state.challenger is state.solver) == (preset in SHARED)
  assert bool(state.bank.skills) == (config.bank.prime != "none")
  with metrics.Progress(1) as progress:
    after, record = loop.iteration(state, world, config, progress)
  found = {
    role
    for role in config_lib.ROLES
    if differs(before[role], copied(getattr(after, role)))
  }
  ids = [{s.id for s in s_.bank.skills} for s_ in (state, after)]
  counters = [skill_bank.to_tree(s.bank)[0] for s in (state, after)]
  shown = len(counters[0]["retrieved"])
  found |= {"skills"} if ids[1] - ids[0] else set()
  if (counters[1]["retrieved"][:shown] != counters[0]["retrieved"]).any():
    found.add("counters")
  found |= {"pool"} if after.pool != state.pool else set()
  found |= {"queue"} if after.queue != state.queue else set()
  assert found == CHANGES[preset]
  assert (after.challenger is after.solver) == (preset in SHARED)
  measured = record.metrics
  assert (measured["challenger/proposals"] > 0) == (preset not in FIXED)
  learns = preset not in FIXED | {"fixed_challenger"}
  assert ("challenger/loss" in measured) == learns
  posed = measured["solver/origin/challenger"]
  assert (posed == 0) == (preset in FIXED)
  if preset in FIXED:
    assert measured["solver/origin/fixed"] == config.questions
    assert after.position == config.questions
  arms = {row["arm"] for row in record.episodes}
  assert ("challenger" in arms) == (preset not in FIXED)
  if not config.bank.top:
    assert not any(row["skill_ids"] for row in record.episodes)


# --- a fixed batch of outcomes ----------------------------------------------

# Five attempts at each of three questions; a fourth proposal is invalid, a
# fifth unverified.
GROUPS = {"a": "rwwww", "b": "rrrrw", "c": "wwwww"}
HALF = 3**0.5 / 2
# Bell: .64, .64, -.1 and -.1 (invalid): the mean is .27, each .37 away.
BELL = [HALF, HALF, -HALF, -HALF]
# 1 - p: .8, .2, 1 and -.1: mean .475, sample deviation .51235.
FAILURE = [0.63433, -0.53674, 1.02468, -1.12227]
RAW = [0.8, 0.2, 1.0, 0.0]  # as they are; an invalid one gets 0
POSED = {
  "sesa": BELL,
  "no_priming": BELL,
  "no_distillation": BELL,
  "no_frontier": FAILURE,
  "no_bell": FAILURE,
  "no_gate": BELL,
  "placebo": BELL,
  "permuted_rewards": BELL,  # in another order
  "shared_weights": BELL,
  "ssp_paper": RAW,
  "ssp_code": RAW,
  "search_r1": [],
  "fixed_questions": [],
  "fixed_challenger": BELL,
}
# One of five right: the mean is .2, the sample deviation .44721.
SCALED = [1.78885, *[-0.44721] * 4] + [*[0.44721] * 4, -1.78885] + [0] * 5
PLAIN = [0.8, *[-0.2] * 4] + [*[0.2] * 4, -0.8] + [0] * 5
RECORDED = {
  "no_frontier": "abc",
  "no_gate": "abc",
  "ssp_paper": "",
  "ssp_code": "",
  "search_r1": "",
}


class Counting:
  """As much of the tools as shaping needs."""

  language = ENGLISH

  def count_tokens(self, text):
    return len(text.split())


@pytest.mark.parametrize("preset", common.PRESETS)
def test_what_outcomes_are_worth_under_a_preset(preset):
  config = preset_config(
    preset,
    **{
      "solver.group_size": 5,
      "solver.advantage_std": True,
      "challenger.advantage_std": True,
    },
  )
  proposals = [
    *(test_frontier.proposal(name) for name in GROUPS),
    test_frontier.proposal("d", "evidence"),
    test_frontier.proposal("e", "unverified"),
  ]
  if not config.selfplay:
    proposals = []
  tries = [
    a
    for name, word in GROUPS.items()
    for a in test_frontier.attempts(word, name)
  ]
  checked = loop.Checked(proposals, (), validity.Pool(), None, ())
  edge = loop._shape(checked, tries, Counting(), config, 3)
  posed = [lesson.advantage for lesson in edge.proposals]
  order = np.sort if preset == "permuted_rewards" else np.asarray
  np.testing.assert_allclose(order(posed), order(POSED[preset]), atol=1e-4)
  solved = [lesson.advantage for lesson in edge.attempts]
  wanted = PLAIN if preset == "ssp_paper" else SCALED
  if preset == "permuted_rewards":  # `test_frontier` says what they are
    assert solved != pytest.approx(wanted, abs=1e-4)
  else:
    np.testing.assert_allclose(solved, wanted, atol=1e-4)
  recorded = "".join(record.question_id for record in edge.failures)
  assert recorded == RECORDED.get(preset, "ab")


@pytest.mark.parametrize(
  ("preset", "values"),
  [
    *(
      (
        preset,
        {
          "policy.template": "ssp",
          "challenger.min_searches": 2,
          "bank.top": 0,
          "solver.clip_low": 0.2,
          "solver.clip_high": 0.285,
          "solver.kl_coefficient": 0.01,
          "challenger.group_size": 1,
        },
      )
      for preset in ("ssp_paper", "ssp_code")
    ),
    (
      "search_r1",
      {
        "policy.template": "search_r1",
        "solver.clip_low": 0.2,
        "solver.clip_high": 0.2,
        "solver.kl_coefficient": 0.001,
        "judge.verdicts": False,
        "bank.top": 0,
      },
    ),
    ("fixed_questions", {"policy.template": "native", "bank.top": 3}),
  ],
)
def test_values_of_the_baselines(preset, values):
  """As docs/presets.md has them, from the sources that it names."""
  config = baselines.get_config(preset)
  found = {
    name: functools.reduce(operator.getitem, name.split("."), config)
    for name in values
  }
  assert found == values


def test_the_order_and_the_losses_of_self_play():
  """What the advantages do not show of SSP's paper and code."""
  found = {p: preset_config(p) for p in ("ssp_paper", "ssp_code", "sesa")}
  paper, code, own = found.values()
  assert tuple(paper.learner.order) == ("solver", "challenger")
  assert tuple(code.learner.order) == ("challenger", "solver")
  assert tuple(own.learner.order) == ("challenger", "solver")
  losses = {p: c.challenger.loss for p, c in found.items()}
  assert losses == dict(ssp_paper="reinforce", ssp_code="grpo", sesa="grpo")
  scales = [c.challenger.loss_scale for c in found.values()]
  assert scales == [1.0, 0.4, 1.0]
  kls = [c.challenger.kl_coefficient for c in found.values()]
  assert kls == [0, 0.01, 0.01]
  assert code.learner.old_logprobs == "turn"
