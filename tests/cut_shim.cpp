// cut.h and choose.h behind a C interface, for tests/cut_library.py.
#include <cmath>
#include <vector>

#include "choose.h"

using namespace evenkv;

extern "C" {

int32_t choice_bytes() { return sizeof(Choice); }

void choose(const Shape* shape, const DeviceRoom* room, int64_t invariant_tokens, int32_t may_stay_uncut,
            Choice* out) {
  *out = choose_cut(*shape, *room, invariant_tokens, may_stay_uncut != 0);
}

void share_among(Choice* choice, int32_t warps) { choice->cut.by_warps = divisor_of(warps); }

void number_cut(Choice* choice, const Shape* shape) { count_places(*shape, choice->cut); }

// KV heads a block; few: whether an SM takes two such blocks at most.
int32_t choose_heads(const Shape* shape, const DeviceRoom* room, int64_t invariant_tokens, int32_t* few) {
  const Width width = choose_width(*shape, *room, invariant_tokens);
  *few = width.few;
  return width.heads;
}

// x / d for each x, by multiplication.
void divide_all(int64_t d, int32_t count, const int32_t* x, int32_t* out) {
  const Divisor by = divisor_of(d);
  for (int32_t i = 0; i < count; ++i) out[i] = divide(x[i], by);
}

// What the clusters of one unit do, as decode_kernel does it (kernel.cuh), where kv_indptr int32 [batch + 1]
// and lengths int32 [batch] are in order.
// visits: int32 [capacity, 8] of number, request, index, count, first, place, tiles' begin and end; count 0
// where a request without tokens is written. warps: int32 [capacity, num_warps, 2], each warp's tiles.
// team_warps: how many warps share a part; the others' ranges are not written.
// Returns how many visits there are; beyond capacity they are counted only.
int64_t visit_all(const Choice* choice, int32_t batch, int32_t page_size, int32_t num_kv_indices,
                  int32_t tile_tokens, int32_t num_warps, const int32_t* kv_indptr, const int32_t* lengths,
                  int64_t capacity, int32_t* visits, int32_t* warps, int32_t* is_even, double* part_tokens,
                  int32_t* tail_slot, int32_t* team_warps, int32_t* is_mirrored_out) {
  const Cut& cut = choice->cut;
  Part part{0, 0, 1, 0, true, 0, false, 0, 0};
  const int32_t listed = std::min(kv_indptr[batch], num_kv_indices);
  const Fit fit = fit_lengths(cut, listed, num_kv_indices);
  if (!choice->uncut) {
    int32_t longest = 0, longest_early = 0;
    if (cut.even_pages != INT32_MAX) {
      for (int32_t r = 0; r < batch; ++r) {
        const int32_t own = kv_indptr[r + 1] - kv_indptr[r];
        longest = std::max(longest, own);
        if (2 * r < batch) longest_early = std::max(longest_early, own);
      }
    }
    part.even = evenkv::is_even(fit, longest);
    const bool asks = cut.even_pages >= 0 && cut.even_pages != INT32_MAX;
    part.mirrored = asks && !part.even && cut.tail_scale > 0 && longest_early < longest;
  }
  *is_even = part.even;
  *part_tokens = std::ldexp(1.0, fit.by_part_tokens.shift) / fit.by_part_tokens.multiplier;
  *tail_slot = fit.tail_slot;
  *is_mirrored_out = part.mirrored;
  const auto slot_of = [&](int32_t order) {
    return part.mirrored ? (listed - std::min(kv_indptr[batch - order], listed)) * page_size
                         : kv_indptr[order] * page_size;
  };
  std::vector<int32_t> firsts, counts;
  if (!part.even && cut.dealt > 0) {
    std::vector<int32_t> tiles;
    uint32_t all = 0;
    for (int32_t r = 0; r < batch; ++r) {
      tiles.push_back(dealt_tiles((kv_indptr[r + 1] - kv_indptr[r]) * page_size, tile_tokens));
      all += tiles[r];
    }
    const float slope = deal_slope(cut, batch, all, [&](float trial) {
      int32_t parts = 0;
      for (const int32_t own : tiles) parts += dealt_parts(own, cut.whole_dealt, trial);
      return parts;
    });
    for (const int32_t own : tiles) {
      firsts.push_back(firsts.empty() ? 0 : firsts.back() + counts.back());
      counts.push_back(dealt_parts(own, cut.whole_dealt, slope));
    }
  }
  const int32_t numbers = choice->uncut ? batch : numbers_of(cut, part.even, batch);
  const bool alone = !choice->uncut && !part.even && cut.alone != 0;
  const int32_t teams = choice->clusters * (alone ? choice->splits : 1);
  *team_warps = alone ? num_warps / choice->splits : num_warps;
  const Divisor by_warps = alone ? divisor_of(*team_warps) : cut.by_warps;
  int64_t found = 0;
  for (int32_t team = 0; team < teams; ++team) {
    for (int64_t number = team; number < numbers; number += teams) {
      if (choice->uncut) {
        part = {static_cast<int32_t>(number), 0, 1, 0, true, 0, 0};
      } else if (part.even) {
        part.request = static_cast<int32_t>(number) / cut.even_parts;
      } else if (cut.dealt > 0) {
        part.request =
            static_cast<int32_t>(std::upper_bound(firsts.begin(), firsts.end(), number) - firsts.begin()) - 1;
        part.first = firsts[part.request];
        part.count = counts[part.request];
        part.index = static_cast<int32_t>(number) - part.first;
      } else {
        int32_t low = 0, high = batch + 1;  // how many requests begin by the number, the end included
        while (low < high) {
          const int32_t middle = (low + high) / 2;
          const int32_t begins = uneven_number(fit, cut.tail_scale, middle, slot_of(middle));
          begins <= number ? low = middle + 1 : high = middle;
        }
        part.order = std::max(low - 1, 0);
        if (part.order >= batch) continue;
        part.request = part.mirrored ? batch - 1 - part.order : part.order;
      }
      if (part.request >= batch) continue;
      const int32_t length = lengths[part.request];
      if (!choice->uncut) {
        find_part(cut, fit, static_cast<int32_t>(number), slot_of(part.order), length, tile_tokens, part);
      }
      const bool is_empty = length == 0;
      if (is_empty ? part.index != 0 : !choice->uncut && !is_own(part)) continue;
      TileRange tiles = {0, (length + tile_tokens - 1) / tile_tokens};
      if (!choice->uncut && !is_empty) tiles = tiles_of_part(tiles.end, part);
      if (found < capacity) {
        const int32_t row[] = {
            static_cast<int32_t>(number), part.request, part.index, is_empty ? 0 : part.count, part.first,
            part.place(part.index),       tiles.begin,  tiles.end};
        std::copy(row, row + 8, visits + found * 8);
        for (int32_t warp = 0; warp < *team_warps; ++warp) {
          const TileRange own = tiles_of_warp(by_warps, tiles, warp);
          warps[(found * num_warps + warp) * 2] = own.begin;
          warps[(found * num_warps + warp) * 2 + 1] = own.end;
        }
      }
      ++found;
    }
  }
  return found;
}

}  // extern "C"
