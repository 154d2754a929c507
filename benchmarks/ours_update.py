"""The learner of this package on the update workload.

A side of `benchmarks.update`, run as `python -m benchmarks.ours_update`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import lessons as work
from benchmarks import sides, workload
from sesa_jax import types
from sesa_jax.learner import learner as learning
from sesa_jax.policy import attention, backbones, model, sharding

SETTINGS = dict(
  questions=16,
  rows=2,  # of a micro-batch
  row_multiple=256,
  chunk_tokens=512,
  attention="auto",
  remat=False,
)


def shape() -> backbones.Backbone:
  """Returns the architecture of the workload."""
  return backbones.Backbone(
    **dataclasses.asdict(workload.MODEL),
    tied=True,
    qk_norm=True,
    qkv_bias=False,
    context=4096,
  )


def learner(chosen: Mapping[str, Any]) -> learning.Learner:
  """Makes the learner: all that knows how one is made."""
  backbone = shape()
  kind = attention.resolve(
    chosen["attention"], "cpu", backbone.head_dim, jnp.float32
  )
  return learning.Learner(
    model.build(backbone),
    sharding.mesh(1, 1, jax.devices()[:1]),
    learning_rate=work.LEARNING_RATE,
    warmup_updates=0,
    minibatch_questions=chosen["questions"],
    clip_low=work.CLIP_LOW,
    clip_high=work.CLIP_HIGH,
    kl_coefficient=work.KL_COEFFICIENT,
    adam_b1=work.BETAS[0],
    adam_b2=work.BETAS[1],
    adam_eps=work.EPSILON,
    weight_decay=work.WEIGHT_DECAY,
    gradient_clip=work.GRADIENT_CLIP,
    microbatch_rows=chosen["rows"],
    row_multiple=chosen["row_multiple"],
    chunk_tokens=chosen["chunk_tokens"],
    compute_dtype="float32",
    attention=kind,
    remat=chosen["remat"],
  )


def taught(drawn: Sequence[work.Lesson]) -> list[types.Lesson]:
  """Returns the drawn lessons as the learner takes them."""
  return [
    types.Lesson(
      types.Episode(
        request_id=f"question-{one.question}",
        attempt=one.attempt,
        arm="benchmark",
        ids=np.asarray(one.ids, np.int32),
        prompt_length=one.prompt,
        mask=np.asarray(one.mask, bool),
        logprobs=np.where(one.mask, work.LOGPROB, 0.0).astype(np.float32),
        turns=(),
        finish="answer",
      ),
      one.advantage,
    )
    for one in drawn
  ]


def start(settings: dict[str, Any]) -> dict[str, sides.Order]:
  """Builds policy and reference."""
  chosen = sides.merged(SETTINGS, settings)
  compiled = sides.watch_compilation()
  drawn = work.draw(chosen["questions"])
  lessons, trained = taught(drawn), learner(chosen)
  reference = model.init(shape(), jax.random.key(0))
  state = dict(policy=trained.init(reference))

  def about() -> dict[str, Any]:
    return dict(
      settings=chosen,
      versions=dict(jax=jax.__version__, numpy=np.__version__),
    )

  def play(run: int = 0) -> dict[str, Any]:
    del run
    before, began = sum(compiled), time.perf_counter()
    burnt = time.process_time()
    state["policy"], metrics = trained.update(
      state["policy"], reference, lessons, temperature=work.TEMPERATURE
    )
    jax.block_until_ready(state["policy"])
    return dict(
      seconds=time.perf_counter() - began,
      cpu_seconds=time.process_time() - burnt,
      compile_seconds=sum(compiled) - before,
      tokens=work.tokens(drawn),
      padded=round(work.tokens(drawn) / (1 - metrics["padding_fraction"])),
      loss=metrics["loss"],
    )

  return dict(start=about, warm=play, play=play)


if __name__ == "__main__":
  sides.serve(start)
