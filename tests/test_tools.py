"""From config to tools: values reach the place that they are meant for."""

import dataclasses
import json
from pathlib import Path

import pytest

from configs import tiny
from sesa_jax import config as config_lib
from sesa_jax import tools
from sesa_jax.policy import tokenizer, weights

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
  monkeypatch.chdir(ROOT)


def tiny_config(**changes):
  config = tiny.get_config().copy_and_resolve_references()
  config.unlock()
  config.update_from_flattened_dict(changes)
  return config


def test_assets_lie_in_their_folder(monkeypatch, tmp_path):
  monkeypatch.setenv("SESA_JAX_ASSETS", str(tmp_path))
  with pytest.raises(ValueError, match=r"assets:a/b.txt.*fetch.py --set=demo"):
    config_lib.locate("assets:a/b.txt")
  (tmp_path / "a").mkdir()
  (tmp_path / "a" / "b.txt").write_text("")
  assert config_lib.locate("assets:a/b.txt") == str(tmp_path / "a" / "b.txt")
  assert config_lib.locate("a/b.txt") == "a/b.txt"
  monkeypatch.delenv("SESA_JAX_ASSETS")
  monkeypatch.setenv("HOME", str(tmp_path))
  home = tmp_path / ".cache" / "sesa_jax" / "a"
  home.mkdir(parents=True)
  assert config_lib.locate("assets:a") == str(home)


def test_search_has_the_configs_numbers():
  scores = [
    tools.read(tiny_config(**{"search.k1": k1, "search.b": b}))
    .library.engine.search(["river France capital"], 3)[0][0]
    .score
    for k1, b in ((0.9, 0.4), (2.0, 0.4), (0.9, 1.0))
  ]
  assert len(set(scores)) == 3


def test_the_identity_of_a_search_names_what_makes_it_worse():
  found = {
    tools.search(tiny_config(**changes)).identity
    for changes in (
      {}, {"search.degrade.drop": 0.5}, {"search.degrade.drop": 0.25},
      {"search.k1": 2.0}, {"search.passage_words": 20},
    )
  }  # fmt: skip
  assert len(found) == 5


def test_processes_share_the_rates_of_a_provider(monkeypatch):
  opened = []
  monkeypatch.setattr(
    tools.engines, "open_search", lambda *args, **more: opened.append(args)
  )
  monkeypatch.setattr(tools.distributed, "count", lambda: 4)
  monkeypatch.setattr(tools.distributed, "index", lambda: 3)
  for per_day in (None, 1002):
    config = tiny_config(**{"search.google.per_day": per_day})
    tools.search(config)
    assert config.search.google.per_second == 10
  assert [
    (args[0]["google"]["per_second"], args[0]["google"]["per_day"])
    for args in opened
  ] == [(2.5, None), (2.5, 250)]


def test_seeds_that_ask_for_a_tested_answer_are_warned_of(tmp_path, caplog):
  path = tmp_path / "seeds.txt"
  path.write_text("Oslo\nThe Kilimanjaro\nBern\n")
  seeds = {"seeds.source": "list", "seeds.path": str(path)}
  with caplog.at_level("WARNING"):
    tools.read(tiny_config(**seeds))
  assert [record.getMessage() for record in caplog.records] == [
    "1 of 3 seeds ask for the answer of an evaluation question, such as "
    "seeds/1: 'The Kilimanjaro'. The questions themselves are never trained "
    "on."
  ]
  caplog.clear()
  path.write_text("Oslo\nLima\nBern\n")
  with caplog.at_level("WARNING"):
    tools.read(tiny_config(**seeds))
  assert not caplog.records


def test_sets_are_drawn_by_the_seed():
  one, two, three = (
    [
      q.id
      for q in tools.read(
        tiny_config(seed=seed, **{"pool.fixed.tiny_pool.size": 4})
      ).fixed
    ]
    for seed in (0, 0, 1)
  )
  assert one == two != three
  assert len(set(one)) == 4


def test_too_few_questions_is_an_error():
  with pytest.raises(ValueError, match="99 questions asked for, 4 in"):
    tools.read(tiny_config(**{"eval.sets.tiny_eval.size": 99}))


def test_hashes_follow_what_they_name(tmp_path):
  config = tiny_config()
  texts = tools.read(config)
  base = dict(tools.assemble(config, texts).hashes)
  assert base == dict(tools.assemble(config, texts).hashes)
  other = dataclasses.replace(texts.library, digest="of other passages")
  less = dataclasses.replace(texts, library=other)
  fewer = dataclasses.replace(texts, fixed=texts.fixed[:-1])
  for changed, names in ((less, {"corpus", "index"}), (fewer, {"questions"})):
    found = tools.assemble(config, changed).hashes
    assert {n for n in base if base[n] != found[n]} == names


def test_hashes_name_the_pins_of_the_assets(monkeypatch, tmp_path):
  monkeypatch.setenv("SESA_JAX_ASSETS", str(tmp_path))
  lock = {"texts": {"pin": "abc", "files": {}}, "other": {"pin": "def"}}
  (tmp_path / "assets.lock.json").write_text(json.dumps(lock))
  (tmp_path / "texts").mkdir()
  corpus = tmp_path / "texts" / "corpus.jsonl"
  corpus.write_bytes(Path("tests/world/corpus.jsonl").read_bytes())
  config = tiny_config(corpus=("assets:texts/corpus.jsonl",))
  hashes = tools.assemble(config, tools.read(config)).hashes
  assert hashes["assets/texts"] == "abc"
  assert "assets/other" not in hashes


def test_worked_episodes_that_no_chat_can_show_are_refused(monkeypatch):
  monkeypatch.setattr(weights, "load", None)  # weights are not touched
  config = tiny_config(**{"policy.template": "ssp", "policy.example": True})
  with pytest.raises(ValueError, match=r"Set policy\.example to False"):
    tools.assemble(config, tools.read(config))


def test_a_tokenizer_with_more_ids_than_the_weights_is_refused(monkeypatch):
  monkeypatch.setattr(weights, "load", None)
  words = tokenizer.tiny()
  words.add_tokens(["sesa"])
  monkeypatch.setattr(tokenizer, "load", lambda source, path: words)
  config = tiny_config()
  with pytest.raises(ValueError, match="ids up to 512, .* rows for 512 ids"):
    tools.assemble(config, tools.read(config))


def test_a_template_that_loses_the_question_is_refused(monkeypatch):
  monkeypatch.setattr(weights, "load", None)
  words = tokenizer.tiny()
  words.chat_template = "{{ messages[0]['content'] }}"
  monkeypatch.setattr(tokenizer, "load", lambda source, path: words)
  config = tiny_config(**{"policy.example": False})
  with pytest.raises(ValueError, match="leaves out the question"):
    tools.assemble(config, tools.read(config))


def test_heads_that_a_rollout_cannot_share_name_its_field():
  config = tiny_config(
    **{
      "mesh.fsdp": 4,
      "mesh.rollout_tensor": 4,
      "learner.microbatch_rows": 4,
    }
  )
  with pytest.raises(ValueError, match=r"over mesh\.rollout_tensor = 4\."):
    config_lib.check(config)


def test_the_mesh_takes_all_devices_where_none_are_named():
  sizes = config_lib.mesh_sizes
  for tensor, fsdp in ((1, 16), (2, 8), (16, 1)):
    config = tiny_config(**{"mesh.fsdp": 0, "mesh.tensor": tensor})
    assert sizes(config, 16) == (fsdp, tensor)
  assert sizes(tiny_config(**{"mesh.fsdp": 0})) == (8, 1)  # of conftest
  assert sizes(tiny_config(**{"mesh.fsdp": 2, "mesh.tensor": 3})) == (2, 3)
  config = tiny_config(**{"mesh.fsdp": 0, "mesh.tensor": 32})
  with pytest.raises(ValueError, match=r"Sizes that do: 1, 2, 4, 8, 16\."):
    sizes(config, 16)


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"solver.episode_tokens": 330}, "Question tiny_"),
    ({"challenger.episode_tokens": 200}, "The prompt of seed title/"),
  ],
)
def test_prompts_that_leave_no_room_are_refused(changes, says):
  config = tiny_config(**changes)
  with pytest.raises(ValueError, match=says):
    tools.assemble(config, tools.read(config))


def test_weights_of_one_size_are_told_apart(tmp_path):
  folders = [tmp_path / name for name in "abc"]
  for folder, value in zip(folders, (b"1", b"2", b"1"), strict=True):
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(value * 9)
  one, other, again = (tools.digest(str(folder)) for folder in folders)
  assert one == again != other
