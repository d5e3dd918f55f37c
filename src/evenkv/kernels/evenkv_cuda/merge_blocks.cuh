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
  alignas(8) uint64_t arrivals[kWarps][kStages];      // of tensor copies
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

// Counts the block in, and tells whether it is the last of `wanted` that count there.
template <int kHeads>
__device__ __forceinline__ bool brought_last(const DecodeParams& p, BlockShared<kHeads>& shared,
                                             int32_t place, int32_t rank, int32_t wanted) {
  __syncthreads();
  if (threadIdx.x == 0) {
    const int64_t of_unit = static_cast<int64_t>(blockIdx.y) * p.cut.places;
    int32_t* const counter = p.counters + (of_unit + place) * kMostSplits + rank;
    const bool is_last = count_in_release(counter) == wanted - 1;
    if (is_last) {
      acquire();
      *counter = 0;
    }
    shared.is_last = is_last;
  }
  __syncthreads();
  return shared.is_last;
}

// A cut request: the block counts its rows in, and adds up those of all parts if it brought the last one.
// Many parts are added up in groups of kGroup neighbours (the last one takes the rest), side by side, and
// then the groups, whose sums take the place of their first part's: one block would add for longer than
// others stream.
template <int kHeads>
__device__ __forceinline__ void merge_parts(const DecodeParams& p, BlockShared<kHeads>& shared, int32_t rank,
                                            int32_t splits, const Part& part) {
  if (rank * kWarps >= kHeads * kHeadItems) return;  // the block has no rows
  int32_t first = 0, stride = 1, count = part.count, place = part.first, ml_at = kHeadDim;
  const int32_t groups = part.count > kMostAtOnce ? part.count / kGroup : 1;
  bool is_group = groups > 1;
  if (is_group) {
    const int32_t group = min(part.index / kGroup, groups - 1);
    first = group * kGroup;
    count = group == groups - 1 ? part.count - first : kGroup;
    // Nobody else counts there: a request counts at its first place, which may be its neighbour's last one,
    // and a last group begins kGroup before its end.
    place += first + 1;
  }
#pragma unroll 1
  while (brought_last(p, shared, place, rank, count)) {
    for_rows<kHeads>(rank * kWarps + threadIdx.x / 32, splits * kWarps,
                     [&](int sub, const UnitHeads& heads, int row, int row_lane) {
                       constexpr int kBatch = kQuads > 1 ? 4 : 8;  // loads side by side
                       Merged sum;
#pragma unroll 1
                       for (int32_t begin = 0; begin < count; begin += kBatch) {
                         Merged parts[kBatch];
                         float largest = sum.m;
#pragma unroll
                         for (int i = 0; i < kBatch; ++i) {
                           const int32_t index = first + min(begin + i, count - 1) * stride;
                           parts[i].template load<true>(part_row<kHeads>(p, part, index, sub, row), row_lane,
                                                        ml_at);
                         }
#pragma unroll
                         for (int i = 0; i < kBatch; ++i) largest = fmaxf(largest, parts[i].m);
                         sum.raise(largest);
#pragma unroll
                         for (int i = 0; i < kBatch; ++i) {
                           if (begin + i < count) sum.add(parts[i]);
                         }
                       }
                       if (is_group) {
                         sum.store(part_row<kHeads>(p, part, first, sub, row), row_lane, kHeadDim + 2);
                       } else {
                         write_row(p, part.request, heads, row, row_lane, sum);
                       }
                     });
    if (!is_group) return;
    is_group = false;
    first = 0;
    stride = kGroup;
    count = groups;
    ml_at = kHeadDim + 2;
    place = part.first;
  }
}

}  // namespace evenkv
