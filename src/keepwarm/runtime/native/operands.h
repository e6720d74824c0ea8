// An operand is what one step of a sum multiplies: a float, or a pair of neighbouring bfloat16, for which processors with
// AVX512_BF16 have an instruction.
#pragma once

#include "vectors.h"

#if defined(PAIRS) && defined(__AVX512BF16__)
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

#if defined(HAS_PAIRS)
struct Pair { bf16 first, second; };

template <> struct Operand<Pair> {
    using Element = bf16;
    static constexpr int MANY = 2;
    static Vec splat(const Pair* p) {
        int32_t bits;
        std::memcpy(&bits, p, sizeof bits);
        return (Vec)_mm512_set1_epi32(bits);
    }
    static Vec add(Vec a, Vec b, Vec sum) { return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
};

INLINE Vec load(const Pair* p) { return of_memory<Vec>(p); }
INLINE void store(Pair* p, Vec v) { to_memory(p, v); }
#endif

#if defined(__AVX512BF16__)
// Returns sixteen pairs. Each has an element of the lower half and the same element of the upper half.
inline Vec interleaved(__m512i halves) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                           23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (Vec)_mm512_permutexvar_epi16(order, halves);
}

// Returns sixteen pairs of numbers, rounded to bfloat16.
inline Vec paired(Vec first, Vec second) { return interleaved((__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first)); }

// Returns 2^x with a relative error below 3e-6, by a polynomial that is fitted on [0, 1) and is 1 at 0. That suffices for
// weights that are rounded to bfloat16, because its own error is 2e-3.
inline Vec exp2_short(Vec x) {
    const Vec f = (Vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    Vec p = splat(0.0134266848f);
    p = fma(p, f, splat(0.0522424731f));
    p = fma(p, f, splat(0.241280206f));
    p = fma(p, f, splat(0.693044845f));
    p = fma(p, f, splat(1.f));
    return (Vec)_mm512_scalef_ps((__m512)p, (__m512)x);  // p * 2^floor(x)
}
#endif

}  // namespace
