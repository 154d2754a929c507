"""Worlds are made where they are asked for, once."""

import json
import types as python_types
from pathlib import Path

import pytest

from sesa_jax import config as config_lib
from sesa_jax import tools, worlds
from sesa_jax.data import microworld


@pytest.fixture
def few(monkeypatch):
  monkeypatch.setattr(worlds, "EPISODES", 12)


def test_a_world_is_made_once_and_kept(tmp_path, monkeypatch, few):
  monkeypatch.setenv("SESA_JAX_ASSETS", str(tmp_path))

  def text(name):
    return Path(config_lib.locate(f"microworld:3/{name}")).read_text()

  facts = json.loads(text("world.json"))
  assert facts["seed"] == 3
  assert facts["rules"] == microworld.rules(3)
  monkeypatch.setattr(microworld, "write", None)  # not again
  assert config_lib.locate("microworld:3/corpus.jsonl").endswith(
    "-3/corpus.jsonl"
  )
  episodes = text("episodes.jsonl")
  assert len(episodes.splitlines()) == 12
  monkeypatch.setattr(worlds, "EPISODES", 20)
  assert text("episodes.jsonl") == episodes
  # A folder that `--mode=sft` is to make.
  out = config_lib.locate("microworld:3/policy", exists=False)
  assert out.endswith("-3/policy")
  with pytest.raises(ValueError, match="policy is what --mode=sft makes"):
    config_lib.locate("microworld:3/policy")
  assert not list(tmp_path.glob("**/.*"))


def test_what_a_kill_left_goes_with_the_next(tmp_path):
  worlds.locate("microworld:1/world.json", tmp_path)
  home = tmp_path / "microworld"
  left = home / f".{worlds.digest()}-2.cut"
  left.mkdir()
  (left / "export.lock").touch()
  worlds.locate("microworld:2/world.json", tmp_path)
  seeds = {path.name.split("-")[1] for path in home.iterdir()}
  assert seeds == {"1", "2"}


def test_another_version_has_a_folder_of_its_own(tmp_path, monkeypatch):
  first = worlds.locate("microworld:0/world.json", tmp_path)
  monkeypatch.setattr(worlds, "digest", lambda: "other")
  other = worlds.locate("microworld:0/world.json", tmp_path)
  assert first.parent != other.parent
  assert other.exists()


def test_words_about_code_do_not_make_another_version():
  code = '''"""A."""

# B
def f():
  """C

  D."""
  return "x"  # e
'''
  assert worlds._code(code) == 'def f():\n  return "x"  # e'
  for old, new in (("A.", "Z."), ("# B", "# Z"), ("D.", "Z.")):
    assert worlds._code(code.replace(old, new)) == worlds._code(code)
  assert worlds._code(code.replace('"x"', '"y"')) != worlds._code(code)


@pytest.mark.parametrize("path", ["microworld:corpus.jsonl", "microworld:x/a"])
def test_a_path_without_a_seed_is_an_error(path, tmp_path):
  with pytest.raises(ValueError, match="is not microworld:SEED/FILE"):
    worlds.locate(path, tmp_path)


def test_a_file_that_no_world_has_is_an_error(tmp_path):
  with pytest.raises(ValueError, match="the world has blank, corpus.jsonl, "):
    worlds.locate("microworld:0/cropus.jsonl", tmp_path)


def test_the_bank_is_primed_from_a_world(tmp_path, monkeypatch):
  monkeypatch.setenv("SESA_JAX_ASSETS", str(tmp_path))
  for source in ("none", "seeds15", "mined:x.jsonl"):
    assert config_lib.prime(source) == source
  found = config_lib.prime("mined:microworld:0/skills.jsonl")
  assert found.startswith(f"mined:{tmp_path}/microworld/")


def test_a_hash_encoder_has_the_width_that_it_names():
  spec = python_types.SimpleNamespace(path="hash:96")
  assert tools.load_encoder(spec).dim == 96
  spec.path = "hash"
  assert tools.load_encoder(spec).dim == 64
