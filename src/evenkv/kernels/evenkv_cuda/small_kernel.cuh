// Small problems: a cluster of blocks for each request and unit, no line, no tickets, no scratch.
//
// What a small problem waits for is the chain of dependent trips and steps, not bandwidth. Here it is: a
// request's span, its page ids, K and V; the blocks of a cluster add up what their warps found through shared
// memory of each other. Tiles of the request are dealt evenly to the cluster's warps, so that the sum's order
// depends on lengths and shapes alone.
#pragma once

#include "streaming_warps.cuh"

namespace evenkv {

struct SmallShared {
  union {
    uint8_t ring[kSmallStages][kTileBytes];
    float piece[kPartialFloats];  // once the warp's tiles are through
  } warps[kSmallWarps];
  alignas(16) float partial[kPartialFloats];  // the block's
};

// Nothing to attend to: outputs of one unit of a request without tokens (0), or of one whose table is bad
// (NaN).
__device__ __forceinline__ void write_nothing(const DecodeParams& p, int32_t request, const UnitHeads& heads,
                                              bool bad) {
  const uint32_t pair = bad ? 0x7fff7fffu : 0u;  // NaN in bf16 and in fp16
  uint4* out = reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.output) +
                                        output_row(p, request, heads.head0) * kHeadDim);
  for (int i = threadIdx.x; i < heads.heads * kHeadDim / 8; i += kSmallThreads)
    out[i] = make_uint4(pair, pair, pair, pair);
  if (threadIdx.x < heads.heads)
    p.lse[output_row(p, request, heads.head0 + threadIdx.x)] = bad ? NAN : -INFINITY;
}

// The tiles of one warp's walk.
__device__ __forceinline__ void attend_tiles(const DecodeParams& p, Attention& attention, Cursor& cursor,
                                             uint32_t ring, int32_t kv_head) {
  Tile queue[kSmallStages] = {};  // the oldest first; one without tokens where the walk is over
  bool more = cursor.next_in_request();
  int stage = 0;
#pragma unroll 1
  for (int32_t consumed = 1 - kSmallStages;; ++consumed) {  // the first rounds only fill the ring
    __syncwarp();  // the stage that the next copies fill was read by all lanes
#pragma unroll
    for (int i = 0; i + 1 < kSmallStages; ++i) queue[i] = queue[i + 1];
    queue[kSmallStages - 1] = {0, 0, 0, 0};
    if (more) {
      queue[kSmallStages - 1] = cursor.copy_tile(ring + stage * kTileBytes, kv_head);
      more = cursor.next_in_request();
    }
    copy_async_commit();
    stage = stage + 1 < kSmallStages ? stage + 1 : 0;  // which is the oldest one's
    if (consumed < 0) continue;
    if (consumed == 0) attention.set_scale(p, p.k_scale == nullptr ? 1.0f : __ldg(p.k_scale + kv_head));
    if (queue[0].tokens() == 0) break;
    copy_async_wait<kSmallStages - 1>();
    __syncwarp();  // all lanes' copies of the tile arrived
    attention.attend(ring + stage * kTileBytes, queue[0]);
  }
  copy_async_wait<0>();
}

// Rows of the block's warps, then of the cluster's blocks, are dealt to warps; partials in order.
template <bool kCluster>
__device__ __forceinline__ void add_rows(const DecodeParams& p, SmallShared& shared, int32_t rank,
                                         int32_t splits, int32_t request, const UnitHeads& heads) {
  constexpr int kItemRows = 32 / kRowLanes;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const int first = kCluster ? rank * kSmallWarps + warp : warp;
  const int step = kCluster ? splits * kSmallWarps : kSmallWarps;
#pragma unroll 1
  for (int item = first; item * kItemRows < heads.heads; item += step) {
    const int row = item * kItemRows + lane / kRowLanes, row_lane = lane % kRowLanes;
    if (row >= heads.heads) continue;
    const int32_t offset = row * kPartialStride;
    constexpr int kMost = kCluster ? kMostSplits : kSmallWarps;
    Merged parts[kMost], sum;
    float largest = kNoMaximum;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const float* from =
          kCluster ? shared_of_rank(shared.partial, min(i, splits - 1)) : shared.warps[i].piece;
      if (!kCluster || i < splits) parts[i].template load<false>(from + offset, row_lane);
      largest = fmaxf(largest, parts[i].m);
    }
    sum.raise(largest);
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (!kCluster || i < splits) sum.add(parts[i]);
    }
    if (kCluster || splits == 1) {
      const int64_t out = output_row(p, request, heads.head0 + row);
      sum.write(static_cast<uint16_t*>(p.output) + out * kHeadDim, p.lse + out, value_scale(p, heads.kv_head),
                row_lane);
    } else {
      sum.store(shared.partial + offset, row_lane);
    }
  }
}

// Grid: (splits, units, batch), clusters of (splits, 1, 1).
__global__ void __launch_bounds__(kSmallThreads, kSmallResident)
    small_decode_kernel(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(128) uint8_t raw[];
  SmallShared& shared = *reinterpret_cast<SmallShared*>(raw);
  const int32_t rank = blockIdx.x, splits = gridDim.x, request = blockIdx.z;
  const UnitHeads heads(blockIdx.y, 1, 0);
  const int warp = threadIdx.x / 32;
  // Page ids: into L2 while the request's span is on its way. Few enough for a line a thread.
  const int64_t block = (static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const int64_t thread = block * kSmallThreads + threadIdx.x;
  if (thread * 32 < p.num_kv_indices) prefetch_l2(p.kv_indices + thread * 32);
  const Request span(p, request);
  Attention attention;
  attention.start_from_global(p, request, heads.head0, heads.heads);
  // Pages that kv_indices does not list make the outputs NaN, however many kv_indptr counts and even below 0.
  const bool bad = span.pages > 0 && (span.first_page < 0 || span.first_page > p.num_kv_indices - span.pages);
  if (span.length <= 0 || bad) {
    if (rank == 0) write_nothing(p, request, heads, bad);
    return;
  }
  const int32_t tiles = (span.length + kTileTokens - 1) / kTileTokens, workers = splits * kSmallWarps;
  const int32_t worker = rank * kSmallWarps + warp;
  const int32_t first = static_cast<int32_t>(static_cast<int64_t>(tiles) * worker / workers);
  const int32_t last = static_cast<int32_t>(static_cast<int64_t>(tiles) * (worker + 1) / workers);
  if (first < last) {
    Cursor cursor(p, span.begin + span.length + p.page_size - 1);  // its last page may be read
    cursor.begin_in_request(request, blockIdx.y, span, first * kTileTokens,
                            min(last * kTileTokens, span.length) - first * kTileTokens);
    attend_tiles(p, attention, cursor, shared_address(shared.warps[warp].ring), heads.kv_head);
  }
  attention.finish();
  __syncwarp();
  attention.store_partial(shared.warps[warp].piece);
  __syncthreads();
  add_rows<false>(p, shared, rank, splits, request, heads);
  if (splits == 1) return;
  cluster_barrier<true>();
  add_rows<true>(p, shared, rank, splits, request, heads);
  cluster_barrier<false>();  // nobody leaves while others read its shared memory
}

}  // namespace evenkv
