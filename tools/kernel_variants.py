"""What tools/kernel_lab.py compares: edits of the authored sources. "base" is the source as it is."""

from __future__ import annotations

from kernel_edits import Edit

_TUNING = "constexpr ScheduleTuning kScheduleTuning = {kTileTokens * kWarps, 16384, 512};"


def _schedule(single_round_slots: int, tail_chunk: int) -> Edit:
    changed = _TUNING.replace("16384, 512", f"{single_round_slots}, {tail_chunk}")
    return ("tuning.cuh", _TUNING, changed)


_FIRST_ROUND = "round == 0 ? per_worker - (per_worker >> 2) : per_worker >> (round + 2)"
_SEVEN_EIGHTHS = "round == 0 ? per_worker - (per_worker >> 3) : per_worker >> (round + 3)"

_FIFTEEN_SIXTEENTHS = "round == 0 ? per_worker - (per_worker >> 4) : per_worker >> (round + 4)"

_ROUNDS = [_schedule(1024, 256)]

# One round whose chunks end where requests of average length do, if that makes them at most 4 % longer: half
# the cut requests, and none where a chunk holds whole ones. In a mixed batch it means fewer blocks, no more.
_MAKE = (
    "shared.schedule = make_schedule(static_cast<int64_t>(units) * shared.unit_slots, p.workers, tuning);\n"
)
_WHOLE_REQUESTS = (
    _MAKE
    + """    Schedule& s = shared.schedule;
    const int32_t average = shared.unit_slots / max(p.batch, 1), equal = s.tail_slots;
    if (s.tail_first == 0 && average > 0) {
      const int32_t fitting = average >= equal ? (average + average / equal - 1) / (average / equal)
                                               : (equal + average - 1) / average * average;
      const int32_t chunk = static_cast<int32_t>(align_slots(fitting));
      if (chunk >= equal && chunk - equal <= equal / 25) {
        s.tail_slots = chunk;
        s.num_chunks = static_cast<int32_t>(divide(s.total + chunk - 1, chunk));
      }
    }
"""
)

VARIANTS: dict[str, list[Edit]] = {
    "base": [],
    "rounds": _ROUNDS,
    "rounds 7/8": [*_ROUNDS, ("schedule.h", _FIRST_ROUND, _SEVEN_EIGHTHS)],
    "rounds 15/16": [*_ROUNDS, ("schedule.h", _FIRST_ROUND, _FIFTEEN_SIXTEENTHS)],
    "rounds coarse": [_schedule(1024, 512)],
    "whole requests": [("kernel.cuh", _MAKE, _WHOLE_REQUESTS)],
    "sums of 16": [("merging_warps.cuh", "kBatch = kQuads > 1 ? 4 : 8;", "kBatch = kQuads > 1 ? 4 : 16;")],
    "pairs from 1M": [("tuning.cuh", "kPairHeadsFromSlots = 1 << 21", "kPairHeadsFromSlots = 1 << 20")],
    "pairs from 256k": [("tuning.cuh", "kPairHeadsFromSlots = 1 << 21", "kPairHeadsFromSlots = 1 << 18")],
    "batch invariant": [
        ("binding.cpp", "kBatchInvariant ? evenkv::kRequestChunkShift : 0", "evenkv::kRequestChunkShift")
    ],
    "no policy": [("cursor.cuh", "copy_async_16<true>", "copy_async_16<false>")],
}
