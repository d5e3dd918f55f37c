// A warp's walk over its part of a chunk: which tokens the next tile holds, and where their rows lie.
// Lanes hold windows of 32 requests and 64 page ids, so that a step costs shuffles and no dependent load.
#pragma once

#include "params.h"
#include "ptx.cuh"

namespace evenkv {

constexpr uint32_t kAllLanes = 0xffffffffu;

// The page, within a unit, that holds a slot.
__device__ __forceinline__ int32_t page_of(const DecodeParams& p, int32_t slot) {
  return static_cast<int32_t>(static_cast<uint64_t>(static_cast<uint32_t>(slot)) * p.page_multiplier >>
                              p.page_shift);
}

// Where a request's slots begin within a unit, and how many tokens it has: the one reading of the page
// tables.
struct Request {
  int32_t begin, length;
  int32_t first_page, pages;
  bool poisoned;  // kv_last_page_len is out of range; the last page counts as full

  __device__ __forceinline__ Request(const DecodeParams& p, int32_t request) : poisoned(false) {
    first_page = __ldg(p.kv_indptr + request);
    pages = __ldg(p.kv_indptr + request + 1) - first_page;
    int32_t last = p.page_size;
    if (p.kv_last_page_len != nullptr) {
      last = __ldg(p.kv_last_page_len + request);
      poisoned = last < 0 || last > p.page_size;
      if (poisoned) last = p.page_size;
    }
    begin = first_page * p.page_size;
    length = pages > 0 ? (pages - 1) * p.page_size + last : 0;
  }
};

// What a tile in the ring holds. A piece is a run of tiles of one request and one unit.
struct Tile {
  int32_t request, unit;
  uint32_t flags;       // TileFlags, and the number of tokens (0 to kTileTokens) from bit kCountShift on
  uint32_t unreadable;  // a bit for each token whose page id is out of range

  __device__ __forceinline__ int tokens() const { return static_cast<int>(flags >> kCountShift); }

  static constexpr int kCountShift = 16;
};
enum TileFlags : uint32_t {
  kFirstOfPiece = 1,
  kLastOfPiece = 2,
  kStartsBefore = 4,  // the request has earlier tokens outside the piece (set on the first tile)
  kEndsAfter = 8,     // ... later tokens (set on the last tile)
  kPoisoned = 16,     // kv_last_page_len is out of range: the request's outputs become NaN
  kLastOfChunk = 32,  // the warp's last tile of a chunk (a tile of no tokens where its part has none)
};

// The last request that begins at `bound` or before: pages, or with a shift chunks (params.h:
// request_chunks). Independent loads first: batches up to 255 requests take one trip to memory. Every lane
// returns the same value.
__device__ __forceinline__ int32_t find_request(const DecodeParams& p, int32_t bound, int32_t shift = 0) {
  const int lane = threadIdx.x & 31;
  const auto begins_by = [&](int32_t entry) {
    const int32_t page = __ldg(p.kv_indptr + entry);
    return (shift == 0 ? page : (page * p.page_size >> shift) + entry) <= bound;
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

// Tiles in shared memory: the 16-byte chunks of a row are permuted by XOR with the row's number, so that a
// column of eight rows touches all banks. As XOR on addresses (tiles are aligned), each access costs one
// instruction more and no register: swizzled_row gives a row's base, swizzled picks a chunk known at compile
// time.
__device__ __forceinline__ uint32_t swizzled_row(uint32_t tile, int row) {
  return tile + row * kRowBytes + (kRowBytes >= 128 ? row & 7 : row >> 1 & 3) * 16;
}
__device__ __forceinline__ uint32_t swizzled(uint32_t row_base, int chunk) {
  return kRowBytes >= 128 ? (row_base ^ (chunk & 7) * 16) + (chunk & ~7) * 16 : row_base ^ chunk * 16;
}

class Cursor {
 public:
  __device__ __forceinline__ Cursor(const DecodeParams& p, int32_t unit_slots)
      : p_(p), lane_(threadIdx.x & 31) {
    set_unit_slots(unit_slots);
  }
  __device__ __forceinline__ void set_unit_slots(int32_t unit_slots) {
    unit_slots_ = unit_slots;
    id_limit_ = min(page_of(p_, unit_slots), p_.num_kv_indices);
  }
  __device__ __forceinline__ int32_t unit_slots() const { return unit_slots_; }

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
    load_ids(page_of(p_, slot));
    load_requests(find_request(p_, page_of(p_, slot)));
    take_request(0);
    slot_ = min(max(slot_, begin_), unit_end_);
  }

  // Starts a walk over `tokens` tokens of a known request.
  __device__ __forceinline__ void begin_in_request(int32_t request, int32_t unit, const Request& span,
                                                   int32_t token, int32_t tokens) {
    unit_ = unit;
    begin_ = span.begin;
    length_ = span.length;
    poison_flag_ = span.poisoned ? kPoisoned : 0;
    slot_ = span.begin + token;
    unit_end_ = slot_ + tokens;
    left_ = 0;
    in_piece_ = false;
    first_request_ = request;
    request_lane_ = 0;
    load_ids(page_of(p_, slot_));
  }

  // Moves to the next tile; false when the walk is over.
  __device__ __forceinline__ bool next() {
    if ((slot_ >= unit_end_ || slot_ - begin_ >= length_) && !seek()) return false;
    take_tile();
    return true;
  }
  // The same for a walk that begin_in_request started.
  __device__ __forceinline__ bool next_in_request() {
    if (slot_ >= unit_end_) return false;
    take_tile();
    return true;
  }

  // Enqueues the tile's copies into `stage` (a shared address) and describes it. `head` is the KV head.
  __device__ __forceinline__ Tile copy_tile(uint32_t stage, int32_t head) {
    const int32_t first_index = page_of(p_, tile_slot_);
    if (first_index >= id_base_ + 64) {
      load_ids(first_index);
    } else if (first_index >= id_base_ + 32) {
      id_base_ += 32;
      ids_now_ = ids_next_;
      ids_next_ = ids_later_;
      ids_later_ = load_id(id_base_ + 64 + lane_);
    }
    const char* keys = static_cast<const char*>(p_.k_cache) + head * p_.k_stride_head * kElementBytes;
    const char* values = static_cast<const char*>(p_.v_cache) + head * p_.v_stride_head * kElementBytes;
    const uint32_t value_stage = stage + kTileTokens * kRowBytes;
    uint32_t unreadable = 0;
    if (((p_.page_size | tile_slot_) & 15) == 0) {
      // Each 16 rows lie in one page, side by side.
#pragma unroll
      for (int block = 0; block < kTileRowBlocks; ++block) {
        const int32_t slot = tile_slot_ + block * 16;
        const int32_t index = page_of(p_, slot);
        const int32_t rows = min(16, tile_tokens_ - block * 16);
        const int32_t id = listed_id(index);
        const bool readable = static_cast<uint32_t>(id) < static_cast<uint32_t>(p_.num_pages);
        if (!readable && rows > 0) unreadable |= ((1u << rows) - 1) << (block * 16);
        const int64_t page = readable ? id : 0;
        const int64_t in_page = slot - index * p_.page_size;
        const int32_t wanted = readable ? rows : 0;
        copy_block(stage + block * 16 * kRowBytes,
                   keys + (page * p_.k_stride_page + in_page * p_.k_stride_slot) * kElementBytes,
                   p_.k_stride_slot * kElementBytes, wanted);
        copy_block(value_stage + block * 16 * kRowBytes,
                   values + (page * p_.v_stride_page + in_page * p_.v_stride_slot) * kElementBytes,
                   p_.v_stride_slot * kElementBytes, wanted);
      }
    } else {
      // Lane i finds row i.
      const int32_t slot = tile_slot_ + lane_;
      const int32_t index = page_of(p_, slot);
      const int32_t id = listed_id(index);
      const bool wanted = lane_ < tile_tokens_;
      const bool readable = static_cast<uint32_t>(id) < static_cast<uint32_t>(p_.num_pages);
      const uint32_t rows = __ballot_sync(kAllLanes, wanted && readable);
      unreadable = __ballot_sync(kAllLanes, wanted && !readable);
      const uint32_t page = wanted && readable ? id : 0;
      const uint32_t in_page = wanted && readable ? slot - index * p_.page_size : 0;
      copy_rows(stage, keys, page * p_.k_page_units + in_page * p_.k_slot_units, rows);
      copy_rows(value_stage, values, page * p_.v_page_units + in_page * p_.v_slot_units, rows);
    }
    return {first_request_ + request_lane_, unit_,
            flags_ | static_cast<uint32_t>(tile_tokens_) << Tile::kCountShift, unreadable};
  }

  __device__ __forceinline__ int32_t unit() const { return unit_; }
  // Slots of the walk that no tile took yet.
  __device__ __forceinline__ int32_t slots_left() const { return unit_end_ - slot_ + left_; }

 private:
  __device__ __forceinline__ void take_tile() {
    const int32_t token = slot_ - begin_;
    const int32_t count = min(min(kTileTokens, length_ - token), unit_end_ - slot_);
    tile_slot_ = slot_;
    tile_tokens_ = count;
    flags_ = poison_flag_;
    if (!in_piece_) flags_ |= kFirstOfPiece | (token > 0 ? kStartsBefore : 0);
    slot_ += count;
    const bool request_ends = token + count >= length_;
    in_piece_ = !request_ends && slot_ < unit_end_;
    if (!in_piece_) flags_ |= kLastOfPiece | (request_ends ? 0 : kEndsAfter);
  }

  // Finds the next token after a request or a unit ended.
  __device__ __forceinline__ bool seek() {
#pragma unroll 1
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
      if (slot_ - begin_ < length_) return true;
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
  __device__ __forceinline__ int32_t load_id(int32_t index) const {
    return index < id_limit_ ? __ldg(p_.kv_indices + index) : -1;
  }
  __device__ __forceinline__ void load_ids(int32_t first) {
    id_base_ = first;
    ids_now_ = load_id(first + lane_);
    ids_next_ = load_id(first + 32 + lane_);
    ids_later_ = load_id(first + 64 + lane_);
  }
  __device__ __forceinline__ void load_requests(int32_t first) {
    first_request_ = first;
    bool poisoned = false;
    lane_begin_ = 0;
    lane_length_ = 0;
    if (first + lane_ < p_.batch) {
      const Request request(p_, first + lane_);
      poisoned = request.poisoned;
      lane_begin_ = request.begin;
      lane_length_ = request.length;
    }
    nonempty_mask_ = __ballot_sync(kAllLanes, lane_length_ > 0);
    poison_mask_ = __ballot_sync(kAllLanes, poisoned);
  }
  __device__ __forceinline__ void take_request(int lane) {
    request_lane_ = lane;
    begin_ = __shfl_sync(kAllLanes, lane_begin_, lane);
    length_ = __shfl_sync(kAllLanes, lane_length_, lane);
    poison_flag_ = (poison_mask_ >> lane & 1) ? kPoisoned : 0;
  }
  // kv_indices[index] from the windows, for an index of the lane's own.
  __device__ __forceinline__ int32_t listed_id(int32_t index) const {
    const int32_t k = index - id_base_;
    const int32_t now = __shfl_sync(kAllLanes, ids_now_, k & 31);
    const int32_t next = __shfl_sync(kAllLanes, ids_next_, k & 31);
    return k < 32 ? now : next;
  }
  // One copy of the warp: 16 bytes a lane.
  static constexpr int kLanesPerRow = kRowBytes / 16;
  static constexpr int kRowsPerCopy = 32 / kLanesPerRow;
  // A lane's place `rows` (a multiple of the rows of one copy) further down.
  static __device__ __forceinline__ uint32_t later_row(uint32_t lane_dst, int rows) {
    return (lane_dst ^ (kRowBytes >= 128 ? rows & 7 : rows >> 1 & 3) * 16) + rows * kRowBytes;
  }
  // 16 rows at equal distances; rows from `wanted` on are zero-filled.
  __device__ __forceinline__ void copy_block(uint32_t dst, const char* src, int64_t row_stride,
                                             int32_t wanted) {
    const int chunk = lane_ % kLanesPerRow, first_row = lane_ / kLanesPerRow;
    src += first_row * row_stride + chunk * 16;
    const uint32_t lane_dst = swizzled(swizzled_row(dst, first_row), chunk);
#pragma unroll
    for (int i = 0; i < 16 / kRowsPerCopy; ++i) {
      const int row = i * kRowsPerCopy + first_row;
      copy_async_16<true>(later_row(lane_dst, i * kRowsPerCopy), src, row < wanted ? 16 : 0);
      if (row + kRowsPerCopy < wanted) src += kRowsPerCopy * row_stride;
    }
  }
  // `offset` (in units) is that of the lane's row; rows not in the mask are zero-filled.
  __device__ __forceinline__ void copy_rows(uint32_t dst, const char* base, uint32_t offset, uint32_t rows) {
    const int chunk = lane_ % kLanesPerRow, first_row = lane_ / kLanesPerRow;
    base += chunk * 16;
    const uint32_t lane_dst = swizzled(swizzled_row(dst, first_row), chunk);
#pragma unroll
    for (int i = 0; i < kTileTokens / kRowsPerCopy; ++i) {
      const int row = i * kRowsPerCopy + first_row;
      const uint64_t units = __shfl_sync(kAllLanes, offset, row);
      copy_async_16<true>(later_row(lane_dst, i * kRowsPerCopy), base + units * p_.row_unit,
                          (rows >> row & 1) ? 16 : 0);
    }
  }

  const DecodeParams& p_;
  const int lane_;
  int32_t unit_slots_;  // slots of one unit
  int32_t id_limit_;    // page ids that may be read
  int32_t unit_ = 0, slot_ = 0, unit_end_ = 0, left_ = 0;
  int32_t tile_slot_ = 0, tile_tokens_ = 0;
  uint32_t flags_ = 0, poison_flag_ = 0;
  bool in_piece_ = false;
  // The current request, and the window's 32 requests in the lanes.
  int32_t first_request_ = 0, request_lane_ = -1, begin_ = 0, length_ = 0;
  int32_t lane_begin_ = 0, lane_length_ = 0;
  uint32_t nonempty_mask_ = 0, poison_mask_ = 0;
  // kv_indices[id_base_ + lane], the 32 after them, and 32 that are on their way: at page_size 1 they are
  // wanted four tiles after they were asked for.
  int32_t id_base_ = 0, ids_now_ = -1, ids_next_ = -1, ids_later_ = -1;
};

}  // namespace evenkv
