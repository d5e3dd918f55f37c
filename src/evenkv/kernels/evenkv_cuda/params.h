// The contract between the binding (host C++, no CUDA headers) and the kernel's launcher.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cut.h"

namespace evenkv {

// kv_indices may list this many slots: with it, sums of two slot counts fit 32 bits.
constexpr int64_t kMostSlots = int64_t{1} << 30;

// Of the tensor maps' dimensions: what follows the bytes of a row.
enum MapOrder { kSlotsFirst = 1, kHeadsFirst = 2 };

// Inputs and outputs of one call, and what the launcher adds. Strides are in elements; the last dimension's
// stride is 1. A launch finds its parameters cold, a line of constant memory after the other: what is needed
// first stands first.
struct DecodeParams {
  const int32_t* kv_indptr;         // [batch + 1], pages
  const int32_t* kv_indices;        // [num_kv_indices], page ids
  const int32_t* kv_last_page_len;  // [batch], or null when page_size is 1
  int32_t batch, page_size, num_kv_indices, num_kv_heads, num_pages;
  // Set by the launcher.
  int32_t
      tensor_copies;  // not 0: 16 rows of a page may be copied as one; the order of their maps' dimensions
  Divisor by_page_size;
  Cut cut;

  const void* k_cache;  // [num_pages, page_size, num_kv_heads, head_dim], any strides
  const void* v_cache;
  int64_t k_stride_page, k_stride_slot, k_stride_head;
  int64_t v_stride_page, v_stride_slot, v_stride_head;
  // Set by the launcher: page and slot strides in units of row_unit bytes, with which 32 bits reach every
  // row.
  uint32_t row_unit, k_page_units, k_slot_units, v_page_units, v_slot_units;
  const void* q;  // [batch, num_qo_heads, head_dim]
  int64_t q_stride_batch, q_stride_head;
  const float* k_scale;  // [num_kv_heads], or null
  float sm_scale;

  int32_t invariant_tokens;  // 0, or the length of all parts: a request's bits depend on it alone
  int32_t always_cut;        // not 0, for tests: never the kernel for requests that stay whole, and tensor
                             // copies in small problems too
  const float* v_scale;      // [num_kv_heads], or null
  void* output;              // [batch, num_qo_heads, head_dim], contiguous
  float* lse;                // [batch, num_qo_heads], contiguous, base 2
  // Set by the launcher.
  float* partials;    // scratch: any content
  int32_t* counters;  // zero before a launch, zero again after it
};

// Page divisor and row strides. Null, or why the caches cannot be read.
inline const char* set_rows(DecodeParams& p, int64_t element_bytes) {
  p.by_page_size = divisor_of(p.page_size);
  // A dimension of size 1 has no stride to speak of.
  const int64_t pages = p.num_pages > 1 ? element_bytes : 0, slots = p.page_size > 1 ? element_bytes : 0;
  const int64_t strides[] = {p.k_stride_page * pages, p.k_stride_slot * slots, p.v_stride_page * pages,
                             p.v_stride_slot * slots};
  uint64_t bits = 4096;  // its lowest set bit divides all strides
  for (const int64_t stride : strides) {
    if (stride < 0) return "k_cache, v_cache: wanted strides of 0 and more, got a negative one";
    bits |= static_cast<uint64_t>(stride);
  }
  const int64_t unit = static_cast<int64_t>(bits & (~bits + 1));
  for (int kv = 0; kv < 2; ++kv) {
    const int64_t reach = strides[2 * kv] / unit * p.num_pages + strides[2 * kv + 1] / unit * p.page_size;
    if (reach > int64_t{UINT32_MAX}) {
      return "k_cache, v_cache: larger than 2^32 times the power of two that all page and slot strides "
             "share; wanted rows at multiples of 256 bytes";
    }
  }
  p.row_unit = static_cast<uint32_t>(unit);
  p.k_page_units = static_cast<uint32_t>(strides[0] / unit);
  p.k_slot_units = static_cast<uint32_t>(strides[1] / unit);
  p.v_page_units = static_cast<uint32_t>(strides[2] / unit);
  p.v_slot_units = static_cast<uint32_t>(strides[3] / unit);
  return nullptr;
}

// DecodeParams::tensor_copies of the calling thread's last launch: for tests.
int32_t last_tensor_copies();

// Sets the launcher's part of `params` and enqueues the kernel on `stream` of `device`. Returns null, or a
// static message that says what failed.
const char* launch_decode(DecodeParams& params, int32_t device, void* stream);

}  // namespace evenkv
