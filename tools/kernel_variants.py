"""What tools/kernel_lab.py compares: edits of the authored sources. "base" is the source as it is."""

_TUNING = "constexpr ScheduleTuning kScheduleTuning = {kTileTokens * kWarps, 16384, 512};"


def _schedule(single_round_slots: int, tail_chunk: int) -> tuple[str, str, str]:
    changed = _TUNING.replace("16384, 512", f"{single_round_slots}, {tail_chunk}")
    return ("tuning.cuh", _TUNING, changed)


_FIRST_ROUND = "round == 0 ? per_worker - (per_worker >> 2) : per_worker >> (round + 2)"
_SEVEN_EIGHTHS = "round == 0 ? per_worker - (per_worker >> 3) : per_worker >> (round + 3)"

_ROUNDS = [_schedule(1024, 256)]
_COPY = (
    'asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" '
    '::"r"(dst), "l"(src), "r"(valid) : "memory");'
)

VARIANTS: dict[str, list[tuple[str, str, str]]] = {
    "base": [],
    "rounds": _ROUNDS,
    "rounds 7/8": [*_ROUNDS, ("schedule.h", _FIRST_ROUND, _SEVEN_EIGHTHS)],
    "rounds 7/8 fine": [
        _schedule(1024, 128),
        ("schedule.h", _FIRST_ROUND, _SEVEN_EIGHTHS),
    ],
    "plan late": [*_ROUNDS, ("tuning.cuh", "kPlanAheadSlots = 6 *", "kPlanAheadSlots = 2 *")],
    "no rehearsal": [("merging_warps.cuh", "int32_t place = -1;;", "int32_t place = 0;;")],
    "2 stages": [("tuning.cuh", "kMostStages = 4", "kMostStages = 2")],
    "no pairs": [("tuning.cuh", "kPairHeadsFromSlots = 1 << 21", "kPairHeadsFromSlots = int64_t{1} << 40")],
    "no id prefetch": [("tuning.cuh", "kPrefetchedIds = 1 << 18", "kPrefetchedIds = 0")],
    # DRAM is asked for the whole row at its first 32 bytes.
    "256B sectors": [("ptx.cuh", _COPY, _COPY.replace("shared.global ", "shared.global.L2::256B "))],
    # K and V leave L2 first: page ids, queries and partials stay.
    "evict first": [
        (
            "ptx.cuh",
            _COPY,
            "uint64_t policy;\n"
            '  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));\n  '
            'asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(dst),\n'
            '               "l"(src), "r"(valid), "l"(policy) : "memory");',
        )
    ],
}

_STREAM = "streaming_warps.cuh"
_CYCLES = "static_cast<int32_t>(clock64())"

# Where a streaming warp's cycles go. Sums in registers, printed by lane 0 of two blocks at the end.
TIMELINE: list[tuple[str, str, str]] = [
    ("kernel.cu", "#include <map>", "#include <cstdio>\n#include <map>"),
    (
        _STREAM,
        "  Producer<kHeads> producer(",
        f"  const int32_t t_begin = {_CYCLES};\n"
        "  int32_t t_produce = 0, t_start = 0, t_wait = 0, t_attend = 0, t_piece = 0, t;\n"
        "  Producer<kHeads> producer(",
    ),
    (
        _STREAM,
        "    producer.produce(chunks_done);\n",
        f"    t = {_CYCLES};\n    producer.produce(chunks_done);\n    t_produce += {_CYCLES} - t;\n",
    ),
    (_STREAM, "        attention.start(", f"        t = {_CYCLES};\n        attention.start("),
    (
        _STREAM,
        "        starts_before = tile.flags & kStartsBefore;\n",
        f"        starts_before = tile.flags & kStartsBefore;\n        t_start += {_CYCLES} - t;\n",
    ),
    (
        _STREAM,
        "      wait_for_oldest<kStages - 1>(",
        f"      t = {_CYCLES};\n      wait_for_oldest<kStages - 1>(",
    ),
    (
        _STREAM,
        "      attention.attend(ring",
        f"      t_wait += {_CYCLES} - t;\n      t = {_CYCLES};\n      attention.attend(ring",
    ),
    (
        _STREAM,
        "      if (tile.flags & kLastOfPiece) {\n        attention.finish();",
        f"      t_attend += {_CYCLES} - t;\n      t = {_CYCLES};\n"
        "      if (tile.flags & kLastOfPiece) {\n        attention.finish();",
    ),
    (
        _STREAM,
        "    if (tile.flags & kLastOfChunk) {\n      own_slots();\n",
        "    if (tile.flags & kLastOfChunk) {\n      own_slots();\n"
        f"      t_piece += {_CYCLES} - t;\n"
        "      if (lane == 0 && (blockIdx.x == 7 || blockIdx.x == 90)) {\n"
        '        printf("block %d warp %d chunk %d ends at %d\\n", blockIdx.x, warp, chunks_done,\n'
        f"               {_CYCLES} - t_begin);\n"
        "      }\n",
    ),
    (
        _STREAM,
        "  copy_async_wait<0>();\n}",
        "  copy_async_wait<0>();\n"
        "  if (lane == 0 && (blockIdx.x == 7 || blockIdx.x == 90)) {\n"
        '    printf("block %d warp %d: %d tiles in %d cycles: enqueue %d, q %d, wait %d, "\n'
        '           "attend %d, pieces %d\\n",\n'
        f"           blockIdx.x, warp, producer.produced(), {_CYCLES} - t_begin, t_produce, t_start,\n"
        "           t_wait, t_attend, t_piece);\n"
        "  }\n}",
    ),
]
