// The kernel and its launcher on the host: launch_decode as it stands, whose grids run as fibers, lanes in an
// order that a seed draws and a few clusters at a time.
#include "ptx.cuh"

#include "choose.h"

namespace evenkv {
namespace host_gpu {

// What a test wants instead of what shapes settle, so that small problems are cut in many ways. 0: as chosen.
struct Forced {
  int32_t splits, clusters, even_parts, part_tokens, tail_slot, tail_scale, least_64ths, dealt, alone;
  int32_t is_even;   // 1: whatever the lengths; -1: never
  int32_t is_uncut;  // 1: yes, where the launcher allows it; -1: no
};
Forced forced;

Choice choose(const Shape& s, const DeviceRoom& room, int64_t invariant_tokens, bool may_stay_uncut) {
  Choice choice = choose_cut(s, room, invariant_tokens, may_stay_uncut);
  const Forced none{};
  if (memcmp(&forced, &none, sizeof forced) == 0) return choice;
  Cut& cut = choice.cut;
  if (forced.splits != 0) choice.splits = forced.splits;
  if (forced.even_parts != 0) cut.even_parts = forced.even_parts;
  if (forced.part_tokens != 0) cut.part_tokens = forced.part_tokens;
  cut.tail_slot = forced.tail_slot != 0 ? forced.tail_slot : kNoTail;
  cut.tail_scale = forced.tail_scale;
  cut.least_share = forced.least_64ths != 0 ? forced.least_64ths / 64.0f : 1.0f;
  cut.dealt = forced.dealt;
  cut.alone = forced.alone;
  cut.least_dealt = 1.0f;
  cut.whole_dealt = 0;
  cut.least_even_tokens = cut.whole_tokens = cut.whole_pages = 0;
  if (forced.is_even != 0) cut.even_pages = forced.is_even > 0 ? INT32_MAX : -1;
  choice.uncut = forced.is_uncut > 0 ? may_stay_uncut : choice.uncut && forced.is_uncut == 0;
  // What follows from these, by the contract of cut.h.
  const int64_t slots = s.num_kv_indices * s.page_size;
  const int64_t even_numbers = cut.even_pages < 0 ? 0 : cut.even_parts * s.batch;
  cut.even_tokens =
      static_cast<int32_t>(std::max<int64_t>(ceil_div(ceil_div(slots, s.batch), cut.even_parts), 1));
  cut.by_part_tokens = divisor_of(cut.part_tokens);
  cut.by_warps = divisor_of(s.block_tokens / s.tile_tokens * choice.splits);
  count_places(s, cut);
  choice.clusters =
      static_cast<int32_t>(choice.uncut           ? s.batch
                           : forced.clusters != 0 ? forced.clusters
                                                  : std::max<int64_t>(even_numbers, cut.numbers));
  if (choice.uncut) cut.places = 0;
  return choice;
}

}  // namespace host_gpu
}  // namespace evenkv

#include "kernel.cu"

namespace evenkv {
namespace host_gpu {

constexpr int kStackBytes = 1 << 16;
constexpr int kIdleSteps = 20000;  // without progress: a deadlock

using Warp = std::vector<std::unique_ptr<Lane>>;

// What a test reads after a launch.
struct Report {
  int32_t heads, is_uncut;          // which kernel ran; heads 0: none
  int32_t splits, units, clusters;  // its grid
  int32_t numbers, places;          // of a unit
  int32_t places_written;           // of all units
  int32_t counters_left;            // not zero after the launch
  int32_t block_bytes;              // of shared memory
  int32_t tensor_copies;            // of 16 rows
};

// How a launch runs.
struct Options {
  int32_t resident;      // clusters at a time
  uint32_t seed;         // draws who runs when
  int32_t copies_early;  // at once, or only when a lane waits for them
  int32_t any_order;     // clusters start in an order that the seed draws too
  int32_t scratch_byte;  // fills scratch before the launch
  int32_t by_lanes;      // no tensor copies
};

// Which kernel runs: one of the two.
void (*plain)(DecodeParams, NoMaps);
void (*tensor)(DecodeParams, CacheMaps);
DecodeParams params;
CacheMaps maps;
Options options;
Report report;

void enter() {
  plain != nullptr ? plain(params, {}) : tensor(params, maps);
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

std::unique_ptr<Block> make_block(Index index, uint32_t threads, size_t bytes, std::vector<Warp>& warps) {
  auto block = std::make_unique<Block>();
  block->storage.assign(bytes + 128, 0xff);
  const auto address = reinterpret_cast<uintptr_t>(block->storage.data());
  block->shared = block->storage.data() + (128 - address % 128) % 128;
  block->index = index;
  block->warps.resize(threads / 32);
  block->running = threads / 32;
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

// Runs warps in an order that `random` draws until none is left; `warp_ended(block)` may add some.
template <typename Ended>
void run_warps(std::vector<Warp>& warps, std::mt19937& random, const Ended& warp_ended) {
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
    if (!fault.empty()) return;
    idle = progress == seen ? idle + 1 : 0;
    seen = progress;
    if (idle > kIdleSteps) {
      fault = "a deadlock";
      return;
    }
    if (done) {
      Block* const block = warps[chosen][0]->block;
      warps.erase(warps.begin() + static_cast<std::ptrdiff_t>(chosen));
      warp_ended(block);
    }
  }
}

// All blocks of all clusters.
void run_blocks(const cudaLaunchConfig_t& config) {
  grid = {config.gridDim.x, config.gridDim.y, config.gridDim.z};
  std::mt19937 random(options.seed);
  std::vector<Index> waiting;  // the last one starts first
  for (uint32_t z = grid.z; z-- > 0;) {
    for (uint32_t y = grid.y; y-- > 0;) waiting.push_back({0, y, z});
  }
  if (options.any_order) std::shuffle(waiting.begin(), waiting.end(), random);

  struct Running {
    Cluster cluster;
    std::vector<std::unique_ptr<Block>> blocks;
  };
  std::vector<std::unique_ptr<Running>> clusters;
  std::vector<Warp> warps;
  const auto start_cluster = [&] {
    if (waiting.empty()) return;
    const Index first = waiting.back();
    waiting.pop_back();
    clusters.push_back(std::make_unique<Running>());
    Running& now = *clusters.back();
    for (uint32_t rank = 0; rank < grid.x; ++rank) {
      now.blocks.push_back(
          make_block({rank, first.y, first.z}, config.blockDim.x, config.dynamicSmemBytes, warps));
      now.blocks.back()->cluster = &now.cluster;
      now.cluster.blocks.push_back(now.blocks.back().get());
    }
  };
  for (int32_t i = 0; i < options.resident; ++i) start_cluster();
  run_warps(warps, random, [&](Block* block) {
    if (--block->running > 0) return;
    // What a block leaves behind is anybody's: others of its cluster must not read on.
    std::fill(block->storage.begin(), block->storage.end(), 0xff);
    const auto ended = std::find_if(clusters.begin(), clusters.end(),
                                    [&](const auto& running) { return &running->cluster == block->cluster; });
    const auto& blocks = (*ended)->blocks;
    if (std::any_of(blocks.begin(), blocks.end(), [](const auto& b) { return b->running > 0; })) return;
    clusters.erase(ended);
    start_cluster();
  });
}

template <typename T>
Memory memory_of(const T* data, int64_t elements, int64_t bytes = sizeof(T)) {
  const char* const begin = reinterpret_cast<const char*>(data);
  return {begin, begin + (data == nullptr ? 0 : elements * bytes)};
}

// What a launch may read of its inputs.
std::vector<Memory> inputs_of(const DecodeParams& p) {
  const auto cache = [&](const void* data, int64_t page, int64_t slot, int64_t head) {
    const int64_t last = (p.num_pages - 1) * page + (p.page_size - 1) * slot + (p.num_kv_heads - 1) * head;
    const int64_t elements = p.num_pages > 0 ? last + kHeadDim : 0;
    return memory_of(static_cast<const char*>(data), elements, kElementBytes);
  };
  const int64_t last_query =
      (p.batch - 1) * p.q_stride_batch + (int64_t{p.num_kv_heads} * kGroupSize - 1) * p.q_stride_head;
  return {cache(p.k_cache, p.k_stride_page, p.k_stride_slot, p.k_stride_head),
          cache(p.v_cache, p.v_stride_page, p.v_stride_slot, p.v_stride_head),
          memory_of(static_cast<const char*>(p.q), last_query + kHeadDim, 2),
          memory_of(p.k_scale, p.num_kv_heads),
          memory_of(p.v_scale, p.num_kv_heads),
          memory_of(p.kv_indptr, p.batch + 1),
          memory_of(p.kv_indices, p.num_kv_indices),
          memory_of(p.kv_last_page_len, p.batch)};
}

// Places of scratch that hold something else than the byte that filled it.
int32_t count_written(int64_t places, int64_t floats) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(partials.begin);
  int32_t found = 0;
  for (int64_t place = 0; place < places; ++place, bytes += floats * sizeof(float)) {
    found += std::any_of(bytes, bytes + floats * sizeof(float),
                         [](uint8_t byte) { return byte != options.scratch_byte; });
  }
  return found;
}

// Sets which kernel runs, and what the report says of it. Without tensor copies, its twin runs in its place.
template <int kHeads>
void find_kernel_of(const void* function) {
  const auto is = [&](auto kernel) { return function == reinterpret_cast<const void*>(kernel); };
  const auto cut = decode_kernel<kHeads, false, false>, uncut = decode_kernel<kHeads, kHeads == 1, false>;
  plain = is(cut) ? cut : is(uncut) ? uncut : nullptr;
  report.is_uncut = kHeads == 1 && is(uncut);
  if constexpr (kHasTensorCopies) {
    tensor = is(decode_kernel<kHeads, false, true>) ? decode_kernel<kHeads, false, true> : nullptr;
    if (tensor != nullptr && options.by_lanes != 0) plain = cut;
  }
  report.heads = plain != nullptr || tensor != nullptr ? kHeads : 0;
}

void find_kernel(const void* function) {
  tensor = nullptr;
  find_kernel_of<1>(function);
  if constexpr (kHasPairs) {
    if (report.heads == 0) find_kernel_of<2>(function);
  }
}

// cudaLaunchKernelExC.
cudaError_t run_grid(const cudaLaunchConfig_t& config, const void* function, void** arguments) {
  params = *static_cast<const DecodeParams*>(arguments[0]);
  maps = *static_cast<const CacheMaps*>(arguments[1]);
  tensor_copies = 0;
  find_kernel(function);
  report.splits = static_cast<int32_t>(config.gridDim.x);
  report.units = static_cast<int32_t>(config.gridDim.y);
  report.clusters = static_cast<int32_t>(config.gridDim.z);
  report.block_bytes = static_cast<int32_t>(config.dynamicSmemBytes);
  report.numbers = params.cut.numbers;
  report.places = params.cut.places;
  if (config.numAttrs != 1 || config.attrs[0].val.clusterDim.x != config.gridDim.x ||
      config.gridDim.y > 65535 || config.gridDim.z > 65535 || config.gridDim.z == 0) {
    fault = "a grid that the device refuses";
    return 1;
  }
  inputs = inputs_of(params);
  const int64_t places = int64_t{report.units} * report.places, floats = report.heads * kPartialFloats;
  partials = memory_of(params.partials, places * floats);
  counters = memory_of(params.counters, places * kMostSplits);
  fill_scratch(options.scratch_byte);
  run_blocks(config);
  if (!fault.empty()) return 1;
  report.places_written = count_written(places, floats);
  report.tensor_copies = static_cast<int32_t>(tensor_copies);
  for (const auto& [key, entry] : scratch_of) {
    const Scratch& scratch = entry->scratch;
    report.counters_left += static_cast<int32_t>(std::count_if(
        scratch.counters, scratch.counters + scratch.num_counters, [](int32_t c) { return c; }));
    std::fill_n(scratch.counters, scratch.num_counters, 0);  // what is reported spoils no later launch
    const bool is_this = scratch.partials == params.partials;
    const auto* bytes = reinterpret_cast<const uint8_t*>(scratch.partials);
    const size_t own = is_this ? partials.end - partials.begin : 0;
    if (std::any_of(bytes + own, bytes + scratch.partial_bytes,
                    [](uint8_t byte) { return byte != options.scratch_byte; })) {
      fault = "a store lies outside the launch's partials";
    }
  }
  if (host_runtime::damages() > 0) fault = "a store lies outside scratch";
  return fault.empty() ? cudaSuccess : 1;
}

// For find_requests: the numbers, and the request that each of them finds.
const int32_t* numbers;
int32_t* found;
int32_t num_numbers;
Fit fit;

void find_all(DecodeParams p, NoMaps) {
  for (int32_t i = 0; i < num_numbers; ++i) {
    const int32_t request = find_request(p, numbers[i], p.num_kv_indices, fit, false);
    if (threadIdx.x == 0) found[i] = request;
    if (__any_sync(kAllLanes, request != __shfl_sync(kAllLanes, request, 0))) fault = "lanes disagree";
  }
}

}  // namespace host_gpu
}  // namespace evenkv

using namespace evenkv;
using namespace evenkv::host_gpu;

extern "C" {

int32_t params_bytes() { return sizeof(DecodeParams); }
int32_t shared_bytes() { return std::max(sizeof(BlockShared<1>), sizeof(BlockShared<2>)); }
int32_t shared_budget() { return kSharedBudget; }
int32_t resident_blocks() { return kResident; }

void set_device(int32_t device, const host_runtime::Room* room) { host_runtime::rooms[device] = *room; }

// launch_decode. Returns null, or what went wrong.
const char* launch(DecodeParams* p, int32_t device, const Forced* wanted, const Options* how, Report* out) {
  forced = *wanted;
  options = *how;
  report = {};
  fault.clear();
  copies_arrive_early = options.copies_early;
  host_runtime::run_grid = host_gpu::run_grid;
  const char* error = launch_decode(*p, device, nullptr);
  *out = report;
  return !fault.empty() ? fault.c_str() : error;
}

// find.cuh's answer for each number, of a unit whose parts have `part_tokens` x share, or half of that from
// `tail_slot` x share on; and the first number of each request and of the end.
const char* find_requests(const DecodeParams* p, int32_t part_tokens, int32_t tail_slot, int32_t share_64ths,
                          int32_t count, const int32_t* asked, int32_t* requests, int32_t* begins) {
  params = *p;
  params.cut.even_pages = -1;
  params.cut.part_tokens = part_tokens;
  params.cut.tail_slot = tail_slot;
  params.cut.tail_scale = 1;
  params.cut.by_part_tokens = divisor_of(part_tokens);
  params.cut.least_share = 0;
  fit = fit_lengths(params.cut, share_64ths, 64);
  for (int32_t r = 0; r <= params.batch; ++r) {
    begins[r] = uneven_number(fit, 1, r, params.kv_indptr[r] * params.page_size);
  }
  numbers = asked;
  found = requests;
  num_numbers = count;
  plain = find_all;
  fault.clear();
  inputs = inputs_of(params);
  options = {};
  std::mt19937 random(1);
  std::vector<Warp> warps;
  const auto block = make_block({0, 0, 0}, 32, 0, warps);
  run_warps(warps, random, [](Block*) {});
  return fault.empty() ? nullptr : fault.c_str();
}

}  // extern "C"
