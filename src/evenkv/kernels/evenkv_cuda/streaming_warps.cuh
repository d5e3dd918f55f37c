// A streaming warp: feeds its ring with the tiles of its parts and attends to them.
#pragma once

#include "shared.cuh"

namespace evenkv {

// Feeds one warp's ring: walks the warp's part of one chunk after another.
template <int kHeads>
class Producer {
 public:
  __device__ __forceinline__ Producer(const DecodeParams& p, SharedMemory<kHeads>& shared)
      : p_(p),
        shared_(shared),
        cursor_(p, p.expected_slots),
        inverse_slots_(p.inverse_slots),
        ring_(shared_address(shared.ring[threadIdx.x / 32])),
        tiles_(shared.tiles[threadIdx.x / 32]) {}

  // Enqueues the next tile, if there is one and it is at most one chunk ahead of `chunks_done`.
  __device__ __forceinline__ void produce(int32_t chunks_done) {
    if (!in_chunk_ && !at_end_ && chunks_begun_ <= chunks_done + 1) {
#pragma unroll 1
      do {
        enter_chunk();
      } while (!confirmed_ && starts_anew());
    }
    if (!in_chunk_) return;
    const int lane = threadIdx.x & 31, sub = threadIdx.x / 32 % kHeads;
    const int stage = produced_ % kStages;
    Tile tile = {0, 0, 0, 0};
    // Twice at a chunk's begin: the cursor must find the first tile. A loop, for one place in the code.
    bool again;
#pragma unroll 1
    do {
      if (more_tiles_) {
        const UnitHeads heads(cursor_.unit(), kHeads, sub);
        const uint32_t address = ring_ + stage * kStageBytes;
        tile = cursor_.copy_tile(address, heads.kv_head);
        if (tile.flags & kFirstOfPiece) {
          Attention::copy_queries(p_, address + kTileBytes, tile.request, heads.head0, heads.heads,
                                  heads.kv_head);
        }
      }
      more_tiles_ = cursor_.next();
      again = begins_ && more_tiles_;
      begins_ = false;
    } while (again);
    if (!more_tiles_) {
      tile.flags |= kLastOfChunk;
      in_chunk_ = false;
    }
    if (!announced_ && (!in_chunk_ || cursor_.slots_left() <= kPlanAheadSlots)) {
      announced_ = true;
      if (lane == 0) atomicMax(&shared_.wanted, chunks_begun_);
    }
    if (lane == 0) tiles_[stage] = tile;
    ++produced_;
    copy_async_commit();
  }

  __device__ __forceinline__ int32_t produced() const { return produced_; }

 private:
  // After the first chunk was entered as expected: whether it must be entered again (see start_block). The
  // block's first barrier.
  __device__ __forceinline__ bool starts_anew() {
    confirmed_ = true;
    __syncwarp();
    __syncthreads();
    if (!shared_.starts_anew) return false;
    cursor_.set_unit_slots(shared_.unit_slots);
    inverse_slots_ = 1.0 / shared_.unit_slots;
    in_chunk_ = at_end_ = false;
    chunks_begun_ = 0;
    return true;
  }

  // The block's next chunk: the expected one, which takes few instructions since all streams of the device
  // wait for them, later what the planning warp drew.
  __device__ __forceinline__ void enter_chunk() {
    constexpr int kBlockParts = kWarps / kHeads;
    const int part = threadIdx.x / 32 / kHeads;
    ChunkRange range;
    int32_t part_slots = p_.first_part_slots;
    if (!confirmed_) {
      at_end_ = static_cast<int32_t>(blockIdx.x) >= p_.expected.num_chunks;
      if (at_end_) return;
      range.begin = static_cast<int64_t>(blockIdx.x) * p_.first_slots;
      range.end = min(range.begin + p_.first_slots, p_.expected.total);
    } else {
      const int32_t place = chunks_begun_;
      const bool more = place == 0 || hands_out_tickets(shared_.schedule);
      if (more) {
        while (read_shared(&shared_.drawn) <= place) {
        }
      }
      const Plan& plan = shared_.plans[place % kPlans];
      at_end_ = !more || read_shared(&plan.chunk) >= shared_.schedule.num_chunks;
      if (at_end_) return;
      range = {read_shared(&plan.range.begin), read_shared(&plan.range.end)};
    }
    if (range.end - range.begin != p_.first_slots) part_slots = slots_of_part(range, kBlockParts);
    const int64_t begin = range.begin + static_cast<int64_t>(part) * part_slots;
    const int32_t slots = static_cast<int32_t>(min(static_cast<int64_t>(part_slots), range.end - begin));
    const int32_t unit = static_cast<int32_t>(divide_with(begin, cursor_.unit_slots(), inverse_slots_));
    cursor_.begin(unit, static_cast<int32_t>(begin - static_cast<int64_t>(unit) * cursor_.unit_slots()),
                  slots);
    begins_ = in_chunk_ = true;
    more_tiles_ = false;
    announced_ = false;
    ++chunks_begun_;
  }

  const DecodeParams& p_;
  SharedMemory<kHeads>& shared_;
  Cursor cursor_;
  double inverse_slots_;  // of a unit
  const uint32_t ring_;
  Tile* const tiles_;
  int32_t produced_ = 0, chunks_begun_ = 0;
  bool begins_ = false;      // the chunk's first tile was not sought yet
  bool more_tiles_ = false;  // the cursor stands on a tile
  bool in_chunk_ = false;    // the chunk's last tile was not enqueued yet
  bool at_end_ = false;      // no chunk is left
  bool confirmed_ = false;   // how the line is cut is known
  bool announced_ = false;   // the planning warp knows that the next chunk will be wanted
};

// Waits until at most `newer` tiles' copies are pending (a group a tile).
template <int kMost>
__device__ __forceinline__ void wait_for_oldest(int32_t newer) {
  if constexpr (kMost > 0) {
    if (newer < kMost) return wait_for_oldest<kMost - 1>(newer);
  }
  copy_async_wait<kMost>();
}

// A streaming warp: all its parts of the block's chunks. Returns how many those are.
template <int kHeads>
__device__ __forceinline__ int32_t stream_all_chunks(const DecodeParams& p, SharedMemory<kHeads>& shared) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const int part = warp / kHeads, sub = warp % kHeads;
  Producer<kHeads> producer(p, shared);
  Attention attention;
  const uint32_t ring = shared_address(shared.ring[warp]);
  const Tile* tiles = shared.tiles[warp];
  uint32_t starts_before = 0;
  int32_t chunks_done = 0;
  bool owns_slots = false;  // the merging warps are through with the pieces of the chunk before
  const auto own_slots = [&] {
    if (owns_slots) return;
    owns_slots = true;
    // A flag, not a barrier: warps must not wait for each other here.
    while (read_shared(&shared.chunks_read) < chunks_done) {
    }
    if (sub == 0 && lane < 2) shared.cut_pieces[part][lane].flags = 0;
    __syncwarp();
  };
#pragma unroll 1
  for (int32_t consumed = 1 - kStages;; ++consumed) {  // the first rounds only fill the ring
    __syncwarp();  // the stage that the next copies fill was read by all lanes
    producer.produce(chunks_done);
    __syncwarp();  // the tile's description is visible
    if (consumed < 0) continue;
    if (consumed == producer.produced()) break;
    const int stage = consumed % kStages;
    const Tile tile = tiles[stage];
    if (tile.tokens() != 0) {
      const uint32_t address = ring + stage * kStageBytes;
      const UnitHeads heads(tile.unit, kHeads, sub);
      wait_for_oldest<kStages - 1>(producer.produced() - 1 - consumed);
      __syncwarp();  // all lanes' copies of the tile arrived
      if (tile.flags & kFirstOfPiece) {
        attention.start(p, address + kTileBytes);
        starts_before = tile.flags & kStartsBefore;
      }
      attention.attend(address, tile);
      if (tile.flags & kLastOfPiece) {
        attention.finish();
        const uint32_t cut = starts_before | (tile.flags & kEndsAfter);
        if (cut == 0) {
          write_whole_piece(p, tile.request, heads, attention);
        } else {
          own_slots();
          const int last = tile.flags & kLastOfChunk ? 1 : 0;
          attention.store_partial(piece_slot<kHeads>(p, shared, warp, last));
          if (sub == 0 && lane == 0) {
            shared.cut_pieces[part][last] = {tile.request, tile.unit, kFirstOfPiece | cut};
          }
        }
      }
    }
    if (tile.flags & kLastOfChunk) {
      own_slots();
      __syncwarp();
      barrier_arrive(kPiecesReady, kStreamThreads + kMergeThreads);
      ++chunks_done;
      owns_slots = false;
    }
  }
  copy_async_wait<0>();
  return chunks_done;
}

}  // namespace evenkv
