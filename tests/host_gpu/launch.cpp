// Runs the kernel's grid on the host: lanes in an order that a seed draws, a few blocks at a time.
#include "kernel.cuh"
#include "prepare.cuh"
#include "small_kernel.cuh"

#include <random>

namespace evenkv {
namespace host_gpu {

constexpr int kStackBytes = 1 << 16;
constexpr int kIdleSteps = 20000;  // without progress: a deadlock

using Warp = std::vector<std::unique_ptr<Lane>>;

DecodeParams params;
bool two_heads, is_small;

void enter() {
  if (is_small) {
    small_decode_kernel(params);
  } else if (!two_heads) {
    decode_kernel<1>(params);
  } else if constexpr (kIsFp8 && kParts == 1) {
    decode_kernel<2>(params);
  }
  current->done = true;
  ++progress;
  _longjmp(scheduler, 1);
}

// Lets a lane run until it waits.
void step(Lane* lane) {
  current = lane;
  if (_setjmp(scheduler)) return;
  if (lane->started) _longjmp(lane->resume, 1);
  lane->started = true;
  getcontext(&lane->context);
  lane->context.uc_stack.ss_sp = lane->stack.get();
  lane->context.uc_stack.ss_size = kStackBytes;
  lane->context.uc_link = nullptr;
  makecontext(&lane->context, enter, 0);
  setcontext(&lane->context);
}

std::unique_ptr<Block> make_block(Index index, std::vector<Warp>& warps) {
  const size_t bytes = is_small    ? sizeof(SmallShared)
                       : two_heads ? sizeof(SharedMemory<2>)
                                   : sizeof(SharedMemory<1>);
  const uint32_t threads = is_small ? kSmallThreads : kThreads;
  auto block = std::make_unique<Block>();
  block->storage.assign(bytes + 128, 0xff);
  const auto address = reinterpret_cast<uintptr_t>(block->storage.data());
  block->shared = block->storage.data() + (128 - address % 128) % 128;
  block->index = index;
  block->warps.resize(threads / 32);
  for (uint32_t thread = 0; thread < threads; ++thread) {
    if (thread % 32 == 0) warps.emplace_back();
    auto lane = std::make_unique<Lane>();
    lane->block = block.get();
    lane->thread = thread;
    lane->stack.reset(new uint8_t[kStackBytes]);
    warps.back().push_back(std::move(lane));
  }
  return block;
}

// From a tensor's address to behind its last element.
Memory memory_of(const void* data, int64_t elements, int64_t bytes) {
  return {static_cast<const char*>(data), static_cast<const char*>(data) + elements * bytes};
}

// What the kernel's copies may read of this launch's inputs.
std::vector<Memory> inputs_of(const DecodeParams& p) {
  const auto cache = [&](const void* data, int64_t page, int64_t slot, int64_t head) {
    const int64_t last = (p.num_pages - 1) * page + (p.page_size - 1) * slot + (p.num_kv_heads - 1) * head;
    return memory_of(data, p.num_pages > 0 ? last + kHeadDim : 0, kElementBytes);
  };
  const int64_t last_query =
      (p.batch - 1) * p.q_stride_batch + (int64_t{p.num_kv_heads} * kGroupSize - 1) * p.q_stride_head;
  std::vector<Memory> found = {cache(p.k_cache, p.k_stride_page, p.k_stride_slot, p.k_stride_head),
                               cache(p.v_cache, p.v_stride_page, p.v_stride_slot, p.v_stride_head),
                               memory_of(p.q, last_query + kHeadDim, 2)};
  if (p.k_scale != nullptr) found.push_back(memory_of(p.k_scale, p.num_kv_heads, 4));
  return found;
}

// Runs warps in an order that `random` draws until none is left; `warp_ended` may add some. Null, or what
// went wrong.
template <typename Ended>
const char* run_warps(std::vector<Warp>& warps, std::mt19937& random, const Ended& warp_ended) {
  uint64_t seen = progress;
  for (int idle = 0; !warps.empty();) {
    const size_t chosen = random() % warps.size();
    bool done = false;
    // Short runs and long ones, so that warps drift apart.
    for (int steps = 1 << random() % 8; steps > 0 && !done; --steps) {
      done = true;
      for (const auto& lane : warps[chosen]) {
        if (lane->done) continue;
        done = false;
        step(lane.get());
      }
    }
    if (!fault.empty()) return fault.c_str();
    idle = progress == seen ? idle + 1 : 0;
    seen = progress;
    if (idle > kIdleSteps) return "a deadlock";
    if (done) {
      warps.erase(warps.begin() + static_cast<std::ptrdiff_t>(chosen));
      warp_ended();
    }
  }
  return nullptr;
}

}  // namespace host_gpu
}  // namespace evenkv

using namespace evenkv;
using namespace evenkv::host_gpu;

extern "C" {

int32_t shared_bytes() { return max(sizeof(SharedMemory<1>), sizeof(SharedMemory<2>)); }
int32_t shared_budget() { return kSharedBudget; }

// Returns null, or what went wrong. Partials start as NaN, counters as zero; counters_left: those not zero
// after the launch.
const char* launch(const DecodeParams* p, int32_t heads, int32_t workers, int32_t resident, uint32_t seed,
                   int32_t early, int32_t* counters_left) {
  params = *p;
  LaunchSizes sizes;
  if (const char* error = prepare(params, workers, heads, sizes)) return error;
  std::vector<float4> partials(sizes.partial_floats / 4, float4{NAN, NAN, NAN, NAN});
  std::vector<int32_t> counters(sizes.counters, 0);
  params.partials = &partials[0].x;
  params.counters = counters.data();
  two_heads = heads == 2;
  is_small = false;
  grid = sizes.blocks;
  copies_arrive_early = early;
  fault.clear();
  readable = inputs_of(params);

  std::mt19937 random(seed);
  std::vector<std::unique_ptr<Block>> started;
  std::vector<Warp> warps;
  const auto start_block = [&] {
    if (started.size() < grid)
      started.push_back(make_block({static_cast<uint32_t>(started.size()), 0, 0}, warps));
  };
  for (int i = 0; i < resident; ++i) start_block();
  const char* wrong = run_warps(warps, random, [&] {
    if (warps.size() <= static_cast<size_t>(kThreads / 32) * (resident - 1)) start_block();
  });
  if (wrong != nullptr) return wrong;
  *counters_left =
      static_cast<int32_t>(std::count_if(counters.begin(), counters.end(), [](int32_t c) { return c != 0; }));
  return nullptr;
}

// A cluster at a time, all its blocks at once.
const char* launch_small(const DecodeParams* p, int32_t splits, uint32_t seed, int32_t early) {
  params = *p;
  if (const char* error = set_rows(params, kElementBytes)) return error;
  is_small = true;
  grid = splits;
  copies_arrive_early = early;
  fault.clear();
  readable = inputs_of(params);
  std::mt19937 random(seed);
  for (uint32_t request = 0; request < static_cast<uint32_t>(p->batch); ++request) {
    for (uint32_t unit = 0; unit < static_cast<uint32_t>(p->num_kv_heads * kParts); ++unit) {
      std::vector<std::unique_ptr<Block>> blocks;
      std::vector<Warp> warps;
      Cluster cluster;
      for (uint32_t rank = 0; rank < static_cast<uint32_t>(splits); ++rank) {
        blocks.push_back(make_block({rank, unit, request}, warps));
        blocks.back()->cluster = &cluster;
        cluster.blocks.push_back(blocks.back().get());
      }
      if (const char* wrong = run_warps(warps, random, [] {})) return wrong;
    }
  }
  return nullptr;
}

}  // extern "C"
