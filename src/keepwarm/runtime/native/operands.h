// An operand is what one step of a sum multiplies: a float, or a pair of neighbouring bfloat16, for which some processors
// have an instruction (AVX512_BF16, FEAT_BF16 of arm64).
#pragma once

#include "vectors.h"

#if defined(PAIRS) && (defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC))
#define HAS_PAIRS 1
#endif

namespace {

template <class X> struct Operand;

template <> struct Operand<float> {
    using Element = float;
    static constexpr int MANY = 1;  // elements of an operand
    static Vec splat(const float* p) { return ::splat(*p); }
    static Vec add(Vec a, Vec b, Vec sum) { return fma(a, b, sum); }
};

#if defined(__AVX512BF16__)
// Returns sixteen pairs. Each has an element of the lower half and the same element of the upper half.
inline Vec interleaved(__m512i halves) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                           23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (Vec)_mm512_permutexvar_epi16(order, halves);
}

// Returns pairs of an element of a and the same element of b; of floats, rounded to bfloat16.
inline Vec paired(Shorts a, Shorts b) {
    return interleaved(_mm512_inserti64x4(_mm512_castsi256_si512((__m256i)a), (__m256i)b, 1));
}
inline Vec paired(Vec a, Vec b) { return interleaved((__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a)); }

// Adds the products of pairs.
inline Vec add_pairs(Vec a, Vec b, Vec sum) { return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }

// Returns number 2^floor(x), for a number in [1, 2), and x - floor(x).
inline Vec raised_by(Vec number, Vec x) { return (Vec)_mm512_scalef_ps((__m512)number, (__m512)x); }
inline Vec fraction(Vec x) { return (Vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
INLINE Floats paired(Shorts a, Shorts b) {
    const uint16x4_t none = vdup_n_u16(0);
    return (Floats)vzip1q_u16(vcombine_u16((uint16x4_t)a, none), vcombine_u16((uint16x4_t)b, none));
}
INLINE Floats paired(Floats a, Floats b) {
    const bfloat16x8_t both = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)a), (float32x4_t)b);
    const uint16x8_t bits = vreinterpretq_u16_bf16(both);
    return (Floats)vzip1q_u16(bits, vextq_u16(bits, bits, 4));
}
INLINE Floats add_pairs(Floats a, Floats b, Floats sum) {
    return (Floats)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
INLINE Floats raised_by(Floats number, Floats x) {
    return as_floats(as_ints(number) + (to_ints((Floats)vrndmq_f32((float32x4_t)max(x, Floats{} - 126))) << 23));
}
INLINE Floats fraction(Floats x) { return x - (Floats)vrndmq_f32((float32x4_t)x); }
template <class E, int N> INLINE Halves<float, N> paired(Halves<E, N> a, Halves<E, N> b) {
    return {paired(a.low, b.low), paired(a.high, b.high)};
}
template <int N> INLINE Halves<float, N> add_pairs(Halves<float, N> a, Halves<float, N> b, Halves<float, N> sum) {
    return {add_pairs(a.low, b.low, sum.low), add_pairs(a.high, b.high, sum.high)};
}
template <int N> INLINE Halves<float, N> raised_by(Halves<float, N> number, Halves<float, N> x) {
    return {raised_by(number.low, x.low), raised_by(number.high, x.high)};
}
template <int N> INLINE Halves<float, N> fraction(Halves<float, N> x) { return {fraction(x.low), fraction(x.high)}; }
#endif

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
// Returns 2^x with a relative error below 3e-6, by a polynomial that is fitted on [0, 1) and is 1 at 0. That suffices for
// weights that are rounded to bfloat16, because its own error is 2e-3.
inline Vec exp2_short(Vec x) {
    const Vec f = fraction(x);
    Vec p = splat(0.0134266848f);
    p = fma(p, f, splat(0.0522424731f));
    p = fma(p, f, splat(0.241280206f));
    p = fma(p, f, splat(0.693044845f));
    p = fma(p, f, splat(1.f));
    return raised_by(p, x);  // p * 2^floor(x)
}
#endif

#if defined(HAS_PAIRS)
struct Pair { bf16 first, second; };

template <> struct Operand<Pair> {
    using Element = bf16;
    static constexpr int MANY = 2;
    static Vec splat(const Pair* p) {
        int32_t bits;
        std::memcpy(&bits, p, sizeof bits);
        return as_floats(filled<VecI>(bits));
    }
    static Vec add(Vec a, Vec b, Vec sum) { return add_pairs(a, b, sum); }
};

INLINE Vec load(const Pair* p) { return of_memory<Vec>(p); }
INLINE void store(Pair* p, Vec v) { to_memory(p, v); }
#endif

}  // namespace
