"""Tunix's GRPO step, JAX on a CPU, on the update workload.

Its loss and logprobs, its trainer's step with accumulated gradients. Prompts
are padded on the left and what follows them on the right, as it wants them.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models import dummy_model_creator
from tunix.models.qwen3 import model as qwen3
from tunix.rl import algo_core, common
from tunix.rl.grpo import grpo_learner

from benchmarks import lessons as work
from benchmarks import sides, workload

SETTINGS = dict(
  questions=16,
  rows=4,  # of a micro-batch
  by_length=True,
  bucket=256,  # what follows a prompt is padded to a multiple of it
)
PAD, NEVER = 0, workload.MODEL.vocab_size - 1


class Config(grpo_learner.GRPOConfig):
  """The recipe, with what the loss asks for and the class does not name."""

  epsilon_high = work.CLIP_HIGH
  temperature = work.TEMPERATURE


def model() -> nnx.Module:
  """Makes the model of the workload, float32."""
  shape = workload.MODEL
  config = qwen3.ModelConfig(
    num_layers=shape.layers,
    vocab_size=shape.vocab_size,
    embed_dim=shape.dim,
    hidden_dim=shape.ffn,
    num_heads=shape.heads,
    head_dim=shape.head_dim,
    num_kv_heads=shape.kv_heads,
    rope_theta=int(shape.rope_theta),
    norm_eps=shape.norm_eps,
    use_tied_embedding=True,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
  )
  return dummy_model_creator.create_dummy_model(
    qwen3.Qwen3, config, dtype=jnp.float32
  )


def batch(
  lessons: Sequence[work.Lesson], prompt: int, bucket: int
) -> dict[str, np.ndarray]:
  """Pads a micro-batch to prompts of a length, and the rest to a bucket."""
  longest = max(len(one.ids) - one.prompt for one in lessons)
  shape = len(lessons), -(-longest // bucket) * bucket
  prompts = np.full((len(lessons), prompt), PAD, np.int32)
  ids, mask = np.full(shape, PAD, np.int32), np.zeros(shape, np.int32)
  for row, one in enumerate(lessons):
    prompts[row, prompt - one.prompt :] = one.ids[: one.prompt]
    ids[row, : len(one.ids) - one.prompt] = one.ids[one.prompt :]
    mask[row, : len(one.ids) - one.prompt] = one.mask[one.prompt :]
  return dict(
    prompt_ids=prompts,
    prompt_mask=(prompts != PAD).astype(np.int32),
    completion_ids=ids,
    completion_mask=mask,
    advantages=np.array([one.advantage for one in lessons], np.float32),
  )


def start(settings: dict[str, Any]) -> dict[str, sides.Order]:
  """Builds policy, reference and optimizer."""
  chosen = sides.merged(SETTINGS, settings)
  compiled = sides.watch_compilation()
  drawn = list(work.draw(chosen["questions"]))
  if chosen["by_length"]:
    drawn.sort(key=lambda one: len(one.ids))
  prompt = max(one.prompt for one in drawn)
  batches = [
    batch(drawn[i : i + chosen["rows"]], prompt, chosen["bucket"])
    for i in range(0, len(drawn), chosen["rows"])
  ]
  config = Config(
    beta=work.KL_COEFFICIENT,
    epsilon=work.CLIP_LOW,
    kl_loss_mode="low_var_kl",
    num_generations=4,
  )
  policy = model()
  graphdef, reference = nnx.split(policy)
  reference = jax.tree.map(jnp.copy, reference)
  optimizer = nnx.Optimizer(
    policy,
    optax.MultiSteps(
      optax.chain(
        optax.clip_by_global_norm(work.GRADIENT_CLIP),
        optax.adamw(
          work.LEARNING_RATE,
          *work.BETAS,
          eps=work.EPSILON,
          weight_decay=work.WEIGHT_DECAY,
        ),
      ),
      len(batches),
    ),
    wrt=nnx.Param,
  )

  def step(policy, optimizer, example):
    def loss(policy):
      return algo_core.grpo_loss_fn(policy, example, config, PAD, NEVER)

    (value, _), gradient = nnx.value_and_grad(loss, has_aux=True)(policy)
    norm = optax.global_norm(gradient)
    optimizer.update(policy, gradient)
    return value, norm

  jitted = nnx.jit(step, donate_argnames=("optimizer",))

  def about() -> dict[str, Any]:
    names = ("google-tunix", "jax", "flax")
    return dict(
      settings=chosen,
      versions={name: importlib.metadata.version(name) for name in names},
    )

  def play(run: int = 0) -> dict[str, Any]:
    del run
    before, began = sum(compiled), time.perf_counter()
    burnt, losses = time.process_time(), []
    for arrays in batches:
      arrays = jax.tree.map(jnp.asarray, arrays)
      base = common.compute_per_token_logps(
        graphdef,
        reference,
        arrays["prompt_ids"],
        arrays["completion_ids"],
        PAD,
        NEVER,
      )
      example = common.TrainExample(
        **arrays, ref_per_token_logps=base, old_per_token_logps=None
      )
      loss, _ = jitted(policy, optimizer, example)
      losses.append(float(loss))
    jax.block_until_ready(nnx.state(policy))
    return dict(
      seconds=time.perf_counter() - began,
      cpu_seconds=time.process_time() - burnt,
      compile_seconds=sum(compiled) - before,
      tokens=work.tokens(drawn),
      padded=sum(
        one["prompt_ids"].size + one["completion_ids"].size for one in batches
      ),
      loss=float(np.mean(losses)),
    )

  return dict(start=about, warm=play, play=play)


if __name__ == "__main__":
  sides.serve(start)
