// Checks of every argument before anything is read through it or written. An error names the argument, what
// was wanted and what came; being on the CPU, tables are read too, and a bad entry is named by its request
// and value.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>

#include <cstdint>
#include <sstream>
#include <string>

#include "arguments.h"

namespace evenkv {

using tvm::ffi::TensorView;

constexpr DLDataType kBF16{kDLBfloat, 16, 1};
constexpr DLDataType kFP32{kDLFloat, 32, 1};
constexpr DLDataType kInt32{kDLInt, 32, 1};
constexpr DLDataType kE4M3{kDLFloat8_e4m3fn, 8, 1};
constexpr DLDataType kE5M2{kDLFloat8_e5m2, 8, 1};

inline bool same(DLDataType a, DLDataType b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

inline std::string shape_text(const TensorView& tensor) {
  std::ostringstream text;
  text << "[";
  for (int i = 0; i < tensor.ndim(); ++i) text << (i ? ", " : "") << tensor.size(i);
  text << "]";
  return text.str();
}

inline void check_dtype(const char* name, const TensorView& tensor, DLDataType wanted) {
  if (!same(tensor.dtype(), wanted)) {
    TVM_FFI_THROW(TypeError) << name << " has dtype " << tvm::ffi::DLDataTypeToString(tensor.dtype())
                             << ": wanted " << tvm::ffi::DLDataTypeToString(wanted) << ".";
  }
}

inline void check_rank(const char* name, const TensorView& tensor, int rank) {
  if (tensor.device().device_type != kDLCPU) {
    TVM_FFI_THROW(ValueError) << name << " is not in host memory: evenkv_cpp takes CPU tensors only.";
  }
  if (tensor.ndim() != rank) {
    TVM_FFI_THROW(ValueError) << name << " has shape " << shape_text(tensor) << ": wanted " << rank
                              << " dimensions.";
  }
}

inline void check_size(const char* name, const TensorView& tensor, int dimension, int64_t wanted,
                       const char* meaning) {
  if (tensor.size(dimension) != wanted) {
    TVM_FFI_THROW(ValueError) << name << " has shape " << shape_text(tensor) << ": wanted " << wanted << " ("
                              << meaning << ") in dimension " << dimension << ".";
  }
}

// The last dimension's elements must be neighbours; strides of dimensions of one element mean nothing.
inline void check_unit_stride(const char* name, const TensorView& tensor) {
  const int last = tensor.ndim() - 1;
  if (tensor.size(last) > 1 && tensor.stride(last) != 1) {
    TVM_FFI_THROW(ValueError) << name << " has stride " << tensor.stride(last)
                              << " in its last dimension: wanted 1.";
  }
}

inline void check_contiguous(const char* name, const TensorView& tensor) {
  if (!tensor.IsContiguous())
    TVM_FFI_THROW(ValueError) << name << " is not contiguous: wanted a packed tensor.";
}

// int32 [size or more], packed.
inline const int32_t* check_table(const char* name, const TensorView& tensor, int64_t size) {
  check_rank(name, tensor, 1);
  check_dtype(name, tensor, kInt32);
  check_unit_stride(name, tensor);
  if (tensor.size(0) < size) {
    TVM_FFI_THROW(ValueError) << name << " has " << tensor.size(0) << " entries: wanted " << size << ".";
  }
  return static_cast<const int32_t*>(tensor.data_ptr());
}

inline const float* check_scale(const char* name, const TensorView& tensor, int num_kv_heads) {
  check_rank(name, tensor, 1);
  check_dtype(name, tensor, kFP32);
  check_unit_stride(name, tensor);
  check_size(name, tensor, 0, num_kv_heads, "num_kv_heads");
  return static_cast<const float*>(tensor.data_ptr());
}

inline Strides check_cache(const char* name, const TensorView& cache, const Arguments& a, DLDataType dtype) {
  check_rank(name, cache, 4);
  check_dtype(name, cache, dtype);
  check_size(name, cache, 0, a.num_pages, "num_pages");
  check_size(name, cache, 1, a.page_size, "page_size");
  check_size(name, cache, 2, a.num_kv_heads, "num_kv_heads");
  check_size(name, cache, 3, a.head_dim, "head_dim");
  check_unit_stride(name, cache);
  return {cache.stride(0), cache.stride(1), cache.stride(2)};
}

inline CacheDtype check_cache_dtype(const TensorView& k_cache) {
  const DLDataType dtype = k_cache.dtype();
  CacheDtype found;
  if (same(dtype, kBF16)) {
    found = CacheDtype::kBFloat16;
  } else if (same(dtype, kE4M3)) {
    found = CacheDtype::kFloat8E4M3;
  } else if (same(dtype, kE5M2)) {
    found = CacheDtype::kFloat8E5M2;
  } else {
    TVM_FFI_THROW(TypeError) << "k_cache has dtype " << tvm::ffi::DLDataTypeToString(dtype)
                             << ": wanted bfloat16, float8_e4m3fn or float8_e5m2.";
  }
  if (EVENKV_KV_DTYPE > 0 && static_cast<int>(found) != EVENKV_KV_DTYPE) {
    constexpr DLDataType kKnown[] = {{}, kBF16, kE4M3, kE5M2};
    check_dtype("k_cache", k_cache, kKnown[EVENKV_KV_DTYPE]);
  }
  return found;
}

// The numbers that the definition fixes.
inline void check_geometry(const TensorView& q, const TensorView& k_cache, const Arguments& a) {
  if (EVENKV_NUM_QO_HEADS > 0) check_size("q", q, 1, EVENKV_NUM_QO_HEADS, "num_qo_heads");
  if (EVENKV_HEAD_DIM > 0) check_size("q", q, 2, EVENKV_HEAD_DIM, "head_dim");
  if (EVENKV_PAGE_SIZE > 0) check_size("k_cache", k_cache, 1, EVENKV_PAGE_SIZE, "page_size");
  if (EVENKV_NUM_KV_HEADS > 0) check_size("k_cache", k_cache, 2, EVENKV_NUM_KV_HEADS, "num_kv_heads");
  if (a.num_kv_heads < 1 || a.head_dim < 1 || a.page_size < 1 || a.num_qo_heads % a.num_kv_heads != 0) {
    TVM_FFI_THROW(ValueError) << "k_cache has shape " << shape_text(k_cache) << " and q " << shape_text(q)
                              << ": wanted sizes above 0 and whole groups of query heads.";
  }
}

// Every entry that the kernel will follow.
inline void check_tables(const Arguments& a, int64_t num_indices) {
  if (a.kv_indptr[0] < 0) {
    TVM_FFI_THROW(ValueError) << "kv_indptr of request 0 is " << a.kv_indptr[0] << ": wanted 0 or more.";
  }
  for (int64_t request = 0; request < a.batch; ++request) {
    const int64_t begin = a.kv_indptr[request], end = a.kv_indptr[request + 1];
    if (end < begin || end > num_indices) {
      TVM_FFI_THROW(ValueError) << "kv_indptr of request " << request << " ends at " << end << ": wanted "
                                << begin << " to " << num_indices << ", the entries of kv_indices.";
    }
    for (int64_t i = begin; i < end; ++i) {
      if (a.kv_indices[i] < 0 || a.kv_indices[i] >= a.num_pages) {
        TVM_FFI_THROW(ValueError) << "kv_indices[" << i << "] of request " << request << " is "
                                  << a.kv_indices[i] << ": wanted a page of the pool, 0 to "
                                  << a.num_pages - 1 << ".";
      }
    }
    if (a.kv_last_page_len && end > begin) {
      const int32_t last = a.kv_last_page_len[request];
      if (last < 1 || last > a.page_size) {
        TVM_FFI_THROW(ValueError) << "kv_last_page_len of request " << request << " is " << last
                                  << ": wanted 1 to " << a.page_size << ", the page size.";
      }
    }
  }
}

}  // namespace evenkv
