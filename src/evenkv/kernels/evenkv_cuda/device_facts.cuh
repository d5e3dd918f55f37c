// What the launcher knows of each device. Included by one source.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "host.cuh"

namespace evenkv {
namespace {

// A value for each device, made at the first use there and kept as long as the process. Reading takes no
// lock.
template <typename Value>
class PerDevice {
 public:
  // `make(value)` tells whether it succeeded. Null where it did not.
  template <typename Make>
  const Value* get(int device, const Make& make) {
    if (const Value* known = find(device)) return known;
    return add(device, make);
  }

 private:
  struct Node {
    int device;
    Value value;
    const Node* next;
  };

  const Value* find(int device) const {
    for (const Node* node = first_.load(std::memory_order_acquire); node != nullptr; node = node->next) {
      if (node->device == device) return &node->value;
    }
    return nullptr;
  }

  template <typename Make>
  [[gnu::cold, gnu::noinline]] const Value* add(int device, const Make& make) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const CaptureRelaxed relaxed;
    if (const Value* known = find(device)) return known;
    Value value{};
    if (!make(value)) return nullptr;
    const Node* node = new Node{device, value, first_.load(std::memory_order_relaxed)};
    first_.store(node, std::memory_order_release);
    return &node->value;
  }

  std::mutex mutex_;
  std::atomic<const Node*> first_{nullptr};
};

bool count_workers(int32_t& workers, int device) {
  return !failed(cudaDeviceGetAttribute(&workers, cudaDevAttrMultiProcessorCount, device),
                 "reading the SM count");
}

template <typename Kernel>
bool allow_shared(Kernel kernel, size_t bytes) {
  return !failed(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
      "asking for a block's shared memory");
}

}  // namespace
}  // namespace evenkv
