// The same source compiled for several vector widths, the widest that the processor has picked at run time:
// the build gives no -march, and a binary made on one machine may run on another.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#define EVENKV_HAS_AVX 1
#endif

#include "arguments.h"
#include "partial.h"
#include "schedule.h"

namespace evenkv {

constexpr int kTileTokens = 64;   // K and V rows of a tile (32 KB in bf16, head_dim 128) stay in L1 and L2
constexpr int kRowsAhead = 8;     // K rows fetched before they are needed: 2 KB in flight
constexpr int kMaxHeadBlock = 8;  // sums of 8 heads, one K vector and one of q fill 16 registers
constexpr float kLog2E = 1.44269504088896340736f;

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between inlined functions only

namespace baseline {  // SSE2 on x86-64, NEON on aarch64
#define EVENKV_LANES 4
#include "attend.h"
#undef EVENKV_LANES
}  // namespace baseline

// Clang has neither this pragma nor its effect on templates: it keeps the baseline.
#ifdef EVENKV_HAS_AVX
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
#define EVENKV_LANES 8
#include "attend.h"
#undef EVENKV_LANES
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx2,fma,prefer-vector-width=512")
namespace avx512 {
#define EVENKV_LANES 16
#include "attend.h"
#undef EVENKV_LANES
}  // namespace avx512
#pragma GCC pop_options
#endif

#pragma GCC diagnostic pop

using AttendChunk = void (*)(const Arguments&, const Chunk&, int, Workspace&, Partial);

// EVENKV_CPU_LANES (4, 8 or 16 floats) keeps a test, or a suspicious user, from wider vectors.
inline AttendChunk pick_attend_chunk() {
#ifdef EVENKV_HAS_AVX
  const char* wanted = std::getenv("EVENKV_CPU_LANES");
  const int widest = wanted ? std::atoi(wanted) : kMaxLanes;
  if (widest >= 16 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl")) {
    return avx512::attend_chunk;
  }
  if (widest >= 8 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return avx2::attend_chunk;
#endif
  return baseline::attend_chunk;
}

}  // namespace evenkv
