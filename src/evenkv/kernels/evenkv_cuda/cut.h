// How requests are cut in parts: plain integers, compiled for the device and for the host (where it is
// tested).
//
// A unit is a KV head, or two of them side by side. A part is a run of tiles of one request in one unit: what
// a cluster of blocks takes. The host settles from shapes alone what a part may hold (choose_cut); lengths,
// which only the device knows, decide how the parts of a unit are numbered:
//
// Even: no request has more than `even_pages` pages. Each one owns `even_parts` numbers.
// Uneven: a unit's slots are divided in cells: of `part_tokens`, from `tail_slot` on shorter ones, so that
// the parts that end last are short. A part has no more tokens than a cell; in the tail half as many again,
// since a request a little longer than a cell is better left whole. Slots are counted from the first request
// on, or from the last one on (Part::mirrored). The numbers of the request that is r-th begin at
// cell_of(first_slot(r)) + r, which leaves each request enough of them without a scan over lengths. Some are
// nobody's.
// Dealt, in place of that where shapes ask for it: few requests, all of whose parts run at once. A part has
// as few tiles as the numbers allow (deal_slope), and requests own numbers one after the other.
//
// Shapes speak of kv_indices, which may be longer than kv_indptr counts (as in the buffers of a captured
// graph). Then all lengths shrink to the share that is counted (fit_lengths).
//
// Boundaries depend on lengths and shapes, never on who computes a part: the bits stay the same.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define EVENKV_UNROLL_NOT _Pragma("unroll 1")
#define EVENKV_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define EVENKV_UNROLL_NOT
#define EVENKV_HOST_DEVICE inline
#endif

namespace evenkv {

constexpr int kMostSplits = 8;  // blocks of a cluster that any device with clusters takes

// Division by a run-time number costs 20 instructions at every use; by multiplication it costs three.
struct Divisor {
  uint32_t multiplier;  // x / d == x * multiplier >> shift, for 0 <= x < 2^31
  int32_t shift;
};

inline Divisor divisor_of(int64_t d) {
  int32_t bits = 0;
  while ((int64_t{1} << bits) < d) ++bits;
  return {static_cast<uint32_t>(((uint64_t{1} << (31 + bits)) + d - 1) / d), 31 + bits};
}

// x / (d / 2^scale): exact for scale 0 and x < 2^31. Of any slope, quotients add up to at most that of the
// sum.
EVENKV_HOST_DEVICE int32_t divide(uint32_t x, const Divisor& d, int32_t scale = 0) {
  return static_cast<int32_t>(static_cast<uint64_t>(x) * d.multiplier >> (d.shift - scale));
}

// The same 32 bits as another type.
template <typename To, typename From>
EVENKV_HOST_DEVICE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

EVENKV_HOST_DEVICE float quotient(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdividef(a, b);
#else
  return a / b;
#endif
}

// Division by a share (0 < share < 1) of what d divides by: about, and never by less.
EVENKV_HOST_DEVICE Divisor shrink(const Divisor& d, float share) {
  const float slope = quotient(static_cast<float>(d.multiplier), share) * (1.0f - 0x1p-20f);
  const int32_t halvings =
      static_cast<int32_t>(bit_cast<uint32_t>(slope) >> 23) - (127 + 30);  // to below 2^31
  const float factor = bit_cast<float>(static_cast<uint32_t>(127 - halvings) << 23);
  return {static_cast<uint32_t>(slope * factor), d.shift - halvings};
}

constexpr int32_t kNoTail = INT32_MAX;
constexpr int32_t kMostTileTokens = 32;  // of any specialisation
constexpr int32_t kMostDealt = 32;       // requests: one a lane

struct Cut {
  int32_t even_parts;   // of a request, where no request has more pages than even_pages
  int32_t even_pages;   // -1: never even
  int32_t even_tokens;  // of such a part, about
  int32_t part_tokens;  // else: at most; a multiple of the tile
  int32_t tail_slot;    // from here on parts are shorter; kNoTail: nowhere
  int32_t tail_scale;   // by so many halvings
  Divisor by_part_tokens;
  Divisor by_warps;           // warps of a cluster that share a part's tiles
  float least_share;          // of uneven lengths, that leaves parts long enough
  int32_t numbers;            // of a unit, where uneven
  int32_t places;             // scratch partials of a unit
  int32_t least_even_tokens;  // of such a part, however few tokens are counted
  int32_t whole_tokens;       // a request of no more is one part; 0: as cells have it
  int32_t whole_pages;        // even where no request has more, whatever share of kv_indices is counted
  int32_t dealt;              // numbers of a unit that are dealt to uneven requests; 0: those are in cells
  float least_dealt;          // tiles of such a part
  int32_t whole_dealt;        // tiles of a request that is not cut
  int32_t alone;              // not 0: each block takes such a part, be there clusters or not
};

// A part of a request. `count` parts make up the request.
struct Part {
  int32_t request, index, count;
  int32_t first;  // where the request's partials begin, and what counts their arrivals
  bool even;
  int32_t order;  // of the request, where slots are counted from one end or the other
  bool mirrored;  // from the last request on
  int32_t late,
      early_tiles;  // how many of the parts lie in the tail, and the tiles before it, if there are any

  // The place of a part's partial within the unit's. Uneven: two cut requests may share a cell, one with its
  // last part and one with its first.
  EVENKV_HOST_DEVICE int32_t place(int32_t part) const {
    return even ? first + part : 2 * (first + part) + (part == count - 1 ? 1 : 0);
  }
};

// A cut's lengths where kv_indptr counts only a share of kv_indices.
struct Fit {
  int32_t even_pages, even_tokens, tail_slot;
  Divisor by_part_tokens;
};

EVENKV_HOST_DEVICE Fit fit_lengths(const Cut& cut, int32_t pages, int32_t listed) {
  Fit fit = {cut.even_pages, cut.even_tokens, cut.tail_slot, cut.by_part_tokens};
  if (pages >= listed) return fit;
  const float counted = quotient(static_cast<float>(pages), static_cast<float>(listed));
  if (cut.even_pages >= 0 && cut.even_pages != INT32_MAX) {
    fit.even_pages = static_cast<int32_t>(static_cast<float>(cut.even_pages) * counted);
    if (fit.even_pages < cut.whole_pages) fit.even_pages = cut.whole_pages;
  }
  fit.even_tokens = static_cast<int32_t>(static_cast<float>(cut.even_tokens) * counted) + 1;
  if (fit.even_tokens < cut.least_even_tokens) fit.even_tokens = cut.least_even_tokens;
  const float share = counted > cut.least_share ? counted : cut.least_share;
  if (share >= 1.0f) return fit;
  if (cut.tail_slot != kNoTail) {
    fit.tail_slot = static_cast<int32_t>(static_cast<float>(cut.tail_slot) * share);
  }
  fit.by_part_tokens = shrink(cut.by_part_tokens, share);
  return fit;
}

// `longest`: pages of the longest request.
EVENKV_HOST_DEVICE bool is_even(const Fit& fit, int32_t longest) { return longest <= fit.even_pages; }

// Numbers of one unit.
EVENKV_HOST_DEVICE int32_t numbers_of(const Cut& cut, bool even, int32_t batch) {
  return even ? cut.even_parts * batch : cut.numbers;
}

// The cell of a slot of the unit. The tail's begin a tile early: requests go over to it by whole tiles.
EVENKV_HOST_DEVICE int32_t cell_of(const Fit& fit, int32_t tail_scale, int32_t slot) {
  if (slot < fit.tail_slot) return divide(slot, fit.by_part_tokens);
  return divide(fit.tail_slot - 1, fit.by_part_tokens) + 1 +
         divide(slot - fit.tail_slot + kMostTileTokens, fit.by_part_tokens, tail_scale);
}

// The first number of the request that is `order`-th and begins at `slot` of the unit; batch stands for the
// end.
EVENKV_HOST_DEVICE int32_t uneven_number(const Fit& fit, int32_t tail_scale, int32_t order, int32_t slot) {
  return cell_of(fit, tail_scale, slot) + order;
}

// Tiles of a request of a dealt batch: its last page counts as full.
EVENKV_HOST_DEVICE int32_t dealt_tiles(int32_t slots, int32_t tile_tokens) {
  return (slots + tile_tokens - 1) / tile_tokens;
}

// Parts of a request where a part is to have about 1 / slope tiles at most. A request of up to `whole` tiles
// is not cut.
EVENKV_HOST_DEVICE int32_t dealt_parts(int32_t tiles, int32_t whole, float slope) {
  return tiles <= whole ? 1 : 1 + static_cast<int32_t>(static_cast<float>(tiles - 1) * slope);
}

// The steepest slope, to a 32nd of its range, that needs no more numbers than there are, of which there are
// more than requests. `tiles`: of all requests; needed(slope): all their dealt_parts.
template <typename Needed>
EVENKV_HOST_DEVICE float deal_slope(const Cut& cut, int32_t batch, uint32_t tiles, const Needed& needed) {
  const float all = static_cast<float>(tiles > 0 ? tiles : 1), most = quotient(1.0f, cut.least_dealt);
  // Each request rounds up by less than one.
  float enough = quotient(static_cast<float>(cut.dealt - batch), all) * (1.0f - 0x1p-18f);
  float beyond = quotient(static_cast<float>(cut.dealt), all);
  if (enough > most) enough = most;
  if (beyond > most) beyond = most;
  EVENKV_UNROLL_NOT
  for (int step = 0; step < 5; ++step) {
    const float middle = 0.5f * (enough + beyond);
    (needed(middle) <= cut.dealt ? enough : beyond) = middle;
  }
  return enough;
}

// Fills in index, count, first, late and early_tiles: part `number` of the unit, of a request of `length`
// tokens from `slot` on. The number may be nobody's: see is_own. A request without tokens has no parts.
EVENKV_HOST_DEVICE void find_part(const Cut& cut, const Fit& fit, int32_t number, int32_t slot,
                                  int32_t length, int32_t tile_tokens, Part& part) {
  part.late = 0;
  const bool whole = length <= cut.whole_tokens;
  if (part.even) {
    part.first = part.request * cut.even_parts;
    part.index = number - part.first;
    part.count = length > 0 ? 1 : 0;
    if (cut.even_parts > 1 && !whole) {
      const int32_t tokens = fit.even_tokens;
      const int32_t count = static_cast<int32_t>(static_cast<uint32_t>(length + tokens - 1) / tokens);
      part.count = count < cut.even_parts ? count : cut.even_parts;
    }
  } else if (cut.dealt > 0) {  // already; a last page may have fewer tiles than was thought
    const int32_t tiles = (length + tile_tokens - 1) / tile_tokens;
    const int32_t most = tiles <= cut.whole_dealt && tiles > 0 ? 1 : tiles;
    if (part.count > most) part.count = most;
  } else {
    part.first = cell_of(fit, cut.tail_scale, slot);
    part.index = number - part.order - part.first;
    int32_t early = length;  // tokens before the tail, in whole tiles
    if (whole) {
      part.count = length > 0 ? 1 : 0;
      return;
    }
    if (length > 0 && fit.tail_slot - slot < length) {
      part.early_tiles = fit.tail_slot > slot ? (fit.tail_slot - slot) / tile_tokens : 0;
      early = part.early_tiles * tile_tokens;
      // Rounded to the nearest: twice the quotient, one more, half of that.
      const uint32_t late = length - early;
      part.late = (divide(late, fit.by_part_tokens, cut.tail_scale + 1) + 1) >> 1;
      if (part.late == 0) part.late = 1;
    }
    part.count = part.late + (early > 0 ? divide(early - 1, fit.by_part_tokens) + 1 : 0);
  }
}

// Whether the number is that of one of the request's parts. Numbers below the first request's own find it
// too, with an index below 0.
EVENKV_HOST_DEVICE bool is_own(const Part& part) {
  return static_cast<uint32_t>(part.index) < static_cast<uint32_t>(part.count);
}

struct TileRange {
  int32_t begin, end;
};

// A request's tiles are dealt evenly to its parts; those before the tail to the parts before it.
EVENKV_HOST_DEVICE TileRange tiles_of_part(int32_t tiles, const Part& part) {
  if (part.count == 1) return {0, tiles};
  int32_t from = 0, count = part.count - part.late, index = part.index;
  if (index >= count) {
    from = count > 0 ? part.early_tiles : 0;
    tiles -= from;
    index -= count;
    count = part.late;
  } else if (part.late > 0) {
    tiles = part.early_tiles;
  }
  const int32_t each = tiles / count, more = tiles - each * count;
  const int32_t begin = from + each * index + (index < more ? index : more);
  return {begin, begin + each + (index < more ? 1 : 0)};
}

// A part's tiles are dealt evenly to so many warps. At most 2^26 tiles and 32 warps: products of up to 2^31.
EVENKV_HOST_DEVICE TileRange tiles_of_warp(const Divisor& by_warps, const TileRange& part, int32_t warp) {
  const uint32_t tiles = part.end - part.begin, before = warp;
  return {part.begin + divide(tiles * before, by_warps), part.begin + divide(tiles * (before + 1), by_warps)};
}

}  // namespace evenkv
