// How requests are cut in parts: plain integers, compiled for the device and for the host (where it is
// tested).
//
// A unit is a KV head, or two of them side by side. A part is a run of tiles of one request in one unit: what
// a cluster of blocks takes. The host settles from shapes alone what a part may hold (choose_cut); lengths,
// which only the device knows, decide between two ways to number the parts of a unit:
//
// Even: no request has more than `even_pages` pages. Each one owns `even_parts` numbers.
// Uneven: a unit's slots are divided in cells: of `part_tokens`, from `tail_slot` on shorter ones, so that
// the parts that end last are short. A part has no more tokens than a cell; in the tail half as many again,
// since a request a little longer than a cell is better left whole. Request r's numbers begin at
// cell_of(first_slot(r)) + r, which leaves each request enough of them without a scan over lengths. Some are
// nobody's.
//
// Shapes speak of kv_indices, which may be longer than kv_indptr counts (as in the buffers of a captured
// graph). Then lengths in tokens shrink by a power of two (scale_of).
//
// Boundaries depend on lengths and shapes, never on who computes a part: the bits stay the same.
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

constexpr int32_t kNoTail = INT32_MAX;
constexpr int32_t kMostTileTokens = 32;  // of any specialisation

struct Cut {
  int32_t even_parts;   // of a request, where no request has more pages than even_pages
  int32_t even_pages;   // -1: never even
  int32_t even_tokens;  // of such a part, about
  int32_t part_tokens;  // else: at most; a multiple of the tile
  int32_t tail_slot;    // from here on parts are shorter; kNoTail: nowhere
  int32_t tail_scale;   // by so many halvings
  Divisor by_part_tokens;
  Divisor by_warps;    // warps of a cluster that share a part's tiles
  int32_t most_scale;  // halvings that leave parts long enough
  int32_t numbers;     // of a unit, where uneven
  int32_t places;      // scratch partials of a unit
};

// A part of a request. `count` parts make up the request.
struct Part {
  int32_t request, index, count;
  int32_t first;  // where the request's partials begin, and what counts their arrivals
  bool even;
  int32_t scale;
  int32_t late,
      early_tiles;  // how many of the parts lie in the tail, and the tiles before it, if there are any

  // The place of a part's partial within the unit's. Uneven: two cut requests may share a cell, one with its
  // last part and one with its first.
  EVENKV_HOST_DEVICE int32_t place(int32_t part) const {
    return even ? first + part : 2 * (first + part) + (part == count - 1 ? 1 : 0);
  }
};

// How often lengths are halved where kv_indptr counts `pages` of the `listed` ones.
EVENKV_HOST_DEVICE int32_t scale_of(const Cut& cut, int32_t pages, int32_t listed) {
  int32_t scale = 0;
  EVENKV_UNROLL_NOT
  while (scale < cut.most_scale && pages <= listed >> (scale + 1)) ++scale;
  return scale;
}

// `longest`: pages of the longest request.
EVENKV_HOST_DEVICE bool is_even(const Cut& cut, int32_t longest, int32_t scale) {
  return longest <= cut.even_pages >> scale;
}

// Numbers of one unit.
EVENKV_HOST_DEVICE int32_t numbers_of(const Cut& cut, bool even, int32_t batch) {
  return even ? cut.even_parts * batch : cut.numbers;
}

// The cell of a slot of the unit. The tail's begin a tile early: requests go over to it by whole tiles.
EVENKV_HOST_DEVICE int32_t cell_of(const Cut& cut, int32_t slot, int32_t scale) {
  const int32_t tail = cut.tail_slot >> scale;
  if (slot < tail) return divide(slot, cut.by_part_tokens, scale);
  return divide(tail - 1, cut.by_part_tokens, scale) + 1 +
         divide(slot - tail + kMostTileTokens, cut.by_part_tokens, scale + cut.tail_scale);
}

// The first number of a request that begins at `slot` of the unit; batch stands for the end.
EVENKV_HOST_DEVICE int32_t uneven_number(const Cut& cut, int32_t request, int32_t slot, int32_t scale) {
  return cell_of(cut, slot, scale) + request;
}

// Fills in index, count, first, late and early_tiles: part `number` of the unit, of a request of `length`
// tokens from `slot` on. The number may be nobody's: see is_own. A request without tokens has no parts.
EVENKV_HOST_DEVICE void find_part(const Cut& cut, int32_t number, int32_t slot, int32_t length,
                                  int32_t tile_tokens, Part& part) {
  part.late = 0;
  if (part.even) {
    part.first = part.request * cut.even_parts;
    part.index = number - part.first;
    part.count = length > 0 ? 1 : 0;
    if (cut.even_parts > 1) {
      const int32_t tokens = cut.even_tokens >> part.scale;
      const int32_t count = static_cast<int32_t>(static_cast<uint32_t>(length + tokens - 1) / tokens);
      part.count = count < cut.even_parts ? count : cut.even_parts;
    }
  } else {
    part.first = cell_of(cut, slot, part.scale);
    part.index = number - part.request - part.first;
    const int32_t tail = cut.tail_slot >> part.scale;
    int32_t early = length;  // tokens before the tail, in whole tiles
    if (length > 0 && tail - slot < length) {
      part.early_tiles = tail > slot ? (tail - slot) / tile_tokens : 0;
      early = part.early_tiles * tile_tokens;
      const int32_t scale = part.scale + cut.tail_scale;
      part.late = divide(length - early + (cut.part_tokens >> (scale + 1)), cut.by_part_tokens, scale);
      if (part.late == 0) part.late = 1;
    }
    part.count = part.late + (early > 0 ? divide(early - 1, cut.by_part_tokens, part.scale) + 1 : 0);
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

// A part's tiles are dealt evenly to `by_warps` warps. At most 2^26 tiles and 32 warps: products of up to
// 2^31.
EVENKV_HOST_DEVICE TileRange tiles_of_warp(const Cut& cut, const TileRange& part, int32_t warp) {
  const uint32_t tiles = part.end - part.begin, before = warp;
  return {part.begin + divide(tiles * before, cut.by_warps),
          part.begin + divide(tiles * (before + 1), cut.by_warps)};
}

}  // namespace evenkv
