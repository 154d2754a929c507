"""docs/plans.md: what it must show of the paper's backbones."""

import json

import pytest

from benchmarks import plans
from sesa_jax.policy import backbones


def test_the_page_shows_the_plans():
  """Neither is edited by hand; every paper backbone on every target."""
  found = json.loads((plans.DOCS / "plans.json").read_text("utf-8"))
  assert (plans.DOCS / "plans.md").read_text("utf-8") == plans.page(found)
  assert len(plans.CONFIGS) == 7
  assert {f"{c} {t}" for c in plans.CONFIGS for t in plans.TARGETS} <= (
    found.keys()
  )


@pytest.mark.parametrize("target", plans.TARGETS)
@pytest.mark.parametrize("name", plans.CONFIGS)
def test_what_the_plans_must_hold(name, target):
  """They fit as they are; kernels, donated pages, small temporaries."""
  found = json.loads((plans.DOCS / "plans.json").read_text("utf-8"))
  found = found[f"{name} {target}"]
  assert found["fits"], found["remedies"]
  programs, layers = found["programs"], backbones.published(name).layers
  cudnn = target.startswith("a100")
  training = "cudnn" if cudnn else "splash"
  rollout = "cudnn" if cudnn else "ragged_paged"
  assert programs["accumulate"]["kernels"].keys() == {training}
  assert programs["decode"]["kernels"] == {rollout: layers}
  assert programs["prefill"]["kernels"] == {rollout: layers - 1}
  pool = programs["copy"]["aliased"]
  for label in "decode", "prefill":
    assert programs[label]["aliased"] >= pool
    if not cudnn:
      assert programs[label]["temporaries"] < 0.05 * pool


@pytest.mark.parametrize(
  ("target", "rows", "length", "most"),
  [("v5e:4x4", 16, 4096, 7.0), ("a100:8", 16, 8192, 15.5)],
)
def test_a_step_s_memory_at_shorter_lengths(target, rows, length, most):
  found = json.loads((plans.DOCS / "plans.json").read_text("utf-8"))
  key = plans.key("qwen3_4b", target, plans.lengths(length, rows))
  assert found[key]["microbatch"]["solver"] == [rows, length]
  assert found[key]["step"] / 2**30 <= most
