// Partial results: which heads they are of, running sums of them, and a request's result.
#pragma once

#include "attention.cuh"

namespace evenkv {

// The query heads and the KV head of one of a unit's `heads_per_unit` heads.
struct UnitHeads {
  int32_t kv_head, head0, heads;
  __device__ __forceinline__ UnitHeads(int32_t unit, int32_t heads_per_unit, int32_t sub) {
    const int32_t virtual_head = unit * heads_per_unit + sub;
    kv_head = virtual_head / kGroupCuts;
    const int32_t group_cut = virtual_head % kGroupCuts;
    head0 = kv_head * kGroupSize + group_cut * kUnitHeads;
    heads = min(kUnitHeads, kGroupSize - group_cut * kUnitHeads);
  }
};

// A lane's share of a row (one head of a partial): quads of elements, `kRowLanes` quads apart.
constexpr int kRowLanes = kHeadDim >= 128 ? 32 : kHeadDim / 4;
constexpr int kQuads = kHeadDim / 4 / kRowLanes;

// One running sum of partials: sum of 2^(m_i - m) * (l_i, o_i), for the lane's share of a row.
struct Merged {
  float m = kNoMaximum, l = 0.0f;
  float4 o[kQuads] = {};

  // To a maximum that is no smaller.
  __device__ __forceinline__ void raise(float largest) {
    const float factor = exp2_fast(m - largest);
    m = largest;
    l *= factor;
#pragma unroll
    for (int k = 0; k < kQuads; ++k) {
      o[k].x *= factor;
      o[k].y *= factor;
      o[k].z *= factor;
      o[k].w *= factor;
    }
  }
  // One whose maximum is no larger.
  __device__ __forceinline__ void add(const Merged& other) {
    const float weight = exp2_fast(other.m - m);
    l += other.l * weight;
#pragma unroll
    for (int k = 0; k < kQuads; ++k) {
      o[k].x += other.o[k].x * weight;
      o[k].y += other.o[k].y * weight;
      o[k].z += other.o[k].z * weight;
      o[k].w += other.o[k].w * weight;
    }
  }
  // `lane` counts within the row, m and l stand at `ml_at`. What other blocks wrote is read from L2, past
  // this SM's L1; the block's own partials may lie in shared memory.
  template <bool kRemote>
  __device__ __forceinline__ void load(const float* row, int lane, int ml_at = kHeadDim) {
    const float2* const ml = reinterpret_cast<const float2*>(row + ml_at);
    const float4* const quads = reinterpret_cast<const float4*>(row) + lane;
    const float2 both = kRemote ? __ldcg(ml) : *ml;
    m = both.x;
    l = both.y;
#pragma unroll
    for (int k = 0; k < kQuads; ++k) o[k] = kRemote ? __ldcg(quads + k * kRowLanes) : quads[k * kRowLanes];
  }
  __device__ __forceinline__ void store(float* row, int lane, int ml_at = kHeadDim) const {
#pragma unroll
    for (int k = 0; k < kQuads; ++k) *reinterpret_cast<float4*>(row + (k * kRowLanes + lane) * 4) = o[k];
    if (lane == 0) *reinterpret_cast<float2*>(row + ml_at) = make_float2(m, l);
  }
  // A row of the request's output, and its lse.
  __device__ __forceinline__ void write(uint16_t* out, float* lse, float scale, int lane) const {
    const float factor = scale / l;
#pragma unroll
    for (int k = 0; k < kQuads; ++k) {
      *reinterpret_cast<uint2*>(out + (k * kRowLanes + lane) * 4) =
          make_uint2(pack_pair<kQueryIsHalf>(o[k].x * factor, o[k].y * factor),
                     pack_pair<kQueryIsHalf>(o[k].z * factor, o[k].w * factor));
    }
    if (lane == 0) *lse = m + log2f(l);
  }
};

__device__ __forceinline__ float value_scale(const DecodeParams& p, int32_t kv_head) {
  return p.v_scale != nullptr ? __ldg(p.v_scale + kv_head) : 1.0f;
}

__device__ __forceinline__ int64_t output_row(const DecodeParams& p, int32_t request, int32_t head) {
  return static_cast<int64_t>(request) * p.num_kv_heads * kGroupSize + head;
}

}  // namespace evenkv
