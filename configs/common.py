"""The paper's setting. Every other config states only what differs from it.

Values come from the SESA paper, from Search Self-play (SSP) where SESA states
none, and from us where neither does; the comment at each says which.
A preset is a named difference, picked by the text behind the colon:
`--config=configs/smollm2_135m.py:no_distillation`.
"""

import difflib
from collections.abc import Collection, Mapping

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

# The training questions of a file, and nobody who poses: one policy.
_FIXED = {"selfplay": False, "policy.shared": True}
_NO_BANK = {
  "bank.prime": "none",
  "bank.top": 0,
  "distillation.admit": False,
  "frontier.gate": "off",
  "eval.banks": ("none",),
}
_SSP = _NO_BANK | {
  "policy.shared": True,
  "policy.template": "ssp",
  "policy.example": False,
  "frontier.reward": "failure",
  "challenger.baseline": "none",
  "challenger.invalid": "zero",
  "challenger.min_searches": 2,
}
PRESETS = {
  "sesa": {},
  # An empty bank at the start, all else on.
  "no_priming": {"bank.prime": "none"},
  # Nothing is admitted; credit, retirement and retrieval stay on.
  "no_distillation": {"distillation.admit": False},
  # SSP's reward, and every question with a failure is recorded: both halves.
  "no_frontier": {"frontier.reward": "failure", "frontier.gate": "any_failure"},
  "no_bell": {"frontier.reward": "failure"},
  "no_gate": {"frontier.gate": "any_failure"},
  # Skills of the same bank that are far from the question.
  "placebo": {"bank.arm": "placebo"},
  # Rewards are paid to whom they may: what learns from this learns nothing.
  "permuted_rewards": {"frontier.permuted": True},
  "shared_weights": {"policy.shared": True},
  # SSP as its paper has it, and as its code does.
  "ssp_paper": _SSP
  | {
    "learner.order": ("solver", "challenger"),
    "solver.advantage_std": False,
    "challenger.loss": "reinforce",
    "challenger.kl_coefficient": 0.0,
  },
  "ssp_code": _SSP
  | {"learner.old_logprobs": "turn", "challenger.loss_scale": 0.4},
  # Search-R1 by GRPO, with the values of its script.
  "search_r1": _NO_BANK
  | _FIXED
  | {
    "policy.template": "search_r1",
    "policy.example": False,
    "judge.verdicts": False,
    "solver.clip_high": 0.2,
    "solver.kl_coefficient": 0.001,
  },
  # Fixed questions with an evolving bank.
  "fixed_questions": _FIXED,
  # A challenger that stays as it began.
  "fixed_challenger": {"challenger.frozen": True},
}


def role() -> ConfigDict:
  """Values that both policies share."""
  return ConfigDict(
    dict(
      temperature=1.0,  # SSP; top-p and top-k are off in training
      turns=10,  # action turns an episode, SSP
      turn_tokens=1024,  # sampled tokens a turn, ours
      episode_tokens=12_288,  # prompt + response, SSP
      path="",  # weights of its own to start from; "": policy.path
      learning_rate=1e-6,  # SSP
      warmup_updates=5,  # SSP
      minibatch_questions=128,  # SSP; at most one update for fewer questions
      loss="grpo",  # sequence mean of token means, SSP; see docs/configs.md
      loss_scale=1.0,  # of the loss as a whole
      advantage_std=True,  # divide advantages by the standard deviation, SESA
      clip_low=0.2,  # SSP
      clip_high=0.285,  # SSP
      kl_coefficient=0.01,  # SSP: k3, in the loss
      entropy_coefficient=0.0,  # of a bonus, verl's default
      importance_cap=2.0,  # engine against learner, ours
    )
  )


def question_set(path: str, size: int, answerable: bool = False) -> ConfigDict:
  """Names questions to take from a file.

  Args:
    path: FlashRAG JSONL or a TSV; "assets:..." or a path.
    size: questions, drawn by the seed; 0 takes all.
    answerable: only those whose answer is in BM25's first 5 passages.
  """
  return ConfigDict(dict(path=path, size=size, answerable=answerable))


def encoder(
  path: str, threshold: float, query: str = "", passage: str = ""
) -> ConfigDict:
  """Names an encoder with all that belongs to it and to no other.

  Args:
    path: a folder of a BERT; "hash" and "hash:E" hash words, for tests.
    threshold: greatest cosine to a known skill at which one is admitted.
    query: before a question.
    passage: before a skill.
  """
  return ConfigDict(
    dict(
      path=path,
      query_prefix=query,
      passage_prefix=passage,
      threshold=threshold,
    )
  )


def minilm() -> ConfigDict:
  """Returns all-MiniLM-L6-v2, its threshold calibrated: docs/skills.md."""
  return encoder("assets:all-minilm-l6-v2", 0.575)


def get_config() -> ConfigDict:
  """Returns the paper's values, unlocked for a config to change."""
  solver, challenger = role(), role()
  solver.group_size = 5  # attempts a question, SESA
  solver.baseline = "group"  # (r - mean)/std within the question, SESA
  challenger.frozen = False  # it poses, and never learns
  challenger.group_size = 1  # proposals a seed, SSP
  challenger.baseline = "batch"  # a group of one has none of its own
  challenger.invalid = "endpoint"  # or "mask", "zero", "penalty"
  challenger.invalid_penalty = 0.1  # for "penalty" alone
  challenger.min_searches = placeholder(
    int
  )  # None: 1 for a one-hop seed, else 2
  return ConfigDict(
    dict(
      name="common",
      preset="sesa",
      seed=0,
      iterations=200,  # SSP: 150-200
      questions=256,  # seeds and solver questions an iteration, SSP
      selfplay=True,  # False: the questions of `pool.fixed`, epoch by epoch
      challenger=challenger,
      solver=solver,
      policy=dict(
        source="hf",  # "hf": a folder; "gguf": a file; "random": drawn
        path="",  # "assets:NAME/..." is looked up in the assets folder
        template="native",  # the backbone's own; or "search_r1", "ssp", "bare"
        shared=False,  # one policy, two prompts: SSP
        example=False,  # a worked episode in the prompt, for very small models
        compute_dtype="bfloat16",
        remat=True,
        attention="auto",  # or "xla", "blocks", "splash" (TPU), "cudnn" (GPU)
      ),
      mesh=dict(
        fsdp=0,  # training; 0: all devices / tensor
        tensor=1,  # training
        rollout_tensor=1,  # of a host's devices; the others are data
      ),
      learner=dict(
        std_epsilon=1e-6,
        adam_b1=0.9,
        adam_b2=0.999,
        adam_eps=1e-8,
        order=("challenger", "solver"),  # of the updates
        # Of a shared policy's second role: "start", before the first learns,
        # or "turn", after that.
        old_logprobs="start",
        moments="float32",  # Adam's; or "bfloat16", half the memory
        weight_decay=0.01,  # verl's default
        gradient_clip=1.0,  # verl's default
        microbatch_rows=8,
        row_multiple=512,  # rows are padded to a multiple of this
        chunk_tokens=1024,  # tokens whose logits exist at once
        offload=False,  # Adam's moments wait in the host's pinned memory
      ),
      engine=dict(
        slots=64,
        steps_per_dispatch=32,
        prefill_chunk=256,
        deterministic=True,  # same seed, same bytes; waits for pending tools
        cache="paged",  # or "contiguous" (GPU)
        page_size=128,  # tokens
        pages=0,  # 0: as many as every slot at its longest needs
      ),
      language="english",  # or "module:NAME", a `language.Language`
      environment=dict(
        kind="search_qa",  # or "module:NAME", a subclass of `SearchQA`
        passages_per_search=3,  # SSP
        observation_tokens=768,  # ours
        max_malformed=1,  # ours
        max_answer_words=32,  # SSP
        max_query_characters=500,  # ours
      ),
      frontier=dict(
        reward="bell",  # SESA
        low=0.0,
        high=1.0,
        endpoint_penalty=0.1,  # not published; ours
        gate="frontier",  # or "any_failure", "off"
        min_right=1,
        min_wrong=1,
        permuted=False,  # rewards, over the iteration's episodes: a control
      ),
      verifier=dict(
        answerer="judge",  # or "solver", the paper's formula
        tokens=70,  # SSP: greedy, at most so many
        max_tokens=8192,  # the check's whole prompt; noise is cut first
        noise=4,  # trajectories that lend their passages, SSP
        probes=32,  # candidates also asked with noise alone, and with nothing
      ),
      pool=dict(
        refill="replay",  # or "mask": a slot without a valid question is empty
        empty_every=10,  # iterations, SSP
        fixed={},  # questions that the pool starts with, see `question_set`
        keep_fixed=False,
      ),
      bank=dict(
        prime="seeds15",  # or "none", "authored157", or "mined:PATH"
        capacity=800,  # SESA
        top=3,  # SESA
        min_score=placeholder(float),  # cosine floor, ours; None is off
        block_tokens=512,  # the rendered skills, ours
        fields=(  # of a skill, that the prompt shows
          "description",
          "trigger",
          "evidence",
          "avoidance",
          "templates",
        ),
        arm="skills",  # or "placebo", "scrambled": blocks that should not help
        index="auto",  # ScaNN where it is installed; or "exact", "scann"
        credit="rollout",  # or "majority", "relative", "control"
        control_attempts=0,  # a question, without skills beside the others
        retire_after=3,  # showings, SESA
        frozen=False,  # neither credit nor retirement nor admission
      ),
      encoder=encoder(
        "assets:e5-base-v2", 0.93, "query: ", "passage: "
      ),  # SESA
      distillation=dict(
        distiller="chat",  # the judge's model; or "solver", "offline"
        tokens=1024,  # of a skill as a model writes it
        consolidate="single",  # or "cluster": one skill from up to 5 failures
        contrast=False,  # shows right attempts at the question too, ours
        wait=True,  # False: it runs beside the next iteration's rollouts
        every=10,  # iterations, SESA
        min_pending=20,  # SESA
        max_records=30,  # SESA
        queue_size=300,  # SESA
        keep="newest",  # or "best"
        passage_tokens=1500,  # evidence in a record, SESA
        admit=True,
      ),
      judge=dict(  # a model behind an OpenAI-compatible endpoint
        base_url="https://api.deepseek.com",  # "": exact match alone
        model="deepseek-v4-pro",  # SESA
        key_env="DEEPSEEK_API_KEY",  # the variable with the key; "": none
        verdicts=True,  # on answers that are no exact match, SESA
        verdict_tokens=512,
        answer_tokens=70,  # of the evidence check, SSP
        temperature=0.0,
        extra={},  # more fields of each request
        concurrency=16,
        deadline=180.0,  # seconds for all tries of a call
        try_seconds=60.0,
        tries=6,
        max_tokens=placeholder(int),  # of the run; None is no limit
        max_cost=placeholder(float),  # in the prices' currency
        prompt_price=placeholder(float),  # a million tokens; None: not counted
        completion_price=placeholder(float),
        cached_prompt_price=placeholder(float),
        cache="",  # folder of answers; "" is judge_cache in the run's
      ),
      sft=dict(  # --mode=sft: supervised fine-tuning, all of it ours
        episodes="",  # a file, where --episodes names none
        out="",  # a folder, where --out names none; "": in the workdir
        steps=0,  # 0: as many as `epochs` take
        epochs=1,
        batch_tokens=65_536,  # of a step, prompts and padding included
        max_tokens=0,  # of an episode; 0: of the longest that may be played
        too_long="skip",  # or "refuse"
        arms=("solver",),  # of saved episodes
        only_right=True,  # of those
        optimizer="adamw",  # or "muon"
        learning_rate=1e-5,
        warmup_steps=10,
        decay=0.1,  # share of the steps, at the end
        validation=0.02,  # share of the episodes
        log_every=10,  # steps
        validate_every=100,
        checkpoint_every=500,
      ),
      mine=dict(  # --mode=mine: skills from early self-play, frozen bank
        iterations=10,
        skills=142,  # at most, SESA
      ),
      search=dict(
        engine="search_r1",  # or "bm25", "dense", "google"
        k1=0.9,  # of bm25, ours
        b=0.4,
        passage_words=100,
        index="",  # folder of --mode=index; bm25 without one is in memory
        neighbours="auto",  # of dense: or "exact", "scann"
        urls=("http://127.0.0.1:8000/retrieve",),  # of search_r1
        batch=64,  # queries that go in one request
        concurrency=16,  # requests at once
        deadline=60.0,  # seconds for all tries of a call
        try_seconds=20.0,
        tries=6,
        patience=300.0,  # seconds without any answer; then calls are skipped
        google=dict(
          provider="serper",  # or "custom_search"
          url="",  # "": the provider's
          key_env="SERPER_API_KEY",
          cx="",  # of custom_search
          per_second=10.0,
          per_day=placeholder(int),
          price=1.0,  # of a thousand queries
        ),
        cache="",  # folder of answers; "" keeps none
        replay_only=False,
        degrade=dict(drop=0.0, distract=0.0, shuffle=0.0, delay=0.0),
      ),
      budget=dict(  # of the whole run; None is no limit
        searches=placeholder(int),  # of servers
        cost=placeholder(float),  # of searches and judge together
      ),
      corpus=(),  # files, "assets:..." or paths
      seeds=dict(
        source="jsonl",
        path="assets:ssp/train_answers_random_hop_50000_proposer.jsonl",
        hops=(1, 2, 3),
      ),
      eval=dict(
        every=10,  # iterations; 0 is off. Before and after are always run
        sets={},  # name -> `question_set`
        banks=("none", "final"),
        other="none",  # what fills the bank of mode "other", as `bank.prime`
        temperature=0.0,  # greedy, SSP
        episodes=0,  # of each set and bank that are kept, to be looked at
        turns=10,  # SSP
        confidence=0.95,
      ),
      alarms=dict(  # warned of, one line each; ours
        entropy_least=0.02,  # nats a sampled token: all samples alike
        entropy_most=4.0,  # babble
        malformed=0.5,  # share of episodes with a malformed turn
        clip_fraction=0.3,  # share of tokens
        valid_rate=0.05,  # of proposals, for `valid_iterations` on end
        valid_iterations=10,
      ),
      lost_limit=0.02,  # share of lost episodes or verdicts that stops a run
      checkpoint=dict(keep=2, milestone_every=50),
      # Kind of machine -> sections -> fields, which win on such a machine over
      # all but the command line. Kinds: v5e v5p v6e a100 h100 cpu.
      machines={},
    )
  )


def paper_machines(
  rollout_tensor: int = 1,
  offload: bool = False,
  pages: Mapping[str, int] | None = None,
) -> ConfigDict:
  """Returns `machines` for the paper's lengths of episodes.

  A microbatch has a row a chip on 4 x 4 chips of v5e or v6e. The values of
  `get_config` are meant for 8 GPUs, and do for 4 chips of v5p.

  Args:
    rollout_tensor: chips that share one copy of the rollout's weights, where a
      chip's memory is small: v5e and v6e.
    offload: for v5e, the smallest: Adam's moments wait on the host.
    pages: of a rollout's cache, by kind, where there is no room for all slots
      at their longest: a little less than `--mode=plan` says would fit.
  """

  def small() -> dict:
    return dict(
      mesh=dict(rollout_tensor=rollout_tensor),
      learner=dict(microbatch_rows=16),
    )

  found = dict(v5e=small(), v6e=small())
  found["v5e"]["learner"]["offload"] = offload
  for kind, count in (pages or {}).items():
    found.setdefault(kind, {})["engine"] = dict(pages=count)
  return ConfigDict(found)


def finish(
  config: ConfigDict, variant: str, choices: Collection[str] = PRESETS
) -> ConfigDict:
  """Applies a preset of `PRESETS`, the last word, and locks the config.

  Args:
    config: of `get_config`, changed.
    variant: the preset.
    choices: presets that the file offers.

  Raises:
    ValueError: the preset is unknown; lists those that exist.
  """
  if variant not in choices:
    near = difflib.get_close_matches(variant, choices, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(
      f"Unknown variant {variant!r}.{hint} Choices: {', '.join(choices)}."
    )
  config.update_from_flattened_dict(PRESETS[variant])
  if not config.selfplay and not config.pool.fixed:
    config.pool.fixed.train = question_set("", 0)  # its path is a flag's
  config.preset = variant
  return config.lock()
