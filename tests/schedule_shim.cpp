// schedule.h behind a C interface, for tests/test_schedule.py.
#include "schedule.h"

using namespace evenkv;

extern "C" {

int32_t slot_alignment() { return kSlotAlignment; }
int32_t chunks_per_worker_bound() { return kChunksPerWorkerBound; }

void schedule_make(int64_t total, int32_t workers, int32_t min_chunk, int32_t single_round_slots,
                   int32_t tail_chunk, Schedule* out) {
  *out = make_schedule(total, workers, {min_chunk, single_round_slots, tail_chunk});
}

void schedule_cut(int32_t units, int32_t unit_slots, int32_t batch, int32_t workers, int32_t min_chunk,
                  int32_t single_round_slots, int32_t tail_chunk, Schedule* out) {
  *out = cut_line(units, unit_slots, batch, workers, {min_chunk, single_round_slots, tail_chunk});
}

// ranges: [num_chunks, 2]
void schedule_ranges(const Schedule* schedule, int64_t* ranges) {
  for (int32_t chunk = 0; chunk < schedule->num_chunks; ++chunk) {
    const ChunkRange range = chunk_range(*schedule, chunk);
    ranges[2 * chunk] = range.begin;
    ranges[2 * chunk + 1] = range.end;
  }
}

void schedule_chunks_of(const Schedule* schedule, int64_t count, const int64_t* positions, int32_t* chunks) {
  for (int64_t i = 0; i < count; ++i) chunks[i] = chunk_of(*schedule, positions[i]);
}

}  // extern "C"
