// What a chunk leaves behind, where it lies, and how a request's chunks become its output.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "arguments.h"

namespace evenkv {

constexpr int kMaxLanes = 16;
constexpr int padded_dim(int dim) { return (dim + kMaxLanes - 1) / kMaxLanes * kMaxLanes; }

// Online softmax of one chunk and KV head, for the `group` query heads that share the head.
struct Partial {
  float* maximum;   // [group] base-2 logits
  float* sum;       // [group] of 2^(logit - maximum)
  float* weighted;  // [group, padded_dim] sum of 2^(logit - maximum) * v
};

// All partials of a call, in one buffer.
class Partials {
 public:
  Partials(const Arguments& a, int64_t num_chunks)
      : kv_heads_(a.num_kv_heads),
        group_(a.group_size()),
        stride_(int64_t{group_} * (padded_dim(a.dim()) + 2)),
        // Not zeroed: the thread that takes a chunk is the first to touch its pages.
        data_(new float[num_chunks * kv_heads_ * stride_]) {}
  Partials(const Partials&) = delete;
  ~Partials() { delete[] data_; }

  Partial at(int64_t chunk, int kv_head) const {
    float* base = data_ + (chunk * kv_heads_ + kv_head) * stride_;
    return {base, base + group_, base + 2 * group_};
  }

 private:
  int kv_heads_, group_;
  int64_t stride_;
  float* data_;
};

// One thread's scratch.
struct Workspace {
  Workspace(const Arguments& a, int tile_tokens)
      : buffer((a.group_size() + 1) * padded_dim(a.dim()) + a.group_size() * (tile_tokens + 1)) {
    q = buffer.data();
    scores = q + a.group_size() * padded_dim(a.dim());
    shrink = scores + a.group_size() * tile_tokens;
    row = shrink + a.group_size();
  }
  std::vector<float> buffer;
  float* q;       // [group, padded_dim] scaled to base-2 logits
  float* scores;  // [group, tile_tokens]
  float* shrink;  // [group]
  float* row;     // [head_dim] of a merge
};

inline float bf16_to_float(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// Nearest, ties to even; NaN stays NaN.
inline uint16_t float_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// Output and lse of one request's query group from its partials, always in chunk order.
// `row` is scratch of head_dim floats.
inline void merge(const Arguments& a, const Partials& partials, float* row, int64_t request, int64_t begin,
                  int64_t end, int kv_head) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const int group = a.group_size(), dim = a.dim(), padded = padded_dim(dim);
  const float v_scale = a.v_scale ? a.v_scale[kv_head] : 1.0f;
  for (int h = 0; h < group; ++h) {
    const int64_t head = request * a.num_qo_heads + int64_t{kv_head} * group + h;
    float maximum = -kInfinity;
    for (int64_t c = begin; c < end; ++c) {
      const float m = partials.at(c, kv_head).maximum[h];
      maximum = m > maximum ? m : maximum;
    }
    float sum = 0.0f;
    std::fill_n(row, dim, 0.0f);
    for (int64_t c = begin; c < end; ++c) {
      const Partial partial = partials.at(c, kv_head);
      const float weight = end - begin == 1 ? 1.0f : std::exp2(partial.maximum[h] - maximum);
      sum += weight * partial.sum[h];
      const float* weighted = partial.weighted + h * padded;
      for (int j = 0; j < dim; ++j) row[j] += weight * weighted[j];
    }
    const bool empty = a.length(request) == 0;
    const float factor = empty ? 0.0f : v_scale / sum;
    for (int j = 0; j < dim; ++j) a.output[head * dim + j] = float_to_bf16(row[j] * factor);
    a.lse[head] = empty ? -kInfinity : maximum + std::log2(sum);
  }
}

}  // namespace evenkv
