"""Edits that make choose.h ask the environment, at every launch, for what it settles otherwise by itself.

So one build of the CUDA kernel serves any cut: tools/kernel_sweep.py measures hundreds of cuts a second. The
edited kernel is for measuring alone: a launch asks for some 40 variables.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

from kernel_edits import Edit, constants

VARIANT = "knobs"  # the name of these edits in kernel_variants.py
# kernel.cu needs it at compile time.
_FIXED = ("kFewBlocks",)

# What overrules the shapes, beside the numbers of choose.h: name, meaning.
STRUCTURE = {
    "W": "1: single heads, 2: pairs with two blocks an SM, 3: pairs",
    "S": "blocks a cluster",
    "P": "parts of an even request",
    "U": "1: every batch is uneven, and none is uncut",
    "D": "numbers dealt to up to 32 requests; 0: none are",
    "A": "with D, 1: each block takes a dealt part alone",
    "H": "most halvings in the tail",
    "TT": "least tokens of a part in the tail",
    "TS": "hundredths of the slots that are the tail",
}

# From, to.
_RANGES = {"W": (1, 3), "S": (1, 8), "P": (1, 1 << 15), "U": (0, 1), "A": (0, 1), "TS": (1, 99)}

_ASK = """#include <cstdlib>

inline int64_t knob(const char* name, int64_t otherwise) {
  const char* const text = getenv(name);
  return text != nullptr && *text != 0 ? atoll(text) : otherwise;
}
"""
_PARTS = "choose_even_parts(s, room, average, choice.splits, small);"
# File, text, replacement; each hits once.
_STRUCTURE: list[tuple[str, str]] = [
    ("#pragma once\n", f"#pragma once\n#include <cstdint>\n{_ASK}"),
    (
        "few = kFewBlocks * room.workers;\n",
        'few = kFewBlocks * room.workers;\n  if (const int64_t width = knob("W", 0)) {\n'
        "    if (width == 1 || s.units % 2 != 0) return {1, false};\n    return {2, width == 2};\n  }\n",
    ),
    (
        "  const Dealing dealing =\n      invariant_tokens > 0 ? Dealing{0, false} : ",
        '  if (invariant_tokens == 0 && knob("S", 0) > 0) choice.splits = knob("S", 0);\n'
        '  const bool uneven = knob("U", 0) != 0;\n  const int64_t dealt = knob("D", -1);\n'
        "  const bool fits = dealt > s.batch && s.batch > 1 && s.batch <= kMostDealt;\n"
        "  const Dealing dealing =\n      invariant_tokens > 0 ? Dealing{0, false}\n"
        '      : dealt >= 0 ? Dealing{fits ? dealt : 0, fits && knob("A", 0) != 0} : ',
    ),
    # What is asked for stays: clusters do not shrink to be dealt, nor do even requests count as uneven.
    ("  while (small && chosen > 1 &&", '  while (small && knob("S", 0) <= 0 && chosen > 1 &&'),
    (
        "levelled = level > 0 && average >= level;",
        'levelled = uneven || (knob("P", 0) <= 0 && level > 0 && average >= level);',
    ),
    (
        f"never_even || levelled ? 1 : {_PARTS}",
        f'never_even || levelled ? 1 : knob("P", 0) > 0 ? knob("P", 0) : {_PARTS}',
    ),
    ("static_cast<int32_t>(never_even     ? -1\n", "static_cast<int32_t>(never_even ? -1 : uneven ? 0\n"),
    (
        "invariant_tokens > 0 || waves ? 0 : kUncutTiles",
        "invariant_tokens > 0 || waves || uneven ? 0 : kUncutTiles",
    ),
    ("(levelled ? level - 1 : cut.whole_tokens)", "(uneven ? 0 : levelled ? level - 1 : cut.whole_tokens)"),
    (
        "(late ? slots / 4 * 3 : slots / 2) / cut.part_tokens",
        '(knob("TS", 0) > 0 ? slots * (100 - knob("TS", 0)) / 100 : late ? slots / 4 * 3 : slots / 2) / '
        "cut.part_tokens",
    ),
    ("tail_slot > 0 && (waves || !small))", "tail_slot > 0 && (waves || !small || uneven))"),
    (
        "halvings = is_large(s, room) ?",
        'halvings = knob("H", -1) >= 0 ? knob("H", -1) : is_large(s, room) ?',
    ),
    ("enough = [&](int32_t halving) {", "enough = [&](int32_t halving) -> int64_t {"),
    (
        ">= std::max(enough(cut.tail_scale + 1), least)) {",
        '>= (knob("TT", 0) > 0 ? knob("TT", 0) : std::max<int64_t>(enough(cut.tail_scale + 1), least))) {',
    ),
    ("choice.uncut = may_stay_uncut &&", "choice.uncut = !uneven && may_stay_uncut &&"),
]


@cache
def numbers() -> dict[str, str]:
    """The numbers of choose.h that the environment may overrule, and what they are."""
    every = (item for _, values in constants("choose.h") for item in values.items())
    return {name: value for name, value in every if name not in _FIXED}


def knob_edits() -> list[Edit]:
    """The edits, for `kernel_edits.apply` or `kernel_lab.variant_solution`."""
    edits = [("choose.h", text, replacement) for text, replacement in _STRUCTURE]
    for statement, values in constants("choose.h"):
        if not set(_FIXED) & set(values):
            macros = [f'#define {name} (knob("{name}", {value.strip()}))' for name, value in values.items()]
            edits.append(("choose.h", statement, "\n".join(macros)))
    return edits


def parse_setting(text: str) -> dict[str, str]:
    """Knobs and values of "kWorstTiles=28,W=2"."""
    setting = {}
    for part in text.split(",") if text else []:
        name, _, value = part.strip().partition("=")
        if name not in numbers() and name not in STRUCTURE:
            wanted = ", ".join([*STRUCTURE, *numbers()])
            raise SystemExit(f"setting {text!r}: wanted knobs among {wanted}; got {name!r}.")
        if not re.fullmatch(r"-?\d+", value):
            raise SystemExit(f"setting {text!r}: wanted {name}=INTEGER, got {value!r}.")
        first, last = _RANGES.get(name, (0, math.inf))
        if not first <= int(value) <= last:
            raise SystemExit(f"setting {text!r}: wanted {name} from {first} to {last}, got {value}.")
        setting[name] = value
    return setting


@contextmanager
def setting(knobs: Mapping[str, object]) -> Iterator[None]:
    """With these knobs in the environment, and no others of ours."""
    for name in [*STRUCTURE, *numbers()]:
        os.environ.pop(name, None)
    os.environ.update({name: str(value) for name, value in knobs.items()})
    try:
        yield
    finally:
        for name in knobs:
            os.environ.pop(name, None)
