// What is computed with vectors of sixteen floats. In memory the numbers may be bfloat16.
#pragma once

#include <cfenv>

#include "registers.h"

namespace {

// Makes its thread round to nearest and keep denormals for as long as it lives. The process may have set something else
// (torch.set_flush_denormal, a library built with -ffast-math), and a row's bits would depend on that.
class Rounding {
#if defined(__aarch64__)  // all of the register: fesetenv leaves the bit that changes how `bfdot` rounds
    uint64_t before;
    static void set(uint64_t bits) { asm volatile("msr fpcr, %0" : : "r"(bits) : "memory"); }

public:
    Rounding() {
        asm volatile("mrs %0, fpcr" : "=r"(before));
        set(0);
    }
    ~Rounding() { set(before); }
#else
    std::fenv_t before;

public:
    Rounding() { std::fegetenv(&before), std::fesetenv(FE_DFL_ENV); }
    ~Rounding() { std::fesetenv(&before); }
#endif
};

INLINE Vec splat(float x) { return filled<Vec>(x); }
INLINE Vec load(const float* p) { return of_memory<Vec>(p); }
INLINE void store(float* p, Vec v) { to_memory(p, v); }
INLINE Vec load(const bf16* p) { return as_floats(to_words(of_memory<VecH>(p)) << 16); }
INLINE void store(bf16* p, Vec v) {  // rounded to nearest even, as torch does
    const VecU bits = as_words(v);
    to_memory(p, to_shorts((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16));
}

// Returns 2^x with a relative error below 3e-7, by Cody-Waite reduction and the exponential series to the seventh power.
inline Vec exp2v(Vec x) {
    x = max(x, splat(-126.f));
    x = pick(x > splat(126.f), splat(126.f), x);
    const VecI n = to_ints(x + pick(x < Vec{}, splat(-0.5f), splat(0.5f)));
    const Vec f = (x - to_floats(n)) * splat(0.693147180559945f);
    Vec p = splat(1.f / 5040);
    p = fma(p, f, splat(1.f / 720));
    p = fma(p, f, splat(1.f / 120));
    p = fma(p, f, splat(1.f / 24));
    p = fma(p, f, splat(1.f / 6));
    p = fma(p, f, splat(0.5f));
    p = fma(p, f, splat(1.f));
    p = fma(p, f, splat(1.f));
    return as_floats(as_ints(p) + (n << 23));
}

inline Vec sigmoid(Vec x) { return splat(1.f) / (splat(1.f) + exp2v(x * splat(-1.44269504f))); }

// Returns log(1 + e^x). With f near 0, log(1 + f) = 2 artanh(f / (2 + f)), by five terms of its series.
inline Vec softplus(Vec x) {
    const Vec raised = exp2v(pick(x > splat(20.f), splat(20.f), x) * splat(1.44269504f)), sum = raised + splat(1.f);
    const VecI n = (as_ints(sum) - 0x3f400000) >> 23;  // sum 2^-n is in [0.75, 1.5)
    const Vec part = as_floats(as_ints(sum) - (n << 23)), f = pick(n == 0, raised, part - splat(1.f));
    const Vec s = f / (f + splat(2.f)), z = s * s;
    Vec p = splat(2.f / 9);
    p = fma(p, z, splat(2.f / 7));
    p = fma(p, z, splat(2.f / 5));
    p = fma(p, z, splat(2.f / 3));
    p = fma(p, z, splat(2.f));
    const Vec found = fused(to_floats(n), splat(0.693147181f), p * s);
    return pick(x > splat(20.f), x, found);
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
    const Vec size = pick(x < Vec{}, -x, x) * splat(0.70710678f), t = splat(1.f) / fma(splat(0.3275911f), size, splat(1.f));
    Vec p = splat(1.061405429f);
    p = fma(p, t, splat(-1.453152027f));
    p = fma(p, t, splat(1.421413741f));
    p = fma(p, t, splat(-0.284496736f));
    p = fma(p, t, splat(0.254829592f));
    const Vec rest = p * t * exp2v(size * size * splat(-1.44269504f));  // 1 - erf(|x| / sqrt 2)
    return x * splat(0.5f) * pick(x < Vec{}, rest, splat(2.f) - rest);
}

inline float widened_bf16(uint16_t bits) {
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

}  // namespace
