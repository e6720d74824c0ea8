// Sixteen floats at once, and bfloat16 in memory.
#pragma once

#include <cfenv>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t VecI __attribute__((vector_size(LANES * 4)));
typedef uint16_t VecH __attribute__((vector_size(LANES * 2)));
typedef uint32_t VecU __attribute__((vector_size(LANES * 4)));

struct bf16 { uint16_t bits; };

// Has the thread round to nearest and keep denormals for as long as it lives, whatever the process has set
// (torch.set_flush_denormal, libraries built with -ffast-math): that is part of what a row's bits depend on.
class Rounding {
    std::fenv_t before;

public:
    Rounding() { std::fegetenv(&before), std::fesetenv(FE_DFL_ENV); }
    ~Rounding() { std::fesetenv(&before); }
};

inline Vec splat(float x) { return x - Vec{}; }

inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;  // contracted by -ffp-contract=fast
#endif
}

inline Vec load(const float* p) { Vec v; std::memcpy(&v, p, sizeof v); return v; }
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
inline Vec load(const bf16* p) {
    VecH h;
    std::memcpy(&h, p, sizeof h);
    return (Vec)(__builtin_convertvector(h, VecU) << 16);
}
inline void store(bf16* p, Vec v) {  // rounded to nearest even, as torch does
    VecU bits = (VecU)v;
    VecH h = __builtin_convertvector((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, VecH);
    std::memcpy(p, &h, sizeof h);
}

inline float sum(Vec v) {
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) v[i] += v[i + width];
    return v[0];
}

inline Vec max(Vec a, Vec b) {
#if defined(__AVX512F__)
    return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

// 2^x with a relative error below 3e-7: Cody-Waite reduction, then the exponential series to the seventh power.
inline Vec exp2v(Vec x) {
    x = max(x, splat(-126.f));
    x = x > splat(126.f) ? splat(126.f) : x;
    VecI n = __builtin_convertvector(x + (x < Vec{} ? splat(-0.5f) : splat(0.5f)), VecI);
    Vec f = (x - __builtin_convertvector(n, Vec)) * splat(0.693147180559945f);
    Vec p = splat(1.f / 5040);
    p = fma(p, f, splat(1.f / 720));
    p = fma(p, f, splat(1.f / 120));
    p = fma(p, f, splat(1.f / 24));
    p = fma(p, f, splat(1.f / 6));
    p = fma(p, f, splat(0.5f));
    p = fma(p, f, splat(1.f));
    p = fma(p, f, splat(1.f));
    return (Vec)((VecI)p + (n << 23));
}

inline Vec silu(Vec x) { return x * (splat(1.f) / (splat(1.f) + exp2v(x * splat(-1.44269504f)))); }

}  // namespace
