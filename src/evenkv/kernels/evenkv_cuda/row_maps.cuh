// Tensor maps: how the copy engine finds 16 rows of a page.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "tuning.cuh"

namespace evenkv {

using RowMap = CUtensorMap;

// The driver's encoder, or null where it has none. Found through the runtime: no library to link.
inline auto* find_encoder() {
  using Encoder = decltype(cuTensorMapEncodeTiled);
  static Encoder* const encoder = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t status =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
    if (status != cudaSuccess || result != cudaDriverEntryPointSuccess) cudaGetLastError();
    return reinterpret_cast<Encoder*>(found);
  }();
  return encoder;
}

// A map of boxes of 16 rows, from sizes and strides (in bytes) of bytes of a row, then the other dimensions.
// False where the copy engine cannot have it.
inline bool encode_rows(RowMap& map, const void* cache, const uint64_t (&sizes)[4],
                        const uint64_t (&strides)[3], const uint32_t (&box)[4]) {
  const auto encoder = find_encoder();
  const uint32_t steps[4] = {1, 1, 1, 1};
  return encoder != nullptr &&
         encoder(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 4, const_cast<void*>(cache), sizes, strides, box, steps,
                 CU_TENSOR_MAP_INTERLEAVE_NONE,
                 kPieceBytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace evenkv
