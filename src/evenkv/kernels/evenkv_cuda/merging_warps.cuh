// The merging warps of a block: they add up the streaming warps' pieces of a chunk while the next one
// streams.
#pragma once

#include "shared.cuh"

namespace evenkv {

// The sum over a chain of pieces (bit 2 * part + index), for four elements of one head. A chain is a run of
// last pieces (index 1), one for each part, and perhaps an early piece (index 0) at its end.
template <int kHeads>
__device__ __forceinline__ Merged sum_pieces(const DecodeParams& p, SharedMemory<kHeads>& shared,
                                             uint32_t members, int sub, int head, int d) {
  constexpr int kBlockParts = kWarps / kHeads;
  const uint32_t early = members & 0x55555555u;
  float2 early_ml = {kNoMaximum, 0.0f};
  float4 early_o = {0.0f, 0.0f, 0.0f, 0.0f};
  if (early != 0) {  // in scratch: the longest way, so first
    const int owner = (__ffs(early) - 1) / 2 * kHeads + sub;
    const float* row = piece_slot<kHeads>(p, shared, owner, 0) + head * kPartialStride;
    early_ml = *reinterpret_cast<const float2*>(row + kHeadDim);
    early_o = *reinterpret_cast<const float4*>(row + d);
  }
  float2 ml[kBlockParts];
  float4 o[kBlockParts];
#pragma unroll
  for (int part = 0; part < kBlockParts; ++part) {
    ml[part] = {kNoMaximum, 0.0f};
    o[part] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (members >> (2 * part + 1) & 1) {
      const float* row = piece_slot<kHeads>(p, shared, part * kHeads + sub, 1) + head * kPartialStride;
      ml[part] = *reinterpret_cast<const float2*>(row + kHeadDim);
      o[part] = *reinterpret_cast<const float4*>(row + d);
    }
  }
  Merged sum;
#pragma unroll
  for (int part = 0; part < kBlockParts; ++part) sum.m = fmaxf(sum.m, ml[part].x);
  sum.m = fmaxf(sum.m, early_ml.x);
  const auto take = [&](float2 other, float4 value) {
    const float weight = exp2_fast(other.x - sum.m);
    sum.l += other.y * weight;
    sum.o.x += value.x * weight;
    sum.o.y += value.y * weight;
    sum.o.z += value.z * weight;
    sum.o.w += value.w * weight;
  };
#pragma unroll
  for (int part = 0; part < kBlockParts; ++part) take(ml[part], o[part]);
  take(early_ml, early_o);
  return sum;
}

// Where a cut request begins and ends.
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

// Merges the warps' cut pieces of a chunk: whole requests are written, cut ones go to the chunk's scratch
// slots and are noted in shared.cuts. Called by all merging threads.
template <int kHeads>
__device__ __forceinline__ void merge_block(const DecodeParams& p, SharedMemory<kHeads>& shared,
                                            const Schedule& schedule, int32_t unit_slots, int32_t chunk) {
  constexpr int kPieces = kWarps / kHeads * 2;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 - kWarps;
  // Lane i looks at piece i; chains are runs of pieces of one request.
  uint32_t flags = 0;
  if (lane < kPieces) flags = shared.cut_pieces[lane / 2][lane % 2].flags;
  const uint32_t present = __ballot_sync(kAllLanes, flags != 0);
  if (present == 0) return;
  const bool leads = flags != 0 && (!(flags & kStartsBefore) || lane == __ffs(present) - 1);
  const uint32_t leaders = __ballot_sync(kAllLanes, leads);
  const int chains = __popc(leaders);
  // One chain: all threads share it. Several: a warp each.
  const int threads = chains == 1 ? kMergeThreads : 32;
  const int thread = chains == 1 ? threadIdx.x - kStreamThreads : lane;
  for (int chain = chains == 1 ? 0 : warp; chain < chains; chain += kMergeWarps) {
    uint32_t rest = leaders;
    for (int i = 0; i < chain; ++i) rest &= rest - 1;
    const int begin = __ffs(rest) - 1;
    rest &= rest - 1;
    const uint32_t below_end = rest == 0 ? kAllLanes : (1u << (__ffs(rest) - 1)) - 1;
    const uint32_t members = present & (kAllLanes << begin) & below_end;
    const int end = 31 - __clz(members);
    const Piece head_piece = shared.cut_pieces[begin / 2][begin % 2];
    const uint32_t cut =
        (head_piece.flags & kStartsBefore) | (shared.cut_pieces[end / 2][end % 2].flags & kEndsAfter);
    const int slot = (head_piece.flags & kStartsBefore) ? 0 : 1;
    constexpr int kQuads = kHeadDim / 4;
    for (int element = thread; element < kHeads * kUnitHeads * kQuads; element += threads) {
      const int sub = element / (kUnitHeads * kQuads), head = element / kQuads % kUnitHeads;
      const int d = element % kQuads * 4;
      const Merged sum = sum_pieces<kHeads>(p, shared, members, sub, head, d);
      if (cut == 0) {
        const UnitHeads unit(head_piece.unit, kHeads, sub);
        if (head < unit.heads) {
          write_output(p, head_piece.request, unit.head0 + head, d, sum, value_scale(p, unit.kv_head));
        }
      } else {
        sum.store(chunk_slot(p, chunk, slot, kHeads, sub) + head * kPartialStride, d);
      }
    }
    // The chain's last thread: it has the least to sum.
    if (cut != 0 && thread == threads - 1) {
      shared.cuts[slot] = locate_cut(p, schedule, unit_slots, head_piece.request, head_piece.unit, chunk);
    }
  }
}

// One thread: counts the block in at a counter; true when it is the last of `expected`. What the block wrote
// is visible to the last, and what the others wrote to this block then.
__device__ __forceinline__ bool arrive_last(int32_t* counter, int32_t expected) {
  __threadfence();  // cumulative: covers the writes of all threads that the barrier before ordered
  const bool last = atomicAdd(counter, 1) == expected - 1;
  if (last) {
    *counter = 0;
    __threadfence();
  }
  return last;
}

// All merging threads: does what is due at the cut requests whose partials this block wrote.
template <int kHeads>
__device__ __forceinline__ void merge_cuts(const DecodeParams& p, SharedMemory<kHeads>& shared) {
  const int thread = threadIdx.x - kStreamThreads;
  Merged* sums = reinterpret_cast<Merged*>(shared.sums);
  int32_t* arrivals = p.counters + kArrivals;
  if (thread < 2 && shared.cuts[thread].request >= 0) {  // both at once: each takes two trips to memory
    const CutRequest& cut = shared.cuts[thread];
    shared.arrived_last[thread] =
        cut.group_chunks() == 1 || arrive_last(arrivals + 2 * cut.group_first, cut.group_chunks());
  }
  barrier_wait(kMergeBarrier, kMergeThreads);
#pragma unroll 1
  for (int slot = 0; slot < 2; ++slot) {
    const CutRequest& cut = shared.cuts[slot];
    if (cut.request < 0 || !shared.arrived_last[slot]) continue;
    const int32_t groups = cut.groups();
    if (cut.group_chunks() > 1) {
      merge_chunks<kHeads>(p, cut, cut.group_first, cut.group_first + cut.group_chunks() - 1, 1, groups > 1,
                           sums);
    }
    if (groups == 1) continue;
    // A word of its own: other threads may still be reading arrived_last.
    if (thread == 0) shared.groups_complete[slot] = arrive_last(arrivals + 2 * cut.first_chunk + 1, groups);
    barrier_wait(kMergeBarrier, kMergeThreads);
    if (shared.groups_complete[slot]) {
      merge_chunks<kHeads>(p, cut, cut.first_chunk, cut.last_chunk, kGroupChunks, false, sums);
    }
  }
}

// The merging warps: one round a chunk of the block.
template <int kHeads>
__device__ __forceinline__ void merge_all_chunks(const DecodeParams& p, SharedMemory<kHeads>& shared,
                                                 const Schedule& schedule, int32_t unit_slots) {
  const int thread = threadIdx.x - kStreamThreads;
  int32_t chunk = blockIdx.x;
#pragma unroll 1
  for (uint32_t place = 0; chunk < schedule.num_chunks; ++place) {
    if (thread < 2) shared.cuts[thread].request = -1;
    barrier_wait(kMergeBarrier, kMergeThreads);
    barrier_wait(kPiecesReady, kThreads);
    merge_block<kHeads>(p, shared, schedule, unit_slots, chunk);
    // The streams drew the next chunk before they ended this one.
    chunk = hands_out_tickets(schedule) ? static_cast<int32_t>(Claim::chunk(shared.claims[(place + 1) & 1]))
                                        : schedule.num_chunks;
    barrier_wait(kMergeBarrier, kMergeThreads);
    if (thread == 0) *static_cast<volatile int32_t*>(&shared.chunks_read) = place + 1;
    if (shared.cuts[0].request < 0 && shared.cuts[1].request < 0) continue;
    merge_cuts(p, shared);
    barrier_wait(kMergeBarrier, kMergeThreads);
  }
}

}  // namespace evenkv
