"""What tools/kernel_lab.py compares: edits of the authored sources. "base" is the source as it is.

A number of choose.h or tuning.cuh takes any value: "kGrowTiles=3". NUMBERS names the ones that matter and
values worth trying; "kGrowTiles" alone stands for all of those. Variants add up: "pairs never+kWaves10=40".
"""

from __future__ import annotations

import re
from functools import cache

from kernel_edits import Edit, before, constants
from kernel_knobs import VARIANT, knob_edits
from kernel_waits import WAITING

NUMBERS: dict[str, tuple[str, ...]] = {
    # How large clusters grow, and when requests stay whole.
    "kGrowTiles": ("1", "4"),
    "kSmallBytes": ("1 << 17", "1 << 19"),
    "kLargeSplits": ("1", "4"),
    "kUncutTiles": ("4", "16"),
    "kWorstTiles": ("14", "28"),
    # Parts of even requests.
    "kEven100": ("110", "150"),
    "kEvenTiles": ("1", "4"),
    "kEvenBlocks": ("1", "3"),
    "kMostEvenParts": ("16", "32"),
    "kLevel10": ("0", "30"),
    "kWaves10": ("15", "40"),
    "kLongBytes": ("1 << 17", "1 << 19"),
    "kFullWave100": ("70", "95"),
    "kLargeSlots": ("12288", "49152"),
    "kPairSlots": ("7936", "24576"),
    # Parts of uneven ones.
    "kFair100": ("50", "67", "80"),
    "kFairTiles": ("0", "1", "4"),
    "kTailTokens": ("512", "1024"),
    "kPairTailTokens": ("256", "1024"),
    # Dealt ones.
    "kDealtBytes": ("0", "1 << 21", "5 << 20"),
    "kAloneParts": ("0", "16"),
    # Tensor copies: from how many slots an SM on; never.
    "kTensorSlots": ("0", "8192", "1LL << 40"),
    "kSmallDealt100": ("30", "60"),
    "kDealt100": ("10", "100"),
    "kMostAtOnce": ("16", "24", "9999"),
    "kTailHalvings": ("0", "1", "2", "4"),
    "kLargeTailHalvings": ("3", "5"),
}


@cache
def _constants() -> dict[str, tuple[str, str]]:
    """The files and values of the constants of choose.h and tuning.cuh."""
    found = {}
    for file in ("choose.h", "tuning.cuh"):
        for _, values in constants(file):
            found |= {name: (file, value) for name, value in values.items()}
    return found


def number(name: str, value: str) -> Edit:
    """The edit that gives a constant another value; what it is now does not matter."""
    file, now = _constants()[name]
    return (file, f" {name} = {now}", f" {name} = {value}")


def _block(warps: str, stages: str, resident: str) -> list[Edit]:
    """Blocks of so many warps with so many tiles each, and how many an SM registers must leave room for."""
    return [number("kWarps", warps), number("kStages", stages), number("kResident", resident)]


_RUN = "TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run<kByShapes>);"
_WIDTH = "  if (invariant_tokens > 0 || s.units % 2 != 0) return {1, false};\n"
_PAIRS_NEVER: Edit = ("choose.h", _WIDTH, "  if (true) return {1, false};\n")
_PAIRS_ALWAYS: Edit = ("choose.h", _WIDTH, f"{_WIDTH}  if (true) return {{2, items > 2 * few}};\n")
_LOOPS_IF = "if (small && !waves)"
_LOOPS = "clusters = std::max(parts * s.batch, std::min<int64_t>(at_once / s.units, cut.numbers));"

# Rows of any pages with fewer instructions: the row's mark travels with its place, and one multiply-add makes
# the address.
_SHORT_ROWS: list[Edit] = [
    (
        "cursor.cuh",
        "    base += chunk * 16;\n",
        "    base = opaque(base + chunk * 16);\n"
        "    const uint32_t marked = rows >> lane_ & 1 ? offset : ~0u;\n",
    ),
    (
        "cursor.cuh",
        "const uint64_t units = __shfl_sync(kAllLanes, offset, row);",
        "const uint32_t units = __shfl_sync(kAllLanes, marked, row);",
    ),
    ("cursor.cuh", "base + units * p_.row_unit,", "base + static_cast<uint64_t>(units) * p_.row_unit,"),
    ("cursor.cuh", "(rows >> row & 1) ? 16 : 0);", "units != ~0u ? 16 : 0);"),
]

# Sixteen rows side by side with fewer instructions: 32-bit places, and addresses of rows that are not read
# need not lie in memory.
_SHORT_BLOCKS: list[Edit] = [
    ("cursor.cuh", "if (row + kRowsPerCopy < wanted) src +=", "src +="),
    ("cursor.cuh", "const int64_t page = readable ? id : 0;", "const uint32_t page = readable ? id : 0;"),
    (
        "cursor.cuh",
        "const int64_t in_page = slot - index * p_.page_size;",
        "const uint32_t in_page = slot - index * p_.page_size;",
    ),
    *(
        (
            "cursor.cuh",
            f"{rows} + (page * p_.{kv}_stride_page + in_page * p_.{kv}_stride_slot) * kElementBytes,",
            f"{rows} + static_cast<uint64_t>(page * p_.{kv}_page_units + in_page * p_.{kv}_slot_units) "
            "* p_.row_unit,",
        )
        for kv, rows in (("k", "keys"), ("v", "values"))
    ),
]


_NAMED: dict[str, list[Edit]] = {
    "base": [],
    # What the launch alone takes: nothing is computed.
    "exit at entry": [before("kernel.cuh", "  // Page ids: into L2", "  if (p.batch > 0) return;")],
    # Every request as one that may be cut; with parts whose bits do not depend on the batch.
    "always cut": [("binding.cpp", _RUN, _RUN.replace("kByShapes", "kAlwaysCut"))],
    "batch invariant": [("binding.cpp", _RUN, _RUN.replace("kByShapes", "kBatchInvariant"))],
    # One cluster a number but no more than run at once, where the batch does; in any batch.
    "loops": [("choose.h", _LOOPS_IF, "if (!waves)")],
    "loops in waves": [
        ("choose.h", _LOOPS_IF, "if (true)"),
        ("choose.h", _LOOPS, "clusters = std::min(clusters, std::max<int64_t>(at_once / s.units, 1));"),
    ],
    # Two KV heads a block: in no batch; in every one with an even number of them; as many as fit an SM.
    "pairs never": [_PAIRS_NEVER],
    "pairs always": [_PAIRS_ALWAYS],
    "many pairs": [("choose.h", "Width{2, items > 2 * few}", "Width{2, false}")],
    "pairs of large batches": [
        ("choose.h", "window || slots_an_sm(s, room) >= kPairSlots ?", "slots_an_sm(s, room) >= kPairSlots ?")
    ],
    "merges of 16": [("merge_blocks.cuh", "kBatch = kQuads > 1 ? 4 : 8;", "kBatch = kQuads > 1 ? 4 : 16;")],
    # The last part of a request waits for the others' partials where all run at once.
    "waiting merges": WAITING,
    # A store of 8 bytes in the place of two that the compiler makes of it.
    "whole stores": [
        (
            "merge.cuh",
            "*reinterpret_cast<uint2*>(out + (k * kRowLanes + lane) * 4) =\n          make_uint2(",
            "__stcg(reinterpret_cast<uint2*>(out + (k * kRowLanes + lane) * 4),\n          make_uint2(",
        ),
        (
            "merge.cuh",
            "pack_pair<kQueryIsHalf>(o[k].z * factor, o[k].w * factor));",
            "pack_pair<kQueryIsHalf>(o[k].z * factor, o[k].w * factor)));",
        ),
    ],
    "pairs of 16 bits": [("tuning.cuh", "kRowBytes <= 128;", "kWarps == 4;")],
    "2 warps": _block("2", "2", "6"),
    "3 warps": [*_block("3", "2", "4"), _PAIRS_NEVER],
    "8 warps": _block("8", "2", "1"),
    "8 warps of 3 stages": _block("8", "3", "1"),
    "6 warps of 4 stages": _block("6", "4", "1"),
    "3 stages": _block("4", "3", "2"),
    "4 stages": _block("4", "4", "1"),
    "2 resident": [number("kResident", "2")],
    "short rows": _SHORT_ROWS,
    "short blocks": _SHORT_BLOCKS,
    # Every number of choose.h from the environment: kernel_sweep.py.
    VARIANT: knob_edits(),
}
_NUMBERED = {f"{name}={value}": [number(name, value)] for name, values in NUMBERS.items() for value in values}

NAMED = tuple(_NAMED)
VARIANTS = {**_NAMED, **_NUMBERED}


def _forced(parts: str, splits: str) -> list[Edit]:
    """Every even request in so many parts, of clusters of so many blocks."""
    return [
        ("choose.h", "level > 0 && average >= level", "false"),
        ("choose.h", "choose_even_parts(s, room, average, choice.splits, small);", f"{parts};"),
        ("choose.h", "invariant_tokens > 0 ? 1 : choose_splits(s, room, average, small);", f"{splits};"),
    ]


def edits_of(variant: str) -> list[Edit]:
    """The edits that a name stands for; variants joined by "+" follow one another."""
    edits = []
    for part in variant.split("+"):
        name, _, value = part.partition("=")
        forced = re.fullmatch(r"(\d+) parts? of (\d+)", part)
        if part in VARIANTS:
            edits += VARIANTS[part]
        elif forced:
            edits += _forced(*forced.groups())
        elif name in _constants() and value:
            edits.append(number(name, value))
        else:
            raise SystemExit(
                f"variant {part!r}: wanted {', '.join(NAMED)}, or a number of choose.h or tuning.cuh "
                "like 'kGrowTiles=3'"
            )
    return edits


def choose_variants(names: str) -> list[str]:
    """The variants of a comma-separated list, in which a number alone stands for the values in NUMBERS."""
    chosen = []
    for name in names.split(","):
        chosen += [f"{name}={value}" for value in NUMBERS[name]] if name in NUMBERS else [name]
    return chosen
