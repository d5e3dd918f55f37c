// The entry point: checks every argument by name, then hands plain numbers to the launcher.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <string>

#include "definition.h"
#include "params.h"
#include "scratch.h"
#include "specialisation.h"
#include "tuning.cuh"

namespace {

using tvm::ffi::TensorView;

constexpr DLDataType kKvTypes[] = {
    {kDLBfloat, 16, 1}, {kDLFloat, 16, 1}, {kDLFloat8_e4m3fn, 8, 1}, {kDLFloat8_e5m2, 8, 1}};
constexpr DLDataType kKvType = kKvTypes[EVENKV_KV_DTYPE];
constexpr DLDataType kQueryType = kKvTypes[EVENKV_Q_DTYPE];
constexpr DLDataType kInt32 = {kDLInt, 32, 1};
constexpr DLDataType kFloat32 = {kDLFloat, 32, 1};

std::string type_name(DLDataType type) {
  switch (type.code) {
    case kDLBfloat:
      return "bfloat" + std::to_string(type.bits);
    case kDLFloat:
      return "float" + std::to_string(type.bits);
    case kDLInt:
      return "int" + std::to_string(type.bits);
    case kDLUInt:
      return "uint" + std::to_string(type.bits);
    case kDLFloat8_e4m3fn:
      return "float8_e4m3fn";
    case kDLFloat8_e5m2:
      return "float8_e5m2";
    default:
      return "dtype code " + std::to_string(type.code);
  }
}

// Says what is wrong with an argument that `check` does not take.
[[noreturn, gnu::cold, gnu::noinline]] void refuse(const char* name, const TensorView& t, DLDataType type,
                                                   std::initializer_list<int64_t> shape, DLDevice device) {
  const DLDataType got = t.dtype();
  if (got.code != type.code || got.bits != type.bits || got.lanes != 1) {
    TVM_FFI_THROW(TypeError) << name << ": wanted " << type_name(type) << ", got " << type_name(got);
  }
  if (t.device().device_type != kDLCUDA) {
    TVM_FFI_THROW(ValueError) << name << ": wanted a CUDA tensor, got device type " << t.device().device_type;
  }
  if (t.device().device_id != device.device_id) {
    TVM_FFI_THROW(ValueError) << name << ": wanted cuda:" << device.device_id
                              << " like q, got cuda:" << t.device().device_id;
  }
  bool same = t.ndim() == static_cast<int>(shape.size());
  for (int d = 0; same && d < t.ndim(); ++d) {
    const int64_t size = shape.begin()[d];
    same = size < 0 || t.size(d) == size;
  }
  if (!same) {
    std::string wanted, came;
    for (const int64_t size : shape) wanted += (size < 0 ? std::string("any") : std::to_string(size)) + ", ";
    for (int d = 0; d < t.ndim(); ++d) came += std::to_string(t.size(d)) + ", ";
    TVM_FFI_THROW(ValueError) << name << ": wanted shape [" << wanted << "], got [" << came << "]";
  }
  TVM_FFI_THROW(ValueError) << name << ": wanted a last dimension of stride 1, got "
                            << t.stride(t.ndim() - 1);
}

[[noreturn, gnu::cold, gnu::noinline]] void refuse_strides(const char* name) {
  TVM_FFI_THROW(ValueError) << name << ": wanted a contiguous tensor; call .contiguous() on it";
}

[[noreturn, gnu::cold, gnu::noinline]] void refuse_alignment(const char* name, int64_t bytes) {
  TVM_FFI_THROW(ValueError) << name << ": wanted address and strides in multiples of " << bytes << " bytes";
}

[[noreturn, gnu::cold, gnu::noinline]] void refuse_pages(int64_t pages) {
  TVM_FFI_THROW(ValueError) << "kv_indices: wanted at most " << evenkv::kMostSlots
                            << " slots (pages times page_size " << EVENKV_PAGE_SIZE << "), got " << pages
                            << " pages; decode in two calls";
}

[[noreturn, gnu::cold, gnu::noinline]] void report(const char* error) {
  TVM_FFI_THROW(RuntimeError) << error;
}

// -1 in `shape` accepts any size. Every call comes through here for every tensor: short, messages elsewhere.
// TensorView's own size() and stride() check their index each time.
inline void check(const char* name, const TensorView& t, DLDataType type,
                  std::initializer_list<int64_t> shape, DLDevice device) {
  const DLDataType got = t.dtype();
  const DLDevice on = t.device();
  const int last = static_cast<int>(shape.size()) - 1;
  bool good = got.code == type.code && got.bits == type.bits && got.lanes == 1 && on.device_type == kDLCUDA &&
              on.device_id == device.device_id && t.ndim() == last + 1;
  if (good) {
    const int64_t* const sizes = t.shape().data();
    for (int d = 0; d <= last; ++d) good &= shape.begin()[d] < 0 || sizes[d] == shape.begin()[d];
    good &= sizes[last] <= 1 || t.strides().data()[last] == 1;
  }
  if (!good) refuse(name, t, type, shape, device);
}

inline void check_contiguous(const char* name, const TensorView& t) {
  if (!t.IsContiguous()) refuse_strides(name);
}

// What must be a multiple of the alignment, or'ed: address and strides in bytes. A dimension of size 1 has no
// stride to speak of.
inline uint64_t alignment_bits(const TensorView& t) {
  const int64_t *const sizes = t.shape().data(), *const strides = t.strides().data();
  uint64_t bits = reinterpret_cast<uintptr_t>(t.data_ptr());
  for (int d = 0; d + 1 < t.ndim(); ++d) {
    if (sizes[d] > 1) bits |= static_cast<uint64_t>(strides[d]) * (t.dtype().bits / 8);
  }
  return bits;
}

// Rows are copied 16 bytes at a time (q: 4 where it must be).
inline void check_alignment(const char* name, uint64_t bits, uint64_t bytes) {
  if (bits & (bytes - 1)) refuse_alignment(name, static_cast<int64_t>(bytes));
}

enum Choice { kByShapes, kAlwaysCut, kBatchInvariant };

template <Choice kChoice>
void run(TensorView q, TensorView k_cache, TensorView v_cache, TensorView kv_indptr, TensorView kv_indices,
#if EVENKV_HAS_LAST_PAGE_LEN
         TensorView kv_last_page_len,
#endif
#if EVENKV_HAS_SCALES
         TensorView k_scale, TensorView v_scale,
#endif
         double sm_scale, TensorView output, TensorView lse) {
  constexpr int64_t H = EVENKV_NUM_QO_HEADS, K = EVENKV_NUM_KV_HEADS, D = EVENKV_HEAD_DIM,
                    P = EVENKV_PAGE_SIZE;
  const DLDevice device = q.device();
  check("q", q, kQueryType, {-1, H, D}, device);
  const int64_t batch = q.shape().data()[0];
  check("k_cache", k_cache, kKvType, {-1, P, K, D}, device);
  const int64_t num_pages = k_cache.shape().data()[0];
  check("v_cache", v_cache, kKvType, {num_pages, P, K, D}, device);
  check("kv_indptr", kv_indptr, kInt32, {batch + 1}, device);
  check("kv_indices", kv_indices, kInt32, {-1}, device);
  const int64_t num_kv_indices = kv_indices.shape().data()[0];
  check("output", output, kQueryType, {batch, H, D}, device);
  check("lse", lse, kFloat32, {batch, H}, device);
  check_contiguous("output", output);
  check_contiguous("lse", lse);
  check_alignment("q", alignment_bits(q), 4);
  check_alignment("k_cache", alignment_bits(k_cache), 16);
  check_alignment("v_cache", alignment_bits(v_cache), 16);
  check_alignment("output", alignment_bits(output), 16);

  if (num_kv_indices * P > evenkv::kMostSlots) refuse_pages(num_kv_indices);

  evenkv::DecodeParams p{};
  p.q = q.data_ptr();
  const int64_t* strides = q.strides().data();
  p.q_stride_batch = strides[0];
  p.q_stride_head = strides[1];
  p.k_cache = k_cache.data_ptr();
  p.v_cache = v_cache.data_ptr();
  strides = k_cache.strides().data();
  p.k_stride_page = strides[0];
  p.k_stride_slot = strides[1];
  p.k_stride_head = strides[2];
  strides = v_cache.strides().data();
  p.v_stride_page = strides[0];
  p.v_stride_slot = strides[1];
  p.v_stride_head = strides[2];
  p.kv_indptr = static_cast<const int32_t*>(kv_indptr.data_ptr());
  p.kv_indices = static_cast<const int32_t*>(kv_indices.data_ptr());
#if EVENKV_HAS_LAST_PAGE_LEN
  check("kv_last_page_len", kv_last_page_len, kInt32, {batch}, device);
  p.kv_last_page_len = static_cast<const int32_t*>(kv_last_page_len.data_ptr());
#endif
#if EVENKV_HAS_SCALES
  check("k_scale", k_scale, kFloat32, {K}, device);
  check("v_scale", v_scale, kFloat32, {K}, device);
  p.k_scale = static_cast<const float*>(k_scale.data_ptr());
  p.v_scale = static_cast<const float*>(v_scale.data_ptr());
#endif
  p.output = output.data_ptr();
  p.lse = static_cast<float*>(lse.data_ptr());
  p.batch = static_cast<int32_t>(batch);
  p.num_kv_heads = K;
  p.num_pages = static_cast<int32_t>(num_pages);
  p.page_size = P;
  p.num_kv_indices = static_cast<int32_t>(num_kv_indices);
  p.sm_scale = static_cast<float>(sm_scale);
  p.invariant_tokens = kChoice == kBatchInvariant ? evenkv::kInvariantTokens : 0;
  p.always_cut = kChoice == kAlwaysCut;
  void* stream = TVMFFIEnvGetStream(device.device_type, device.device_id);
  if (const char* error = evenkv::launch_decode(p, device.device_id, stream)) report(error);
}

void fill_scratch(int64_t byte) {
  if (const char* error = evenkv::fill_scratch(static_cast<int32_t>(byte))) report(error);
}

int64_t last_tensor_copies() { return evenkv::last_tensor_copies(); }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run<kByShapes>);
// The same arguments. A request's bits do not depend on the rest of the batch.
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run_batch_invariant, run<kBatchInvariant>);
// The same arguments. Never the kernel for requests that stay whole: for tests and comparisons.
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run_always_cut, run<kAlwaysCut>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fill_scratch, fill_scratch);
// Whether the last call of this thread used tensor copies: 0, or in which order of dimensions.
TVM_FFI_DLL_EXPORT_TYPED_FUNC(last_tensor_copies, last_tensor_copies);
