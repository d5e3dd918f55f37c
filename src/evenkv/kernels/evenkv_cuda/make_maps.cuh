// The tensor maps of a call's caches. Included by one source.
#pragma once

#include <algorithm>
#include <cstring>

#include "params.h"
#include "row_maps.cuh"

namespace evenkv {
namespace {

// What a cache's map is made of.
struct CacheShape {
  const void* cache;
  int64_t page, slot, head;  // strides in bytes
  int64_t num_pages, page_size, num_kv_heads;
};

// A map's dimensions: bytes of a row, slots of a page and KV heads (the one that lies closer first), pages.
bool map_rows(RowMap& map, const CacheShape& s, bool heads_first) {
  // The engine takes strides that are multiples of 16 bytes, in ascending order.
  const int64_t near = heads_first ? s.head : s.slot, far = heads_first ? s.slot : s.head;
  if (reinterpret_cast<uintptr_t>(s.cache) % 16 != 0 || near % 16 != 0 || far % 16 != 0 || s.page % 16 != 0 ||
      near < kRowBytes || far < near || s.page < far) {
    return false;
  }
  const auto size = [](int64_t count) { return static_cast<uint64_t>(count); };
  const uint64_t sizes[4] = {kRowBytes, size(heads_first ? s.num_kv_heads : s.page_size),
                             size(heads_first ? s.page_size : s.num_kv_heads), size(s.num_pages)};
  const uint64_t strides[3] = {size(near), size(far), size(s.page)};
  const uint32_t box[4] = {kPieceBytes, heads_first ? 1u : 16u, heads_first ? 16u : 1u, 1};
  return encode_rows(map, s.cache, sizes, strides, box);
}

// Sets p.tensor_copies and the maps where 16 rows of a page may be copied as one. A dimension of size 1 has
// no stride to speak of.
void make_maps(DecodeParams& p, CacheMaps& maps) {
  if (p.page_size % 16 != 0 || p.num_pages == 0) return;
  const auto shape = [&](const void* cache, int64_t page, int64_t slot, int64_t head) {
    CacheShape s{cache,       page * kElementBytes, slot * kElementBytes, head * kElementBytes,
                 p.num_pages, p.page_size,          p.num_kv_heads};
    if (s.num_kv_heads == 1) s.head = s.slot;
    if (s.num_pages == 1) s.page = std::max(s.slot * s.page_size, s.head * s.num_kv_heads);
    return s;
  };
  const CacheShape shapes[2] = {shape(p.k_cache, p.k_stride_page, p.k_stride_slot, p.k_stride_head),
                                shape(p.v_cache, p.v_stride_page, p.v_stride_slot, p.v_stride_head)};
  struct Made {
    CacheShape shapes[2];
    int32_t copies;
    CacheMaps maps;
  };
  // A model calls with the caches of one layer after the other.
  constexpr size_t kKept = 64;
  static thread_local Made kept[kKept];
  const auto place = [](const void* cache) { return reinterpret_cast<uintptr_t>(cache) / 256; };
  Made& last = kept[(place(p.k_cache) * 31 + place(p.v_cache)) * 0x9E3779B97F4A7C15u >> 58];
  static_assert(kKept == 64, "the hash has six bits");
  if (std::memcmp(last.shapes, shapes, sizeof shapes) != 0) {
    // The driver asks for a context; a thread that has called nothing yet has none.
    int device = 0;
    if (cudaGetDevice(&device) == cudaSuccess) cudaSetDevice(device);
    // One order for both.
    const bool heads_first = shapes[0].head < shapes[0].slot;
    std::memcpy(last.shapes, shapes, sizeof shapes);
    last.copies =
        map_rows(last.maps.keys, shapes[0], heads_first) && map_rows(last.maps.values, shapes[1], heads_first)
            ? heads_first ? kHeadsFirst : kSlotsFirst
            : 0;
  }
  p.tensor_copies = last.copies;
  maps = last.maps;
}

}  // namespace
}  // namespace evenkv
