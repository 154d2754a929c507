"""The curves of a run, drawn from what it left in its folder.

`panels` is numbers alone, read from metrics, evaluations and histories; `draw`
makes pictures of them. What a run has no numbers for has no panel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import rich.console
from absl import logging
from jaxtyping import Float, Int

from sesa_jax import metrics
from sesa_jax.skills import history

FOLDER = "plots"  # in the run's
ALL = "all"  # the picture of all panels

_ROLES = ("challenger", "solver")
# Panel -> title, unit, label -> name in metrics.jsonl.
_METRICS = {
  "valid_rate": (
    "What the challenger poses",
    "share of proposals",
    {
      "valid": "challenger/valid_rate",
      "asked before": "challenger/duplicates",
    },
  ),
  "reward": (
    "Reward in training",
    "mean reward",
    {role: f"{role}/reward/mean" for role in _ROLES},
  ),
  "entropy": (
    "Entropy",
    "nats a sampled token",
    {role: f"{role}/entropy/mean" for role in _ROLES},
  ),
  "kl": (
    "KL to the reference, k3",
    "nats a sampled token",
    {role: f"{role}/kl/mean" for role in _ROLES},
  ),
  "logprob_gap": (
    "Logprobs, engine against learner",
    "mean difference, nats",
    {role: f"{role}/logprob_gap/mean" for role in _ROLES},
  ),
}


class Curve(NamedTuple):
  """A line, perhaps with a band around it."""

  label: str
  x: Int[np.ndarray, " T"]  # iterations
  y: Float[np.ndarray, " T"]
  low: Float[np.ndarray, " T"] | None = None
  high: Float[np.ndarray, " T"] | None = None
  null: bool = False  # it is what noise would do


class Heat(NamedTuple):
  """Shares by iteration: each column adds up to 1, or is NaN throughout."""

  x: Int[np.ndarray, " T"]  # iterations
  y: Float[np.ndarray, " n"]  # success rates
  share: Float[np.ndarray, "n T"]


class Panel(NamedTuple):
  """What one picture shows."""

  title: str
  unit: str  # of the vertical axis
  curves: tuple[Curve, ...] = ()
  heat: Heat | None = None


# --- numbers ---------------------------------------------------------------


def panels(folder: metrics.RunFolder) -> dict[str, Panel]:
  """Reads the panels of a run, by name; a panel without numbers is not there.

  Args:
    folder: of the run, finished or not.

  Raises:
    ValueError: a file is damaged.
  """
  rows = folder.read("metrics.jsonl")
  config = folder.read_json("config.json", {})
  found = {"accuracy": accuracy(folder.read_json("eval.json", []))}
  if "solver" in config:
    found["success"] = success(
      folder.read("questions.jsonl"), config["solver"]["group_size"]
    )
  found |= {name: _measured(rows, *panel) for name, panel in _METRICS.items()}
  if "bank" in config:
    found |= bank(
      folder.read("skills_history.jsonl"),
      last=max((row["iteration"] for row in rows), default=0),
      capacity=config["bank"]["capacity"],
      retire_after=config["bank"]["retire_after"],
    )
  return {name: panel for name, panel in found.items() if any(panel[2:])}


def accuracy(cells: Sequence[Mapping[str, Any]]) -> Panel:
  """Exact match of each set and bank mode, with its interval.

  Args:
    cells: of `eval.json`; those that have no `em` are left out.
  """
  known = [cell for cell in cells if cell["em"] is not None]
  curves = []
  for key in dict.fromkeys((cell["set"], cell["bank"]) for cell in known):
    of = [c for c in known if (c["set"], c["bank"]) == key]
    of.sort(key=lambda cell: cell["iteration"])
    low, high = np.array([cell["em_interval"] for cell in of]).T
    x, y = (
      np.array([cell[name] for cell in of]) for name in ("iteration", "em")
    )
    curves.append(Curve(f"{key[0]}, bank {key[1]}", x, y, low, high))
  return Panel("Evaluation", "exact match", tuple(curves))


def success(rows: Sequence[Mapping[str, Any]], group_size: int) -> Panel:
  """Histograms of the solver's success rate on what the challenger posed.

  Args:
    rows: of `questions.jsonl`; those that were not played are left out.
    group_size: attempts at each question, G: rates are 0, 1/G, ..., 1.
  """
  heat, last = None, max((row["iteration"] for row in rows), default=0)
  played = [row for row in rows if row["success"] is not None]
  if played:
    counts = np.zeros((group_size + 1, last))
    for row in played:
      counts[round(row["success"] * group_size), row["iteration"] - 1] += 1
    total = counts.sum(0)
    heat = Heat(
      np.arange(1, last + 1),
      np.arange(group_size + 1) / group_size,
      counts / np.where(total > 0, total, np.nan),
    )
  title = "Solver's success on the challenger's questions"
  return Panel(title, "success rate", heat=heat)


def bank(
  events: history.History, *, last: int, capacity: int, retire_after: int
) -> dict[str, Panel]:
  """Sizes of the bank beside the null curve's mean and 90 % of its draws.

  Args:
    events: of `skills_history.jsonl`. Where they do not suffice for a null
      curve, the run is shown alone, and a warning says why.
    last: iteration to go to.
    capacity: `bank.capacity` of the run.
    retire_after: `bank.retire_after` of the run.
  """
  if not events:
    return {}
  run, null = history.curves(events, last), None
  if any(event["event"] == "rank" for event in events):
    try:
      null = history.null_curves(
        events, capacity=capacity, retire_after=retire_after, last=last
      )
    except ValueError as error:  # begun by an older version
      logging.warning("The bank is plotted without a null curve: %s", error)

  def sizes(name: str) -> list[Curve]:
    curves = [Curve(name, run.iterations, getattr(run, name))]
    if null is not None:
      draws = getattr(null, name)
      low, high = np.percentile(draws, (5, 95), axis=0)
      mean = draws.mean(0)
      label = f"{name}, null"
      curves.append(Curve(label, null.iterations, mean, low, high, null=True))
    return curves

  admitted = Curve("admitted", run.iterations, run.admitted)
  return {
    "bank": Panel("Skill bank", "active skills", tuple(sizes("active"))),
    "bank_changes": Panel(
      "Skills that came and went",
      "skills, summed up",
      (admitted, *sizes("retired")),
    ),
  }


def _measured(
  rows: Sequence[Mapping[str, Any]],
  title: str,
  unit: str,
  names: Mapping[str, str],
) -> Panel:
  curves = []
  for label, name in names.items():
    known = [row for row in rows if row.get(name) is not None]
    if known:
      x, y = (np.array([row[n] for row in known]) for n in ("iteration", name))
      curves.append(Curve(label, x, y))
  return Panel(title, unit, tuple(curves))


# --- pictures --------------------------------------------------------------


def draw(found: Mapping[str, Panel], columns: int = 2) -> Any:
  """Returns a matplotlib figure with the panels, row by row.

  Args:
    found: of `panels`, at least one.
    columns: panels side by side, at most.
  """
  # Here, since it takes a second: nothing else of the package draws.
  from matplotlib.figure import Figure

  columns = min(columns, len(found))
  rows = math.ceil(len(found) / columns)
  figure = Figure(figsize=(5.5 * columns, 3.4 * rows), layout="constrained")
  places = list(figure.subplots(rows, columns, squeeze=False).flat)
  for axes, panel in zip(places, found.values(), strict=False):
    _draw(figure, axes, panel)
  for axes in places[len(found) :]:
    axes.set_axis_off()
  return figure


def _draw(figure: Any, axes: Any, panel: Panel) -> None:
  axes.set_title(panel.title)
  axes.set_xlabel("iteration")
  axes.set_ylabel(panel.unit)
  for curve in panel.curves:
    style = dict(linestyle="--", color="0.5") if curve.null else {}
    # A run of one evaluation is a point.
    marker = "." if len(curve.x) < 20 else ""
    (line,) = axes.plot(
      curve.x, curve.y, label=curve.label, marker=marker, **style
    )
    if curve.low is not None:
      shade = dict(color=line.get_color(), alpha=0.2, linewidth=0)
      axes.fill_between(curve.x, curve.low, curve.high, **shade)
  if panel.heat:
    x, y, share = panel.heat
    edge = 0.5 / (len(y) - 1)  # of a cell, whose middle is its rate
    image = axes.imshow(
      share,
      vmin=0,
      origin="lower",
      aspect="auto",
      extent=(x[0] - 0.5, x[-1] + 0.5, -edge, 1 + edge),
    )
    figure.colorbar(image, ax=axes, label="share of questions")
    return
  if min(curve.y.min() for curve in panel.curves) >= 0:
    axes.set_ylim(bottom=0)
  axes.legend(frameon=False)


def plot_run(workdir: str | Path) -> list[Path]:
  """Draws a run's panels into its folder, each alone and all together.

  Returns:
    The PNG files in the folder `plots`; none where the run has no numbers yet.

  Raises:
    ValueError: a file of the run is damaged.
  """
  folder = metrics.RunFolder(workdir, writes=False)
  found = panels(folder)
  if not found:
    return []
  place = folder.path / FOLDER
  place.mkdir(exist_ok=True)
  pictures = {name: {name: panel} for name, panel in found.items()}
  pictures[ALL] = found
  paths = []
  for name, shown in pictures.items():
    paths.append(place / f"{name}.png")
    draw(shown).savefig(paths[-1], dpi=110)
  return paths


def main(workdir: str | Path, console: Any = None) -> None:
  """Plots a run, and says where the pictures are.

  Raises:
    ValueError: no such folder, or nothing to plot in it.
  """
  if not Path(workdir).is_dir():
    raise ValueError(f"--workdir={workdir}: no such folder.")
  paths = plot_run(workdir)
  if not paths:
    raise ValueError(
      f"{workdir} has nothing to plot: no eval.json, no metrics.jsonl. A run "
      "writes them at the end of an iteration."
    )
  console = console or rich.console.Console()
  for path in paths:
    console.print(path, highlight=False, soft_wrap=True)
