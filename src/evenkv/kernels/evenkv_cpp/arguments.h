// One call's arguments after the checks: plain pointers, the shape written beside each.
#pragma once

#include <cstdint>

#include "definition.h"

namespace evenkv {

enum class CacheDtype { kBFloat16 = 1, kFloat8E4M3 = 2, kFloat8E5M2 = 3 };

// The definition's group size, 0 when the build leaves it open.
constexpr int known_group_size() {
#if EVENKV_NUM_QO_HEADS > 0 && EVENKV_NUM_KV_HEADS > 0
  return EVENKV_NUM_QO_HEADS / EVENKV_NUM_KV_HEADS;
#else
  return 0;
#endif
}

struct Strides {  // in elements; the last dimension's is 1
  int64_t page, token, head;
};

struct Arguments {
  int64_t batch, num_pages;
  int num_qo_heads, num_kv_heads, head_dim, page_size;
  CacheDtype cache_dtype;

  const uint16_t* q;  // [batch, num_qo_heads, head_dim] bf16
  int64_t q_batch_stride, q_head_stride;
  const void* k_cache;  // [num_pages, page_size, num_kv_heads, head_dim]
  const void* v_cache;  // as k_cache
  Strides k_strides, v_strides;
  const int32_t* kv_indptr;         // [batch + 1]
  const int32_t* kv_indices;        // [>= kv_indptr[batch]]
  const int32_t* kv_last_page_len;  // [batch], null when every page is full
  const float* k_scale;             // [num_kv_heads], null means 1
  const float* v_scale;             // [num_kv_heads], null means 1
  float sm_scale;

  uint16_t* output;  // [batch, num_qo_heads, head_dim] bf16, contiguous
  float* lse;        // [batch, num_qo_heads] base 2, contiguous

  // Query heads that share one KV head.
  int group_size() const { return known_group_size() > 0 ? known_group_size() : num_qo_heads / num_kv_heads; }
  int dim() const { return EVENKV_HEAD_DIM > 0 ? EVENKV_HEAD_DIM : head_dim; }
  int tokens_per_page() const { return EVENKV_PAGE_SIZE > 0 ? EVENKV_PAGE_SIZE : page_size; }

  int64_t length(int64_t request) const {
    const int64_t pages = int64_t{kv_indptr[request + 1]} - kv_indptr[request];
    if (pages == 0) return 0;
    const int64_t last = kv_last_page_len ? kv_last_page_len[request] : tokens_per_page();
    return (pages - 1) * tokens_per_page() + last;
  }
};

}  // namespace evenkv
