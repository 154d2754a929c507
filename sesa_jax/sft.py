"""Supervised fine-tuning: a policy imitates episodes, whoever wrote them.

    loss = - 1/n sum over a batch's n own tokens of log p(token | those before)

Own are the tokens that the policy is to write; prompts and observations are
read, and carry no loss. Rows, mesh, programs and optimizer are the learner's,
so any backbone is tuned as it is trained. `docs/sft.md` has the formats.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging

from sesa_jax import checkpoint, distributed, manifest, metrics, types
from sesa_jax import config as config_lib
from sesa_jax import tools as tools_lib
from sesa_jax.data import episodes as episodes_lib
from sesa_jax.learner import learner as learner_lib
from sesa_jax.learner import packing, supervised
from sesa_jax.policy import export as export_lib
from sesa_jax.policy import model, sharding, weights
from sesa_jax.state import TUNED

_EXPORTED = "exported.json"  # places where the policy was written

# Fields that a resumed run may change: its weights do not depend on them.
_FREE = ("checkpoint.keep:", "sft.checkpoint_every:", "sft.log_every:")
_FREE += ("sft.validate_every:", "sft.episodes:", "sft.out:")


def run(
  config: Any,
  workdir: str,
  episodes: Sequence[str],
  *,
  out: str | None = None,
  command: Sequence[str] = (),
) -> None:
  """Tunes `config.policy` on episodes, and writes it as a folder.

  The same command goes on after a kill, from the last checkpoint, to the same
  weights.

  Args:
    config: the experiment; reads policy, learner, mesh, sft and seed.
    workdir: for metrics and checkpoints.
    episodes: see `data.episodes.read`.
    out: the folder to make, which `policy.source = "hf"` reads; by default
      `export` in the workdir.
    command: for the manifest.

  Raises:
    ValueError: bad input, before any weight is loaded.
    types.Stopped: the loss stays not a number, or a checkpoint cannot be
      written.
  """
  out = out or str(Path(workdir) / "export")
  distributed.initialize()
  reader = metrics.RunFolder(workdir, writes=False)
  if not _exported(reader, out):
    distributed.from_lead(lambda: export_lib.check(out, "float32"))
  plan = _plan(config, episodes)
  values = metrics.plain(config.to_dict())
  store_at = Path(workdir) / "checkpoints"

  def look():  # before the lead changes anything
    manifest.check_workdir(workdir, values, free=_FREE)
    before = reader.read_json("manifest.json", {})
    had = before.get("hashes", {"episodes": plan.digest}).get("episodes")
    if not had:
      raise ValueError(
        f"{workdir} is the folder of another mode. Name a new --workdir."
      )
    if had != plan.digest:
      raise ValueError(
        f"{workdir} was begun with other episodes or another tokenizer. Name a "
        "new --workdir, or give those that it began with."
      )
    done = (store_at / str(plan.steps)).is_dir()
    if not (done and _exported(reader, out)):
      export_lib.check(out, "float32")
    return before

  before = distributed.from_lead(look)
  lead = distributed.is_lead()
  folder = metrics.RunFolder(workdir, writes=lead)
  with contextlib.ExitStack() as stack:
    distributed.from_lead(lambda: stack.enter_context(folder.lock()))
    folder.write_json("config.json", values)
    folder.write_json(
      "manifest.json",
      manifest.build(
        command=command,
        config=values,
        hashes={"episodes": plan.digest, **plan.hashes},
        judge="none",
        before=before,
      ),
    )
    store = checkpoint.Checkpoints(
      store_at, keep=config.checkpoint.keep, milestone_every=0
    )
    _tune(config, plan, folder, store)
    if lead and not _exported(folder, out):
      # Said before, since what lies there after a kill is whole, and ours.
      places = {*folder.read_json(_EXPORTED, []), _from(folder, out)}
      folder.write_json(_EXPORTED, sorted(places))
      _export(plan, store, out)
    store.close()
  logging.info("The tuned policy, after %d steps: %s", plan.steps, out)


def _exported(folder: metrics.RunFolder, out: str) -> bool:
  """Whether `out` is the policy that this run has written."""
  places = folder.read_json(_EXPORTED, [])
  return _from(folder, out) in places and Path(out).is_dir()


def _from(folder: metrics.RunFolder, out: str) -> str:
  """The way there, which holds when both are moved."""
  return os.path.relpath(out, folder.path)


@dataclasses.dataclass(frozen=True)
class _Plan:
  """What is known before weights are loaded."""

  words: Any  # the tokenizer
  learner: learner_lib.Learner
  lessons: list[tuple[int, types.Lesson]]  # to learn from
  held_out: list[types.Episode]
  rows: int  # of a step
  length: int  # of a row
  steps: int
  digest: str  # of all ids and masks
  hashes: dict[str, str]


def _plan(config: Any, paths: Sequence[str]) -> _Plan:
  """Reads episodes, and decides on shapes and steps."""
  config_lib.check_values(config)
  settings = config.sft
  mesh = sharding.mesh(*config_lib.mesh_sizes(config))
  fsdp, tensor = mesh.shape["fsdp"], mesh.shape["tensor"]
  path = config_lib.locate(config.policy.path)
  backbone = weights.check(config.policy.source, path)
  sharding.check(backbone, fsdp=fsdp, tensor=tensor)
  words = tools_lib.load_words(config)
  most = settings.max_tokens or config_lib.slot_tokens(config)
  if most > backbone.context:
    raise ValueError(
      f"sft.max_tokens = {most} is above the backbone's context of "
      f"{backbone.context}. Lower it (0 takes the longest episode that may be "
      "played)."
    )
  found = episodes_lib.read(
    paths,
    words,
    ids=backbone.vocab_size,
    arms=settings.arms,
    only_right=settings.only_right,
    max_tokens=most,
  )
  _report(found, settings, most)
  learned, held_out = _split(found.episodes, settings.validation, config.seed)
  lessons = [(i, types.Lesson(e, 0.0)) for i, e in enumerate(learned)]
  longest = max(len(episode.ids) for episode in found.episodes)
  length = packing.row_length(longest, config.learner.row_multiple)
  rows, microbatch = _shape(config, length, fsdp)
  learner = dataclasses.replace(
    tools_lib.learner(config, config.solver, model.build(backbone), mesh),
    optimizer=settings.optimizer,
    microbatch_rows=microbatch,
    row_multiple=length,
  )
  if learner.attention == "cudnn":
    # It knows no segments, so that a row would hold one episode.
    learner = dataclasses.replace(learner, attention="xla")
  steps = settings.steps
  if not steps:
    every = supervised.lines(
      lessons, length=length, seed=config.seed, epochs=settings.epochs
    )
    steps = -(-sum(1 for _ in every) // rows)
  logging.info(
    "%d steps of %d rows of %d tokens, in micro-batches of %d rows.",
    *(steps, rows, length, microbatch),
  )
  return _Plan(
    words=words,
    learner=learner,
    lessons=lessons,
    held_out=held_out,
    rows=rows,
    length=length,
    steps=steps,
    digest=_digest(found.episodes),
    hashes={"weights": tools_lib.digest(path)},
  )


def _report(found: episodes_lib.Found, settings: Any, most: int) -> None:
  """Says what was read; refuses long episodes where the config says so."""
  tokens = sum(len(episode.ids) for episode in found.episodes)
  own = sum(int(episode.mask.sum()) for episode in found.episodes)
  logging.info(
    "%d episodes, %d tokens, %d of them the policy's own; %d saved ones were "
    "left out.",
    *(len(found.episodes), tokens, own, found.left_out),
  )
  if not found.too_long:
    return
  said = (
    f"{found.too_long} episodes are longer than sft.max_tokens = {most}; the "
    f"longest has {found.longest} tokens"
  )
  if settings.too_long == "refuse":
    raise ValueError(
      f"{said}. Raise it, or leave them out with sft.too_long = 'skip'."
    )
  logging.warning("%s. They are left out.", said)


def _split(found, share: float, seed: int):
  """Draws the episodes that are held out; at least one is learned from."""
  count = min(round(share * len(found)), len(found) - 1)
  order = np.random.default_rng((seed, 2**32)).permutation(len(found))
  held = set(order[:count].tolist())
  return (
    [e for i, e in enumerate(found) if i not in held],
    [e for i, e in enumerate(found) if i in held],
  )


def _shape(config: Any, length: int, fsdp: int) -> tuple[int, int]:
  """Returns the rows of a step and of a micro-batch.

  As many as `batch_tokens` holds, rounded down to micro-batches of one size,
  which divide over the mesh: of the sizes above half of what is allowed the one
  that leaves the fewest rows out.
  """
  rows = config.sft.batch_tokens // length // fsdp * fsdp
  if not rows:
    raise ValueError(
      f"sft.batch_tokens = {config.sft.batch_tokens} holds no row of {length} "
      f"tokens for each of {fsdp} devices on the mesh's 'fsdp' axis. Set it to "
      f"at least {length * fsdp}."
    )
  packing.check_rows(config.learner.microbatch_rows, fsdp)
  most = min(rows, config.learner.microbatch_rows)
  sizes = range(most, most // 2, -fsdp)
  microbatch = max(sizes, key=lambda size: rows // size * size)
  return rows // microbatch * microbatch, microbatch


def _digest(found: Sequence[types.Episode]) -> str:
  sha = hashlib.sha256()
  for episode in found:
    sha.update(np.int64(len(episode.ids)).tobytes())
    sha.update(episode.ids.tobytes() + episode.mask.tobytes())
  return sha.hexdigest()


# --- steps -------------------------------------------------------------------


def _begin(config, plan: _Plan, folder, store) -> tuple[types.Policy, int]:
  """Returns the policy and the steps that it has done."""
  newest = store.latest()
  if newest is None:
    _, params = weights.load(
      config.policy.source,
      config_lib.locate(config.policy.path),
      jax.random.key(config.seed),
      mesh=plan.learner.mesh,
    )
    policy, files = plan.learner.init(params), {}
  else:
    trees, _, _, files = store.restore(newest, {TUNED: plan.learner.abstract()})
    policy = types.Policy(*trees[TUNED])
    logging.info("Resumed after step %d.", newest)
  distributed.from_lead(lambda: folder.truncate(files))
  return policy, newest or 0


def _tune(config, plan: _Plan, folder, store) -> None:
  """Steps to the end."""
  policy, start = _begin(config, plan, folder, store)
  settings = config.sft
  passes = (plan.steps - start) * plan.rows * plan.length
  with metrics.Progress(passes) as progress:
    progress.stage("sft", plan.steps, passes, done=start, unit="steps")
    interval = _Interval()
    for step, (epoch, lines) in enumerate(_lines(config, plan, start), start):
      batches = supervised.batches(
        lines, rows=plan.learner.microbatch_rows, length=plan.length
      )
      policy, outcome = plan.learner.imitate(
        policy,
        batches,
        supervised.rate(
          step,
          steps=plan.steps,
          peak=settings.learning_rate,
          warmup=settings.warmup_steps,
          decay=settings.decay,
        ),
      )
      interval.add(batches, outcome)
      progress.advance(1, plan.rows * plan.length)
      done = step + 1
      last = done == plan.steps
      saves = last or done % settings.checkpoint_every == 0
      validates = last or done % settings.validate_every == 0
      if not (saves or validates or done % settings.log_every == 0):
        continue
      row = interval.row()
      progress.note = f"loss {row.get('loss', np.nan):.4f}"
      _stop_if_broken(policy, done)
      if validates and plan.held_out:
        row |= _validate(plan, policy)
      folder.append("metrics.jsonl", [{"step": done, "epoch": epoch} | row])
      if saves:
        _save(store, folder, policy, done)
      interval = _Interval()


def _lines(config, plan, start: int) -> Iterator[tuple[int, list]]:
  """Yields the epoch and the rows of each step from `start` on."""
  settings = config.sft
  every = supervised.lines(
    plan.lessons,
    length=plan.length,
    seed=config.seed,
    epochs=None if settings.steps else settings.epochs,
  )
  every = itertools.islice(every, start * plan.rows, None)
  for _ in range(start, plan.steps):
    found = list(itertools.islice(every, plan.rows))
    yield found[-1][0], [line for _, line in found]


class _Interval:
  """Steps since the last line of metrics; what they gave is not read yet."""

  def __init__(self):
    self._outcomes = []
    self._places = self._filled = 0
    self._began = time.perf_counter()

  def add(self, batches, outcome) -> None:
    """Counts a step, without waiting for it."""
    self._places += sum(batch.ids.size for batch in batches)
    self._filled += sum(int((batch.segments > 0).sum()) for batch in batches)
    self._outcomes.append(outcome)

  def row(self) -> dict[str, float]:
    """Waits for the steps, and averages over them."""
    found = jax.device_get(self._outcomes)
    applied = [(s, norm) for s, (finite, norm, _) in found if finite]
    seconds = time.perf_counter() - self._began
    row = {
      "tokens": sum(float(sums.tokens) for sums, _ in applied),
      "skipped": len(found) - len(applied),
      "lr": float(found[-1][1][2]),
      "padding_fraction": 1 - self._filled / self._places,
      "seconds": seconds,
      "tokens_per_second": self._places / seconds,
    }
    if applied:
      loss = sum(float(sums.loss) for sums, _ in applied)
      row["loss"] = loss / max(row["tokens"], 1)
      row["grad_norm"] = float(np.mean([norm for _, norm in applied]))
    return row


def _validate(plan: _Plan, policy: types.Policy) -> dict[str, float]:
  """The loss on what is held out."""
  scores = plan.learner.score(policy.params, plan.held_out, temperature=1.0)
  tokens = sum(int(episode.mask.sum()) for episode in plan.held_out)
  total = sum(float(score.sum(dtype=np.float64)) for score in scores)
  return {"validation/loss": -total / tokens, "validation/tokens": tokens}


def _stop_if_broken(policy: types.Policy, step: int) -> None:
  """Stops where steps in a row had a loss that is not a number."""
  skipped = int(policy.opt_state.skipped)
  if skipped >= learner_lib.MAX_SKIPPED:
    raise types.Stopped(
      f"{skipped} steps in a row, up to step {step}, had a non-finite loss or "
      "gradient. None was applied. Try a lower sft.learning_rate, or "
      "policy.compute_dtype = 'float32', in a new folder."
    )


def _save(store, folder, policy, step: int) -> None:
  try:
    store.save(
      step,
      trees={TUNED: policy},
      host={"step": step},
      arrays={},
      files=distributed.from_lead(folder.lengths),
    )
  except (OSError, ValueError) as error:  # Orbax's own, of a full disk
    raise types.Stopped(
      f"The checkpoint of step {step} could not be written to {store.folder}: "
      f"{str(error)[:300]} The same command goes on from the one before."
    ) from error


def _export(plan: _Plan, store, out: str) -> None:
  """Writes the last checkpoint's weights, one array at a time."""
  backbone = plan.learner.graphdef.backbone
  tree = {"params": model.abstract_params(backbone)}
  read = store.reader(plan.steps, TUNED, tree)
  export_lib.save(
    out, backbone, plan.words, lambda leaf: read(f"params/{leaf}")
  )
