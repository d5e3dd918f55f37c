// Every tuning number of the kernel, with the reason beside it. docs/kernel-log.md holds the measurements.
#pragma once

#include <cstdint>

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

// Groups over this many heads are cut in several that each read the KV head: correct, not tuned. Accumulators
// for 16 heads of 256 dims would spill.
constexpr int kMostUnitHeads = kHeadDim > 128 ? 8 : 16;
constexpr int kGroupCuts = (kGroupSize + kMostUnitHeads - 1) / kMostUnitHeads;
constexpr int kUnitHeads = (kGroupSize + kGroupCuts - 1) / kGroupCuts;  // query heads of one unit's KV head
constexpr int kColumnBlocks = (kUnitHeads + 7) / 8;  // query heads are the mma's columns, 8 a block

constexpr int kElementBytes = kIsFp8 ? 1 : 2;
constexpr int kRowBytes = kHeadDim * kElementBytes;
// A warp's step. Rows of up to 128 bytes go 32 at a time: the step's fixed cost (bookkeeping, the chain from
// logits to probabilities) is paid for twice the bytes.
constexpr int kTileTokens = kRowBytes > 128 ? 16 : 32;
constexpr int kTileRowBlocks = kTileTokens / 16;         // the tensor core's 16 rows
constexpr int kTileBytes = 2 * kTileTokens * kRowBytes;  // K rows, then V rows
// In shared memory 16 rows lie in pieces of up to 128 bytes, 16 rows of a piece side by side: as a tensor
// copy leaves them.
constexpr int kPieceBytes = kRowBytes > 128 ? 128 : kRowBytes;
constexpr int kPieces = kRowBytes / kPieceBytes;
static_assert(kTileTokens == 16 || kPieces == 1, "rows of a tile follow each other at one distance");

// Shared memory of a block, by the oldest architecture that this build is for (host and device agree on it).
#ifdef __CUDA_ARCH_LIST__
constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};
#else
constexpr int kArchitectures[] = {900};
#endif
constexpr int oldest_architecture() {
  int oldest = kArchitectures[0];
  for (const int architecture : kArchitectures) oldest = architecture < oldest ? architecture : oldest;
  return oldest;
}
constexpr int kSharedBudget = oldest_architecture() >= 900   ? 232448
                              : oldest_architecture() == 800 ? 166912
                                                             : 101376;

// 16 rows of a page in one instruction, by the tensor copy engine (sm_90): a warp spends a third of its
// instructions on copies of 16 bytes a lane. Rows of 256 bytes, which it takes in two pieces, come 6 % slower.
constexpr bool kHasTensorCopies = oldest_architecture() >= 900 && kPieces == 1;

// Blocks are small, three an SM where registers and shared memory let them: what one waits for (its request's
// page ids, first tiles, merges) costs no bandwidth while the others stream. Four warps with two tiles each
// are 64 KB in flight a block; three blocks have three times what latency alone needs. A third tile a warp
// gained nothing, 8 warps a block left SMs unevenly filled.
constexpr int kWarps = kTileBytes > 8192 ? 2 : 4;
constexpr int kThreads = kWarps * 32;
constexpr int kStages = kTileBytes < 8192 ? 4 : 2;
constexpr int kResident = kWarps == 4 && (kHeadDim > 128 || kColumnBlocks > 1) ? 2 : 3;  // as registers allow

// Whether blocks may take two KV heads (choose_width): rows of 128 bytes leave DRAM slower than two side by
// side. Of longer rows even batches gained 3 to 6 % where single heads do not all run at once, uneven ones
// lost as much.
constexpr bool kHasPairs = kGroupCuts == 1 && kRowBytes <= 128;

constexpr int kPartialStride = kHeadDim + 4;  // floats a head: O, then m, l and padding (spreads the banks)
constexpr int kPartialFloats = kUnitHeads * kPartialStride;

// More parts of a request than this are added up in groups of kGroup, side by side: one block takes 0.7 us
// for each eight parts of a row.
constexpr int kMostAtOnce = 48, kGroup = 8;
static_assert(kGroup >= 3 && kMostAtOnce >= kGroup, "groups' counters would be those of other requests");

// Logits may pass the running maximum by 2^8 before accumulators are rescaled: fp32 sums and bf16 or fp16
// probabilities up to 256 lose nothing, and most tiles skip the cross-lane maximum.
constexpr float kRescaleThreshold = 8.0f;

// kv_indices up to this length goes to L2 at the start (1 MB): a cold trip less before the first copies.
constexpr int32_t kPrefetchedIds = 1 << 18;

// Batch-invariant bits: parts of at most 2048 tokens. Smaller ones would cost more merging, larger ones leave
// SMs idle in small batches.
constexpr int32_t kInvariantTokens = 2048;

}  // namespace evenkv
