// Threads of one call: each draws the next (chunk, KV head), and the one that completes a request merges it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#include "arguments.h"
#include "instruction_sets.h"
#include "partial.h"
#include "schedule.h"

namespace evenkv {

// A thread costs tens of microseconds to start: it must have about this many bytes of K and V to read.
constexpr int64_t kBytesPerThread = 1 << 20;

// EVENKV_CPU_THREADS, else the processors that this process may use; never more than pay.
inline int thread_count(int64_t kv_bytes, int64_t units) {
  int64_t limit = std::thread::hardware_concurrency();
  if (const char* wanted = std::getenv("EVENKV_CPU_THREADS")) {
    limit = std::atoi(wanted);
  } else {
    limit = std::min(limit, 1 + kv_bytes / kBytesPerThread);
  }
  return static_cast<int>(std::max<int64_t>(1, std::min(limit, units)));
}

inline void run_threads(const Arguments& a) {
  const Schedule schedule = make_schedule(a.batch, [&](int64_t request) { return a.length(request); });
  const int64_t num_chunks = static_cast<int64_t>(schedule.chunks.size());
  const int64_t units = num_chunks * a.num_kv_heads;
  if (units == 0) return;
  const Partials partials(a, num_chunks);
  const AttendChunk attend_chunk = pick_attend_chunk();

  std::atomic<int64_t> next_unit{0};
  // Chunks done of each (request, KV head); whoever does the last one merges, in chunk order whoever it is.
  const std::unique_ptr<std::atomic<int32_t>[]> done(new std::atomic<int32_t>[a.batch * a.num_kv_heads]);
  for (int64_t i = 0; i < a.batch * a.num_kv_heads; ++i) done[i].store(0, std::memory_order_relaxed);

  const auto work = [&](Workspace& workspace) {
    for (;;) {
      const int64_t unit = next_unit.fetch_add(1, std::memory_order_relaxed);
      if (unit >= units) return;
      // Heads vary fastest: the heads of a page are neighbours in memory.
      const int64_t c = unit / a.num_kv_heads;
      const int kv_head = static_cast<int>(unit % a.num_kv_heads);
      const Chunk& chunk = schedule.chunks[c];
      attend_chunk(a, chunk, kv_head, workspace, partials.at(c, kv_head));

      const int64_t begin = schedule.request_begin[chunk.request];
      const int64_t end = schedule.request_begin[chunk.request + 1];
      auto& finished = done[chunk.request * a.num_kv_heads + kv_head];
      if (finished.fetch_add(1, std::memory_order_acq_rel) + 1 == end - begin) {
        merge(a, partials, workspace.row, chunk.request, begin, end, kv_head);
      }
    }
  };

  int64_t tokens = 0;
  for (const Chunk& chunk : schedule.chunks) tokens += chunk.num_tokens;
  const int64_t element_bytes = a.cache_dtype == CacheDtype::kBFloat16 ? 2 : 1;
  const int count = thread_count(2 * tokens * a.num_kv_heads * a.dim() * element_bytes, units);
  std::vector<Workspace> workspaces;
  for (int i = 0; i < count; ++i) workspaces.emplace_back(a, kTileTokens);
  std::vector<std::thread> threads;
  threads.reserve(count - 1);
  try {
    for (int i = 1; i < count; ++i) threads.emplace_back(work, std::ref(workspaces[i]));
  } catch (const std::system_error&) {
    // No more threads to be had: those that started, and this one, do all the work.
  }
  work(workspaces[0]);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace evenkv
