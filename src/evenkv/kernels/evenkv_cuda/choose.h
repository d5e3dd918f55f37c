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
  int64_t heads;      // KV heads of a unit: 1 or 2
  int64_t row_bytes;  // of one head
};

// What a block takes of a batch.
struct Width {
  int32_t heads;  // KV heads
  bool few;       // an SM takes kFewBlocks such blocks at most, however many would fit
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
constexpr int64_t kWorstTiles = 56;
// Up to this many bytes of all K an SM the chain of dependent steps decides, not bandwidth: clusters as
// large as may be. Beyond, clusters of over two blocks leave SMs unevenly filled.
constexpr int64_t kSmallBytes = 1 << 18;
constexpr int32_t kLargeSplits = 2;
// Requests that are cut are so in parts of such clusters: fewer partials than of single blocks, and no worse
// filled SMs.
constexpr int32_t kCutSplits = 2;
constexpr int64_t kMostEvenParts = 66;  // more are added up too slowly: larger clusters instead
// Blocks an SM of even requests that are cut to fill the device: a third gains less than its partials cost,
// and in small problems so does a second one.
constexpr int64_t kEvenBlocks = 2;
// K (or V) of one head of a long request: 1,024 tokens of 256 bytes.
constexpr int64_t kLongBytes = 1 << 18;
// Equal requests keep step, and blocks that end together leave a last wave on few SMs (10 % of the time
// at 2.6 waves, on some devices). Where there are fewer waves than this (tenths), the last one less than
// kFullWave100 hundredths full, long requests are cut as uneven ones are: parts that come last are short. So
// are large batches of which all runs at once, with fewer than two clusters an item: some SMs would have a
// block less (not in pairs of heads, whose short parts cost more).
constexpr int64_t kLevel10 = 40, kFullWave100 = 85;
// Where that cannot be: cut in as many parts as make this many waves (tenths), if they stay long.
constexpr int64_t kWaves10 = 25;
// A batch whose longest request has no more than this many hundredths of the average counts as even.
constexpr int64_t kEven100 = 125;
// A scan over more requests than this for the longest costs more than it gains.
constexpr int64_t kMostScanned = 1024;
// Uneven parts: so many hundredths of what a cluster would get of the batch, and kFairTiles tiles a warp,
// since a part's begin and end cost some 5 us; half of the slots, those that come last, in parts of an eighth
// if that leaves some length (less where there are more requests than run at once, and in pairs of heads), so
// that those that end late do not end much later than others.
constexpr int64_t kFair100 = 100, kFairTiles = 2, kTailTokens = 768, kWaveTailTokens = 512,
                  kPairTailTokens = 480;
constexpr int32_t kTailHalvings = 3, kLargeTailHalvings = 4;
// In pairs of heads a fourth halving must leave so many; between kPairSlots and kLargeSlots the tail is a
// quarter.
constexpr int64_t kFourthPairTailTokens = 896;
// Uneven batches of up to kMostDealt requests and this many bytes of K and V an SM are dealt parts that all
// run at once, if that leaves so many parts more than requests, or so many hundredths of the batch; small
// ones take smaller clusters for it. Blocks of clusters take a part each where that leaves them kAloneTokens,
// unless it makes more than kAloneParts an average request: those are added up in clusters faster. Where it
// makes kManyDealt and more, batches may have twice the bytes.
constexpr int64_t kDealtBytes = 5 << 19, kManyDealt = 4, kDealtParts = 3, kSmallDealt100 = 10, kDealt100 = 50;
constexpr int64_t kAloneParts = 8, kAloneTokens = 1024;

// Blocks an SM of pairs of heads that do not all run at once: a third one would leave a last wave in which
// many SMs hold one block.
constexpr int64_t kFewBlocks = 2;
// A large batch has so many slots of all KV heads an SM.
constexpr int64_t kLargeSlots = 24576;
// From so many on blocks take pairs of heads, however many there are.
constexpr int64_t kPairSlots = 12288;

// From so many on whole tiles come by tensor copies: below they save nothing, and their kernel begins later.
constexpr int64_t kTensorSlots = 24576;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Cells of a unit, whatever share of kv_indices is counted. Shorter cells cost a tail that begins a tile
// early more numbers.
inline int64_t count_cells(const Cut& cut, int64_t slots) {
  const int64_t cells = cell_of(fit_lengths(cut, 1, 1), cut.tail_scale, static_cast<int32_t>(slots)) + 1;
  if (cut.tail_scale == 0) return cells;
  const double shortest = static_cast<double>(cut.part_tokens) * cut.least_share / (1 << cut.tail_scale);
  return cells + static_cast<int64_t>((kMostTileTokens + 1) / shortest) + 1;
}

// What follows from a cut's parts and its tail: numbers, and places of partials (none where every request is
// one part).
inline void count_places(const Shape& s, Cut& cut) {
  const int64_t slots = s.num_kv_indices * s.page_size, cells = count_cells(cut, slots);
  const int64_t even = cut.even_pages < 0 ? 0 : cut.even_parts * s.batch;
  const bool always_even = cut.even_pages == INT32_MAX;
  int64_t places = cut.even_parts > 1 ? even : 0;
  const int64_t own = cut.dealt > 0 ? cut.dealt : cells;
  if (!always_even && (cut.dealt > 0 || slots > cut.part_tokens || cut.tail_scale > 0))
    places = std::max(places, 2 * own);
  cut.numbers = static_cast<int32_t>(always_even ? even : cut.dealt > 0 ? cut.dealt : s.batch + cells - 1);
  cut.places = static_cast<int32_t>(places);
}

// Blocks of even requests that are cut. Where they take all SMs, clusters do not spread evenly over them.
inline int64_t even_blocks(const DeviceRoom& room, bool small) {
  return (small ? 1 : kEvenBlocks) * (room.workers - room.workers / 32);
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
  if (average <= kUncutTiles * s.block_tokens * splits) return splits;
  int32_t fewest = kCutSplits;
  while (fewest < splits && even_blocks(room, small) / fewest / items > kMostEvenParts) ++fewest;
  return std::min(splits, fewest);
}

// Of all KV heads.
inline int64_t slots_an_sm(const Shape& s, const DeviceRoom& room) {
  return s.heads * s.units * s.num_kv_indices * s.page_size / room.workers;
}

inline bool is_large(const Shape& s, const DeviceRoom& room) { return slots_an_sm(s, room) >= kLargeSlots; }

// Blocks that may take two KV heads, whose short rows lie side by side, do so where single heads do not all
// run at once and pairs do, and in large batches. Batch-invariant bits must not depend on the batch's size.
// `s` and `room` are those of single heads.
inline Width choose_width(const Shape& s, const DeviceRoom& room, int64_t invariant_tokens) {
  const int64_t items = s.units * s.batch, few = kFewBlocks * room.workers;
  if (invariant_tokens > 0 || s.units % 2 != 0) return {1, false};
  const bool window = items > room.clusters[0] && items <= 2 * few;
  return window || slots_an_sm(s, room) >= kPairSlots ? Width{2, items > 2 * few} : Width{1, false};
}

// Tokens of a long request: twice as many bytes in short rows, where a part costs more against what it reads.
inline int64_t long_tokens(const Shape& s) { return kLongBytes / s.row_bytes * (s.row_bytes < 256 ? 2 : 1); }

// Whether all items, or those of the last wave, nearly fill the device.
inline bool ends_full(int64_t items, int64_t at_once) {
  const int64_t last = items % at_once;
  return last == 0 || last * 100 >= at_once * kFullWave100;
}

// Tokens that equal requests must have to be better cut as uneven ones; 0: they never are.
inline int64_t levelling_tokens(const Shape& s, const DeviceRoom& room, int64_t at_once) {
  const int64_t items = s.units * s.batch;
  // A unit needs room for whole cells before its tail.
  if (s.batch == 1 || at_once < 2 * s.units || ends_full(items, at_once)) return 0;
  if (items > at_once) return items * 10 < at_once * kLevel10 ? long_tokens(s) : 0;
  const bool spares = s.heads == 1 && 2 * items > at_once;
  return spares ? ceil_div(room.workers * kLargeSlots, s.heads * items) : 0;
}

// Parts of an even request, in clusters of `splits` blocks.
inline int64_t choose_even_parts(const Shape& s, const DeviceRoom& room, int64_t average, int32_t splits,
                                 bool small) {
  const int64_t items = s.units * s.batch, step = s.block_tokens * splits;
  const int64_t at_once = std::max(room.clusters[splits - 1], 1);
  int64_t parts = 1;
  if (items > at_once) {
    const bool few = items * 10 < at_once * kWaves10 && !ends_full(items, at_once);
    if (few) parts = std::min(ceil_div(at_once * kWaves10, items * 10), average / long_tokens(s));
  } else if (average > kUncutTiles * step) {
    const int64_t room_for = std::min(at_once, even_blocks(room, small) / splits) / items;
    // Where the device takes no larger clusters: more parts than that if they are long.
    const bool largest = splits < kMostSplits && room.clusters[splits] == 0;
    const int64_t most = largest ? std::max(kMostEvenParts, average / long_tokens(s)) : kMostEvenParts;
    parts = std::min({room_for, average / (kEvenTiles * step), most});
  }
  return std::max<int64_t>(parts, 1);
}

// How uneven requests are dealt: numbers of a unit, 0 where they are cut in cells instead; and whether they
// are those of single blocks. `splits` may fall.
struct Dealing {
  int64_t numbers;
  bool alone;
};

inline Dealing choose_dealing(const Shape& s, const DeviceRoom& room, bool small, int32_t& splits) {
  const int64_t items = s.units * s.batch, slots = s.num_kv_indices * s.page_size;
  if (s.batch == 1 || s.batch > kMostDealt || items > room.clusters[0] ||
      slots <= kWorstTiles * s.block_tokens * splits) {
    return {0, false};
  }
  const int64_t bytes = 2 * s.row_bytes * s.heads * s.units * slots;
  const int64_t more = std::max(kDealtParts, s.batch * (small ? kSmallDealt100 : kDealt100) / 100);
  const auto enough = [&](int64_t numbers, int64_t times) {
    return numbers >= s.batch + more && bytes <= room.workers * kDealtBytes * times;
  };
  const auto numbers_of = [&](int32_t blocks) { return room.clusters[blocks - 1] / s.units; };
  const int64_t blocks = room.clusters[splits - 1] / s.units * splits;
  const bool alone =
      !small && splits > 1 && blocks <= kAloneParts * s.batch && slots >= kAloneTokens * blocks;
  if (alone && enough(blocks, blocks >= kManyDealt * s.batch ? 2 : 1)) return {blocks, true};
  int32_t chosen = splits;
  while (small && chosen > 1 && !enough(numbers_of(chosen), 1)) --chosen;
  if (!enough(numbers_of(chosen), 1)) return {0, false};
  splits = chosen;
  return {numbers_of(chosen), false};
}

// invariant_tokens: 0, or the part length of batch-invariant bits. may_stay_uncut: whether the choice may be
// `uncut`.
inline Choice choose_cut(const Shape& s, const DeviceRoom& room, int64_t invariant_tokens,
                         bool may_stay_uncut) {
  const int64_t items = s.units * s.batch, slots = s.num_kv_indices * s.page_size;
  const int64_t average = std::max<int64_t>(ceil_div(slots, s.batch), 1);
  const bool small = s.heads * s.units * slots * s.row_bytes <= room.workers * kSmallBytes;
  Choice choice{};
  choice.splits = invariant_tokens > 0 ? 1 : choose_splits(s, room, average, small);
  const Dealing dealing =
      invariant_tokens > 0 ? Dealing{0, false} : choose_dealing(s, room, small, choice.splits);
  const int64_t step = s.block_tokens * choice.splits,
                at_once = std::max(room.clusters[choice.splits - 1], 1);
  const bool waves = items > at_once;
  Cut& cut = choice.cut;

  const bool never_even = invariant_tokens > 0 || s.batch > kMostScanned;
  const int64_t level = never_even ? 0 : levelling_tokens(s, room, at_once);
  const bool levelled = level > 0 && average >= level;
  const int64_t parts =
      never_even || levelled ? 1 : choose_even_parts(s, room, average, choice.splits, small);
  cut.even_parts = static_cast<int32_t>(parts);
  cut.even_tokens = static_cast<int32_t>(ceil_div(average, parts));
  cut.even_pages = static_cast<int32_t>(never_even     ? -1
                                        : s.batch == 1 ? INT32_MAX
                                        : levelled     ? 0  // none but a falling kv_indptr's
                                                       : average * kEven100 / 100 / s.page_size);

  // Nor is a request cut that even ones of its length would not be, where all requests run at once.
  cut.whole_tokens = static_cast<int32_t>(invariant_tokens > 0 || waves ? 0 : kUncutTiles * step);
  // In a list longer than what is counted, requests may be shorter than levelling takes.
  cut.whole_pages = static_cast<int32_t>((levelled ? level - 1 : cut.whole_tokens) / s.page_size);
  if (!never_even) cut.even_pages = std::max(cut.even_pages, cut.whole_pages);

  const int64_t least = kEvenTiles * step;
  const int64_t fair = s.units * slots * kFair100 / (100 * at_once);  // tokens
  int64_t most = invariant_tokens > 0 ? invariant_tokens
                                      : std::min(std::max(fair + kFairTiles * s.block_tokens, least), slots);
  cut.part_tokens = static_cast<int32_t>(ceil_div(std::max<int64_t>(most, 1), s.tile_tokens) * s.tile_tokens);
  cut.tail_slot = kNoTail;
  const bool late = s.heads > 1 && slots_an_sm(s, room) >= kPairSlots && !is_large(s, room);
  const int64_t tail_slot = (late ? slots / 4 * 3 : slots / 2) / cut.part_tokens * cut.part_tokens;
  // Small problems are over when their longest part is.
  if (invariant_tokens == 0 && tail_slot > 0 && (waves || !small)) {
    const int32_t halvings = is_large(s, room) ? kLargeTailHalvings : kTailHalvings;
    const auto enough = [&](int32_t halving) {
      if (s.heads == 1) return waves ? kWaveTailTokens : kTailTokens;
      return halving > 3 ? kFourthPairTailTokens : kPairTailTokens;
    };
    while (cut.tail_scale < halvings &&
           cut.part_tokens >> (cut.tail_scale + 1) >= std::max(enough(cut.tail_scale + 1), least)) {
      ++cut.tail_scale;
    }
    if (cut.tail_scale > 0) cut.tail_slot = static_cast<int32_t>(tail_slot);
  }
  // kv_indptr may count far less than kv_indices lists, but no part gets less than its two tiles a warp.
  const int64_t shortest = cut.part_tokens >> cut.tail_scale;
  cut.least_share = invariant_tokens > 0 || shortest <= least ? 1.0f : static_cast<float>(least) / shortest;
  cut.least_even_tokens = static_cast<int32_t>(std::min<int64_t>(cut.even_tokens, least));
  cut.by_part_tokens = divisor_of(cut.part_tokens);
  cut.by_warps = divisor_of(step / s.tile_tokens);
  cut.dealt = static_cast<int32_t>(dealing.numbers);
  cut.alone = dealing.alone;
  const int64_t team_tiles = (dealing.alone ? s.block_tokens : step) / s.tile_tokens;
  cut.least_dealt = static_cast<float>(kEvenTiles * team_tiles);
  cut.whole_dealt = static_cast<int32_t>(waves ? 0 : kUncutTiles * team_tiles);
  const bool always_even = cut.even_pages == INT32_MAX;
  count_places(s, cut);

  choice.uncut = may_stay_uncut && invariant_tokens == 0 && parts == 1 && !waves &&
                 (always_even || slots <= kWorstTiles * step);
  const int64_t own = cut.alone != 0 ? ceil_div(cut.numbers, choice.splits) : cut.numbers;
  int64_t clusters = std::max<int64_t>(never_even ? 1 : parts * s.batch, own);
  // Blocks of a small problem all start at once, and those without a part would be the last to leave.
  if (small && !waves)
    clusters = std::max(parts * s.batch, std::min<int64_t>(at_once / s.units, cut.numbers));
  choice.clusters = static_cast<int32_t>(choice.uncut ? s.batch : std::min<int64_t>(clusters, 65535));
  if (choice.uncut) cut.places = 0;
  return choice;
}

}  // namespace evenkv
