// The kernel. Grid: (splits, units, clusters of a unit), clusters of (splits, 1, 1). A cluster takes parts of
// requests (cut.h), one after the other where there are more of them than clusters; the hardware hands out
// clusters as others leave, and that is all the balancing there is.
#pragma once

#include "find.cuh"
#include "merge_blocks.cuh"

namespace evenkv {

// The tiles of one warp's walk.
// `arrivals` are the stages' barriers, of which `phases` holds the parities to wait for.
template <bool kTensor>
__device__ __forceinline__ void attend_tiles(const DecodeParams& p, Attention& attention,
                                             Cursor<kTensor>& cursor, uint32_t ring, uint32_t arrivals,
                                             uint32_t& phases, int32_t kv_head) {
  Tile queue[kStages] = {};  // the oldest first; one without tokens where the walk is over
  int stage = 0;
  int32_t filled = 1 - kStages;
#pragma unroll 1
  while (true) {
#pragma unroll 1
    do {             // the first time until the ring is full
      __syncwarp();  // the stage that the next copies fill was read by all lanes
#pragma unroll
      for (int i = 0; i + 1 < kStages; ++i) queue[i] = queue[i + 1];
      queue[kStages - 1] = {0, 0, false};
      if (cursor.more()) {
        queue[kStages - 1] = cursor.copy_tile(ring + stage * kTileBytes, arrivals + stage * 8, kv_head);
      }
      copy_async_commit();
      stage = stage + 1 < kStages ? stage + 1 : 0;  // which is the oldest one's
    } while (filled++ < 0);
    if (filled == 1) attention.set_scale(p, p.k_scale == nullptr ? 1.0f : __ldg(p.k_scale + kv_head));
    if (queue[0].tokens == 0) break;
    copy_async_wait<kStages - 1>();
    if (kTensor && queue[0].by_tensor) {
      wait_for_bytes(arrivals + stage * 8, phases >> stage & 1);
      phases ^= 1u << stage;
    }
    __syncwarp();  // all lanes' copies of the tile arrived
    attention.attend(ring + stage * kTileBytes, queue[0]);
  }
  copy_async_wait<0>();
}

// Who takes a part: blocks of a cluster.
struct Team {
  int32_t rank, splits;
};

// Attends to the part of part.request that has the number, if there is one, and writes its result. The
// block's shared memory is free again when it returns. `listed`: page ids that may be asked for.
template <int kHeads, bool kUncut, bool kTensor>
__device__ __forceinline__ void decode_part(const DecodeParams& p, const Maps<kTensor>& maps,
                                            BlockShared<kHeads>& shared, uint32_t& phases, const Team& team,
                                            int32_t number, int32_t listed, const Fit& fit, Part& part) {
  const int32_t rank = team.rank, splits = team.splits, warp = threadIdx.x / 32;
  const Request span(p, part.request, listed);
  const UnitHeads heads(blockIdx.y, kHeads, warp % kHeads);
  Attention attention;
  attention.start(p, part.request, heads.head0, heads.heads);
  if (!kUncut)
    find_part(p.cut, fit, number, part.even ? 0 : ordered_slot(p, part.order, listed, part.mirrored),
              span.length, kTileTokens, part);
  if (span.length <= 0 || span.unlisted) {
    if (rank == 0 && part.index == 0) write_nothing<kHeads>(p, part.request, span.unlisted);
    return;
  }
  if (!kUncut && !is_own(part)) return;
  TileRange tiles = {0, (span.length + kTileTokens - 1) / kTileTokens};
  if (!kUncut) tiles = tiles_of_part(tiles.end, part);
  constexpr int kOwnWarps = kWarps / kHeads;
  constexpr Divisor kByOwn = {1u << 31, 31 + (kOwnWarps > 2 ? 2 : kOwnWarps - 1)};  // by 1, 2 or 4
  tiles = tiles_of_warp(splits == 1 ? kByOwn : p.cut.by_warps, tiles, rank * kOwnWarps + warp / kHeads);
  if (tiles.begin < tiles.end) {
    Cursor<kTensor> cursor(p, maps, span, tiles);
    attend_tiles(p, attention, cursor, shared_address(shared.warps[warp].ring),
                 shared_address(shared.arrivals[warp]), phases, heads.kv_head);
  }
  attention.finish();
  __syncwarp();
  attention.store_partial(shared.warps[warp].partial);
  // The next part's tensor copies go where this one's partials were.
  if constexpr (kTensor) fence_for_copies();
  __syncthreads();
  add_rows<kHeads, false, kUncut>(p, shared, rank, splits, part);
  if (splits > 1) {
    cluster_barrier<true>();
    add_rows<kHeads, true, kUncut>(p, shared, rank, splits, part);
  }
  if (!kUncut && part.count > 1) merge_parts(p, shared, rank, splits, part);
  if (splits > 1) {
    cluster_barrier<false>();  // nobody goes on or leaves while others read its shared memory
  } else if (!kUncut) {
    __syncthreads();
  }
}

// kUncut: every request is one part, and the number of clusters a unit is the batch. kTensor: whole tiles by
// tensor copies. Kernels of their own: instructions that a launch does not need would cost it 1 to 3 % where
// it is short.
template <int kHeads, bool kUncut, bool kTensor>
__global__ void __launch_bounds__(kThreads, kResident)
    decode_kernel(const __grid_constant__ DecodeParams p, const __grid_constant__ Maps<kTensor> maps) {
  extern __shared__ __align__(1024) uint8_t raw[];  // a tensor copy's swizzle goes by addresses
  BlockShared<kHeads>& shared = *reinterpret_cast<BlockShared<kHeads>*>(raw);
  // Page ids: into L2 while the lengths are on their way, a line a thread of the first blocks.
  const uint32_t line = ((blockIdx.z * gridDim.x + blockIdx.x) * kThreads + threadIdx.x) * 32;
  if (blockIdx.y == 0 && line < min(p.num_kv_indices, kPrefetchedIds)) prefetch_l2(p.kv_indices + line);
  uint32_t phases = 0;
  if constexpr (kTensor) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane < kStages) start_barrier(shared_address(&shared.arrivals[warp][lane]));
    if (threadIdx.x == 0) prefetch_map(maps.keys);
    if (threadIdx.x == 32) prefetch_map(maps.values);
    fence_barriers();
    fence_for_copies();
  }
  Team team = {static_cast<int32_t>(blockIdx.x), static_cast<int32_t>(gridDim.x)};
  Part part = {static_cast<int32_t>(blockIdx.z), 0, 1, 0, true, 0, false, 0, 0};
  if constexpr (kUncut) {
    decode_part<kHeads, true, kTensor>(p, maps, shared, phases, team, 0, p.num_kv_indices, Fit{}, part);
  } else {
    // What kv_indptr counts: kv_indices may be longer, or shorter where the table is bad.
    const int32_t listed = min(max(__ldg(p.kv_indptr + p.batch), 0), p.num_kv_indices);
    const Fit fit = fit_lengths(p.cut, listed, p.num_kv_indices);
    const bool open = p.cut.even_pages >= 0 && p.cut.even_pages != INT32_MAX;
    const Longest longest = open ? longest_requests(p) : Longest{0, 0};
    const int32_t most = longest.pages();
    part.even = is_even(fit, most);
    // Parts of the longest request should begin early, where those that begin late are shorter.
    part.mirrored = open && !part.even && p.cut.tail_scale > 0 && longest.is_late(most);
    const int32_t numbers = numbers_of(p.cut, part.even, p.batch);
    int32_t first = blockIdx.z, step = gridDim.z;
    if (!part.even && p.cut.alone != 0) {
      first = first * team.splits + team.rank;
      step *= team.splits;
      team = {0, 1};
    }
#pragma unroll 1
    for (int32_t number = first; number < numbers; number += step) {
      if (part.even) {
        part.request = p.cut.even_parts == 1 ? number : number / p.cut.even_parts;
      } else if (p.cut.dealt > 0) {
        const Dealt dealt = deal_numbers(p, number, listed);
        part.request = dealt.request;
        part.first = dealt.first;
        part.count = dealt.count;
        part.index = number - dealt.first;
      } else {
        part.order = find_request(p, number, listed, fit, part.mirrored);
        part.request = part.mirrored ? p.batch - 1 - part.order : part.order;
        if (part.order >= p.batch) continue;
      }
      if (part.request < p.batch)
        decode_part<kHeads, false, kTensor>(p, maps, shared, phases, team, number, listed, fit, part);
    }
  }
}

}  // namespace evenkv
