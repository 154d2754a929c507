"""What a compiled program's text says: its kernels and its collectives.

A compiler's own totals count a loop's body once. Here every collective comes
with the number of times that the loops around it run.
"""

from __future__ import annotations

import collections
import math
import re
from typing import NamedTuple

KINDS = (
  "all-gather",
  "all-reduce",
  "reduce-scatter",
  "all-to-all",
  "collective-permute",
  "collective-broadcast",
)
_SIZES = {"pred": 1, "bf16": 2, "c64": 8, "c128": 16}  # others end in bits
_BEGIN = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_OPERATION = re.compile(
  r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$"
)
_CALLED = re.compile(
  r"(?:calls|to_apply|body|condition|called_computation)=%?([\w.\-]+)"
)
_MANY = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")


class Collective(NamedTuple):
  """Collectives of one kind, size and number of runs."""

  kind: str  # of KINDS
  bytes: int  # of the result on one device, each time
  trips: int  # how often a call of the program runs it; 0 is unknown
  count: int  # places in the program

  @property
  def total(self) -> int:
    """Bytes in one call of the program; an unknown loop counts once."""
    return self.bytes * max(1, self.trips) * self.count


class _Operation(NamedTuple):
  name: str
  shape: str
  opcode: str
  rest: str


def _computations(text: str) -> tuple[dict[str, list[_Operation]], str]:
  """Splits a module's text by computation; also names the entry."""
  found: dict[str, list[_Operation]] = {}
  entry, current = "", None
  for line in text.splitlines():
    begin = _BEGIN.match(line)
    if begin:
      current = found.setdefault(begin[2], [])
      entry = begin[2] if begin[1] else entry
    elif current is not None and (operation := _OPERATION.match(line)):
      current.append(_Operation(*operation.groups()))
  return found, entry


def shape_bytes(shape: str) -> int:
  """Returns the bytes of a shape or tuple, `(f32[2,3]{1,0}, pred[])`."""
  total = 0
  for kind, sizes in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape):
    bits = re.search(r"\d+", kind)
    size = _SIZES.get(kind) or math.ceil(int(bits[0]) / 8 if bits else 0)
    total += size * math.prod(int(n) for n in sizes.split(",") if n)
  return total


def _trips(operation: _Operation, computations: dict) -> int:
  """Returns how often a while loop runs, or 0 where that is data."""
  known = re.search(r'known_trip_count":\{"n":"(\d+)"', operation.rest)
  if known:
    return int(known[1])
  condition = re.search(r"condition=%?([\w.\-]+)", operation.rest)
  found = computations.get(condition[1], []) if condition else []
  # `i < n` from 0 on, and nothing else, is a loop that was counted.
  tests = [o for o in found if o.opcode in ("and", "or", "call", "fusion")]
  ends = [
    int(number[1])
    for o in found
    if o.opcode == "constant" and (number := re.match(r"(\d+)\)", o.rest))
  ]
  return max(ends) if ends and not tests else 0


def collectives(text: str) -> tuple[Collective, ...]:
  """Lists the collectives of a compiled module, largest total first.

  Args:
    text: of `jax.stages.Compiled.as_text`.
  """
  computations, entry = _computations(text)
  # What is fused with matmuls, to run beside them, stands in the text once for
  # each part of itself, some of them in inner loops: its channel says that it
  # is one, and the outermost place how often it runs. Elsewhere channels may be
  # shared.
  found: dict[str, tuple[str, int, int]] = {}

  def walk(name: str, trips: int, known: bool, fused: bool) -> None:
    operations = computations.get(name, ())
    done = {
      match[1]: o.shape
      for o in operations
      if o.opcode.endswith("-done")
      and (match := re.match(r"%?([\w.\-]+)", o.rest))
    }
    for o in operations:
      kind = o.opcode.removesuffix("-start")
      if kind in KINDS:
        channel = re.search(r"channel_id=(\d+)", o.rest)
        mark = channel[1] if fused and channel else f"{name}/{o.name}"
        size = shape_bytes(done.get(o.name, o.shape))
        here = kind, size, trips if known else 0
        found[mark] = min(found.get(mark, here), here, key=lambda x: x[2])
      if o.opcode == "while":
        times = _trips(o, computations)
        body = re.search(r"body=%?([\w.\-]+)", o.rest)
        walk(body[1], trips * max(1, times), known and times > 0, False)
        continue
      called = _CALLED.findall(o.rest)
      for group in _MANY.findall(o.rest):
        called += re.findall(r"[\w.\-]+", group)
      for inner in called:
        walk(inner, trips, known, fused or o.opcode == "fusion")

  walk(entry, 1, True, False)
  counts = collections.Counter(found.values())
  rows = [Collective(*key, count) for key, count in counts.items()]
  return tuple(sorted(rows, key=lambda c: (-c.total, c)))


def kernels(text: str) -> dict[str, int]:
  """Counts the custom calls that are kernels, by family.

  `splash` and `ragged_paged` attention on TPU, `cudnn` on GPU; `pallas` is any
  other kernel of that kind.

  Args:
    text: of a compiled program, or of a lowered one, where functions that are
      called twice count once.
  """
  found: collections.Counter[str] = collections.Counter()
  for line in text.splitlines():
    target = re.search(r'custom_call_target="([^"]*)"|custom_call @(\w+)', line)
    name = (target[1] or target[2]) if target else ""
    if name.startswith("__cudnn"):
      found["cudnn"] += 1
    elif name == "tpu_custom_call":
      given = re.search(r'kernel_name = "([^"]*)"', line)
      own = (given[1] if given else line.split("=", 1)[0]).lower()
      known = [k for k in ("splash", "ragged_paged") if k in own]
      found[known[0] if known else "pallas"] += 1
  return dict(found)
