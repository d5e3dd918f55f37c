// The launcher: device facts, and the one launch.
#include <cuda_runtime.h>

#include <algorithm>

#include "device_facts.cuh"
#include "kernel.cuh"
#include "prepare.cuh"
#include "scratch.cuh"
#include "small_launch.cuh"

namespace evenkv {
namespace {

template <int kHeads>
const char* launch(DecodeParams& p, int device, cudaStream_t stream) {
  static PerDevice<int32_t> workers_of;  // SM counts, once the kernel may use its shared memory there
  const int32_t* workers = workers_of.get(device, [device](int32_t& count) {
    return count_workers(count, device) && allow_shared(decode_kernel<kHeads>, sizeof(SharedMemory<kHeads>));
  });
  if (workers == nullptr) return message.c_str();
  static_assert(sizeof(SharedMemory<kHeads>) <= kSharedBudget,
                "tuning.cuh counted less than SharedMemory holds");
  LaunchSizes sizes;
  if (const char* error = prepare(p, *workers, kHeads, sizes)) return error;
  Scratch scratch;
  if (const char* error =
          get_scratch(device, stream, sizes.partial_floats * sizeof(float), sizes.counters, scratch)) {
    return error;
  }
  p.partials = scratch.partials;
  p.counters = scratch.counters;
  void* arguments[] = {&p};
  return failed(cudaLaunchKernel(decode_kernel<kHeads>, dim3(sizes.blocks), dim3(kThreads), arguments,
                                 sizeof(SharedMemory<kHeads>), stream),
                "launching the kernel")
             ? message.c_str()
             : nullptr;
}

}  // namespace

const char* launch_decode(DecodeParams& params, int32_t device, void* stream) {
  if (params.batch == 0) return nullptr;
  const DeviceGuard guard(device);
  const char* small = launch_small(params, device, static_cast<cudaStream_t>(stream));
  if (small == nullptr || *small != '\0') return small;
  if constexpr (kIsFp8 && kParts == 1) {
    // fp8 rows of one head are short for DRAM: read two heads' rows, which lie side by side, in one block. In
    // small problems twice the chunks fill more SMs.
    const int64_t slots =
        static_cast<int64_t>(params.num_kv_heads) * params.num_kv_indices * params.page_size;
    // Batch-invariant bits must not depend on the batch's size.
    if (params.request_chunk_shift == 0 && params.num_kv_heads % 2 == 0 && slots >= kPairHeadsFromSlots) {
      return launch<2>(params, device, static_cast<cudaStream_t>(stream));
    }
  }
  return launch<1>(params, device, static_cast<cudaStream_t>(stream));
}

}  // namespace evenkv
