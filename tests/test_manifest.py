import hashlib
import json
import re
import subprocess

import jax
import numpy
import pytest

from sesa_jax import manifest

CONFIG = {
  "name": "tiny",
  "iterations": 2,
  "solver": {"group_size": 5, "clip": {}},
  "hops": (1, 2),
}


def build(**more):
  arguments = dict(
    command=["main.py", "--config=a.py"],
    config=CONFIG,
    hashes={"template": "t", "corpus": "c"},
    judge="exact match",
    parent=None,
  )
  return manifest.build(**arguments | more)


def test_it_names_versions_devices_and_hashes():
  got = json.loads(json.dumps(build()))
  assert got["versions"]["numpy"] == numpy.__version__
  assert got["versions"]["jax"] == jax.__version__
  assert {"python", "flax", "optax", "orbax-checkpoint", "transformers"} <= set(
    got["versions"]
  )
  assert got["devices"]["platform"] == "cpu"
  assert got["devices"]["count"] == len(jax.devices())
  assert got["hashes"] == {"corpus": "c", "template": "t"}
  assert (got["judge"], got["parent"]) == ("exact match", None)
  text = (
    '{"hops": [1, 2], "iterations": 2, "name": "tiny", '
    '"solver": {"clip": {}, "group_size": 5}}'
  )
  sha256 = hashlib.sha256(text.encode()).hexdigest()
  assert got["config"] == {"name": "tiny", "sha256": sha256}
  assert re.fullmatch(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", got["started_at"]
  )


def test_it_does_not_say_whose_machine_it_was(monkeypatch):
  monkeypatch.setenv("HOME", "/home/somebody")
  got = build(
    command=["main.py", "--workdir=/home/somebody/w"], parent="/home/somebody@3"
  )
  assert "somebody" not in json.dumps(got)
  assert got["command"][1] == "--workdir=~/w"
  monkeypatch.setenv("HOME", "/")
  assert build(command=["a/b"])["command"] == ["a/b"]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
  """A git checkout that holds a copy of the module's place."""
  package = tmp_path / "package"
  package.mkdir()
  (package / "types.py").write_text("")
  monkeypatch.setattr(manifest, "__file__", str(package / "manifest.py"))
  return tmp_path


def git(folder, *words):
  identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
  done = subprocess.run(
    ["git", "-C", str(folder), *identity, *words],
    check=True,
    capture_output=True,
    text=True,
  )
  return done.stdout.strip()


def test_commit_and_dirty(checkout):
  assert (build()["commit"], build()["dirty"]) == (None, None)
  git(checkout, "init")
  # Within someone's checkout, but not tracked by it.
  (checkout / "theirs").write_text("")
  git(checkout, "add", "theirs")
  git(checkout, "commit", "-m", "theirs")
  assert build()["commit"] is None
  git(checkout, "add", ".")
  git(checkout, "commit", "-m", "ours")
  got = build()
  assert got["commit"] == git(checkout, "rev-parse", "HEAD")
  assert got["dirty"] is False
  (checkout / "new").write_text("")
  assert build()["dirty"] is True


def test_no_git(checkout, monkeypatch):
  git(checkout, "init")
  git(checkout, "add", ".")
  git(checkout, "commit", "-m", "ours")
  monkeypatch.setenv("PATH", "")
  assert build()["commit"] is None


def test_config_diff_names_fields_and_both_values():
  new = {
    "name": "tiny",
    "iterations": 2,
    "solver": {"group_size": 8, "clip": {"low": 0.2}},
    "hops": [1, 2],
  }
  assert manifest.config_diff(CONFIG, new) == [
    "solver.clip: {} -> absent",
    "solver.clip.low: absent -> 0.2",
    "solver.group_size: 5 -> 8",
  ]
  assert manifest.config_diff(CONFIG, CONFIG) == []
  # A null is not the same as no field, nor 1 as true.
  assert manifest.config_diff({"a": None}, {}) == ["a: null -> absent"]
  assert manifest.config_diff({"a": 1}, {"a": True}) == ["a: 1 -> true"]


def write(folder, config):
  (folder / "config.json").write_text(json.dumps(config))


def test_a_new_folder_and_the_same_config_pass(tmp_path):
  assert manifest.check_workdir(tmp_path / "new", CONFIG) == []
  write(tmp_path, CONFIG)
  assert manifest.check_workdir(tmp_path, CONFIG) == []


def test_a_run_may_be_lengthened(tmp_path):
  write(tmp_path, CONFIG)
  longer = CONFIG | {"iterations": 3}
  assert manifest.check_workdir(tmp_path, longer) == ["iterations: 2 -> 3"]
  assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_a_folder_of_another_config_names_the_fields(tmp_path):
  write(tmp_path, CONFIG)
  other = CONFIG | {"iterations": 3, "name": "b", "hops": [1]}
  with pytest.raises(ValueError, match="force_new") as caught:
    manifest.check_workdir(tmp_path, other)
  assert 'hops: [1, 2] -> [1]; name: "tiny" -> "b".' in str(caught.value)
  assert "iterations" not in str(caught.value)


def test_force_new_keeps_the_old_config(tmp_path):
  for number, name in enumerate("bc", 1):
    write(tmp_path, CONFIG | {"name": f"old{number}"})
    manifest.check_workdir(tmp_path, CONFIG | {"name": name}, force_new=True)
    manifest.keep_config(tmp_path)
  for number in (1, 2):
    old = json.loads((tmp_path / f"config.json.{number}").read_text())
    assert old["name"] == f"old{number}"
  assert json.loads((tmp_path / "config.json").read_text())["name"] == "old2"


def test_a_damaged_config_is_named(tmp_path):
  (tmp_path / "config.json").write_text("{")
  with pytest.raises(ValueError, match=r"config\.json is not JSON"):
    manifest.check_workdir(tmp_path, CONFIG)
