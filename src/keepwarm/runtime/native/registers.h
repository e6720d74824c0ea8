// Vectors of sixteen elements, in one register or in several. GCC keeps a vector that is wider than a register in memory,
// and computes it from there piece by piece. It keeps the halves of a struct in registers.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace {

constexpr int LANES = 16;

#if defined(__AVX512F__)
constexpr int REGISTER = 16;  // 32-bit lanes of a register
#elif defined(__AVX2__)
constexpr int REGISTER = 8;
#else
constexpr int REGISTER = 4;
#endif
constexpr bool WHOLE = REGISTER == LANES;  // whether a register holds a vector
constexpr int SUMS = REGISTER == 16 ? 12 : REGISTER == 8 ? 6 : 5;  // rows whose sums with a vector's columns have registers

template <class E> struct InRegister { typedef E Type __attribute__((vector_size(REGISTER * sizeof(E)))); };
template <class E, int N> struct Halves;
template <class E, int N> struct VectorOf { typedef Halves<E, N> Type; };
template <class E> struct VectorOf<E, REGISTER> { typedef typename InRegister<E>::Type Type; };
template <class E, int N> using Vector = typename VectorOf<E, N>::Type;

template <class E, int N>
struct Halves {
    Vector<E, N / 2> low, high;
    E operator[](int i) const { return i < N / 2 ? low[i] : high[i - N / 2]; }
};

using Vec = Vector<float, LANES>;
using VecI = Vector<int32_t, LANES>;
using VecU = Vector<uint32_t, LANES>;
using VecH = Vector<uint16_t, LANES>;
using Floats = Vector<float, REGISTER>;
using Ints = Vector<int32_t, REGISTER>;
using Words = Vector<uint32_t, REGISTER>;
using Shorts = Vector<uint16_t, REGISTER>;

struct bf16 { uint16_t bits; };

#define INLINE __attribute__((always_inline)) inline
template <class E> struct Same { using Type = E; };  // a template parameter is not deduced from it

#define BY_HALVES(OP, RESULT)                                                                                \
    template <class E, int N> INLINE Halves<RESULT, N> operator OP(Halves<E, N> a, Halves<E, N> b) {          \
        return {a.low OP b.low, a.high OP b.high};                                                            \
    }                                                                                                         \
    template <class E, int N> INLINE Halves<RESULT, N> operator OP(Halves<E, N> a, typename Same<E>::Type b) { \
        return {a.low OP b, a.high OP b};                                                                     \
    }
BY_HALVES(+, E)
BY_HALVES(-, E)
BY_HALVES(*, E)
BY_HALVES(/, E)
BY_HALVES(&, E)
BY_HALVES(|, E)
BY_HALVES(<<, E)
BY_HALVES(>>, E)
BY_HALVES(<, int32_t)
BY_HALVES(>, int32_t)
BY_HALVES(<=, int32_t)
BY_HALVES(>=, int32_t)
BY_HALVES(==, int32_t)
template <class E, int N> INLINE Halves<E, N> operator-(Halves<E, N> a) { return {-a.low, -a.high}; }
template <class E, int N> INLINE Halves<E, N>& operator+=(Halves<E, N>& a, Halves<E, N> b) { return a = a + b; }
template <class E, int N> INLINE Halves<E, N>& operator*=(Halves<E, N>& a, Halves<E, N> b) { return a = a * b; }

// ---- what a register does, and what halves do ----

INLINE Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }
INLINE Ints to_ints(Floats x) { return __builtin_convertvector(x, Ints); }  // towards zero
INLINE Floats as_floats(Ints x) { return (Floats)x; }
INLINE Floats as_floats(Words x) { return (Floats)x; }
INLINE Ints as_ints(Floats x) { return (Ints)x; }
INLINE Words as_words(Floats x) { return (Words)x; }
INLINE Words to_words(Shorts x) { return __builtin_convertvector(x, Words); }
INLINE Shorts to_shorts(Words x) { return __builtin_convertvector(x, Shorts); }
template <int N> INLINE Halves<float, N> to_floats(Halves<int32_t, N> x) { return {to_floats(x.low), to_floats(x.high)}; }
template <int N> INLINE Halves<int32_t, N> to_ints(Halves<float, N> x) { return {to_ints(x.low), to_ints(x.high)}; }
template <class E, int N> INLINE Halves<float, N> as_floats(Halves<E, N> x) { return {as_floats(x.low), as_floats(x.high)}; }
template <int N> INLINE Halves<int32_t, N> as_ints(Halves<float, N> x) { return {as_ints(x.low), as_ints(x.high)}; }
template <int N> INLINE Halves<uint32_t, N> as_words(Halves<float, N> x) { return {as_words(x.low), as_words(x.high)}; }
template <int N> INLINE Halves<uint32_t, N> to_words(Halves<uint16_t, N> x) { return {to_words(x.low), to_words(x.high)}; }
template <int N> INLINE Halves<uint16_t, N> to_shorts(Halves<uint32_t, N> x) { return {to_shorts(x.low), to_shorts(x.high)}; }

// Returns a where the mask is set, else b.
INLINE Floats pick(Ints mask, Floats a, Floats b) { return mask ? a : b; }
template <int N> INLINE Halves<float, N> pick(Halves<int32_t, N> mask, Halves<float, N> a, Halves<float, N> b) {
    return {pick(mask.low, a.low, b.low), pick(mask.high, a.high, b.high)};
}

// Returns a b + c, with c as it is rounded, even if it is itself a product.
INLINE Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}
template <int N> INLINE Halves<float, N> fused(Halves<float, N> a, Halves<float, N> b, Halves<float, N> c) {
    return {fused(a.low, b.low, c.low), fused(a.high, b.high, c.high)};
}

// Returns a b + c, where c is no product: else the compiler might fuse that one with the sum (-ffp-contract=fast).
template <class V> INLINE V fma(V a, V b, V c) {
    if constexpr (WHOLE) return fused(a, b, c);
    else return a * b + c;  // loops of products are a few hundredths faster this way
}

INLINE Floats max(Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}
template <int N> INLINE Halves<float, N> max(Halves<float, N> a, Halves<float, N> b) { return {max(a.low, b.low), max(a.high, b.high)}; }

inline float sum(Floats v) {
    for (int width = REGISTER / 2; width; width /= 2)
        for (int i = 0; i < width; i++) v[i] += v[i + width];
    return v[0];
}
template <int N> INLINE float sum(Halves<float, N> v) { return sum(v.low + v.high); }

// Rounds to the nearest integer, to even if there are two.
INLINE Ints rounded(Floats x) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtps_epi32((__m256)x);
#elif defined(__ARM_NEON)
    return (Ints)vcvtnq_s32_f32((float32x4_t)x);
#else
    Ints n;
    for (int i = 0; i < REGISTER; i++) n[i] = (int32_t)__builtin_nearbyintf(x[i]);
    return n;
#endif
}
template <int N> INLINE Halves<int32_t, N> rounded(Halves<float, N> x) { return {rounded(x.low), rounded(x.high)}; }

template <class V> constexpr bool IN_HALVES = false;
template <class E, int N> constexpr bool IN_HALVES<Halves<E, N>> = true;

template <class V, class E> INLINE V filled(E x) {
    if constexpr (IN_HALVES<V>) {
        const auto half = filled<decltype(V::low)>(x);
        return {half, half};
    } else {
        return x - V{};
    }
}

// Reads and writes elements as they are.
template <class V, class E> INLINE V of_memory(const E* p) {
    if constexpr (IN_HALVES<V>) {
        using Half = decltype(V::low);
        return {of_memory<Half>(p), of_memory<Half>(p + sizeof(Half) / sizeof(E))};
    } else {
        V v;
        std::memcpy(&v, p, sizeof v);
        return v;
    }
}
template <class V, class E> INLINE void to_memory(E* p, V v) {
    if constexpr (IN_HALVES<V>) to_memory(p, v.low), to_memory(p + sizeof v.low / sizeof(E), v.high);
    else std::memcpy(p, &v, sizeof v);
}

// Return bytes as integers.
template <class V> INLINE V of_bytes(const uint8_t* p) {
    if constexpr (IN_HALVES<V>) {
        using Half = decltype(V::low);
        return {of_bytes<Half>(p), of_bytes<Half>(p + sizeof(Half) / 4)};
    } else {
#if defined(__AVX512F__)
        return (V)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
        return (V)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
        return V{p[0], p[1], p[2], p[3]};
#endif
    }
}
INLINE VecI of_signed_bytes(const uint8_t* p) { return of_bytes<VecI>(p) << 24 >> 24; }

}  // namespace
