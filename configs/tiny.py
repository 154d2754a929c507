"""The whole loop on random weights: for tests, and to step through the code.

    python -m sesa_jax.main --config=configs/tiny.py --workdir=runs/tiny

Shows that every stage runs and that what flows between them is whole. The
policy babbles, so nothing is learned. Costs about a second an iteration on two
cores once compiled. Expect no valid question and no right answer: the solver
plays the replay pool's questions.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(variant: str = "sesa") -> ConfigDict:
  """Returns the locked config."""
  config = common.get_config()
  config.name = "tiny"
  config.iterations = 2
  config.questions = 3
  for role in (config.challenger, config.solver):
    role.turns = 3
    role.turn_tokens = 24
    role.episode_tokens = 768
    role.learning_rate = 1e-3
    role.warmup_updates = 1
  config.solver.group_size = 4
  config.policy.source = "random"
  config.policy.compute_dtype = "float32"
  config.policy.remat = False
  config.mesh.fsdp = 1
  config.learner.microbatch_rows = 4
  config.learner.row_multiple = 768
  config.learner.chunk_tokens = 256
  config.engine.slots = 6
  config.engine.steps_per_dispatch = 16
  config.engine.prefill_chunk = 64
  config.environment.passages_per_search = 1
  config.environment.observation_tokens = 96
  config.verifier.answerer = "solver"
  config.verifier.tokens = 16
  config.verifier.max_tokens = 768
  config.pool.fixed.tiny_pool = common.question_set("tests/world/pool.jsonl", 0)
  config.pool.keep_fixed = True
  config.bank.block_tokens = 200
  config.encoder = common.encoder("hash", 0.93)
  config.distillation.distiller = "offline"
  config.judge.base_url = ""
  config.distillation.every = 1
  config.distillation.min_pending = 1
  config.distillation.passage_tokens = 200
  config.search.engine = "bm25"
  config.search.passage_words = 40
  config.corpus = ("tests/world/corpus.jsonl",)
  config.seeds.source = "titles"
  config.seeds.path = ""
  config.seeds.hops = (1,)
  config.eval.every = 0
  config.eval.turns = 2
  config.eval.sets.tiny_eval = common.question_set("tests/world/eval.jsonl", 4)
  config.alarms.entropy_most = 100.0  # a policy that babbles is meant
  config.alarms.malformed = 1.0
  config.checkpoint.milestone_every = 2
  return common.finish(config, variant)
