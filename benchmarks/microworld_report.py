"""The tables of the microworld's study, from its finished cells alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import microworld, paired

Cell = Mapping[str, Any]
Cells = Mapping[tuple[str, int], Cell]  # by arm and seed

# What an arm is evaluated with where its own bank is meant.
_OWN = ("final", "none")
_HOW = ("sampled", "greedy")
_UNPRIMED = ("no_priming",)  # begins with no skills, whatever its bank is later
# Nothing is trained.
_EVALUATED = ("start", "other_bank", "right_bank", "start_bank")
# What two cells of a world have in common.
_WORLD = ("questions", "generator")
_WORDS = {"sampled": "T = 1", "greedy": "greedy"}
TRAPS = {"all": "", "taught": "t", "held out": "h"}

# Pairs whose difference says something: what it says, (arm, bank) of both.
PAIRS = (
  ("On - Off", ("sesa", "none"), ("sesa", "final")),
  (
    "warm start with its bank - the warm start",
    ("start", "final"),
    ("start_bank", "other"),
  ),
  (
    "On - warm start with its bank",
    ("start_bank", "other"),
    ("sesa", "final"),
  ),
  ("Off - SSP", ("ssp", "none"), ("sesa", "none")),
  ("Off - SSP, same tokens", ("ssp_matched", "none"), ("sesa", "none")),
  ("On - SSP, same tokens", ("ssp_matched", "none"), ("sesa", "final")),
  ("On - without priming", ("no_priming", "final"), ("sesa", "final")),
  ("On - without frontier", ("no_frontier", "final"), ("sesa", "final")),
  (
    "On - without distillation",
    ("no_distillation", "final"),
    ("sesa", "final"),
  ),
  ("On with contrast - On", ("sesa", "final"), ("contrast", "final")),
  ("Off - trained on placebo, Off", ("placebo", "none"), ("sesa", "none")),
  ("final - placebo", ("sesa", "placebo"), ("sesa", "final")),
  ("final - scrambled", ("sesa", "scrambled"), ("sesa", "final")),
  ("the true rules - final", ("sesa", "final"), ("right_bank", "other")),
  ("final - another world's", ("other_bank", "other"), ("sesa", "final")),
)


def read(folder: Path) -> dict[tuple[str, int], Cell]:
  """Reads the finished cells of a folder.

  Raises:
    ValueError: one is damaged.
  """
  cells = map(microworld.read, sorted(folder.glob("*-*.json")))
  return {(cell["arm"], cell["seed"]): cell for cell in cells}


def report(folder: Path) -> str:
  """Returns the tables as markdown.

  Raises:
    ValueError: there is no finished cell.
  """
  cells = read(folder)
  if not cells:
    raise ValueError(f"{folder} has no finished cell.")
  arms = list(dict.fromkeys(arm for arm, _ in cells))
  trained = [arm for arm in arms if arm not in _EVALUATED]
  parts = [
    "# The microworld's study in tables",
    "Intervals are 95 %, by a bootstrap over seeds and, in each, over "
    "questions (2,000 draws, percentiles). Of 3 to 5 seeds that is too narrow: "
    "Student's, over the seeds' values alone, stands beside it. Numbers are "
    "percent.",
    _starts(cells),
    _gains(cells, trained),
    _splits(cells, trained),
    _areas(cells, trained),
    _pairs(cells),
    _challenger(cells, trained),
    _histograms(cells, trained),
    _banks(cells, trained),
    _costs(cells, arms),
  ]
  return "\n\n".join(filter(None, parts))


# --- numbers ---------------------------------------------------------------


def columns(cell: Cell, how: str, bank: str) -> dict[str, np.ndarray]:
  """Unpacks what became of each question, an array a thing."""
  packed = cell["evaluations"][how][bank]
  return {n: np.array(list(map(int, text))) for n, text in packed.items()}


def chosen(cell: Cell, trap: str) -> np.ndarray:
  """Says which questions have a trap of a kind; "" is all of them."""
  kinds = np.array(list(cell["traps"]))
  return np.ones(len(kinds), bool) if not trap else kinds == trap


def own_bank(cell: Cell, how: str) -> str:
  """The bank that an arm's policy is meant to be used with."""
  return next(bank for bank in _OWN if bank in cell["evaluations"][how])


def nested(cell: Cell, how: str, bank: str) -> np.ndarray:
  """The columns of `paired.nested` of one evaluation."""
  found = columns(cell, how, bank)
  hops = np.array(list(map(int, cell["hops"])))
  return paired.nested(
    found["answered"] > 0,
    found["searches"] >= hops,
    found["found"] > 0,
    found["right"] > 0,
  )


def joined(
  cells: Cells,
  before: tuple[str, str],
  after: tuple[str, str],
  how: str,
  trap: str = "",
) -> dict[int, np.ndarray]:
  """Puts two evaluations of the same questions side by side, by seed.

  Args:
    cells: finished ones.
    before: (arm, bank).
    after: (arm, bank).
    how: "greedy" or "sampled".
    trap: of `TRAPS`.

  Returns:
    seed -> [n, 10], the columns of `paired.nested` of both, of all seeds that
    have both; and not where questions differ.
  """
  found = {}
  for arm, seed in cells:
    if arm != after[0] or (before[0], seed) not in cells:
      continue
    one, two = cells[before[0], seed], cells[after[0], seed]
    banks = [c["evaluations"][how] for c in (one, two)]
    if before[1] not in banks[0] or after[1] not in banks[1]:
      continue
    if any(one[name] != two[name] for name in _WORLD):
      raise ValueError(
        f"{before[0]} and {arm} of seed {seed} have other questions: the world "
        "has changed between them. Make one of them anew."
      )
    keep = chosen(one, trap)
    sides = (nested(one, how, before[1]), nested(two, how, after[1]))
    if keep.any():
      found[seed] = np.concatenate(sides, axis=1)[keep]
  return found


def accuracy(tables: Mapping[int, np.ndarray], **draws) -> paired.Interval:
  """The gain of `joined` columns."""
  picked = [table[:, [4, 9]] for table in tables.values()]
  return paired.bootstrap(picked, paired.difference, **draws)


def accuracy_of_answered(
  tables: Mapping[int, np.ndarray], **draws
) -> paired.Interval:
  """The gain among well-formed answers."""
  # A right answer is a well-formed one.
  picked = [table[:, [0, 4, 5, 9]] for table in tables.values()]
  return paired.bootstrap(picked, paired.ratio_difference, **draws)


# --- tables ----------------------------------------------------------------


def _table(
  title: str, head: Sequence[str], rows: Sequence[Sequence[str]]
) -> str:
  """Lays rows out as markdown; a table without rows is left out."""
  if not rows:
    return ""
  lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
  lines.insert(1, "|" + "---|" * len(head))
  return f"### {title}\n\n" + "\n".join(lines)


def _points(value: float) -> str:
  return "-" if math.isnan(value) else f"{100 * value:.1f}"


def _interval(found: paired.Interval) -> str:
  if math.isnan(found.value):
    return "-"
  value, low, high = (100 * x for x in found)
  if math.isnan(low):
    return f"{value:+.1f}"
  return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"


def _gain(tables: Mapping[int, np.ndarray]) -> str:
  return _interval(accuracy(tables)) if tables else "-"


def _begun(arm: str, bank: str) -> tuple[str, str]:
  """The evaluation of the warm start that an arm's training began with."""
  return "start", "none" if arm in _UNPRIMED and bank == "final" else bank


def _by_seed(tables: Mapping[int, np.ndarray]) -> tuple[str, str]:
  """Student's interval over seeds, and each seed's value."""
  less = [t[:, 9].mean() - t[:, 4].mean() for _, t in sorted(tables.items())]
  each = " ".join(f"{100 * x:+.0f}" for x in less)
  return _interval(paired.over_seeds(less)), each


def _starts(cells: Cells) -> str:
  rows = []
  for (arm, seed), cell in cells.items():
    if arm != "start":
      continue
    two = np.array([hops == "2" for hops in cell["hops"]])
    posed = cell["panels"].get("valid_rate", {}).get("valid", [[], [math.nan]])
    for bank in cell["evaluations"]["greedy"]:
      step = (
        "{step} of {of}".format(**cell["notes"]) if cell.get("notes") else "-"
      )
      row = [str(seed), step, _points(posed[1][0]), bank]
      for how in _HOW:
        right = columns(cell, how, bank)["right"]
        for hops in (~two, two):
          shares = [
            _points(right[hops & chosen(cell, trap)].mean())
            if (hops & chosen(cell, trap)).any()
            else "-"
            for trap in ("t", "h")
          ]
          row.append(" / ".join(shares))
      rows.append(row)
  asked = [f"{_WORDS[how]}, {n}" for how in _HOW for n in ("1 hop", "2 hops")]
  return _table(
    "The warm start: its last step within the gate, what it poses, and answers "
    "of taught / held-out traps; `other` holds the true rules of all types",
    ("seed", "step", "valid", "bank", *asked),
    rows,
  )


def _gains(cells: Cells, arms: Sequence[str]) -> str:
  rows = []
  for arm in arms:
    for how in _HOW:
      banks = dict.fromkeys(
        bank
        for (name, _), cell in cells.items()
        if name == arm
        for bank in ("none", own_bank(cell, how))
      )
      for bank in banks:
        sides = _begun(arm, bank), (arm, bank)
        tables = joined(cells, *sides, how)
        if not tables:
          continue
        means = np.mean([table.mean(0) for table in tables.values()], axis=0)
        rows.append(
          [
            arm,
            bank,
            _WORDS[how],
            f"{_points(means[4])} to {_points(means[9])}",
            *(_gain(joined(cells, *sides, how, t)) for t in TRAPS.values()),
            _interval(accuracy_of_answered(tables)),
            *_by_seed(tables),
          ]
        )
  return _table(
    "What training gains, on held-out questions",
    (
      "arm",
      "bank",
      "sampling",
      "accuracy",
      *(f"gain, {name}" for name in TRAPS),
      "gain among well-formed answers",
      "all, over seeds (t)",
      "by seed",
    ),
    rows,
  )


def _splits(cells: Cells, arms: Sequence[str]) -> str:
  rows = []
  for arm in arms:
    for bank in ("none", "final"):
      tables = joined(cells, _begun(arm, bank), (arm, bank), "sampled")
      if not tables:
        continue
      row = [arm, bank]
      for i in range(len(paired.SHARES)):
        found = paired.bootstrap(
          list(tables.values()), lambda means, i=i: paired.split(means)[..., i]
        )
        row.append(_interval(found))
      rows.append(row)
  return _table(
    "The gain at T = 1, split", ("arm", "bank", *paired.SHARES), rows
  )


def curve(cell: Cell, bank: str) -> tuple[list[int], list[float]]:
  """Accuracy over training, all sets together, as the run evaluated it."""
  found: dict[int, list[tuple[int, float]]] = {}
  for point in cell["curve"]:
    if point["bank"] == bank and point["em"] is not None:
      at = found.setdefault(point["iteration"], [])
      at.append((point["n"], point["em"]))
  values = [
    sum(n * em for n, em in at) / sum(n for n, _ in at)
    for _, at in sorted(found.items())
  ]
  return sorted(found), values


def _areas(cells: Cells, arms: Sequence[str]) -> str:
  areas: dict[tuple[str, str], dict[int, float]] = {}
  for arm in arms:
    for bank in ("none", "final"):
      for (name, seed), cell in cells.items():
        points = curve(cell, bank)
        if name == arm and len(points[0]) > 1:
          areas.setdefault((arm, bank), {})[seed] = paired.area(*points)
  rows = []
  for (arm, bank), known in areas.items():
    method = areas.get(("sesa", bank), {})
    both = sorted(known.keys() & method.keys())
    less = ""
    if both and arm != "sesa":
      less = _interval(paired.over_seeds([known[s] - method[s] for s in both]))
    values = " ".join(_points(known[seed]) for seed in sorted(known))
    mean = _points(float(np.mean([*known.values()])))
    rows.append([arm, bank, mean, values, less])
  return _table(
    "Mean accuracy over training (area under the curve), greedy",
    ("arm", "bank", "mean", "by seed", "less SESA's, over seeds (t)"),
    rows,
  )


def _pairs(cells: Cells) -> str:
  rows = []
  for said, before, after in PAIRS:
    for how in _HOW:
      found = {
        name: joined(cells, before, after, how, trap)
        for name, trap in TRAPS.items()
      }
      if not found["all"]:
        continue
      rows.append(
        [
          said,
          _WORDS[how],
          *map(_gain, found.values()),
          *_by_seed(found["all"]),
        ]
      )
  return _table(
    "Paired differences at the end of training",
    ("difference", "sampling", *TRAPS, "all, over seeds (t)", "by seed"),
    rows,
  )


def _series(cell: Cell, panel: str, label: str) -> tuple[float, float]:
  """Means of the first and of the last third of a curve; NaN without one."""
  _, values = cell["panels"].get(panel, {}).get(label, ([], []))
  values = [value for value in values if value is not None]
  third = math.ceil(len(values) / 3)
  if not values:
    return math.nan, math.nan
  return float(np.mean(values[:third])), float(np.mean(values[-third:]))


def histograms(cell: Cell) -> np.ndarray:
  """Shares of posed questions by success rate, first and last third of a run.

  Returns:
    [2, G + 1] for p = 0, 1/G, ..., 1; [2, 0] of a run that posed none.
  """
  known = [c for c in cell["panels"].get("success", ()) if c[0] is not None]
  if not known:
    return np.zeros((2, 0))
  third = math.ceil(len(known) / 3)
  return np.array([np.mean(known[:third], 0), np.mean(known[-third:], 0)])


def frontier_share(cell: Cell) -> tuple[float, float]:
  """Share of posed questions with 0 < p < 1, first and last third of a run."""
  first, last = histograms(cell)
  if not first.size:
    return math.nan, math.nan
  return 1 - first[0] - first[-1], 1 - last[0] - last[-1]


def _challenger(cells: Cells, arms: Sequence[str]) -> str:
  rows = []
  for arm in arms:
    mine = [cell for (name, _), cell in cells.items() if name == arm]
    valid, entropy, frontier = (
      np.mean([measure(cell) for cell in mine], axis=0) for measure in _MEASURES
    )
    rows.append(
      [
        arm,
        f"{_points(valid[0])} to {_points(valid[1])}",
        f"{entropy[0]:.2f} to {entropy[1]:.2f}",
        f"{_points(frontier[0])} to {_points(frontier[1])}",
      ]
    )
  return _table(
    "The challenger, mean of the first and of the last third of the iterations",
    ("arm", "valid proposals", "entropy, nats", "questions with 0 < p < 1"),
    rows,
  )


def _histograms(cells: Cells, arms: Sequence[str]) -> str:
  rows, head = [], ()
  for arm in arms:
    mine = [histograms(c) for (name, _), c in cells.items() if name == arm]
    mine = [shares for shares in mine if shares.size]
    if mine:
      means = np.mean(mine, axis=0)
      rates = np.linspace(0, 1, means.shape[1])
      head = tuple(f"p = {p:.2g}" for p in rates)
      for when, shares in zip(("first", "last"), means, strict=True):
        rows.append([arm, when, *map(_points, shares)])
  return _table(
    "Questions by the solver's success rate, first and last third of a run",
    ("arm", "third", *head),
    rows,
  )


def _banks(cells: Cells, arms: Sequence[str]) -> str:
  rows = []
  for arm in arms:
    for (name, seed), cell in cells.items():
      sizes = cell["panels"].get("bank", {})
      if name == arm and sizes:
        (_, run), (_, null) = (
          sizes["active"],
          sizes.get("active, null", ((), ())),
        )
        ends = [f"{null[-1]:.1f}"] if null else ["-"]
        rows.append([arm, str(seed), f"{run[0]:.0f}", f"{run[-1]:.0f}", *ends])
  return _table(
    "Active skills; null: had outcomes been those of other skills, mean",
    ("arm", "seed", "when first filled", "at the end", "at the end, null"),
    rows,
  )


_MEASURES: tuple[Callable[[Cell], tuple[float, float]], ...] = (
  lambda cell: _series(cell, "valid_rate", "valid"),
  lambda cell: _series(cell, "entropy", "challenger"),
  frontier_share,
)


def _costs(cells: Cells, arms: Sequence[str]) -> str:
  rows = []
  for arm in arms:
    mine = {s: cell for (name, s), cell in cells.items() if name == arm}
    spent = [sum(cell["cpu_seconds"].values()) for cell in mine.values()]
    iterations = {cell["iterations"] for cell in mine.values()}
    commits = {
      f"{(cell['commit'] or '?')[:8]}{'+' if cell['dirty'] else ''}"
      for cell in mine.values()
    }
    tokens = np.mean([cell["sampled_tokens"] for cell in mine.values()])
    rows.append(
      [
        arm,
        ", ".join(map(str, sorted(mine))),
        " ".join(map(str, sorted(iterations))),
        f"{tokens:,.0f}",
        f"{np.mean(spent):,.0f}",
        " ".join(sorted(commits)),
      ]
    )
  return _table(
    "What it cost, a run (+: the tree had changes)",
    (
      "arm",
      "seeds",
      "iterations",
      "sampled tokens",
      "CPU-seconds, evaluations included",
      "commit",
    ),
    rows,
  )
