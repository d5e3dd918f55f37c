// Thin names for the PTX instructions the kernel is made of. sm_80 is the base.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "row_maps.cuh"

namespace evenkv {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// 16 bytes, global to shared; bytes past `valid` are zero-filled and never read from global memory. K and V
// are read once: they leave L2 first, and page ids, queries and partials stay.
__device__ __forceinline__ void copy_async_16(uint32_t dst, const void* src, uint32_t valid) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(dst), "l"(src),
               "r"(valid), "l"(policy)
               : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Barriers in shared memory at which bytes arrive, one promise of bytes a phase (sm_90). Lanes wait for the
// phase of a parity.
__device__ __forceinline__ void start_barrier(uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
#endif
}
__device__ __forceinline__ void expect_bytes(uint32_t barrier, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}
__device__ __forceinline__ void wait_for_bytes(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}
__device__ __forceinline__ void fence_barriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
// What lanes did to shared memory comes before what the copy engine does.
__device__ __forceinline__ void fence_for_copies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
__device__ __forceinline__ void prefetch_map(const RowMap& map) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
#endif
}
// 16 rows of a page, from byte `first` of each; `near` and `far` are slot and head in the map's order. One
// lane asks, the bytes arrive at `barrier`.
__device__ __forceinline__ void copy_16_rows(uint32_t dst, const RowMap& map, int32_t first, int32_t near,
                                             int32_t far, int32_t page, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(dst),
      "l"(&map), "r"(first), "r"(near), "r"(far), "r"(page), "r"(barrier), "l"(policy)
      : "memory");
#endif
}

// Hides from the compiler how an address came about, so that what is added to it stays an offset.
template <typename T>
__device__ __forceinline__ const T* opaque(const T* p) {
  asm("" : "+l"(p));
  return p;
}

__device__ __forceinline__ void prefetch_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// Counts in: what this thread wrote or saw written is visible to whoever counts in later and then acquires.
// Lighter than __threadfence, which also empties L1.
__device__ __forceinline__ int32_t count_in_release(int32_t* counter) {
  int32_t before;
  asm volatile("atom.add.release.gpu.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}
__device__ __forceinline__ void acquire() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Clusters of blocks (sm_90): a barrier, and an address of another block's shared memory. Lanes may come to
// the barrier from a loop apart from each other. kOrders: what was written before it is seen after it, which
// costs a fence.
template <bool kOrders>
__device__ __forceinline__ void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  if constexpr (kOrders) {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
  } else {
    asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
  }
#endif
}
__device__ __forceinline__ const float* shared_of_rank(const float* own, int32_t rank) {
#if __CUDA_ARCH__ >= 900
  uint64_t address;
  asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(own), "r"(rank));
  return reinterpret_cast<const float*>(address);
#else
  return own;
#endif
}

__device__ __forceinline__ void load_matrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrix_x4_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t a) {
  uint32_t d;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

// D[16x8] += A[16x16] * B[16x8], fp32 accumulators.
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kMmaHalf) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats to fp16 or bf16; `low` lands in the low half.
template <bool kHalf>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  uint32_t r;
  if constexpr (kHalf) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  }
  return r;
}
// To the tensor core's type, and back.
__device__ __forceinline__ uint32_t pack_mma(float low, float high) { return pack_pair<kMmaHalf>(low, high); }
__device__ __forceinline__ float2 unpack_mma(uint32_t r) {
  if constexpr (kMmaHalf) {
    return __half22float2(*reinterpret_cast<const __half2*>(&r));
  } else {
    return make_float2(__uint_as_float(r << 16), __uint_as_float(r & 0xffff0000u));
  }
}

// Four fp8 values to fp16, exactly: the low two and the high two.
struct Wide {
  uint32_t low, high;
};

#if __CUDA_ARCH__ >= 890
__device__ __forceinline__ Wide widen_fp8x4(uint32_t four) {
  Wide wide;
  // Halves of a register by name: shifted down, the high ones would cost an instruction more.
  if constexpr (kKvType == kE5M2) {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e5m2x2 %0, low;\ncvt.rn.f16x2.e5m2x2 %1, high;\n}"
        : "=r"(wide.low), "=r"(wide.high)
        : "r"(four));
  } else {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(wide.low), "=r"(wide.high)
        : "r"(four));
  }
  return wide;
}
#else
__device__ __forceinline__ uint32_t widen_fp8x2(uint32_t pair) {
  const uint32_t bytes = __byte_perm(pair & 0xffffu, 0, 0x1404);  // each value in the high byte of a half
  if constexpr (kKvType == kE5M2) return bytes;                   // e5m2 is fp16's upper byte
  // e4m3 shifted to fp16's exponent field is 2^8 too small (bias 7 against 15); 0x7f is NaN.
  const uint32_t scaled = (bytes & 0x80008000u) | ((bytes & 0x7f007f00u) >> 1);
  const __half2 value = __hmul2(*reinterpret_cast<const __half2*>(&scaled), __float2half2_rn(256.0f));
  uint32_t wide = *reinterpret_cast<const uint32_t*>(&value);
  if ((bytes & 0x7f00u) == 0x7f00u) wide |= 0x7fffu;
  if ((bytes & 0x7f000000u) == 0x7f000000u) wide |= 0x7fff0000u;
  return wide;
}
__device__ __forceinline__ Wide widen_fp8x4(uint32_t four) {
  return {widen_fp8x2(four), widen_fp8x2(four >> 16)};
}
#endif

}  // namespace evenkv
