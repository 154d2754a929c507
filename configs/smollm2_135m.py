"""SESA with real weights and real text on a laptop: the demo.

    python -m sesa_jax.main --config=configs/smollm2_135m.py --workdir=runs/demo

Shows the four stages on SmolLM2-135M-Instruct, which poses and answers
questions by searching 10,033 Wikipedia leads and the World Factbook. It proves
nothing about SESA: a model of 135M parameters rarely keeps to the format, two
iterations move it little, and 12 questions cannot tell two columns apart.
Expect few valid questions of its own, so that the replay pool's real ones feed
the solver, and single-digit numbers everywhere.

Differs from the paper to fit about 90,000 token-passes: one-hop seeds, few
attempts and turns, short episodes. To suit so small a model: a worked episode
in the prompt, of each skill its description alone, temperature 0.4, every
substantive failure recorded. And by what runs offline: the solver as the
evidence check's answerer, the offline distiller, BM25, all-MiniLM-L6-v2 with
its own admission threshold.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(variant: str = "sesa") -> ConfigDict:
  """Returns the locked config."""
  config = common.get_config()
  config.name = "smollm2_135m"
  config.iterations = 2
  config.questions = 3
  for role in (config.challenger, config.solver):
    role.temperature = 0.4
    role.turn_tokens = 48
    role.episode_tokens = 448
    role.learning_rate = 1e-5
    role.warmup_updates = 1
  config.challenger.turns = 3
  config.solver.turns = 2
  config.solver.group_size = 4
  config.policy.source = "gguf"
  config.policy.path = (
    "assets:smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf"
  )
  config.policy.compute_dtype = "float32"  # a CPU multiplies it faster
  config.policy.example = True
  config.policy.remat = False  # 3 GB more, a fifth of the update less
  config.mesh.fsdp = 1
  config.learner.microbatch_rows = 3
  config.learner.row_multiple = 448  # one length: one compilation
  config.learner.chunk_tokens = 256
  config.engine.slots = 12
  config.engine.prefill_chunk = 64
  config.environment.passages_per_search = 1
  config.environment.observation_tokens = 112
  config.environment.max_malformed = 1
  config.frontier.gate = "any_failure"
  config.verifier.answerer = "solver"
  config.verifier.tokens = 32
  config.verifier.max_tokens = 512
  config.verifier.probes = 0
  config.pool.fixed.triviaqa_dev = common.question_set(
    "assets:open-qa/topics.dpr.trivia.dev.txt", 12, answerable=True
  )
  config.pool.fixed.nq_dev = common.question_set(
    "assets:open-qa/topics.dpr.nq.dev.txt", 12, answerable=True
  )
  config.pool.keep_fixed = True
  config.bank.top = 1
  config.bank.block_tokens = 64
  config.bank.fields = ("description",)  # more of it, and it forgets the format
  config.encoder = common.minilm()
  config.distillation.distiller = "offline"
  config.judge.base_url = ""
  config.distillation.every = 1
  config.distillation.min_pending = 1
  config.distillation.passage_tokens = 400
  config.search.engine = "bm25"
  config.corpus = (
    "assets:wikipedia-leads/summaries_en-us.json",
    "assets:world-factbook",
  )
  config.seeds.source = "titles"
  config.seeds.path = ""
  config.seeds.hops = (1,)
  config.eval.every = 0
  config.eval.turns = 2
  config.eval.sets.triviaqa_test = common.question_set(
    "assets:open-qa/topics.dpr.trivia.test.txt", 6, answerable=True
  )
  config.eval.sets.nq_test = common.question_set(
    "assets:open-qa/topics.nq.test.txt", 6, answerable=True
  )
  config.checkpoint.milestone_every = 0
  return common.finish(config, variant)
