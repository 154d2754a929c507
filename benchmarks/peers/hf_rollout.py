"""transformers' `generate`, PyTorch on a CPU, on the rollout workload."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import transformers

from benchmarks import sides, workload
from benchmarks.peers import turns

SETTINGS = dict(
  threads=0,  # 0: as many as there are cores
  group=64,  # rows of a call
  by_length=True,
  cache="static",  # or "dynamic", which is copied whenever it grows
  attention="sdpa",  # or "eager"
)
PAD = 0


def start(settings: dict[str, Any]) -> dict[str, sides.Order]:
  """Builds the model."""
  chosen = sides.merged(SETTINGS, settings)
  cores = len(os.sched_getaffinity(0))
  chosen["threads"] = chosen["threads"] or cores
  torch.set_num_threads(chosen["threads"])
  torch.manual_seed(0)
  episodes = workload.draw()
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
    attn_implementation=chosen["attention"],
  )
  model = transformers.Qwen3ForCausalLM(config).eval()
  assert {p.dtype for p in model.parameters()} == {torch.float32}

  @torch.inference_mode()
  def generate(contexts, steps, call):
    torch.manual_seed(call)
    width = max(map(len, contexts))
    ids = torch.full((len(contexts), width), PAD)
    mask = torch.zeros_like(ids)
    for row, context in enumerate(contexts):
      ids[row, width - len(context) :] = torch.tensor(context)
      mask[row, width - len(context) :] = 1
    out = model.generate(
      ids,
      attention_mask=mask,
      min_new_tokens=steps,
      max_new_tokens=steps,
      do_sample=True,
      temperature=1.0,
      top_k=0,
      top_p=1.0,
      pad_token_id=PAD,
      eos_token_id=None,
      cache_implementation=None
      if chosen["cache"] == "dynamic"
      else chosen["cache"],
      return_dict_in_generate=True,
      output_logits=True,
    )
    drawn = out.sequences[:, width:]
    logprobs = [
      torch.log_softmax(logits, -1).gather(1, drawn[:, step, None])[:, 0]
      for step, logits in enumerate(out.logits)
    ]
    return drawn.tolist(), torch.stack(logprobs, 1).tolist()

  def about() -> dict[str, Any]:
    return dict(
      settings=chosen,
      flops=workload.flops(shape, workload.work(episodes)),
      versions=dict(
        torch=torch.__version__, transformers=transformers.__version__
      ),
    )

  def play(run: int = 0) -> dict[str, Any]:
    began = time.perf_counter()
    kept = turns.play(
      episodes,
      lambda contexts, steps, call: generate(
        contexts, steps, 1000 * run + call
      ),
      chosen["group"],
      chosen["by_length"],
    )
    seconds = time.perf_counter() - began
    return dict(tokens=kept, seconds=seconds, compile_seconds=0.0)

  def warm() -> dict[str, Any]:
    """Nothing is compiled; threads and allocator get going."""
    began = time.perf_counter()
    generate([list(episode.prompt) for episode in episodes[:8]], 4, 0)
    return dict(seconds=time.perf_counter() - began, compile_seconds=0.0)

  return dict(start=about, play=play, warm=warm)


if __name__ == "__main__":
  sides.serve(start)
