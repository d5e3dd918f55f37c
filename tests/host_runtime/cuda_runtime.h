// As much of the CUDA runtime as scratch.cuh calls, on host memory. A test says which streams capture and
// what ids they have.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

using cudaError_t = int;
using cudaStream_t = struct CUstream_st*;
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed = 2 };
constexpr cudaError_t cudaSuccess = 0;
constexpr unsigned cudaStreamNonBlocking = 1;

namespace host_runtime {

constexpr int kStreams = 16;  // handles are small numbers
struct Stream {
  unsigned long long id, capture;  // capture 0: none
};
inline Stream streams[kStreams];
inline int allocations, failing_allocation, bad_questions;
inline thread_local int device;

inline Stream& of(cudaStream_t handle) { return streams[reinterpret_cast<uintptr_t>(handle)]; }

}  // namespace host_runtime

inline const char* cudaGetErrorString(cudaError_t) { return "no memory"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = host_runtime::device, cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) { return host_runtime::device = device, cudaSuccess; }
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

template <typename T>
cudaError_t cudaMalloc(T** pointer, size_t bytes) {
  if (++host_runtime::allocations == host_runtime::failing_allocation) return 1;
  *pointer = static_cast<T*>(std::calloc(bytes, 1));
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* pointer) { return std::free(pointer), cudaSuccess; }
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
