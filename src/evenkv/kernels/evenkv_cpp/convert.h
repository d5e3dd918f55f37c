// Cache elements, eight or so at a time, to fp32, exactly: shifts and adds that every instruction set has.
// Included once for each instruction set, inside its namespace (see instruction_sets.h): no include guard.

typedef float Floats __attribute__((vector_size(EVENKV_LANES * 4)));
typedef float Quad __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(EVENKV_LANES * 4)));
typedef uint16_t Shorts __attribute__((vector_size(EVENKV_LANES * 2)));
typedef uint8_t Bytes __attribute__((vector_size(EVENKV_LANES)));

constexpr int kLanes = EVENKV_LANES;

inline Floats as_floats(Ints bits) { return (Floats)bits; }
inline Ints as_ints(Floats values) { return (Ints)values; }
inline Floats splat(float value) { return Floats{} + value; }
inline Ints splat_int(int32_t value) { return Ints{} + value; }

// Lanes of `yes` where `mask` is all ones, of `no` where it is zero.
inline Floats select(Ints mask, Floats yes, Floats no) {
  return as_floats((mask & as_ints(yes)) | (~mask & as_ints(no)));
}

// Compilers take a direct conversion from bytes apart, element by element.
inline Ints widen_bytes(Bytes raw) {
#if EVENKV_LANES == 8
  __m128i wide{};
  __builtin_memcpy(&wide, &raw, sizeof raw);
  return (Ints)_mm256_cvtepu8_epi32(wide);
#elif EVENKV_LANES == 16
  return (Ints)_mm512_cvtepu8_epi32((__m128i)raw);
#else
  return __builtin_convertvector(raw, Ints);
#endif
}

inline Floats load(const float* from) {
  Floats values;
  __builtin_memcpy(&values, from, sizeof values);
  return values;
}
inline void store(float* to, Floats values) { __builtin_memcpy(to, &values, sizeof values); }

struct BFloat16 {
  using Storage = uint16_t;
  using Vector = Shorts;
  static Floats widen(Vector raw) { return as_floats(__builtin_convertvector(raw, Ints) << 16); }
};

// An 8-bit float with kMantissa mantissa bits: widened by moving its fields and adding the difference of the
// exponents' biases. A subnormal has no implicit one, so it is built with one that is taken off again.
template <int kMantissa, int kBias, bool kHasInfinity>
struct Float8 {
  using Storage = uint8_t;
  using Vector = Bytes;
  static Floats widen(Vector raw) {
    constexpr int kExponentOne = 1 << kMantissa;  // the smallest normal, as an 8-bit pattern
    constexpr int kTop = kHasInfinity ? 0x7C : 0x7F;
    const Ints code = widen_bytes(raw);
    const Ints magnitude = code & 0x7F;
    const Ints sign = (code & 0x80) << 24;
    const Ints moved = magnitude << (23 - kMantissa);
    const Floats normal = as_floats(moved + ((127 - kBias) << 23));
    const Floats least = as_floats(splat_int((128 - kBias) << 23));
    const Floats subnormal = as_floats(moved + ((128 - kBias) << 23)) - least;
    Floats value = select(magnitude < kExponentOne, subnormal, normal);
    // The top codes keep their mantissa under an exponent of all ones: NaN, and infinity where there is one.
    const Floats special = as_floats(moved | splat_int(0x7F800000));
    value = select(magnitude >= kTop, special, value);
    return as_floats(as_ints(value) | sign);
  }
};
using Float8E4M3 = Float8<3, 7, false>;
using Float8E5M2 = Float8<2, 15, true>;

template <class Element>
inline Floats load(const typename Element::Storage* from) {
  typename Element::Vector raw;
  __builtin_memcpy(&raw, from, sizeof raw);
  return Element::widen(raw);
}

// The first `count` lanes; the others are zero. Never reads past them.
template <class Element>
inline Floats load_some(const typename Element::Storage* from, int count) {
  typename Element::Vector raw{};
  __builtin_memcpy(&raw, from, count * sizeof *from);
  return Element::widen(raw);
}

inline float sum_lanes(Floats values) {
  Quad quads[kLanes / 4];
  __builtin_memcpy(quads, &values, sizeof values);
#pragma GCC unroll 4
  for (int i = 1; i < kLanes / 4; ++i) quads[0] += quads[i];
  return (quads[0][0] + quads[0][2]) + (quads[0][1] + quads[0][3]);
}

// 2^x to about one unit in the last place; 0 below 2^-125, NaN for NaN, for x up to 0 (and a little more).
inline Floats exp2_lanes(Floats x) {
  const Ints tiny = x < splat(-125.0f);
  x = select(tiny, splat(-125.0f), x);
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Floats shifted = x + magic;
  const Ints exponent = as_ints(shifted) - as_ints(splat(magic));
  const Floats f = x - (shifted - magic);
  Floats p = splat(1.5403530e-4f);  // Taylor coefficients ln(2)^n / n!, |f| <= 1/2
  p = p * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  const Floats scale = as_floats((exponent + 127) << 23);
  return select(tiny, splat(0.0f), p * scale);
}
