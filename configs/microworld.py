"""A million parameters learn to search a small invented world, on a CPU.

    python -m sesa_jax.main --mode=sft --workdir=runs/warm0 \
      --config=configs/microworld.py:warm_start
    python -m sesa_jax.main --config=configs/microworld.py --workdir=runs/micro0

Shows the whole method learn: both policies, the bank, the offline distiller, by
the code of the real runs. The first command imitates scripted episodes, for
minutes; the second plays and learns. World, warm start and run follow
`--config.seed`; what they need is made where it is missing. See
docs/microworld.md for the world, costs and what came out.
"""

from ml_collections import ConfigDict, FieldReference
from ml_collections.config_dict import _Op

from configs import common
from sesa_jax.data import microworld


def get_config(variant: str = "sesa") -> ConfigDict:
  """Returns the locked config; `warm_start` is the one for `--mode=sft`."""
  config = common.get_config()
  config.name = "microworld"
  config.iterations = 40
  config.questions = 32
  for role in (config.challenger, config.solver):
    role.turns = 5
    role.turn_tokens = 48
    role.episode_tokens = 288
    role.learning_rate = 1.5e-4
    role.warmup_updates = 1
    role.kl_coefficient = 0.001
  # At the solver's pace it forgets how to ask, once few questions pay.
  config.challenger.learning_rate = 1e-4
  config.challenger.kl_coefficient = 0.01
  config.policy.template = "bare"
  config.policy.compute_dtype = "float32"
  config.policy.remat = False
  config.mesh.fsdp = 1
  config.learner.microbatch_rows = 4
  config.learner.row_multiple = 576
  config.learner.chunk_tokens = 2304
  config.engine.slots = 80
  config.engine.steps_per_dispatch = 48
  config.engine.prefill_chunk = 1024
  config.engine.page_size = 96
  config.environment.passages_per_search = 1
  config.environment.observation_tokens = 96
  config.environment.max_query_characters = microworld.QUERY
  config.verifier.answerer = "solver"
  config.verifier.noise = 0  # a million parameters mix up two articles
  config.verifier.tokens = 64
  config.verifier.max_tokens = 288
  config.verifier.probes = 4
  config.bank.top = 2
  config.bank.block_tokens = 96
  config.bank.fields = ("trigger", "templates")
  config.encoder = common.encoder("hash:1024", 0.9)
  config.distillation.distiller = "offline"
  config.distillation.passage_tokens = 200
  config.judge.base_url = ""
  config.search.engine = "bm25"
  config.seeds.hops = (1, 2)
  config.eval.turns = 5
  config.alarms.entropy_most = 3.0
  _name_files(config)
  if variant == "warm_start":
    _imitate(config)
    return common.finish(config, "sesa")
  if variant in ("search_r1", "fixed_questions"):
    for hops in (1, 2):
      name = f"train_{hops}"
      config.pool.fixed[name] = common.question_set("", 0)
      config.pool.fixed[name].path = _file(config, f"{name}.jsonl")
  return common.finish(config, variant)


def _imitate(config: ConfigDict) -> None:
  """Begins from nothing, and writes what the runs begin with."""
  config.policy.source = "random"
  config.policy.path = _file(config, "blank")
  config.sft.episodes = _file(config, "episodes.jsonl")
  config.sft.out = _file(config, "policy")
  config.sft.batch_tokens = 1728
  config.sft.optimizer = "muon"
  config.sft.learning_rate = 3e-3
  config.sft.warmup_steps = 30
  config.sft.decay = 0.5
  config.sft.log_every = 50
  config.sft.validate_every = 500
  # The study takes the last of these that is within its gate.
  config.sft.checkpoint_every = 50
  config.checkpoint.keep = 5


def _name_files(config: ConfigDict) -> None:
  """Names the files of the world of `seed`, also of one given later."""
  config.policy.path = _file(config, "policy")
  # A reference to an int cannot be cast to a tuple, which a flag may replace.
  corpus = _Op(lambda _, path: (path,), [_file(config, "corpus.jsonl")])
  config.corpus = FieldReference((), op=corpus)
  config.seeds.path = _file(config, "seeds.jsonl")
  config.bank.prime = "mined:" + _file(config, "skills.jsonl")
  for name in ("taught_1", "taught_2", "held_out_1", "held_out_2"):
    config.eval.sets[name] = common.question_set("", 0)
    config.eval.sets[name].path = _file(config, f"{name}.jsonl")


def _file(config: ConfigDict, name: str):
  return "microworld:" + config.get_ref("seed").to_str() + f"/{name}"
