"""One GRPO update in PyTorch with transformers' model, on the update workload.

As TRL does it: padded micro-batches, logits of all that follows the prompt,
the reference under `no_grad`, gradients accumulated over the micro-batches.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from benchmarks import lessons as work
from benchmarks import sides, workload

SETTINGS = dict(
  questions=16,
  threads=0,  # 0: as many as there are cores
  rows=4,  # of a micro-batch
  by_length=True,
  attention="sdpa",  # or "eager"
  logits="completion",  # or "sampled": of sampled ids alone
  checkpointing=False,
)
PAD = 0


def model(attention: str) -> torch.nn.Module:
  """Makes the model of the workload, float32."""
  shape = workload.MODEL
  config = transformers.Qwen3Config(
    vocab_size=shape.vocab_size,
    hidden_size=shape.dim,
    intermediate_size=shape.ffn,
    num_hidden_layers=shape.layers,
    num_attention_heads=shape.heads,
    num_key_value_heads=shape.kv_heads,
    head_dim=shape.head_dim,
    rms_norm_eps=shape.norm_eps,
    rope_parameters=dict(rope_type="default", rope_theta=shape.rope_theta),
    tie_word_embeddings=True,
    max_position_embeddings=4096,
    attn_implementation=attention,
    use_cache=False,
  )
  made = transformers.Qwen3ForCausalLM(config).train()
  assert {p.dtype for p in made.parameters()} == {torch.float32}
  return made


def micro_batches(
  drawn: Sequence[work.Lesson], rows: int, by_length: bool
) -> list[list[work.Lesson]]:
  """Puts lessons together, neighbours in length if asked to."""
  if by_length:
    drawn = sorted(drawn, key=lambda lesson: len(lesson.ids))
  return [list(drawn[i : i + rows]) for i in range(0, len(drawn), rows)]


class Batch:
  """A micro-batch, padded on the right."""

  def __init__(self, lessons: Sequence[work.Lesson]):
    width = max(len(lesson.ids) for lesson in lessons)
    shape = len(lessons), width
    self.ids = torch.full(shape, PAD)
    self.read = torch.zeros(shape, dtype=torch.long)
    self.mask = torch.zeros(shape)
    for row, lesson in enumerate(lessons):
      size = len(lesson.ids)
      self.ids[row, :size] = torch.tensor(lesson.ids)
      self.read[row, :size] = 1
      self.mask[row, :size] = torch.tensor(lesson.mask)
    # What no row samples needs no logits.
    self.start = min(lesson.prompt for lesson in lessons)
    self.mask = self.mask[:, self.start :]
    self.advantages = torch.tensor([[one.advantage] for one in lessons])


def logprobs(
  model: torch.nn.Module, batch: Batch, only_sampled: bool
) -> tuple[torch.Tensor, torch.Tensor]:
  """Returns logprobs of the ids from `batch.start` on, and entropies."""
  hidden = model.model(batch.ids, attention_mask=batch.read).last_hidden_state
  hidden = hidden[:, batch.start - 1 : -1]
  targets = batch.ids[:, batch.start :]
  if only_sampled:
    where = batch.mask > 0
    found = _scored(model.lm_head(hidden[where]), targets[where])
    zeros = torch.zeros(batch.mask.shape)
    return tuple(zeros.masked_scatter(where, x) for x in found)
  return _scored(model.lm_head(hidden), targets)


def _scored(logits, targets):
  logits = logits / work.TEMPERATURE
  chosen = logits.gather(-1, targets[..., None])[..., 0]
  # A row at a time, as TRL does: no second copy of all logits.
  sums = torch.stack([torch.logsumexp(row, -1) for row in logits])
  with torch.no_grad():
    entropy = []
    for row in logits.flatten(0, -2).split(128):
      q = torch.log_softmax(row, -1)
      entropy.append(-(q.exp() * q).sum(-1))
  return chosen - sums, torch.cat(entropy).reshape(targets.shape)


def loss_sum(new, reference, batch: Batch) -> torch.Tensor:
  """Returns the sum over rows of their means over sampled ids."""
  old = new.detach()
  ratio = torch.exp(new - old)
  bound = ratio.clamp(1 - work.CLIP_LOW, 1 + work.CLIP_HIGH)
  gain = torch.min(ratio * batch.advantages, bound * batch.advantages)
  gain = gain * torch.exp(old - work.LOGPROB).clamp(max=2.0)
  d = reference - new
  kl = torch.exp(d) - d - 1
  tokens = (work.KL_COEFFICIENT * kl - gain) * batch.mask
  return (tokens.sum(1) / batch.mask.sum(1)).sum()


def start(settings: dict[str, Any]) -> dict[str, sides.Order]:
  """Builds policy, reference and optimizer."""
  chosen = sides.merged(SETTINGS, settings)
  cores = len(os.sched_getaffinity(0))
  chosen["threads"] = chosen["threads"] or cores
  torch.set_num_threads(chosen["threads"])
  torch.manual_seed(0)
  drawn = work.draw(chosen["questions"])
  policy = model(chosen["attention"])
  reference = copy.deepcopy(policy).requires_grad_(False)
  if chosen["checkpointing"]:
    policy.gradient_checkpointing_enable()
  optimizer = torch.optim.AdamW(
    policy.parameters(),
    lr=work.LEARNING_RATE,
    betas=work.BETAS,
    eps=work.EPSILON,
    weight_decay=work.WEIGHT_DECAY,
    fused=True,
  )
  batches = [
    Batch(lessons)
    for lessons in micro_batches(drawn, chosen["rows"], chosen["by_length"])
  ]
  only_sampled = chosen["logits"] == "sampled"

  def about() -> dict[str, Any]:
    return dict(
      settings=chosen,
      versions=dict(
        torch=torch.__version__, transformers=transformers.__version__
      ),
    )

  def play(run: int = 0, batches: Sequence[Batch] = batches) -> dict[str, Any]:
    del run
    began, burnt, total = time.perf_counter(), time.process_time(), 0.0
    for batch in batches:
      with torch.no_grad():
        base, _ = logprobs(reference, batch, only_sampled)
      new, _ = logprobs(policy, batch, only_sampled)
      loss = loss_sum(new, base, batch) / len(drawn)
      loss.backward()
      total += float(loss.detach())
      del new, base, loss
    torch.nn.utils.clip_grad_norm_(policy.parameters(), work.GRADIENT_CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return dict(
      seconds=time.perf_counter() - began,
      cpu_seconds=time.process_time() - burnt,
      compile_seconds=0.0,
      tokens=work.tokens(drawn),
      padded=sum(batch.ids.numel() for batch in batches),
      loss=total,
    )

  def warm() -> dict[str, Any]:
    """Nothing is compiled; threads and allocator get going."""
    return play(batches=batches[:1])

  return dict(start=about, warm=warm, play=play)


if __name__ == "__main__":
  sides.serve(start)
