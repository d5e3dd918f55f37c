// The kernel: one launch, no plan.
//
// Grid: at most one block an SM. A block takes chunks of the flattened slot line (schedule.h): its first one
// by its index, later ones by a ticket. Block: kWarps streaming warps and kMergeWarps merging warps. The
// chunk is cut evenly among the streaming warps (with several KV heads a block, among the warps of each
// head); each streams its tokens through a ring of tiles in shared memory that runs on from chunk to chunk,
// and keeps one flash-decoding state (attention.cuh: what a lane does). A request inside one warp's part is
// written by that warp. One cut between warps or chunks leaves pieces, which the merging warps add up while
// the next chunk streams: a whole request is written; one cut between chunks goes to scratch and is merged by
// the block that finishes its last missing chunk, in chunk order.
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
         (slots + (static_cast<int64_t>(blockIdx.x) * kWarps + warp) * 2 + index) * kPartialFloats;
}

// What every block reads soon, into L2 at once: the lines lie in DRAM, and each is at the head of a chain of
// reads.
__device__ __forceinline__ void prefetch_inputs(const DecodeParams& p) {
  const int32_t thread = blockIdx.x * kThreads + threadIdx.x, threads = gridDim.x * kThreads;
  constexpr int kLineInts = 32, kRowLines = kHeadDim * 2 / 128;
  for (int32_t i = thread; i * kLineInts <= p.batch; i += threads) {
    prefetch_l2(p.kv_indptr + i * kLineInts);
    if (p.kv_last_page_len != nullptr && i * kLineInts < p.batch)
      prefetch_l2(p.kv_last_page_len + i * kLineInts);
  }
  const int32_t heads = p.num_kv_heads * kGroupSize;
  for (int32_t i = thread; i < p.batch * heads * kRowLines; i += threads) {
    const int32_t row = i / kRowLines, request = row / heads;
    const int64_t element = request * p.q_stride_batch + (row - request * heads) * p.q_stride_head;
    prefetch_l2(static_cast<const uint16_t*>(p.q) + element + i % kRowLines * 64);
  }
}

// Requests without tokens have no slots on the line: the merging warps look after them while they wait, each
// its share (in a block without a chunk too).
__device__ __forceinline__ void write_empty_requests(const DecodeParams& p) {
  const int lane = threadIdx.x & 31, warp = static_cast<int>(threadIdx.x) / 32 - kWarps;
  if (warp < 0) return;
  const int heads = p.num_kv_heads * kGroupSize;
  for (int32_t request = warp * gridDim.x + blockIdx.x; request < p.batch;
       request += gridDim.x * kMergeWarps) {
    const int32_t pages = __ldg(p.kv_indptr + request + 1) - __ldg(p.kv_indptr + request);
    const bool empty = pages <= 0 || (pages == 1 && p.kv_last_page_len != nullptr &&
                                      __ldg(p.kv_last_page_len + request) == 0);
    if (!empty) continue;
    uint4* out =
        reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.output) + output_row(p, request, 0) * kHeadDim);
    for (int i = lane; i < heads * kHeadDim / 8; i += 32) out[i] = make_uint4(0, 0, 0, 0);
    for (int i = lane; i < heads; i += 32) p.lse[output_row(p, request, i)] = -INFINITY;
  }
}

// The sum over a chain of pieces (bit 2 * part + index), for four elements of one head. A chain is a run of
// last pieces (index 1), one for each part, and perhaps an early piece (index 0) at its end.
template <int kHeads>
__device__ __forceinline__ Merged sum_pieces(const DecodeParams& p, SharedMemory<kHeads>& shared,
                                             uint32_t members, int sub, int head, int d) {
  constexpr int kBlockParts = kWarps / kHeads;
  const uint32_t early = members & 0x55555555u;
  float2 early_ml = {kNoMaximum, 0.0f};
  float4 early_o = {0.0f, 0.0f, 0.0f, 0.0f};
  if (early != 0) {  // in scratch: the longest way, so first
    const int owner = (__ffs(early) - 1) / 2 * kHeads + sub;
    const float* row = piece_slot<kHeads>(p, shared, owner, 0) + head * kPartialStride;
    early_ml = *reinterpret_cast<const float2*>(row + kHeadDim);
    early_o = *reinterpret_cast<const float4*>(row + d);
  }
  float2 ml[kBlockParts];
  float4 o[kBlockParts];
#pragma unroll
  for (int part = 0; part < kBlockParts; ++part) {
    ml[part] = {kNoMaximum, 0.0f};
    o[part] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (members >> (2 * part + 1) & 1) {
      const float* row = piece_slot<kHeads>(p, shared, part * kHeads + sub, 1) + head * kPartialStride;
      ml[part] = *reinterpret_cast<const float2*>(row + kHeadDim);
      o[part] = *reinterpret_cast<const float4*>(row + d);
    }
  }
  Merged sum;
#pragma unroll
  for (int part = 0; part < kBlockParts; ++part) sum.m = fmaxf(sum.m, ml[part].x);
  sum.m = fmaxf(sum.m, early_ml.x);
  const auto take = [&](float2 other, float4 value) {
    const float weight = exp2_fast(other.x - sum.m);
    sum.l += other.y * weight;
    sum.o.x += value.x * weight;
    sum.o.y += value.y * weight;
    sum.o.z += value.z * weight;
    sum.o.w += value.w * weight;
  };
#pragma unroll
  for (int part = 0; part < kBlockParts; ++part) take(ml[part], o[part]);
  take(early_ml, early_o);
  return sum;
}

// Where a cut request begins and ends.
__device__ __forceinline__ CutRequest locate_cut(const DecodeParams& p, const Schedule& schedule,
                                                 int32_t unit_slots, int32_t request, int32_t unit,
                                                 int32_t chunk) {
  const int32_t page = __ldg(p.kv_indptr + request);
  const int32_t pages = __ldg(p.kv_indptr + request + 1) - page;
  int32_t last = p.page_size;
  if (p.kv_last_page_len != nullptr) {
    const int32_t given = __ldg(p.kv_last_page_len + request);
    if (given >= 0 && given <= p.page_size) last = given;
  }
  const int64_t begin = static_cast<int64_t>(unit) * unit_slots + static_cast<int64_t>(page) * p.page_size;
  const int64_t length = static_cast<int64_t>(pages - 1) * p.page_size + last;
  const int32_t first = chunk_of(schedule, begin);
  const int32_t last_chunk = chunk_of(schedule, begin + length - 1);
  return {request, unit, first, last_chunk, chunk - (chunk - first) % kGroupChunks};
}

// Merges the warps' cut pieces of a chunk: whole requests are written, cut ones go to the chunk's scratch
// slots and are noted in shared.cuts. Called by all merging threads.
template <int kHeads>
__device__ __forceinline__ void merge_block(const DecodeParams& p, SharedMemory<kHeads>& shared,
                                            const Schedule& schedule, int32_t unit_slots, int32_t chunk) {
  constexpr int kPieces = kWarps / kHeads * 2;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 - kWarps;
  // Lane i looks at piece i; chains are runs of pieces of one request.
  uint32_t flags = 0;
  if (lane < kPieces) flags = shared.cut_pieces[lane / 2][lane % 2].flags;
  const uint32_t present = __ballot_sync(kAllLanes, flags != 0);
  if (present == 0) return;
  const bool leads = flags != 0 && (!(flags & kStartsBefore) || lane == __ffs(present) - 1);
  const uint32_t leaders = __ballot_sync(kAllLanes, leads);
  const int chains = __popc(leaders);
  // One chain: all threads share it. Several: a warp each.
  const int threads = chains == 1 ? kMergeThreads : 32;
  const int thread = chains == 1 ? threadIdx.x - kStreamThreads : lane;
  for (int chain = chains == 1 ? 0 : warp; chain < chains; chain += kMergeWarps) {
    uint32_t rest = leaders;
    for (int i = 0; i < chain; ++i) rest &= rest - 1;
    const int begin = __ffs(rest) - 1;
    rest &= rest - 1;
    const uint32_t below_end = rest == 0 ? kAllLanes : (1u << (__ffs(rest) - 1)) - 1;
    const uint32_t members = present & (kAllLanes << begin) & below_end;
    const int end = 31 - __clz(members);
    const Piece head_piece = shared.cut_pieces[begin / 2][begin % 2];
    const uint32_t cut =
        (head_piece.flags & kStartsBefore) | (shared.cut_pieces[end / 2][end % 2].flags & kEndsAfter);
    const int slot = (head_piece.flags & kStartsBefore) ? 0 : 1;
    constexpr int kQuads = kHeadDim / 4;
    for (int element = thread; element < kHeads * kUnitHeads * kQuads; element += threads) {
      const int sub = element / (kUnitHeads * kQuads), head = element / kQuads % kUnitHeads;
      const int d = element % kQuads * 4;
      const Merged sum = sum_pieces<kHeads>(p, shared, members, sub, head, d);
      if (cut == 0) {
        const UnitHeads unit(head_piece.unit, kHeads, sub);
        if (head < unit.heads) {
          write_output(p, head_piece.request, unit.head0 + head, d, sum, value_scale(p, unit.kv_head));
        }
      } else {
        float* row = chunk_slot(p, chunk, slot, kHeads, sub) + head * kPartialStride;
        *reinterpret_cast<float4*>(row + d) = sum.o;
        if (d == 0) *reinterpret_cast<float2*>(row + kHeadDim) = make_float2(sum.m, sum.l);
      }
    }
    // The chain's last thread: it has the least to sum.
    if (cut != 0 && thread == threads - 1) {
      shared.cuts[slot] = locate_cut(p, schedule, unit_slots, head_piece.request, head_piece.unit, chunk);
    }
  }
}

// One thread: counts the block in at a counter; true when it is the last of `expected`. What the block wrote
// is visible to the last, and what the others wrote to this block then.
__device__ __forceinline__ bool arrive_last(int32_t* counter, int32_t expected) {
  __threadfence();  // cumulative: covers the writes of all threads that the barrier before ordered
  const bool last = atomicAdd(counter, 1) == expected - 1;
  if (last) {
    *counter = 0;
    __threadfence();
  }
  return last;
}

// All merging threads: does what is due at the cut requests whose partials this block wrote.
template <int kHeads>
__device__ __forceinline__ void merge_cuts(const DecodeParams& p, SharedMemory<kHeads>& shared) {
  const int thread = threadIdx.x - kStreamThreads;
  Merged* sums = reinterpret_cast<Merged*>(shared.sums);
  int32_t* arrivals = p.counters + kArrivals;
  if (thread < 2 && shared.cuts[thread].request >= 0) {  // both at once: each takes two trips to memory
    const CutRequest& cut = shared.cuts[thread];
    shared.arrived_last[thread] =
        cut.group_chunks() == 1 || arrive_last(arrivals + 2 * cut.group_first, cut.group_chunks());
  }
  barrier_wait(kMergeBarrier, kMergeThreads);
#pragma unroll 1
  for (int slot = 0; slot < 2; ++slot) {
    const CutRequest& cut = shared.cuts[slot];
    if (cut.request < 0 || !shared.arrived_last[slot]) continue;
    const int32_t groups = cut.groups();
    if (cut.group_chunks() > 1) {
      merge_chunks<kHeads>(p, cut, cut.group_first, cut.group_first + cut.group_chunks() - 1, 1, groups > 1,
                           sums);
    }
    if (groups == 1) continue;
    // A word of its own: other threads may still be reading arrived_last.
    if (thread == 0) shared.groups_complete[slot] = arrive_last(arrivals + 2 * cut.first_chunk + 1, groups);
    barrier_wait(kMergeBarrier, kMergeThreads);
    if (shared.groups_complete[slot]) {
      merge_chunks<kHeads>(p, cut, cut.first_chunk, cut.last_chunk, kGroupChunks, false, sums);
    }
  }
}

// The merging warps: one round a chunk of the block.
template <int kHeads>
__device__ __forceinline__ void merge_all_chunks(const DecodeParams& p, SharedMemory<kHeads>& shared,
                                                 const Schedule& schedule, int32_t unit_slots) {
  const int thread = threadIdx.x - kStreamThreads;
  const bool tickets = schedule.num_chunks > static_cast<int32_t>(gridDim.x);
  int32_t chunk = blockIdx.x;
#pragma unroll 1
  for (uint32_t place = 0; chunk < schedule.num_chunks; ++place) {
    if (thread < 2) shared.cuts[thread].request = -1;
    barrier_wait(kMergeBarrier, kMergeThreads);
    barrier_wait(kPiecesReady, kThreads);
    merge_block<kHeads>(p, shared, schedule, unit_slots, chunk);
    // The streams drew the next chunk before they ended this one.
    chunk =
        tickets ? static_cast<int32_t>(Claim::chunk(shared.claims[(place + 1) & 1])) : schedule.num_chunks;
    barrier_wait(kMergeBarrier, kMergeThreads);
    if (thread == 0) *static_cast<volatile int32_t*>(&shared.chunks_read) = place + 1;
    if (shared.cuts[0].request < 0 && shared.cuts[1].request < 0) continue;
    merge_cuts(p, shared);
    barrier_wait(kMergeBarrier, kMergeThreads);
  }
}

// Feeds one warp's ring: walks the warp's part of one chunk after another.
template <int kHeads>
class Producer {
 public:
  __device__ __forceinline__ Producer(const DecodeParams& p, SharedMemory<kHeads>& shared,
                                      const Schedule& schedule, int32_t unit_slots)
      : p_(p),
        shared_(shared),
        schedule_(schedule),
        cursor_(p, unit_slots),
        unit_slots_(unit_slots),
        ring_(shared_address(shared.ring[threadIdx.x / 32])),
        tiles_(shared.tiles[threadIdx.x / 32]) {
    enter_chunk(blockIdx.x);
  }

  // Enqueues the next tile, if there is one and it is at most one chunk ahead of `chunks_done`.
  __device__ __forceinline__ void produce(int32_t chunks_done) {
    if (!more_tiles_ && !at_end_ && chunks_begun_ <= chunks_done + 1) enter_chunk(claim_chunk());
    if (in_chunk_) {
      const int lane = threadIdx.x & 31, sub = threadIdx.x / 32 % kHeads;
      const int stage = produced_ % kStages;
      Tile tile = {0, 0, 0, 0};
      if (more_tiles_) {
        const UnitHeads heads(cursor_.unit(), kHeads, sub);
        tile = cursor_.copy_tile(ring_ + stage * kTileBytes, heads.kv_head);
        more_tiles_ = cursor_.next();
      }
      if (!more_tiles_) {
        tile.flags |= kLastOfChunk;
        in_chunk_ = false;
      }
      if (lane == 0) tiles_[stage] = tile;
      ++produced_;
    }
    copy_async_commit();
  }

  __device__ __forceinline__ int32_t produced() const { return produced_; }

 private:
  __device__ __forceinline__ void enter_chunk(int32_t chunk) {
    if (chunk >= schedule_.num_chunks) {
      at_end_ = true;
      return;
    }
    constexpr int kBlockParts = kWarps / kHeads;
    const int part = threadIdx.x / 32 / kHeads;
    const ChunkRange range = chunk_range(schedule_, chunk);
    const int32_t chunk_slots = static_cast<int32_t>(range.end - range.begin);
    const int32_t part_slots =
        static_cast<int32_t>(align_slots((chunk_slots + kBlockParts - 1) / kBlockParts));
    const int64_t begin = range.begin + static_cast<int64_t>(part) * part_slots;
    const int32_t slots = static_cast<int32_t>(min(static_cast<int64_t>(part_slots), range.end - begin));
    const int32_t unit = static_cast<int32_t>(begin / unit_slots_);
    cursor_.begin(unit, static_cast<int32_t>(begin - static_cast<int64_t>(unit) * unit_slots_), slots);
    more_tiles_ = cursor_.next();
    in_chunk_ = true;
    ++chunks_begun_;
  }

  // The block's next chunk: the first warp that runs dry draws the ticket, as late as that, for the others
  // too.
  __device__ __forceinline__ int32_t claim_chunk() {
    if (schedule_.num_chunks <= static_cast<int32_t>(gridDim.x)) return schedule_.num_chunks;
    uint32_t chunk = 0;
    if ((threadIdx.x & 31) == 0) {
      const uint32_t place = chunks_begun_;
      unsigned long long* slot = &shared_.claims[place & 1];
      const unsigned long long before = read_shared(slot);
      if (Claim::place(before) != place &&
          atomicCAS(slot, before, Claim::make(place, Claim::kClaiming)) == before) {
        chunk = gridDim.x + atomicAdd(p_.counters + kTicket, 1);
        atomicExch(slot, Claim::make(place, chunk));
      } else {
        do {
          chunk = Claim::chunk(read_shared(slot));
        } while (chunk == Claim::kClaiming);
      }
    }
    return static_cast<int32_t>(__shfl_sync(kAllLanes, chunk, 0));
  }

  const DecodeParams& p_;
  SharedMemory<kHeads>& shared_;
  const Schedule& schedule_;
  Cursor cursor_;
  const int32_t unit_slots_;
  const uint32_t ring_;
  Tile* const tiles_;
  int32_t produced_ = 0, chunks_begun_ = 0;
  bool more_tiles_ = false;  // the cursor stands on a tile
  bool in_chunk_ = false;    // the chunk's last tile was not enqueued yet
  bool at_end_ = false;      // no chunk is left
};

// A streaming warp: all its parts of the block's chunks.
template <int kHeads>
__device__ __forceinline__ void stream_all_chunks(const DecodeParams& p, SharedMemory<kHeads>& shared,
                                                  const Schedule& schedule, int32_t unit_slots) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const int part = warp / kHeads, sub = warp % kHeads;
  Producer<kHeads> producer(p, shared, schedule, unit_slots);
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
      const UnitHeads heads(tile.unit, kHeads, sub);
      if (tile.flags & kFirstOfPiece) {
        attention.start(p, tile.request, heads.head0, heads.heads, heads.kv_head);
        starts_before = tile.flags & kStartsBefore;
      }
      copy_async_wait<kStages - 1>();
      __syncwarp();  // all lanes' copies of the tile arrived
      attention.attend(ring + stage * kTileBytes, tile);
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
            shared.cut_pieces[part][last] = {tile.request, tile.unit, kFirstOfPiece | cut, 0};
          }
        }
      }
    }
    if (tile.flags & kLastOfChunk) {
      own_slots();
      __syncwarp();
      barrier_arrive(kPiecesReady, kThreads);
      ++chunks_done;
      owns_slots = false;
    }
  }
  copy_async_wait<0>();
}

template <int kHeads>
__global__ void __launch_bounds__(kThreads, 1) decode_kernel(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(128) uint8_t raw[];
  SharedMemory<kHeads>& shared = *reinterpret_cast<SharedMemory<kHeads>*>(raw);
  const int32_t unit_slots = __ldg(p.kv_indptr + p.batch) * p.page_size;
  prefetch_inputs(p);
  const int32_t units = p.num_kv_heads * kParts / kHeads;
  // In shared memory: a dozen registers that no thread has to spare.
  const Schedule& schedule = shared.schedule;
  if (threadIdx.x == 0) {
    shared.schedule = make_schedule(static_cast<int64_t>(units) * unit_slots, p.workers, kScheduleTuning);
    shared.chunks_read = 0;
    shared.claims[0] = shared.claims[1] = Claim::make(0, 0);  // place 0 is never claimed
  }
  __syncthreads();
  if (static_cast<int32_t>(blockIdx.x) >= schedule.num_chunks) {
    write_empty_requests(p);
    return;  // then num_chunks <= gridDim.x: no tickets to put back
  }
  const bool tickets = schedule.num_chunks > static_cast<int32_t>(gridDim.x);
  if (threadIdx.x >= kStreamThreads) {
    write_empty_requests(p);
    merge_all_chunks<kHeads>(p, shared, schedule, unit_slots);
    return;
  }
  stream_all_chunks<kHeads>(p, shared, schedule, unit_slots);
  // The last block to leave puts the tickets back to zero.
  if (tickets && threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(p.counters + kLeft, 1) == static_cast<int32_t>(gridDim.x) - 1) {
      p.counters[kTicket] = 0;
      p.counters[kLeft] = 0;
    }
  }
}

}  // namespace evenkv
