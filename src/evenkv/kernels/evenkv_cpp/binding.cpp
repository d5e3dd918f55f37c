// evenkv_cpp: paged grouped-query decode attention on host threads, through tvm-ffi, destination-passing.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/function.h>

#include "arguments.h"
#include "check.h"
#include "run_threads.h"

namespace evenkv {

struct OptionalInputs {
  const TensorView* kv_last_page_len = nullptr;
  const TensorView* k_scale = nullptr;
  const TensorView* v_scale = nullptr;
};

void check_and_run(const TensorView& q, const TensorView& k_cache, const TensorView& v_cache,
                   const TensorView& kv_indptr, const TensorView& kv_indices, OptionalInputs optional,
                   double sm_scale, const TensorView& output, const TensorView& lse) {
  Arguments a{};
  check_rank("q", q, 3);
  check_dtype("q", q, kBF16);
  check_unit_stride("q", q);
  check_rank("k_cache", k_cache, 4);
  a.cache_dtype = check_cache_dtype(k_cache);
  a.batch = q.size(0);
  a.num_qo_heads = static_cast<int>(q.size(1));
  a.head_dim = static_cast<int>(q.size(2));
  a.num_pages = k_cache.size(0);
  a.page_size = static_cast<int>(k_cache.size(1));
  a.num_kv_heads = static_cast<int>(k_cache.size(2));
  check_geometry(q, k_cache, a);
  a.q = static_cast<const uint16_t*>(q.data_ptr());
  a.q_batch_stride = q.stride(0);
  a.q_head_stride = q.stride(1);
  a.k_strides = check_cache("k_cache", k_cache, a, k_cache.dtype());
  a.v_strides = check_cache("v_cache", v_cache, a, k_cache.dtype());
  a.k_cache = k_cache.data_ptr();
  a.v_cache = v_cache.data_ptr();

  a.kv_indptr = check_table("kv_indptr", kv_indptr, a.batch + 1);
  check_size("kv_indptr", kv_indptr, 0, a.batch + 1, "batch_size + 1");
  a.kv_indices = check_table("kv_indices", kv_indices, 0);
  if (optional.kv_last_page_len) {
    a.kv_last_page_len = check_table("kv_last_page_len", *optional.kv_last_page_len, a.batch);
    check_size("kv_last_page_len", *optional.kv_last_page_len, 0, a.batch, "batch_size");
  }
  if (optional.k_scale) a.k_scale = check_scale("k_scale", *optional.k_scale, a.num_kv_heads);
  if (optional.v_scale) a.v_scale = check_scale("v_scale", *optional.v_scale, a.num_kv_heads);
  a.sm_scale = static_cast<float>(sm_scale);

  check_rank("output", output, 3);
  check_dtype("output", output, kBF16);
  check_rank("lse", lse, 2);
  check_dtype("lse", lse, kFP32);
  for (int i = 0; i < 3; ++i) check_size("output", output, i, q.size(i), "as q");
  for (int i = 0; i < 2; ++i) check_size("lse", lse, i, q.size(i), "as q");
  check_contiguous("output", output);
  check_contiguous("lse", lse);
  a.output = static_cast<uint16_t*>(output.data_ptr());
  a.lse = static_cast<float*>(lse.data_ptr());

  check_tables(a, kv_indices.size(0));
  run_threads(a);
}

// The definition's inputs in order, then output and lse.
void run(TensorView q, TensorView k_cache, TensorView v_cache, TensorView kv_indptr, TensorView kv_indices,
#if EVENKV_HAS_LAST_PAGE_LEN
         TensorView kv_last_page_len,
#endif
#if EVENKV_HAS_SCALES
         TensorView k_scale, TensorView v_scale,
#endif
         double sm_scale, TensorView output, TensorView lse) {
  OptionalInputs optional;
#if EVENKV_HAS_LAST_PAGE_LEN
  optional.kv_last_page_len = &kv_last_page_len;
#endif
#if EVENKV_HAS_SCALES
  optional.k_scale = &k_scale;
  optional.v_scale = &v_scale;
#endif
  check_and_run(q, k_cache, v_cache, kv_indptr, kv_indices, optional, sm_scale, output, lse);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run);

}  // namespace evenkv
