"""What tools/kernel_lab.py compares: edits of the authored sources. "base" is the source as it is.

A number of choose.h or tuning.cuh takes any value: "kGrowTiles=3". NUMBERS names the ones that matter and
values worth trying; "kGrowTiles" alone stands for all of those. Variants add up: "pairs never+kWaves10=40".
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from kernel_edits import Edit, after, before

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
    "kMostEvenParts": ("16", "64"),
    "kWaves10": ("15", "40"),
    "kWaveTokens": ("512", "2048"),
    # Parts of uneven ones.
    "kFairParts": ("2", "4"),
    "kUnevenTokens": ("1024", "4096"),
    "kUnevenWaveTokens": ("2048", "6144"),
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
_PAIRS = "if (p.invariant_tokens == 0 && p.num_kv_heads % 2 == 0 && items > room->clusters[0] &&"
_PAIRS_AT_ONCE = "items <= int64_t{4} * room->workers) {"
_PAIRS_NEVER: Edit = ("kernel.cu", _PAIRS, f"if (false && {_PAIRS.removeprefix('if (')}")
_PAIR_TYPES = "if constexpr (kIsFp8 && kGroupCuts == 1)"
_EVEN_PARTS = "parts = std::min(at_once / items, average / (kEvenTiles * step));"
_FEW_PARTS = "parts = std::min({{at_once / items, average / (kEvenTiles * step), int64_t{{{most}}}}});"
_LOOPS_IF = "if (small && !waves)"
_LOOPS = "clusters = std::max(parts * s.batch, std::min(at_once / s.units, numbers));"

# Rows of any pages with fewer instructions: the row's mark travels with its place, and one multiply-add makes
# the address.
_SHORT_ROWS: list[Edit] = [
    before(
        "ptx.cuh",
        "__device__ __forceinline__ void prefetch_l2(",
        "template <typename T>\n__device__ __forceinline__ const T* opaque(const T* p) {\n"
        '  asm("" : "+l"(p));\n  return p;\n}\n',
    ),
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

# kv_last_page_len comes with the trip that reads kv_indptr, not with one of its own.
_LENGTHS_AT_ONCE: list[Edit] = [
    (
        "find.cuh",
        "__ldg(p.kv_indptr + request + 1) - __ldg(p.kv_indptr + request));",
        "Request(p, request, p.num_kv_indices).length);",
    ),
    ("kernel.cuh", "p.cut.even_pages >> part.scale;", "(p.cut.even_pages >> part.scale) * p.page_size;"),
]

# No larger clusters than as few tiles a warp need: 8 requests of 1,024 tokens in clusters of 4, not 5.
_FEWEST_BLOCKS: list[Edit] = [
    (
        "choose.h",
        "  return splits;\n",
        "  const auto tiles = [&](int32_t n) { return ceil_div(average, s.block_tokens * n); };\n"
        "  while (splits > 1 && tiles(splits - 1) == tiles(splits)) --splits;\n"
        "  return splits;\n",
    )
]

# Blocks that fill the last layer of SMs badly leave a few SMs to end last: 17 x 8,192 tokens kv8 are 272.
_LEVEL_LAYERS: list[Edit] = [
    (
        "choose.h",
        "  cut.even_parts = static_cast<int32_t>(parts);\n",
        "  const auto layers = [&](int64_t n) {\n"
        "    return static_cast<double>(ceil_div(items * choice.splits * n, room.workers)) / n;\n"
        "  };\n"
        "  const bool fills = !never_even && !waves && items * choice.splits * parts > room.workers;\n"
        "  for (int64_t n = parts + 1; fills && n <= 4 && average / n >= kWaveTokens; ++n) {\n"
        "    if (layers(n) < 0.9 * layers(parts)) parts = n;\n"
        "  }\n"
        "  cut.even_parts = static_cast<int32_t>(parts);\n",
    )
]

# No request in more than 64 parts: they are added up eight at a time. One KV head then wants larger clusters.
_UNEVEN_64THS: list[Edit] = [
    ("choose.h", "most = std::min(most, slots);", "most = std::min(std::max(most, slots / 64), slots);")
]
_CLUSTERS_FOR_ONE_UNIT: list[Edit] = [
    (
        "choose.h",
        "  int32_t splits = 1;\n",
        "  while (most < kMostSplits && room.clusters[most - 1] / s.units > 64) ++most;\n"
        "  int32_t splits = 1;\n",
    )
]

# Whether a batch is even: by what kv_indptr counts, not by halvings of what kv_indices could hold.
_EVEN_BY_COUNT: list[Edit] = [
    (
        "kernel.cuh",
        "longest_request(p) <= p.cut.even_pages >> part.scale;",
        "int64_t{4} * longest_request(p) * p.batch <= int64_t{5} * listed + 4 * p.batch;",
    )
]

# Parts of small problems that do not run at once need not keep 1,024 tokens.
_SHORT_SMALL_WAVES: list[Edit] = [
    (
        "choose.h",
        "std::min(std::max(average, kWaveTokens),",
        "std::min(std::max(average, small ? std::max<int64_t>(512, kUnevenTiles * step) : kWaveTokens),",
    )
]

# Uneven parts that make whole waves: each request leaves half a part, on average.
_WHOLE_WAVES: list[Edit] = [
    (
        "choose.h",
        "small ? fair : std::max(fair / kFairParts, std::min(fair, kUnevenTokens));",
        "small ? fair\n"
        "        : std::max(slots / std::max<int64_t>(kFairParts * at_once / s.units - s.batch / 2, 1),\n"
        "                   std::min(fair, kUnevenTokens));",
    )
]

# Clusters for uneven numbers: at most one wave more than an even batch takes.
_ONE_WAVE_MORE: list[Edit] = [
    (
        "choose.h",
        "std::max(never_even ? 1 : parts * s.batch, numbers);",
        "std::max(never_even ? 1 : parts * s.batch, std::min(numbers, parts * s.batch + at_once / s.units));",
    )
]

# A table that falls counts as even: every request is found, and counters return to zero.
_EVEN_IF_IT_FALLS: list[Edit] = [
    (
        "find.cuh",
        "longest = max(longest, __ldg(p.kv_indptr + request + 1) - __ldg(p.kv_indptr + request));",
        "const int32_t pages = __ldg(p.kv_indptr + request + 1) - __ldg(p.kv_indptr + request);\n"
        "    longest = pages < 0 ? INT32_MAX : max(longest, pages);",
    ),
    (
        "find.cuh",
        "return static_cast<int32_t>(__reduce_max_sync(kAllLanes, static_cast<uint32_t>(longest)));",
        "longest = static_cast<int32_t>(__reduce_max_sync(kAllLanes, static_cast<uint32_t>(longest)));\n"
        "  return longest == INT32_MAX ? 0 : longest;",
    ),
]

# Page ids of a request that stays whole: asked for beside its lengths, as if all had the average one.
_GUESSED_IDS: list[Edit] = [
    before(
        "cursor.cuh",
        "class Cursor {",
        "struct PageIds {\n  int32_t first = -1, now = -1, next = -1, later = -1;\n};\n\n"
        "// Where a warp begins in a request of average length after others of that length.\n"
        "__device__ __forceinline__ PageIds guess_ids(const DecodeParams& p, int32_t request,\n"
        "                                             int32_t warp) {\n"
        "  const int32_t slots = divide(p.cut.even_tokens, p.by_page_size) * p.page_size;\n"
        "  const TileRange all = {0, (slots + kTileTokens - 1) / kTileTokens};\n"
        "  const int32_t slot = request * slots + tiles_of_warp(p.cut, all, warp).begin * kTileTokens;\n"
        "  const int32_t first = divide(slot, p.by_page_size);\n"
        "  const auto id = [&](int32_t index) {\n"
        "    return index < p.num_kv_indices ? __ldg(p.kv_indices + index) : -1;\n  };\n"
        "  const int32_t own = first + static_cast<int32_t>(threadIdx.x & 31);\n"
        "  return {first, id(own), id(own + 32), id(own + 64)};\n}\n\n",
    ),
    (
        "cursor.cuh",
        "const Request& span, const TileRange& tiles)",
        "const Request& span, const TileRange& tiles, const PageIds& guessed)",
    ),
    (
        "cursor.cuh",
        "    load_ids(divide(slot_, p.by_page_size));\n",
        "    const int32_t first = divide(slot_, p.by_page_size);\n"
        "    if (first != guessed.first) {\n      load_ids(first);\n      return;\n    }\n"
        "    id_base_ = first;\n    ids_now_ = guessed.now;\n    ids_next_ = guessed.next;\n"
        "    ids_later_ = guessed.later;\n",
    ),
    after(
        "kernel.cuh",
        "  const Request span(p, part.request, listed);\n",
        "  PageIds guessed;\n"
        "  if (kUncut) guessed = guess_ids(p, part.request, rank * (kWarps / kHeads) + warp / kHeads);\n",
    ),
    ("kernel.cuh", "Cursor cursor(p, span, tiles);", "Cursor cursor(p, span, tiles, guessed);"),
]
_MERGE_BATCH = "kQuads > 1 ? 4 : 8;"

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
    "pairs always": [
        ("kernel.cu", _PAIRS, _PAIRS.replace("items > room->clusters[0]", "items > 0")),
        ("kernel.cu", _PAIRS_AT_ONCE, "items > 0) {"),
    ],
    "pairs of 16 bits": [("kernel.cu", _PAIR_TYPES, "if constexpr (kGroupCuts == 1)")],
    "lengths at once": _LENGTHS_AT_ONCE,
    "fewest blocks": _FEWEST_BLOCKS,
    "guessed ids": _GUESSED_IDS,
    "level layers": _LEVEL_LAYERS,
    "parts to 64ths": _UNEVEN_64THS,
    "clusters for one unit": _CLUSTERS_FOR_ONE_UNIT,
    "even by count": _EVEN_BY_COUNT,
    "short small waves": _SHORT_SMALL_WAVES,
    # With larger clusters (kLargeSplits): as few partials to add up at the end.
    "at most 4 parts": [("choose.h", _EVEN_PARTS, _FEW_PARTS.format(most=4))],
    "at most 8 parts": [("choose.h", _EVEN_PARTS, _FEW_PARTS.format(most=8))],
    "whole waves": _WHOLE_WAVES,
    "one wave more": _ONE_WAVE_MORE,
    "even if it falls": _EVEN_IF_IT_FALLS,
    "merges of 12": [("merge_blocks.cuh", _MERGE_BATCH, "kQuads > 1 ? 4 : 12;")],
    "merges of 16": [("merge_blocks.cuh", _MERGE_BATCH, "kQuads > 1 ? 4 : 16;")],
    "2 warps": _block("2", "2", "6"),
    "3 warps": [*_block("3", "2", "4"), _PAIRS_NEVER],
    "8 warps": _block("8", "2", "1"),
    "3 stages": _block("4", "3", "2"),
    "4 stages": _block("4", "4", "1"),
    "2 resident": [number("kResident", "2")],
    "short rows": _SHORT_ROWS,
    "short blocks": _SHORT_BLOCKS,
}
_NUMBERED = {f"{name}={value}": [number(name, value)] for name, values in NUMBERS.items() for value in values}

NAMED = tuple(_NAMED)
VARIANTS = {**_NAMED, **_NUMBERED}


def edits_of(variant: str) -> list[Edit]:
    """The edits that a name stands for; variants joined by "+" follow one another."""
    edits = []
    for part in variant.split("+"):
        name, _, value = part.partition("=")
        if part in VARIANTS:
            edits += VARIANTS[part]
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
