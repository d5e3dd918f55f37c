"""What tools/kernel_lab.py compares: edits of the authored sources. "base" is the source as it is."""

_TUNING = "constexpr ScheduleTuning kScheduleTuning = {kTileTokens * kWarps, 16384, 512};"


def _schedule(single_round_slots: int, tail_chunk: int) -> tuple[str, str, str]:
    changed = _TUNING.replace("16384, 512", f"{single_round_slots}, {tail_chunk}")
    return ("tuning.cuh", _TUNING, changed)


_FIRST_ROUND = "round == 0 ? per_worker - (per_worker >> 2) : per_worker >> (round + 2)"
_SEVEN_EIGHTHS = "round == 0 ? per_worker - (per_worker >> 3) : per_worker >> (round + 3)"

VARIANTS: dict[str, list[tuple[str, str, str]]] = {
    "base": [],
    "rounds": [_schedule(1024, 256)],
    "rounds 7/8": [_schedule(1024, 256), ("schedule.h", _FIRST_ROUND, _SEVEN_EIGHTHS)],
    "no pairs": [("tuning.cuh", "kPairHeadsFromSlots = 1 << 21", "kPairHeadsFromSlots = int64_t{1} << 40")],
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
