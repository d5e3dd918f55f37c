// Cuts requests into chunks. Boundaries depend on a request's own length alone, so its bits are the same in
// every batch and on every number of threads; the threads draw (chunk, KV head) pairs from one counter.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace evenkv {

// Below 256 tokens (64 KB of K and V of one bf16 head) drawing and merging a chunk shows beside its reading.
constexpr int64_t kMinChunkTokens = 256;
// Longer requests get longer chunks instead of more, which bounds the partials kept for them.
constexpr int64_t kMaxChunksPerRequest = 64;

struct Chunk {
  int64_t request;
  int64_t first_token;
  int64_t num_tokens;  // 0 for the one chunk of an empty request: it writes the empty result
  int32_t index;       // among the request's chunks: the order of merging
};

struct Schedule {
  std::vector<Chunk> chunks;           // by request, then by token
  std::vector<int64_t> request_begin;  // [batch + 1]: request r has chunks request_begin[r] to [r + 1]
};

inline int64_t chunk_tokens(int64_t length) {
  const int64_t share = (length + kMaxChunksPerRequest - 1) / kMaxChunksPerRequest;
  return std::max(kMinChunkTokens, share);
}

// `length_of(request)` gives tokens; every request gets one chunk at least.
template <class LengthOf>
Schedule make_schedule(int64_t batch, LengthOf length_of) {
  Schedule schedule;
  schedule.request_begin.reserve(batch + 1);
  for (int64_t request = 0; request < batch; ++request) {
    schedule.request_begin.push_back(static_cast<int64_t>(schedule.chunks.size()));
    const int64_t length = length_of(request);
    const int64_t step = chunk_tokens(length);
    int32_t index = 0;
    int64_t first = 0;
    do {
      schedule.chunks.push_back({request, first, std::min(step, length - first), index++});
      first += step;
    } while (first < length);
  }
  schedule.request_begin.push_back(static_cast<int64_t>(schedule.chunks.size()));
  return schedule;
}

}  // namespace evenkv
