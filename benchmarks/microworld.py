"""The microworld's study: arms by world seeds, resumable, and its report.

    python -m benchmarks.microworld --seeds=100,101,102 --work=runs/microworld
    python -m benchmarks.microworld --report > docs/microworld_tables.md

A cell is an arm in the world of a seed. It is a run of the main job, and
evaluations of its last checkpoint, greedy and at temperature 1, with every bank
that the arm has. A finished cell is one JSON file in `benchmarks/microworld/`,
to be committed; its run stays in --work. A second start skips finished cells
and resumes the one that was cut off. Each step is a process of its own, and its
CPU-seconds are recorded.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sesa_jax import config as config_lib
from sesa_jax import manifest, metrics, plots, worlds

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/microworld"
CONFIG = "configs/microworld.py"
TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}
BANKS = ("none", "final", "placebo", "scrambled")
# Where a warm start must lie before anything is trained from it.
GATE = {
  "valid proposals": (0.5, 0.9),
  "two hops, greedy": (0.2, 0.5),
  "two hops, sampled": (0.2, 0.5),
}
# The curve while a policy trains needs fewer questions than the end: so many
# of each set.
_CURVE = tuple(
  f"--config.eval.sets.{traps}_{hops}.size=50"
  for traps in ("taught", "held_out")
  for hops in (1, 2)
)
_ITS_OWN = ("--config.seed", "--config.eval.banks", "--config.eval.other")
# The warm start knows one layout of prompts, and asks of one hop after one
# search: an arm changes neither.
_SSP = (
  "--config.policy.template=bare",
  "--config.challenger.min_searches=1",
)


@dataclasses.dataclass(frozen=True)
class Arm:
  """One way to train, or what is only evaluated."""

  about: str
  variant: str = "sesa"
  flags: tuple[str, ...] = ()
  banks: tuple[str, ...] = BANKS
  kind: str = "train"  # or "start", "matched", "other", "untrained"
  needs: tuple[str, ...] = ()  # arms whose cell of the same seed comes before


ARMS = {
  "start": Arm(
    "the warm start, before any training",
    banks=(*BANKS, "other"),
    kind="start",
  ),
  "sesa": Arm("the method"),
  "ssp": Arm("self-play without skills", "ssp_paper", _SSP, ("none",)),
  "ssp_matched": Arm(
    "SSP for as many sampled tokens as SESA",
    "ssp_paper",
    _SSP,
    ("none",),
    kind="matched",
    needs=("sesa", "ssp"),
  ),
  "permuted": Arm("rewards permuted over the episodes", "permuted_rewards"),
  "no_priming": Arm("begins with an empty bank", "no_priming"),
  "no_frontier": Arm("SSP's reward, no gate", "no_frontier"),
  "no_distillation": Arm("nothing is admitted", "no_distillation"),
  "placebo": Arm("trained on skills that should not help", "placebo"),
  "contrast": Arm(
    "the distiller also sees right attempts",
    flags=("--config.distillation.contrast=True",),
  ),
  **{
    f"invalid_{how}": Arm(
      f"invalid proposals: {how}",
      flags=(f"--config.challenger.invalid={how}", *more),
    )
    for how, more in (
      ("mask", ()),
      ("zero", ()),
      # As much as the best question earns; 0.1 would be as the default does.
      ("penalty", ("--config.challenger.invalid_penalty=1.0",)),
    )
  },
  "other_bank": Arm(
    "SESA's policy with the bank of another world",
    banks=("other",),
    kind="other",
    needs=("sesa",),
  ),
  "right_bank": Arm(
    "SESA's policy with the rules of all types as skills",
    banks=("other",),
    kind="other",
    needs=("sesa",),
  ),
  "start_bank": Arm(
    "the warm start with the bank that SESA ends with",
    banks=("other",),
    kind="untrained",
    needs=("sesa",),
  ),
}


def launch(words: Sequence[str]) -> float:
  """Runs the main job; returns the CPU-seconds of it and its children.

  Raises:
    RuntimeError: it ended with another exit code than 0.
  """

  def spent() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime

  before = spent()
  command = [sys.executable, "-m", "sesa_jax.main", *words]
  done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL)
  if done.returncode:
    raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}.")
  return spent() - before


def of_a_world(config: str) -> bool:
  """Says whether a config file is the microworld's, and none for a test."""
  return Path(config.partition(":")[0]).name == Path(CONFIG).name


def warm_start(
  config: str,
  seed: int,
  workdir: Path,
  launch: Callable[[Sequence[str]], float],
) -> float:
  """Makes the policy that runs of a world begin with, if it is not there.

  Returns:
    The CPU-seconds that this took; 0 where there was nothing to do, as with
    configs of no world.
  """
  if not of_a_world(config):
    return 0.0
  if (policy := place_of_policy(seed)).exists():
    return 0.0
  return launch(imitation(config, seed, workdir, policy))


def place_of_policy(seed: int) -> Path:
  """Where the runs of a world find what they begin with."""
  return Path(config_lib.locate(f"{worlds.PREFIX}{seed}/policy", exists=False))


def imitation(config: str, seed: int, workdir: Path, out: Path) -> list[str]:
  """Returns the words of the main job for the warm start of a world."""
  episodes = config_lib.locate(f"{worlds.PREFIX}{seed}/episodes.jsonl")
  print(f"Making the warm start of world {seed}: fifteen minutes of one core.")
  words = ["--mode=sft", f"--config={config}:warm_start"]
  words += [f"--workdir={workdir}", f"--config.seed={seed}"]
  return [*words, f"--episodes={episodes}", f"--out={out}"]


@dataclasses.dataclass(frozen=True)
class Sweep:
  """Makes cells.

  Args:
    config: path of the config file.
    work: folder of the runs.
    results: folder of the finished cells.
    flags: of every command, before the arm's.
    seeds: worlds; another world of one is the next in the list.
    launch: runs the main job with such words.
    gate: bounds of `check_gate`.
  """

  config: str
  work: Path
  results: Path
  flags: tuple[str, ...]
  seeds: tuple[int, ...]
  launch: Callable[[Sequence[str]], float] = launch
  gate: Mapping[str, tuple[float, float]] = dataclasses.field(
    default_factory=lambda: GATE
  )

  def result(self, name: str, seed: int) -> Path:
    """The file of a finished cell."""
    return self.results / f"{name}-{seed}.json"

  def folder(self, name: str, seed: int) -> Path:
    """The folder of a cell's runs."""
    return self.work / f"{name}-{seed}"

  def make(self, name: str, seed: int) -> bool:
    """Makes a cell, and says whether there was anything to do.

    Raises:
      ValueError: a cell that this one needs is not finished, or the warm start
        is out of `gate`.
      RuntimeError: a step failed; the next start tries it again.
    """
    arm, place = ARMS[name], self.result(name, seed)
    if place.exists():
      read(place)
      return False
    for needed in (*arm.needs, *(["start"] if name != "start" else [])):
      if not self.result(needed, seed).exists():
        raise ValueError(f"{name} needs {needed} of seed {seed} first.")
    if arm.kind in ("train", "matched"):
      check_gate(read(self.result("start", seed)), self.gate)
    self.folder(name, seed).mkdir(parents=True, exist_ok=True)
    run = getattr(self, f"_{arm.kind}")(name, seed)
    cell = describe(run, self.folder(name, seed))
    cell |= dict(arm=name, seed=seed)
    self.results.mkdir(parents=True, exist_ok=True)
    metrics.RunFolder(self.results).write_json(place.name, cell)
    return True

  # --- kinds of cells: each returns the folder of its run ---

  def _train(self, name: str, seed: int) -> Path:
    run = self.folder(name, seed) / "run"
    self._step(name, seed, "train", self._curve())
    self._evaluate(name, seed, run)
    return run

  def _start(self, name: str, seed: int) -> Path:
    if of_a_world(self.config) and not place_of_policy(seed).exists():
      self._imitate(seed)
    folder = self.folder(name, seed)
    run = self._pose(name, seed, folder)
    right = f"--config.eval.other=mined:{worlds.PREFIX}{seed}/right.jsonl"
    self._at_rest(name, seed, folder, ARMS[name].banks, (right,))
    return run

  def _imitate(self, seed: int) -> None:
    """Takes the last checkpoint of the warm start that is within the gate.

    Without a skill a policy searches with one of three signs, which it likes
    about equally: which of them is the most probable, and so the greedy
    accuracy, changes from one checkpoint to the next. Where none is within, the
    last is taken.
    """
    # What was measured there was of another policy.
    shutil.rmtree(self.folder("start", seed), ignore_errors=True)
    folder = self.folder("warm", seed)
    tuned = folder / "run"
    if not tuned.exists():
      shutil.rmtree(folder, ignore_errors=True)
    # One that has ended, too, refuses episodes that it did not begin with.
    spent = self.launch(imitation(self.config, seed, tuned, folder / "policy"))
    notes = metrics.RunFolder(folder)
    taken = {"warm start": spent} | notes.read_json("steps.json", {})
    notes.write_json("steps.json", taken)
    kept = [int(p.name) for p in (tuned / "checkpoints").glob("[0-9]*")]
    tried = {}
    for step in sorted(kept, reverse=True):
      place = folder / f"step {step}"
      self._export(tuned, step, place / "policy")
      flags = (f"--config.policy.path={place / 'policy'}",)
      run = self._pose("warm", seed, place, flags)
      self._at_rest("warm", seed, place, ("none",), flags)
      cell = describe(run, place) | {"seed": seed}
      tried[step] = standing(cell) if self.gate else {}
      try:
        check_gate(cell, self.gate)
        break
      except ValueError as error:
        print(f"After step {step}: {error}", flush=True)
    else:
      step = max(kept)
    own = metrics.RunFolder(self.folder("start", seed))
    own.write_json("steps.json", {"warm start": taken["warm start"]})
    own.write_json(
      "notes.json", {"step": step, "of": max(kept), "tried": tried}
    )
    self._export(tuned, step, place_of_policy(seed))

  def _export(self, warm: Path, step: int, out: Path) -> None:
    """Writes the policy after a step of a warm start, if it is not there."""
    if not out.exists():
      words = ["--mode=export", f"--workdir={warm}", f"--iteration={step}"]
      self.launch([*words, f"--out={out}"])

  def _pose(self, name, seed, folder, flags=()) -> Path:
    """One iteration, for what the challenger poses before it learns."""
    run = folder / "run"
    flags += ("--config.iterations=1", "--config.questions=64")
    flags += ("--config.eval.banks=('none',)",)
    step = self._named("pose", name, seed, folder)
    self._step(name, seed, step, flags, run, variant_of="start")
    return run

  def _untrained(self, name: str, seed: int) -> Path:
    """Evaluates the warm start with the bank of SESA's run."""
    folder, bank = self.folder(name, seed), self._bank(seed)
    flags = (f"--config.eval.other=mined:{bank}",)
    return self._at_rest(name, seed, folder, ARMS[name].banks, flags)

  def _at_rest(self, name, seed, folder, banks, flags) -> Path:
    """Evaluates what nothing has trained."""
    for how, temperature in TEMPERATURES.items():
      run = folder / f"at {how}"
      step = self._named(how, name, seed, folder)
      more = ("--config.iterations=0", *_evaluating(temperature, banks), *flags)
      self._step(name, seed, step, more, run, variant_of="start")
      _keep(folder, how, json.loads((run / "eval.json").read_text()))
    return run

  def _matched(self, name: str, seed: int) -> Path:
    """Trains on, a few iterations at a time, until as much was sampled."""
    run = self.folder(name, seed) / "run"
    wanted = read(self.result("sesa", seed))["sampled_tokens"]
    last = read(self.result("ssp", seed))
    pace = last["sampled_tokens"] / last["iterations"]
    while (made := sampled_tokens(run)) < wanted:
      done = len(metrics.RunFolder(run, writes=False).read("metrics.jsonl"))
      # A little less, so that it ends near what is wanted, not far above.
      more = max(1, math.floor(0.95 * (wanted - made) / pace))
      self._step(
        name,
        seed,
        f"train to {done + more}",
        (f"--config.iterations={done + more}", *self._curve()),
      )
      if last_iteration(run) == done:
        raise RuntimeError(f"{run} goes on no more: remove its folder.")
    self._evaluate(name, seed, run)
    return run

  def _other(self, name: str, seed: int) -> Path:
    """Evaluates SESA's run with a bank of the next world, or with the truth."""
    run = self.folder("sesa", seed) / "run"
    other = self.seeds[(self.seeds.index(seed) + 1) % len(self.seeds)]
    if name == "right_bank":
      bank = f"{worlds.PREFIX}{seed}/right.jsonl"
    elif other == seed:
      raise ValueError(f"{name} needs another world: name two seeds or more.")
    else:
      bank = self._bank(other)
      notes = metrics.RunFolder(self.folder(name, seed))
      notes.write_json("notes.json", {"bank of": other})
    flags = (f"--config.eval.other=mined:{bank}",)
    self._evaluate(name, seed, run, flags, variant_of="sesa")
    return run

  def _bank(self, seed: int) -> Path:
    """The bank that a run of SESA has left."""
    bank = self.folder("sesa", seed) / "run/skills.jsonl"
    if not bank.exists():
      raise ValueError(
        f"{bank} is missing: a cell has only figures of its run. Make sesa of "
        f"seed {seed} anew (remove {self.result('sesa', seed)})."
      )
    return bank

  # --- steps ---

  def _curve(self) -> tuple[str, ...]:
    return _CURVE if of_a_world(self.config) else ()

  def _evaluate(self, name, seed, run, flags=(), variant_of="") -> None:
    arm = ARMS[name]
    for how, temperature in TEMPERATURES.items():
      place = self.folder(name, seed) / f"{how}.json"
      if place.exists():
        continue
      self._step(
        name,
        seed,
        how,
        ("--mode=eval", *_evaluating(temperature, arm.banks), *flags),
        run=run,
        variant_of=variant_of,
      )
      (newest,) = run.glob(f"eval_{last_iteration(run):05d}.json")
      _keep(place.parent, how, json.loads(newest.read_text())["cells"])

  def _named(self, step: str, name: str, seed: int, folder: Path) -> str:
    own = folder == self.folder(name, seed)
    return step if own else f"{folder.name}: {step}"

  def _step(self, name, seed, step, flags, run=None, variant_of="") -> None:
    """Runs a command once, and notes what it took."""
    folder = self.folder(name, seed)
    notes = metrics.RunFolder(folder)
    taken = notes.read_json("steps.json", {})
    if step in taken:
      return
    arm = ARMS[variant_of or name]
    taken[step] = self.launch(
      [
        f"--config={self.config}:{arm.variant}",
        f"--workdir={run or folder / 'run'}",
        f"--config.seed={seed}",
        *self.flags,
        *arm.flags,
        *flags,
      ]
    )
    notes.write_json("steps.json", taken)


_KEYS = {"arm", "seed", "evaluations", "panels", "hops", "traps", "questions"}


def read(place: Path) -> dict[str, Any]:
  """Reads a finished cell.

  Raises:
    ValueError: it is damaged.
  """
  try:
    cell = json.loads(place.read_text("utf-8"))
    if missing := _KEYS - cell.keys():
      raise ValueError(f"no {', '.join(sorted(missing))}")
  except (ValueError, AttributeError) as error:
    raise ValueError(
      f"{place} is no finished cell ({error}): remove it, and make it anew."
    ) from error
  return cell


def standing(cell: Mapping[str, Any]) -> dict[str, float]:
  """Returns what `GATE` bounds, of the cell of a warm start."""
  two = np.array([hops == "2" for hops in cell["hops"]])
  _, valid = cell["panels"].get("valid_rate", {}).get("valid", ((), ()))
  found = {"valid proposals": next(iter(valid), math.nan)}
  for how in TEMPERATURES:
    right = cell["evaluations"][how]["none"]["right"]
    found[f"two hops, {how}"] = np.array(list(map(int, right)))[two].mean()
  return found


def check_gate(
  cell: Mapping[str, Any], gate: Mapping[str, tuple[float, float]] = GATE
) -> None:
  """Refuses a warm start that is not worth training.

  Raises:
    ValueError: a number is out of its bounds.
  """
  found = standing(cell) if gate else {}
  for name, (low, high) in gate.items():
    if not low <= (value := found[name]) <= high:
      raise ValueError(
        f"The warm start of seed {cell['seed']}: {name} {value:.2f}, wanted "
        f"{low} to {high}. Remove this cell and the world's policy to choose "
        "among checkpoints again, change the warm start, or pass --ungated."
      )


def _evaluating(temperature: float, banks: Sequence[str]) -> tuple[str, ...]:
  named = ", ".join(map(repr, banks))
  return (
    f"--config.eval.temperature={temperature}",
    f"--config.eval.banks=({named},)",
  )


def _keep(folder: Path, how: str, cells: Sequence[Mapping[str, Any]]) -> None:
  metrics.RunFolder(folder).write_json(f"{how}.json", list(cells))


# --- what a cell holds -----------------------------------------------------


def last_iteration(run: Path) -> int:
  """Iterations that a run has finished."""
  return len(metrics.RunFolder(run, writes=False).read("metrics.jsonl"))


def sampled_tokens(run: Path) -> int:
  """Ids that a run's policies have sampled in training, probes aside."""
  rows = metrics.RunFolder(run, writes=False).read("metrics.jsonl")
  names = [f"{r}/engine/tokens/sampled" for r in ("challenger", "solver")]
  return int(sum(row.get(name, 0) for row in rows for name in names))


def describe(run: Path, folder: Path) -> dict[str, Any]:
  """Returns what is kept of a cell.

  Args:
    run: the folder of its run.
    folder: with its evaluations and what its steps took.
  """
  reader = metrics.RunFolder(run, writes=False)
  made = reader.read_json("manifest.json", {})
  own = metrics.RunFolder(folder, writes=False)
  evaluations = {how: own.read_json(f"{how}.json", []) for how in TEMPERATURES}
  questions = _questions(evaluations["greedy"])
  return {
    **{name: made[name] for name in ("commit", "dirty", "config", "hashes")},
    "generator": worlds.digest(),
    "cpu_seconds": own.read_json("steps.json", {}),
    "notes": own.read_json("notes.json", {}),
    "iterations": last_iteration(run),
    "sampled_tokens": sampled_tokens(run),
    "questions": manifest.sha256(questions),
    **kinds(questions),
    "evaluations": {
      how: _packed(cells, questions) for how, cells in evaluations.items()
    },
    "curve": [
      {name: cell[name] for name in ("iteration", "set", "bank", "n", "em")}
      for cell in reader.read_json("eval.json", [])
    ],
    "panels": _plain(plots.panels(reader)),
  }


def _questions(cells: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
  """(set, id) of all questions, in one order whatever the arm."""
  return sorted({(c["set"], p["id"]) for c in cells for p in c["predictions"]})


def kinds(questions: Sequence[tuple[str, str]]) -> dict[str, str]:
  """Says of each question whether its trap was taught (t) or held out (h).

  And how many hops it takes. Both stand in the name of its set, `held_out_2`;
  questions of others have "-" and 1.
  """
  named = [re.fullmatch(r"(taught|held_out)_(\d)", s) for s, _ in questions]
  return {
    "traps": "".join(name[1][0] if name else "-" for name in named),
    "hops": _digits(name[2] if name else 1 for name in named),
  }


def _packed(
  cells: Sequence[Mapping[str, Any]], questions: Sequence[tuple[str, str]]
) -> dict[str, dict[str, str]]:
  """Of each bank what became of each question, a character a question."""
  found: dict[str, dict[tuple[str, str], Any]] = {}
  for cell in cells:
    known = found.setdefault(cell["bank"], {})
    known |= {(cell["set"], p["id"]): p for p in cell["predictions"]}
  packed = {}
  for bank, known in found.items():
    rows = [known[question] for question in questions]
    packed[bank] = {
      "answered": _digits(row["prediction"] is not None for row in rows),
      "searches": _digits(min(9, row["searches"]) for row in rows),
      "found": _digits(row["found"] for row in rows),
      "right": _digits(row["verdict"] == "right" for row in rows),
    }
  return packed


def _digits(values) -> str:
  return "".join(str(int(value)) for value in values)


def _plain(panels: Mapping[str, plots.Panel]) -> dict[str, Any]:
  """Panels as JSON, of four digits."""

  def values(array):
    return [None if x != x else float(f"{x:.4g}") for x in array.tolist()]

  found = {}
  for name, panel in panels.items():
    found[name] = {
      curve.label: [values(curve.x), values(curve.y)] for curve in panel.curves
    }
    if panel.heat:
      found[name] = [values(column) for column in panel.heat.share.T]
  return found


# --- the command -----------------------------------------------------------


def order(arms: Sequence[str], seeds: Sequence[int]) -> list[tuple[str, int]]:
  """Returns the cells, each after those that it needs."""
  last = [name for name in arms if ARMS[name].kind in ("other", "untrained")]
  first = [name for name in arms if name not in last]
  return [(name, seed) for of in (first, last) for name in of for seed in seeds]


def numbers(text: str) -> tuple[int, ...]:
  """Reads a flag of seeds, such as `100,101`.

  Raises:
    ArgumentTypeError: it is something else.
  """
  if not re.fullmatch(r"\d+(,\d+)*", text):
    raise argparse.ArgumentTypeError(f"{text!r} is no list like 100,101")
  return tuple(map(int, text.split(",")))


def check_flags(
  parser: argparse.ArgumentParser, others: Sequence[str], *seeds: int
) -> None:
  """Ends the command where a flag is of no config, or a seed below 0."""
  if unknown := [f for f in others if not f.startswith("--config.")]:
    parser.error(f"unknown: {', '.join(unknown)}; others are --config.FIELD=")
  if min(seeds, default=0) < 0:
    parser.error(f"{min(seeds)} is no seed: they are 0 or more")


def main(argv: Sequence[str] | None = None) -> None:
  """Makes the cells that are missing, or prints the report."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--config", default=CONFIG)
  parser.add_argument("--seeds", type=numbers, default="100,101,102,103,104")
  parser.add_argument("--arms", default=",".join(ARMS))
  parser.add_argument("--work", default="runs/microworld")
  parser.add_argument("--results", default=str(RESULTS))
  parser.add_argument(
    "--ungated", action="store_true", help="train from any warm start"
  )
  parser.add_argument("--report", action="store_true", help="print the tables")
  flags, others = parser.parse_known_args(argv)
  if flags.report:
    from benchmarks import microworld_report

    try:
      print(microworld_report.report(Path(flags.results)))
    except ValueError as error:
      parser.error(str(error))
    return
  unknown = [name for name in flags.arms.split(",") if name not in ARMS]
  if unknown:
    parser.error(f"unknown: {unknown}; arms are {', '.join(ARMS)}")
  check_flags(parser, others)
  for flag in others:
    if flag.startswith(_ITS_OWN):
      parser.error(f"{flag}: seeds and banks are the cells' own; see --seeds.")
  sweep = Sweep(
    config=flags.config,
    work=Path(flags.work).absolute(),
    results=Path(flags.results).absolute(),
    flags=tuple(others),
    seeds=flags.seeds,
    gate={} if flags.ungated else GATE,
  )
  failed = 0
  for name, seed in order(flags.arms.split(","), sweep.seeds):
    try:
      said = "made" if sweep.make(name, seed) else "was there"
    except (ValueError, RuntimeError, OSError) as error:
      said, failed = f"not made: {error}", failed + 1
    print(f"{name} {seed}: {said}", flush=True)
  if failed:
    sys.exit(1)


if __name__ == "__main__":
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  main()
