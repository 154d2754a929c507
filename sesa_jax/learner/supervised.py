"""Supervised fine-tuning: its loss, its batches, its schedule and optimizers.

A policy imitates episodes, whoever wrote them. Programs, rows and logprobs are
those of the policy's own update; what differs stands here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jaxtyping import Array, Float

from sesa_jax import types
from sesa_jax.learner import grpo, packing

_WINDOW = 1024  # episodes that are packed together
_LOSS = "dapo"  # of `grpo.LOSSES`: all tokens count alike

Line = list[tuple[int, types.Lesson]]  # what a row holds


def next_token_loss(
  logprobs: Float[Array, "B T"],
  weights: Float[Array, "B T"],
  shares: Float[Array, "B T"],
) -> grpo.Sums:
  """The cross-entropy of the policy's own tokens, as sums.

    loss = - sum_t weight_t log p(id_t | ids before it) / sum_t share_t

  over a whole batch, micro-batches and devices together, with weight and share
  1 for own tokens and 0 for all others: the mean over own tokens.

  Args:
    logprobs: of the ids, at temperature 1.
    weights: of each token.
    shares: of each token in what divides the loss.
  """
  sums = grpo.zero_sums()
  loss = -jnp.sum(jnp.where(weights != 0, weights * logprobs, 0.0))
  return sums._replace(
    loss=loss, weight=jnp.sum(shares), tokens=jnp.sum(shares)
  )


def rate(
  step: int, *, steps: int, peak: float, warmup: int, decay: float
) -> float:
  """The learning rate of a step: up in a line, level, down in a line.

    peak min(1, (step + 1) / warmup) min(1, (steps - step) / (decay steps))

  Args:
    step: from 0.
    steps: of the whole run.
    peak: between the two.
    warmup: steps until there; 0 is none.
    decay: share of the steps, at the end, over which it falls towards 0.
  """
  up = (step + 1) / max(warmup, 1)
  down = (steps - step) / max(decay * steps, 1e-9)
  return peak * min(1.0, up) * min(1.0, down)


# --- batches -----------------------------------------------------------------


def lines(
  lessons: Sequence[tuple[int, types.Lesson]],
  *,
  length: int,
  seed: int,
  epochs: int | None = None,
) -> Iterator[tuple[int, Line]]:
  """Yields what rows hold, in an order that seed and epoch give alone.

  Each epoch is shuffled anew; of its order a thousand episodes at a time are
  packed, and their rows shuffled, since packing sorts by length.

  Args:
    lessons: with their numbers; none longer than a row.
    length: of a row, in tokens.
    seed: of the order.
    epochs: after which it ends; None is never.

  Yields:
    The epoch, from 0, and the lessons of one row.
  """
  for epoch in itertools.count() if epochs is None else range(epochs):
    random = np.random.default_rng((seed, epoch))
    order = random.permutation(len(lessons))
    for start in range(0, len(order), _WINDOW):
      part = [lessons[i] for i in order[start : start + _WINDOW]]
      packed = packing.fit(sorted(part, key=packing.size), length)
      for row in random.permutation(len(packed)):
        yield epoch, packed[row]


def batches(
  found: Sequence[Line], *, rows: int, length: int
) -> list[packing.Batch]:
  """Lays one step's rows out in micro-batches of one shape.

  Args:
    found: of `lines`; what is missing to whole micro-batches is padding.
    rows: of a micro-batch.
    length: of a row.
  """
  return [
    packing.batch(
      found[start : start + rows],
      rows=rows,
      row_multiple=length,
      loss=_LOSS,
      most_tokens=1,
    )
    for start in range(0, len(found), rows)
  ]


# --- optimizers --------------------------------------------------------------


def _adamw(b1: float, b2: float, eps: float, moments: str) -> Any:
  return optax.scale_by_adam(b1, b2, eps, mu_dtype=moments)


def _muon(b1: float, b2: float, eps: float, moments: str) -> Any:
  """Muon on the matrices of the layers, Adam on all else.

  Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural
  networks".
  """
  return optax.contrib.muon(
    -1.0,  # optax turns the sign; `apply` does too, and scales by the rate
    adam_b1=b1,
    adam_b2=b2,
    eps=eps,
    mu_dtype=moments,
    muon_weight_dimension_numbers=matrices,
  )


# By name: from Adam's three numbers and the dtype of moments.
OPTIMIZERS: Mapping[str, Callable[[float, float, float, str], Any]] = {
  "adamw": _adamw,
  "muon": _muon,
}


def matrices(params: Any) -> Any:
  """Says of each leaf which axes are a matrix, [in, out], for Muon.

  Kernels are stacked, [L, in, out], and each layer's is one of its own. Tables
  of ids are no matrices in this sense, and a stack of norms or biases, [L, D],
  only looks like one: None.
  """

  def axes(path: Any, _: Any) -> Any:
    if jax.tree_util.keystr(path, simple=True).endswith("kernel"):
      return optax.contrib.MuonDimensionNumbers(1, 2)
    return None

  return jax.tree_util.tree_map_with_path(axes, params)
