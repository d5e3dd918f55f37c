// Stands in for the kernel's ptx.cuh and for CUDA itself, so that a host compiler builds the kernel's
// sources.
//
// A lane is a fiber. Lanes exchange words where CUDA has a collective (shuffles, ballots, ldmatrix, mma) and
// give way where one waits (barriers). Everything runs in one thread: this finds wrong indices, protocols
// that lose a part or hang, reads outside the inputs, and copies used before they arrived, not missing
// fences.
#pragma once

#include <ucontext.h>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstring>

#include <algorithm>
#include <array>
#include <deque>
#include <initializer_list>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__  // after the standard headers, which use the name
#define __launch_bounds__(...)
#define __grid_constant__

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

#include "row_maps.cuh"
#include "tuning.cuh"

namespace evenkv {

using std::max;
using std::min;

namespace host_gpu {

using Words = std::array<uint64_t, 6>;

struct Copy {
  uint8_t* dst;
  const uint8_t* src;
  uint32_t valid;  // of 16 bytes
};
struct Exchange {
  int arrived = 0;
  uint32_t phase = 0;
  Words words[2][32];  // by parity of the phase: a slow lane still reads while a fast one deposits
};
struct Barrier {
  int arrived = 0;
  uint32_t phase = 0;
};
struct Index {
  uint32_t x = 0, y = 0, z = 0;
};
// Of a barrier at which bytes arrive: what was promised and asked for in the phase.
struct Arrivals {
  uint32_t phase = 0, promised = 0, asked = 0;
  std::vector<Copy> copies;
};
struct Block;
struct Cluster {
  std::vector<Block*> blocks;
  Barrier barrier;
};
struct Block {
  std::vector<uint8_t> storage;
  uint8_t* shared;
  Index index;
  Cluster* cluster = nullptr;
  Barrier barrier;
  std::vector<Exchange> warps;
  size_t running;  // warps
  std::map<uint32_t, Arrivals> arrivals;
};
struct Lane {
  ucontext_t context;
  jmp_buf resume;
  std::unique_ptr<uint8_t[]> stack;
  bool started = false, done = false;
  Block* block = nullptr;
  uint32_t thread = 0;
  std::vector<Copy> open;                // asynchronous copies not committed yet
  std::deque<std::vector<Copy>> groups;  // committed, not arrived
};

inline Lane* current;
inline jmp_buf scheduler;
inline uint64_t progress;         // moves unless all lanes wait
inline bool copies_arrive_early;  // at once, or only when a lane waits for them
inline Index grid;
inline std::string fault;
inline int64_t tensor_copies;  // of the launch
struct Memory {
  const char *begin, *end;

  bool holds(const void* p, size_t bytes) const {
    return static_cast<const char*>(p) >= begin && static_cast<const char*>(p) + bytes <= end;
  }
};
inline std::vector<Memory> inputs;  // what copies and read-only loads may read
inline Memory partials, counters;   // of this launch

inline bool is_input(const void* p, size_t bytes) {
  return std::any_of(inputs.begin(), inputs.end(), [&](const Memory& m) { return m.holds(p, bytes); });
}

inline void give_way() {
  if (!_setjmp(current->resume)) _longjmp(scheduler, 1);
}

// Deposits the lane's words; returns all lanes' once they are there.
inline const Words* collect(std::initializer_list<uint64_t> words) {
  Exchange& exchange = current->block->warps[current->thread / 32];
  const uint32_t phase = exchange.phase;
  std::copy(words.begin(), words.end(), exchange.words[phase & 1][current->thread % 32].begin());
  if (++exchange.arrived == 32) {
    exchange.arrived = 0;
    ++exchange.phase;
    ++progress;
  } else {
    while (exchange.phase == phase) give_way();
  }
  return exchange.words[phase & 1];
}

inline void meet(Barrier& b, size_t warps) {
  const uint32_t phase = b.phase;
  if (++b.arrived == static_cast<int>(warps) * 32) {
    b.arrived = 0;
    ++b.phase;
    ++progress;
  } else {
    while (b.phase == phase) give_way();
  }
}

inline uint8_t* shared(uint32_t address) { return current->block->shared + address; }

inline void arrive(const Copy& copy) {
  memset(copy.dst, 0, 16);
  memcpy(copy.dst, copy.src, copy.valid);
}

inline float as_float(uint32_t bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
inline uint32_t as_bits(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  return bits;
}

inline uint32_t to_bf16(float f) {
  const uint32_t bits = as_bits(f);
  return std::isnan(f) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint32_t to_half(float f) {
  const uint32_t sign = as_bits(f) >> 16 & 0x8000;
  f = std::fabs(f);
  if (std::isnan(f)) return 0x7fff;
  if (f >= 65520.0f) return sign | 0x7c00;
  const int exponent = f == 0.0f ? -14 : max(std::ilogb(f), -14);
  // A carry into the next exponent is right by itself; subnormals have exponent field 0.
  const uint32_t mantissa = static_cast<uint32_t>(std::nearbyint(std::ldexp(f, 10 - exponent)));
  return sign | (static_cast<uint32_t>(exponent + 14) * 1024 + mantissa);
}
inline float half_value(uint32_t bits) {
  const int exponent = bits >> 10 & 31;
  const float mantissa = static_cast<float>(bits & 1023);
  const float size = exponent == 31  ? (mantissa == 0 ? INFINITY : NAN)
                     : exponent == 0 ? std::ldexp(mantissa, -24)
                                     : std::ldexp(1024 + mantissa, exponent - 25);
  return bits & 0x8000 ? -size : size;
}
inline float from_half(uint32_t bits) {
  static const std::vector<float> table = [] {
    std::vector<float> values(65536);
    for (uint32_t i = 0; i < 65536; ++i) values[i] = half_value(i);
    return values;
  }();
  return table[bits];
}
inline float e4m3_value(uint32_t bits) {
  const int exponent = bits >> 3 & 15;
  const float mantissa = static_cast<float>(bits & 7);
  const float size = (bits & 0x7f) == 0x7f ? NAN
                     : exponent == 0       ? std::ldexp(mantissa, -9)
                                           : std::ldexp(8 + mantissa, exponent - 10);
  return bits & 0x80 ? -size : size;
}

inline uint32_t pack_f16(float low, float high) { return to_half(low) | to_half(high) << 16; }
inline uint32_t pack_bf16(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }
inline float mma_value(uint32_t bits) { return kMmaHalf ? from_half(bits) : as_float(bits << 16); }
// Half `index` of a register.
inline uint32_t half_of(uint64_t word, int index) { return word >> 16 * index & 0xffff; }

}  // namespace host_gpu
}  // namespace evenkv

#define threadIdx (evenkv::host_gpu::Index{evenkv::host_gpu::current->thread})
#define blockIdx (evenkv::host_gpu::current->block->index)
inline const evenkv::host_gpu::Index& gridDim = evenkv::host_gpu::grid;

template <typename T>
T __ldg(const T* p) {
  if (evenkv::host_gpu::is_input(p, sizeof(T))) return *p;
  evenkv::host_gpu::fault = "a load reads outside the inputs";
  return {};
}
template <typename T>
T __ldcg(const T* p) {
  if (evenkv::host_gpu::partials.holds(p, sizeof(T))) return *p;
  evenkv::host_gpu::fault = "a load reads outside the launch's partials";
  return {};
}
inline int __ffs(uint32_t x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline float __uint_as_float(uint32_t bits) { return evenkv::host_gpu::as_float(bits); }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t r = 0;
  for (int i = 0; i < 4; ++i) {
    r |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  }
  return r;
}

inline void __syncwarp() { evenkv::host_gpu::collect({}); }
inline void __syncthreads() {
  evenkv::host_gpu::Block& block = *evenkv::host_gpu::current->block;
  evenkv::host_gpu::meet(block.barrier, block.warps.size());
}
inline uint32_t __ballot_sync(uint32_t, bool vote) {
  const auto* words = evenkv::host_gpu::collect({vote});
  uint32_t r = 0;
  for (int lane = 0; lane < 32; ++lane) r |= static_cast<uint32_t>(words[lane][0]) << lane;
  return r;
}
inline bool __any_sync(uint32_t mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
template <typename T>
T __shfl_sync(uint32_t, T value, int lane) {
  uint64_t word = 0;
  memcpy(&word, &value, sizeof value);
  const auto* words = evenkv::host_gpu::collect({word});
  T r;
  memcpy(&r, &words[lane & 31][0], sizeof r);
  return r;
}
template <typename T>
T __shfl_xor_sync(uint32_t mask, T value, int bits) {
  return __shfl_sync(mask, value, static_cast<int>(evenkv::host_gpu::current->thread % 32) ^ bits);
}
template <typename T>
T __shfl_up_sync(uint32_t mask, T value, int lanes) {
  const int lane = static_cast<int>(evenkv::host_gpu::current->thread % 32);
  return __shfl_sync(mask, value, lane < lanes ? lane : lane - lanes);
}
inline uint32_t __reduce_add_sync(uint32_t, uint32_t value) {
  const auto* words = evenkv::host_gpu::collect({value});
  uint32_t r = 0;
  for (int lane = 0; lane < 32; ++lane) r += static_cast<uint32_t>(words[lane][0]);
  return r;
}
inline uint32_t __reduce_max_sync(uint32_t, uint32_t value) {
  const auto* words = evenkv::host_gpu::collect({value});
  uint32_t r = 0;
  for (int lane = 0; lane < 32; ++lane) r = std::max(r, static_cast<uint32_t>(words[lane][0]));
  return r;
}

namespace evenkv {

inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(p) - host_gpu::current->block->shared);
}

// Until it arrives, a copy's destination holds NaN.
inline void copy_async_16(uint32_t dst, const void* src, uint32_t valid) {
  const host_gpu::Copy copy = {host_gpu::shared(dst), static_cast<const uint8_t*>(src), valid};
  const bool aligned = dst % 16 == 0 && (valid == 0 || reinterpret_cast<uintptr_t>(src) % 16 == 0);
  if (!aligned) host_gpu::fault = "a copy is not aligned";
  if (valid > 0 && !host_gpu::is_input(src, valid)) {
    host_gpu::fault = "a copy reads outside the inputs";
    return;
  }
  if (host_gpu::copies_arrive_early) {
    host_gpu::arrive(copy);
  } else {
    memset(copy.dst, 0xff, 16);
    host_gpu::current->open.push_back(copy);
  }
}
inline void copy_async_commit() {
  host_gpu::current->groups.push_back(std::move(host_gpu::current->open));
  host_gpu::current->open.clear();
}
template <int kPending>
void copy_async_wait() {
  auto& groups = host_gpu::current->groups;
  for (; groups.size() > kPending; groups.pop_front()) {
    for (const host_gpu::Copy& copy : groups.front()) host_gpu::arrive(copy);
  }
}
inline void start_barrier(uint32_t barrier) {
  if (barrier % 8 != 0) host_gpu::fault = "a barrier is not aligned";
  host_gpu::current->block->arrivals[barrier] = {};
}
inline void fence_barriers() {}
inline void fence_for_copies() {}
inline void prefetch_map(const RowMap&) {}
inline void expect_bytes(uint32_t barrier, uint32_t bytes) {
  auto& arrivals = host_gpu::current->block->arrivals;
  if (arrivals.count(barrier) == 0 || arrivals[barrier].promised != 0) {
    host_gpu::fault = "bytes are promised at a barrier that was not started, or twice";
  }
  arrivals[barrier].promised = bytes;
}
inline void copy_16_rows(uint32_t dst, const RowMap& map, int32_t first, int32_t near, int32_t far,
                         int32_t page, uint32_t barrier) {
  host_gpu::Arrivals& arrivals = host_gpu::current->block->arrivals[barrier];
  const int64_t at[4] = {first, near, far, page};
  for (int i = 0; i < 4; ++i) {
    const bool inside = at[i] >= 0 && at[i] + map.box[i] <= map.sizes[i];
    if (map.cache == nullptr || !inside) host_gpu::fault = "a tensor copy reads outside the cache";
  }
  if (!host_gpu::fault.empty()) return;
  const uint8_t* src = map.cache + first;
  for (int i = 0; i < 3; ++i) src += at[i + 1] * map.strides[i];
  const uint64_t row_stride = map.box[1] == 16 ? map.strides[0] : map.strides[1];
  const uint32_t mask = map.box[0] == 128 ? 7 : 3;
  if (dst % (map.box[0] * (mask + 1)) != 0) host_gpu::fault = "a tensor copy is not aligned";
  for (uint32_t row = 0; row < 16; ++row) {
    for (uint32_t byte = 0; byte < map.box[0]; byte += 16) {
      const uint32_t to = dst + row * map.box[0] + byte, swizzled = to ^ (to >> 7 & mask) << 4;
      const host_gpu::Copy copy = {host_gpu::shared(swizzled), src + row * row_stride + byte, 16};
      if (!host_gpu::is_input(copy.src, 16)) host_gpu::fault = "a tensor copy reads outside the inputs";
      if (host_gpu::copies_arrive_early) {
        if (host_gpu::fault.empty()) host_gpu::arrive(copy);
      } else {
        memset(copy.dst, 0xff, 16);
        arrivals.copies.push_back(copy);
      }
      arrivals.asked += 16;
    }
  }
  ++host_gpu::tensor_copies;
}
inline void wait_for_bytes(uint32_t barrier, uint32_t parity) {
  host_gpu::Arrivals& arrivals = host_gpu::current->block->arrivals[barrier];
  if ((arrivals.phase & 1) != parity) return;  // another lane saw it end
  if (arrivals.promised == 0 || arrivals.promised != arrivals.asked) {
    host_gpu::fault = "a lane waits for bytes that nobody asked for";
    return;
  }
  for (const host_gpu::Copy& copy : arrivals.copies) host_gpu::arrive(copy);
  arrivals = {arrivals.phase + 1};
}
template <typename T>
const T* opaque(const T* p) {
  return p;
}
inline void prefetch_l2(const void* p) {
  if (!host_gpu::is_input(p, 4)) host_gpu::fault = "a prefetch lies outside the inputs";
}
template <bool kOrders>
inline void cluster_barrier() {
  host_gpu::Cluster& cluster = *host_gpu::current->block->cluster;
  host_gpu::meet(cluster.barrier, cluster.blocks.size() * cluster.blocks[0]->warps.size());
}
inline const float* shared_of_rank(const float* own, int32_t rank) {
  const auto at = reinterpret_cast<const uint8_t*>(own) - host_gpu::current->block->shared;
  return reinterpret_cast<const float*>(host_gpu::current->block->cluster->blocks[rank]->shared + at);
}
inline int32_t count_in_release(int32_t* counter) {
  if (!host_gpu::counters.holds(counter, sizeof *counter)) {
    host_gpu::fault = "an arrival counts outside the launch's counters";
    return -1;
  }
  ++host_gpu::progress;
  return (*counter)++;
}
inline void acquire() {}

inline void load_matrix(uint32_t (&r)[4], uint32_t address, bool transposed) {
  const auto* rows = host_gpu::collect({address});
  const int g = host_gpu::current->thread % 32 / 4, c = host_gpu::current->thread % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    const auto element = [&](int row, int column) -> uint32_t {
      uint16_t value;
      memcpy(&value, host_gpu::shared(static_cast<uint32_t>(rows[8 * i + row][0])) + 2 * column, 2);
      return value;
    };
    r[i] = transposed ? element(c, g) | element(c + 1, g) << 16 : element(g, c) | element(g, c + 1) << 16;
  }
  __syncwarp();  // all have read
}
inline void load_matrix_x4(uint32_t (&r)[4], uint32_t address) { load_matrix(r, address, false); }
inline void load_matrix_x4_transposed(uint32_t (&r)[4], uint32_t address) { load_matrix(r, address, true); }

inline uint32_t transpose_8x8(uint32_t a) {
  const auto* words = host_gpu::collect({a});
  const int g = host_gpu::current->thread % 32 / 4, c = host_gpu::current->thread % 4 * 2;
  const auto element = [&](int row, int column) {
    return host_gpu::half_of(words[row * 4 + column / 2][0], column % 2);
  };
  return element(c, g) | element(c + 1, g) << 16;
}

inline void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const auto* words = host_gpu::collect({a[0], a[1], a[2], a[3], b0, b1});
  const int g = host_gpu::current->thread % 32 / 4, c = host_gpu::current->thread % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    const int row = g + i / 2 * 8, column = c + i % 2;
    float sum = 0.0f;
    for (int k = 0; k < 16; ++k) {
      const auto& left = words[row % 8 * 4 + k % 8 / 2];
      const auto& right = words[column * 4 + k % 8 / 2];
      sum += host_gpu::mma_value(host_gpu::half_of(left[row / 8 + k / 8 * 2], k % 2)) *
             host_gpu::mma_value(host_gpu::half_of(right[4 + k / 8], k % 2));
    }
    d[i] += sum;
  }
}

inline float exp2_fast(float x) { return std::exp2(x); }
template <bool kHalf>
inline uint32_t pack_pair(float low, float high) {
  return kHalf ? host_gpu::pack_f16(low, high) : host_gpu::pack_bf16(low, high);
}
inline uint32_t pack_mma(float low, float high) { return pack_pair<kMmaHalf>(low, high); }
inline float2 unpack_mma(uint32_t r) {
  return {host_gpu::mma_value(r & 0xffff), host_gpu::mma_value(r >> 16)};
}
inline uint32_t widen_fp8x2(uint32_t pair) {
  if (kKvType == kE5M2) return (pair & 0xff) << 8 | (pair & 0xff00) << 16;
  return host_gpu::pack_f16(host_gpu::e4m3_value(pair & 0xff), host_gpu::e4m3_value(pair >> 8 & 0xff));
}
struct Wide {
  uint32_t low, high;
};
inline Wide widen_fp8x4(uint32_t four) { return {widen_fp8x2(four), widen_fp8x2(four >> 16)}; }

}  // namespace evenkv
