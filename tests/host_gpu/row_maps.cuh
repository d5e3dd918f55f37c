// Stands in for the kernel's row_maps.cuh: a map that the host can read.
#pragma once

#include <cstdint>

#include "tuning.cuh"

namespace evenkv {

struct RowMap {
  const uint8_t* cache = nullptr;
  uint64_t sizes[4], strides[3];
  uint32_t box[4];
};

inline bool encode_rows(RowMap& map, const void* cache, const uint64_t (&sizes)[4],
                        const uint64_t (&strides)[3], const uint32_t (&box)[4]) {
  map.cache = static_cast<const uint8_t*>(cache);
  for (int i = 0; i < 4; ++i) map.sizes[i] = sizes[i], map.box[i] = box[i];
  for (int i = 0; i < 3; ++i) map.strides[i] = strides[i];
  return true;
}

}  // namespace evenkv
