// What the warps of a block share: rings, pieces, plans; and the counters that blocks share.
#pragma once

#include "merge.cuh"

namespace evenkv {

// Layout of the counters: ticket, blocks that left, then two arrival counts a chunk: chunks of the group that
// begins with it, and groups of the cut request that begins in it. All are zero between launches.
constexpr int kTicket = 0, kLeft = 1, kArrivals = 2;

// How this launch's line is cut: see prepare.
EVENKV_HOST_DEVICE ScheduleTuning tuning_of(const DecodeParams& p) {
  ScheduleTuning tuning = kScheduleTuning;
  tuning.single_round_slots = p.single_round_slots;
  return tuning;
}

// A chunk of the block, by its place in the block's sequence. Written by the planning warp.
struct Plan {
  int32_t chunk;  // num_chunks or more: the sequence is over
  ChunkRange range;
  CutRequest cuts[2];  // the request that reaches into the chunk, and the one that reaches out of it
};
// A plan is read until its chunk's pieces are; streams are at most two chunks ahead of that.
constexpr int kPlans = 4;

template <int kHeads>
struct SharedMemory {
  uint8_t ring[kWarps][kRingBytes];
  alignas(16)
      uint8_t pieces[kPiecesInShared ? kWarps * kPieceBytes : 16];  // each warp's last cut piece of a chunk
  Tile tiles[kWarps][kStages];
  Piece cut_pieces[kWarps / kHeads][2];
  Plan plans[kPlans];
  Schedule schedule;
  int32_t unit_slots;                     // slots of one unit
  int32_t unit_chunks, chunk_shift;       // chunks that begin at requests: of one unit, and their size
  bool arrived_last[2], groups_complete;  // of the cut requests
  int32_t wanted;                         // places whose chunks the streams will ask for soon
  int32_t drawn;                          // places whose chunk is known
  int32_t planned;                        // places whose plan is complete
  int32_t chunks_read;                    // chunks whose pieces the merging warps are through with
  int32_t starts_anew;                    // the line is not cut as expected: see start_block
  int32_t touched;                        // never read: see touch
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
// What the warp wrote before is visible to whoever reads the count; called by one lane.
__device__ __forceinline__ void publish_shared(int32_t* count, int32_t value) {
  __threadfence_block();
  *static_cast<volatile int32_t*>(count) = value;
}

// Brings a word's line to L1: reading it is the only way that counts.
template <int kHeads>
__device__ __forceinline__ void touch(SharedMemory<kHeads>& shared, const void* address) {
  if (__ldg(static_cast<const uint32_t*>(address)) == 0x80000000u) shared.touched = 1;
}

// A piece's place: shared memory for a warp's last one where it fits, else scratch (before the chunks'
// slots).
template <int kHeads>
__device__ __forceinline__ float* piece_slot(const DecodeParams& p, SharedMemory<kHeads>& shared, int warp,
                                             int index) {
  if (kPiecesInShared && index == 1) return reinterpret_cast<float*>(shared.pieces) + warp * kPartialFloats;
  const int32_t slot = (static_cast<int32_t>(blockIdx.x) * kPieceSlots + index) * kWarps + warp;
  return p.partials + static_cast<int64_t>(slot) * kPartialFloats;
}

}  // namespace evenkv
