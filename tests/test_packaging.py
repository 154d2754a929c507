"""What is installed: requirements, pins, packaged files, the Makefile."""

from __future__ import annotations

import ast
import fnmatch
import importlib.metadata
import itertools
import os
import re
import runpy
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12")


@pytest.fixture(scope="module")
def setup() -> dict:
  """The keywords that setup.py calls `setup` with."""
  found = {}
  stand_in = types.ModuleType("setuptools")
  stand_in.setup = found.update
  stand_in.find_packages = lambda include: include
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, "setuptools", stand_in)
    runpy.run_path(str(ROOT / "setup.py"))
  return found


def pins(python: str) -> dict[str, Requirement]:
  """Returns what constraints.txt pins for a version of Python, by name."""
  environment = default_environment() | {"python_version": python}
  found = {}
  for line in (ROOT / "constraints.txt").read_text().splitlines():
    if line.startswith("#"):
      continue
    pin = Requirement(line)
    if pin.marker is None or pin.marker.evaluate(environment):
      name = canonicalize_name(pin.name)
      assert name not in found, f"{name} is pinned twice on Python {python}"
      found[name] = pin
  return found


def version(pin: Requirement) -> str:
  (specifier,) = pin.specifier
  assert specifier.operator == "==", str(pin)
  return specifier.version


@pytest.mark.parametrize("python", PYTHONS)
def test_every_requirement_is_pinned_within_its_range(setup, python):
  pinned = pins(python)
  extras = setup["extras_require"]
  wanted = setup["install_requires"] + extras["dev"] + extras["plan"]
  for requirement in map(Requirement, wanted):
    pin = pinned[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(version(pin)), str(requirement)


@pytest.mark.parametrize("python", PYTHONS)
def test_what_the_pinned_packages_need_is_pinned_too(setup, python):
  environment = default_environment() | {"python_version": python, "extra": ""}
  pinned = pins(python)
  for name in pinned:
    try:
      needs = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
      continue  # only on the other Python, or only with a CUDA build
    for need in map(Requirement, needs):
      if need.marker is None or need.marker.evaluate(environment):
        assert canonicalize_name(need.name) in pinned, f"{name} needs {need}"


def test_the_tests_run_on_the_pinned_versions():
  python = f"{sys.version_info.major}.{sys.version_info.minor}"
  for name, pin in pins(python).items():
    try:
      installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue
    # torch comes as 2.13.0 or as 2.13.0+cpu, by where it comes from.
    assert installed.split("+")[0] == version(pin), name


@pytest.mark.parametrize("name", ["constraints.txt", "requirements.txt"])
def test_no_requirement_names_a_place(name):
  text = (ROOT / name).read_text()
  assert not re.search(r"://|^\s*-|\+| @ ", text, re.MULTILINE)


def imports(folder: str) -> set[str]:
  """Returns the top-level names that the files of a folder import."""
  found = set()
  for path in (ROOT / folder).rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Import):
        found |= {alias.name.split(".")[0] for alias in node.names}
      elif isinstance(node, ast.ImportFrom) and not node.level:
        found.add(node.module.split(".")[0])
  ours = {"sesa_jax", "configs", "hub", "fetch", "third_party"}
  return found - ours - sys.stdlib_module_names


def test_what_is_imported_is_required_and_the_other_way_round(setup):
  required = {
    canonicalize_name(Requirement(line).name)
    for line in setup["install_requires"]
  }
  owners = importlib.metadata.packages_distributions()
  folders = map(imports, ("sesa_jax", "configs", "third_party"))
  used = set()
  for module in set(itertools.chain.from_iterable(folders)):
    names = {canonicalize_name(name) for name in owners.get(module, ())}
    assert names & required, f"{module} ({names or 'not installed'})"
    used |= names
  # transformers loads jinja2 by itself, once a tokenizer has a chat template.
  assert required - used <= {"jinja2"}


def test_every_file_of_the_package_is_packaged(setup):
  patterns = setup["package_data"][""]
  for path in (ROOT / "sesa_jax").rglob("*"):
    if path.is_dir() or "__pycache__" in path.parts:
      continue
    assert (path.parent / "__init__.py").exists(), path.parent
    covered = [*patterns, "*.py"]
    assert any(fnmatch.fnmatch(path.name, p) for p in covered), path


def test_the_version_is_the_package_s(setup):
  import sesa_jax

  assert setup["version"] == sesa_jax.__version__


needs_make = pytest.mark.skipif(not shutil.which("make"), reason="no make")


def make(*arguments: str) -> subprocess.CompletedProcess:
  clean = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
  clean.pop("MFLAGS", None)
  return subprocess.run(
    ["make", "--no-print-directory", *arguments],
    cwd=ROOT,
    capture_output=True,
    text=True,
    env=clean,
  )


@needs_make
def test_an_unsuitable_python_is_one_clear_line(tmp_path):
  done = make("demo", f"VENV={tmp_path / 'venv'}", "PYTHON=/no/python3.9")
  assert done.returncode != 0
  first, last = done.stderr.strip().splitlines()
  assert first.startswith("make: /no/python3.9 is no Python 3.11 or 3.12")
  assert last.startswith("make: ***")
  assert not (tmp_path / "venv").exists()


@needs_make
def test_the_set_up_is_done_once(tmp_path):
  (tmp_path / "installed").touch()  # newer than what it is made from
  steps = make(
    "-n", "demo", f"VENV={tmp_path}", "WORKDIR=W"
  ).stdout.splitlines()
  assert [step.split(" ", 1)[1] for step in steps] == [
    "third_party/fetch.py --set=demo",
    "-m sesa_jax.main --config=configs/smollm2_135m.py --workdir=W",
  ]
  os.utime(tmp_path / "installed", (0, 0))
  again = make("-n", "demo", f"VENV={tmp_path}").stdout
  assert "--constraint constraints.txt" in again


@needs_make
def test_make_test_lints_and_runs_all_tests_on_the_cpu(tmp_path):
  (tmp_path / "installed").touch()
  steps = make("-n", "test", f"VENV={tmp_path}").stdout.splitlines()
  parts = "ruff check .", "ruff format --check .", "pytest -m 'not compiles'"
  for step in parts:
    assert f"{tmp_path}/bin/python -m {step}" in steps
  others = f"{tmp_path}/compilers/bin/python -m pytest -m compiles"
  assert steps[-1] == others
  steps = make("-n", "plan", f"VENV={tmp_path}").stdout.splitlines()
  assert any("--editable '.[plan]'" in step for step in steps)
  assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "exec make test"
  assert os.access(ROOT / ".ci" / "run", os.X_OK)
