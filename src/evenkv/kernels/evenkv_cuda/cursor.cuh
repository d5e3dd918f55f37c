// A warp's walk over its part of a chunk: which tokens the next tile holds, and where their rows lie.
// Lanes hold windows of 32 requests and 64 page ids, so that a step costs shuffles and no dependent load.
#pragma once

#include "params.h"
#include "ptx.cuh"

namespace evenkv {

constexpr uint32_t kAllLanes = 0xffffffffu;

// page_size is a run-time value; powers of two divide by a shift.
struct PageSize {
  int32_t size, shift;  // shift is -1 for other sizes

  __device__ __forceinline__ explicit PageSize(int32_t page_size) : size(page_size) {
    shift = (page_size & (page_size - 1)) == 0 ? 31 - __clz(page_size) : -1;
  }
  __device__ __forceinline__ int32_t page_of(int32_t slot) const {
    return shift >= 0 ? slot >> shift : slot / size;
  }
};

// What a tile in the ring holds. A piece is a run of tiles of one request and one unit.
struct Tile {
  int32_t request, unit;
  uint32_t tokens;  // number of tokens (1..16), and a bit for each unreadable one from bit 16 on
  uint32_t flags;
};
enum TileFlags : uint32_t {
  kFirstOfPiece = 1,
  kLastOfPiece = 2,
  kStartsBefore = 4,  // the request has earlier tokens outside the piece (set on the first tile)
  kEndsAfter = 8,     // ... later tokens (set on the last tile)
  kPoisoned = 16,     // kv_last_page_len is out of range: the request's outputs become NaN
  kLastOfChunk = 32,  // the warp's last tile of a chunk (a tile of no tokens where its part has none)
};

// The last request whose first page is at most `page`: the owner of that page. Independent loads first: batches
// up to 255 requests take one trip to memory. Every lane returns the same value.
__device__ __forceinline__ int32_t find_request(const int32_t* kv_indptr, int32_t batch, int32_t page) {
  const int lane = threadIdx.x & 31;
  int32_t low = 0, high = batch + 1;  // the count of entries <= page lies in [low, high]
  while (high - low > 256) {          // 32-ary search down to a range that one pass counts
    const int32_t step = (high - low + 32) / 33;
    const int32_t probe = low + step * (lane + 1) - 1;
    const bool below = probe < high && __ldg(kv_indptr + min(probe, batch)) <= page;
    const int32_t passed = __popc(__ballot_sync(kAllLanes, below));
    low += passed * step;
    high = min(high, low + step);
  }
  bool below[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int32_t entry = low + i * 32 + lane;
    below[i] = entry < high && __ldg(kv_indptr + min(entry, batch)) <= page;
  }
  int32_t count = low;
#pragma unroll
  for (int i = 0; i < 8; ++i) count += __popc(__ballot_sync(kAllLanes, below[i]));
  return count - 1;
}

class Cursor {
 public:
  __device__ __forceinline__ Cursor(const DecodeParams& p, int32_t unit_slots)
      : p_(p), page_(p.page_size), lane_(threadIdx.x & 31), unit_slots_(unit_slots) {
    id_limit_ = min(page_.page_of(unit_slots), p.num_kv_indices);
  }

  // Starts a walk over `slots` positions from `unit`, `slot` on.
  __device__ __forceinline__ void begin(int32_t unit, int32_t slot, int32_t slots) {
    unit_ = unit;
    slot_ = slot;
    unit_end_ = slot;
    left_ = 0;
    in_piece_ = false;
    if (slots <= 0) return;
    unit_end_ = min(unit_slots_, slot + slots);
    left_ = slots - (unit_end_ - slot);
    load_ids(page_.page_of(slot));
    load_requests(find_request(p_.kv_indptr, p_.batch, page_.page_of(slot)));
    take_request(0);
  }

  // Moves to the next tile; false when the walk is over.
  __device__ __forceinline__ bool next() {
    while (true) {
      if (slot_ >= unit_end_) {
        if (left_ <= 0) return false;
        ++unit_;
        slot_ = 0;
        unit_end_ = min(unit_slots_, left_);
        left_ -= unit_end_;
        in_piece_ = false;
        load_ids(0);
        load_requests(0);
        request_lane_ = -1;
        begin_ = 0;
        length_ = 0;
      }
      const int32_t token = slot_ - begin_;
      if (token < length_) {
        const int32_t count = min(min(kTileTokens, length_ - token), unit_end_ - slot_);
        tile_slot_ = slot_;
        tile_tokens_ = count;
        flags_ = (poison_mask_ >> request_lane_ & 1) ? kPoisoned : 0;
        if (!in_piece_) flags_ |= kFirstOfPiece | (token > 0 ? kStartsBefore : 0);
        slot_ += count;
        in_piece_ = token + count < length_ && slot_ < unit_end_;
        if (!in_piece_) flags_ |= kLastOfPiece | (token + count < length_ ? kEndsAfter : 0);
        return true;
      }
      const uint32_t later = request_lane_ == 31 ? 0 : nonempty_mask_ & (kAllLanes << (request_lane_ + 1));
      if (later != 0) {
        take_request(__ffs(later) - 1);
        slot_ = min(max(slot_, begin_), unit_end_);
      } else if (first_request_ + 32 < p_.batch) {
        load_requests(first_request_ + 32);
        request_lane_ = -1;
        length_ = 0;
      } else {
        slot_ = unit_end_;
      }
    }
  }

  // Enqueues the tile's copies into `stage` (a shared address) and describes it. `head` is the KV head.
  __device__ __forceinline__ Tile copy_tile(uint32_t stage, int32_t head) {
    const int32_t slot = tile_slot_ + (lane_ & 15);
    const int32_t index = page_.page_of(slot);
    const int32_t first_index = page_.page_of(tile_slot_);
    if (first_index >= id_base_ + 64) {
      load_ids(first_index);
    } else if (first_index >= id_base_ + 32) {
      id_base_ += 32;
      ids_now_ = ids_next_;
      ids_next_ = load_id(id_base_ + 32 + lane_);
    }
    const int32_t k = index - id_base_;
    const int32_t now = __shfl_sync(kAllLanes, ids_now_, k & 31);
    const int32_t next = __shfl_sync(kAllLanes, ids_next_, k & 31);
    const int32_t id = k < 32 ? now : next;
    const bool wanted = (lane_ & 15) < tile_tokens_;
    const bool readable = static_cast<uint32_t>(id) < static_cast<uint32_t>(p_.num_pages);
    const uint32_t readable_rows = __ballot_sync(kAllLanes, wanted && readable) & 0xffffu;
    const uint32_t unreadable_rows = __ballot_sync(kAllLanes, wanted && !readable) & 0xffffu;
    const int64_t page = wanted && readable ? id : 0;
    const int64_t in_page = wanted && readable ? slot - index * page_.size : 0;
    copy_rows(stage, static_cast<const char*>(p_.k_cache) + head * p_.k_stride_head * kElementBytes,
              (page * p_.k_stride_page + in_page * p_.k_stride_slot) * kElementBytes, readable_rows);
    copy_rows(stage + kTileTokens * kRowBytes,
              static_cast<const char*>(p_.v_cache) + head * p_.v_stride_head * kElementBytes,
              (page * p_.v_stride_page + in_page * p_.v_stride_slot) * kElementBytes, readable_rows);
    Tile tile;
    tile.request = first_request_ + request_lane_;
    tile.unit = unit_;
    tile.tokens = static_cast<uint32_t>(tile_tokens_) | unreadable_rows << 16;
    tile.flags = flags_;
    return tile;
  }

  __device__ __forceinline__ int32_t unit() const { return unit_; }

 private:
  __device__ __forceinline__ int32_t load_id(int32_t index) const {
    return index < id_limit_ ? __ldg(p_.kv_indices + index) : -1;
  }
  __device__ __forceinline__ void load_ids(int32_t first) {
    id_base_ = first;
    ids_now_ = load_id(first + lane_);
    ids_next_ = load_id(first + 32 + lane_);
  }
  __device__ __forceinline__ void load_requests(int32_t first) {
    first_request_ = first;
    const int32_t request = first + lane_;
    bool poisoned = false;
    lane_begin_ = 0;
    lane_length_ = 0;
    if (request < p_.batch) {
      const int32_t page = __ldg(p_.kv_indptr + request);
      const int32_t pages = __ldg(p_.kv_indptr + request + 1) - page;
      int32_t last = page_.size;
      if (p_.kv_last_page_len != nullptr) {
        last = __ldg(p_.kv_last_page_len + request);
        poisoned = last < 0 || last > page_.size;
        if (poisoned) last = page_.size;
      }
      lane_begin_ = page * page_.size;
      lane_length_ = pages > 0 ? (pages - 1) * page_.size + last : 0;
    }
    nonempty_mask_ = __ballot_sync(kAllLanes, lane_length_ > 0);
    poison_mask_ = __ballot_sync(kAllLanes, poisoned);
  }
  __device__ __forceinline__ void take_request(int lane) {
    request_lane_ = lane;
    begin_ = __shfl_sync(kAllLanes, lane_begin_, lane);
    length_ = __shfl_sync(kAllLanes, lane_length_, lane);
  }
  // `offset` (bytes) is the lane's row's, lane & 15; rows not in the mask are zero-filled.
  __device__ __forceinline__ void copy_rows(uint32_t dst, const char* base, int64_t offset, uint32_t rows) {
    constexpr int kLanesPerRow = kRowBytes / 16;
    constexpr int kRowsPerCopy = 32 / kLanesPerRow;
    const int chunk = lane_ % kLanesPerRow;
#pragma unroll
    for (int i = 0; i < kTileTokens / kRowsPerCopy; ++i) {
      const int row = i * kRowsPerCopy + lane_ / kLanesPerRow;
      const int64_t row_offset = __shfl_sync(kAllLanes, offset, row);
      copy_async_16(dst + row * kRowBytes + swizzle(row, chunk) * 16, base + row_offset + chunk * 16,
                    (rows >> row & 1) ? 16 : 0);
    }
  }

 public:
  // Rows are a multiple of the 128 bytes that the banks span (or half): XOR spreads a column over the banks.
  static __device__ __forceinline__ int swizzle(int row, int chunk) {
    return kRowBytes >= 128 ? chunk ^ (row & 7) : chunk ^ (row >> 1 & 3);
  }

 private:
  const DecodeParams& p_;
  const PageSize page_;
  const int lane_;
  const int32_t unit_slots_;  // slots of one unit
  int32_t id_limit_;          // page ids that may be read
  int32_t unit_ = 0, slot_ = 0, unit_end_ = 0, left_ = 0;
  int32_t tile_slot_ = 0, tile_tokens_ = 0;
  uint32_t flags_ = 0;
  bool in_piece_ = false;
  // The current request, and the window's 32 requests in the lanes.
  int32_t first_request_ = 0, request_lane_ = -1, begin_ = 0, length_ = 0;
  int32_t lane_begin_ = 0, lane_length_ = 0;
  uint32_t nonempty_mask_ = 0, poison_mask_ = 0;
  // kv_indices[id_base_ + lane] and the 32 after them.
  int32_t id_base_ = 0, ids_now_ = -1, ids_next_ = -1;
};

}  // namespace evenkv
