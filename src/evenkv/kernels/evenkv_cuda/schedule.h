// The chunk schedule: plain integers, compiled for the device and for the host (where it is tested).
//
// Space. All KV slots of the batch form one line: unit-major (a unit is a KV head, or a few of them), within
// a unit in the order of kv_indices. The line's length, units * kv_indptr[batch] * page_size, is known from
// ONE load. Cut. Workers take chunks of this line, `workers` chunks a round: the first round three quarters
// of the line, later ones half of what is left, so that blocks with unequal bandwidth still end together with
// few chunks each. Boundaries depend on the lengths and on the number of workers alone, never on who computes
// a chunk: the bits stay the same. Chunks may start and end inside a request; whoever finishes a cut request
// last merges it in chunk order.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define EVENKV_UNROLL_NOT _Pragma("unroll 1")
#define EVENKV_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define EVENKV_UNROLL_NOT
#define EVENKV_HOST_DEVICE inline
#endif

namespace evenkv {

constexpr int kSlotAlignment = 16;        // chunk lengths are multiples of the tensor core's row count
constexpr int kRounds = 4;                // bounds the number of chunks, and with it the scratch
constexpr int kChunksPerWorkerBound = 7;  // chunks <= this * workers, see make_schedule

struct ScheduleTuning {
  int32_t min_chunk;           // slots: one tile for each warp of a block
  int32_t single_round_slots;  // up to this many slots a worker, one round of equal chunks: a second round's
                               // latency (page ids, first tiles, merge) would cost more than it balances
  int32_t tail_chunk;  // slots: the rounds end, and the tail is cut evenly, where chunks get this small
};

struct ChunkRange {
  int64_t begin, end;  // positions on the line
};

// No arrays: an array indexed at run time would live in local memory.
struct Schedule {
  int64_t total;       // slots on the line
  int64_t per_worker;  // total / workers, rounded up: see round_slots
  int64_t tail_begin;  // position where the rounds end
  int32_t workers;
  int32_t tail_first;  // first chunk of the tail: rounds * workers
  int32_t tail_slots;  // length of the tail's chunks
  int32_t num_chunks;
};

EVENKV_HOST_DEVICE int64_t align_slots(int64_t slots) {
  return (slots + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

// a / b for 0 <= a < 2^51, b > 0. A GPU divides 64-bit numbers in a long subroutine, of which every use costs
// room in the instruction cache; a double's reciprocal is right within one, which the remainder tells.
EVENKV_HOST_DEVICE int64_t divide(int64_t a, int64_t b) {
  if (a < b) return 0;
#if defined(__CUDA_ARCH__)
  const double divisor = static_cast<double>(b);
  double inverse;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(inverse) : "d"(divisor));
  inverse = fma(fma(-divisor, inverse, 1.0), inverse, inverse);  // 20 bits, then 40, then all
  inverse = fma(fma(-divisor, inverse, 1.0), inverse, inverse);
  const int64_t quotient = static_cast<int64_t>(static_cast<double>(a) * inverse);
  const int64_t rest = a - quotient * b;
  return quotient + (rest >= b ? 1 : 0) - (rest < 0 ? 1 : 0);
#else
  return a / b;
#endif
}

// a / b with 1.0 / b at hand.
EVENKV_HOST_DEVICE int64_t divide_with(int64_t a, int64_t b, double inverse) {
  const int64_t quotient = static_cast<int64_t>(static_cast<double>(a) * inverse);
  const int64_t rest = a - quotient * b;
  return quotient + (rest >= b ? 1 : 0) - (rest < 0 ? 1 : 0);
}

EVENKV_HOST_DEVICE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

// A round's chunk length: 3/4 of a worker's share, then 1/8, 1/16, 1/32 ...
EVENKV_HOST_DEVICE int64_t round_slots(int64_t per_worker, int round) {
  return align_slots(round == 0 ? per_worker - (per_worker >> 2) : per_worker >> (round + 2));
}

// total: slots on the line, >= 0; workers >= 1.
EVENKV_HOST_DEVICE Schedule make_schedule(int64_t total, int32_t workers, ScheduleTuning tuning) {
  Schedule s;
  s.total = total;
  s.workers = workers;
  s.per_worker = divide(total + workers - 1, workers);
  s.tail_begin = 0;
  s.tail_first = 0;
  int64_t tail = max64(tuning.min_chunk, align_slots(s.per_worker));
  if (s.per_worker > tuning.single_round_slots) {
    EVENKV_UNROLL_NOT
    for (int k = 0; k < kRounds; ++k) {
      const int64_t slots = round_slots(s.per_worker, k);
      if (slots <= tuning.tail_chunk || s.tail_begin + slots * workers > total) break;
      s.tail_begin += slots * workers;
      s.tail_first += workers;
    }
    // At most about two pieces a worker are left to the tail, however large the batch is.
    const int64_t left_per_worker = divide(total - s.tail_begin + workers - 1, workers);
    tail = max64(tuning.tail_chunk, align_slots((left_per_worker + 1) / 2));
  }
  s.tail_slots = static_cast<int32_t>(tail);
  s.num_chunks = s.tail_first + static_cast<int32_t>(divide(total - s.tail_begin + tail - 1, tail));
  return s;
}

// Ends the chunks of a single round where requests of average length end, or cuts each such request evenly,
// if that makes chunks at most 4 % longer. Batches of equal requests are spared the sums across blocks, 4 us
// at the end; others get a few blocks less, which memory does not notice.
EVENKV_HOST_DEVICE void fit_chunks_to_requests(Schedule& s, int32_t request_slots) {
  const int32_t equal = s.tail_slots;
  if (s.tail_first != 0 || request_slots <= 0) return;
  const int32_t pieces = request_slots / equal;  // of a request
  const int64_t fitting =
      align_slots(pieces > 0 ? (request_slots + pieces - 1) / pieces
                             : divide(equal + request_slots - 1, request_slots) * request_slots);
  if (fitting < equal || fitting - equal > equal / 25) return;
  s.tail_slots = static_cast<int32_t>(fitting);
  s.num_chunks = static_cast<int32_t>(divide(s.total + fitting - 1, fitting));
}

// units >= 1, unit_slots >= 0, batch >= 1.
EVENKV_HOST_DEVICE Schedule cut_line(int32_t units, int32_t unit_slots, int32_t batch, int32_t workers,
                                     ScheduleTuning tuning) {
  Schedule s = make_schedule(static_cast<int64_t>(units) * unit_slots, workers, tuning);
  fit_chunks_to_requests(s, unit_slots / batch);
  return s;
}

// 0 <= chunk < num_chunks.
EVENKV_HOST_DEVICE ChunkRange chunk_range(const Schedule& s, int32_t chunk) {
  int64_t begin = 0;
  int64_t slots = s.tail_slots;
  if (chunk >= s.tail_first) {
    begin = s.tail_begin + (chunk - s.tail_first) * slots;
  } else {
    int k = 0;
    EVENKV_UNROLL_NOT
    for (; chunk >= s.workers; chunk -= s.workers, ++k) begin += round_slots(s.per_worker, k) * s.workers;
    slots = round_slots(s.per_worker, k);
    begin += chunk * slots;
  }
  ChunkRange range;
  range.begin = begin;
  range.end = begin + slots < s.total ? begin + slots : s.total;
  return range;
}

// A chunk is cut evenly among the warps of a block: the slots of each part; the last parts may have fewer.
EVENKV_HOST_DEVICE int32_t slots_of_part(const ChunkRange& range, int32_t parts) {
  const int32_t slots = static_cast<int32_t>(range.end - range.begin);
  return static_cast<int32_t>(align_slots((slots + parts - 1) / parts));
}

// The chunk that holds a position, 0 <= position < total.
EVENKV_HOST_DEVICE int32_t chunk_of(const Schedule& s, int64_t position) {
  if (position >= s.tail_begin) {
    return s.tail_first + static_cast<int32_t>(divide(position - s.tail_begin, s.tail_slots));
  }
  int32_t first = 0;
  EVENKV_UNROLL_NOT
  for (int k = 0;; ++k) {
    const int64_t slots = round_slots(s.per_worker, k);
    if (position < slots * s.workers) return first + static_cast<int32_t>(divide(position, slots));
    position -= slots * s.workers;
    first += s.workers;
  }
}

// Chunks of a batch whose chunks begin at its requests: request r's first one has the number (first_slot(r)
// >> shift)
// + r, which leaves each request enough of them without a scan over lengths. Some are empty.
EVENKV_HOST_DEVICE int64_t request_chunks(int64_t unit_slots, int32_t batch, int32_t shift) {
  return (unit_slots >> shift) + batch;
}

}  // namespace evenkv
