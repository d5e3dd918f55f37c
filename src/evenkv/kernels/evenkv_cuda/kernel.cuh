// The kernel: one launch, no plan.
//
// Grid: at most one block an SM. A block takes chunks of the flattened slot line (schedule.h): its first one
// by its index, later ones by a ticket. Block: kWarps streaming warps, kMergeWarps merging warps and one
// planning warp. The planning warp draws the next chunk before the streams end the present one, finds the
// requests that the chunk's ends cut, and touches the page tables that the streams read next. The chunk is
// cut evenly among the streaming warps (with several KV heads a block, among the warps of each head); each
// streams its tokens through a ring of tiles in shared memory that runs on from chunk to chunk, and keeps one
// flash-decoding state (attention.cuh: what a lane does). A request inside one warp's part is written by that
// warp. One cut between warps or chunks leaves pieces, which the merging warps add up while the next chunk
// streams: a whole request is written; one cut between chunks goes to scratch and is merged by the block that
// finishes its last missing chunk, in chunk order. For the block's last chunk the streaming warps join the
// merging warps as one team. docs/kernel.md has a picture.
#pragma once

#include "merging_warps.cuh"
#include "planning_warp.cuh"
#include "streaming_warps.cuh"

namespace evenkv {

// The merging warps: what every block reads soon, into L2 at once. The lines lie in DRAM, and each is at the
// head of a chain of reads.
template <int kHeads>
__device__ __forceinline__ void prefetch_inputs(const DecodeParams& p, SharedMemory<kHeads>& shared) {
  const int32_t thread = blockIdx.x * kMergeThreads + threadIdx.x - kStreamThreads;
  const int32_t threads = gridDim.x * kMergeThreads;
  constexpr int kLineInts = 32, kRowLines = kHeadDim * 2 / 128;
  // Page ids of small problems; large ones read theirs far ahead of use.
  if (p.num_kv_indices <= kPrefetchedIds) {
#pragma unroll 1
    for (int32_t i = thread; i * kLineInts < p.num_kv_indices; i += threads) {
      prefetch_l2(p.kv_indices + i * kLineInts);
    }
  }
  const int32_t heads = p.num_kv_heads * kGroupSize;
#pragma unroll 1
  for (int32_t i = thread; i < p.batch * heads * kRowLines; i += threads) {
    const int32_t row = i / kRowLines, request = row / heads;
    const int64_t element = request * p.q_stride_batch + (row - request * heads) * p.q_stride_head;
    prefetch_l2(static_cast<const uint16_t*>(p.q) + element + i % kRowLines * 64);
  }
  const int32_t in_block = threadIdx.x - kStreamThreads;
  if (p.v_scale != nullptr && in_block * kLineInts < p.num_kv_heads) {
    touch(shared, p.v_scale + in_block * kLineInts);
  }
}

// The planning warp: how the line is cut when kv_indptr counts other pages than kv_indices lists, or chunks
// begin at requests.
template <int kHeads>
__device__ __forceinline__ void cut_anew(const DecodeParams& p, SharedMemory<kHeads>& shared, int32_t pages) {
  if (threadIdx.x % 32 == 0) {
    const int32_t units = p.num_kv_heads * kParts / kHeads;
    // Slots count in 32 bits; the binding keeps kv_indices within them, and what lies beyond is no valid
    // table.
    const int64_t counted = static_cast<int64_t>(pages) * p.page_size;
    // Nor does a worker get more slots than one round may have (single_round_slots).
    const int64_t most = min(kMostSlots, int64_t{INT32_MAX / 2} * p.workers / units);
    shared.unit_slots = static_cast<int32_t>(min(max(counted, int64_t{0}), most));
    shared.schedule = cut_line(units, shared.unit_slots, p.batch, p.workers, tuning_of(p));
    if (p.request_chunk_shift != 0) {
      int32_t shift = p.request_chunk_shift;
      // Whatever kv_indptr says: scratch is never overrun.
      while (units * request_chunks(shared.unit_slots, p.batch, shift) > p.most_request_chunks) ++shift;
      shared.chunk_shift = shift;
      shared.unit_chunks = static_cast<int32_t>(request_chunks(shared.unit_slots, p.batch, shift));
      shared.schedule.num_chunks = shared.unit_slots > 0 ? units * shared.unit_chunks : 0;
    }
  }
  __syncwarp();
}

// The planning warp's part of the start. Where kv_indices is as long as kv_indptr counts, the host knew how
// the line is cut: the streams look for their requests at once, and begin to copy when this warp has seen
// that it is so, a trip to memory later, which is what their own look took. Else they begin anew.
template <int kHeads>
__device__ __forceinline__ void start_block(const DecodeParams& p, SharedMemory<kHeads>& shared) {
  const int32_t lane = threadIdx.x & 31, chunk = blockIdx.x;
  const int32_t pages = __ldg(p.kv_indptr + p.batch);
  // The first requests' lines, to L1: every warp looks for its own there.
  const int32_t first = lane * 32, batch = min(p.batch, 255);
  const int32_t page = __ldg(p.kv_indptr + min(first, batch));
  const int32_t last = p.kv_last_page_len == nullptr ? 0 : __ldg(p.kv_last_page_len + min(first, batch - 1));
  if (lane == 0) {
    shared.unit_slots = p.expected_slots;
    shared.schedule = p.expected;
    shared.wanted = shared.planned = shared.chunks_read = 0;
    shared.drawn = 1;
  }
  __syncwarp();
  const bool anew = pages != p.num_kv_indices || p.request_chunk_shift != 0;
  if (anew) cut_anew(p, shared, pages);
  if (((page | last) & INT32_MIN) != 0) shared.touched = 1;  // the loads must be of use
  ChunkRange range = {0, 0};
  if (chunk < shared.schedule.num_chunks) range = locate_chunk(p, shared, chunk);
  if (lane == 0) {
    shared.starts_anew = anew;
    shared.plans[0].chunk = chunk;
    shared.plans[0].range = range;
  }
}

// Requests without tokens have no slots on the line: the planning warps look after them, each its share (in a
// block without a chunk too).
__device__ __forceinline__ void write_empty_requests(const DecodeParams& p) {
  const int lane = threadIdx.x & 31;
  const int heads = p.num_kv_heads * kGroupSize;
#pragma unroll 1
  for (int32_t request = blockIdx.x; request < p.batch; request += gridDim.x) {
    if (Request(p, request).length > 0) continue;
    uint4* out =
        reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.output) + output_row(p, request, 0) * kHeadDim);
#pragma unroll 1
    for (int i = lane; i < heads * kHeadDim / 8; i += 32) out[i] = make_uint4(0, 0, 0, 0);
#pragma unroll 1
    for (int i = lane; i < heads; i += 32) p.lse[output_row(p, request, i)] = -INFINITY;
  }
}

template <int kHeads>
__global__ void __launch_bounds__(kThreads, 1) decode_kernel(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(128) uint8_t raw[];
  SharedMemory<kHeads>& shared = *reinterpret_cast<SharedMemory<kHeads>*>(raw);
  const Schedule& schedule = shared.schedule;
  const int warp = threadIdx.x / 32;
  int32_t place = 0;
  if (warp < kWarps) {
    const int32_t chunks = stream_all_chunks(p, shared);
    if (chunks == 0) return;
    place = chunks - 1;
  } else {
    const bool plans = warp == kWarps + kMergeWarps;
    if (plans) {
      start_block(p, shared);
    } else {
      prefetch_inputs(p, shared);
    }
    __syncthreads();  // the streams' one is in stream_all_chunks
    const bool has_chunk = static_cast<int32_t>(blockIdx.x) < schedule.num_chunks;
    if (plans) {
      if (has_chunk) plan_all_chunks(p, shared);
      write_empty_requests(p);
      return;
    }
    if (!has_chunk) return;
  }
  merge_chunks(p, shared, schedule, place);
  // The last block to leave puts the tickets back to zero. Without tickets there may be blocks without a
  // chunk.
  if (hands_out_tickets(schedule) && threadIdx.x == 0) {
    if (count_in_release(p.counters + kLeft) == static_cast<int32_t>(gridDim.x) - 1) {
      acquire();
      p.counters[kTicket] = 0;
      p.counters[kLeft] = 0;
    }
  }
}

}  // namespace evenkv
