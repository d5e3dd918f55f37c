// A warp's walk over tokens of one request: which tokens the next tile holds, and where their rows lie.
// Lanes hold a window of 64 page ids, so that a step costs shuffles and no dependent load.
#pragma once

#include <type_traits>

#include "params.h"
#include "ptx.cuh"

namespace evenkv {

constexpr uint32_t kAllLanes = 0xffffffffu;

// Of a call's caches; nothing for kernels without tensor copies, since a launch finds its parameters cold.
struct CacheMaps {
  RowMap keys, values;
};
struct NoMaps {};
template <bool kTensor>
using Maps = std::conditional_t<kTensor, CacheMaps, NoMaps>;

// Where a request's slots begin within a unit, and how many tokens it has: the one reading of the page
// tables.
struct Request {
  int32_t begin, length;
  int32_t first_page, pages;
  bool poisoned;  // kv_last_page_len is out of range; the last page counts as full
  bool unlisted;  // its pages are not among the first `listed`, of however many and even below 0

  __device__ __forceinline__ Request(const DecodeParams& p, int32_t request, int32_t listed)
      : poisoned(false) {
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
    unlisted = first_page < 0 || (pages > 0 && first_page > listed - pages);
  }
};

// What a tile in the ring holds.
struct Tile {
  int32_t tokens;       // 0 to kTileTokens
  uint32_t unreadable;  // a bit for each token whose logits become NaN: its page id is out of range
  bool by_tensor;       // its bytes arrive at the stage's barrier, else with the lane's own copies
};

// Tiles in shared memory: the 16-byte chunks of a row's piece are permuted by XOR with the row's number, so
// that a column of eight rows touches all banks (the tensor copy's swizzle). As XOR on addresses (tiles are
// aligned), each access costs one instruction more and no register: swizzled_row gives a row's base, swizzled
// picks a chunk known at compile time.
__device__ __forceinline__ uint32_t swizzled_row(uint32_t tile, int row) {
  return tile + row * kPieceBytes + (kPieceBytes == 128 ? row & 7 : row >> 1 & 3) * 16;
}
__device__ __forceinline__ uint32_t swizzled(uint32_t row_base, int chunk) {
  if constexpr (kPieceBytes < 128) return row_base ^ chunk * 16;
  return (row_base ^ (chunk & 7) * 16) + (chunk >> 3) * 16 * kPieceBytes;
}

// Whole tiles of pages in range come by tensor copies in a kernel that has them.
template <bool kTensor>
class Cursor {
 public:
  // A walk over `tiles` of a request.
  __device__ __forceinline__ Cursor(const DecodeParams& p, const Maps<kTensor>& maps, const Request& span,
                                    const TileRange& tiles)
      : p_(p),
        maps_(maps),
        lane_(threadIdx.x & 31),
        id_limit_(span.first_page + span.pages),
        slot_(span.begin + tiles.begin * kTileTokens),
        end_(span.begin + min(tiles.end * kTileTokens, span.length)),
        poison_(span.poisoned ? kAllLanes : 0) {
    load_ids(divide(slot_, p.by_page_size));
  }

  __device__ __forceinline__ bool more() const { return slot_ < end_; }

  // Enqueues the next tile's copies into `stage` (a shared address) and describes it. `head` is the KV head.
  __device__ __forceinline__ Tile copy_tile(uint32_t stage, uint32_t barrier, int32_t head) {
    const int32_t tile_slot = slot_, tile_tokens = min(kTileTokens, end_ - slot_);
    slot_ += kTileTokens;
    const int32_t first_index = divide(tile_slot, p_.by_page_size);
    if (first_index >= id_base_ + 32) {  // a tile holds at most 32 ids
      id_base_ += 32;
      ids_now_ = ids_next_;
      ids_next_ = ids_later_;
      ids_later_ = load_id(id_base_ + 64 + lane_);
    }
    if constexpr (kTensor) {
      if (tile_tokens == kTileTokens && copy_pages(stage, barrier, tile_slot, head)) {
        return {tile_tokens, poison_, true};
      }
    }
    const char* keys = static_cast<const char*>(p_.k_cache) + head * p_.k_stride_head * kElementBytes;
    const char* values = static_cast<const char*>(p_.v_cache) + head * p_.v_stride_head * kElementBytes;
    const uint32_t value_stage = stage + kTileTokens * kRowBytes;
    uint32_t unreadable = 0;
    if (((p_.page_size | tile_slot) & 15) == 0) {
      // Each 16 rows lie in one page, side by side.
#pragma unroll
      for (int block = 0; block < kTileRowBlocks; ++block) {
        const int32_t slot = tile_slot + block * 16;
        const int32_t index = divide(slot, p_.by_page_size);
        const int32_t rows = min(16, tile_tokens - block * 16);
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
      const int32_t slot = tile_slot + lane_;
      const int32_t index = divide(slot, p_.by_page_size);
      const int32_t id = listed_id(index);
      const bool wanted = lane_ < tile_tokens;
      const bool readable = static_cast<uint32_t>(id) < static_cast<uint32_t>(p_.num_pages);
      const uint32_t rows = __ballot_sync(kAllLanes, wanted && readable);
      unreadable = __ballot_sync(kAllLanes, wanted && !readable);
      const uint32_t page = wanted && readable ? id : 0;
      const uint32_t in_page = wanted && readable ? slot - index * p_.page_size : 0;
      copy_rows(stage, keys, page * p_.k_page_units + in_page * p_.k_slot_units, rows);
      copy_rows(value_stage, values, page * p_.v_page_units + in_page * p_.v_slot_units, rows);
    }
    return {tile_tokens, unreadable | poison_, false};
  }

 private:
  __device__ __forceinline__ int32_t load_id(int32_t index) const {
    return index < id_limit_ ? __ldg(p_.kv_indices + index) : -1;
  }
  __device__ __forceinline__ void load_ids(int32_t first) {
    id_base_ = first;
    ids_now_ = load_id(first + lane_);
    ids_next_ = load_id(first + 32 + lane_);
    ids_later_ = load_id(first + 64 + lane_);
  }
  // kv_indices[index] from the windows, for an index of the lane's own.
  __device__ __forceinline__ int32_t listed_id(int32_t index) const {
    const int32_t k = index - id_base_;
    const int32_t now = __shfl_sync(kAllLanes, ids_now_, k & 31);
    const int32_t next = __shfl_sync(kAllLanes, ids_next_, k & 31);
    return k < 32 ? now : next;
  }
  // Copies a whole tile, 16 rows at a time, if all of its page ids are in range.
  __device__ __forceinline__ bool copy_pages(uint32_t stage, uint32_t barrier, int32_t tile_slot,
                                             int32_t head) {
    int32_t pages[kTileRowBlocks], in_page[kTileRowBlocks];
    bool readable = true;
#pragma unroll
    for (int block = 0; block < kTileRowBlocks; ++block) {
      const int32_t slot = tile_slot + block * 16;
      const int32_t index = divide(slot, p_.by_page_size);
      pages[block] = listed_id(index);
      in_page[block] = slot - index * p_.page_size;
      readable = readable && static_cast<uint32_t>(pages[block]) < static_cast<uint32_t>(p_.num_pages);
    }
    if (!readable) return false;
    if (lane_ == 0) {
      expect_bytes(barrier, kTileBytes);
      const bool is_heads_first = p_.tensor_copies == kHeadsFirst;
#pragma unroll
      for (int block = 0; block < kTileRowBlocks; ++block) {
        const uint32_t dst = stage + block * 16 * kRowBytes;
        const int32_t near = is_heads_first ? head : in_page[block], page = pages[block];
        const int32_t far = is_heads_first ? in_page[block] : head;
        copy_16_rows(dst, maps_.keys, 0, near, far, page, barrier);
        copy_16_rows(dst + kTileTokens * kRowBytes, maps_.values, 0, near, far, page, barrier);
      }
    }
    return true;
  }
  // One copy of the warp: 16 bytes a lane.
  static constexpr int kLanesPerRow = kRowBytes / 16;
  static constexpr int kRowsPerCopy = 32 / kLanesPerRow;
  // A lane's place `rows` (a multiple of the rows of one copy) further down.
  static __device__ __forceinline__ uint32_t later_row(uint32_t lane_dst, int rows) {
    return (lane_dst ^ (kPieceBytes == 128 ? rows & 7 : rows >> 1 & 3) * 16) + rows * kPieceBytes;
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
      copy_async_16(later_row(lane_dst, i * kRowsPerCopy), src, row < wanted ? 16 : 0);
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
      copy_async_16(later_row(lane_dst, i * kRowsPerCopy), base + units * p_.row_unit,
                    (rows >> row & 1) ? 16 : 0);
    }
  }

  const DecodeParams& p_;
  const Maps<kTensor>& maps_;
  const int lane_;
  const int32_t id_limit_;  // page ids that may be read
  int32_t slot_, end_;      // the next tile's first slot, and where the walk ends
  const uint32_t poison_;   // kv_last_page_len is out of range: the request's outputs become NaN
  // kv_indices[id_base_ + lane], the 32 after them, and 32 that are on their way: at page_size 1 they are
  // wanted four tiles after they were asked for.
  int32_t id_base_ = 0, ids_now_ = -1, ids_next_ = -1, ids_later_ = -1;
};

}  // namespace evenkv
