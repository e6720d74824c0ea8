// Vectors of sixteen floats. In memory the numbers may be bfloat16.
#pragma once

#include <cfenv>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t VecI __attribute__((vector_size(LANES * 4)));
typedef uint16_t VecH __attribute__((vector_size(LANES * 2)));
typedef uint32_t VecU __attribute__((vector_size(LANES * 4)));

struct bf16 { uint16_t bits; };

// Makes its thread round to nearest and keep denormals for as long as it lives. The process may have set something else
// (torch.set_flush_denormal, a library built with -ffast-math), and a row's bits would depend on that.
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
    return a * b + c;  // -ffp-contract=fast makes one instruction of it
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

// Returns 2^x with a relative error below 3e-7, by Cody-Waite reduction and the exponential series to the seventh power.
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

inline Vec sigmoid(Vec x) { return splat(1.f) / (splat(1.f) + exp2v(x * splat(-1.44269504f))); }

// Returns log(1 + e^x). With f near 0, log(1 + f) = 2 artanh(f / (2 + f)), by five terms of its series.
inline Vec softplus(Vec x) {
    const Vec raised = exp2v((x > splat(20.f) ? splat(20.f) : x) * splat(1.44269504f)), sum = raised + splat(1.f);
    const VecI n = ((VecI)sum - 0x3f400000) >> 23;  // sum 2^-n is in [0.75, 1.5)
    const Vec part = (Vec)((VecI)sum - (n << 23)), f = n == 0 ? raised : part - splat(1.f);
    const Vec s = f / (f + splat(2.f)), z = s * s;
    Vec p = splat(2.f / 9);
    p = fma(p, z, splat(2.f / 7));
    p = fma(p, z, splat(2.f / 5));
    p = fma(p, z, splat(2.f / 3));
    p = fma(p, z, splat(2.f));
    const Vec found = fma(__builtin_convertvector(n, Vec), splat(0.693147181f), p * s);
    return x > splat(20.f) ? x : found;
}

inline Vec silu(Vec x) { return x * (splat(1.f) / (splat(1.f) + exp2v(x * splat(-1.44269504f)))); }

// Returns cap tanh(x / cap), where tanh u = 1 - 2 / (1 + e^2u).
inline Vec capped(Vec x, float cap) {
    const Vec raised = exp2v(x * splat(2 * 1.44269504f / cap));
    return splat(cap) * (splat(1.f) - splat(2.f) / (splat(1.f) + raised));
}

// Returns x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2 (arXiv:1606.08415), where (1 + tanh u) / 2 = 1 / (1 + e^-2u).
inline Vec gelu_tanh(Vec x) {
    const Vec u = fma(splat(0.044715f) * x * x, x, x) * splat(2 * 0.79788456f * -1.44269504f);
    return x * (splat(1.f) / (splat(1.f) + exp2v(u)));
}

// Returns x (1 + erf(x / sqrt 2)) / 2, with erf by Abramowitz and Stegun 7.1.26, whose error is below 2e-7.
inline Vec gelu(Vec x) {
    const Vec size = (x < Vec{} ? -x : x) * splat(0.70710678f), t = splat(1.f) / fma(splat(0.3275911f), size, splat(1.f));
    Vec p = splat(1.061405429f);
    p = fma(p, t, splat(-1.453152027f));
    p = fma(p, t, splat(1.421413741f));
    p = fma(p, t, splat(-0.284496736f));
    p = fma(p, t, splat(0.254829592f));
    const Vec rest = p * t * exp2v(size * size * splat(-1.44269504f));  // 1 - erf(|x| / sqrt 2)
    return x * splat(0.5f) * (x < Vec{} ? rest : splat(2.f) - rest);
}

}  // namespace
