// From warps to a request's result: the warps of a block, the blocks of a cluster, the parts of a cut
// request. Who adds what is fixed, and partials are added in order of their tokens, so that the bits do not
// depend on who comes first.
#pragma once

#include "merge.cuh"

namespace evenkv {

// A warp's item is up to kItemRows rows (query heads) of one KV head; items are dealt to warps.
constexpr int kItemRows = 32 / kRowLanes;
constexpr int kHeadItems = (kUnitHeads + kItemRows - 1) / kItemRows;

template <int kHeads>
struct BlockShared {
  union {
    uint8_t ring[kStages][kTileBytes];
    float partial[kPartialFloats];  // once the warp's tiles are through
  } warps[kWarps];
  alignas(16) float partial[kHeads][kPartialFloats];  // the block's, where it is one of several in a cluster
  int32_t is_last;                                    // whether the block brought the last part of a request
};

// visit(sub, heads, row, row_lane) for each row of the items `first`, `first + step`, ...
template <int kHeads, typename Visit>
__device__ __forceinline__ void for_rows(int32_t first, int32_t step, const Visit& visit) {
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int item = first; item < kHeads * kHeadItems; item += step) {
    const int sub = item % kHeads, row = item / kHeads * kItemRows + lane / kRowLanes;
    const UnitHeads heads(blockIdx.y, kHeads, sub);
    if (row < heads.heads) visit(sub, heads, row, lane % kRowLanes);
  }
}

__device__ __forceinline__ void write_row(const DecodeParams& p, int32_t request, const UnitHeads& heads,
                                          int32_t row, int row_lane, const Merged& sum) {
  const int64_t out = output_row(p, request, heads.head0 + row);
  sum.write(static_cast<uint16_t*>(p.output) + out * kHeadDim, p.lse + out, value_scale(p, heads.kv_head),
            row_lane);
}

// Outputs of a unit's heads of a request without tokens (0), or of one whose table is bad (NaN). Apart from
// the kernel's own code: a launch finds its instructions cold, and must not step over these.
template <int kHeads>
__device__ __noinline__ void write_nothing(const DecodeParams& p, int32_t request, bool bad) {
  const uint32_t pair = bad ? 0x7fff7fffu : 0u;  // NaN in bf16 and in fp16
#pragma unroll 1
  for (int sub = 0; sub < kHeads; ++sub) {
    const UnitHeads heads(blockIdx.y, kHeads, sub);
    const int64_t row = output_row(p, request, heads.head0);
    uint4* out = reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.output) + row * kHeadDim);
#pragma unroll 1
    for (int i = threadIdx.x; i < heads.heads * kHeadDim / 8; i += kThreads)
      out[i] = make_uint4(pair, pair, pair, pair);
    if (threadIdx.x < heads.heads) p.lse[row + threadIdx.x] = bad ? NAN : -INFINITY;
  }
}

// Where a row of a part's partial lies in scratch.
template <int kHeads>
__device__ __forceinline__ float* part_row(const DecodeParams& p, const Part& part, int32_t index,
                                           int32_t sub, int32_t row) {
  const int64_t place = static_cast<int64_t>(blockIdx.y) * p.cut.places + part.place(index);
  return p.partials + (place * kHeads + sub) * kPartialFloats + row * kPartialStride;
}

// Adds up the block's warps, or the cluster's blocks. The result goes to the block's partial where the
// cluster is still to be added up, else to scratch if the request has other parts, else to the outputs.
template <int kHeads, bool kCluster, bool kUncut>
__device__ __forceinline__ void add_rows(const DecodeParams& p, BlockShared<kHeads>& shared, int32_t rank,
                                         int32_t splits, const Part& part) {
  const int warp = threadIdx.x / 32;
  for_rows<kHeads>(kCluster ? rank * kWarps + warp : warp, kCluster ? splits * kWarps : kWarps,
                   [&](int sub, const UnitHeads& heads, int row, int row_lane) {
                     const int32_t offset = row * kPartialStride;
                     constexpr int kMost = kCluster ? kMostSplits : kWarps / kHeads;
                     Merged parts[kMost], sum;
                     float largest = kNoMaximum;
#pragma unroll
                     for (int i = 0; i < kMost; ++i) {
                       const float* from = kCluster ? shared_of_rank(shared.partial[sub], min(i, splits - 1))
                                                    : shared.warps[i * kHeads + sub].partial;
                       if (!kCluster || i < splits) parts[i].template load<false>(from + offset, row_lane);
                       largest = fmaxf(largest, parts[i].m);
                     }
                     sum.raise(largest);
#pragma unroll
                     for (int i = 0; i < kMost; ++i) {
                       if (!kCluster || i < splits) sum.add(parts[i]);
                     }
                     if (!kCluster && splits > 1) {
                       sum.store(shared.partial[sub] + offset, row_lane);
                     } else if (!kUncut && part.count > 1) {
                       sum.store(part_row<kHeads>(p, part, part.index, sub, row), row_lane);
                     } else {
                       write_row(p, part.request, heads, row, row_lane, sum);
                     }
                   });
}

// A cut request: the block counts its rows in, and adds up those of all parts if it brought the last one.
template <int kHeads>
__device__ __forceinline__ void merge_parts(const DecodeParams& p, BlockShared<kHeads>& shared, int32_t rank,
                                            int32_t splits, const Part& part) {
  if (rank * kWarps >= kHeads * kHeadItems) return;  // the block has no rows
  __syncthreads();
  if (threadIdx.x == 0) {
    const int64_t place = static_cast<int64_t>(blockIdx.y) * p.cut.places + part.first;
    int32_t* const counter = p.counters + place * kMostSplits + rank;
    const bool is_last = count_in_release(counter) == part.count - 1;
    if (is_last) {
      acquire();
      *counter = 0;
    }
    shared.is_last = is_last;
  }
  __syncthreads();
  if (!shared.is_last) return;
  for_rows<kHeads>(rank * kWarps + threadIdx.x / 32, splits * kWarps,
                   [&](int sub, const UnitHeads& heads, int row, int row_lane) {
                     constexpr int kBatch = kQuads > 1 ? 4 : 8;  // loads side by side
                     Merged sum;
#pragma unroll 1
                     for (int32_t first = 0; first < part.count; first += kBatch) {
                       Merged parts[kBatch];
                       float largest = sum.m;
#pragma unroll
                       for (int i = 0; i < kBatch; ++i) {
                         const int32_t index = min(first + i, part.count - 1);
                         parts[i].template load<true>(part_row<kHeads>(p, part, index, sub, row), row_lane);
                       }
#pragma unroll
                       for (int i = 0; i < kBatch; ++i) largest = fmaxf(largest, parts[i].m);
                       sum.raise(largest);
#pragma unroll
                       for (int i = 0; i < kBatch; ++i) {
                         if (first + i < part.count) sum.add(parts[i]);
                       }
                     }
                     write_row(p, part.request, heads, row, row_lane, sum);
                   });
}

}  // namespace evenkv
