// Attention of one KV head's query group over one chunk of tokens.
// Included once for each instruction set, inside its namespace (see instruction_sets.h): no include guard.
//
// Tokens go by in tiles. A tile's K rows are widened once and meet all query heads of the group, its V rows
// are fetched meanwhile; then its probabilities, then its V rows meet all heads. So K and V are read from
// memory once.

#include "convert.h"

// Row addresses of one tile, and of the first K rows of the next.
template <class Element>
struct TileRows {
  const typename Element::Storage* k[kTileTokens + kRowsAhead];
  const typename Element::Storage* v[kTileTokens];
  int count;        // tokens of the tile
  int known_count;  // entries of k
};

// `tokens_left` counts from `first_token` to the chunk's end.
template <class Element>
void find_rows(const Arguments& a, int64_t request, int64_t first_token, int64_t tokens_left, int kv_head,
               TileRows<Element>& rows) {
  using Storage = typename Element::Storage;
  const auto* k = static_cast<const Storage*>(a.k_cache) + kv_head * a.k_strides.head;
  const auto* v = static_cast<const Storage*>(a.v_cache) + kv_head * a.v_strides.head;
  const int page_size = a.tokens_per_page();
  const int32_t* page = a.kv_indices + a.kv_indptr[request] + first_token / page_size;
  int64_t slot = first_token % page_size;
  rows.count = static_cast<int>(std::min<int64_t>(kTileTokens, tokens_left));
  rows.known_count = static_cast<int>(std::min<int64_t>(kTileTokens + kRowsAhead, tokens_left));
  for (int t = 0; t < rows.known_count; ++t) {
    rows.k[t] = k + *page * a.k_strides.page + slot * a.k_strides.token;
    if (t < rows.count) rows.v[t] = v + *page * a.v_strides.page + slot * a.v_strides.token;
    if (++slot == page_size) slot = 0, ++page;
  }
}

inline void prefetch_row(const void* row, int bytes) {
  for (int line = 0; line < bytes; line += 64) __builtin_prefetch(static_cast<const char*>(row) + line);
}

// scores[h][t] = q[h] . k[t], for kHeads heads from q; q is padded with zeros to whole vectors.
template <class Element, int kHeads>
void score_tile(const Arguments& a, const TileRows<Element>& rows, const float* q, int q_stride, bool fetch,
                float* scores) {
  const int dim = a.dim();
  const int whole = dim - dim % kLanes;
  const int row_bytes = dim * static_cast<int>(sizeof(typename Element::Storage));
  for (int t = 0; t < rows.count; ++t) {
    if (fetch) {
      prefetch_row(rows.v[t], row_bytes);
      if (t + kRowsAhead < rows.known_count) prefetch_row(rows.k[t + kRowsAhead], row_bytes);
    }
    const auto* k = rows.k[t];
    Floats sums[kHeads] = {};
    for (int j = 0; j < whole; j += kLanes) {
      const Floats x = load<Element>(k + j);
#pragma GCC unroll 8
      for (int h = 0; h < kHeads; ++h) sums[h] += x * load(q + h * q_stride + j);
    }
    if (whole < dim) {
      const Floats x = load_some<Element>(k + whole, dim - whole);
#pragma GCC unroll 8
      for (int h = 0; h < kHeads; ++h) sums[h] += x * load(q + h * q_stride + whole);
    }
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) scores[h * kTileTokens + t] = sum_lanes(sums[h]);
  }
}

// Scores to probabilities relative to the running maximum, in place; returns what earlier sums shrink by.
inline float soften_tile(float* scores, int count, float& maximum, float& sum) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (int t = count; t < kTileTokens; ++t) scores[t] = -kInfinity;
  float highest = maximum;
  for (int t = 0; t < count; ++t) highest = scores[t] > highest ? scores[t] : highest;
  Floats total{};
  for (int t = 0; t < kTileTokens; t += kLanes) {
    const Floats p = exp2_lanes(load(scores + t) - highest);
    store(scores + t, p);
    total += p;
  }
  const float shrink = maximum == -kInfinity ? 0.0f : std::exp2(maximum - highest);
  sum = sum * shrink + sum_lanes(total);
  maximum = highest;
  return shrink;
}

// One vector of output columns: sums[h] += p[h][t] * v[t], over the tile.
template <class Element, int kHeads, class Load>
inline void weigh_columns(const TileRows<Element>& rows, const float* p, const float* shrink, float* sums,
                          int sums_stride, Load load_v) {
  Floats acc[kHeads];
#pragma GCC unroll 8
  for (int h = 0; h < kHeads; ++h) acc[h] = load(sums + h * sums_stride) * shrink[h];
  for (int t = 0; t < rows.count; ++t) {
    const Floats x = load_v(rows.v[t]);
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) acc[h] += x * p[h * kTileTokens + t];
  }
#pragma GCC unroll 8
  for (int h = 0; h < kHeads; ++h) store(sums + h * sums_stride, acc[h]);
}

template <class Element, int kHeads>
void weigh_tile(const Arguments& a, const TileRows<Element>& rows, const float* p, const float* shrink,
                float* sums, int sums_stride) {
  const int dim = a.dim();
  const int whole = dim - dim % kLanes;
  using Storage = typename Element::Storage;
  for (int j = 0; j < whole; j += kLanes) {
    weigh_columns<Element, kHeads>(rows, p, shrink, sums + j, sums_stride,
                                   [j](const Storage* v) { return load<Element>(v + j); });
  }
  if (whole < dim) {
    weigh_columns<Element, kHeads>(
        rows, p, shrink, sums + whole, sums_stride,
        [whole, dim](const Storage* v) { return load_some<Element>(v + whole, dim - whole); });
  }
}

// Calls `work(first_head, heads as a constant)` over the group in blocks that fit the registers.
template <class Work>
inline void for_head_blocks(int group_size, Work work) {
  constexpr int kKnown = known_group_size();
  int first = 0;
  if constexpr (kKnown > 0 && kKnown <= kMaxHeadBlock) {
    work(0, std::integral_constant<int, kKnown>{});
    return;
  }
  for (; group_size - first >= 8; first += 8) work(first, std::integral_constant<int, 8>{});
  if constexpr (kKnown % 8 >= 4 || kKnown == 0) {
    if (group_size - first >= 4) work(first, std::integral_constant<int, 4>{}), first += 4;
  }
  if constexpr (kKnown % 4 >= 2 || kKnown == 0) {
    if (group_size - first >= 2) work(first, std::integral_constant<int, 2>{}), first += 2;
  }
  if constexpr (kKnown % 2 == 1 || kKnown == 0) {
    if (group_size - first >= 1) work(first, std::integral_constant<int, 1>{});
  }
}

template <class Element>
void attend_chunk_of(const Arguments& a, const Chunk& chunk, int kv_head, Workspace& work, Partial partial) {
  const int group = a.group_size(), dim = a.dim(), padded = padded_dim(dim);
  const float scale = a.sm_scale * kLog2E * (a.k_scale ? a.k_scale[kv_head] : 1.0f);
  for (int h = 0; h < group; ++h) {
    const uint16_t* q = a.q + chunk.request * a.q_batch_stride + (kv_head * group + h) * a.q_head_stride;
    for (int j = 0; j < dim; ++j) work.q[h * padded + j] = bf16_to_float(q[j]) * scale;
    for (int j = dim; j < padded; ++j) work.q[h * padded + j] = 0.0f;
    partial.maximum[h] = -std::numeric_limits<float>::infinity();
    partial.sum[h] = 0.0f;
  }
  std::fill_n(partial.weighted, group * padded, 0.0f);

  TileRows<Element> rows;
  for (int64_t done = 0; done < chunk.num_tokens; done += kTileTokens) {
    find_rows(a, chunk.request, chunk.first_token + done, chunk.num_tokens - done, kv_head, rows);
    for_head_blocks(group, [&](int first, auto heads) {
      score_tile<Element, heads.value>(a, rows, work.q + first * padded, padded, first == 0,
                                       work.scores + first * kTileTokens);
    });
    for (int h = 0; h < group; ++h) {
      work.shrink[h] =
          soften_tile(work.scores + h * kTileTokens, rows.count, partial.maximum[h], partial.sum[h]);
    }
    for_head_blocks(group, [&](int first, auto heads) {
      weigh_tile<Element, heads.value>(a, rows, work.scores + first * kTileTokens, work.shrink + first,
                                       partial.weighted + first * padded, padded);
    });
  }
}

inline void attend_chunk(const Arguments& a, const Chunk& chunk, int kv_head, Workspace& work,
                         Partial partial) {
  switch (a.cache_dtype) {  // one case is compiled, all of them where the definition leaves the dtype open
#if EVENKV_KV_DTYPE == 0 || EVENKV_KV_DTYPE == 1
    case CacheDtype::kBFloat16:
      return attend_chunk_of<BFloat16>(a, chunk, kv_head, work, partial);
#endif
#if EVENKV_KV_DTYPE == 0 || EVENKV_KV_DTYPE == 2
    case CacheDtype::kFloat8E4M3:
      return attend_chunk_of<Float8E4M3>(a, chunk, kv_head, work, partial);
#endif
#if EVENKV_KV_DTYPE == 0 || EVENKV_KV_DTYPE == 3
    case CacheDtype::kFloat8E5M2:
      return attend_chunk_of<Float8E5M2>(a, chunk, kv_head, work, partial);
#endif
    default:
      return;  // refused by the checks
  }
}
