"""Checkpoints: everything that a run needs to go on, whole or not at all.

A checkpoint is a folder that Orbax writes under a temporary name and renames:
a kill while it is written leaves the one before, and the torn folder is
removed when the run starts again. It holds

* `trees`: pytrees of (sharded) device arrays, such as the two policies;
* `host`: what JSON holds, such as queue, pool and position in the seeds;
* `arrays`: numpy arrays of the host, such as the bank's. Orbax refuses
  host-local arrays in runs of several processes, so they travel as text;
* `files`: the length of every file that the run appends to.

Milestones are weights alone, in a folder of their own, and are never deleted.
"""

from __future__ import annotations

import base64
import errno
import io
import logging as std_logging  # for its levels; absl's are others
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

_Arrays = Mapping[str, Mapping[str, np.ndarray]]


def _not_noise(record: Any) -> bool:
  """Orbax reports every step of a save, and that it was opened to be read.

  People want to know of trouble.
  """
  read = "read only" in str(record.msg).replace("_", " ")
  return "orbax" not in record.pathname or (
    record.levelno > std_logging.INFO and not read
  )


class Checkpoints:
  """The checkpoints of one run.

  Args:
    folder: a local path or gs://; its `milestones` hold the weights.
    keep: how many full checkpoints stay; the newest do.
    milestone_every: weights are kept every so many steps; 0 is never, but
      for the last.
    read_only: leave the folder as it is: for reading another run, which may
      be writing.

  Raises:
    ValueError: `keep` is below 1, or `read_only` and there is no such folder.
  """

  def __init__(
    self,
    folder: str | Path,
    *,
    keep: int = 2,
    milestone_every: int = 50,
    read_only: bool = False,
  ):
    if keep < 1:
      raise ValueError(f"checkpoint.keep={keep}: a run keeps at least 1.")
    logging.get_absl_logger().addFilter(_not_noise)
    # A local path has to be absolute; a URL is one, and Path would break it.
    self.folder = str(folder)
    if "://" not in self.folder:
      self.folder = str(Path(folder).absolute())
      if read_only and not Path(folder).is_dir():
        raise ValueError(
          f"There are no checkpoints at {folder}: no such folder. Name the "
          "`checkpoints` folder of a run that finished an iteration."
        )
    self._every = milestone_every
    self._full = _manager(self.folder, keep, read_only)
    self._weights = _manager(f"{self.folder}/milestones", None, read_only)

  def steps(self) -> list[int]:
    """Steps with a whole checkpoint, in order."""
    return sorted(self._full.all_steps())

  def latest(self) -> int | None:
    """The newest step with a whole checkpoint; None if there is none."""
    return max(self.steps(), default=None)

  def milestones(self) -> list[int]:
    """Steps whose weights are kept, in order."""
    return sorted(self._weights.all_steps())

  def check_room(self, trees: Any) -> None:
    """Refuses what the disk has no room for.

    Before it is begun: Orbax finds out in the middle of a save, on the process
    that writes, while the others wait for it.

    Raises:
      OSError: fewer bytes are free than the arrays take.
    """
    if "://" in self.folder:
      return
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(trees))
    free = shutil.disk_usage(self.folder).free
    if free < needed:
      raise OSError(
        errno.ENOSPC,
        f"{needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free.",
      )

  def save(
    self,
    step: int,
    *,
    trees: Mapping[str, Any],
    host: Mapping[str, Any],
    arrays: _Arrays,
    files: Mapping[str, int],
    milestone: Mapping[str, Any] | None = None,
    last: bool = False,
  ) -> None:
    """Writes a checkpoint and returns when it is whole.

    Every process calls it; the lead writes all but the shards of others.

    Args:
      step: finished iterations.
      trees: pytrees of arrays by name.
      host: JSON; tuples come back as lists.
      arrays: groups of numpy arrays by name, of any dtype but object.
      files: `metrics.RunFolder.lengths()`.
      milestone: weights by name, kept if `step` is a multiple of
        `milestone_every`, or `last`.
      last: whether the run ends here.
    """
    due = last or (self._every and step and step % self._every == 0)
    if milestone and due:
      # Before the checkpoint: after a kill in between, the step is redone.
      if step in self.milestones():
        self._weights.delete(step)
      _save(self._weights, step, _tree_saves(milestone))
    record = dict(
      host=dict(host),
      arrays={name: _to_text(group) for name, group in arrays.items()},
      files=dict(files),
    )
    items = _tree_saves(trees)
    _save(self._full, step, items | {"record": ocp.args.JsonSave(record)})

  def restore(
    self, step: int, trees: Mapping[str, Any]
  ) -> tuple[
    dict[str, Any], dict[str, Any], dict[str, dict[str, np.ndarray]], dict
  ]:
    """Reads a checkpoint.

    Args:
      step: one of `steps()`.
      trees: by name, `jax.ShapeDtypeStruct`s with the shardings to restore
        to, which need not be those that were saved. Others are not read.

    Returns:
      trees, host, arrays and files, as they were saved.

    Raises:
      ValueError: there is no such checkpoint, or it holds other trees.
    """
    record = ocp.args.JsonRestore()
    restored = self._restore(self._full, step, trees, {"record": record})
    saved = restored.pop("record")
    arrays = {name: _of_text(text) for name, text in saved["arrays"].items()}
    return restored, saved["host"], arrays, saved["files"]

  def restore_milestone(
    self, step: int, trees: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Reads the weights of one of `milestones()`; as `restore` else."""
    return self._restore(self._weights, step, trees, {})

  def reader(
    self, step: int, name: str, tree: Any
  ) -> Callable[[str], np.ndarray]:
    """Returns a function that reads one array at a time, to the host.

    Args:
      step: one of `steps()`.
      name: of a tree of the checkpoint.
      tree: shapes, in nested dicts, that it must hold; it may hold more.

    Returns:
      From a path in `tree`, "params/norm/scale", to its array.

    Raises:
      ValueError: there is no such checkpoint, or it holds another tree; when an
        array is read: it is damaged.
    """
    self._check(self._full, step, {name: tree}, partly=True)
    folder = self._full.directory / str(step) / name
    handler = ocp.PyTreeCheckpointHandler()
    array = ocp.RestoreArgs(restore_type=np.ndarray)

    def read(path: str) -> np.ndarray:
      item, restore_args = 0, array
      for key in reversed(path.split("/")):
        item, restore_args = {key: item}, {key: restore_args}
      arguments = ocp.args.PyTreeRestore(
        item=item, restore_args=restore_args, partial_restore=True
      )
      try:
        return jax.tree.leaves(handler.restore(folder, args=arguments))[0]
      except (KeyError, OSError, ValueError) as error:
        raise ValueError(
          f"{folder} is damaged at {path}: {str(error)[:300]}"
        ) from error

    return read

  def close(self) -> None:
    """Ends Orbax's threads."""
    self._full.close()
    self._weights.close()

  def _restore(
    self, manager: Any, step: int, trees: Mapping[str, Any], more: dict
  ) -> dict[str, Any]:
    self._check(manager, step, trees)
    items = {name: ocp.args.StandardRestore(t) for name, t in trees.items()}
    restored = manager.restore(step, args=ocp.args.Composite(**items, **more))
    return {name: restored[name] for name in items.keys() | more.keys()}

  def _check(
    self,
    manager: Any,
    step: int,
    trees: Mapping[str, Any],
    partly: bool = False,
  ) -> None:
    """Raises if a step is not there, or holds other trees."""
    steps = sorted(manager.all_steps())
    if step not in steps:
      have = ", ".join(map(str, steps)) or "none"
      raise ValueError(
        f"No checkpoint of step {step} in {manager.directory}. Steps there: "
        f"{have}."
      )
    folder = manager.directory / str(step)
    for name, tree in trees.items():
      differs = _difference(folder / name, tree, partly)
      if differs:
        raise ValueError(
          f"The checkpoint of step {step} in {manager.directory} does not fit "
          f"this config: {name}{differs}. Use the config of the run that "
          "wrote it."
        )


def has_steps(folder: str | Path) -> bool:
  """Whether a folder holds a whole checkpoint, without opening it."""
  return any(path.name.isdigit() for path in Path(folder).glob("*"))


def _difference(folder: Any, tree: Any, partly: bool = False) -> str:
  """Says in which array a saved tree differs from `tree`; "" if in none.

  With `partly` the saved one may hold more.

  Orbax would find out too, with a page of both structures, or midway.
  """
  if not folder.exists():
    return " is not in it"
  saved = ocp.StandardCheckpointHandler().metadata(folder).tree
  have, want = _shapes(saved), _shapes(tree)
  for path in sorted(want.keys() if partly else have.keys() | want.keys()):
    if have.get(path) != want.get(path):
      return (
        f".{path} has shape {have.get(path, 'none (it is absent)')} there and "
        f"{want.get(path, 'none (it is absent)')} here"
      )
  return ""


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {
    jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape)
    for path, leaf in leaves
  }


def _manager(folder: str, keep: int | None, read_only: bool) -> Any:
  return ocp.CheckpointManager(
    folder,
    options=ocp.CheckpointManagerOptions(
      max_to_keep=keep,
      enable_async_checkpointing=False,
      cleanup_tmp_directories=not read_only,
      create=not read_only,
      read_only=read_only,
      save_root_metadata=False,
    ),
  )


def _tree_saves(trees: Mapping[str, Any]) -> dict[str, Any]:
  return {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}


def _save(manager: Any, step: int, items: dict[str, Any]) -> None:
  # force: Orbax else skips, in silence, a step not above the newest.
  manager.save(step, args=ocp.args.Composite(**items), force=True)
  manager.wait_until_finished()


def _to_text(arrays: Mapping[str, np.ndarray]) -> str:
  buffer = io.BytesIO()
  np.savez(buffer, allow_pickle=False, **arrays)
  return base64.b64encode(buffer.getvalue()).decode("ascii")


def _of_text(text: str) -> dict[str, np.ndarray]:
  with np.load(io.BytesIO(base64.b64decode(text))) as file:
    return dict(file)
