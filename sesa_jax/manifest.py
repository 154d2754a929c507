"""What a run was: the code, the versions, the machine, the inputs' hashes.

Two numbers can be compared if their manifests agree where it matters. The
manifest is the one file of a run that may hold the time of day.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import sesa_jax

_PACKAGES = (
  "jax",
  "jaxlib",
  "flax",
  "optax",
  "orbax-checkpoint",
  "transformers",
  "numpy",
)

# These belong to no experiment, and may change in a run's folder: how long it
# is, and how its judge and its search servers are reached and paid.
FREE_FIELDS = (
  "iterations",
  "judge.base_url",
  "judge.key_env",
  "judge.concurrency",
  "judge.deadline",
  "judge.try_seconds",
  "judge.tries",
  "judge.max_tokens",
  "judge.max_cost",
  "judge.prompt_price",
  "judge.completion_price",
  "judge.cached_prompt_price",
  "judge.cache",
  "search.urls",
  "search.concurrency",
  "search.batch",
  "search.deadline",
  "search.try_seconds",
  "search.tries",
  "search.patience",
  "search.google.key_env",
  "search.google.per_second",
  "search.google.per_day",
  "search.google.price",
  "search.cache",
  "budget.searches",
  "budget.cost",
)


def build(
  *,
  command: Sequence[str],
  config: Mapping[str, Any],
  hashes: Mapping[str, str],
  judge: str,
  parent: str | None = None,
  before: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
  """Returns the content of `manifest.json`.

  Args:
    command: the words of the command line.
    config: all values; its name and hash are recorded.
    hashes: SHA-256 by name: prompts, template, corpus, index, weights, ...
    judge: id of the judge and its version.
    parent: the run that this one started from, as RUN@ITERATION.
    before: the folder's manifest until now: a resumed run keeps them all.
  """
  before = dict(before or {})
  earlier = before.pop("earlier", [])
  now = datetime.datetime.now(datetime.UTC)
  code = _git(Path(__file__).resolve().parent)
  return {
    "started_at": now.isoformat(timespec="seconds"),
    "command": [without_home(word) for word in command],
    "config": {"name": config.get("name"), "sha256": sha256(config)},
    "commit": code["commit"],
    "dirty": code["dirty"],
    "versions": _versions(),
    "devices": _devices(),
    "hashes": dict(sorted(hashes.items())),
    "judge": judge,
    "parent": parent and without_home(parent),
    "earlier": [*earlier, before] if before else earlier,
  }


def sha256(value: Any) -> str:
  """SHA-256 of a value's JSON with sorted keys, in hexadecimal."""
  text = json.dumps(value, sort_keys=True, default=list)
  return hashlib.sha256(text.encode()).hexdigest()


def _git(folder: Path) -> dict[str, Any]:
  """Commit and whether dirty of the checkout that tracks `folder`, if any."""

  def ask(*words: str) -> str:
    done = subprocess.run(
      ["git", "-C", str(folder), *words],
      capture_output=True,
      text=True,
      check=True,
      timeout=60,
    )
    return done.stdout.strip()

  try:
    # An installed package may lie inside another project's checkout.
    ask("ls-files", "--error-unmatch", "types.py")
    root = ask("rev-parse", "--show-toplevel")
    dirty = bool(ask("-C", root, "status", "--porcelain"))
    return {"commit": ask("rev-parse", "HEAD"), "dirty": dirty}
  except (OSError, subprocess.SubprocessError):  # no git, or no checkout
    return {"commit": None, "dirty": None}


def _versions() -> dict[str, str | None]:
  versions: dict[str, str | None] = {
    "sesa_jax": sesa_jax.__version__,
    "python": platform.python_version(),
  }
  for name in _PACKAGES:
    try:
      versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      versions[name] = None
  return versions


def _devices() -> dict[str, Any]:
  devices = jax.devices()
  return {
    "platform": devices[0].platform,
    "kind": devices[0].device_kind,
    "count": len(devices),
    "processes": jax.process_count(),
    "machine": f"{platform.system()} {platform.machine()}",
  }


def without_home(word: str) -> str:
  """Hides whose machine it was: a manifest is published with its numbers."""
  home = str(Path.home())
  return word.replace(home, "~") if len(home) > 1 else word


def config_diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
  """Names the fields that differ: `["solver.group_size: 5 -> 8"]`.

  Args:
    old: nested values; tuples and lists are the same, as JSON knows but one.
    new: the same.
  """
  old, new = _flat(old), _flat(new)
  return [
    f"{name}: {old.get(name, 'absent')} -> {new.get(name, 'absent')}"
    for name in sorted(old.keys() | new.keys())
    if old.get(name, "absent") != new.get(name, "absent")
  ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
  """Leaves as JSON, by dotted name."""
  flat = {}
  for key, value in values.items():
    if isinstance(value, Mapping) and value:
      flat |= _flat(value, f"{prefix}{key}.")
    else:
      flat[prefix + key] = json.dumps(value, default=list)
  return flat


def strict(differs: Sequence[str], free: Sequence[str] = ()) -> list[str]:
  """Those of `config_diff` that make another experiment.

  Args:
    differs: of `config_diff`.
    free: beginnings of further names that may differ.
  """
  names = tuple(f"{name}:" for name in FREE_FIELDS) + tuple(free)
  return [
    difference for difference in differs if not difference.startswith(names)
  ]


def check_workdir(
  folder: str | Path,
  config: Mapping[str, Any],
  *,
  force_new: bool = False,
  free: Sequence[str] = (),
) -> list[str]:
  """Checks that a run's folder is new, or belongs to this config.

  Fields of `FREE_FIELDS` may differ. With `force_new` any may: the run goes
  on from its last checkpoint under the new config, and the caller keeps the
  old one (`keep_config`).

  Args:
    folder: the run's folder, there or not.
    config: all values of this run.
    force_new: `--force_new`.
    free: see `strict`; of modes that know no `--force_new`.

  Returns:
    The fields that differ, as `config_diff` names them.

  Raises:
    ValueError: the folder belongs to another config; names the fields.
  """
  path = Path(folder) / "config.json"
  if not path.exists():
    return []
  try:
    old = json.loads(path.read_text("utf-8"))
    if not isinstance(old, dict):
      raise ValueError("no object")
  except ValueError as error:
    raise ValueError(
      f"{path} is not JSON ({error}). Restore it, or name a new --workdir."
    ) from error
  differs = config_diff(old, config)
  faults = strict(differs, free)
  if faults and not force_new:
    trains = "" if free else ", or go on with the new values with --force_new"
    raise ValueError(
      f"{folder} is the run of another config. Fields that differ: "
      f"{'; '.join(faults)}. Name a new --workdir, use the run's own config"
      f"{trains}."
    )
  return differs


def keep_config(folder: str | Path) -> None:
  """Keeps a folder's config as `config.json.1` (`.2`, ...), for a new one."""
  path = Path(folder) / "config.json"
  number = 1
  while path.with_name(f"config.json.{number}").exists():
    number += 1
  path.with_name(f"config.json.{number}").write_bytes(path.read_bytes())
