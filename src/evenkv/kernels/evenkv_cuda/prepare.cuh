// What the host computes before a launch, from shapes alone: bounds, scratch, and how it expects the line to
// be cut. Lengths stay on the device.
#pragma once

#include "shared.cuh"

namespace evenkv {

struct LaunchSizes {
  int32_t blocks;
  int64_t partial_floats, counters;  // scratch
};

// Fills in what the launcher sets, scratch's addresses excepted. Null, or why it cannot be done.
inline const char* prepare(DecodeParams& p, int32_t workers, int32_t heads_per_block, LaunchSizes& sizes) {
  const int32_t units = p.num_kv_heads * kParts / heads_per_block;
  const int64_t unit_slots = static_cast<int64_t>(p.num_kv_indices) * p.page_size;
  const int64_t most_slots = units * unit_slots;
  const bool one_round = most_slots <= static_cast<int64_t>(workers) * kScheduleTuning.single_round_slots;
  p.workers = workers;
  // Whatever kv_indptr says: scratch for one round is never overrun.
  p.single_round_slots = one_round ? INT32_MAX : kScheduleTuning.single_round_slots;
  p.expected_slots = static_cast<int32_t>(unit_slots);
  p.expected = cut_line(units, p.expected_slots, p.batch, workers, tuning_of(p));
  const ChunkRange first = chunk_range(p.expected, 0);
  p.inverse_slots = 1.0 / static_cast<double>(p.expected_slots);
  p.first_slots = static_cast<int32_t>(first.end - first.begin);
  p.first_part_slots = slots_of_part(first, kWarps / heads_per_block);
  p.slots_per_chunk = 2;
  // Blocks that cannot get a chunk need not start, and a line that is cut in one round needs the fewest
  // slots.
  int64_t most_chunks = (most_slots + kScheduleTuning.min_chunk - 1) / kScheduleTuning.min_chunk;
  int64_t scratch_chunks = static_cast<int64_t>(workers) * (one_round ? 1 : kChunksPerWorkerBound);
  if (p.request_chunk_shift != 0) {
    most_chunks = scratch_chunks = units * request_chunks(unit_slots, p.batch, p.request_chunk_shift);
    if (most_chunks > INT32_MAX / 4) return "batch-invariant: too many chunks; decode in two calls";
    p.slots_per_chunk = 1;
    p.expected.num_chunks = 0;  // where they begin depends on kv_indptr
  }
  p.most_request_chunks = static_cast<int32_t>(most_chunks);
  if (const char* error = set_rows(p, kElementBytes)) return error;
  sizes.blocks = static_cast<int32_t>(most_chunks < 1 ? 1 : most_chunks > workers ? workers : most_chunks);
  sizes.partial_floats =
      (piece_slots(workers) + scratch_chunks * p.slots_per_chunk * heads_per_block) * kPartialFloats;
  sizes.counters = kArrivals + (scratch_chunks > workers ? scratch_chunks : int64_t{workers}) * 2;
  return nullptr;
}

}  // namespace evenkv
