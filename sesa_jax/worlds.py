"""Worlds that are made where they are asked for, once, in the assets folder.

`microworld:SEED/FILE` in a config is a file of the microworld of a seed. Its
folder is named after the hash of what makes it: another version makes its own.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable
from pathlib import Path

from absl import logging

from sesa_jax.data import microworld, warm_start
from sesa_jax.policy import export
from sesa_jax.search.bm25 import Bm25
from sesa_jax.skills import record

PREFIX = "microworld:"
EPISODES = 40_000  # of a warm start
FIELDS = ("trigger", "templates")  # of a skill, that its prompts show


def locate(path: str, assets: Path, exists: bool = True) -> Path:
  """Returns the file of a world, and makes what is missing.

  Args:
    path: microworld:SEED/FILE.
    assets: the folder in which worlds are kept.
    exists: False for what is to be made, such as the policy of a warm start.

  Raises:
    ValueError: the path is not of that form, or there is no such file.
  """
  seed, _, name = path.removeprefix(PREFIX).partition("/")
  if not seed.isdigit():
    raise ValueError(
      f"{path} is not {PREFIX}SEED/FILE, such as {PREFIX}0/corpus.jsonl."
    )
  folder = assets / "microworld" / f"{digest()}-{seed}"
  _once(folder, lambda into: microworld.write(into, int(seed)))
  if name == "episodes.jsonl":
    _once(folder / name, lambda into: _play(into, int(seed)))
  found = folder / name
  if exists and not found.exists():
    has = ", ".join(sorted(p.name for p in folder.glob("[!.]*")))
    raise ValueError(
      f"{path}: the world has {has}. Its policy is what --mode=sft makes of "
      "its episodes: docs/microworld.md has the command."
    )
  return found


def digest() -> str:
  """Returns the hash of what makes worlds and plays in them, docs aside."""
  sha = hashlib.sha256()
  for module in (microworld, warm_start):
    sha.update(_code(Path(module.__file__).read_text("utf-8")).encode())
  return sha.hexdigest()[:12]


def _code(text: str) -> str:
  """Drops docstrings, and lines that are a comment or empty."""
  documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
  docs: set[int] = set()
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, documented) and ast.get_docstring(node) is not None:
      docs.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
  lines = enumerate(text.splitlines(), 1)
  kept = (line for number, line in lines if number not in docs)
  return "\n".join(s for s in kept if s.strip() and s.strip()[0] != "#")


def _play(path: Path, seed: int) -> None:
  words = microworld.tokenizer()
  warm_start.write(
    path,
    seed,
    EPISODES,
    index=Bm25,
    block=lambda skills: record.block(skills, FIELDS) if skills else "",
    tokens=lambda text: len(words.encode(text)),
  )


def _once(target: Path, make: Callable[[Path], None]) -> None:
  """Makes a file or folder beside its place, and moves it there when whole."""
  if target.exists():
    return
  target.parent.mkdir(parents=True, exist_ok=True)
  logging.info("Making %s, once.", target)
  with export.beside(target) as made:
    if not target.suffix:
      made.mkdir()
    make(made)
    if not target.exists():  # another process was faster
      made.rename(target)
