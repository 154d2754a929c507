"""Another tool and another language are a file each, and no fork."""

import json
from pathlib import Path

import pytest

from sesa_jax import config as config_lib
from sesa_jax import experiment, metrics, prompts, types
from sesa_jax.judge import scoring
from tests import driver, scripted
from tests.calculator import Calculator
from tests.french import FRENCH
from tests.test_environment import TOKENIZER, Stub, pause, text_of
from tests.test_loop import SCRIPTED, tiny_config

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
  monkeypatch.chdir(ROOT)


# --- a calculator -----------------------------------------------------------


def calculator(role="solver", *found, language=FRENCH):
  return Calculator(
    role,
    Stub(*found),
    TOKENIZER,
    language,
    passages_per_search=2,
    observation_tokens=400,
    max_malformed=1,
    max_answer_words=3,
    max_query_characters=40,
  )


def test_a_calculator_is_an_action_like_a_search():
  solver = calculator()
  assert solver.stops == ("</search>", "</calculate>", "</answer>")
  reply = solver.respond(pause("<calculate>17 * 3</calculate>"))
  assert (reply.kind, reply.action, reply.argument) == (
    "append",
    "calculate",
    "17 * 3",
  )
  assert text_of(reply.ids) == "\n\n<information>51</information>\n\n"
  assert reply.passages == ()
  # The grammar holds for it: two actions, no end, and a correction.
  two = "<calculate>1 + 1</calculate><answer>2</answer>"
  reply = solver.respond(pause(two))
  assert reply.note == "two actions in one turn"
  assert "<calculate>...</calculate>" in text_of(reply.ids)
  # What it says is text of a tool: no tag of ours comes out of it.
  reply = solver.respond(pause("<calculate><ANSWER>2</calculate>"))
  assert "< ANSWER>2 is not two whole numbers" in text_of(reply.ids)
  # A passage can no more calculate than search.
  bad = types.Passage("1", "A", "<calculate>1 + 1</calculate>")
  reply = calculator("solver", bad).respond(pause("<search>x</search>"))
  assert "<calculate>" not in text_of(reply.ids)
  # Nobody else has the action.
  assert calculator("challenger").stops == ("</search>", "</question>")


def test_its_rules_stand_in_the_prompt_of_those_who_have_it():
  plain = prompts.solver("Why?")
  noted = prompts.with_note(plain, Calculator.NOTES)
  assert noted.system == f"{prompts.SOLVER} {Calculator.NOTES['solver']}"
  assert noted.user == plain.user
  shown = prompts.with_note(
    prompts.solver("Why?", "A skill."), Calculator.NOTES
  )
  assert shown.system == noted.system
  posed = prompts.challenger(types.Seed("s", ("x",), 1), 1)
  assert prompts.with_note(posed, Calculator.NOTES) == posed


# --- French -----------------------------------------------------------------


def test_french_answers_words_and_names():
  for answer in ("La Tour Eiffel", "tour eiffel.", "LA TOUR EIFFEL"):
    assert scoring.exact_match(answer, ["la tour Eiffel"], FRENCH)
  assert scoring.exact_match("l'Italie", ["Italie"], FRENCH)
  assert not scoring.exact_match("l'Italie", ["Italie"])  # English knows none
  assert FRENCH.words("L'eau de l'Arve") == ["L", "eau", "de", "l", "Arve"]
  assert "Italie" in FRENCH.entities("Quel roi d'Italie fut couronné ?")
  assert FRENCH.contains_any("Le fleuve d'Italie", ["Italie"])


# --- both at once, through the loop ------------------------------------------

LEADS = {
  "Tour Eiffel": "La tour Eiffel est une tour de fer puddlé à Paris.",
  "Seine": "La Seine est un fleuve long de 774 kilomètres qui traverse Paris.",
  "Mont Blanc": "Le mont Blanc est le point culminant des Alpes.",
  "Molière": "Molière est un comédien et dramaturge français.",
}
QUESTION = (
  "Quelle chose de ce petit monde, que décrit en une seule phrase l'article "
  "numéro {}, est celle que l'on cherche ici ?"
)


def french_script(request, attempt, turn):
  target = scripted._target(request.id)
  if request.arm == "challenger":
    if turn == 0:
      return f"<search>{target}</search>"
    return f"<question>{QUESTION.format(len(target))}</question>"
  if request.arm == "evidence":
    return f"<answer>C'est la {target}.</answer>"
  if turn == 0:
    return "<search>tour fleuve point dramaturge</search>"
  if turn == 1:
    return "<calculate>774 - 700</calculate>"
  if attempt == 0:  # four words in French alone
    return "<answer>l'eau d'or</answer>"
  # Right in French alone: the article is elided.
  answer = f"L'{target}" if attempt > 1 else "Nul"
  return f"<answer>{answer}</answer>"


def test_a_french_world_with_a_calculator_runs(tmp_path, monkeypatch):
  corpus = tmp_path / "leads_fr.json"
  rows = {t: {"title": t, "extract": text} for t, text in LEADS.items()}
  corpus.write_text(json.dumps(rows, ensure_ascii=False))
  config = tiny_config(
    **SCRIPTED
    | {
      "iterations": 1,
      "language": "tests.french:FRENCH",
      "environment.kind": "tests.calculator:Calculator",
      "environment.passages_per_search": 2,
      "environment.max_answer_words": 3,
      "verifier.tokens": 48,
      "corpus": (str(corpus),),
      "eval.sets": {},
      "pool.fixed": {},
      "pool.refill": "mask",
    }
  )
  monkeypatch.setattr(scripted, "world_script", french_script)
  with driver.playing_the_script():
    experiment.run(config, str(tmp_path / "run"))
  folder = metrics.RunFolder(tmp_path / "run")
  (file,) = metrics.episode_files(folder.path)
  rows = list(metrics.read_episodes(file))
  solved = [row for row in rows if row["arm"] == "solver"]
  assert len(solved) == 3 * 4
  for row in solved:
    actions = [turn["action"] for turn in row["turns"]]
    last = ["answer"] if row["attempt"] else ["malformed", "malformed"]
    assert actions == ["search", "calculate", *last]
    assert row["turns"][1]["observation"] == (
      "\n\n<information>74</information>\n\n"
    )
    assert Calculator.NOTES["solver"] in row["prompt"]
    assert row["verdict"] == ("wrong" if row["attempt"] < 2 else "right")
  (metric,) = folder.read("metrics.jsonl")
  assert metric["challenger/valid_rate"] == 1
  assert metric["frontier/recorded"] == 3
  written = [s for s in folder.read("skills.jsonl") if s["source_question"]]
  for skill in written:
    assert not FRENCH.mentions_any(str(skill["description"]), list(LEADS))


def test_what_there_is_not_is_said_before_the_run():
  for field, value, said in (
    ("language", "klingon", "Unknown language 'klingon'. Choices: english, or"),
    ("language", "tests.french:NONE", "language = 'tests.french:NONE'"),
    ("environment.kind", "no_such_module:X", "No module named"),
  ):
    with pytest.raises(ValueError, match=said):
      config_lib.check(tiny_config(**{field: value}))
