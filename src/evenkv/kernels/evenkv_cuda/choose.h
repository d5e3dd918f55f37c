// What the host settles before a launch, from shapes alone: blocks a cluster, clusters, and how requests may
// be cut (cut.h). Plain integers; docs/kernel-log.md holds the measurements behind the numbers.
#pragma once

#include <algorithm>

#include "cut.h"

namespace evenkv {

struct DeviceRoom {
  int32_t workers;                // SMs
  int32_t clusters[kMostSplits];  // that run at once, of 1, 2, ... blocks; 0: none
};

struct Shape {
  int64_t units;  // of all KV heads
  int64_t batch, page_size, num_kv_indices;
  int64_t block_tokens;  // a tile for each warp of a block
  int64_t tile_tokens;
};

struct Choice {
  int32_t splits;    // blocks a cluster
  int32_t clusters;  // of a unit
  bool uncut;        // every request is one part, whatever its length
  Cut cut;
};

// Tiles a warp. A cluster grows while a request of average length leaves its warps more than this (more than
// one while every block has an SM of its own, since a tile more costs as much as a larger cluster saves).
constexpr int64_t kGrowTiles = 2;
// An even request is cut where its warps would have more than this, in parts of at least kEvenTiles.
constexpr int64_t kUncutTiles = 8, kEvenTiles = 2;
// Requests stay whole, however uneven, while one that holds all tokens leaves a warp at most this many.
constexpr int64_t kWorstTiles = 28;
// Up to this many slots of all units an SM the chain of dependent steps decides, not bandwidth: clusters as
// large as may be. Beyond, clusters of over two blocks leave SMs unevenly filled.
constexpr int64_t kSmallSlots = 1024;
constexpr int32_t kLargeSplits = 2;
constexpr int64_t kMostEvenParts = 32;  // more are added up too slowly: larger clusters instead
// Blocks an SM of even requests that are cut to fill the device: a third gains less than its partials cost.
constexpr int64_t kEvenBlocks = 2;
// More items than run at once: cut in as many parts as make this many waves (tenths), if they keep some
// length. Few waves end with SMs that hold one block, which alone does not use an SM's bandwidth.
constexpr int64_t kWaves10 = 25, kWaveTokens = 1024;
// A batch whose longest request has no more than this many hundredths of the average counts as even.
constexpr int64_t kEven100 = 125;
// A scan over more requests than this for the longest costs more than it gains.
constexpr int64_t kMostScanned = 1024;
// Uneven parts: what a cluster would get of the batch, at least kEvenTiles; half of the slots, those that
// come last, in parts of an eighth if that leaves some length, so that those that end late do not end much
// later than others. A part's begin and end cost some 5 us.
constexpr int64_t kTailTokens = 512;
constexpr int32_t kTailHalvings = 3;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Cells of a unit, however lengths are halved. Then a tail begins up to a tile earlier, of cells that are
// shorter.
inline int64_t count_cells(const Cut& cut, int64_t slots) {
  const int64_t cells = cell_of(cut, static_cast<int32_t>(slots), 0) + 1;
  if (cut.tail_scale == 0) return cells;
  return cells + ((kMostTileTokens + int64_t{1}) << (cut.most_scale + cut.tail_scale)) / cut.part_tokens + 1;
}

inline int32_t choose_splits(const Shape& s, const DeviceRoom& room, int64_t average, bool small) {
  const int64_t items = s.units * s.batch;
  int32_t most = small ? kMostSplits : kLargeSplits;
  while (most < kMostSplits && room.clusters[most - 1] / items > kMostEvenParts) ++most;
  int32_t splits = 1;
  for (; splits < most && items <= room.clusters[splits]; ++splits) {
    const int64_t tiles = items * (splits + 1) <= room.workers ? 1 : kGrowTiles;
    if (average <= s.block_tokens * splits * tiles) break;
  }
  return splits;
}

// Whether a block takes two KV heads: rows of one fp8 head are short for DRAM, and two heads' rows lie side
// by side. Where the batch then runs at once and else would not. Batch-invariant bits must not depend on the
// batch's size.
inline bool take_pairs(int64_t num_kv_heads, int64_t batch, int64_t invariant_tokens,
                       const DeviceRoom& room) {
  const int64_t items = num_kv_heads * batch;
  return invariant_tokens == 0 && num_kv_heads % 2 == 0 && items > room.clusters[0] &&
         items <= int64_t{4} * room.workers;
}

// invariant_tokens: 0, or the part length of batch-invariant bits. may_stay_uncut: whether the choice may be
// `uncut`.
inline Choice choose_cut(const Shape& s, const DeviceRoom& room, int64_t invariant_tokens,
                         bool may_stay_uncut) {
  const int64_t items = s.units * s.batch, slots = s.num_kv_indices * s.page_size;
  const int64_t average = std::max<int64_t>(ceil_div(slots, s.batch), 1);
  const bool small = s.units * slots <= room.workers * kSmallSlots;
  Choice choice{};
  choice.splits = invariant_tokens > 0 ? 1 : choose_splits(s, room, average, small);
  const int64_t step = s.block_tokens * choice.splits,
                at_once = std::max(room.clusters[choice.splits - 1], 1);
  const bool waves = items > at_once;
  Cut& cut = choice.cut;

  const bool never_even = invariant_tokens > 0 || s.batch > kMostScanned;
  int64_t parts = 1;
  if (never_even) {
    // Uneven parts do.
  } else if (!waves) {
    if (average > kUncutTiles * step) {
      const int64_t room_for = std::min(at_once, kEvenBlocks * room.workers / choice.splits) / items;
      parts = std::min(room_for, average / (kEvenTiles * step));
    }
  } else if (items * 10 < at_once * kWaves10) {
    parts = std::min(ceil_div(at_once * kWaves10, items * 10), average / kWaveTokens);
  }
  parts = std::max<int64_t>(parts, 1);
  cut.even_parts = static_cast<int32_t>(parts);
  cut.even_tokens = static_cast<int32_t>(ceil_div(average, parts));
  cut.even_pages = static_cast<int32_t>(never_even     ? -1
                                        : s.batch == 1 ? INT32_MAX
                                                       : average * kEven100 / 100 / s.page_size);

  const int64_t least = kEvenTiles * step;
  const int64_t fair = s.units * slots / at_once;  // tokens
  const int64_t most = invariant_tokens > 0 ? invariant_tokens : std::min(std::max(fair, least), slots);
  cut.part_tokens = static_cast<int32_t>(ceil_div(std::max<int64_t>(most, 1), s.tile_tokens) * s.tile_tokens);
  cut.tail_slot = kNoTail;
  const int64_t tail_slot = slots / 2 / cut.part_tokens * cut.part_tokens;
  // Small problems are over when their longest part is.
  if (invariant_tokens == 0 && tail_slot > 0 && (waves || !small)) {
    const int64_t shortest = std::max(kTailTokens, least);
    while (cut.tail_scale < kTailHalvings && cut.part_tokens >> (cut.tail_scale + 1) >= shortest)
      ++cut.tail_scale;
    if (cut.tail_scale > 0) cut.tail_slot = static_cast<int32_t>(tail_slot);
  }
  // Lengths may be far below what kv_indices could hold, but no part gets less than its two tiles a warp.
  int64_t halved = cut.part_tokens >> cut.tail_scale;
  if (parts > 1) halved = std::min<int64_t>(halved, cut.even_tokens);
  while (invariant_tokens == 0 && halved >> (cut.most_scale + 1) >= least) ++cut.most_scale;
  cut.by_part_tokens = divisor_of(cut.part_tokens);
  cut.by_warps = divisor_of(step / s.tile_tokens);
  const bool always_even = cut.even_pages == INT32_MAX;
  const int64_t cells = count_cells(cut, slots);
  const int64_t numbers = always_even ? parts : s.batch + cells - 1;
  cut.numbers = static_cast<int32_t>(numbers);

  choice.uncut = may_stay_uncut && invariant_tokens == 0 && parts == 1 && !waves &&
                 (always_even || slots <= kWorstTiles * step);
  int64_t clusters = std::max(never_even ? 1 : parts * s.batch, numbers);
  // Blocks of a small problem all start at once, and those without a part would be the last to leave.
  if (small && !waves) clusters = std::max(parts * s.batch, std::min(at_once / s.units, numbers));
  choice.clusters = static_cast<int32_t>(choice.uncut ? s.batch : std::min<int64_t>(clusters, 65535));
  int64_t places = 0;
  if (!choice.uncut) {
    if (parts > 1) places = parts * s.batch;
    if (!always_even && slots > cut.part_tokens) places = std::max(places, 2 * cells);
  }
  cut.places = static_cast<int32_t>(places);
  return choice;
}

}  // namespace evenkv
