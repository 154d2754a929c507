"""The update benchmark: its lessons, its sides' loss, its arithmetic."""

import io

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks import lessons, ours_update, update, workload
from benchmarks.peers import torch_update
from benchmarks.sides import Side
from sesa_jax.learner import grpo, packing


def test_lessons_are_the_workloads_episodes():
  drawn, episodes = lessons.draw(4), workload.draw(4)
  assert lessons.draw(4) == drawn
  assert lessons.tokens(drawn) == sum(e.length for e in episodes)
  assert len({one.advantage for one in drawn}) == 16
  for one, episode in zip(drawn, episodes, strict=True):
    ids, mask = np.array(one.ids), np.array(one.mask)
    assert tuple(ids[: one.prompt]) == episode.prompt
    assert not mask[: one.prompt].any()
    assert mask.sum() == episode.sampled
    observed = sum((turn.observation for turn in episode.turns), ())
    assert tuple(ids[one.prompt :][~mask[one.prompt :]]) == observed
    assert (one.question, one.attempt < 4) == (episode.question, True)


def test_flops_by_hand(monkeypatch):
  one = lessons.Lesson(0, 0, 2, (1, 2, 3), (False, False, True), 1.0)
  shape = workload.Shape(
    layers=2,
    vocab_size=10,
    dim=4,
    ffn=3,
    heads=2,
    kv_heads=1,
    head_dim=2,
    rope_theta=1.0,
    norm_eps=1.0,
  )
  monkeypatch.setattr(workload, "MODEL", shape)
  kernels = 4 * 2 * (2 + 1 + 1 + 2) + 3 * 4 * 3
  layers = 2 * 2 * kernels * 3  # layers, multiply-add, kernels, tokens
  attention = 2 * 4 * (1 + 2 + 3) * 2 * 2  # layers, two products, pairs, N H
  assert lessons.flops([one]) == 4 * (layers + attention + 2 * 4 * 10)


def test_the_peer_has_our_loss():
  drawn = lessons.draw(1)[:3]
  theirs = torch_update.Batch(drawn)
  rng = np.random.default_rng(0)
  new = rng.normal(lessons.LOGPROB, 0.5, theirs.mask.shape)
  base = new + rng.normal(0, 0.5, new.shape)
  tensor = torch.tensor(new, requires_grad=True)
  loss = torch_update.loss_sum(tensor, torch.tensor(base), theirs)
  loss.backward()

  batch = packing.pack(
    [(0, lesson) for lesson in ours_update.taught(drawn)],
    rows=3,
    row_multiple=64,
    loss="grpo",
    most_tokens=1,
    packed=False,
  )[0]
  order = np.argsort([len(one.ids) for one in drawn], kind="stable")
  grids = np.zeros((2, *batch.ids.shape))
  start, width = theirs.start, new.shape[1]
  grids[:, :, start : start + width] = np.stack([new, base])[:, order]
  sums = grpo.policy_loss(
    jnp.asarray(grids[0]),
    jnp.asarray(grids[0]),
    batch.engine,
    jnp.asarray(grids[1]),
    jnp.zeros_like(batch.engine),
    batch.advantages,
    batch.weights,
    batch.shares,
    batch.mask,
    batch.segments,
    ratio="token",
    clip_low=lessons.CLIP_LOW,
    clip_high=lessons.CLIP_HIGH,
    kl_coefficient=lessons.KL_COEFFICIENT,
    entropy_coefficient=0.0,
    importance_cap=2.0,
  )
  assert float(sums.weight) == pytest.approx(3)
  assert float(sums.loss) == pytest.approx(loss.item(), rel=1e-5)
  assert (tensor.grad[theirs.mask == 0] == 0).all()
  assert (tensor.grad[theirs.mask > 0] != 0).any()


def test_our_learner_takes_the_lessons():
  chosen = ours_update.SETTINGS | dict(questions=2)
  learner = ours_update.learner(chosen)
  assert learner.attention == "blocks"
  batches = packing.pack(
    [(0, lesson) for lesson in ours_update.taught(lessons.draw())],
    rows=chosen["rows"],
    row_multiple=chosen["row_multiple"],
    loss="grpo",
    most_tokens=1,
    packed=True,
  )
  assert packing.padding_fraction(batches) < 0.06


class Played:
  """A side whose seconds are given."""

  def __init__(self, side):
    self.side, self.about = side, dict(settings={}, versions={})
    self.seconds = iter(side.settings["seconds"])

  def __enter__(self):
    return self

  def __exit__(self, *_):
    pass

  def ask(self, order, **_):
    return dict(
      seconds=next(self.seconds) if order == "play" else 9.0,
      cpu_seconds=2.0,
      compile_seconds=0.0 if order == "play" else 7.0,
      tokens=100,
      padded=self.side.settings["padded"],
      loss=0.0,
      peak_rss_bytes=10**9,
    )


def test_ratios_are_of_the_best_runs():
  sides = [
    Side("ours", "", dict(seconds=[2.0, 1.0, 4.0], padded=125)),
    Side("torch", "", dict(seconds=[5.0, 2.0, 4.0], padded=200)),
  ]
  report = update.measure(sides, 3, 2, start=Played)
  ours, theirs = report["sides"]
  assert ours["tokens_per_second"] == dict(best=100, median=50, least=25)
  assert theirs["ours_is"] == 2
  assert theirs["ours_is_padded"] == 125 / 100
  assert ours["padding_fraction"] == pytest.approx(0.2)
  assert ours["compile_seconds"] == 7
  work = lessons.flops(lessons.draw(2))
  assert ours["flops_per_second"] == pytest.approx(work)
  shown = Console(file=io.StringIO(), width=200)
  shown.print(update.table(report, "title"))
  assert "2.00 x" in shown.file.getvalue()


def test_unknown_sides_and_settings_are_refused(capsys):
  for arguments in (["--peers=tf"], ["--set=hf.rows=2"], ["--runs=0"]):
    with pytest.raises(SystemExit):
      update.main(arguments)
  assert "torch, tunix" in capsys.readouterr().err
