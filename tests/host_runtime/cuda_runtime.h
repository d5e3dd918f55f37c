// As much of the CUDA runtime as evenkv_cuda's host code calls, on host memory. A test says which streams
// capture and what ids they have, and what room a device has; launch.cpp runs the grids.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>

using cudaError_t = int;
using cudaStream_t = struct CUstream_st*;
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed = 2 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension };
constexpr cudaError_t cudaSuccess = 0, cudaErrorInvalidClusterSize = 912;
constexpr unsigned cudaStreamNonBlocking = 1;

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    struct {
      unsigned x, y, z;
    } clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

namespace host_runtime {

constexpr int kStreams = 16;  // handles are small numbers
struct Stream {
  unsigned long long id, capture;  // capture 0: none
};
inline Stream streams[kStreams];
inline int allocations, failing_allocation, bad_questions;
inline thread_local int device;

inline Stream& of(cudaStream_t handle) { return streams[reinterpret_cast<uintptr_t>(handle)]; }

// Memory comes filled with kFresh, between guards of the same bytes.
constexpr size_t kGuard = 4096;
constexpr int kFresh = 0xA5;
inline std::map<uint8_t*, size_t> memory;  // with both guards

// Guards that were written to.
inline int damages() {
  int found = 0;
  for (const auto& [begin, bytes] : memory) {
    for (size_t i = 0; i < kGuard; ++i) found += begin[i] != kFresh || begin[bytes - 1 - i] != kFresh;
  }
  return found;
}

constexpr int kDevices = 256;
struct Room {
  int32_t workers, resident;  // SMs, and blocks an SM
  int32_t clusters[8];        // that run at once, of 1, 2, ... blocks; 0: the driver refuses their size
};
inline Room rooms[kDevices];

inline cudaError_t (*run_grid)(const cudaLaunchConfig_t& config, const void* kernel, void** arguments);

}  // namespace host_runtime

inline const char* cudaGetErrorString(cudaError_t) { return "no memory"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = host_runtime::device, cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) { return host_runtime::device = device, cudaSuccess; }
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

template <typename T>
cudaError_t cudaMalloc(T** pointer, size_t bytes) {
  if (++host_runtime::allocations == host_runtime::failing_allocation) return 1;
  const size_t all = bytes + 2 * host_runtime::kGuard;
  uint8_t* const begin = static_cast<uint8_t*>(std::aligned_alloc(256, (all + 255) / 256 * 256));
  std::memset(begin, host_runtime::kFresh, all);
  host_runtime::memory[begin] = all;
  *pointer = reinterpret_cast<T*>(begin + host_runtime::kGuard);
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  uint8_t* const begin = static_cast<uint8_t*>(pointer) - host_runtime::kGuard;
  host_runtime::memory.erase(begin);
  return std::free(begin), cudaSuccess;
}
inline cudaError_t cudaMemset(void* pointer, int byte, size_t bytes) {
  return std::memset(pointer, byte, bytes), cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* pointer, int byte, size_t bytes, cudaStream_t) {
  return cudaMemset(pointer, byte, bytes);
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return *stream = nullptr, cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }

inline cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                            unsigned long long* id) {
  const unsigned long long capture = host_runtime::of(stream).capture;
  *status = capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  static thread_local unsigned long long anything = 0;  // only a capture has an id
  *id = capture ? capture : ++anything;
  return cudaSuccess;
}
inline cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  if (host_runtime::of(stream).capture) return ++host_runtime::bad_questions;
  *id = host_runtime::of(stream).id;
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int device) {
  return *value = host_runtime::rooms[device].workers, cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int) {
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  return *blocks = host_runtime::rooms[host_runtime::device].resident, cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, Kernel, const cudaLaunchConfig_t* config) {
  *clusters = host_runtime::rooms[host_runtime::device].clusters[config->attrs[0].val.clusterDim.x - 1];
  return *clusters > 0 ? cudaSuccess : cudaErrorInvalidClusterSize;
}
inline cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                       void** arguments) {
  return host_runtime::run_grid(*config, kernel, arguments);
}
