// The planning warp of a block: it knows the block's next chunk before the streams need it. Tickets, requests
// and page ids are trips to memory that depend on each other, 5 us and more each while the streams load it;
// drawn ahead and touched, they cost the streams hits in L1.
#pragma once

#include "shared.cuh"

namespace evenkv {

// The chunk's part of the line. All lanes.
template <int kHeads>
__device__ __forceinline__ ChunkRange locate_chunk(const DecodeParams& p, const SharedMemory<kHeads>& shared,
                                                   int32_t chunk) {
  if (p.request_chunk_shift == 0) return chunk_range(shared.schedule, chunk);
  const int32_t shift = shared.chunk_shift, unit = chunk / shared.unit_chunks;
  const int32_t in_unit = chunk - unit * shared.unit_chunks;
  const int64_t unit_begin = static_cast<int64_t>(unit) * shared.unit_slots;
  const int32_t request = find_request(p, in_unit, shift);
  if (request >= p.batch) return {unit_begin, unit_begin};
  const Request span(p, request);
  const int32_t token = (in_unit - ((span.begin >> shift) + request)) << shift;
  // A kv_indptr that falls may begin a request anywhere: nothing outside the unit.
  const int64_t slot = static_cast<int64_t>(span.begin) + token;
  if (token < 0 || token >= span.length || slot < 0 || slot >= shared.unit_slots)
    return {unit_begin, unit_begin};
  const int64_t slots = min(int64_t{1} << shift, static_cast<int64_t>(span.length - token));
  return {unit_begin + slot,
          unit_begin + (slot + slots < shared.unit_slots ? slot + slots : shared.unit_slots)};
}

// Where a cut request begins and ends.
template <int kHeads>
__device__ __forceinline__ CutRequest locate_cut(const DecodeParams& p, const SharedMemory<kHeads>& shared,
                                                 int32_t request, int32_t unit, int32_t chunk) {
  const Request span(p, request);
  int32_t first, last;
  if (p.request_chunk_shift == 0) {
    const int64_t begin = static_cast<int64_t>(unit) * shared.unit_slots + span.begin;
    first = chunk_of(shared.schedule, max64(begin, 0));
    last = chunk_of(shared.schedule, max64(begin + span.length - 1, 0));
  } else {
    first = unit * shared.unit_chunks + (span.begin >> shared.chunk_shift) + request;
    last = first + ((span.length - 1) >> shared.chunk_shift);
  }
  // Clamped: with a kv_indptr that is not sorted these could lie anywhere, and they index the counters.
  first = min(max(first, 0), chunk);
  last = max(min(last, shared.schedule.num_chunks - 1), chunk);
  return {request, unit, first, last, chunk - (chunk - first) % kGroupChunks};
}

// Finds the chunk's cut requests and, unless the streams are there already, touches what they read first of
// each part.
template <int kHeads>
__device__ __forceinline__ void plan_chunk(const DecodeParams& p, SharedMemory<kHeads>& shared, int32_t chunk,
                                           int32_t place) {
  constexpr int kBlockParts = kWarps / kHeads;
  constexpr int kIdLines = 3;  // what Cursor::load_ids asks for
  static_assert(kBlockParts * kIdLines <= 32, "a lane a line");
  const int lane = threadIdx.x & 31;
  Plan& plan = shared.plans[place % kPlans];
  const int32_t unit_slots = shared.unit_slots;
  const ChunkRange range = plan.range;
  const int64_t part_slots = slots_of_part(range, kBlockParts);
  int32_t entry = -1;  // of kv_indices: the lane's line
#pragma unroll 1
  for (int part = 0; part <= kBlockParts;
       part += place == 0 ? kBlockParts : 1) {  // the last round: the chunk's end
    const bool ends = part == kBlockParts;
    const int64_t position = ends ? range.end - 1 : range.begin + part * part_slots;
    if (position >= range.end || position < range.begin) continue;
    const int32_t unit = static_cast<int32_t>(divide(position, unit_slots));
    const int32_t slot = static_cast<int32_t>(position - static_cast<int64_t>(unit) * unit_slots);
    const int32_t page = page_of(p, slot);
    if (lane / kIdLines == part) entry = min(page + lane % kIdLines * 32, p.num_kv_indices - 1);
    if (part == 0 || ends) {
      const CutRequest cut = locate_cut(p, shared, find_request(p, page), unit, chunk);
      if (lane == 0) plan.cuts[ends ? 1 : 0] = cut;
    }
  }
  if (lane == 0) publish_shared(&shared.planned, place + 1);
  if (place > 0 && entry >= 0) touch(shared, p.kv_indices + entry);  // all lines at once
}

// All chunks of the block; the first one's range is known.
template <int kHeads>
__device__ __forceinline__ void plan_all_chunks(const DecodeParams& p, SharedMemory<kHeads>& shared) {
  const Schedule& schedule = shared.schedule;
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
      ChunkRange range = {0, 0};
      if (chunk < schedule.num_chunks) range = locate_chunk(p, shared, chunk);
      if (lane == 0) {
        Plan& plan = shared.plans[place % kPlans];
        plan.chunk = chunk;
        plan.range = range;
        publish_shared(&shared.drawn, place + 1);
      }
      __syncwarp();
    }
    if (chunk >= schedule.num_chunks) return;
    plan_chunk(p, shared, chunk, place);
  }
}

}  // namespace evenkv
