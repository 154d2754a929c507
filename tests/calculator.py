"""Another tool: arithmetic between the searches, in one file."""

from __future__ import annotations

import re

from sesa_jax.environment import SearchQA

_PRODUCT = re.compile(r"\s*(-?\d{1,9})\s*([-+*])\s*(-?\d{1,9})\s*")


class Calculator(SearchQA):
  """Search question answering with `<calculate>17 * 3</calculate>`."""

  ROLES = SearchQA.ROLES | {"solver": ("search", "calculate", "answer")}
  NOTES = {
    "solver": "Write <calculate>17 * 3</calculate> and the result comes back."
  }

  def act(self, action):
    """Computes, or searches."""
    if action.kind != "calculate":
      return super().act(action)
    match = _PRODUCT.fullmatch(action.argument)
    if not match:
      return f"{action.argument} is not two whole numbers with +, - or *."
    a, b = int(match[1]), int(match[3])
    return str({"+": a + b, "-": a - b, "*": a * b}[match[2]])
