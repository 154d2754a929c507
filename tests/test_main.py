"""The command line: bad input is one line and exit code 2, before any model."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from configs import common, tiny
from sesa_jax import config as config_lib
from sesa_jax import experiment, manifest, metrics, tools
from sesa_jax.policy import weights

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
  monkeypatch.chdir(ROOT)


def command(*flags):
  return subprocess.run(
    [sys.executable, "-m", "sesa_jax.main", *flags],
    capture_output=True,
    text=True,
    cwd=ROOT,
    timeout=120,
  )


@pytest.mark.parametrize(
  ("flags", "says"),
  [
    (
      ["--config=configs/tiny.py", "--config.solver.grup_size=3"],
      ["config.solver.grup_size", "Did you mean 'group_size'"],
    ),
    (
      ["--config=configs/tiny.py", "--config.solvr.group_size=3"],
      ["config.solvr.group_size", "Did you mean 'solver'"],
    ),
    (
      ["--config=configs/tiny.py:no_distilation"],
      ["no_distilation", "Did you mean 'no_distillation'", "no_frontier"],
    ),
    (["--config=configs/tyni.py"], ["configs/tyni.py", "configs/tiny.py"]),
    (
      ["--config=configs/tiny.py", "--config.questions=many"],
      ["config.questions", "many"],
    ),
    (["--mode=trian"], ["'trian'", "Did you mean 'train'", "show"]),
    (["--confg=x"], ["--confg", "Did you mean --config"]),
    (["--config=configs/tiny.py"], ["--workdir is missing"]),
    (["--workdir=w"], ["--config is missing"]),
    (["configs/tiny.py"], ["configs/tiny.py", "Flags begin with --"]),
    (["--config=configs/tiny.py", "--workdir="], ["--workdir is missing"]),
    (["--config=README.md", "--workdir=w"], ["README.md is not a config"]),
    (["--config=configs/__init__.py"], ["has no get_config()"]),
    (["--mode=show", "--workdir=README.md"], ["README.md"]),
    (
      ["--mode=sft", "--config=configs/tiny.py", "--workdir=w"],
      ["--episodes is missing; --mode=sft needs it"],
    ),
    (["--mode=skills"], ["--bank is missing", "--workdir"]),
    (
      ["--mode=serve", "--engine=google", "--config=configs/tiny.py"]
      + ["--config.search.google.per_second=0"],
      ["search.google.per_second = 0", "from 0.001 to 10000"],
    ),
    (["--mode=skills", "--bank=no.jsonl"], ["no.jsonl: no such file"]),
  ],
)
def test_bad_flags(flags, says):
  done = command(*flags)
  assert done.returncode == 2
  assert len(done.stderr.splitlines()) == 1
  assert done.stderr.startswith("error: ")
  for words in says:
    assert words in done.stderr


@pytest.mark.parametrize(
  ("error", "says", "code"),
  [
    ("28, 'No space left'", "stopped: No space left", 1),
    ("28, 'No space left', 'a.json'", "stopped: No space left: a.json", 1),
    ("'gone'", "error: gone", 2),
  ],
)
def test_a_failing_disk_is_one_line(error, says, code):
  text = f"""
import sys
from sesa_jax import main
def mode():
  raise OSError({error})
main.MODES["plan"] = mode
sys.exit(main.main(["main", "--mode=plan"]))"""
  done = subprocess.run(
    [sys.executable, "-c", text], capture_output=True, text=True, timeout=60
  )
  assert (done.stderr.splitlines()[-1], done.returncode) == (says, code)


def test_help_names_flags_and_modes():
  done = command("--help")
  assert done.returncode == 0
  assert "--start_from" in done.stdout
  assert "--mode=show" in done.stdout


MACHINED = """
from configs import common

def get_config(variant="sesa"):
  config = common.get_config()
  config.machines.cpu = dict(engine=dict(slots=3), mesh=dict(tensor=2))
  config.machines.v5e = dict(engine=dict(slots=9), mesh=dict(tensor=9))
  return common.finish(config, variant)
"""
STARTS = """
import sys
from sesa_jax import experiment, main

def run(config, *_, **__):
  print(config.engine.slots, config.mesh.tensor, config.questions)
  print(config.is_locked, len(config.machines))

experiment.run = experiment.evaluate_checkpoint = run
sys.exit(main.main())
"""


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_run_takes_its_machines_values_and_keeps_the_flags(tmp_path, mode):
  path = tmp_path / "machined.py"
  path.write_text(MACHINED)
  flags = [
    f"--config={path}:no_bell",
    "--workdir=w",
    f"--mode={mode}",
    "--config.mesh.tensor=1",  # the default, but said
    "--config.questions=7",
  ]
  done = subprocess.run(
    [sys.executable, "-c", STARTS, *flags],
    capture_output=True,
    text=True,
    cwd=ROOT,
    timeout=120,
  )
  assert done.stdout.splitlines() == ["3 1 7", "True 0"], done.stderr


def refused(tmp_path, monkeypatch, **changes):
  """Runs a config with changes; returns the one line that refuses it."""

  def no_weights(*_):
    raise AssertionError("a model was loaded")

  monkeypatch.setattr(weights, "load", no_weights)
  config = tiny.get_config().copy_and_resolve_references()
  config.unlock()
  for name, value in changes.items():
    config.update_from_flattened_dict({name.replace("__", "."): value})
  with pytest.raises(ValueError, match=".") as caught:
    experiment.run(config, str(tmp_path / "w"))
  return str(caught.value)


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"frontier__reward": "bel"}, "frontier.reward 'bel'. Choices: bell"),
    ({"frontier__gate": "x"}, "frontier.gate 'x'. Choices: frontier, any"),
    ({"challenger__invalid": "x"}, "Choices: endpoint, mask, zero, penalty"),
    ({"challenger__baseline": "group"}, "baseline"),
    ({"solver__baseline": "x"}, "Choices: group, batch, hop, none"),
    ({"challenger__loss": "ppo"}, "challenger.loss 'ppo'. Choices: grpo"),
    ({"solver__loss": "dr_grpo"}, "solver.loss 'dr_grpo' with advantages"),
    ({"learner__moments": "int8"}, "Choices: float32, bfloat16"),
    ({"solver__loss_scale": 0.0}, "solver.loss_scale = 0.0"),
    ({"alarms__malformed": 1.5}, "alarms.malformed = 1.5"),
    (
      {"bank__prime": "seeds16"},
      "Choices: none, seeds15, authored157, mined:PATH",
    ),
    ({"bank__credit": "x"}, "Choices: rollout, majority, relative"),
    ({"pool__refill": "x"}, "Choices: replay, mask"),
    ({"distillation__keep": "x"}, "Choices: newest, best"),
    ({"bank__arm": "none"}, "'none'. Choices: skills, placebo, scrambled"),
    ({"bank__index": "faiss"}, "'faiss'. Choices: auto, exact, scann"),
    ({"bank__credit": "control"}, "control_attempts to at least 1"),
    ({"distillation__distiller": "x"}, "'x'. Choices: chat, solver, offline"),
    (
      {"distillation__distiller": "chat"},
      "distiller = 'chat' asks a model, but judge",
    ),
    ({"distillation__consolidate": "x"}, "'x'. Choices: single, cluster"),
    (
      {"distillation__distiller": "solver", "distillation__wait": False},
      "for distillation.distiller = 'solver' it must be True",
    ),
    ({"verifier__answerer": "x"}, "'x'. Choices: judge, solver"),
    (
      {"verifier__answerer": "judge"},
      "answerer = 'judge' asks a model, but judge",
    ),
    ({"judge__base_url": "localhost"}, "'localhost' is no http"),
    ({"judge__tries": 0}, "judge.tries = 0"),
    ({"search__engine": "x"}, "Choices: bm25, dense, search_r1, google"),
    ({"policy__template": "x"}, "Choices: native, search_r1, ssp"),
    ({"policy__attention": "x"}, "Choices: auto, xla, splash, cudnn"),
    ({"engine__cache": "x"}, "Choices: paged, contiguous"),
    ({"engine__pages": 3}, "Set engine.pages to at least 7"),
    ({"mesh__fsdp": -1}, "mesh.fsdp = -1: it must be at least 0"),
    ({"mesh__rollout_tensor": 0}, "mesh.rollout_tensor = 0"),
    ({"mesh__fsdp": 0, "mesh__tensor": 3}, "the 8 devices that mesh.fsdp = 0"),
    ({"mesh__fsdp": 0}, "4 does not divide over 8 devices"),
    ({"policy__source": "x"}, "Choices: hf, gguf, random"),
    ({"solver__temperature": 0.0}, "solver.temperature = 0.0"),
    ({"questions": 0}, "questions = 0"),
    ({"seed": -1}, "seed = -1"),
    ({"seed": 1 << 70}, "seed = "),
    ({"learner__row_multiple": 0}, "learner.row_multiple = 0"),
    ({"solver__minibatch_questions": 0}, "solver.minibatch_questions = 0"),
    ({"lost_limit": -1.0}, "lost_limit = -1.0: it must be from 0 to 1"),
    ({"eval__confidence": 1.0}, "eval.confidence = 1.0"),
    ({"solver__learning_rate": float("nan")}, "solver.learning_rate = nan"),
    ({"policy__compute_dtype": "int32"}, "Choices: float32, bfloat16"),
    ({"eval__turns": 0}, "eval.turns = 0"),
    ({"eval__banks": ("none", "none")}, "name each mode once"),
    ({"eval__banks": ()}, "at least one. Choices: none, final"),
    ({"eval__sets__tiny_eval__size": -1}, "tiny_eval.size = -1"),
    ({"eval__sets__tiny_eval__path": ""}, "config.eval.sets.tiny_eval.path=F"),
    (
      {"pool__fixed__tiny_pool__path": ""},
      "fixed.tiny_pool.path is empty",
    ),
    ({"selfplay": False, "pool__fixed": {}}, "preset fixed_questions or sear"),
    ({"selfplay": False, "questions": 20}, "there are 8. Lower the one"),
    ({"policy__path": "assets:no/such"}, "assets:no/such is not in the assets"),
    ({"bank__fields": ("desc",)}, "bank.fields = ('desc',)"),
    ({"questions": 1000}, "only 24 seeds"),
    ({"mesh__fsdp": 64}, "asks for 64 devices; 8 are present"),
    (
      {"mesh__fsdp": 4, "learner__microbatch_rows": 6},
      "The nearest that do: 4 or 8",
    ),
    ({"mesh__tensor": 4}, "does not divide over mesh.tensor = 4"),
    ({"policy__source": "hf", "policy__path": "no/folder"}, "no/folder"),
    ({"policy__source": "gguf", "policy__path": "no.gguf"}, "no.gguf"),
    ({"corpus": ()}, "corpus is empty"),
    ({"corpus": ("no/corpus.jsonl",)}, "no/corpus.jsonl"),
    ({"solver__episode_tokens": 1 << 20}, "do not fit into the backbone"),
  ],
)
def test_bad_configs(tmp_path, monkeypatch, changes, says):
  line = refused(tmp_path, monkeypatch, **changes)
  assert says in line
  assert "\n" not in line


def test_a_corpus_line_without_text_names_file_and_line(tmp_path, monkeypatch):
  path = tmp_path / "corpus.jsonl"
  path.write_text(
    '{"id": "a", "title": "A", "text": "one"}\n{"id": "b", "body": "two"}\n'
  )
  line = refused(tmp_path, monkeypatch, corpus=(str(path),))
  assert f"{path}:2" in line


def test_a_corpus_line_that_is_not_utf8_names_file_and_line(
  tmp_path, monkeypatch
):
  path = tmp_path / "corpus.jsonl"
  path.write_bytes(
    b'{"id": "a", "title": "A", "text": "one"}\n\n{"id": "b\xff"}\n'
  )
  line = refused(tmp_path, monkeypatch, corpus=(str(path),))
  assert f"{path}:3: not UTF-8" in line


def test_an_empty_seed_list_is_an_error(tmp_path, monkeypatch):
  path = tmp_path / "seeds.jsonl"
  path.write_text("")
  line = refused(
    tmp_path, monkeypatch, seeds__source="jsonl", seeds__path=str(path)
  )
  assert "seed list is empty" in line


def test_a_corrupt_safetensors_file_is_named(tmp_path, monkeypatch):
  folder = tmp_path / "model"
  folder.mkdir()
  config = dict(
    model_type="llama",
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    hidden_act="silu",
    tie_word_embeddings=True,
  )
  (folder / "config.json").write_text(json.dumps(config))
  data = struct.pack("<Q", 10**9) + b"{}"
  (folder / "model.safetensors").write_bytes(data)
  line = refused(
    tmp_path, monkeypatch, policy__source="hf", policy__path=str(folder)
  )
  assert "model.safetensors" in line
  assert "truncated or corrupt" in line


def test_a_corrupt_gguf_file_is_named(tmp_path, monkeypatch):
  path = tmp_path / "model.gguf"
  path.write_bytes(b"GGUF" + b"\0" * 40)
  line = refused(
    tmp_path, monkeypatch, policy__source="gguf", policy__path=str(path)
  )
  assert "model.gguf" in line


def test_a_workdir_of_another_config_names_the_fields(tmp_path, monkeypatch):
  folder = metrics.RunFolder(tmp_path / "w")
  values = metrics.plain(tiny.get_config().to_dict())
  folder.write_json("config.json", values)
  line = refused(tmp_path, monkeypatch, solver__group_size=8)
  assert "solver.group_size: 4 -> 8" in line
  assert "--force_new" in line
  assert manifest.check_workdir(
    folder.path, values | {"seed": 1}, force_new=True
  ) == ["seed: 0 -> 1"]


def test_show_of_nothing_is_an_error(tmp_path):
  done = command("--mode=show", f"--workdir={tmp_path / 'none'}")
  assert done.returncode == 2
  assert "no such folder" in done.stderr


def test_an_evaluation_question_never_reaches_the_pool(tmp_path):
  tested = Path("tests/world/eval.jsonl").read_text()
  path = tmp_path / "both.jsonl"
  path.write_text(
    tested.upper()
    .replace("QUESTION", "question")
    .replace("GOLDEN_ANSWERS", "golden_answers")
    + '{"question": "Which one is new?", "golden_answers": ["this"]}\n'
  )
  config = tiny.get_config().copy_and_resolve_references()
  config.unlock()
  config.pool.fixed.both = common.question_set(str(path), 0)
  texts = tools.read(config)
  both = [q.text for q in texts.fixed if q.id.startswith("both/")]
  assert both == ["Which one is new?"]


def test_every_number_of_the_config_has_a_range():
  def numbers(config, path=""):
    for name, value in config.items():
      if isinstance(value, ConfigDict):
        yield from numbers(value, f"{path}{name}.")
      elif isinstance(value, int | float) and not isinstance(value, bool):
        yield f"{path}{name}"

  config = common.get_config()
  assert not config.machines  # their values are of the same fields
  found = set(numbers(config))
  maybe = {  # None by default
    "challenger.min_searches",
    "bank.min_score",
    "search.google.per_day",
    "budget.searches",
    "budget.cost",
  }
  maybe |= {f"judge.{name}" for name in ("max_tokens", "max_cost")}
  maybe |= {
    f"judge.{name}price"
    for name in ("prompt_", "completion_", "cached_prompt_")
  }
  assert found | maybe == set(config_lib._RANGES)


def test_a_preset_has_the_last_word():
  assert tiny.get_config("no_distillation").distillation.admit is False
  assert tiny.get_config("no_frontier").frontier.reward == "failure"
  assert tiny.get_config("no_priming").bank.prime == "none"
  assert tiny.get_config().preset == "sesa"
  for name in common.PRESETS:
    assert tiny.get_config(name).preset == name
    assert tiny.get_config(name).is_locked
