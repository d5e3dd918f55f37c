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

// Named barriers: the chunk's pieces are there (streams arrive, merging warps wait); among the merging warps;
// among them and the streams, for the block's last chunk.
constexpr int kPiecesReady = 1, kMergeBarrier = 2, kTeamBarrier = 3;

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
  // `lane` counts within the row. What other blocks wrote is read from L2, past this SM's L1; the block's own
  // partials may lie in shared memory.
  template <bool kRemote>
  __device__ __forceinline__ void load(const float* row, int lane) {
    const float2* const ml = reinterpret_cast<const float2*>(row + kHeadDim);
    const float4* const quads = reinterpret_cast<const float4*>(row) + lane;
    const float2 both = kRemote ? __ldcg(ml) : *ml;
    m = both.x;
    l = both.y;
#pragma unroll
    for (int k = 0; k < kQuads; ++k) o[k] = kRemote ? __ldcg(quads + k * kRowLanes) : quads[k * kRowLanes];
  }
  __device__ __forceinline__ void store(float* row, int lane) const {
#pragma unroll
    for (int k = 0; k < kQuads; ++k) *reinterpret_cast<float4*>(row + (k * kRowLanes + lane) * 4) = o[k];
    if (lane == 0) *reinterpret_cast<float2*>(row + kHeadDim) = make_float2(m, l);
  }
  // The request's result: a row of output, and its lse.
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

// Scratch: slots for the pieces that do not fit shared memory, then those of the chunks.
EVENKV_HOST_DEVICE int64_t piece_slots(int64_t workers) { return workers * kWarps * kPieceSlots; }

// A chunk's slot 0 holds the request that began before the chunk, slot 1 the one that begins in it. A chunk
// that holds one request only has one slot.
__device__ __forceinline__ float* chunk_slot(const DecodeParams& p, int32_t chunk, int slot,
                                             int heads_per_block) {
  const int64_t place = static_cast<int64_t>(chunk) * p.slots_per_chunk + slot * (p.slots_per_chunk - 1);
  return p.partials + (piece_slots(p.workers) + place * heads_per_block) * kPartialFloats;
}

}  // namespace evenkv
