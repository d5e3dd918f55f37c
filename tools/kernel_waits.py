"""A change of merges that no version has yet: the last part of a request waits for the others.

Parts of a cut request end with a chain of trips today: partial, counter, partials of the others, output.
Where all parts run at once, the last one can wait for the partials themselves: a word of scratch that has all
bits set is not there yet, each word arrives as a whole, and who has read it sets it back. No fence, no
counter, no barrier of the block; sums are made in the same order, so the bits stay. A cluster waits for lower
numbers alone, which begin before it, whatever else runs on the device.

Predicted: 2 to 2.5 us less where even requests are cut and all parts run at once (b1 L65536 kv4 bf16 40.0 to
37.7, b1 L131072 kv4 fp8 42.0 to 39.7). Not measured. What it computes is tested on the CPU
(tests/test_kernel_waits.py): the bits of the counters, whatever the cut.
"""

# ruff: noqa: E501  # the texts are lines of the kernel's sources
from __future__ import annotations

from kernel_edits import Edit, after, before

WAITING: list[Edit] = [
    after(
        "params.h",
        """  int32_t* counters;  // zero before a launch, zero again after it
""",
        """  float* waited;      // scratch: all bits set before a launch, set again after it
  // Not 0: all parts of even, of uneven requests run at once, and the last one waits for the others.
  int32_t even_waits, uneven_waits;""",
    ),
    after(
        "scratch.cuh",
        """  float* partials = nullptr;
""",
        """  float* waited = nullptr;""",
    ),
    after(
        "scratch.cuh",
        """  const bool bad = failed(cudaMalloc(&scratch.partials, scratch.partial_bytes), "allocating scratch") ||
""",
        """                   failed(cudaMalloc(&scratch.waited, scratch.partial_bytes), "allocating scratch") ||""",
    ),
    after(
        "scratch.cuh",
        """                   failed(cudaMemsetAsync(scratch.counters, 0, counter_bytes, side), "clearing counters") ||
""",
        """                   failed(cudaMemsetAsync(scratch.waited, 0xff, scratch.partial_bytes, side), "clearing scratch") ||""",
    ),
    after(
        "scratch.cuh",
        """  cudaFree(scratch.partials);
""",
        """  cudaFree(scratch.waited);""",
    ),
    (
        "scratch.cuh",
        """    Scratch fresh{nullptr, nullptr, partial_bytes, num_counters};
""",
        """    Scratch fresh{nullptr, nullptr, nullptr, partial_bytes, num_counters};
""",
    ),
    after(
        "kernel.cu",
        """    p.counters = scratch.counters;
""",
        """    p.waited = scratch.waited;
    // A cluster that takes several parts could wait for one that has not begun. Numbers that nobody owns
    // leave at once.
    const int64_t most = std::min<int64_t>(room->clusters[choice.splits - 1] / units, choice.clusters);
    p.even_waits = p.cut.even_parts * p.batch <= most;
    // Where nobody looks whether kv_indptr falls, a request may lack a part.
    const int64_t own = p.cut.alone != 0 ? ceil_div(p.cut.numbers, choice.splits) : p.cut.numbers;
    p.uneven_waits = p.cut.even_pages >= 0 && own <= most;""",
    ),
    before(
        "ptx.cuh",
        """__device__ __forceinline__ void acquire() {""",
        """// Words that another block may be writing: each arrives as a whole, by itself.
__device__ __forceinline__ float4 load_relaxed(const float4* from) {
  float4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(from));
  return v;
}
__device__ __forceinline__ float2 load_relaxed(const float2* from) {
  float2 v;
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(from));
  return v;
}
__device__ __forceinline__ void store_relaxed(float4* to, float4 v) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y),
               "f"(v.z), "f"(v.w));
}
__device__ __forceinline__ void store_relaxed(float2* to, float2 v) {
  asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(v.x), "f"(v.y));
}
__device__ __forceinline__ void wait_for_lanes(uint32_t lanes) { __syncwarp(lanes); }
__device__ __forceinline__ void give_way() { __nanosleep(20); }
[[noreturn]] __device__ __forceinline__ void give_up() {
  __trap();
  __builtin_unreachable();
}""",
    ),
    before(
        "merge.cuh",
        """  // A row of the request's output, and its lse.
""",
        """  // To a block that waits for it: no word of it has all bits set, which stands for what is not there yet.
  __device__ __forceinline__ void send(float* row, int lane) const {
#pragma unroll
    for (int k = 0; k < kQuads; ++k) {
      const float4 v = {there(o[k].x), there(o[k].y), there(o[k].z), there(o[k].w)};
      store_relaxed(reinterpret_cast<float4*>(row) + k * kRowLanes + lane, v);
    }
    if (lane == 0)
      store_relaxed(reinterpret_cast<float2*>(row + kHeadDim), make_float2(there(m), there(l)));
  }
  // What is there by now of one that was sent; whether that is all.
  __device__ __forceinline__ void look(const float* row, int lane) {
    const float2 both = load_relaxed(reinterpret_cast<const float2*>(row + kHeadDim));
    m = both.x;
    l = both.y;
#pragma unroll
    for (int k = 0; k < kQuads; ++k)
      o[k] = load_relaxed(reinterpret_cast<const float4*>(row) + k * kRowLanes + lane);
  }
  __device__ __forceinline__ bool is_there() const {
    bool all = is_there(m) && is_there(l);
#pragma unroll
    for (int k = 0; k < kQuads; ++k)
      all = all && is_there(o[k].x) && is_there(o[k].y) && is_there(o[k].z) && is_there(o[k].w);
    return all;
  }
  // Nothing is there again.
  static __device__ __forceinline__ void take(float* row, int lane) {
    const float none = __uint_as_float(~0u);
#pragma unroll
    for (int k = 0; k < kQuads; ++k)
      store_relaxed(reinterpret_cast<float4*>(row) + k * kRowLanes + lane, float4{none, none, none, none});
    if (lane == 0) store_relaxed(reinterpret_cast<float2*>(row + kHeadDim), make_float2(none, none));
  }
  static __device__ __forceinline__ bool is_there(float word) { return __float_as_uint(word) != ~0u; }
  static __device__ __forceinline__ float there(float word) {
    return is_there(word) ? word : __uint_as_float(0x7fffffffu);
  }""",
    ),
    before(
        "merge_blocks.cuh",
        """// Adds up the block's warps, or the cluster's blocks. The result goes""",
        """// Whether the last of a request's parts waits for the others, which all run beside it: they began before,
// since clusters begin in the order of their numbers. Else whoever comes last adds up.
__device__ __forceinline__ bool waits(const DecodeParams& p, const Part& part) {
  return (part.even ? p.even_waits : p.uneven_waits) != 0;
}

// How often a block asks until it gives up: seconds. Only a kv_indptr that changes meanwhile lets it.
constexpr uint32_t kMostAsked = 1u << 26;

// One row of a part's partial, `own`, of a request whose parts wait: sent to the last part of its group, which
// adds the group's up in order, as merge_parts would, and sends the sum to the last group's. A part that
// sends is not heard of again. Apart from the kernel's own code, as above.
template <int kHeads>
__device__ __noinline__ void add_waiting(const DecodeParams& p, const Part part, int32_t sub, int32_t row,
                                         int row_lane, Merged own) {
  constexpr int kBatch = kQuads > 1 ? 4 : 8;
  const UnitHeads heads(blockIdx.y, kHeads, sub);
  const int lane = threadIdx.x & 31;
  const uint32_t lanes = kRowLanes == 32 ? ~0u : ((1u << kRowLanes) - 1) << (lane / kRowLanes * kRowLanes);
  const auto row_of = [&](int32_t index) {
    const int64_t place = static_cast<int64_t>(blockIdx.y) * p.cut.places + part.place(index);
    return p.waited + (place * kHeads + sub) * kPartialFloats + row * kPartialStride;
  };
  const int32_t groups = part.count > kMostAtOnce ? part.count / kGroup : 1;
  const int32_t group = groups > 1 ? min(part.index / kGroup, groups - 1) : 0;
  int32_t first = group * kGroup, stride = 1;
  int32_t count = group == groups - 1 ? part.count - first : kGroup;  // of those to be added, own the last
  bool is_group = groups > 1;
  if (part.index != first + count - 1) {
    own.send(row_of(part.index), row_lane);
    return;
  }
#pragma unroll 1
  while (true) {
    Merged sum;
#pragma unroll 1
    for (int32_t begin = 0; begin < count; begin += kBatch) {
      Merged parts[kBatch];
      uint32_t asked = 0;
#pragma unroll 1
      while (begin < count - 1) {
        bool all = true;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int32_t at = begin + i < count - 1 ? begin + i : begin;  // one that is not taken yet
          parts[i].look(row_of(first + at * stride), row_lane);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) all = all && parts[i].is_there();
        if (all) break;
        if (++asked == kMostAsked) give_up();
        give_way();
      }
      wait_for_lanes(lanes);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (begin + i < count - 1) Merged::take(row_of(first + (begin + i) * stride), row_lane);
      }
      float largest = sum.m;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (begin + i >= count - 1) parts[i] = own;
        largest = fmaxf(largest, parts[i].m);
      }
      sum.raise(largest);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (begin + i < count) sum.add(parts[i]);
      }
    }
    own = sum;
    if (!is_group) {
      write_row(p, part.request, heads, row, row_lane, own);
      return;
    }
    if (group != groups - 1) {
      own.send(row_of(part.index), row_lane);
      return;
    }
    is_group = false;
    first = kGroup - 1;  // the last of each group, but for this one
    stride = kGroup;
    count = groups;
  }
}
""",
    ),
    before(
        "merge_blocks.cuh",
        """                     } else if (!kUncut && part.count > 1) {
""",
        """                     } else if (!kUncut && part.count > 1 && waits(p, part)) {
                       add_waiting<kHeads>(p, part, sub, row, row_lane, sum);""",
    ),
    (
        "kernel.cuh",
        """  if (!kUncut && part.count > 1) merge_parts(""",
        """  if (!kUncut && part.count > 1 && !waits(p, part)) merge_parts(""",
    ),
]
