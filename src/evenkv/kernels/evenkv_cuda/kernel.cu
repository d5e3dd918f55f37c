// The launcher: device facts, what shapes settle, scratch, and the one launch.
#include <cuda_runtime.h>

#include "choose.h"
#include "device_facts.cuh"
#include "kernel.cuh"
#include "make_maps.cuh"
#include "scratch.cuh"

namespace evenkv {
namespace {

thread_local int32_t tensor_copies_of_last = 0;

// Shared memory of a block: what it uses, or more where no more than kFewBlocks shall fit an SM (which has
// 1 KB more than a block can have, and takes 1 KB for each).
template <int kHeads>
constexpr size_t shared_bytes(bool few) {
  constexpr size_t kOwn = sizeof(BlockShared<kHeads>), kFew = (kSharedBudget + 1024) / (kFewBlocks + 1);
  static_assert(kOwn <= kSharedBudget, "a block has more than an SM");
  return few ? std::max(kOwn, kFew) : kOwn;
}

// A launch in clusters; a plain one where this build has code for devices without them.
constexpr bool kHasClusters = oldest_architecture() >= 900;
struct Launch {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute cluster{};

  Launch(int32_t splits, int32_t units, int32_t clusters, size_t bytes, cudaStream_t stream) {
    config.gridDim = dim3(splits, units, clusters);
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(splits), 1, 1};
    config.attrs = &cluster;
    config.numAttrs = kHasClusters ? 1 : 0;
  }
};

template <int kHeads>
bool ask_for_room(DeviceRoom& room, int device, size_t bytes) {
  const auto cut = decode_kernel<kHeads, false, false>, uncut = decode_kernel<kHeads, kHeads == 1, false>;
  const auto tensor = decode_kernel<kHeads, false, kHasTensorCopies>;
  constexpr size_t kMost = shared_bytes<kHeads>(kHeads > 1);  // of all launches
  int32_t resident = 0;
  if (!count_workers(room.workers, device) || !allow_shared(cut, kMost) || !allow_shared(uncut, kMost) ||
      !allow_shared(tensor, kMost) ||
      failed(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, cut, kThreads, bytes),
             "counting blocks")) {
    return false;
  }
  room.clusters[0] = resident * room.workers;
  for (int splits = 2; kHasClusters && splits <= kMostSplits; ++splits) {
    const Launch trial(splits, 1, 1, bytes, nullptr);
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

template <int kHeads, bool kFew>
const DeviceRoom* room_on(int device) {
  static PerDevice<DeviceRoom> rooms;
  return rooms.get(device, [device](DeviceRoom& room) {
    return ask_for_room<kHeads>(room, device, shared_bytes<kHeads>(kFew));
  });
}

// What shapes say of a batch, of blocks that take so many KV heads.
Shape shape_of(const DecodeParams& p, int64_t heads) {
  Shape shape{};
  shape.units = p.num_kv_heads * kGroupCuts / heads;
  shape.batch = p.batch;
  shape.page_size = p.page_size;
  shape.num_kv_indices = p.num_kv_indices;
  shape.block_tokens = kWarps / heads * kTileTokens;
  shape.tile_tokens = kTileTokens;
  shape.heads = heads;
  shape.row_bytes = kRowBytes;
  return shape;
}

template <int kHeads>
const void* choose_kernel(bool uncut, bool tensor) {
  if (uncut) return reinterpret_cast<const void*>(decode_kernel<kHeads, kHeads == 1, false>);
  if (tensor) return reinterpret_cast<const void*>(decode_kernel<kHeads, false, kHasTensorCopies>);
  return reinterpret_cast<const void*>(decode_kernel<kHeads, false, false>);
}

template <int kHeads>
const char* launch(DecodeParams& p, const DeviceRoom* room, int device, bool few, cudaStream_t stream) {
  if (room == nullptr) return message.c_str();
  const Shape shape = shape_of(p, kHeads);
  const int32_t units = static_cast<int32_t>(shape.units);
  const Choice choice = choose_cut(shape, *room, p.invariant_tokens, p.always_cut == 0 && kHeads == 1);
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
  const bool tensor =
      kHasTensorCopies && !choice.uncut && (slots_an_sm(shape, *room) >= kTensorSlots || p.always_cut != 0);
  CacheMaps maps{};
  p.tensor_copies = 0;
  if (tensor) make_maps(p, maps);
  tensor_copies_of_last = p.tensor_copies;
  Launch launch(choice.splits, units, choice.clusters, shared_bytes<kHeads>(few), stream);
  void* arguments[] = {&p, &maps};
  const void* const kernel = choose_kernel<kHeads>(choice.uncut, p.tensor_copies != 0);
  const cudaError_t status = cudaLaunchKernelExC(&launch.config, kernel, arguments);
  return failed(status, "launching the kernel") ? message.c_str() : nullptr;
}

}  // namespace

int32_t last_tensor_copies() { return tensor_copies_of_last; }

const char* launch_decode(DecodeParams& p, int32_t device, void* stream) {
  if (p.batch == 0) return nullptr;
  const DeviceGuard guard(device);
  const auto queue = static_cast<cudaStream_t>(stream);
  const DeviceRoom* room = room_on<1, false>(device);
  if constexpr (kHasPairs) {
    if (room == nullptr) return message.c_str();
    const Width width = choose_width(shape_of(p, 1), *room, p.invariant_tokens);
    if (width.heads == 2) {
      const DeviceRoom* pairs = width.few ? room_on<2, true>(device) : room_on<2, false>(device);
      return launch<2>(p, pairs, device, width.few, queue);
    }
  }
  return launch<1>(p, room, device, false, queue);
}

}  // namespace evenkv
