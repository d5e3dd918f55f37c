// Every tuning number of the kernel, with the reason beside it. docs/kernel-log.md holds the measurements.
#pragma once

#include "schedule.h"
#include "specialisation.h"

namespace evenkv {

enum KvType { kBFloat16 = 0, kFloat16 = 1, kE4M3 = 2, kE5M2 = 3 };

constexpr int kHeadDim = EVENKV_HEAD_DIM;
constexpr int kGroupSize = EVENKV_GROUP_SIZE;
constexpr int kKvType = EVENKV_KV_DTYPE;
constexpr bool kIsFp8 = kKvType == kE4M3 || kKvType == kE5M2;
constexpr bool kQueryIsHalf = EVENKV_Q_DTYPE == 1;
// The tensor core computes in fp16 where the cache widens to fp16 exactly (fp8 does), else in bf16.
constexpr bool kMmaHalf = kIsFp8 || kKvType == kFloat16;

// Groups over this many heads are cut in parts that each read the KV head: correct, not tuned. Accumulators for 16
// heads of 256 dims would spill.
constexpr int kMostUnitHeads = kHeadDim > 128 ? 8 : 16;
constexpr int kParts = (kGroupSize + kMostUnitHeads - 1) / kMostUnitHeads;
constexpr int kUnitHeads = (kGroupSize + kParts - 1) / kParts;  // query heads of one unit's KV head
constexpr int kColumnBlocks = (kUnitHeads + 7) / 8;             // query heads are the mma's columns, 8 a block

// 24 KB of copies in flight a warp, 192 KB a block of one block an SM: five times what latency alone needs,
// so that other SMs' copies fill the gaps in which one block merges (design probe: 107 % of copy peak).
// head_dim 256 takes 4 warps: three tiles of 16 KB a warp.
constexpr int kElementBytes = kIsFp8 ? 1 : 2;
constexpr int kRowBytes = kHeadDim * kElementBytes;
constexpr int kTileBytes = 2 * kTileTokens * kRowBytes;  // K rows, then V rows
constexpr int kWarps = kTileBytes > 8192 ? 4 : 8;
constexpr int kThreads = kWarps * 32;
constexpr int kRingBytes = 196608 / kWarps;  // a warp's ring
constexpr int kStages = kRingBytes / kTileBytes;
static_assert(kStages >= 3, "a ring needs three tiles to hide latency");

// Logits may pass the running maximum by 2^8 before accumulators are rescaled: fp32 sums and bf16 or fp16
// probabilities up to 256 lose nothing, and most tiles skip the cross-lane maximum.
constexpr float kRescaleThreshold = 8.0f;

// min_chunk: one tile for each warp. single_round_slots and tail_chunk: see docs/kernel-log.md.
constexpr ScheduleTuning kScheduleTuning = {kTileTokens * kWarps, 1024, 256};

// fp8 caches with an even number of KV heads: two heads a block from this many slots (all heads) on.
constexpr int64_t kPairHeadsFromSlots = 1 << 20;

}  // namespace evenkv
