"""What the parts hand to each other.

The type says where a value lives: a `NamedTuple` goes to the device, a frozen
dataclass stays on the host. Everything here is a value; nothing here acts.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np


class Verdict(enum.StrEnum):
  """What is known about an answer. UNKNOWN is an outage, never a label."""

  RIGHT = "right"
  WRONG = "wrong"
  UNKNOWN = "unknown"


class Stopped(Exception):
  """A run had to stop and may be resumed; says why and how, in one line."""


# --- text ------------------------------------------------------------------


@dataclass(frozen=True)
class Passage:
  """A piece of a document, as a search engine returns it."""

  id: str
  title: str
  text: str
  score: float | None = None


@dataclass(frozen=True)
class SearchFailure:
  """A lost search call. Never text for a model, never an empty result."""

  reason: str
  kind: str = "server"  # one of `search.base.KINDS`


@dataclass(frozen=True)
class Seed:
  """What a challenger is given: an answer to ask for, and how many hops."""

  id: str
  targets: tuple[str, ...]  # the answer and its aliases, preferred one first
  hops: int


@dataclass(frozen=True)
class Question:
  """What a solver is given."""

  id: str  # unique within an iteration: it is the group id of the advantages
  text: str
  targets: tuple[str, ...]
  hops: int
  seed_id: str
  origin: str  # "challenger", "replay" or "fixed"


# --- episodes --------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
  """How a token is drawn: softmax(logits / temperature), or argmax at 0.

  The cut-offs are for evaluation: a training step's ratio needs logprobs over
  the support that was sampled from.
  """

  temperature: float = 1.0
  top_p: float = 1.0  # least mass that the likeliest ids must reach; 1 is off
  top_k: int = 0  # likeliest ids that stay; 0 is off


@dataclass(frozen=True)
class Limits:
  """What ends an episode that does not end itself."""

  turn_tokens: int  # sampled tokens in one turn
  episode_tokens: int  # prompt, sampled and observed tokens together
  turns: int  # actions


@dataclass(frozen=True)
class Request:
  """`attempts` episodes that begin with the same prompt."""

  id: str
  prompt_ids: tuple[int, ...]
  attempts: int
  sampling: Sampling
  limits: Limits
  arm: str  # "challenger", "solver", "evidence" or "eval/..."


@dataclass(frozen=True)
class Pause:
  """An episode at a stop string or at the end of a turn, for an environment."""

  request_id: str
  attempt: int
  turn: int  # turns finished before this one
  malformed: int  # malformed turns so far
  ids: tuple[int, ...]  # the policy's own tokens of this turn
  reason: str  # "stop", "eos", "turn_tokens" or "episode_tokens"
  room: int  # tokens that may still be appended under Limits.episode_tokens
  turns: int  # actions that the episode may take, Limits.turns


@dataclass(frozen=True)
class Reply:
  """An environment's answer to a pause.

  `go_on`: the stop string meant nothing, sample on. `append`: the turn is over,
  `ids` are its observation. `finish`: the episode is over. `lost`: a tool could
  not be reached; the episode counts for nothing and is replayed from its key.
  """

  kind: str  # "go_on", "append", "finish" or "lost"
  ids: tuple[int, ...] = ()  # observation, for "append"
  finish: str = ""  # the episode's finish reason, for "finish" and "lost"
  action: str = ""  # "search", "answer", "question", "malformed" or "" (none)
  argument: str = ""  # the query, the answer or the question
  passages: tuple[Passage, ...] = ()
  note: str = ""  # why a turn is malformed, why a call is lost
  turn_tokens: int | None = None  # limit of the next turn, if not the request's


@dataclass(frozen=True)
class Turn:
  """One turn of an episode: what the policy wrote, and what came back.

  `ids[start:end]` of the episode are sampled; `ids[end:stop]` are observed.
  """

  start: int
  end: int
  stop: int
  text: str  # a view of ids[start:end]
  action: str
  argument: str
  passages: tuple[Passage, ...]
  note: str


@dataclass(frozen=True)
class Episode:
  """One played request. Ids are what the engine saw; text is a view of them."""

  request_id: str
  attempt: int
  arm: str
  ids: np.ndarray  # int32 [T], prompt and all
  prompt_length: int
  mask: np.ndarray  # bool [T], True where the policy sampled the id
  logprobs: np.ndarray  # float32 [T], of sampled ids at the temperature, else 0
  turns: tuple[Turn, ...]
  finish: str  # answer question malformed turns turn_tokens episode_tokens lost

  @property
  def passages(self) -> tuple[Passage, ...]:
    """All passages that the episode's searches returned, in order."""
    return tuple(p for turn in self.turns for p in turn.passages)

  def last(self, action: str) -> str | None:
    """The argument of the last turn that took `action`, or None."""
    found = [turn.argument for turn in self.turns if turn.action == action]
    return found[-1] if found else None


@dataclass(frozen=True)
class Proposal:
  """A challenger's episode and what became of it."""

  seed: Seed
  attempt: int
  episode: Episode
  text: str | None  # of its question, if it wrote one
  state: str  # one of stages.validity.STATES
  question_id: str = ""  # of the question that it became, if it did


@dataclass(frozen=True)
class Attempt:
  """A solver's episode on a question, and its verdict."""

  question: Question
  episode: Episode
  prediction: str | None
  verdict: Verdict
  skill_ids: tuple[str, ...]  # shown in its prompt


@dataclass(frozen=True)
class Outcome:
  """What came of a question. All its attempts have a verdict."""

  question: Question
  right: int
  total: int  # attempts; malformed and truncated ones count as wrong
  answered: int  # attempts with a complete answer
  wrong: int  # substantively wrong attempts
  skill_ids: tuple[str, ...]  # shown to all attempts

  @property
  def success(self) -> float:
    """The solver's success rate p."""
    return self.right / self.total


@dataclass(frozen=True)
class Lesson:
  """An episode that a policy learns from."""

  episode: Episode
  advantage: float


class Policy(NamedTuple):
  """One trained set of weights."""

  params: Any  # fp32 masters, layers stacked on axis 0
  opt_state: Any
  updates: Any  # int32 [], optimizer steps applied


# --- skills ----------------------------------------------------------------


@dataclass(frozen=True)
class Skill:
  """A lesson in words. Its usage counters are arrays of the bank."""

  id: str
  category: str
  description: str  # u
  trigger: str  # c: when it applies
  evidence: str  # e: what tells the right answer from the usual confusion
  avoidance: str  # a: what not to do
  templates: tuple[str, ...]  # z: query templates with slots
  origin: str  # one of skills.record.ORIGINS, or a distiller's MODULE:NAME
  source_question: str = ""  # its text, for skills born from a failure
  source_seed: str = ""  # of both a line each, where there were several
  created_at: int = 0  # iteration


@dataclass(frozen=True)
class RightAttempt:
  """What an attempt did that got the same question right."""

  queries: tuple[str, ...]
  passages: tuple[Passage, ...]  # cut to a token budget


@dataclass(frozen=True)
class FailureRecord:
  """A question at the frontier that the solver failed at least once."""

  question_id: str
  seed_id: str
  question: str
  targets: tuple[str, ...]
  prediction: str  # the most frequent wrong one; ties: lowest attempt
  other_predictions: tuple[str, ...]
  passages: tuple[Passage, ...]  # of that attempt, cut to a token budget
  passages_seen: int  # before the cut
  wrong_attempts: int
  success_rate: float
  skill_ids: tuple[str, ...]
  iteration: int
  right: tuple[RightAttempt, ...] = ()  # for contrast


@dataclass(frozen=True)
class Case:
  """What one skill is to be written from."""

  records: tuple[FailureRecord, ...]  # one, or a few of the same kind
  shown: tuple[Skill, ...]  # skills that did not help


# --- tools -----------------------------------------------------------------


class SearchEngine(Protocol):
  """Finds passages. Every engine of `search/` has this one method."""

  def search(
    self, queries: Sequence[str], k: int
  ) -> list[tuple[Passage, ...] | SearchFailure]:
    """Returns the k best passages of each query, or a typed failure."""
    ...


class Encoder(Protocol):
  """Embeds text on the host's CPU device."""

  @property
  def dim(self) -> int:
    """The width of an embedding, E."""
    ...

  def encode(self, texts: Sequence[str], kind: str) -> np.ndarray:
    """Returns float32 [n, E] unit rows; `kind` is "query" or "passage"."""
    ...


class Environment(Protocol):
  """The actions that a turn may hold, what answers them, how it ends."""

  @property
  def stops(self) -> tuple[str, ...]:
    """Strings at which the engine pauses an episode."""
    ...

  def respond(self, pause: Pause) -> Reply | Future[Reply]:
    """Answers a pause, now or (a future) later."""
    ...


class Distiller(Protocol):
  """Turns failures into skills, or says why not."""

  def distill_all(self, cases: Sequence[Case]) -> list[Skill | DistillFailure]:
    """Writes at most one skill from each case, in order."""
    ...


@dataclass(frozen=True)
class DistillFailure:
  """No skill. `outage`: the record stays in the queue; else it is used up."""

  reason: str
  outage: bool


@dataclass(frozen=True)
class Report:
  """Small dict of metrics by path, and lines for the run's JSONL files."""

  metrics: Mapping[str, float] = field(default_factory=dict)
  rows: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Tools:
  """What stages act with. All of it is fixed for a run."""

  engine: Any  # engine.Engine
  environments: Mapping[str, Environment]  # by role: what its turns may hold
  search: SearchEngine
  encoder: Encoder
  distiller: Distiller | None  # None: the policy itself, or nobody
  tokenizer: Any  # of the backbone, transformers
  language: Any  # language.Language
  render: Any  # prompts.Prompt -> ids; the one rendering
  on_episode: Any  # told of each episode when it ends
  judge: Any = None  # judge.verdicts.Judge, where there is one

  def count_tokens(self, text: str) -> int:
    """Counts the tokens of a text inside a prompt."""
    return len(self.tokenizer.encode(text, add_special_tokens=False))
