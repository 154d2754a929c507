"""Imports go down, every module has a level, and text says nothing it must not.

The list is the architecture: a module imports from its own line or below.
Modules of one line may import each other only inside a package.
"""

import ast
import re
import subprocess
from pathlib import Path

import pytest
from flax import traverse_util

from configs import common

ROOT = Path(__file__).parents[1]

LEVELS = (
  "main",
  "plan",
  "selftest",
  "mining check sft",
  "experiment",
  "loop",
  "state",
  "report",
  "evaluation",
  "show serve plots",
  "tools",
  "config",
  "records rollout worlds",
  "stages",
  "skills",
  "judge",
  "search",
  "retrieval",
  "data",
  "engine",
  "learner",
  "costs",
  "policy",
  "environment",
  "prompts",
  "language remote",
  "checkpoint metrics manifest distributed",
  "types",
)
LEVEL = {
  name: number for number, line in enumerate(LEVELS) for name in line.split()
}
# The only ones that see a ConfigDict.
CONFIGURED = {"main", "plan", "mining", "sft", "loop", "state", "report"} | {
  "check",
  "experiment",
  "evaluation",
  "tools",
  "config",
}


def modules():
  return sorted((ROOT / "sesa_jax").rglob("*.py"))


def part(path: Path) -> str:
  """The line of LEVELS that a file stands on."""
  return path.relative_to(ROOT / "sesa_jax").parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
  """Dotted names below sesa_jax that a file imports, wherever it does."""
  found = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom) and node.module:
      assert node.level == 0, f"{path}: relative import"
      found |= {f"{node.module}.{alias.name}" for alias in node.names}
  return {
    name.removeprefix("sesa_jax.")
    for name in found
    if name.startswith("sesa_jax.")
  }


@pytest.mark.parametrize("path", modules(), ids=lambda p: p.stem)
def test_imports_go_down(path):
  own = part(path)
  if own == "__init__":
    assert not imported(path)
    return
  assert own in LEVEL, f"{own} has no level: add it to LEVELS and to the docs"
  for name in imported(path):
    other = name.split(".")[0]
    if other == "__version__":
      continue
    assert other in LEVEL, name
    below = LEVEL[other] > LEVEL[own]
    inside = other == own and path.parent.name == own
    assert below or inside, f"{own} imports {name}, which stands above it"


def test_stages_never_import_each_other():
  for path in (ROOT / "sesa_jax" / "stages").glob("*.py"):
    assert not [n for n in imported(path) if n.startswith("stages")], path


def test_only_some_see_a_config():
  for path in modules():
    if part(path) not in CONFIGURED:
      assert "ml_collections" not in path.read_text(), path
      sections = r"\bconfig\.(solver|challenger|bank|policy|engine|frontier)\b"
      assert not re.search(sections, path.read_text()), path


def test_only_distributed_knows_of_processes():
  for path in modules():
    if part(path) != "distributed":
      text = path.read_text()
      assert "process_index" not in text, path
      assert "multihost_utils" not in text, path


def test_every_level_exists():
  names = {part(path) for path in modules()} - {"__init__"}
  assert names == set(LEVEL)


def test_the_method_names_tests_and_functions_that_there_are():
  page = (ROOT / "docs" / "method.md").read_text("utf-8")
  fields = traverse_util.flatten_dict(common.get_config().to_dict(), sep=".")
  found, name = 0, ""
  for file, test in re.findall(r"`(\w*)::(\w+)`", page):
    name = file or name
    if name != "FILE":
      text = (ROOT / "tests" / f"test_{name}.py").read_text("utf-8")
      assert f"def test_{test}(" in text, f"{name}::{test}"
      found += 1
  assert found > 50
  for module, function in re.findall(r"`([a-z_/]+)\.(\w+)`", page):
    if f"{module}.{function}" in fields or function in ("jsonl", "py"):
      continue
    files = (ROOT / "sesa_jax").rglob(f"{module}.py")
    texts = [file.read_text("utf-8") for file in files]
    defined = rf"(?m)^(?:  def|def|class) {function}\b|^{function}\b.*="
    known = any(re.search(defined, text) for text in texts)
    assert known, f"{module}.{function}"


def test_nothing_of_one_machine_is_tracked():
  done = subprocess.run(
    ["git", "ls-files", "-co", "--exclude-standard"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  home = re.compile(r"/(root|work|farm)/")
  for name in done.stdout.splitlines():
    path = ROOT / name
    if path.suffix in (".py", ".md", ".toml", ".txt", "") and path.is_file():
      if path.name == "test_layout.py":
        continue
      for number, line in enumerate(path.read_text().splitlines(), 1):
        assert not home.search(line), f"{name}:{number}: {line}"
