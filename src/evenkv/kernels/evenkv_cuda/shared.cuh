// What the warps of a block share: rings, pieces, claims; and the counters that blocks share.
#pragma once

#include "merge.cuh"

namespace evenkv {

// Layout of the counters: ticket, blocks that left, then two arrival counts a chunk: chunks of the group that
// begins with it, and groups of the cut request that begins in it. All are zero between launches.
constexpr int kTicket = 0, kLeft = 1, kArrivals = 2;

template <int kHeads>
struct SharedMemory {
  uint8_t ring[kWarps][kRingBytes];
  alignas(16)
      uint8_t pieces[kPiecesInShared ? kWarps * kPieceBytes : 16];  // each warp's last cut piece of a chunk
  alignas(16) uint8_t sums[kSumBytes];                              // the chunk merge's
  Tile tiles[kWarps][kStages];
  Piece cut_pieces[kWarps / kHeads][2];
  CutRequest cuts[2];
  Schedule schedule;
  bool arrived_last[2], groups_complete[2];  // of the cut requests
  int32_t chunks_read;                       // chunks whose pieces the merging warps are through with
  unsigned long long claims[2];  // see Claim; by parity of the chunk's place in the block's sequence
};

// A chunk that the block drew: its place in the block's sequence (high word) and the chunk, or kClaiming.
struct Claim {
  static constexpr uint32_t kClaiming = 0xffffffffu;
  static __device__ __forceinline__ unsigned long long make(uint32_t place, uint32_t chunk) {
    return static_cast<unsigned long long>(place) << 32 | chunk;
  }
  static __device__ __forceinline__ uint32_t place(unsigned long long claim) { return claim >> 32; }
  static __device__ __forceinline__ uint32_t chunk(unsigned long long claim) {
    return static_cast<uint32_t>(claim);
  }
};

// Whether there are more chunks than blocks, so that later ones go by ticket.
__device__ __forceinline__ bool hands_out_tickets(const Schedule& schedule) {
  return schedule.num_chunks > static_cast<int32_t>(gridDim.x);
}

// A word that another warp of the block writes.
template <typename T>
__device__ __forceinline__ T read_shared(const T* word) {
  return *static_cast<const volatile T*>(word);
}

// Where a warp's cut piece waits for its block (see Piece): scratch behind the chunks' slots, or shared
// memory.
template <int kHeads>
__device__ __forceinline__ float* piece_slot(const DecodeParams& p, SharedMemory<kHeads>& shared, int warp,
                                             int index) {
  if (kPiecesInShared && index == 1) return reinterpret_cast<float*>(shared.pieces) + warp * kPartialFloats;
  const int64_t slots = static_cast<int64_t>(p.workers) * kChunksPerWorkerBound * 2 * kHeads;
  return p.partials +
         (slots + (static_cast<int64_t>(blockIdx.x) * kWarps + warp) * kPieceSlots + index) * kPartialFloats;
}

}  // namespace evenkv
