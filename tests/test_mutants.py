"""The mutants that `python -m tests.mutants` runs still apply."""

import ast
import collections
import pathlib

import pytest

from tests import mutants


@pytest.mark.parametrize(
  "mutant", mutants.EVERY, ids=lambda mutant: mutant.name
)
def test_mutant_applies(mutant):
  path = mutants.ROOT / "sesa_jax" / mutant.file
  text = path.read_text()
  patched = mutants.apply(mutant, text)
  assert ast.dump(ast.parse(patched)) != ast.dump(ast.parse(text))
  for name in mutant.tests.split():
    assert (mutants.ROOT / f"tests/test_{name}.py").is_file()


def test_names_are_unique():
  names = collections.Counter(mutant.name for mutant in mutants.EVERY)
  assert set(names.values()) == {1}
  assert len(mutants.BLIND) >= 10
  assert len(mutants.EVERY) >= 17


@pytest.mark.parametrize("text", ["x = 2", "x = 1; x = 1"])
def test_patch_that_does_not_fit_is_an_error(text):
  mutant = mutants.Mutant("m", "loop.py", "x = 1", "x = 3", "loop")
  with pytest.raises(ValueError, match="not once"):
    mutants.apply(mutant, text)


def _tree(folder: pathlib.Path, body: str) -> pathlib.Path:
  (folder / "sesa_jax").mkdir()
  (folder / "sesa_jax/number.py").write_text("number = 1\n")
  (folder / "tests").mkdir()
  (folder / "tests/test_number.py").write_text(
    f"from sesa_jax import number\n\n\ndef test_it():\n  assert {body}\n"
  )
  return folder


MUTANT = mutants.Mutant("m", "number.py", "= 1", "= 2", "number")


def test_run_names_the_test_that_notices(tmp_path):
  tree = _tree(tmp_path, "number.number == 1")
  assert mutants.run(MUTANT, tree, False) == "tests/test_number.py::test_it"
  assert (tree / "sesa_jax/number.py").read_text() == "number = 1\n"


def test_a_test_s_name_may_hold_spaces(tmp_path):
  tree = _tree(tmp_path, "number.number == 1")
  test = tree / "tests/test_number.py"
  cases = '@pytest.mark.parametrize("case", ["of two - words"])\n'
  written = test.read_text().replace("def test_it():", "def test_it(case):")
  test.write_text("import pytest\n" + written.replace("def", f"{cases}def"))
  noticed = "tests/test_number.py::test_it[of two - words]"
  assert mutants.run(MUTANT, tree, False) == noticed


@pytest.mark.parametrize(
  ("found", "widen", "noticed"),
  [([""], False, ""), (["", ""], True, ""), (["", "a", ""], True, "a")],
)
def test_survivors(tmp_path, monkeypatch, found, widen, noticed):
  tree, found = _tree(tmp_path, "True"), list(found)
  monkeypatch.setattr(mutants, "failure", lambda tree, tests: found.pop(0))
  assert mutants.run(MUTANT, tree, widen) == noticed
  assert not found


def test_a_test_that_fails_anyway_is_an_error(tmp_path, monkeypatch):
  tree = _tree(tmp_path, "True")
  monkeypatch.setattr(mutants, "failure", lambda tree, tests: "a")
  with pytest.raises(ValueError, match="without 'm', too"):
    mutants.run(MUTANT, tree, widen=False)


def test_unknown_name():
  with pytest.raises(ValueError, match="--list"):
    mutants.chosen("no such mutant")
