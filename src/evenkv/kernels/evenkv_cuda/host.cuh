// What the launcher's host code shares: messages and the current device. Included by one source.
#pragma once

#include <cuda_runtime.h>

#include <string>

namespace evenkv {
namespace {

thread_local std::string message;

[[gnu::cold, gnu::noinline]] void compose_message(cudaError_t status, const char* what) {
  message = std::string(what) + ": " + cudaGetErrorString(status);
}

inline bool failed(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return false;
  compose_message(status, what);
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

// Allowing a capture to go on while something is done outside it.
class CaptureRelaxed {
 public:
  CaptureRelaxed() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~CaptureRelaxed() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace
}  // namespace evenkv
