// The planning warp of a block: it knows the block's next chunk before the streams need it. Tickets, requests
// and page ids are trips to memory that depend on each other, 5 us and more each while the streams load it;
// drawn ahead and touched, they cost the streams hits in L1.
#pragma once

#include "shared.cuh"

namespace evenkv {

// Where the chunk's cut requests begin and end.
__device__ __forceinline__ CutRequest locate_cut(const DecodeParams& p, const Schedule& schedule,
                                                 int32_t unit_slots, int32_t request, int32_t unit,
                                                 int32_t chunk) {
  const Request span(p, request);
  const int64_t begin = static_cast<int64_t>(unit) * unit_slots + span.begin;
  // Clamped: with a kv_indptr that is not sorted these could lie anywhere, and they index the counters.
  const int32_t first = min(chunk_of(schedule, max64(begin, 0)), chunk);
  const int32_t last_chunk =
      max(min(chunk_of(schedule, max64(begin + span.length - 1, 0)), schedule.num_chunks - 1), chunk);
  return {request, unit, first, last_chunk, chunk - (chunk - first) % kGroupChunks};
}

// Touches what the streams read first of each part, and finds the chunk's cut requests.
template <int kHeads>
__device__ __forceinline__ void plan_chunk(const DecodeParams& p, SharedMemory<kHeads>& shared,
                                           const Schedule& schedule, int32_t chunk, Plan& plan) {
  constexpr int kBlockParts = kWarps / kHeads;
  constexpr int kIdLines = 3;  // what Cursor::load_ids asks for
  static_assert(kBlockParts * kIdLines <= 32, "a lane a line");
  const int lane = threadIdx.x & 31;
  const int32_t unit_slots = shared.unit_slots;
  const ChunkRange range = chunk_range(schedule, chunk);
  const int64_t part_slots = slots_of_part(range, kBlockParts);
  int32_t entry = -1;  // of kv_indices: the lane's line
#pragma unroll 1
  for (int part = 0; part <= kBlockParts; ++part) {  // the last round looks at the chunk's end
    const bool ends = part == kBlockParts;
    const int64_t position = ends ? range.end - 1 : range.begin + part * part_slots;
    if (position >= range.end) continue;
    const int32_t unit = static_cast<int32_t>(divide(position, unit_slots));
    const int32_t slot = static_cast<int32_t>(position - static_cast<int64_t>(unit) * unit_slots);
    const int32_t page = page_of(p, slot);
    if (lane / kIdLines == part) entry = min(page + lane % kIdLines * 32, p.num_kv_indices - 1);
    if (part == 0 || ends) {
      const int32_t request = find_request(p.kv_indptr, p.batch, page);
      const CutRequest cut = locate_cut(p, schedule, unit_slots, request, unit, chunk);
      if (lane == 0) plan.cuts[ends ? 1 : 0] = cut;
    }
  }
  if (entry >= 0) touch(shared, p.kv_indices + entry);  // all lines at once
}

template <int kHeads>
__device__ __forceinline__ void plan_all_chunks(const DecodeParams& p, SharedMemory<kHeads>& shared,
                                                const Schedule& schedule) {
  const int lane = threadIdx.x & 31;
  int32_t chunk = blockIdx.x;
#pragma unroll 1
  for (int32_t place = 0;; ++place) {
    if (place > 0) {
      chunk = schedule.num_chunks;
      if (hands_out_tickets(schedule)) {
        while (read_shared(&shared.wanted) < place) nap();
        if (lane == 0) chunk = gridDim.x + atomicAdd(p.counters + kTicket, 1);
        chunk = __shfl_sync(kAllLanes, chunk, 0);
      }
    }
    Plan& plan = shared.plans[place % kPlans];
    if (lane == 0) {
      plan.chunk = chunk;
      publish_shared(&shared.drawn, place + 1);
    }
    const bool over = chunk >= schedule.num_chunks;
    if (!over) plan_chunk(p, shared, schedule, chunk, plan);
    if (lane == 0) publish_shared(&shared.planned, place + 1);
    if (over) return;
  }
}

}  // namespace evenkv
