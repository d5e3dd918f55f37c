// The merging warps of a block: they add up the streaming warps' pieces of a chunk while the next one
// streams.
//
// Work is a list of jobs (a sum of partials in token order each) times rows (a head of the block's unit
// each), dealt to the warps. All kinds of job go through one loop: code that a launch runs for the first time
// takes two to three times as long, and most of this runs once.
#pragma once

#include "shared.cuh"

namespace evenkv {

// Partials to add up, in order, at equal distances: the last pieces of a block's warps, or chunks' scratch
// slots. The first chunk of a request lies in the chunk's other slot; the last piece may be an early one, in
// scratch.
struct Partials {
  const float* first = nullptr;
  int32_t step = 0, first_shift = 0;  // floats
  int32_t count = 0;
  const float* early = nullptr;
  bool remote = false;  // other blocks wrote them
};

// Loads the partials from the `begin`-th on, all at once: a trip to memory takes far longer than their sum.
// Past the end the last one is loaded again.
template <bool kRemote, int kBatch>
__device__ __forceinline__ void load_partials(Merged (&batch)[kBatch], const Partials& list, int32_t begin,
                                              int32_t offset, int row_lane) {
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const int32_t place = min(begin + i, list.count - 1);
    const int64_t shift = static_cast<int64_t>(place) * list.step + (place == 0 ? list.first_shift : 0);
    batch[i].template load<kRemote>(list.first + shift + offset, row_lane);
  }
}

// `offset`: of the lane's row in each partial.
__device__ __forceinline__ Merged sum_partials(const Partials& list, int32_t offset, int row_lane) {
  constexpr int kBatch = kQuads > 1 ? 4 : 8;
  Merged early, sum;
  if (list.early != nullptr) early.load<false>(list.early + offset, row_lane);
#pragma unroll 1
  for (int32_t begin = 0; begin < list.count; begin += kBatch) {
    Merged batch[kBatch];
    if (list.remote) {
      load_partials<true>(batch, list, begin, offset, row_lane);
    } else {
      load_partials<false>(batch, list, begin, offset, row_lane);
    }
    float largest = sum.m;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) largest = fmaxf(largest, batch[i].m);
    sum.raise(largest);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (begin + i < list.count) sum.add(batch[i]);
    }
  }
  sum.raise(fmaxf(sum.m, early.m));
  sum.add(early);
  return sum;
}

// The runs of pieces that belong to one request each: last pieces (index 1) of parts side by side, and
// perhaps an early one (index 0) behind them. Lane i of a warp looks at piece i.
struct Chains {
  uint32_t present = 0, leaders = 0;
  bool starts_before = false, ends_after = false;  // the first one reaches into the chunk, the last one out

  template <int kHeads>
  __device__ __forceinline__ void find(const SharedMemory<kHeads>& shared) {
    const int lane = threadIdx.x & 31;
    uint32_t flags = 0;
    if (lane < kWarps / kHeads * 2) flags = shared.cut_pieces[lane / 2][lane % 2].flags;
    present = __ballot_sync(kAllLanes, flags != 0);
    const uint32_t continued = __ballot_sync(kAllLanes, (flags & kStartsBefore) != 0);
    const uint32_t open = __ballot_sync(kAllLanes, (flags & kEndsAfter) != 0);
    const uint32_t first = present & -present;
    leaders = (present & ~continued) | first;
    starts_before = (continued & first) != 0;
    ends_after = present != 0 && (open >> (31 - __clz(present)) & 1) != 0 && (count() > 1 || !starts_before);
  }
  __device__ __forceinline__ int count() const { return __popc(leaders); }
  __device__ __forceinline__ uint32_t members(int chain) const {
    uint32_t rest = leaders;
    for (int i = 0; i < chain; ++i) rest &= rest - 1;
    const uint32_t begin = rest & -rest;
    rest &= rest - 1;
    const uint32_t end = rest & -rest;  // 0 behind the last one
    return present & (end - begin);
  }
};

// One thread: counts the block in at a counter; true when it is the last of `expected`. What the block wrote
// is visible to the last, and what the others wrote to this block then.
__device__ __forceinline__ bool arrive_last(int32_t* counter, int32_t expected) {
  // Cumulative: covers the writes of all threads that the barrier before ordered.
  const bool last = count_in_release(counter) == expected - 1;
  if (last) {
    acquire();  // before the store, for which it would wait
    *counter = 0;
  }
  return last;
}

// What a chunk's pieces lead to, in this order. A cut request's partial goes to scratch; the block that
// completes a group of kGroupChunks chunks sums the group, the one that completes the last group sums those.
enum Phase { kPieces, kGroupOfFirst, kAllOfFirst, kGroupOfLast, kAllOfLast, kPhases };

template <int kHeads>
class Merger {
 public:
  __device__ __forceinline__ Merger(const DecodeParams& p, SharedMemory<kHeads>& shared)
      : p_(p), shared_(shared) {}

  // Who merges: the merging warps alone, or with them the streaming warps, which have nothing else to do once
  // the block's last chunk ended.
  __device__ __forceinline__ void set_team(bool all) {
    warp_ = static_cast<int>(threadIdx.x) / 32 - (all ? 0 : kWarps);
    warps_ = kMergeWarps + (all ? kWarps : 0);
    barrier_ = all ? kTeamBarrier : kMergeBarrier;
  }
  __device__ __forceinline__ void wait_for_team() const { barrier_wait(barrier_, warps_ * 32); }

  // One chunk of the block, once all its pieces are there.
  __device__ __forceinline__ void merge(int32_t chunk, int32_t place) {
    const Plan& plan = shared_.plans[place % kPlans];
    const CutRequest cuts[2] = {plan.cuts[0], plan.cuts[1]};
    Chains chains;
    chains.find(shared_);
    const uint32_t used = chains.starts_before | chains.ends_after << 1;
#pragma unroll 1
    for (int phase = kPieces; phase < kPhases; ++phase) {
      const int side = phase > kAllOfFirst;
      const CutRequest cut = side != 0 ? cuts[1] : cuts[0];
      int32_t begin = cut.group_first, stride = 1, count = cut.group_chunks();
      int jobs = 1;
      if (phase == kPieces) {
        jobs = chains.count();
      } else {
        if (!(used >> side & 1) || !shared_.arrived_last[side]) continue;
        if (phase == kGroupOfFirst || phase == kGroupOfLast) {
          if (count == 1) continue;
        } else {
          if (cut.groups() == 1 || !completes_groups(cut)) continue;
          begin = cut.first_chunk;
          stride = kGroupChunks;
          count = cut.groups();
        }
      }
      const bool to_slot = (phase == kGroupOfFirst || phase == kGroupOfLast) && cut.groups() > 1;
      constexpr int32_t kSlotFloats = kHeads * kPartialFloats;
      Partials list;
      list.first = chunk_slot(p_, begin, 0, kHeads);
      list.step = stride * p_.slots_per_chunk * kSlotFloats;
      list.first_shift = begin == cut.first_chunk ? (p_.slots_per_chunk - 1) * kSlotFloats : 0;
      list.count = count;
      list.remote = true;
      run(phase, phase == kPieces ? chunk : begin, chains, cut, list, jobs, to_slot);
      if (phase == kPieces && !count_in(cuts, used, place)) return;
    }
  }

 private:
  static constexpr int kRows = kHeads * kUnitHeads;
  static constexpr int kItemRows = 32 / kRowLanes;
  static constexpr int kItems = (kRows + kItemRows - 1) / kItemRows;

  // The jobs of one phase. A sum that is not the last goes to a slot of `chunk`.
  __device__ __forceinline__ void run(int phase, int32_t chunk, const Chains& chains, const CutRequest& cut,
                                      Partials list, int jobs, bool to_slot) {
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int item = warp_; item < jobs * kItems; item += warps_) {
      const int wanted_row = item % kItems * kItemRows + lane / kRowLanes, row = min(wanted_row, kRows - 1);
      const int sub = row / kUnitHeads, head = row % kUnitHeads, row_lane = lane % kRowLanes;
      int32_t request = cut.request, unit = cut.unit;
      int slot = to_slot ? chunk == cut.first_chunk : -1;
      if (phase == kPieces) {
        const int chain = item / kItems;
        const uint32_t members = chains.members(chain);
        const int leader = __ffs(members) - 1, last = 31 - __clz(members);
        const bool ends_early = last % 2 == 0;
        list.first = piece_slot<kHeads>(p_, shared_, leader / 2 * kHeads, 1);
        list.step = kHeads * kPartialFloats;
        list.first_shift = 0;
        list.count = __popc(members) - (ends_early ? 1 : 0);
        list.early = ends_early ? piece_slot<kHeads>(p_, shared_, last / 2 * kHeads, 0) : nullptr;
        list.remote = false;
        request = shared_.cut_pieces[leader / 2][leader % 2].request;
        unit = shared_.cut_pieces[leader / 2][leader % 2].unit;
        slot = chain == 0 && chains.starts_before ? 0 : chain == jobs - 1 && chains.ends_after ? 1 : -1;
      }
      const int32_t offset = sub * kPartialFloats + head * kPartialStride;
      const Merged sum = sum_partials(list, offset, row_lane);
      if (slot >= 0) {
        __syncwarp();  // all lanes have read the row that the sum may replace
        if (row == wanted_row) sum.store(chunk_slot(p_, chunk, slot, kHeads) + offset, row_lane);
        continue;
      }
      const UnitHeads heads(unit, kHeads, sub);
      if (row != wanted_row || head >= heads.heads) continue;
      const int64_t out = output_row(p_, request, heads.head0 + head);
      sum.write(static_cast<uint16_t*>(p_.output) + out * kHeadDim, p_.lse + out,
                value_scale(p_, heads.kv_head), row_lane);
    }
  }

  // After the pieces: frees them, and counts the cut requests' partials in. False where there are none.
  __device__ __forceinline__ bool count_in(const CutRequest (&cuts)[2], uint32_t used, int32_t place) {
    const int thread = warp_ * 32 + (threadIdx.x & 31);
    wait_for_team();
    if (thread == 0) publish_shared(&shared_.chunks_read, place + 1);
    if (used == 0) return false;
    if (thread < 2 && (used >> thread & 1)) {  // both at once: each takes two trips to memory
      const CutRequest cut = thread == 0 ? cuts[0] : cuts[1];
      const int32_t chunks = cut.group_chunks();
      shared_.arrived_last[thread] =
          chunks == 1 || arrive_last(p_.counters + kArrivals + 2 * cut.group_first, chunks);
    }
    wait_for_team();
    return true;
  }

  // After a group's sum: whether it was the last one of its request.
  __device__ __forceinline__ bool completes_groups(const CutRequest& cut) {
    wait_for_team();  // the sum is written, and the flag's last value was read
    if (warp_ == 0 && threadIdx.x % 32 == 0) {
      shared_.groups_complete = arrive_last(p_.counters + kArrivals + 2 * cut.first_chunk + 1, cut.groups());
    }
    wait_for_team();
    return shared_.groups_complete;
  }

  const DecodeParams& p_;
  SharedMemory<kHeads>& shared_;
  int warp_ = 0, warps_ = 1, barrier_ = kMergeBarrier;
};

// The block's chunks from `place` on, one round each. The merging warps begin with the first one; the
// streaming warps come for the last one, when they are through.
template <int kHeads>
__device__ __forceinline__ void merge_chunks(const DecodeParams& p, SharedMemory<kHeads>& shared,
                                             const Schedule& schedule, int32_t place) {
  Merger<kHeads> merger(p, shared);
  bool last = false;
#pragma unroll 1
  for (; !last; ++place) {
    if (threadIdx.x >= kStreamThreads) {
      while (read_shared(&shared.planned) <= place) nap();
      barrier_wait(kPiecesReady, kStreamThreads + kMergeThreads);
    }
    // The streams asked for the next chunk before they ended this one.
    last = !hands_out_tickets(schedule) ||
           read_shared(&shared.plans[(place + 1) % kPlans].chunk) >= schedule.num_chunks;
    merger.set_team(last);
    if (last) merger.wait_for_team();
    merger.merge(read_shared(&shared.plans[place % kPlans].chunk), place);
  }
}

}  // namespace evenkv
