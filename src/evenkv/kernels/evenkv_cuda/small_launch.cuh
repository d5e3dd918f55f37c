// The launch of small problems. Included by one source.
#pragma once

#include "device_facts.cuh"
#include "small_kernel.cuh"

namespace evenkv {
namespace {

struct SmallLaunch {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute cluster{};
  SmallLaunch(int32_t splits, int32_t units, int32_t batch, cudaStream_t stream) {
    config.gridDim = dim3(splits, units, batch);
    config.blockDim = dim3(kSmallThreads);
    config.dynamicSmemBytes = sizeof(SmallShared);
    config.stream = stream;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(splits), 1, 1};
    config.attrs = &cluster;
    config.numAttrs = 1;
  }
};

// Device facts of the kernel for small problems.
struct SmallFacts {
  int32_t workers = 0;                 // SMs
  int32_t clusters[kMostSplits] = {};  // that run at once, of 1, 2, ... blocks
};

// None where the device is a part of a GPU too small for clusters.
bool ask_for_small(SmallFacts& facts, int device) {
  if (!count_workers(facts.workers, device) || !allow_shared(small_decode_kernel, sizeof(SmallShared))) {
    return false;
  }
  for (int splits = 1; splits <= kMostSplits; ++splits) {
    const SmallLaunch trial(splits, 1, 1, nullptr);
    int32_t& clusters = facts.clusters[splits - 1];
    const cudaError_t status = cudaOccupancyMaxActiveClusters(&clusters, small_decode_kernel, &trial.config);
    if (status == cudaErrorInvalidClusterSize) {
      clusters = 0;
      cudaGetLastError();  // an answer like any other
    } else if (failed(status, "counting clusters")) {
      return false;
    }
  }
  return true;
}

// Blocks a cluster for a small problem; 0 where the general kernel does better.
int32_t splits_of(const DecodeParams& p, const SmallFacts& facts) {
  constexpr int64_t kBlockTokens = kSmallWarps * kTileTokens;  // a tile for each warp
  const int64_t units = static_cast<int64_t>(p.num_kv_heads) * kParts, clusters = units * p.batch;
  const int64_t unit_slots = static_cast<int64_t>(p.num_kv_indices) * p.page_size;
  if (p.general_only != 0 || p.request_chunk_shift != 0 || p.batch > 65535 || clusters > facts.clusters[0])
    return 0;
  if (units * unit_slots > facts.workers * kSmallSlotsPerWorker) return 0;
  int32_t splits = 1;
  for (; splits < kMostSplits && unit_slots > kBlockTokens * splits; ++splits) {
    // Blocks that wait for others double the time, unless most are for longer requests than the average one
    // and leave at once.
    const int64_t at_once = facts.clusters[splits];
    const bool most_leave = unit_slots / p.batch <= kBlockTokens * (splits + 1);
    if (clusters > (most_leave ? 2 * at_once : at_once)) break;
  }
  // One request may hold all tokens: its blocks must not take long either.
  return unit_slots > kSmallMostTokens * splits ? 0 : splits;
}

// Null when done, "" when the problem is not small, else what failed.
const char* launch_small(DecodeParams& p, int device, cudaStream_t stream) {
  // A build for older devices too: its code may be one without clusters, its device one with less memory.
  if constexpr (oldest_architecture() < 900) return "";
  static_assert(sizeof(SmallShared) <= 232448, "more than a block of sm_90 may have");
  static PerDevice<SmallFacts> facts_of;
  const SmallFacts* facts =
      facts_of.get(device, [device](SmallFacts& made) { return ask_for_small(made, device); });
  if (facts == nullptr) return message.c_str();
  const int32_t splits = splits_of(p, *facts);
  if (splits == 0) return "";
  if (const char* error = set_rows(p, kElementBytes)) return error;
  SmallLaunch small(splits, p.num_kv_heads * kParts, p.batch, stream);
  void* arguments[] = {&p};
  return failed(cudaLaunchKernelExC(&small.config, reinterpret_cast<const void*>(small_decode_kernel),
                                    arguments),
                "launching the kernel for small problems")
             ? message.c_str()
             : nullptr;
}

}  // namespace
}  // namespace evenkv
