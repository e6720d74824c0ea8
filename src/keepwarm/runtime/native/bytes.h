// Vectors of 64 codes, four columns of 16 outputs, and the 16 sums of their products. There are four versions: AVX-512
// VNNI, AVX2 (with AVX-VNNI, too), arm64's dot products and plain loops. Sums are exact integers in all of them.
#pragma once

#include "blocks.h"

namespace {

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
using Bytes = __m512i;
using Sums = __m512i;
inline Bytes bytes_at(const uint8_t* p) {
    Bytes v = _mm512_loadu_si512(p);
    asm("" : "+v"(v));  // without this the compiler would read the memory again for each use
    return v;
}
inline Bytes low_bits(Bytes v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
template <int BY> inline Bytes raised(Bytes v) {  // shifts each byte; the bits that matter must not leave their byte
    if constexpr (BY > 0) return _mm512_slli_epi16(v, BY);
    if constexpr (BY < 0) return _mm512_srli_epi16(v, -BY);
    return v;
}
template <int MASK> inline Bytes joined(Bytes low, Bytes v) {  // low | v & MASK
    return _mm512_ternarylogic_epi64(low, v, _mm512_set1_epi8(MASK), 0xf8);
}
inline Bytes looked_up(const uint8_t* table, Bytes index) {  // of a table of sixteen
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), index);
}
inline Sums sums_from(int32_t x) { return _mm512_set1_epi32(x); }
template <int BITS> inline Sums add_products(Sums sums, Bytes codes, const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof four);
    return _mm512_dpbusd_epi32(sums, codes, _mm512_set1_epi32(four));
}
inline Sums both(Sums a, Sums b) { return _mm512_add_epi32(a, b); }
inline Vec floats(Sums sums) { return (Vec)_mm512_cvtepi32_ps(sums); }
inline Vec halves(const uint8_t* p) { return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
#elif defined(__AVX2__) && defined(__F16C__)
struct Bytes { __m256i h[2]; };  // each half has the codes of 8 outputs
using Sums = Bytes;
inline Bytes bytes_at(const uint8_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
inline Bytes low_bits(Bytes v) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(v.h[0], mask), _mm256_and_si256(v.h[1], mask)};
}
template <int BY> inline Bytes raised(Bytes v) {
    if constexpr (BY > 0) return {_mm256_slli_epi16(v.h[0], BY), _mm256_slli_epi16(v.h[1], BY)};
    if constexpr (BY < 0) return {_mm256_srli_epi16(v.h[0], -BY), _mm256_srli_epi16(v.h[1], -BY)};
    return v;
}
template <int MASK> inline Bytes joined(Bytes low, Bytes v) {
    const __m256i mask = _mm256_set1_epi8(MASK);
    for (int i = 0; i < 2; i++) low.h[i] = _mm256_or_si256(low.h[i], _mm256_and_si256(v.h[i], mask));
    return low;
}
inline Bytes looked_up(const uint8_t* table, Bytes index) {
    const __m256i numbers = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
    return {_mm256_shuffle_epi8(numbers, index.h[0]), _mm256_shuffle_epi8(numbers, index.h[1])};
}
inline Sums sums_from(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline __m256i four_of(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof four);
    return _mm256_set1_epi32(four);
}
#if defined(__AVXVNNI__)
template <int BITS> inline Sums add_products(Sums sums, Bytes codes, const int8_t* x) {
    for (int i = 0; i < 2; i++) sums.h[i] = _mm256_dpbusd_avx_epi32(sums.h[i], codes.h[i], four_of(x));
    return sums;
}
#else
#define SIGNED_BYTES
#define IN_STRIPS
// Adds the products of 4 STEPS columns to the sums of R rows that lie `apart` bytes apart. Pairs of products are added in 16
// bits first, in registers, and a vector of codes is read once for all rows.
template <int BITS, int STEPS, int R>
INLINE void add_products(Sums (&sums)[R], const Bytes* codes, const int8_t* x, int64_t apart) {
    constexpr int MOST = BITS <= 4 ? 8 : BITS == 5 ? 4 : BITS < 8 ? 2 : 1;  // sums of so many pairs stay below 2^15
    constexpr int EACH = MOST < STEPS ? MOST : STEPS;
#pragma GCC unroll 8
    for (int from = 0; from < STEPS; from += EACH) {
        __m256i pairs[R][2];
#pragma GCC unroll 8
        for (int at = from; at < from + EACH; at++) {
            __m256i code[2], size[2];
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                code[i] = codes[at].h[i];
                if constexpr (BITS == 8) {  // as signed codes: their sizes times x with their signs, of which none is -128
                    code[i] = _mm256_xor_si256(code[i], _mm256_set1_epi8(-128));
                    size[i] = _mm256_abs_epi8(code[i]);
                }
            }
#pragma GCC unroll 4
            for (int m = 0; m < R; m++) {
                const __m256i four = four_of(x + m * apart + 4 * at);
#pragma GCC unroll 2
                for (int i = 0; i < 2; i++) {
                    const __m256i more = BITS == 8 ? _mm256_maddubs_epi16(size[i], _mm256_sign_epi8(four, code[i]))
                                                   : _mm256_maddubs_epi16(code[i], four);
                    pairs[m][i] = at == from ? more : _mm256_add_epi16(pairs[m][i], more);
                    asm("" : "+x"(pairs[m][i]));  // else the compiler multiplies first and keeps all products in memory
                }
            }
        }
#pragma GCC unroll 4
        for (int m = 0; m < R; m++)
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++)
                sums[m].h[i] = _mm256_add_epi32(sums[m].h[i], _mm256_madd_epi16(pairs[m][i], _mm256_set1_epi16(1)));
    }
}
#endif
inline Sums both(Sums a, Sums b) { return {_mm256_add_epi32(a.h[0], b.h[0]), _mm256_add_epi32(a.h[1], b.h[1])}; }
inline Vec vector_of(__m256 low, __m256 high) {
#if defined(__AVX512F__)
    return (Vec)_mm512_insertf64x4(_mm512_castps_pd(_mm512_castps256_ps512(low)), _mm256_castps_pd(high), 1);
#else
    return {(Floats)low, (Floats)high};
#endif
}
inline Vec floats(Sums s) { return vector_of(_mm256_cvtepi32_ps(s.h[0]), _mm256_cvtepi32_ps(s.h[1])); }
inline Vec halves(const uint8_t* p) {
    const __m128i* const at = (const __m128i*)p;
    return vector_of(_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at + 1)));
}
#elif defined(__ARM_FEATURE_DOTPROD)
struct Bytes { uint8x16_t q[4]; };  // of 4 outputs each
struct Sums { int32x4_t q[4]; };
inline Bytes bytes_at(const uint8_t* p) { return {vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}; }
inline Bytes low_bits(Bytes b) { for (auto& q : b.q) q = vandq_u8(q, vdupq_n_u8(15)); return b; }
template <int BY> inline Bytes raised(Bytes b) {
    if constexpr (BY > 0) for (auto& q : b.q) q = vshlq_n_u8(q, BY);
    if constexpr (BY < 0) for (auto& q : b.q) q = vshrq_n_u8(q, -BY);
    return b;
}
template <int MASK> inline Bytes joined(Bytes low, Bytes b) {
    for (int i = 0; i < 4; i++) low.q[i] = vorrq_u8(low.q[i], vandq_u8(b.q[i], vdupq_n_u8(MASK)));
    return low;
}
inline Bytes looked_up(const uint8_t* table, Bytes index) {
    for (auto& q : index.q) q = vqtbl1q_u8(vld1q_u8(table), q);
    return index;
}
inline Sums sums_from(int32_t x) { const int32x4_t all = vdupq_n_s32(x); return {all, all, all, all}; }
template <int BITS> inline Sums add_products(Sums sums, Bytes codes, const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof four);
    const int8x16_t all = vreinterpretq_s8_s32(vdupq_n_s32(four));
    for (int i = 0; i < 4; i++) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
        sums.q[i] = vusdotq_s32(sums.q[i], codes.q[i], all);
#else
        if constexpr (BITS == 8) {  // as signed codes, and 128 more of each
            const int8x16_t half = vdupq_n_s8(64);
            sums.q[i] = vdotq_s32(vdotq_s32(sums.q[i], half, all), half, all);
            codes.q[i] = veorq_u8(codes.q[i], vdupq_n_u8(128));
        }
        sums.q[i] = vdotq_s32(sums.q[i], vreinterpretq_s8_u8(codes.q[i]), all);
#endif
    }
    return sums;
}
inline Sums both(Sums a, Sums b) { for (int i = 0; i < 4; i++) a.q[i] = vaddq_s32(a.q[i], b.q[i]); return a; }
inline Vec floats(Sums s) {
    const auto part = [&](int i) { return (Floats)vcvtq_f32_s32(s.q[i]); };
    return {{part(0), part(1)}, {part(2), part(3)}};
}
inline Vec halves(const uint8_t* p) {
    const float16x8_t low = vreinterpretq_f16_u8(vld1q_u8(p)), high = vreinterpretq_f16_u8(vld1q_u8(p + 16));
    return {{(Floats)vcvt_f32_f16(vget_low_f16(low)), (Floats)vcvt_high_f32_f16(low)},
            {(Floats)vcvt_f32_f16(vget_low_f16(high)), (Floats)vcvt_high_f32_f16(high)}};
}
#else
struct Bytes { uint8_t v[64]; };
using Sums = VecI;
inline Bytes bytes_at(const uint8_t* p) { Bytes b; std::memcpy(b.v, p, 64); return b; }
inline Bytes low_bits(Bytes b) { for (auto& v : b.v) v &= 15; return b; }
template <int BY> inline Bytes raised(Bytes b) {
    for (auto& v : b.v) v = BY > 0 ? v << (BY > 0 ? BY : 0) : v >> (BY > 0 ? 0 : -BY);
    return b;
}
template <int MASK> inline Bytes joined(Bytes low, Bytes b) {
    for (int i = 0; i < 64; i++) low.v[i] |= b.v[i] & MASK;
    return low;
}
inline Bytes looked_up(const uint8_t* table, Bytes index) { for (auto& v : index.v) v = table[v]; return index; }
inline Sums sums_from(int32_t x) { return filled<VecI>(x); }
template <int BITS> inline Sums add_products(Sums sums, Bytes codes, const int8_t* x) {
    int32_t sum[LANES];
    to_memory(sum, sums);
    for (int o = 0; o < LANES; o++)
        for (int i = 0; i < 4; i++) sum[o] += codes.v[o * 4 + i] * x[i];
    return of_memory<VecI>(sum);
}
inline Sums both(Sums a, Sums b) { return a + b; }
inline Vec floats(Sums sums) { return to_floats(sums); }
inline Vec halves(const uint8_t* p) {
    float v[LANES];
    for (int o = 0; o < LANES; o++) v[o] = widened_half(p[2 * o] | p[2 * o + 1] << 8);
    return load(v);
}
#endif

#if defined(SIGNED_BYTES)
constexpr bool EIGHT_ARE_SIGNED = true;  // sums of 8-bit codes are those of the codes less 128
#else
constexpr bool EIGHT_ARE_SIGNED = false;
#endif

#if defined(IN_STRIPS)
constexpr int STRIP = 4;  // rows whose products are computed side by side
#else
constexpr int STRIP = 1;
template <int BITS, int STEPS, int R>
INLINE void add_products(Sums (&sums)[R], const Bytes* codes, const int8_t* x, int64_t apart) {
#pragma GCC unroll 4
    for (int m = 0; m < R; m++)
#pragma GCC unroll 8
        for (int i = 0; i < STEPS; i++) sums[m] = add_products<BITS>(sums[m], codes[i], x + m * apart + 4 * i);
}
#endif

inline Vec small_floats(const uint8_t* p) { return to_floats(of_bytes<VecI>(p)); }
inline Vec signed_floats(const uint8_t* p) { return to_floats(of_signed_bytes(p)); }

}  // namespace
