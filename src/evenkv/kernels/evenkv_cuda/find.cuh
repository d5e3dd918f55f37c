// Which request a number stands for: what the device learns from kv_indptr before its blocks part ways.
#pragma once

#include "cursor.cuh"

namespace evenkv {

// Pages of the longest request of each half of the batch; 0 where kv_indptr falls: counted as even, every
// request is found and counters return to zero (not where nobody asks: batch-invariant bits, more than
// kMostScanned requests). Each lane has seen some of the requests.
struct Longest {
  int32_t early, late;

  // Of all lanes and requests.
  __device__ __forceinline__ int32_t pages() const {
    const uint32_t own = max(early, late);
    const int32_t most = static_cast<int32_t>(__reduce_max_sync(kAllLanes, own));
    return most == INT32_MAX ? 0 : most;
  }
  // Whether the longest request, of so many pages, is in the second half alone.
  __device__ __forceinline__ bool is_late(int32_t pages) const {
    return static_cast<int32_t>(__reduce_max_sync(kAllLanes, static_cast<uint32_t>(early))) < pages;
  }
};
__device__ __forceinline__ Longest longest_requests(const DecodeParams& p) {
  Longest longest = {0, 0};
#pragma unroll 4
  for (int32_t request = threadIdx.x & 31; request < p.batch; request += 32) {
    const int32_t begin = __ldg(p.kv_indptr + request), end = __ldg(p.kv_indptr + request + 1);
    const int32_t own = end < begin ? INT32_MAX : end - begin;
    if (2 * request < p.batch)
      longest.early = max(longest.early, own);
    else
      longest.late = max(longest.late, own);
  }
  return longest;
}

// A unit's slot where a page begins; pages beyond the listed ones begin where those end.
__device__ __forceinline__ int32_t listed_slot(const DecodeParams& p, int32_t page, int32_t listed) {
  return min(max(page, 0), listed) * p.page_size;
}

// A unit's slot where the request that is `order`-th begins; the batch stands for the end.
__device__ __forceinline__ int32_t ordered_slot(const DecodeParams& p, int32_t order, int32_t listed,
                                                bool mirrored) {
  const int32_t slot = listed_slot(p, __ldg(p.kv_indptr + (mirrored ? p.batch - order : order)), listed);
  return mirrored ? listed * p.page_size - slot : slot;
}

// The order of the request that owns an uneven number; the batch where none does. A range
// that a few passes count is not searched further. Every lane returns the same value. Apart from the
// kernel's own code: a launch finds its instructions cold, and small problems must not step over these.
__device__ __noinline__ int32_t find_request(const DecodeParams& p, int32_t number, int32_t listed,
                                             const Fit fit, bool mirrored) {
  const int lane = threadIdx.x & 31;
  const auto begins_by = [&](int32_t order) {
    return uneven_number(fit, p.cut.tail_scale, order, ordered_slot(p, order, listed, mirrored)) <= number;
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
  int32_t count = low;
  // Not unrolled: instructions are as cold as kv_indptr, which the longest request's search has fetched.
#pragma unroll 1
  for (int32_t entry = low + lane; entry - lane < high; entry += 32)
    count += __popc(__ballot_sync(kAllLanes, entry < high && begins_by(entry)));
  return max(count - 1, 0);
}

static_assert(kMostDealt <= 32, "one request a lane");
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
    return is_request ? dealt_parts(tiles, p.cut.whole_dealt, slope) : 0;
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
