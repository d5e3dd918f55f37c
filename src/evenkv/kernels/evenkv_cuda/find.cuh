// Which request a number stands for: what the device learns from kv_indptr before its blocks part ways.
#pragma once

#include "cursor.cuh"

namespace evenkv {

// Pages of the longest request; 0 where kv_indptr falls: counted as even, every request is found and counters
// return to zero (not where nobody asks: batch-invariant bits, more than kMostScanned requests). Every lane
// returns the same value.
__device__ __forceinline__ int32_t longest_request(const DecodeParams& p) {
  int32_t longest = 0;
#pragma unroll 4
  for (int32_t request = threadIdx.x & 31; request < p.batch; request += 32) {
    const int32_t begin = __ldg(p.kv_indptr + request), end = __ldg(p.kv_indptr + request + 1);
    longest = max(longest, end < begin ? INT32_MAX : end - begin);
  }
  longest = static_cast<int32_t>(__reduce_max_sync(kAllLanes, static_cast<uint32_t>(longest)));
  return longest == INT32_MAX ? 0 : longest;
}

// A unit's slot where a page begins; pages beyond the listed ones begin where those end.
__device__ __forceinline__ int32_t listed_slot(const DecodeParams& p, int32_t page, int32_t listed) {
  return min(max(page, 0), listed) * p.page_size;
}

// The request that owns an uneven number; the batch where none does. Independent loads first: batches up to
// 255 requests take one trip to memory. Every lane returns the same value. Apart from the kernel's own code:
// a launch finds its instructions cold, and small problems must not step over these.
__device__ __noinline__ int32_t find_request(const DecodeParams& p, int32_t number, int32_t listed,
                                             const Fit fit) {
  const int lane = threadIdx.x & 31;
  const auto begins_by = [&](int32_t request) {
    return uneven_number(fit, p.cut.tail_scale, request,
                         listed_slot(p, __ldg(p.kv_indptr + request), listed)) <= number;
  };
  int32_t low = 0, high = p.batch + 1;  // the count of entries that begin by then lies in [low, high]
#pragma unroll 1
  while (high - low > 256) {  // 32-ary search down to a range that one pass counts
    const int32_t step = (high - low + 32) / 33;
    const int32_t probe = low + step * (lane + 1) - 1;
    const bool below = probe < high && begins_by(probe);
    const int32_t passed = __popc(__ballot_sync(kAllLanes, below));
    low += passed * step;
    high = min(high, low + step);
  }
  bool below[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int32_t entry = low + i * 32 + lane;
    below[i] = entry < high && begins_by(entry);
  }
  int32_t count = low;
#pragma unroll
  for (int i = 0; i < 8; ++i) count += __popc(__ballot_sync(kAllLanes, below[i]));
  return max(count - 1, 0);
}

struct Dealt {
  int32_t request, first, count;
};

// Deals a unit's numbers to the requests of a batch (deal_slope), one a lane. The request that owns `number`
// (the last one, if none does), its first number and its parts. Every lane returns the same values. Apart
// from the kernel's own code, as above.
__device__ __noinline__ Dealt deal_numbers(const DecodeParams& p, int32_t number, int32_t listed) {
  const int lane = threadIdx.x & 31;
  const bool is_request = lane < p.batch;
  int32_t tiles = 0;
  if (is_request) {
    const int32_t slots = listed_slot(p, __ldg(p.kv_indptr + lane + 1), listed) -
                          listed_slot(p, __ldg(p.kv_indptr + lane), listed);
    tiles = dealt_tiles(max(slots, 0), kTileTokens);
  }
  const auto sum = [](int32_t of_lane) {
    return __reduce_add_sync(kAllLanes, static_cast<uint32_t>(of_lane));
  };
  const auto parts = [&](float slope) {
    return is_request ? dealt_parts(tiles, p.cut.whole_tokens / kTileTokens, slope) : 0;
  };
  const float slope = deal_slope(p.cut, p.batch, sum(tiles),
                                 [&](float trial) { return static_cast<int32_t>(sum(parts(trial))); });
  const int32_t count = parts(slope);
  int32_t end = count;  // inclusive sum over lanes
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int32_t below = __shfl_up_sync(kAllLanes, end, step);
    if (lane >= step) end += below;
  }
  const int32_t begun = __popc(__ballot_sync(kAllLanes, is_request && end - count <= number));
  return {begun - 1, __shfl_sync(kAllLanes, end - count, begun - 1),
          __shfl_sync(kAllLanes, count, begun - 1)};
}

}  // namespace evenkv
