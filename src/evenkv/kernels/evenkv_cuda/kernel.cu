// The launcher: device facts, what shapes settle, scratch, and the one launch.
#include <cuda_runtime.h>

#include "choose.h"
#include "device_facts.cuh"
#include "kernel.cuh"
#include "scratch.cuh"

namespace evenkv {
namespace {

using Kernel = void (*)(DecodeParams);

// A launch in clusters; a plain one where this build has code for devices without them.
constexpr bool kHasClusters = oldest_architecture() >= 900;
template <int kHeads>
struct Launch {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute cluster{};

  Launch(int32_t splits, int32_t units, int32_t clusters, cudaStream_t stream) {
    config.gridDim = dim3(splits, units, clusters);
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = sizeof(BlockShared<kHeads>);
    config.stream = stream;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(splits), 1, 1};
    config.attrs = &cluster;
    config.numAttrs = kHasClusters ? 1 : 0;
  }
};

template <int kHeads>
bool ask_for_room(DeviceRoom& room, int device) {
  constexpr size_t kBytes = sizeof(BlockShared<kHeads>);
  static_assert(kBytes <= kSharedBudget, "a block has more than an SM");
  const Kernel cut = decode_kernel<kHeads, false>, uncut = decode_kernel<kHeads, kHeads == 1>;
  int32_t resident = 0;
  if (!count_workers(room.workers, device) || !allow_shared(cut, kBytes) || !allow_shared(uncut, kBytes) ||
      failed(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, cut, kThreads, kBytes),
             "counting blocks")) {
    return false;
  }
  room.clusters[0] = resident * room.workers;
  for (int splits = 2; kHasClusters && splits <= kMostSplits; ++splits) {
    const Launch<kHeads> trial(splits, 1, 1, nullptr);
    int32_t& clusters = room.clusters[splits - 1];
    const cudaError_t status = cudaOccupancyMaxActiveClusters(&clusters, cut, &trial.config);
    if (status == cudaErrorInvalidClusterSize) {
      clusters = 0;
      cudaGetLastError();  // an answer like any other
    } else if (failed(status, "counting clusters")) {
      return false;
    }
  }
  return true;
}

template <int kHeads>
const DeviceRoom* room_on(int device) {
  static PerDevice<DeviceRoom> rooms;
  return rooms.get(device, [device](DeviceRoom& room) { return ask_for_room<kHeads>(room, device); });
}

template <int kHeads>
const char* launch(DecodeParams& p, const DeviceRoom& room, int device, cudaStream_t stream) {
  const int32_t units = p.num_kv_heads * kGroupCuts / kHeads;
  const Shape shape = {units,      p.batch, p.page_size, p.num_kv_indices, kWarps / kHeads * kTileTokens,
                       kTileTokens};
  const Choice choice = choose_cut(shape, room, p.invariant_tokens, p.always_cut == 0 && kHeads == 1);
  p.cut = choice.cut;
  if (const char* error = set_rows(p, kElementBytes)) return error;
  if (p.cut.places > 0) {
    const int64_t places = static_cast<int64_t>(units) * p.cut.places;
    Scratch scratch;
    const char* error = get_scratch(device, stream, places * kHeads * kPartialFloats * sizeof(float),
                                    places * kMostSplits, scratch);
    if (error != nullptr) return error;
    p.partials = scratch.partials;
    p.counters = scratch.counters;
  }
  Launch<kHeads> launch(choice.splits, units, choice.clusters, stream);
  void* arguments[] = {&p};
  const Kernel kernel = choice.uncut ? decode_kernel<kHeads, kHeads == 1> : decode_kernel<kHeads, false>;
  const cudaError_t status =
      cudaLaunchKernelExC(&launch.config, reinterpret_cast<const void*>(kernel), arguments);
  return failed(status, "launching the kernel") ? message.c_str() : nullptr;
}

}  // namespace

const char* launch_decode(DecodeParams& p, int32_t device, void* stream) {
  if (p.batch == 0) return nullptr;
  const DeviceGuard guard(device);
  const DeviceRoom* room = room_on<1>(device);
  if (room == nullptr) return message.c_str();
  if constexpr (kIsFp8 && kGroupCuts == 1) {
    if (take_pairs(p.num_kv_heads, p.batch, p.invariant_tokens, *room)) {
      const DeviceRoom* pairs = room_on<2>(device);
      return pairs == nullptr ? message.c_str()
                              : launch<2>(p, *pairs, device, static_cast<cudaStream_t>(stream));
    }
  }
  return launch<1>(p, *room, device, static_cast<cudaStream_t>(stream));
}

}  // namespace evenkv
