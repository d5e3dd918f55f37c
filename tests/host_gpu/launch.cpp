// Runs the kernel's grid on the host: lanes in an order that a seed draws, a few blocks at a time.
#include "kernel.cuh"

#include <random>

namespace evenkv {
namespace host_gpu {

constexpr int kStackBytes = 1 << 16;
constexpr int kIdleSteps = 20000;  // without progress: a deadlock

using Warp = std::vector<std::unique_ptr<Lane>>;

DecodeParams params;
bool two_heads;

void enter() {
  if (!two_heads) {
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

std::unique_ptr<Block> make_block(uint32_t index, std::vector<Warp>& warps) {
  const size_t bytes = two_heads ? sizeof(SharedMemory<2>) : sizeof(SharedMemory<1>);
  auto block = std::make_unique<Block>();
  block->storage.assign(bytes + 128, 0xff);
  const auto address = reinterpret_cast<uintptr_t>(block->storage.data());
  block->shared = block->storage.data() + (128 - address % 128) % 128;
  block->index = index;
  block->warps.resize(kThreads / 32);
  for (uint32_t thread = 0; thread < kThreads; ++thread) {
    if (thread % 32 == 0) warps.emplace_back();
    auto lane = std::make_unique<Lane>();
    lane->block = block.get();
    lane->thread = thread;
    lane->stack.reset(new uint8_t[kStackBytes]);
    warps.back().push_back(std::move(lane));
  }
  return block;
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
const char* launch(const DecodeParams* p, int32_t heads, int32_t workers, int32_t blocks, int32_t resident,
                   uint32_t seed, int32_t early, int32_t* counters_left) {
  // As kernel.cu does.
  const bool by_request = p->request_chunk_shift != 0;
  const int64_t units = static_cast<int64_t>(p->num_kv_heads) * kParts / heads;
  const int64_t unit_slots = static_cast<int64_t>(p->num_kv_indices) * p->page_size;
  const bool one_round =
      units * unit_slots <= static_cast<int64_t>(workers) * kScheduleTuning.single_round_slots;
  const int64_t chunks = by_request ? units * request_chunks(unit_slots, p->batch, p->request_chunk_shift)
                                    : static_cast<int64_t>(workers) * (one_round ? 1 : kChunksPerWorkerBound);
  params = *p;
  params.slots_per_chunk = by_request ? 1 : 2;
  params.most_request_chunks = static_cast<int32_t>(chunks);
  const size_t slots = piece_slots(workers) + chunks * params.slots_per_chunk * heads;
  std::vector<float4> partials(slots * kPartialFloats / 4, float4{NAN, NAN, NAN, NAN});
  std::vector<int32_t> counters(kArrivals + max(chunks, int64_t{workers}) * 2, 0);
  params.partials = &partials[0].x;
  params.counters = counters.data();
  params.workers = workers;
  params.single_round_slots = one_round ? INT32_MAX : kScheduleTuning.single_round_slots;
  set_page_divisor(params);
  two_heads = heads == 2;
  grid = blocks;
  copies_arrive_early = early;
  fault.clear();

  std::mt19937 random(seed);
  std::vector<std::unique_ptr<Block>> started;
  std::vector<Warp> warps;
  const auto start_block = [&] {
    if (started.size() < grid) started.push_back(make_block(static_cast<uint32_t>(started.size()), warps));
  };
  for (int i = 0; i < resident; ++i) start_block();
  uint64_t seen = progress;
  int idle = 0;
  while (!warps.empty()) {
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
      if (warps.size() <= static_cast<size_t>(kThreads / 32) * (resident - 1)) start_block();
    }
  }
  *counters_left =
      static_cast<int32_t>(std::count_if(counters.begin(), counters.end(), [](int32_t c) { return c != 0; }));
  return nullptr;
}

}  // extern "C"
