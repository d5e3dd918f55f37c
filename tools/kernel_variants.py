"""What tools/kernel_lab.py compares: edits of the authored sources. "base" is the source as it is."""

from __future__ import annotations

from kernel_edits import Edit, after, before

_TUNING = "constexpr ScheduleTuning kScheduleTuning = {kTileTokens * kWarps, 16384, 512};"


def _schedule(single_round_slots: int, tail_chunk: int) -> Edit:
    changed = _TUNING.replace("16384, 512", f"{single_round_slots}, {tail_chunk}")
    return ("tuning.cuh", _TUNING, changed)


_FIRST_ROUND = "round == 0 ? per_worker - (per_worker >> 2) : per_worker >> (round + 2)"
_SEVEN_EIGHTHS = "round == 0 ? per_worker - (per_worker >> 3) : per_worker >> (round + 3)"

_FIFTEEN_SIXTEENTHS = "round == 0 ? per_worker - (per_worker >> 4) : per_worker >> (round + 4)"

_ROUNDS = [_schedule(1024, 256)]

_FIT = "  fit_chunks_to_requests(s, unit_slots / batch);\n"
_SMALL = "kSmallSlotsPerWorker = 1024, kSmallMostTokens = 2560;"
_SMALL_BLOCKS = "constexpr int kSmallWarps = 4, kSmallThreads = kSmallWarps * 32, kSmallStages = 2;"
_RESIDENT = "kSmallResident = kHeadDim > 128 || kColumnBlocks > 1 ? 2 : 3"
_RUN = "TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run<kByShapes>);"


def _small_blocks(warps: int, stages: int, resident: int) -> list[Edit]:
    blocks = _SMALL_BLOCKS.replace("Warps = 4", f"Warps = {warps}").replace(
        "Stages = 2", f"Stages = {stages}"
    )
    return [("tuning.cuh", _SMALL_BLOCKS, blocks), ("tuning.cuh", _RESIDENT, f"kSmallResident = {resident}")]


# Half the warps and shared memory a block: one block's end beside the other's stream.
_TWO_BLOCKS: list[Edit] = [
    ("tuning.cuh", "? 232448", "? 115200"),
    ("tuning.cuh", "kWarps == 8 ? 3 : kColumnBlocks > 1 ? 1 : 2", "kWarps == 8 ? 3 : 1"),
    _schedule(8192, 256),
    ("kernel.cu", "prepare(p, *workers, kHeads", "prepare(p, *workers * 2, kHeads"),
    ("kernel.cuh", "__launch_bounds__(kThreads, 1)", "__launch_bounds__(kThreads, 2)"),
]

# More blocks for a long request among short ones than any device takes; an H200 does.
_ALLOWED = "!allow_shared(small_decode_kernel, sizeof(SmallShared))"
_SIZE_ALLOWED = "small_decode_kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1"
_CLUSTERS_OF_16: list[Edit] = [
    ("ptx.cuh", "constexpr int kMostSplits = 8;", "constexpr int kMostSplits = 16;"),
    (
        "small_launch.cuh",
        _ALLOWED,
        f'{_ALLOWED} || failed(cudaFuncSetAttribute({_SIZE_ALLOWED}), "clusters of 16")',
    ),
]

# Rows of any pages with fewer instructions: the row's mark travels with its place, and one multiply-add makes
# the address.
_SHORT_ROWS: list[Edit] = [
    before(
        "ptx.cuh",
        "// Named barriers of a block: some",
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

# A policy in registers is moved to uniform ones before each copy: 32 instructions a tile.
_NO_POLICY: Edit = ("cursor.cuh", "copy_async_16<true>", "copy_async_16<false>")

_ALL_SHORT = [*_SHORT_BLOCKS, *_SHORT_ROWS, _NO_POLICY]

VARIANTS: dict[str, list[Edit]] = {
    "base": [],
    "rounds": _ROUNDS,
    "rounds 7/8": [*_ROUNDS, ("schedule.h", _FIRST_ROUND, _SEVEN_EIGHTHS)],
    "rounds 15/16": [*_ROUNDS, ("schedule.h", _FIRST_ROUND, _FIFTEEN_SIXTEENTHS)],
    "rounds coarse": [_schedule(1024, 512)],
    "one round up to 32k": [_schedule(32768, 512)],
    "two blocks an SM": _TWO_BLOCKS,
    "not fitted": [("schedule.h", _FIT, "")],
    "general": [("binding.cpp", _RUN, _RUN.replace("kByShapes", "kGeneral"))],
    "small from general": [
        ("tuning.cuh", _SMALL, "kSmallSlotsPerWorker = 2048, kSmallMostTokens = 1 << 20;")
    ],
    "short rows": _SHORT_ROWS,
    "short blocks": _SHORT_BLOCKS,
    "short blocks and rows": [*_SHORT_BLOCKS, *_SHORT_ROWS],
    "all short": _ALL_SHORT,
    "two blocks all short": [*_TWO_BLOCKS, *_ALL_SHORT],
    "clusters of 16 all short": [*_CLUSTERS_OF_16, *_ALL_SHORT],
    "clusters of 16": _CLUSTERS_OF_16,
    "small 8 warps": _small_blocks(8, 2, 1),
    "small 3 stages": _small_blocks(4, 3, 2),
    # What the launch and the way to the schedule take: nothing is computed.
    "exit at entry": [before("kernel.cuh", "  const Schedule& schedule =", "  if (p.batch > 0) return;")],
    "exit scheduled": [
        after("streaming_warps.cuh", "    __syncthreads();\n", "    if (p_.batch > 0) in_chunk_ = false;"),
        before("kernel.cuh", "    const bool has_chunk =", "    if (p.batch > 0) return;"),
    ],
    "sums of 16": [("merging_warps.cuh", "kBatch = kQuads > 1 ? 4 : 8;", "kBatch = kQuads > 1 ? 4 : 16;")],
    "pairs from 1M": [("tuning.cuh", "kPairHeadsFromSlots = 1 << 21", "kPairHeadsFromSlots = 1 << 20")],
    "pairs never": [
        ("tuning.cuh", "kPairHeadsFromSlots = 1 << 21", "kPairHeadsFromSlots = int64_t{1} << 40")
    ],
    "batch invariant": [("binding.cpp", _RUN, _RUN.replace("kByShapes", "kBatchInvariant"))],
    "no policy": [_NO_POLICY],
}
