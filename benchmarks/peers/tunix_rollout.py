"""Tunix's sampler, JAX on a CPU, on the rollout workload."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import time
from typing import Any

import jax.numpy as jnp
from tunix.generate import sampler as sampler_lib
from tunix.models import dummy_model_creator
from tunix.models.qwen3 import model as qwen3

from benchmarks import sides, workload
from benchmarks.peers import turns

SETTINGS = dict(
  group=64,  # rows of a call
  by_length=True,
  bucket=128,  # prompts are padded to a multiple of it
  cache=0,  # positions of the cache; 0: as many as the call fills
)
PAD, NEVER = 0, workload.MODEL.vocab_size - 1


class Ids:
  """A tokenizer whose text is the ids themselves: the sampler takes text."""

  def encode(self, text: str, **_: Any) -> list[int]:
    """Reads ids."""
    return [int(word) for word in text.split()]

  def decode(self, ids: list[int], **_: Any) -> str:
    """Returns nothing: nobody reads it."""
    del ids
    return ""

  def bos_id(self) -> int:
    """Returns 0: no id is put before a prompt."""
    return 0

  def eos_id(self) -> int:
    """Returns the id that is never sampled."""
    return NEVER

  def pad_id(self) -> int:
    """Returns the id of padding."""
    return PAD


class Calls:
  """Calls of the sampler: one of a cache size each, over the same weights."""

  def __init__(self, chosen: dict[str, Any]):
    self._chosen = chosen
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
    model = dummy_model_creator.create_dummy_model(
      qwen3.Qwen3, config, dtype=jnp.float32
    )

    @functools.cache
    def sampler(cache: int) -> sampler_lib.Sampler:
      sizes = sampler_lib.CacheConfig(
        cache, shape.layers, shape.kv_heads, shape.head_dim
      )
      return sampler_lib.Sampler(model, Ids(), sizes)

    self._sampler = sampler
    self.one_step = False

  def generate(self, contexts, steps, call):
    """Samples `steps` ids of each context."""
    width = max(map(len, contexts))
    width = -(-width // self._chosen["bucket"]) * self._chosen["bucket"]
    sampler = self._sampler(self._chosen["cache"] or width + steps)
    if self.one_step:
      _stop_early(sampler)
    out = sampler(
      [" ".join(map(str, context)) for context in contexts],
      max_generation_steps=steps,
      max_prompt_length=width,
      temperature=1.0,
      top_p=1.0,
      seed=call,
      eos_tokens=[NEVER],
      # The sampler takes the id of padding in a prompt for padding.
      forbidden_tokens=[PAD, NEVER],
      return_logprobs=True,
    )
    vars(sampler).pop("init_sample_state", None)
    return [ids.tolist() for ids in out.tokens], out.logprobs


def _stop_early(sampler: sampler_lib.Sampler) -> None:
  """Makes the next call compile the programs that it wants, but run a step."""
  whole = sampler.init_sample_state

  def short(*arguments: Any, **named: Any) -> Any:
    state = whole(*arguments, **named)
    # An int as before: a numpy one would be another type to jit.
    steps = int(state.num_input_tokens) + 2
    return dataclasses.replace(state, total_sampling_steps=steps)

  sampler.init_sample_state = short


def start(settings: dict[str, Any]) -> dict[str, sides.Order]:
  """Builds the model."""
  chosen = sides.merged(SETTINGS, settings)
  compiled = sides.watch_compilation()
  calls = Calls(chosen)
  episodes = workload.draw()

  def about() -> dict[str, Any]:
    names = ("google-tunix", "jax", "flax")
    return dict(
      settings=chosen,
      flops=workload.flops(workload.MODEL, workload.work(episodes)),
      versions={name: importlib.metadata.version(name) for name in names},
    )

  def play(run: int = 0, one_step: bool = False) -> dict[str, Any]:
    calls.one_step = one_step
    before, began = sum(compiled), time.perf_counter()
    kept = turns.play(
      episodes,
      lambda contexts, steps, call: calls.generate(
        contexts, steps, 1000 * run + call
      ),
      chosen["group"],
      chosen["by_length"],
    )
    return dict(
      seconds=time.perf_counter() - began,
      compile_seconds=sum(compiled) - before,
      tokens=kept,
    )

  def warm() -> dict[str, Any]:
    """Compiles all programs; each runs a step."""
    return play(one_step=True)

  return dict(start=about, warm=warm, play=play)


if __name__ == "__main__":
  sides.serve(start)
