"""Curves of a run: what is drawn is what its files say."""

import io
import statistics

import numpy as np
import pytest
import rich.console

from sesa_jax import metrics, plots
from sesa_jax.skills import history
from tests.test_history import STORY

NAMES = (
  "accuracy",
  "success",
  "valid_rate",
  "reward",
  "entropy",
  "kl",
  "logprob_gap",
  "bank",
  "bank_changes",
)


def cell(iteration, bank, em, low, high, set="real"):
  return dict(
    iteration=iteration, set=set, bank=bank, em=em, em_interval=[low, high]
  )


def row(iteration, **values):
  return dict(iteration=iteration) | {
    name.replace("__", "/"): value for name, value in values.items()
  }


@pytest.fixture
def folder(tmp_path):
  """Four iterations of a run; what they measured is not the same in each."""
  folder = metrics.RunFolder(tmp_path / "run")
  folder.write_json(
    "config.json",
    {
      "solver": {"group_size": 4},
      "bank": {"capacity": 9, "retire_after": 2},
    },
  )
  folder.write_json(
    "eval.json",
    [
      cell(4, "none", 0.5, 0.4, 0.6),
      cell(0, "none", 0.25, 0.1, 0.5),
      cell(0, "final", 0.75, 0.7, 0.8),
      cell(4, "final", None, 0.1, 0.9),
      cell(4, "none", 0.0, 0.0, 0.3, set="other"),
    ],
  )
  folder.append(
    "metrics.jsonl",
    [
      row(1, challenger__valid_rate=0.5, solver__kl__mean=0.0),
      row(2, challenger__valid_rate=None, solver__kl__mean=0.125),
      row(
        3,
        challenger__valid_rate=1.0,
        challenger__reward__mean=-0.1,
        solver__entropy__mean=2.0,
        challenger__logprob_gap__mean=0.25,
      ),
      row(4),
    ],
  )
  folder.append(
    "questions.jsonl",
    [
      row(iteration, success=success)
      for iteration, success in (
        (1, 0.0),
        (1, 0.25),
        (1, 0.25),
        (1, 1.0),
        (1, None),
        (3, 0.75),
        (4, None),
      )
    ],
  )
  folder.append("skills_history.jsonl", STORY)
  return folder


def curves(panel):
  return {c.label: (c.x.tolist(), c.y.tolist()) for c in panel.curves}


def test_panels_hold_the_numbers_of_the_files(folder):
  found = plots.panels(folder)
  assert tuple(found) == NAMES
  assert curves(found["accuracy"]) == {
    "real, bank none": ([0, 4], [0.25, 0.5]),
    "real, bank final": ([0], [0.75]),
    "other, bank none": ([4], [0.0]),
  }
  first = found["accuracy"].curves[0]
  assert (first.low.tolist(), first.high.tolist()) == ([0.1, 0.4], [0.5, 0.6])
  assert curves(found["valid_rate"]) == {"valid": ([1, 3], [0.5, 1.0])}
  assert curves(found["reward"]) == {"challenger": ([3], [-0.1])}
  assert curves(found["entropy"]) == {"solver": ([3], [2.0])}
  assert curves(found["kl"]) == {"solver": ([1, 2], [0.0, 0.125])}
  assert curves(found["logprob_gap"]) == {"challenger": ([3], [0.25])}


def test_success_is_a_histogram_an_iteration(folder):
  heat = plots.panels(folder)["success"].heat
  assert heat.x.tolist() == [1, 2, 3, 4]
  assert heat.y.tolist() == [0, 0.25, 0.5, 0.75, 1]
  nan = np.nan
  np.testing.assert_array_equal(
    heat.share.T,
    [[0.25, 0.5, 0, 0, 0.25], [nan] * 5, [0, 0, 0, 1, 0], [nan] * 5],
  )


def test_the_bank_stands_beside_noise(folder):
  found = plots.panels(folder)
  active = {c.label: c for c in found["bank"].curves}
  assert list(active) == ["active", "active, null"]
  null = active["active, null"]
  assert null.null
  assert not active["active"].null
  assert (null.low <= null.y).all()
  assert (null.y <= null.high).all()
  assert list(active["active"].x) == list(null.x) == [0, 1, 2, 3, 4]
  came = {c.label: c for c in found["bank_changes"].curves}
  nulls = {label: curve.null for label, curve in came.items()}
  assert nulls == {"admitted": False, "retired": False, "retired, null": True}
  # By hand: `a` retires and one is admitted in 1, `b` is evicted in 3.
  assert active["active"].y.tolist() == [3, 3, 3, 2, 2]
  assert came["admitted"].y.tolist() == [0, 1, 1, 1, 1]
  assert came["retired"].y.tolist() == [0, 1, 1, 1, 1]
  draws = history.null_curves(STORY, capacity=9, retire_after=2, last=4)
  for null, replays in (
    (active["active, null"], draws.active),
    (came["retired, null"], draws.retired),
  ):
    for place, of in enumerate(replays.T.tolist()):
      assert null.y[place] == pytest.approx(statistics.fmean(of))
      low, *_, high = statistics.quantiles(of, n=20, method="inclusive")
      assert null.low[place] == pytest.approx(low)
      assert null.high[place] == pytest.approx(high)


@pytest.mark.parametrize("lacking", ["rank", "usage"])
def test_a_history_without_what_noise_needs_is_drawn_alone(
  folder, lacking, caplog
):
  events = [
    {key: value for key, value in event.items() if key != lacking}
    for event in STORY
    if event["event"] != lacking
  ]
  found = plots.bank(events, last=4, capacity=9, retire_after=2)
  assert [c.label for c in found["bank"].curves] == ["active"]
  assert ("without a null curve" in caplog.text) == (lacking == "usage")


def test_pictures_show_the_panels(folder):
  found = plots.panels(folder)
  shown = {axes.get_title(): axes for axes in plots.draw(found).axes}
  for panel in found.values():
    axes = shown[panel.title]
    assert axes.get_ylabel() == panel.unit
    for line, curve in zip(axes.lines, panel.curves, strict=True):
      np.testing.assert_array_equal(line.get_xydata().T, [curve.x, curve.y])
    if panel.heat:
      (image,) = axes.images
      np.testing.assert_array_equal(
        np.ma.filled(image.get_array(), np.nan), panel.heat.share
      )
      # The middle of the lowest cell is at the first iteration and rate 0.
      left, right, bottom, top = image.get_extent()
      assert (left, right, bottom, top) == (0.5, 4.5, -0.125, 1.125)
      assert image.origin == "lower"  # of the array, the first row is rate 0


def test_a_place_without_a_panel_is_empty():
  x = np.array([1, 2])
  line = plots.Panel("a", "b", (plots.Curve("c", x, x / 2),))
  for count, on in ((1, [1]), (2, [1, 1]), (3, [1, 1, 1, 0])):
    axes = plots.draw({str(i): line for i in range(count)}).axes
    assert [a.axison for a in axes] == on


def test_a_run_is_plotted_into_its_folder(folder):
  out = io.StringIO()
  plots.main(folder.path, rich.console.Console(file=out, width=20))
  places = [folder.path / f"plots/{name}.png" for name in (*NAMES, "all")]
  assert out.getvalue().split() == list(map(str, places))
  for place in places:
    assert place.read_bytes().startswith(b"\x89PNG")


def test_a_run_of_one_evaluation_has_one_panel(tmp_path):
  folder = metrics.RunFolder(tmp_path)
  folder.write_json("eval.json", [cell(0, "none", 0.5, 0.2, 0.8)])
  assert [path.name for path in plots.plot_run(tmp_path)] == [
    "accuracy.png",
    "all.png",
  ]


def test_runs_with_nothing_to_plot(tmp_path):
  assert plots.plot_run(tmp_path) == []
  assert not (tmp_path / "plots").exists()
  with pytest.raises(ValueError, match="nothing to plot"):
    plots.main(tmp_path)
  with pytest.raises(ValueError, match="no such folder"):
    plots.main(tmp_path / "absent")
