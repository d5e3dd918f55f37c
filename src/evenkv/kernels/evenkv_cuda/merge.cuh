// Merging partial results: of the warps of a block (through shared memory) and of the chunks of a cut request
// (through scratch, by the block that finishes last, in chunk order: the bits do not depend on who that is).
#pragma once

#include "attention.cuh"

namespace evenkv {

// Which query and KV heads a warp's unit means. A block's unit holds kHeads KV heads, one for each warp
// residue.
struct UnitHeads {
  int32_t kv_head, head0, heads;
  __device__ __forceinline__ UnitHeads(int32_t unit, int32_t heads_per_block, int32_t sub) {
    const int32_t virtual_head = unit * heads_per_block + sub;
    kv_head = virtual_head / kParts;
    const int32_t part = virtual_head % kParts;
    head0 = kv_head * kGroupSize + part * kUnitHeads;
    heads = min(kUnitHeads, kGroupSize - part * kUnitHeads);
  }
};

// Named barriers: the chunk's pieces are there (streams arrive, merging warps wait); among the merging warps.
constexpr int kPiecesReady = 1, kMergeBarrier = 2;

// One running sum of partials: sum of 2^(m_i - m) * (l_i, o_i).
struct Merged {
  float m = kNoMaximum, l = 0.0f;
  float4 o = {0.0f, 0.0f, 0.0f, 0.0f};

  __device__ __forceinline__ void add(float other_m, float other_l, float4 other) {
    const float largest = fmaxf(m, other_m);
    const float keep = exp2_fast(m - largest), take = exp2_fast(other_m - largest);
    m = largest;
    l = l * keep + other_l * take;
    o.x = o.x * keep + other.x * take;
    o.y = o.y * keep + other.y * take;
    o.z = o.z * keep + other.z * take;
    o.w = o.w * keep + other.w * take;
  }

  // Into a head's row of a partial: four elements from `d` on, and m and l with the first four.
  __device__ __forceinline__ void store(float* row, int d) const {
    *reinterpret_cast<float4*>(row + d) = o;
    if (d == 0) *reinterpret_cast<float2*>(row + kHeadDim) = make_float2(m, l);
  }
};

__device__ __forceinline__ float value_scale(const DecodeParams& p, int32_t kv_head) {
  return p.v_scale != nullptr ? __ldg(p.v_scale + kv_head) : 1.0f;
}

__device__ __forceinline__ int64_t output_row(const DecodeParams& p, int32_t request, int32_t head) {
  return static_cast<int64_t>(request) * p.num_kv_heads * kGroupSize + head;
}

// Writes four output elements of one head, and lse with the first four.
__device__ __forceinline__ void write_output(const DecodeParams& p, int32_t request, int32_t head, int32_t d,
                                             const Merged& sum, float scale) {
  const int64_t row = output_row(p, request, head);
  const float factor = scale / sum.l;
  const uint2 packed = {pack_pair<kQueryIsHalf>(sum.o.x * factor, sum.o.y * factor),
                        pack_pair<kQueryIsHalf>(sum.o.z * factor, sum.o.w * factor)};
  *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.output) + row * kHeadDim + d) = packed;
  if (d == 0) p.lse[row] = sum.m + log2f(sum.l);
}

// A whole request that one warp attended to: straight from its registers.
__device__ __forceinline__ void write_whole_piece(const DecodeParams& p, int32_t request,
                                                  const UnitHeads& unit, const Attention& a) {
  const int lane = threadIdx.x & 31;
  const float scale = value_scale(p, unit.kv_head);
#pragma unroll
  for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int head = n * 8 + (lane % 4) * 2 + j;
      if (head >= unit.heads) continue;
      const int64_t row = output_row(p, request, unit.head0 + head);
      uint16_t* out = static_cast<uint16_t*>(p.output) + row * kHeadDim;
      const float factor = scale / a.l[n][j];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint32_t both = pack_pair<kQueryIsHalf>(a.o[step][n][j] * factor, a.o[step][n][2 + j] * factor);
        if constexpr (kIsFp8) {
          *reinterpret_cast<uint32_t*>(out + Attention::head_dim_of(step, 0)) = both;
        } else {
          out[Attention::head_dim_of(step, 0)] = static_cast<uint16_t>(both);
          out[Attention::head_dim_of(step, 1)] = static_cast<uint16_t>(both >> 16);
        }
      }
      if (lane < 4) p.lse[row] = a.m[n][j] + log2f(a.l[n][j]);
    }
  }
}

// A cut piece that a warp left for its block. Index 0: the warp's first piece when others followed it (its
// partial waits in scratch); index 1: its last piece.
struct Piece {
  int32_t request, unit;
  uint32_t flags;  // kFirstOfPiece marks a piece that is there; kStartsBefore, kEndsAfter
};

// A request that a chunk boundary cuts: its partials are the chunks' scratch slots from first to last.
// Merging goes in two steps, so that no block sums hundreds of partials while its streams wait: whoever
// completes a group of kGroupChunks chunks sums the group into the slot of its first chunk, whoever completes
// the last group sums those.
constexpr int kGroupChunks = 16;
struct CutRequest {
  int32_t request, unit;  // request is -1 where there is none
  int32_t first_chunk, last_chunk;
  int32_t group_first;  // of the group that this block's chunk belongs to

  __device__ __forceinline__ int32_t chunks() const { return last_chunk - first_chunk + 1; }
  __device__ __forceinline__ int32_t groups() const { return (chunks() + kGroupChunks - 1) / kGroupChunks; }
  __device__ __forceinline__ int32_t group_chunks() const {
    return min(kGroupChunks, last_chunk - group_first + 1);
  }
};

// Scratch slot of a chunk: 0 holds the request that began before the chunk, 1 the one that begins in it.
__device__ __forceinline__ float* chunk_slot(const DecodeParams& p, int32_t chunk, int slot,
                                             int heads_per_block, int sub) {
  return p.partials + ((static_cast<int64_t>(chunk) * 2 + slot) * heads_per_block + sub) * kPartialFloats;
}

// All merging threads: sums the partials of chunks `begin`, `begin + stride` ... up to `end`, in this order.
// The sum becomes the request's output, or (into_slot) the partial of chunk `begin`. Threads may form groups;
// each sums every kThreadGroups-th partial, and the first adds the groups' sums in order.
template <int kHeads>
__device__ __forceinline__ void merge_chunks(const DecodeParams& p, const CutRequest& cut, int32_t begin,
                                             int32_t end, int32_t stride, bool into_slot, Merged* shared) {
  constexpr int kQuads = kHeadDim / 4;
  constexpr int kElements = kHeads * kUnitHeads * kQuads;
  constexpr int kThreadGroups = kElements >= kMergeThreads ? 1 : kMergeThreads / kElements;
  // Partials loaded together: a trip to memory takes far longer than the sum. Large accumulators leave
  // registers for fewer.
  constexpr int kBatch = kSteps * kColumnBlocks > 8 ? 4 : 16;
  const int thread = threadIdx.x - kStreamThreads;
  const int group = kThreadGroups == 1 ? 0 : thread / kElements;
  for (int base = 0; base < kElements; base += kMergeThreads) {
    const int element = base + (kThreadGroups == 1 ? thread : thread % kElements);
    const bool active = element < kElements && group < kThreadGroups;
    const int sub = element / (kUnitHeads * kQuads), head = element / kQuads % kUnitHeads,
              d = element % kQuads * 4;
    Merged sum;
    if (active) {
#pragma unroll 1
      for (int32_t chunk = begin + group * stride; chunk <= end; chunk += kThreadGroups * kBatch * stride) {
        float2 ml[kBatch];
        float4 o[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int32_t c = chunk + i * kThreadGroups * stride;
          ml[i] = {kNoMaximum, 0.0f};
          o[i] = {0.0f, 0.0f, 0.0f, 0.0f};
          if (c <= end) {
            const float* row = chunk_slot(p, c, c == cut.first_chunk, kHeads, sub) + head * kPartialStride;
            ml[i] = __ldcg(reinterpret_cast<const float2*>(row + kHeadDim));
            o[i] = __ldcg(reinterpret_cast<const float4*>(row + d));
          }
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) sum.add(ml[i].x, ml[i].y, o[i]);
      }
    }
    if constexpr (kThreadGroups > 1) {
      if (active && group > 0) shared[(group - 1) * kElements + element] = sum;
    }
    barrier_wait(kMergeBarrier, kMergeThreads);  // all have read: a slot may be written
    if (!active || group > 0) continue;
    if constexpr (kThreadGroups > 1) {
#pragma unroll
      for (int other = 0; other < kThreadGroups - 1; ++other) {
        const Merged& s = shared[other * kElements + element];
        sum.add(s.m, s.l, s.o);
      }
    }
    if (into_slot) {
      sum.store(chunk_slot(p, begin, begin == cut.first_chunk, kHeads, sub) + head * kPartialStride, d);
    } else {
      const UnitHeads unit(cut.unit, kHeads, sub);
      if (head < unit.heads) {
        write_output(p, cut.request, unit.head0 + head, d, sum, value_scale(p, unit.kv_head));
      }
    }
  }
  barrier_wait(kMergeBarrier, kMergeThreads);  // sums and slots are written
}

}  // namespace evenkv
