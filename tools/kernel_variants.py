"""What tools/kernel_lab.py compares: edits of the authored sources. "base" is the source as it is.

A number of choose.h or tuning.cuh takes any value: "kGrowTiles=3". NUMBERS names the ones that matter and
values worth trying; "kGrowTiles" alone stands for all of those. Variants add up: "pairs never+kWaves10=40".
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from kernel_edits import Edit, before

_SOURCES = Path(__file__).parents[1] / "src/evenkv/kernels/evenkv_cuda"

NUMBERS: dict[str, tuple[str, ...]] = {
    # How large clusters grow, and when requests stay whole.
    "kGrowTiles": ("1", "4"),
    "kSmallSlots": ("512", "2048"),
    "kLargeSplits": ("1", "4"),
    "kUncutTiles": ("4", "16"),
    "kWorstTiles": ("14", "56"),
    # Parts of even requests.
    "kEven100": ("110", "150"),
    "kEvenTiles": ("1", "4"),
    "kEvenBlocks": ("1", "3"),
    "kMostEvenParts": ("16", "64"),
    "kWaves10": ("15", "40"),
    "kWaveTokens": ("512", "2048"),
    # Parts of uneven ones.
    "kTailTokens": ("256", "1024"),
    "kTailHalvings": ("0", "1", "2", "4"),
}


@cache
def _constants() -> dict[str, tuple[str, str]]:
    """The files and values of the constants of choose.h and tuning.cuh."""
    found = {}
    for file in ("choose.h", "tuning.cuh"):
        for statement in re.findall(r"^constexpr [^;]+;", (_SOURCES / file).read_text(), re.MULTILINE):
            found |= {name: (file, value) for name, value in re.findall(r" (k\w+) = ([^,;]+)", statement)}
    return found


def number(name: str, value: str) -> Edit:
    """The edit that gives a constant another value; what it is now does not matter."""
    file, now = _constants()[name]
    return (file, f" {name} = {now}", f" {name} = {value}")


def _block(warps: str, stages: str, resident: str) -> list[Edit]:
    """Blocks of so many warps with so many tiles each, and how many an SM registers must leave room for."""
    return [number("kWarps", warps), number("kStages", stages), number("kResident", resident)]


_RUN = "TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run<kByShapes>);"
_PAIRS, _PAIRS_AT_ONCE = "items > room.clusters[0] &&", "items <= int64_t{4} * room.workers;"
_PAIRS_NEVER: Edit = ("choose.h", _PAIRS, "false &&")
_PAIR_TYPES = "if constexpr (kIsFp8 && kGroupCuts == 1)"
_LOOPS_IF = "if (small && !waves)"
_LOOPS = "clusters = std::max(parts * s.batch, std::min(at_once / s.units, numbers));"

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


def _long_waves(tenths: int, tokens: int) -> list[Edit]:
    """Long even requests cut in parts of so many tokens at least, until they make so many waves."""
    return [
        (
            "choose.h",
            "  parts = std::max<int64_t>(parts, 1);\n",
            f"  const int64_t wanted = ceil_div(at_once * {tenths}, items * 10);\n"
            f"  if (!never_even) parts = std::max(parts, std::min(wanted, average / {tokens}));\n"
            "  parts = std::max<int64_t>(parts, 1);\n",
        )
    ]


# No more blocks an SM than a launch that does not fill the device needs: clusters spread over more SMs.
_SPREAD: list[Edit] = [
    (
        "choose.h",
        "  int32_t clusters[kMostSplits];  //",
        "  int32_t spread[2][kMostSplits];\n  int32_t clusters[kMostSplits];  //",
    ),
    (
        "kernel.cu",
        "!allow_shared(cut, kBytes) || !allow_shared(uncut, kBytes) ||",
        "!allow_shared(cut, kSharedBudget) || !allow_shared(uncut, kSharedBudget) ||",
    ),
    (
        "kernel.cu",
        "    if (status == cudaErrorInvalidClusterSize) {",
        "    for (int few = 0; few < 2; ++few) {\n"
        "      Launch<kHeads> spread(splits, 1, 1, nullptr);\n"
        "      spread.config.dynamicSmemBytes = spread_bytes(few + 1);\n"
        "      cudaOccupancyMaxActiveClusters(&room.spread[few][splits - 1], cut, &spread.config);\n"
        "      cudaGetLastError();\n    }\n"
        "    if (status == cudaErrorInvalidClusterSize) {",
    ),
    before(
        "kernel.cu",
        "template <int kHeads>\nbool ask_for_room",
        "// Shared memory with which so few blocks fit an SM (228 KB; each has 1 KB beside its own).\n"
        "constexpr size_t spread_bytes(int few) {\n"
        "  return (228 * 1024 / (few + 1) + 1023) / 1024 * 1024;\n}\n\n",
    ),
    (
        "kernel.cu",
        "  void* arguments[] = {&p};\n",
        "  void* arguments[] = {&p};\n"
        "  const int64_t blocks = int64_t{choice.splits} * units * choice.clusters;\n"
        "  for (int few = 2; few >= 1 && choice.splits > 1; --few) {\n"
        "    if (units * choice.clusters <= room.spread[few - 1][choice.splits - 1] &&\n"
        "        blocks <= int64_t{few} * room.workers) {\n"
        "      launch.config.dynamicSmemBytes = std::max(sizeof(BlockShared<kHeads>), spread_bytes(few));\n"
        "    }\n  }\n",
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
    # Two KV heads a block: in no batch; in every fp8 one; where fp8 has them, in 16 bits too.
    "pairs never": [_PAIRS_NEVER],
    "pairs always": [("choose.h", _PAIRS, ""), ("choose.h", _PAIRS_AT_ONCE, "items > 0;")],
    "pairs of 16 bits": [("kernel.cu", _PAIR_TYPES, "if constexpr (kGroupCuts == 1)")],
    "long waves 60": _long_waves(60, 4096),
    "long waves 100": _long_waves(100, 4096),
    "long waves 100 of 8192": _long_waves(100, 8192),
    "spread": _SPREAD,
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
}
_NUMBERED = {f"{name}={value}": [number(name, value)] for name, values in NUMBERS.items() for value in values}

NAMED = tuple(_NAMED)
VARIANTS = {**_NAMED, **_NUMBERED}


def _forced(parts: str, splits: str) -> list[Edit]:
    """Every even request in so many parts, of clusters of so many blocks."""
    return [
        ("choose.h", "parts = std::max<int64_t>(parts, 1);", f"parts = {parts};"),
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
