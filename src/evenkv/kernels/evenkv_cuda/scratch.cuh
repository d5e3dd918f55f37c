// Scratch: which launch gets which, and its allocation. Included by one source.
#pragma once

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <tuple>

#include "host.cuh"
#include "scratch.h"

namespace evenkv {
namespace {

struct Scratch {
  float* partials = nullptr;
  int32_t* counters = nullptr;
  size_t partial_bytes = 0, num_counters = 0;
};

// Two launches that may overlap never share scratch: one per stream, and within a capture one per captured
// stream, since a graph may be replayed on any stream and its branches may overlap. Entries live as long as
// the process, unchanged. A stream is known by its id, which no later stream gets (nor another context's
// default stream, whose handle is the same); within a capture, which does not let ids be asked for, by its
// handle.
struct ScratchKey {
  int device;
  unsigned long long stream, capture;  // the capture's id or 0

  bool operator==(const ScratchKey& other) const {
    return device == other.device && stream == other.stream && capture == other.capture;
  }
  bool operator<(const ScratchKey& other) const {
    return std::tie(device, stream, capture) < std::tie(other.device, other.stream, other.capture);
  }
};

struct ScratchEntry {
  ScratchKey key;
  Scratch scratch;
};

std::mutex scratch_mutex;
std::map<ScratchKey, const ScratchEntry*> scratch_of;
// The entry that was asked for last, most often asked for again: read without the lock, set under it. It is
// never one that a larger one replaced.
std::atomic<const ScratchEntry*> latest_scratch{nullptr};

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

inline const char* get_key(int device, cudaStream_t stream, ScratchKey& key) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  key = {device, 0, 0};
  if (failed(cudaStreamGetCaptureInfo(stream, &status, &key.capture), "cudaStreamGetCaptureInfo")) {
    return message.c_str();
  }
  if (status == cudaStreamCaptureStatusActive) {
    key.stream = reinterpret_cast<uintptr_t>(stream);
  } else {
    key.capture = 0;
    if (failed(cudaStreamGetId(stream, &key.stream), "cudaStreamGetId")) return message.c_str();
  }
  return nullptr;
}

inline bool is_enough(const Scratch& scratch, size_t partial_bytes, size_t num_counters) {
  return scratch.partial_bytes >= partial_bytes && scratch.num_counters >= num_counters;
}

[[gnu::cold, gnu::noinline]] const char* find_or_allocate(const ScratchKey& key, size_t partial_bytes,
                                                          size_t num_counters, Scratch& out) {
  const std::lock_guard<std::mutex> lock(scratch_mutex);
  const ScratchEntry*& entry = scratch_of[key];
  if (entry == nullptr || !is_enough(entry->scratch, partial_bytes, num_counters)) {
    Scratch fresh{nullptr, nullptr, partial_bytes, num_counters};
    if (entry != nullptr) {
      fresh.partial_bytes = std::max(entry->scratch.partial_bytes, round_up(partial_bytes));
      fresh.num_counters = std::max(entry->scratch.num_counters, round_up(num_counters));
    }
    if (const char* error = allocate(fresh)) return error;
    entry = new ScratchEntry{key, fresh};
  }
  latest_scratch.store(entry, std::memory_order_release);
  out = entry->scratch;
  return nullptr;
}

const char* get_scratch(int device, cudaStream_t stream, size_t partial_bytes, size_t num_counters,
                        Scratch& out) {
  ScratchKey key;
  if (const char* error = get_key(device, stream, key)) return error;
  const ScratchEntry* latest = latest_scratch.load(std::memory_order_acquire);
  if (latest == nullptr || !(latest->key == key) ||
      !is_enough(latest->scratch, partial_bytes, num_counters)) {
    return find_or_allocate(key, partial_bytes, num_counters, out);
  }
  out = latest->scratch;
  return nullptr;
}

}  // namespace

const char* fill_scratch(int32_t byte) {
  const std::lock_guard<std::mutex> lock(scratch_mutex);
  for (const auto& [key, entry] : scratch_of) {
    if (entry == nullptr) continue;  // its allocation failed
    const DeviceGuard guard(key.device);
    if (failed(cudaMemset(entry->scratch.partials, byte, entry->scratch.partial_bytes), "filling scratch")) {
      return message.c_str();
    }
  }
  return nullptr;
}

}  // namespace evenkv
