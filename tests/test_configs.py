"""Every config file: it loads, it is the paper's, and it knows its machines."""

import importlib
import re
import tomllib
from pathlib import Path

import pytest
from flax import traverse_util
from ml_collections import ConfigDict

from configs import common
from sesa_jax import config as config_lib
from sesa_jax import distributed

ROOT = Path(__file__).parents[1]
NOT_PAPER = {"tiny", "smollm2_135m", "microworld"}
STUDIES = ("ablations", "baselines")  # files of presets
FILES = sorted(
  path.stem
  for path in (ROOT / "configs").glob("*.py")
  if path.stem not in ("__init__", "common", *STUDIES)
)
PAPER = sorted(set(FILES) - NOT_PAPER)

# The weights' names on the model hub.
BACKBONES = {
  "qwen3_4b": "Qwen/Qwen3-4B",
  "qwen3_4b_instruct": "Qwen/Qwen3-4B-Instruct-2507",
  "qwen3_8b": "Qwen/Qwen3-8B",
  "qwen2_5_7b": "Qwen/Qwen2.5-7B",
  "qwen2_5_7b_instruct": "Qwen/Qwen2.5-7B-Instruct",
  "llama3_1_8b": "meta-llama/Llama-3.1-8B",
  "search_r1_7b": "PeterJinGo/SearchR1-nq_hotpotqa_train-qwen2.5-7b-em-ppo-"
  "v0.2",
  "qwen3_0_6b": "Qwen/Qwen3-0.6B",
  "qwen3_1_7b": "Qwen/Qwen3-1.7B",
}

# As the papers have them, and ours where they have none.
ROLE = {
  "learning_rate": 1e-6,
  "warmup_updates": 5,
  "minibatch_questions": 128,
  "clip_low": 0.2,
  "clip_high": 0.285,
  "loss": "grpo",
  "loss_scale": 1.0,
  "advantage_std": True,
  "kl_coefficient": 0.01,
  "entropy_coefficient": 0.0,
  "importance_cap": 2.0,
  "temperature": 1.0,
  "turns": 10,
  "turn_tokens": 1024,
  "episode_tokens": 12288,
}
VALUES = {
  "questions": 256,
  **{f"solver.{name}": value for name, value in ROLE.items()},
  **{f"challenger.{name}": value for name, value in ROLE.items()},
  "solver.group_size": 5,
  "solver.baseline": "group",
  "challenger.group_size": 1,
  "challenger.baseline": "batch",
  "challenger.invalid": "endpoint",
  "learner.weight_decay": 0.01,
  "learner.gradient_clip": 1.0,
  "learner.std_epsilon": 1e-6,
  "environment.passages_per_search": 3,
  "environment.observation_tokens": 768,
  "environment.max_malformed": 1,
  "environment.max_answer_words": 32,
  "frontier.reward": "bell",
  "frontier.low": 0.0,
  "frontier.high": 1.0,
  "frontier.endpoint_penalty": 0.1,
  "frontier.gate": "frontier",
  "verifier.answerer": "judge",
  "verifier.tokens": 70,
  "verifier.max_tokens": 8192,
  "verifier.noise": 4,
  "verifier.probes": 32,
  "pool.refill": "replay",
  "pool.empty_every": 10,
  "bank.capacity": 800,
  "bank.top": 3,
  "bank.min_score": None,
  "bank.block_tokens": 512,
  "bank.arm": "skills",
  "bank.index": "auto",
  "bank.control_attempts": 0,
  "encoder.threshold": 0.93,
  "bank.credit": "rollout",
  "bank.retire_after": 3,
  "encoder.path": "assets:e5-base-v2",
  "encoder.query_prefix": "query: ",
  "encoder.passage_prefix": "passage: ",
  "distillation.every": 10,
  "distillation.min_pending": 20,
  "distillation.max_records": 30,
  "distillation.queue_size": 300,
  "distillation.keep": "newest",
  "distillation.passage_tokens": 1500,
  "search.engine": "search_r1",
  "search.k1": 0.9,
  "search.b": 0.4,
  "eval.turns": 10,
  "lost_limit": 0.02,
}


def load(name, variant="sesa"):
  return importlib.import_module(f"configs.{name}").get_config(variant)


def flat(config):
  return traverse_util.flatten_dict(config.to_dict(), sep=".")


@pytest.mark.parametrize("name", FILES)
def test_every_preset_of_every_file_loads(name):
  for preset in common.PRESETS:
    config = load(name, preset)
    assert config.is_locked
    assert (config.name, config.preset) == (name, preset)
    for field, value in common.PRESETS[preset].items():
      assert flat(config)[field] == value
    # Questions that nobody poses come from a file, that a flag can name.
    assert config.selfplay or config.pool.fixed
  with pytest.raises(ValueError, match="Did you mean 'no_bell'"):
    load(name, "no_bel")


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_is_a_row_of_presets(name):
  module = importlib.import_module(f"configs.{name}")
  reference = flat(load("qwen3_4b"))
  for variant in module.VARIANTS:
    config = load(name, variant)
    assert config.is_locked
    assert (config.name, config.preset) == (name, variant)
    wanted = reference | common.PRESETS[variant]
    wanted |= {"name": name, "preset": variant}
    fixed = {
      f: v for f, v in flat(config).items() if f.startswith("pool.fixed")
    }
    assert bool(fixed.get("pool.fixed.train.path") == "") == (
      variant in ("search_r1", "fixed_questions")
    )
    assert (
      flat(config)
      == {f: v for f, v in wanted.items() if not f.startswith("pool.fixed")}
      | fixed
    )
  assert module.sweep() == tuple(
    f"configs/{name}.py:{variant}" for variant in module.VARIANTS
  )
  assert f"--config=configs/{name}.py:" in module.__doc__
  with pytest.raises(ValueError, match="Choices: sesa, "):
    load(name, "nothing")


def test_the_studies_have_all_presets():
  found = [
    importlib.import_module(f"configs.{name}").VARIANTS for name in STUDIES
  ]
  assert set().union(*found) == set(common.PRESETS)
  assert set(found[0]) & set(found[1]) == {"sesa"}


def test_every_backbone_has_a_config():
  assert set(BACKBONES) | NOT_PAPER == set(FILES)


@pytest.mark.parametrize("name", PAPER)
def test_a_backbones_config_is_the_papers(name):
  config = flat(load(name))
  assert {field: config[field] for field in VALUES} == VALUES
  assert 150 <= config["iterations"] <= 200


@pytest.mark.parametrize("name", PAPER)
def test_a_backbones_config_differs_by_weights_and_machines_alone(name):
  config, paper = flat(load(name)), flat(common.get_config())
  differs = {
    field
    for field in config
    if not field.startswith("machines.") and config[field] != paper[field]
  }
  layout = {"policy.template"} if name == "search_r1_7b" else set()
  assert differs == {"name", "policy.path"} | layout


@pytest.mark.parametrize("name", PAPER)
def test_weights_are_those_that_are_fetched(name):
  assets = tomllib.loads((ROOT / "third_party/assets.toml").read_text("utf-8"))
  config = load(name)
  asset = assets[config.policy.path.removeprefix("assets:")]
  assert asset["package"] == BACKBONES[name]
  assert "paper" in asset["sets"]
  assert BACKBONES[name] in importlib.import_module(f"configs.{name}").__doc__
  # And what else it names.
  folder, _, file = config.seeds.path.removeprefix("assets:").partition("/")
  assert file in assets[folder]["files"]
  assert config.encoder.path.removeprefix("assets:") in assets


@pytest.mark.parametrize("name", FILES)
def test_an_encoder_comes_with_its_own_threshold(name):
  """What belongs together is chosen together: see docs/skills.md."""
  known = {
    "assets:e5-base-v2": (0.93, "query: ", "passage: "),
    "assets:all-minilm-l6-v2": (0.575, "", ""),
    "hash": (0.93, "", ""),
    "hash:1024": (0.9, "", ""),
  }
  spec = load(name).encoder
  found = (spec.threshold, spec.query_prefix, spec.passage_prefix)
  assert found == known[spec.path]
  assert len(spec) == 4


@pytest.mark.parametrize("name", FILES)
def test_the_docstring_gives_the_command(name):
  said = importlib.import_module(f"configs.{name}").__doc__
  assert f"python -m sesa_jax.main --config=configs/{name}.py --work" in said


def test_the_microworlds_files_follow_its_seed():
  config = load("microworld")
  config.unlock()
  config.seed = 7
  found = config_lib.for_machine(config.lock(), "cpu")
  assert found.policy.path == "microworld:7/policy"
  assert found.corpus == ("microworld:7/corpus.jsonl",)
  named = set(re.findall(r"microworld:(\d+)/", found.to_json()))
  assert named == {"7"}
  warm = load("microworld", "warm_start")
  assert (warm.policy.source, warm.preset) == ("random", "sesa")
  assert warm.policy.path == "microworld:0/blank"


def test_a_warm_start_is_not_trained_as_the_main_job():
  with pytest.raises(ValueError, match="warm start: run it with --mode=sft"):
    config_lib.check(load("microworld", "warm_start"))


@pytest.mark.parametrize("kind", distributed.MACHINES)
@pytest.mark.parametrize("name", FILES)
def test_machines_change_what_follows_the_machine_alone(name, kind):
  config = load(name)
  found = config_lib.for_machine(config, kind)
  config_lib._check_ranges(found)
  assert found.is_locked
  assert not found.machines
  before, after = flat(config), flat(found)
  for field, value in after.items():
    if value != before.get(field, value):
      assert field.startswith(("mesh.", "engine.")) or field in (
        "learner.microbatch_rows",
        "learner.offload",
        "policy.attention",
        "policy.remat",
      ), field


def test_a_small_chips_values():
  v5e = config_lib.for_machine(load("qwen3_8b"), "v5e")
  assert v5e.mesh.rollout_tensor == 4
  assert v5e.learner.microbatch_rows == 16
  assert v5e.learner.offload
  assert v5e.engine.pages == 1800
  v5p = config_lib.for_machine(load("qwen3_8b"), "v5p")
  assert (v5p.engine.pages, v5p.mesh.rollout_tensor) == (1400, 1)
  v5e = config_lib.for_machine(load("qwen3_4b"), "v5e")
  assert (v5e.mesh.rollout_tensor, v5e.learner.offload) == (4, False)
  assert (
    config_lib.for_machine(load("qwen3_0_6b"), "v5e").mesh.rollout_tensor == 1
  )
  a100 = config_lib.for_machine(load("qwen3_8b"), "a100")
  assert a100.learner.microbatch_rows == 8
  assert not a100.learner.offload


def test_a_value_belongs_to_one_machine():
  config = load("qwen3_8b")
  config.machines.v5e.mesh.rollout_tensor = 2
  assert config_lib.for_machine(config, "v5e").mesh.rollout_tensor == 2
  assert config_lib.for_machine(config, "v6e").mesh.rollout_tensor == 4


def machined(**values):
  config = common.get_config()
  config.machines = ConfigDict(values)
  return common.finish(config, "no_bell")


def test_only_the_machines_own_values_are_taken():
  config = machined(
    v5e=dict(engine=dict(slots=3), mesh=dict(tensor=2)),
    a100=dict(engine=dict(slots=5), learner=dict(adam_eps=1)),
  )
  v5e = config_lib.for_machine(config, "v5e", keep=("mesh.tensor",))
  assert (v5e.engine.slots, v5e.mesh.tensor) == (3, 1)
  a100 = config_lib.for_machine(config, "a100", keep=("engine.pages",))
  assert (a100.engine.slots, a100.mesh.tensor) == (5, 1)
  assert a100.learner.adam_eps == 1.0
  without = machined()
  for kind in ("cpu", "gpu"):
    assert flat(config_lib.for_machine(config, kind)) == flat(without)
  assert config.engine.slots == 64  # it is a copy
  assert len(config.machines) == 2
  assert flat(config_lib.for_machine(v5e, "v5e")) == flat(v5e)


@pytest.mark.parametrize("here", ["v5e", "cpu"])
@pytest.mark.parametrize(
  ("values", "says"),
  [
    ({"v5": {}}, "machines 'v5'. Choices: v5e, v5p, v6e, a100, h100, cpu"),
    ({"v5e": {"engine": {"slts": 3}}}, "machines.v5e.engine.slts: .* no field"),
    ({"v5e": {"engine": 3}}, "machines.v5e.engine: .* no field engine"),
  ],
)
def test_what_machines_may_not_name(values, says, here):
  with pytest.raises(ValueError, match=says):
    config_lib.for_machine(machined(**values), here)


def test_a_value_of_another_type_is_an_error():
  config = machined(v5e=dict(engine=dict(slots="many")))
  with pytest.raises(ValueError, match=r"machines\.v5e\.engine\.slots: .*many"):
    config_lib.for_machine(config, "v5e")
