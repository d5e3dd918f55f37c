// The launcher: device facts, scratch, and the one launch.
#include <cuda_runtime.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <tuple>

#include "kernel.cuh"
#include "scratch.h"

namespace evenkv {
namespace {

thread_local std::string message;

bool failed(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return false;
  message = std::string(what) + ": " + cudaGetErrorString(status);
  return true;
}

// Makes a device current and puts the caller's back.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    cudaGetDevice(&before_);
    changed_ = before_ != device;
    if (changed_) cudaSetDevice(device);
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }

 private:
  int before_ = 0;
  bool changed_ = false;
};

// Allowing a capture to go on while scratch is allocated outside it.
class CaptureRelaxed {
 public:
  CaptureRelaxed() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~CaptureRelaxed() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

struct Scratch {
  float* partials = nullptr;
  int32_t* counters = nullptr;
  size_t partial_bytes = 0, num_counters = 0;
};

// Two launches that may overlap never share scratch: one per stream, and within a capture one per captured
// stream, since a graph may be replayed on any stream and its branches may overlap. Entries live as long as
// the process. A stream is known by its id, which no later stream gets; within a capture, which does not let
// ids be asked for, by its handle.
using ScratchKey =
    std::tuple<int, unsigned long long, unsigned long long>;  // device, stream, capture's id or 0
std::mutex scratch_mutex;
std::map<ScratchKey, Scratch> scratch_of;

const char* allocate(Scratch& scratch) {
  const CaptureRelaxed relaxed;
  const size_t counter_bytes = scratch.num_counters * sizeof(int32_t);
  cudaStream_t side = nullptr;  // a capture forbids work on the legacy stream
  const bool bad = failed(cudaMalloc(&scratch.partials, scratch.partial_bytes), "allocating scratch") ||
                   failed(cudaMalloc(&scratch.counters, counter_bytes), "allocating counters") ||
                   failed(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking), "cudaStreamCreate") ||
                   failed(cudaMemsetAsync(scratch.counters, 0, counter_bytes, side), "clearing counters") ||
                   failed(cudaStreamSynchronize(side), "clearing counters");
  if (side != nullptr) cudaStreamDestroy(side);
  if (!bad) return nullptr;
  cudaFree(scratch.partials);
  cudaFree(scratch.counters);
  return message.c_str();
}

// Powers of two: an entry that grows with the batch is replaced a few times at most, since what it had before
// stays (a launch in flight may still use it).
size_t round_up(size_t size) {
  size_t rounded = 1;
  while (rounded < size) rounded *= 2;
  return rounded;
}

const char* get_scratch(int device, cudaStream_t stream, size_t partial_bytes, size_t num_counters,
                        Scratch& out) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0, id = 0;
  if (failed(cudaStreamGetCaptureInfo(stream, &status, &capture), "cudaStreamGetCaptureInfo")) {
    return message.c_str();
  }
  if (status == cudaStreamCaptureStatusActive) {
    id = reinterpret_cast<uintptr_t>(stream);
  } else {
    capture = 0;
    if (failed(cudaStreamGetId(stream, &id), "cudaStreamGetId")) return message.c_str();
  }
  const ScratchKey key{device, id, capture};
  const std::lock_guard<std::mutex> lock(scratch_mutex);
  Scratch& scratch = scratch_of[key];
  if (scratch.partial_bytes < partial_bytes || scratch.num_counters < num_counters) {
    Scratch fresh;
    const bool first = scratch.partials == nullptr;
    fresh.partial_bytes = std::max(scratch.partial_bytes, first ? partial_bytes : round_up(partial_bytes));
    fresh.num_counters = std::max(scratch.num_counters, first ? num_counters : round_up(num_counters));
    if (const char* error = allocate(fresh)) return error;
    scratch = fresh;
  }
  out = scratch;
  return nullptr;
}

template <int kHeads>
const char* launch(DecodeParams& p, int device, cudaStream_t stream) {
  static std::mutex mutex;
  static std::map<int, int>
      workers_of;  // device -> SM count, once the kernel may use its shared memory there
  int workers;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto known = workers_of.find(device);
    if (known != workers_of.end()) {
      workers = known->second;
    } else {
      if (failed(cudaDeviceGetAttribute(&workers, cudaDevAttrMultiProcessorCount, device),
                 "reading the SM count") ||
          failed(cudaFuncSetAttribute(decode_kernel<kHeads>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(sizeof(SharedMemory<kHeads>))),
                 "asking for shared memory (a GPU of compute capability 8.0, 9.0 or 10.0 has enough)")) {
        return message.c_str();
      }
      workers_of[device] = workers;
    }
  }
  static_assert(sizeof(SharedMemory<kHeads>) <= kSharedBudget,
                "tuning.cuh counted less than SharedMemory holds");
  // Bounds that come from shapes; lengths stay on the device. Blocks that cannot get a chunk need not start,
  // and a line that is cut in one round needs the fewest slots.
  const int64_t units = static_cast<int64_t>(p.num_kv_heads) * kParts / kHeads;
  const int64_t unit_slots = static_cast<int64_t>(p.num_kv_indices) * p.page_size,
                most_slots = units * unit_slots;
  int64_t most_chunks = (most_slots + kScheduleTuning.min_chunk - 1) / kScheduleTuning.min_chunk;
  const bool one_round = most_slots <= static_cast<int64_t>(workers) * kScheduleTuning.single_round_slots;
  int64_t scratch_chunks = static_cast<int64_t>(workers) * (one_round ? 1 : kChunksPerWorkerBound);
  p.slots_per_chunk = 2;
  if (p.request_chunk_shift != 0) {
    most_chunks = scratch_chunks = units * request_chunks(unit_slots, p.batch, p.request_chunk_shift);
    if (most_chunks > INT32_MAX / 4) return "batch-invariant: too many chunks; decode in two calls";
    p.slots_per_chunk = 1;
  }
  p.most_request_chunks = static_cast<int32_t>(most_chunks);
  const int grid = static_cast<int>(most_chunks < 1 ? 1 : most_chunks > workers ? workers : most_chunks);
  const int64_t slots = piece_slots(workers) + scratch_chunks * p.slots_per_chunk * kHeads;
  Scratch scratch;
  if (const char* error = get_scratch(device, stream, slots * kPartialFloats * sizeof(float),
                                      kArrivals + std::max(scratch_chunks, int64_t{workers}) * 2, scratch)) {
    return error;
  }
  p.partials = scratch.partials;
  p.counters = scratch.counters;
  p.workers = workers;
  // Whatever kv_indptr says: scratch for one round is never overrun.
  p.single_round_slots = one_round ? INT32_MAX : kScheduleTuning.single_round_slots;
  set_page_divisor(p);
  void* arguments[] = {&p};
  return failed(cudaLaunchKernel(decode_kernel<kHeads>, dim3(grid), dim3(kThreads), arguments,
                                 sizeof(SharedMemory<kHeads>), stream),
                "launching the kernel")
             ? message.c_str()
             : nullptr;
}

}  // namespace

const char* launch_decode(DecodeParams params, int32_t device, void* stream) {
  if (params.batch == 0) return nullptr;
  const DeviceGuard guard(device);
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

const char* fill_scratch(int32_t byte) {
  const std::lock_guard<std::mutex> lock(scratch_mutex);
  for (const auto& entry : scratch_of) {
    const DeviceGuard guard(std::get<0>(entry.first));
    if (failed(cudaMemset(entry.second.partials, byte, entry.second.partial_bytes), "filling scratch")) {
      return message.c_str();
    }
  }
  return nullptr;
}

}  // namespace evenkv
