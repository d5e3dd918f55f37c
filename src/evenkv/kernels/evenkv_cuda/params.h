// The contract between the binding (host C++, no CUDA headers) and the kernel's launcher.
#pragma once

#include <cstddef>
#include <cstdint>

namespace evenkv {

// kv_indices may list this many slots: with it, sums of two slot counts fit 32 bits.
constexpr int64_t kMostSlots = int64_t{1} << 30;

// Batch-invariant bits: chunks of 2048 slots that begin at each request. Smaller ones would cost more ends of
// chunks, larger ones leave SMs idle in small batches.
constexpr int32_t kRequestChunkShift = 11;

// Inputs and outputs of one call. Strides are in elements; the last dimension's stride is 1.
struct DecodeParams {
  const void* q;  // [batch, num_qo_heads, head_dim]
  int64_t q_stride_batch, q_stride_head;
  const void* k_cache;  // [num_pages, page_size, num_kv_heads, head_dim], any strides
  const void* v_cache;
  int64_t k_stride_page, k_stride_slot, k_stride_head;
  int64_t v_stride_page, v_stride_slot, v_stride_head;
  const int32_t* kv_indptr;         // [batch + 1], pages
  const int32_t* kv_indices;        // [num_kv_indices], page ids
  const int32_t* kv_last_page_len;  // [batch], or null when page_size is 1
  const float* k_scale;             // [num_kv_heads], or null
  const float* v_scale;             // [num_kv_heads], or null
  void* output;                     // [batch, num_qo_heads, head_dim], contiguous
  float* lse;                       // [batch, num_qo_heads], contiguous, base 2
  int32_t batch, num_kv_heads, num_pages, page_size, num_kv_indices;
  float sm_scale;
  int32_t q_copy_bytes;  // 16 where all rows of q are aligned to it, else 4
  // Chunks that begin at each request's first token and have 2^request_chunk_shift slots; 0: the line is cut
  // evenly.
  int32_t request_chunk_shift;
  // Set by the launcher.
  float* partials;           // scratch: any content
  int32_t* counters;         // zero before a launch, zero again after it
  int32_t workers;           // what the chunk schedule divides by: thread blocks that fit the device
  uint32_t page_multiplier;  // slot / page_size == slot * page_multiplier >> page_shift, below 2^31
  int32_t page_shift;
  int32_t single_round_slots;   // of the schedule's tuning
  int32_t most_request_chunks;  // with request_chunk_shift: what scratch and counters are for
  int32_t slots_per_chunk;      // scratch slots: see chunk_slot
};

// Division by a run-time number costs 20 instructions at every use; by multiplication it costs three.
inline void set_page_divisor(DecodeParams& p) {
  int32_t bits = 0;
  while ((int64_t{1} << bits) < p.page_size) ++bits;
  p.page_shift = 31 + bits;
  p.page_multiplier = static_cast<uint32_t>(((uint64_t{1} << p.page_shift) + p.page_size - 1) / p.page_size);
}

// Enqueues the kernel on `stream` of `device`. Returns null, or a static message that says what failed.
const char* launch_decode(DecodeParams params, int32_t device, void* stream);

}  // namespace evenkv
