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

// Groups over this many heads are cut in parts that each read the KV head: correct, not tuned. Accumulators
// for 16 heads of 256 dims would spill.
constexpr int kMostUnitHeads = kHeadDim > 128 ? 8 : 16;
constexpr int kParts = (kGroupSize + kMostUnitHeads - 1) / kMostUnitHeads;
constexpr int kUnitHeads = (kGroupSize + kParts - 1) / kParts;  // query heads of one unit's KV head
constexpr int kColumnBlocks = (kUnitHeads + 7) / 8;  // query heads are the mma's columns, 8 a block

constexpr int kElementBytes = kIsFp8 ? 1 : 2;
constexpr int kRowBytes = kHeadDim * kElementBytes;
// A warp's step. Rows of up to 128 bytes go 32 at a time: the step's fixed cost (bookkeeping, the chain from
// logits to probabilities) is paid for twice the bytes.
constexpr int kTileTokens = kRowBytes > 128 ? 16 : 32;
constexpr int kTileRowBlocks = kTileTokens / 16;         // the tensor core's 16 rows
constexpr int kTileBytes = 2 * kTileTokens * kRowBytes;  // K rows, then V rows
// A piece's queries travel with its first tile, then the K scale. Asked for on their own they would wait
// behind all copies in flight, 3 to 9 us. Rows are 16 bytes apart in banks: lanes of different heads do not
// collide.
constexpr int kQueryStride = kHeadDim * 2 + 16;
constexpr int kQueryBytes = (kColumnBlocks * 8 * kQueryStride + 4 + 127) / 128 * 128;
constexpr int kStageBytes = kTileBytes + kQueryBytes;

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

// One block an SM. Some warps stream; their rings take what shared memory allows, two tiles a warp and 128 KB
// in flight on sm_90 at groups up to 8: three times what latency alone needs (a third tile gained nothing).
// Others merge: a chunk's end costs fences and atomics, 3 us in which the streams would starve. One plans: it
// draws tickets and touches what the next chunk begins with. Twelve warps leave 168 registers a thread,
// enough for groups up to 8; groups up to 16 need the 255 that eight warps leave. Fewer stream where a tile
// is large or shared memory small.
constexpr int kWarps = kTileBytes > 8192 || kSharedBudget < 131072   ? 4
                       : kColumnBlocks > 1 || kSharedBudget < 196608 ? 6
                                                                     : 8;
constexpr int kMergeWarps = kWarps == 8 ? 3 : kColumnBlocks > 1 ? 1 : 2;
constexpr int kStreamThreads = kWarps * 32;
constexpr int kMergeThreads = kMergeWarps * 32;
constexpr int kThreads = kStreamThreads + kMergeThreads + 32;

constexpr int kPartialStride = kHeadDim + 4;  // floats a head: O, then m, l and padding (spreads the banks)
constexpr int kPartialFloats = kUnitHeads * kPartialStride;
constexpr int kSharedRest = 1024;  // tiles' descriptions, schedule, plans: SharedMemory checks it
// A warp leaves its cut piece in shared memory where groups up to 8 let it fit, else in scratch.
constexpr bool kPiecesInShared =
    kUnitHeads <= 8 && kWarps * (2 * kStageBytes + kPartialFloats * 4) + kSharedRest <= kSharedBudget;
constexpr int kPieceBytes = kPiecesInShared ? kPartialFloats * 4 : 0;
constexpr int kPieceSlots =
    kPiecesInShared ? 1 : 2;    // a warp's pieces in scratch: the early one, and the last
constexpr int kMostStages = 4;  // beyond, small tiles only lengthen the list of descriptions
constexpr int kStagesThatFit = (kSharedBudget - kWarps * kPieceBytes - kSharedRest) / kWarps / kStageBytes;
constexpr int kStages = kStagesThatFit < kMostStages ? kStagesThatFit : kMostStages;
constexpr int kRingBytes = kStages * kStageBytes;
static_assert(kStages >= 2, "no room for two tiles a warp");

// Logits may pass the running maximum by 2^8 before accumulators are rescaled: fp32 sums and bf16 or fp16
// probabilities up to 256 lose nothing, and most tiles skip the cross-lane maximum.
constexpr float kRescaleThreshold = 8.0f;

// The planning warp draws the next chunk when a warp's part of the present one has this many slots left: six
// tiles take some 7 us, its trips to memory under load 3 to 9.
constexpr int32_t kPlanAheadSlots = 6 * kTileTokens;

// min_chunk: one tile for each warp. single_round_slots and tail_chunk: see docs/kernel-log.md.
// One round below about 8 MB of bf16 a worker: measured better there than any finer cut, since a chunk's
// begin and end still cost more than the balance gains.
constexpr ScheduleTuning kScheduleTuning = {kTileTokens * kWarps, 16384, 512};

// Small problems (small_kernel.cuh): blocks of few warps, three an SM where registers and shared memory let
// them, since clusters rarely fill the SMs evenly: two an SM, with a deeper ring, took 30 % longer at b8
// L1024.
constexpr int kSmallWarps = 4, kSmallThreads = kSmallWarps * 32, kSmallStages = 2;
constexpr int kSmallResident = kHeadDim > 128 || kColumnBlocks > 1 ? 2 : 3;
// Up to this many slots of all units an SM, and tokens that a block may have to take when one request holds
// all of them (40 tiles a warp, as long as the general kernel takes).
constexpr int64_t kSmallSlotsPerWorker = 1024, kSmallMostTokens = 2560;

// kv_indices up to this length goes to L2 at the start (1 MB): a cold trip less before the first copies.
constexpr int32_t kPrefetchedIds = 1 << 18;

// Batch-invariant bits: chunks of 2048 slots that begin at each request. Smaller ones would cost more ends of
// chunks, larger ones leave SMs idle in small batches.
constexpr int32_t kRequestChunkShift = 11;

// fp8 caches with an even number of KV heads: two heads a block from this many slots (all heads) on.
constexpr int64_t kPairHeadsFromSlots = 1 << 21;

}  // namespace evenkv
