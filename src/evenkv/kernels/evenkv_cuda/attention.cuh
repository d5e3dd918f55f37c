// Flash decoding of one warp: 16 tokens a step, keys and values as the tensor core's 16-row operand, query
// heads as its 8 columns. S = K Q^T and O^T = V^T P^T then have the same columns in the same lanes, so the
// running maximum and the rescaling stay inside a lane; P changes layout by one 8x8 transpose for each 8
// tokens.
//
// Lane layout (g = lane / 4, c = lane % 4): S holds tokens g and g + 8 of heads 2c and 2c + 1 of a column
// block; O^T holds two head-dim rows of those heads for each block of 16.
#pragma once

#include "cursor.cuh"

namespace evenkv {

constexpr int kSteps = kHeadDim / 16;  // 16-deep steps of K Q^T, and 16-row blocks of V^T P^T
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kNoMaximum = -1e38f;  // finite: exp2(x - m) needs no guard for -inf

struct Attention {
  uint32_t q[kSteps][kColumnBlocks][2];
  float o[kSteps][kColumnBlocks][4];
  float m[kColumnBlocks][2];  // running maximum of the scaled logits, log2 units
  float l[kColumnBlocks][2];  // the lane's own share of the sum
  float logit_scale;          // sm_scale * log2(e) * k_scale / the power of two that q was scaled by

  // Asks for the queries of a request's `heads` heads from `head0` on; the loads are under way when it
  // returns. set_scale must follow.
  __device__ __forceinline__ void start(const DecodeParams& p, int32_t request, int32_t head0,
                                        int32_t heads) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
      const int head = n * 8 + lane / 4;
      // Lanes of column g hold head g. 16-bit K: a lane holds elements 2c, 2c + 1 of each 8; fp8 K: elements
      // 4c .. 4c + 3 of each 16.
      const int64_t first = request * p.q_stride_batch + (head0 + head) * p.q_stride_head;
      const char* row = static_cast<const char*>(p.q) + first * 2 + lane % 4 * (kIsFp8 ? 8 : 4);
      row = opaque(row);  // one address for all of the loads
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const char* from = row + step * 32 + half * (kIsFp8 ? 4 : 16);
          q[step][n][half] = head < heads ? __ldg(reinterpret_cast<const uint32_t*>(from)) : 0u;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) o[step][n][i] = 0.0f;
      }
      m[n][0] = m[n][1] = kNoMaximum;
      l[n][0] = l[n][1] = 0.0f;
    }
  }

  // What logits are multiplied by; waits for the queries where they are scaled too.
  __device__ __forceinline__ void set_scale(const DecodeParams& p, float k_scale) {
    logit_scale = p.sm_scale * kLog2e * k_scale;
    if constexpr (kMmaHalf && !kQueryIsHalf) scale_query_to_half();
  }

 private:
  // bf16 q in fp16 keeps its 8 bits but not its range: scale all heads by one power of two.
  __device__ __forceinline__ void scale_query_to_half() {
    uint32_t largest = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // Infinity and NaN stay what they are, in their own head: they must not scale the others to zero.
          const uint32_t first = q[step][n][half] & 0x7fffu, second = q[step][n][half] >> 16 & 0x7fffu;
          largest = max(largest, max(first < 0x7f80u ? first : 0u, second < 0x7f80u ? second : 0u));
        }
      }
    }
    largest = __reduce_max_sync(kAllLanes, largest);
    const int exponent = static_cast<int>(largest >> 7);  // biased by 127; 0 for zeros and subnormals
    const int shift = min(13 - (max(exponent, 1) - 127), 126);
    const float scale = __uint_as_float(static_cast<uint32_t>(shift + 127) << 23);
    logit_scale *= __uint_as_float(static_cast<uint32_t>(127 - shift) << 23);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t pair = q[step][n][half];
          q[step][n][half] =
              pack_mma(__uint_as_float(pair << 16) * scale, __uint_as_float(pair & 0xffff0000u) * scale);
        }
      }
    }
  }

 public:
  // Attends to one tile: K rows at `stage`, V rows behind them.
  __device__ __forceinline__ void attend(uint32_t stage, const Tile& tile) {
    float s[kTileRowBlocks][kColumnBlocks][4];
#pragma unroll
    for (int block = 0; block < kTileRowBlocks; ++block)
      multiply_keys(stage + block * 16 * kRowBytes, s[block]);
#pragma unroll
    for (int block = 0; block < kTileRowBlocks; ++block) {
#pragma unroll
      for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[block][n][i] *= logit_scale;
      }
    }
    if (tile.tokens < kTileTokens || tile.unreadable != 0) mask(tile.tokens, tile.unreadable, s);

    bool grows = false;
#pragma unroll
    for (int block = 0; block < kTileRowBlocks; ++block) {
#pragma unroll
      for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          grows |= fmaxf(s[block][n][j], s[block][n][j + 2]) > m[n][j] + kRescaleThreshold;
        }
      }
    }
    if (__any_sync(kAllLanes, grows)) raise_maximum(s);

    const uint32_t values = stage + kTileTokens * kRowBytes;
#pragma unroll
    for (int block = 0; block < kTileRowBlocks; ++block) {
      uint32_t high[kColumnBlocks][2];  // P^T: tokens 2c, 2c + 1 (and 8 more) of head g
      uint32_t low[kColumnBlocks][2];   // what rounding P to bf16 left
#pragma unroll
      for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float p0 = exp2_fast(s[block][n][2 * i] - m[n][0]);
          const float p1 = exp2_fast(s[block][n][2 * i + 1] - m[n][1]);
          const uint32_t packed = pack_mma(p0, p1);
          high[n][i] = transpose_8x8(packed);
          const float2 rounded = unpack_mma(packed);
          if constexpr (kMmaHalf) {
            l[n][0] += rounded.x;
            l[n][1] += rounded.y;
          } else {
            low[n][i] = transpose_8x8(pack_mma(p0 - rounded.x, p1 - rounded.y));
            l[n][0] += p0;
            l[n][1] += p1;
          }
        }
      }
      add_values(values + block * 16 * kRowBytes, high, low);
    }
  }

  // Ends a walk: afterwards every lane of a column holds the sum over all tokens.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        l[n][j] += __shfl_xor_sync(kAllLanes, l[n][j], 4);
        l[n][j] += __shfl_xor_sync(kAllLanes, l[n][j], 8);
        l[n][j] += __shfl_xor_sync(kAllLanes, l[n][j], 16);
      }
    }
  }

  // The head-dim index of o[step][n][2 * half + j].
  static __device__ __forceinline__ int head_dim_of(int step, int half) {
    const int g = (threadIdx.x & 31) / 4;
    return kIsFp8 ? step * 16 + 2 * g + half : step * 16 + g + 8 * half;
  }

  // Writes O, m and l, kPartialStride floats a head.
  __device__ __forceinline__ void store_partial(float* partial) const {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int head = n * 8 + (lane % 4) * 2 + j;
        if (head >= kUnitHeads) continue;
        float* row = partial + head * kPartialStride;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          row[head_dim_of(step, 0)] = o[step][n][j];
          row[head_dim_of(step, 1)] = o[step][n][2 + j];
        }
        if (lane < 4) {
          row[kHeadDim] = m[n][j];
          row[kHeadDim + 1] = l[n][j];
        }
      }
    }
  }

 private:
  __device__ __forceinline__ void multiply_keys(uint32_t keys, float (&s)[kColumnBlocks][4]) const {
    const int lane = threadIdx.x & 31;
    const int row = (lane & 7) + (lane >> 3 & 1) * 8;
    const uint32_t row_base = swizzled_row(keys, row) ^ (lane >> 4) * 16;
    float odd[kColumnBlocks][4];  // a second accumulator halves the chain of dependent mma
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = odd[n][i] = 0.0f;
    }
#pragma unroll
    for (int pair = 0; pair < kSteps / 2; ++pair) {
      if constexpr (kIsFp8) {
        uint32_t r[4];
        load_matrix_x4(r, swizzled(row_base, 2 * pair));
        const Wide w[4] = {widen_fp8x4(r[0]), widen_fp8x4(r[1]), widen_fp8x4(r[2]), widen_fp8x4(r[3])};
        const uint32_t even_a[4] = {w[0].low, w[1].low, w[0].high, w[1].high};
        const uint32_t odd_a[4] = {w[2].low, w[3].low, w[2].high, w[3].high};
#pragma unroll
        for (int n = 0; n < kColumnBlocks; ++n) {
          mma_16x8x16(s[n], even_a, q[2 * pair][n][0], q[2 * pair][n][1]);
          mma_16x8x16(odd[n], odd_a, q[2 * pair + 1][n][0], q[2 * pair + 1][n][1]);
        }
      } else {
        uint32_t even_a[4], odd_a[4];
        load_matrix_x4(even_a, swizzled(row_base, 4 * pair));
        load_matrix_x4(odd_a, swizzled(row_base, 4 * pair + 2));
#pragma unroll
        for (int n = 0; n < kColumnBlocks; ++n) {
          mma_16x8x16(s[n], even_a, q[2 * pair][n][0], q[2 * pair][n][1]);
          mma_16x8x16(odd[n], odd_a, q[2 * pair + 1][n][0], q[2 * pair + 1][n][1]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] += odd[n][i];
    }
  }

  // O^T += V^T P^T for 16 tokens.
  __device__ __forceinline__ void add_values(uint32_t values, const uint32_t (&high)[kColumnBlocks][2],
                                             const uint32_t (&low)[kColumnBlocks][2]) {
    const int lane = threadIdx.x & 31;
    const int row = (lane & 7) + (kIsFp8 ? lane >> 3 & 1 : lane >> 4) * 8;
    const uint32_t row_base = swizzled_row(values, row) ^ (kIsFp8 ? lane >> 4 : lane >> 3 & 1) * 16;
    if constexpr (kIsFp8) {
#pragma unroll
      for (int pair = 0; pair < kSteps / 2; ++pair) {
        uint32_t r[4];
        load_matrix_x4_transposed(r, swizzled(row_base, 2 * pair));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          // A register holds two head dims of two tokens; the permute pairs the tokens of each head dim.
          const Wide first = widen_fp8x4(__byte_perm(r[2 * i], 0, 0x3120)),
                     second = widen_fp8x4(__byte_perm(r[2 * i + 1], 0, 0x3120));
          const uint32_t a[4] = {first.low, first.high, second.low, second.high};
#pragma unroll
          for (int n = 0; n < kColumnBlocks; ++n) {
            mma_16x8x16(o[2 * pair + i][n], a, high[n][0], high[n][1]);
          }
        }
      }
    } else {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t a[4];
        load_matrix_x4_transposed(a, swizzled(row_base, 2 * step));
#pragma unroll
        for (int n = 0; n < kColumnBlocks; ++n) {
          mma_16x8x16(o[step][n], a, high[n][0], high[n][1]);
          if constexpr (!kMmaHalf) mma_16x8x16(o[step][n], a, low[n][0], low[n][1]);
        }
      }
    }
  }

  static __device__ __forceinline__ void mask(uint32_t count, uint32_t unreadable,
                                              float (&s)[kTileRowBlocks][kColumnBlocks][4]) {
#pragma unroll
    for (int block = 0; block < kTileRowBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t token = (threadIdx.x & 31) / 4 + 8 * i + 16 * block;
        const bool keep = token < count, poison = unreadable >> token & 1;
#pragma unroll
        for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float& x = s[block][n][2 * i + j];
            x = !keep ? -INFINITY : poison ? NAN : x;
          }
        }
      }
    }
  }

  __device__ __forceinline__ void raise_maximum(const float (&s)[kTileRowBlocks][kColumnBlocks][4]) {
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float largest = m[n][j];
#pragma unroll
        for (int block = 0; block < kTileRowBlocks; ++block) {
          largest = fmaxf(largest, fmaxf(s[block][n][j], s[block][n][j + 2]));
        }
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 4));
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 8));
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 16));
        const float shrink = exp2_fast(m[n][j] - largest);
        m[n][j] = largest;
        l[n][j] *= shrink;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          o[step][n][j] *= shrink;
          o[step][n][2 + j] *= shrink;
        }
      }
    }
  }
};

}  // namespace evenkv
