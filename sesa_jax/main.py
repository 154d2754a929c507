"""Flags to config to mode: the only command line.

    python -m sesa_jax.main --config=configs/smollm2_135m.py --workdir=W
    python -m sesa_jax.main --workdir=W --mode=show --verdict=wrong

The same command again resumes. Bad input ends in one line and exit code 2, a
run that had to stop in one line and exit code 1.
"""

from __future__ import annotations

import difflib
import errno
import glob
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence

from absl import flags
from ml_collections import config_flags

from sesa_jax import types

# Before jax is imported. An installed libtpu warns, or waits, without a TPU;
# compiled programs are kept, so that a resumed run begins at once.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
# Compilers for absent hardware (the extra `plan`) complain that it is absent.
if sys.platform == "linux" and not any(
  glob.glob(f"/dev/{name}")
  for name in ("nvidia*", "nvhost*", "accel*", "vfio/*", "kfd", "dxg")
):
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
  "JAX_COMPILATION_CACHE_DIR",
  os.path.expanduser(
    os.path.join(
      os.environ.get("SESA_JAX_ASSETS") or "~/.cache/sesa_jax", "compiled"
    )
  ),
)

FLAGS = flags.FLAGS
_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "Experiment, a file of configs/; FILE:VARIANT picks one."
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
_MODE = flags.DEFINE_string("mode", "train", "What to do; see MODES.")
_START_FROM = flags.DEFINE_string(
  "start_from", None, "RUN@ITERATION: begin with another run's state."
)
_FORCE_NEW = flags.DEFINE_bool(
  "force_new", False, "Go on in a workdir that another config made."
)
_QUESTION = flags.DEFINE_string("question", None, "show: id or part of text.")
_VERDICT = flags.DEFINE_string("verdict", None, "show: right, wrong, unknown.")
_SKILL = flags.DEFINE_string(
  "skill", None, "show: id of a skill shown. skills: tell this one's life."
)
_ARM = flags.DEFINE_string(
  "arm", None, "show: challenger, solver, control, evidence, eval."
)
_ITERATION = flags.DEFINE_integer(
  "iteration",
  None,
  "show: of the episodes. skills: the bank after it. export: the checkpoint of "
  "it, or of that step of --mode=sft; by default the newest.",
)
_LIMIT = flags.DEFINE_integer("limit", 10, "show: episodes at most.")
_POLICY = flags.DEFINE_string(
  "policy", None, "export: challenger or solver; of --mode=sft, none."
)
_OUT = flags.DEFINE_string(
  "out",
  None,
  "export, sft: the folder to make. skills: a .jsonl file to write the bank "
  "to, or a folder for SKILL.md folders. distill, mine: the .jsonl file of "
  "skills.",
)
_DTYPE = flags.DEFINE_string("dtype", "float32", "export: or bfloat16.")

_BANK = flags.DEFINE_string(
  "bank",
  None,
  "skills: a .jsonl file, a run's folder, or SKILL.md folders. distill: the "
  "bank to begin with, by default what bank.prime names.",
)
_OTHER = flags.DEFINE_string("other", None, "skills: a bank to compare with.")
_MERGE = flags.DEFINE_bool(
  "merge",
  False,
  "skills: put --other into --bank, to --out; with --config without what its "
  "encoder finds restated.",
)
_EPISODES = flags.DEFINE_list(
  "episodes",
  None,
  "distill: runs' folders, their episode files or failures.jsonl, or JSONL "
  "files of another agent, divided by commas. sft: JSONL files of segments or "
  "chats, or of runs.",
)
_TARGET = flags.DEFINE_string(
  "target", "here", "plan: v5e:4x4, v5p:2x2x1, v6e:4x4, ..., a100:8 or here."
)
_ENGINE = flags.DEFINE_string(
  "engine", None, "index, serve: in the place of the config's search.engine."
)
_HOST = flags.DEFINE_string(
  "host", "127.0.0.1", "serve: address; 0.0.0.0 for other machines."
)
_PORT = flags.DEFINE_integer("port", 8000, "serve: port; 0 takes a free one.")
_JSON = flags.DEFINE_bool("json", False, "plan: print JSON, not tables.")


def train() -> None:
  """Runs the experiment, from its last finished iteration on."""
  from sesa_jax import experiment

  experiment.run(
    _for_this_machine(),
    _need(_WORKDIR.value, "workdir"),
    start_from=_START_FROM.value,
    force_new=_FORCE_NEW.value,
    command=[os.path.basename(sys.argv[0]), *sys.argv[1:]],
  )


def evaluate() -> None:
  """Evaluates a run's newest checkpoint."""
  from sesa_jax import experiment

  experiment.evaluate_checkpoint(
    _for_this_machine(), _need(_WORKDIR.value, "workdir")
  )


def show() -> None:
  """Prints episodes as a person reads them."""
  from sesa_jax import show as show_lib

  show_lib.main(
    _need(_WORKDIR.value, "workdir"),
    question=_QUESTION.value,
    verdict=_VERDICT.value,
    skill=_SKILL.value,
    arm=_ARM.value,
    iteration=_ITERATION.value,
    limit=_LIMIT.value,
  )


def plot() -> None:
  """Draws a run's curves into its folder."""
  from sesa_jax import plots

  plots.main(_need(_WORKDIR.value, "workdir"))


def export() -> None:
  """Writes a policy of a run's checkpoint for other tools to open."""
  from sesa_jax import state

  state.export(
    _need(_WORKDIR.value, "workdir"),
    _POLICY.value,
    _need(_OUT.value, "out"),
    _DTYPE.value,
    _CONFIG.value,
    _ITERATION.value,
  )


def skills() -> None:
  """Looks into a bank of skills, compares, merges or converts."""
  from sesa_jax.skills import life

  encoder = threshold = None
  if _CONFIG.value is not None and _MERGE.value:
    from sesa_jax import tools

    encoder = tools.load_encoder(_CONFIG.value.encoder)
    threshold = _CONFIG.value.encoder.threshold
  life.main(
    _BANK.value,
    _WORKDIR.value,
    skill=_SKILL.value,
    iteration=_ITERATION.value,
    other=_OTHER.value,
    merge=_MERGE.value,
    out=_OUT.value,
    encoder=encoder,
    threshold=threshold,
  )


def distill() -> None:
  """Turns failures of saved episodes into skills, without training."""
  from sesa_jax import mining

  mining.distill(
    _for_this_machine(folder=False),
    _need(_EPISODES.value, "episodes"),
    _need(_OUT.value, "out"),
    bank=_BANK.value,
  )


def sft() -> None:
  """Tunes a policy on episodes, by next-token loss on its own tokens."""
  from sesa_jax import config as config_lib
  from sesa_jax import sft as sft_lib

  config = _for_this_machine()
  named = _EPISODES.value or filter(None, [config.sft.episodes])
  out = _OUT.value or config.sft.out
  sft_lib.run(
    config,
    _need(_WORKDIR.value, "workdir"),
    _need([config_lib.locate(path) for path in named], "episodes"),
    out=config_lib.locate(out, exists=False) if out else None,
    command=[os.path.basename(sys.argv[0]), *sys.argv[1:]],
  )


def mine() -> None:
  """Mines skills by early self-play with a frozen bank."""
  from sesa_jax import mining

  mining.mine(
    _for_this_machine(),
    _need(_WORKDIR.value, "workdir"),
    out=_OUT.value,
    command=[os.path.basename(sys.argv[0]), *sys.argv[1:]],
  )


def plan() -> int:
  """Says whether a config's run fits a machine, and what it costs there."""
  config = _need(_CONFIG.value, "config")
  if _TARGET.value != "here":
    # Nothing runs: compilers alone are asked, whatever devices there are.
    os.environ |= {
      "JAX_PLATFORMS": "cpu",
      "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
      "TPU_WORKER_HOSTNAMES": "localhost",
    }
  from sesa_jax.plan import tables

  given = config_flags.get_override_values(FLAGS["config"])
  return tables.main(config, _TARGET.value, given, _JSON.value)


def selftest() -> int:
  """Checks what this machine computes; run it first on a new one."""
  from sesa_jax import selftest as selftest_lib

  return selftest_lib.main()


def check() -> int:
  """Says whether a run could begin and go on; spends next to nothing."""
  from sesa_jax import check as check_lib

  return check_lib.main(_for_this_machine(), _need(_WORKDIR.value, "workdir"))


def index() -> None:
  """Builds the index that config.search.index names, of config.corpus."""
  from sesa_jax import tools

  tools.build_index(_search_config())


def serve() -> None:
  """Serves the config's search engine by the Search-R1 protocol."""
  from sesa_jax import serve as serve_lib
  from sesa_jax import tools

  config = _search_config()
  topk = config.environment.passages_per_search
  engine = tools.search(config).engine
  serve_lib.main(engine, _HOST.value, _PORT.value, topk)


# A mode that returns nothing has the exit code 0.
MODES: dict[str, Callable[[], int | None]] = {
  "train": train,
  "eval": evaluate,
  "show": show,
  "plot": plot,
  "export": export,
  "plan": plan,
  "check": check,
  "selftest": selftest,
  "skills": skills,
  "distill": distill,
  "mine": mine,
  "sft": sft,
  "index": index,
  "serve": serve,
}


def _search_config():
  """The config, with the engine of the command line."""
  from sesa_jax import config as config_lib

  config = _need(_CONFIG.value, "config").copy_and_resolve_references()
  if _ENGINE.value:
    config.search.engine = _ENGINE.value
  config_lib.check_values(config)
  return config.lock()


def _for_this_machine(folder: bool = True):
  """The config as it runs here; the command line has the last word."""
  from sesa_jax import config as config_lib
  from sesa_jax import distributed

  config = _need(_CONFIG.value, "config")
  if folder:  # missing, it is said before devices wake
    _need(_WORKDIR.value, "workdir")
  distributed.initialize()
  given = config_flags.get_override_values(FLAGS["config"])
  return config_lib.for_machine(config, distributed.machine(), given)


def _need(value, flag: str):
  if not value:
    raise ValueError(f"--{flag} is missing; --mode={_MODE.value} needs it.")
  return value


def _parse(argv: Sequence[str]) -> None:
  """Parses flags; what absl and the config raise becomes one ValueError."""
  try:
    rest = FLAGS(list(argv))
    if _CONFIG.value is not None:
      _CONFIG.value.keys()  # a missing file shows only when it is read
  except flags.UnrecognizedFlagError as error:
    raise ValueError(_unknown_flag(error.flagname)) from error
  except flags.Error as error:
    root: BaseException = error
    while root.__context__ is not None:  # a config's own error lies deepest
      root = root.__context__
    raise ValueError(str(root if "config file" in str(error) else error)) from (
      error
    )
  except (SyntaxError, ImportError) as error:
    raise ValueError(
      f"{_given(argv, 'config')} is not a config: {error}."
    ) from error
  except (AttributeError, KeyError) as error:
    if "get_config" in str(error):
      raise ValueError(
        f"{_given(argv, 'config')} is not a config: it has no get_config()."
      ) from error
    raise ValueError(_unknown_field(argv, str(error))) from error
  except OSError as error:
    raise ValueError(
      f"No config file {_given(argv, 'config')}. "
      f"There are: {', '.join(sorted(glob.glob('configs/*.py')))}."
    ) from error
  if len(rest) > 1:
    raise ValueError(f"Unknown argument {rest[1]!r}. Flags begin with --.")
  if _MODE.value not in MODES:
    raise ValueError(_unknown("mode", _MODE.value, list(MODES)))


def _given(argv: Sequence[str], flag: str) -> str:
  found = [a.split("=", 1)[1] for a in argv if a.startswith(f"--{flag}=")]
  return found[-1] if found else ""


def _unknown_field(argv: Sequence[str], said: str) -> str:
  """The flag that names a field that the config does not have."""
  names = re.findall(r"\w+", said)
  fields = [a.split("=")[0] for a in argv if a.startswith("--config.")]
  wrong = [f for f in fields if set(f.split(".")) & set(names[:1])]
  near = re.search(r"Did you mean \W*(\w+)", said)
  hint = f" Did you mean {near[1]!r}?" if near else ""
  return f"The config has no field {(wrong or fields)[0]}.{hint}"


def _unknown(what: str, value: str, choices: Sequence[str]) -> str:
  near = difflib.get_close_matches(value, choices, 1)
  hint = f" Did you mean {near[0]!r}?" if near else ""
  return f"Unknown {what} {value!r}.{hint} Choices: {', '.join(choices)}."


def _unknown_flag(name: str) -> str:
  names = [n for n in FLAGS if not n.startswith("test_")]
  near = difflib.get_close_matches(name, names, 1)
  hint = f" Did you mean --{near[0]}?" if near else " See --help."
  return f"Unknown flag --{name}.{hint}"


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a mode; returns the exit code."""
  _log_to_stderr()
  try:
    argv = sys.argv if argv is None else argv
    if {"--help", "-h", "--helpfull"} & set(argv):
      print(f"{__doc__}\n{FLAGS.module_help(sys.modules[__name__])}")
      return 0
    _parse(argv)
    return MODES[_MODE.value]() or 0
  except ValueError as error:
    print(f"error: {_one_line(error)}", file=sys.stderr)
    return 2
  except OSError as error:
    # A disk that is full or failing may be mended, and the run resumed.
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
    parts = error.strerror or str(error), error.filename
    said = ": ".join(str(part) for part in parts if part)
    print(f"{'stopped' if full else 'error'}: {said}", file=sys.stderr)
    return 1 if full else 2
  except types.Stopped as error:
    print(f"stopped: {_one_line(error)}", file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    print("stopped: interrupted; the same command resumes.", file=sys.stderr)
    return 130


class _Lines(logging.Handler):
  """Prints to whatever stderr is now: a live display puts lines above it."""

  def emit(self, record: logging.LogRecord) -> None:
    """Prints our own messages, and the warnings of others."""
    if record.name == "absl" or record.levelno >= logging.WARNING:
      print(self.format(record), file=sys.stderr)


def _log_to_stderr() -> None:
  handler = _Lines()
  handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
  root = logging.getLogger()
  root.handlers[:] = [handler]
  root.setLevel(logging.INFO)
  logging.getLogger("absl").setLevel(logging.INFO)


def _one_line(error: Exception) -> str:
  return re.sub(r"\s*\n\s*", " ", str(error))


if __name__ == "__main__":
  sys.exit(main())
