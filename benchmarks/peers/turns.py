"""How a sampler that keeps nothing between calls plays several turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.workload import Episode

# (contexts, ids to sample of each, number of the call) -> ids, logprobs
Generate = Callable[
  [list[list[int]], int, int], tuple[list[list[int]], list[list[float]]]
]


def play(
  episodes: Sequence[Episode], generate: Generate, group: int, by_length: bool
) -> int:
  """Plays turn by turn, each from the whole context so far.

  All rows of a call sample as many ids as the one that wants most; what the
  others draw beyond their turn's end is thrown away.

  Args:
    episodes: of the workload.
    generate: the sampler.
    group: rows of a call at most.
    by_length: put contexts of similar length together, so that less is
      padding. How much a row will sample is not known in advance.

  Returns:
    The useful ids: those sampled and kept.
  """
  contexts = [list(episode.prompt) for episode in episodes]
  kept, calls = 0, 0
  for turn in range(max(len(episode.turns) for episode in episodes)):
    active = [i for i, e in enumerate(episodes) if turn < len(e.turns)]
    if by_length:
      active.sort(key=lambda i: len(contexts[i]))
    for start in range(0, len(active), group):
      rows = active[start : start + group]
      forced = [episodes[i].turns[turn] for i in rows]
      ids, logprobs = generate(
        [contexts[i] for i in rows], max(f.sample for f in forced), calls
      )
      calls += 1
      for i, own, chosen, scores in zip(
        rows, forced, ids, logprobs, strict=True
      ):
        assert min(len(chosen), len(scores)) >= own.sample
        contexts[i] += chosen[: own.sample]
        contexts[i] += own.observation
        kept += own.sample
  return kept
