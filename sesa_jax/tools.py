"""From a config to the things that a run acts with.

`config.check` looks at the config alone, `read` at text, `assemble` at weights:
in this order, so that bad input is found before anything expensive starts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh

from sesa_jax import config as config_lib
from sesa_jax import distributed, environment, prompts, remote, types
from sesa_jax.data import benchmarks, seeds
from sesa_jax.engine import engine as engine_lib
from sesa_jax.judge import chat, ledger, offline, verdicts
from sesa_jax.judge import distiller as distiller_lib
from sesa_jax.language import question_key
from sesa_jax.learner import learner as learner_lib
from sesa_jax.policy import attention, model, sharding, tokenizer, weights
from sesa_jax.retrieval import encoder
from sesa_jax.search import base as search_base
from sesa_jax.search import engines
from sesa_jax.stages import validity

_HASH = re.compile(r"hash(?::(\d+))?")  # an encoder without weights, and its E
_HASH_DIM = 64


# --- judge ----------------------------------------------------------------


def check_judge(config: Any) -> None:
  """Refuses a config whose run would ask a model that it cannot.

  For the modes that would: `check` is for all.

  Raises:
    ValueError: no endpoint, no key, or a bad value of `judge`.
  """
  asked = _asks_judge(config)
  if asked and not config.judge.base_url:
    raise ValueError(
      f"{asked[0]} asks a model, but judge.base_url names none. Set it with "
      "judge.model and judge.key_env, or choose another."
    )
  judge(config)


def _asks_judge(config: Any) -> list[str]:
  """Names the fields by which a run asks the judge's model; verdicts aside."""
  settings = config.distillation
  distils = settings.admit and config.frontier.gate != "off"
  found = []
  if config.selfplay and config.verifier.answerer == "judge":
    found.append("verifier.answerer = 'judge'")
  if settings.distiller == "chat" and distils and not config.bank.frozen:
    found.append("distillation.distiller = 'chat'")
  return found


def judge(
  config: Any, workdir: str | Path = "", run: remote.Ledger | None = None
) -> verdicts.Judge | None:
  """Returns the model that `config.judge` names, if it is asked for anything.

  Args:
    config: an experiment.
    workdir: where answers, failures and what was spent are kept; "" keeps
      nothing. The lead's alone: no other process calls.
    run: the ledger of the run, with `budget`; None makes one.

  Raises:
    ValueError: no key in the environment, or a bad value.
  """
  settings = config.judge
  if not settings.base_url or not (settings.verdicts or _asks_judge(config)):
    return None
  here = Path(workdir) if workdir and distributed.is_lead() else None
  if config.budget.cost is not None and settings.prompt_price is None:
    raise ValueError(
      f"budget.cost = {config.budget.cost:g} bounds what the judge costs as "
      "well: set judge.prompt_price and judge.completion_price, of a million "
      "tokens; 0 where they cost nothing."
    )
  if run is None:
    path = here / "spent.json" if here else ""
    run = search_base.Ledger(**config.budget, path=path)
  price = None
  if settings.prompt_price is not None:
    price = ledger.Price(
      settings.prompt_price,
      settings.completion_price or 0.0,
      settings.cached_prompt_price,
    )
  client = chat.Chat(
    settings.base_url,
    settings.model,
    key_env=settings.key_env,
    temperature=settings.temperature,
    extra=settings.extra.to_dict(),
    concurrency=settings.concurrency,
    deadline=settings.deadline,
    try_seconds=settings.try_seconds,
    tries=settings.tries,
    ledger=ledger.Ledger(
      price,
      max_tokens=settings.max_tokens,
      max_cost=settings.max_cost,
      path=here / "judge_spent.json" if here else "",
      within=run,
    ),
    cache=(settings.cache or here / "judge_cache") if here else "",
    log=here / "judge_failures.jsonl" if here else "",
  )
  return verdicts.Judge(client, settings.verdict_tokens, settings.answer_tokens)


def distiller(
  config: Any, judge: verdicts.Judge | None
) -> types.Distiller | None:
  """Returns what writes skills; None where the policy itself does."""
  name = config.distillation.distiller
  if name == "offline":
    return offline.OfflineDistiller(config_lib.language(config))
  if name == "chat" and judge is not None:
    return distiller_lib.ChatDistiller(judge.chat, config.distillation.tokens)
  if name not in config_lib.DISTILLERS:
    return config_lib.named("distillation.distiller", name, {})()
  return None


# --- text ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Texts:
  """Corpus, seeds and questions of a run."""

  library: engines.Search  # what is searched, its corpus and its ledger
  seeds: tuple[types.Seed, ...]
  fixed: tuple[types.Question, ...]  # that the replay pool starts with
  sets: Mapping[str, tuple[types.Question, ...]]  # for evaluation


def search(config: Any, workdir: str = "") -> engines.Search:
  """Opens what a config searches.

  Args:
    config: an experiment.
    workdir: of the run, where what its searches cost is kept; "" keeps nothing.

  Raises:
    ValueError: a value, a file, an index or a key is missing or wrong.
    types.Stopped: no search server answers.
  """
  # Each process asks for its own episodes, and has its share of all limits:
  # of the budget `loop.share_budget` gives it one.
  count, own = distributed.count(), distributed.index()
  spec, paths, encoder = _search_values(config)
  google = spec["google"]
  google["per_second"] /= count
  if google["per_day"] is not None:
    google["per_day"] //= count
  name = f"spent{f'.{own}' if own else ''}.json"
  return engines.open_search(
    spec,
    paths,
    encoder,
    seed=config.seed,
    budget=config.budget.to_dict(),
    spent=Path(workdir) / name if workdir else "",
  )


def build_index(config: Any) -> None:
  """Builds the index that `search.index` names, of `corpus`.

  Raises:
    ValueError: a value or a file is missing or wrong, or the folder exists.
  """
  engines.build(*_search_values(config))


def _search_values(config: Any) -> tuple:
  def encoder():
    spec = config.encoder
    name = [_digest_encoder(spec), spec.query_prefix, spec.passage_prefix]
    return load_encoder(spec), _digest_of(name)

  spec = config.search.to_dict()
  spec["index"] = config_lib.locate(spec["index"])
  return spec, [config_lib.locate(path) for path in config.corpus], encoder


def _digest_encoder(spec: Any) -> str:
  if _HASH.fullmatch(spec.path):
    return spec.path
  return digest(config_lib.locate(spec.path))


def read(config: Any, workdir: str = "") -> Texts:
  """Reads what a run searches, asks for and is tested on.

  Nothing of an evaluation set reaches the pool: such questions are left out,
  compared by normalised text.

  Raises:
    ValueError: a file is missing or malformed, a list is empty, or a set has
      fewer questions than asked for.
    types.Stopped: no search server answers.
  """
  _check_needs_passages(config)
  library = search(config, workdir)
  engine = library.engine
  found = _seeds(config, library.passages) if config.selfplay else ()
  sets = {
    name: _questions(
      name, spec, engine, config.seed, frozenset(), config_lib.language(config)
    )
    for name, spec in sorted(config.eval.sets.items())
  }
  tested = tested_texts(sets)
  fixed = tuple(
    itertools.chain.from_iterable(
      _questions(
        name, spec, engine, config.seed, tested, config_lib.language(config)
      )
      for name, spec in sorted(config.pool.fixed.items())
    )
  )
  if not config.selfplay and len(fixed) < config.questions:
    raise ValueError(
      f"selfplay = False plays the questions of pool.fixed: an iteration takes "
      f"questions = {config.questions}, but there are {len(fixed)}. Lower the "
      "one, or name more."
    )
  _warn_of_tested(found, sets, config_lib.language(config))
  return Texts(library, found, fixed, sets)


def _check_needs_passages(config: Any) -> None:
  """Refuses what a run would have to read a server's corpus for."""
  if config.search.engine in engines.LOCAL:
    return
  sets = {**config.eval.sets, **config.pool.fixed}
  asked = [name for name, spec in sets.items() if spec.answerable]
  if asked:
    raise ValueError(
      f"{asked[0]}: answerable asks for a search a question, which is for "
      f"engines on this machine ({', '.join(engines.LOCAL)}), not "
      f"{config.search.engine!r}. Set answerable to False."
    )
  titles = config.selfplay and config.seeds.source == "titles"
  if titles and not config.corpus:
    raise ValueError(
      "seeds.source = 'titles' takes titles of the corpus, and corpus is "
      "empty. Name its files, or a file of seeds."
    )


def _seeds(config, passages) -> tuple[types.Seed, ...]:
  source, hops = config.seeds.source, tuple(config.seeds.hops)
  if source == "titles":
    found = seeds.from_titles(passages, hops)
  elif source == "list":
    found = seeds.from_list(config_lib.locate(config.seeds.path), hops)
  else:
    found = seeds.from_jsonl(config_lib.locate(config.seeds.path), hops)
  if len(found) < config.questions:
    raise ValueError(
      f"questions = {config.questions}, but there are only {len(found)} seeds."
    )
  return found


def _warn_of_tested(found, sets, speech) -> None:
  """Reports seeds whose answer is that of an evaluation question."""
  shared = seeds.tested(found, itertools.chain(*sets.values()), speech)
  if shared:
    logging.warning(
      "%d of %d seeds ask for the answer of an evaluation question, such as "
      "%s: %r. The questions themselves are never trained on.",
      len(shared),
      len(found),
      shared[0].id,
      shared[0].targets[0],
    )


def _questions(name, spec, search, seed, without, speech) -> tuple:
  """Draws a set's questions, none of them in `without` or twice."""
  questions = benchmarks.load_questions(
    config_lib.locate(spec.path), source=name
  )
  if spec.answerable:
    source = benchmarks.answerable(
      questions, search, seed=seed, language=speech
    )
  else:
    order = np.random.default_rng(seed).permutation(len(questions))
    source = (questions[i] for i in order)
  kept: dict[str, types.Question] = {}
  for question in source:
    if spec.size and len(kept) == spec.size:
      break
    text = question_key(question.text)
    if text not in without:
      kept.setdefault(text, question)
  if not kept or len(kept) < spec.size:
    kind = " that the corpus answers" if spec.answerable else ""
    raise ValueError(
      f"{name}: {spec.size} questions asked for, {len(kept)}{kind} in "
      f"{spec.path}. Lower its size."
    )
  return tuple(kept.values())


# --- weights ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class World:
  """What is fixed for a run."""

  texts: Texts
  tools: types.Tools
  challenger: learner_lib.Learner
  solver: learner_lib.Learner
  references: Mapping[str, Any]  # by role: the weights that it starts from
  shared: bool  # one policy plays both roles
  hashes: Mapping[str, str]  # for the manifest


def load_words(config: Any) -> Any:
  """Loads the tokenizer; refuses one that the policy cannot be asked with.

  Raises:
    ValueError: there is no tokenizer, it has ids that the weights have no rows
      for, or its template does not render a prompt.
  """
  path = config_lib.locate(config.policy.path)
  words = tokenizer.load(config.policy.source, path)
  rows = weights.check(config.policy.source, path).vocab_size
  highest = max(words.get_vocab().values(), default=-1)
  if highest >= rows:
    raise ValueError(
      f"The tokenizer of policy.path = {config.policy.path!r} has ids up to "
      f"{highest}, but the weights have rows for {rows} ids (vocab_size). Put "
      "the tokenizer beside them that they were trained with."
    )
  prompts.check_template(words, config.policy.template, config.policy.example)
  return words


def assemble(
  config: Any, texts: Texts, workdir: str | Path | None = None
) -> World:
  """Loads weights and puts everything together.

  Args:
    config: an experiment that `check` accepts.
    texts: of `read`.
    workdir: of the run, for what its judge keeps; "" keeps nothing, and with
      None there is neither judge nor distiller.

  Raises:
    ValueError: weights, tokenizer or encoder cannot be loaded, or a question
      that was read is too long for an episode.
  """
  embedder = load_encoder(config.encoder)  # small: before weights
  words = load_words(config)
  mesh = sharding.mesh(*config_lib.mesh_sizes(config))
  paths = config_lib.starts(config)
  loaded = {
    start: weights.load(
      config.policy.source,
      config_lib.locate(start),
      jax.random.key(config.seed),
      mesh=mesh,
    )
    for start in sorted(set(paths.values()))
  }
  backbone, _ = loaded[paths["solver"]]
  graphdef = model.build(backbone)
  engine = engine_lib.Engine(
    graphdef,
    backbone,
    words,
    tokenizer.token_bytes(words),
    tokenizer.end_ids(words),
    mesh=config_lib.rollout_mesh(config, mesh),
    steps_per_dispatch=config.engine.steps_per_dispatch,
    deterministic=config.engine.deterministic,
    seed=config.seed,
    **config_lib.engine_sizes(config),
  )
  tools = equip(config, words, engine, texts.library.engine, embedder)
  _check_lengths(config, texts, tools.render)
  if workdir is not None:  # last: it makes files
    model_judge = judge(config, workdir, texts.library.ledger)
    tools = dataclasses.replace(
      tools, judge=model_judge, distiller=distiller(config, model_judge)
    )
  challenger, solver = (
    learner(config, config[name], graphdef, mesh) for name in config_lib.ROLES
  )
  frozen = {
    start: jax.device_put(params, solver.programs.reference)
    for start, (_, params) in loaded.items()
  }
  hashes = {
    **prompts.digest(
      words, config.policy.template, config_lib.rules_of(config).NOTES
    ),
    **_assets(config),
    "corpus": texts.library.digest,
    "index": _digest_of([texts.library.digest, texts.library.identity]),
    "weights": digest(config_lib.locate(config.policy.path)),
    **{
      f"weights/{role}": digest(config_lib.locate(config[role].path))
      for role in config_lib.ROLES
      if config[role].path
    },
    "encoder": digest(config_lib.locate(config.encoder.path)),
    "questions": _digest_of([texts.seeds, texts.fixed, dict(texts.sets)]),
    "judge": _digest_of([verdicts.digest(), distiller_lib.digest()]),
  }
  references = {role: frozen[paths[role]] for role in config_lib.ROLES}
  return World(
    texts, tools, challenger, solver, references, config.policy.shared, hashes
  )


def equip(
  config: Any,
  words: Any,
  engine: Any,
  library: types.SearchEngine,
  embedder: types.Encoder,
) -> types.Tools:
  """Puts together what stages act with, but for judge and distiller.

  Args:
    config: an experiment.
    words: the tokenizer.
    engine: that plays.
    library: that is searched.
    embedder: of questions and skills.
  """
  # One a slot: every episode that waits has its query on the way.
  executor = ThreadPoolExecutor(config.engine.slots, "search")
  rules = config.environment.to_dict()
  del rules["kind"]
  kind = config_lib.rules_of(config)
  speech = config_lib.language(config)

  def render(prompt: prompts.Prompt) -> tuple[int, ...]:
    prompt = prompts.with_note(prompt, kind.NOTES)
    return prompts.render(
      words, prompt, config.policy.template, config.policy.example
    )

  return types.Tools(
    engine=engine,
    environments={
      role: kind(role, library, words, speech, executor=executor, **changed)
      for role, changed in (
        ("challenger", rules),
        ("solver", rules),
        # The evidence check is one greedy turn: nothing is corrected.
        ("evidence", rules | {"max_malformed": 0}),
      )
    }
    | {"text": environment.FreeText(words)},
    search=library,
    encoder=embedder,
    distiller=None,
    tokenizer=words,
    language=speech,
    render=render,
    on_episode=lambda episode: None,
  )


def load_encoder(spec: Any) -> types.Encoder:
  """Loads what `config.encoder` names.

  Raises:
    ValueError: there is no such folder, or it holds no encoder.
  """
  if hashed := _HASH.fullmatch(spec.path):
    return encoder.HashEncoder(int(hashed[1] or _HASH_DIM))
  return encoder.load(
    config_lib.locate(spec.path),
    query_prefix=spec.query_prefix,
    passage_prefix=spec.passage_prefix,
  )


# Of `config.learner`, what is no argument of `Learner`.
_OF_THE_LOOP = ("std_epsilon", "order", "old_logprobs")
# Fields of a role that its learner takes as they are.
_LEARNED = (
  "learning_rate",
  "warmup_updates",
  "minibatch_questions",
  "loss",
  "loss_scale",
  "clip_low",
  "clip_high",
  "kl_coefficient",
  "entropy_coefficient",
  "importance_cap",
)


def learner(
  config: Any, role: Any, graphdef: model.Decoder, mesh: Mesh
) -> learner_lib.Learner:
  """Returns the learner of one role, `config.challenger` or `config.solver`.

  No array is made: the mesh may be one of devices that are not here.

  Raises:
    ValueError: `policy.attention` cannot run there.
  """
  kind = attention.resolve(
    config.policy.attention,
    mesh.devices.flat[0].platform,
    graphdef.backbone.head_dim,
    config.policy.compute_dtype,
  )
  corrected = role.turns + config.environment.max_malformed
  return learner_lib.Learner(
    graphdef,
    mesh,
    **{name: role[name] for name in _LEARNED},
    most_tokens=min(role.episode_tokens, corrected * role.turn_tokens),
    compute_dtype=config.policy.compute_dtype,
    attention=kind,
    remat=config.policy.remat,
    **{k: v for k, v in config.learner.items() if k not in _OF_THE_LOOP},
  )


def fits_solver(config: Any, render: Any, question: str) -> bool:
  """Says whether a question leaves the solver room for skills and a turn."""
  skills = config.bank.block_tokens if config.bank.top else 0
  # With a heading, so that the worked episode is the one with skills.
  prompt = prompts.solver(question, prompts.HEADING if skills else "")
  room = config.solver.episode_tokens - config.solver.turn_tokens
  return len(render(prompt)) + skills <= room


def set_texts(config: Any) -> frozenset[str]:
  """Returns the normalised texts of all questions in the files of `eval.sets`.

  Raises:
    ValueError: a file is missing or malformed.
  """
  return tested_texts(
    {
      name: benchmarks.load_questions(config_lib.locate(spec.path), source=name)
      for name, spec in config.eval.sets.items()
    }
  )


def tested_texts(sets: Mapping[str, Any]) -> frozenset[str]:
  """Returns the normalised texts of all evaluation questions."""
  return frozenset(
    question_key(question.text)
    for questions in sets.values()
    for question in questions
  )


def _check_lengths(config: Any, texts: Texts, render: Any) -> None:
  """Refuses questions and seeds whose prompt leaves no room for a turn."""
  for question in itertools.chain(texts.fixed, *texts.sets.values()):
    if not fits_solver(config, render, question.text):
      raise ValueError(
        f"Question {question.id} is too long ({len(question.text)} characters):"
        f" beside its prompt, solver.episode_tokens = "
        f"{config.solver.episode_tokens} has no room for "
        f"solver.turn_tokens = {config.solver.turn_tokens} and "
        f"bank.block_tokens = {config.bank.block_tokens}. Raise the first."
      )
  room = config.challenger.episode_tokens - config.challenger.turn_tokens
  longest = sorted(texts.seeds, key=lambda s: -len(s.targets[0]))[:16]
  for seed in longest:
    searches = validity.searches_wanted(seed, config.challenger.min_searches)
    size = len(render(prompts.challenger(seed, searches)))
    if size > room:
      raise ValueError(
        f"The prompt of seed {seed.id} has {size} tokens; beside "
        f"challenger.turn_tokens, challenger.episode_tokens = "
        f"{config.challenger.episode_tokens} leaves {room}. Raise it."
      )


def _assets(config: Any) -> dict[str, str]:
  """The pins of the assets that a config names, as they were fetched."""
  named = set(re.findall(rf"{config_lib.ASSETS}([\w.-]+)", config.to_json()))
  if not named:
    return {}
  lock = Path(config_lib.locate(config_lib.ASSETS)) / "assets.lock.json"
  if not lock.is_file():
    return {}
  fetched = json.loads(lock.read_text("utf-8"))
  return {
    f"assets/{name}": str(fetched[name]["pin"])
    for name in sorted(named & fetched.keys())
  }


def digest(path: str) -> str:
  """SHA-256 of a file, or of a folder's names, sizes and first mebibytes."""
  if not path or not Path(path).exists():
    return "none"
  if Path(path).is_dir():
    files = sorted(p for p in Path(path).rglob("*") if p.is_file())
    return _digest_of([(p.name, p.stat().st_size, _head(p)) for p in files])
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _head(path: Path) -> bytes:
  """Tells two sets of weights apart, whatever their size."""
  with path.open("rb") as file:
    return hashlib.sha256(file.read(2**20)).digest()


def _digest_of(value: Any) -> str:
  return hashlib.sha256(repr(value).encode()).hexdigest()
