// Decodes encoded keys and values row by row, to the same bits as keepwarm.core.codecs.
//
// A code has at most 8 bits and a scale 11, so their product is exact in float32. Fusing the product and the sum changes
// nothing.
#pragma once

#include "vectors.h"

namespace {

constexpr int MOST_CHANNELS = 1024;

}  // namespace

extern "C" {

struct Coding {  // how a block's rows are encoded; with 0 bits they are not
    int32_t bits, is_float, group, quantized;  // rows from number `quantized` on are kept in full precision
};

}  // extern "C"

namespace {

inline float widen(uint16_t half) {
#if defined(__AVX512F__)
    return _cvtsh_ss(half);
#else
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 1023, bits;
    if (exponent == 31) {
        bits = sign | 0x7F800000 | mantissa << 13;
    } else if (exponent) {
        bits = sign | (exponent + 112) << 23 | mantissa << 13;
    } else {
        float value = (float)mantissa * (1.0f / 16777216.0f);
        std::memcpy(&bits, &value, 4);
        bits |= sign;
    }
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
#endif
}

INLINE Floats widen(Shorts halves) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps((__m256i)halves);
#elif defined(__AVX2__) && defined(__F16C__)
    return (Floats)_mm256_cvtph_ps((__m128i)halves);
#elif defined(__ARM_NEON)
    return (Floats)vcvt_f32_f16((float16x4_t)halves);
#else
    Floats v;
    for (int i = 0; i < REGISTER; i++) v[i] = widen((uint16_t)halves[i]);
    return v;
#endif
}
template <int N> INLINE Halves<float, N> widen(Halves<uint16_t, N> halves) { return {widen(halves.low), widen(halves.high)}; }

enum Kind { INT4, INT8, FP8 };

// Returns sixteen codes as floats. Of 4-bit codes, even channels lie in the low half of a byte. An 8-bit float (e4m3fn,
// never NaN) becomes the upper byte of a float16. Its exponent has a bias of 7 instead of 15, hence the factor 2^8.
template <Kind KIND>
inline Vec codes16(const uint8_t* in) {
    uint8_t codes[LANES];
    if (KIND == INT4) {
#if defined(__AVX2__)
        const __m128i both = _mm_loadl_epi64((const __m128i*)in), mask = _mm_set1_epi8(15);
        _mm_storeu_si128((__m128i*)codes, _mm_unpacklo_epi8(_mm_and_si128(both, mask), _mm_and_si128(_mm_srli_epi16(both, 4), mask)));
#else
        for (int i = 0; i < LANES / 2; i++) codes[2 * i] = in[i] & 15, codes[2 * i + 1] = in[i] >> 4;
#endif
        in = codes;
    }
    if (KIND == FP8) {
        const VecU wide = of_bytes<VecU>(in);
        return widen(to_shorts((wide & 0x80) << 8 | (wide & 0x7f) << 7)) * splat(256.f);
    }
    return to_floats(of_bytes<VecI>(in));
}

// One head's part of an encoded block: scales and zeros in float16, then codes, then the rows in full precision.
struct EncodedHead {
    const Coding& how;
    const uint8_t *scales, *zeros, *codes, *kept;
    int64_t across, code_bytes;  // the count of numbers in a set of scales; the bytes of a row's codes
    bool values;                 // values have a set of scales for each row, keys one for each group of rows
    EncodedHead(const Coding& c, const char* block, int kv, int dim) : how(c), values(kv) {
        across = values ? (dim + c.group - 1) / c.group : dim;
        code_bytes = (dim * c.bits + 7) / 8;
        const int64_t bytes = 2 * across * (values ? c.quantized : (c.quantized + c.group - 1) / c.group);
        scales = (const uint8_t*)block, zeros = c.is_float ? nullptr : scales + bytes;
        codes = scales + (zeros ? 2 : 1) * bytes, kept = codes + c.quantized * code_bytes;
    }
};

// Spreads a set of numbers to one number per channel. It may write up to a vector more.
inline void spread(const EncodedHead& head, const uint8_t* set, int dim, float* out) {
    uint16_t half;
    if (!head.values) {
        int d = 0;
        for (; d + LANES <= dim; d += LANES) store(out + d, widen(of_memory<VecH>((const uint16_t*)(set + 2 * d))));
        for (; d < dim; d++) std::memcpy(&half, set + 2 * d, 2), out[d] = widen(half);
        return;
    }
    for (int i = 0, d = 0; d < dim; i++) {
        std::memcpy(&half, set + 2 * i, 2);
        const Vec number = splat(widen(half));
        for (int at = d; at < d + head.how.group && at < dim; at += LANES) store(out + at, number);
        d += head.how.group;
    }
}

template <Kind KIND, class T>
void decode_rows_of(const EncodedHead& head, int dim, int64_t first, int64_t rows, T* out) {
    alignas(64) float scale[MOST_CHANNELS + LANES], zero[MOST_CHANNELS + LANES];
    int64_t there = -1;  // the set that `scale` and `zero` hold now
    for (int64_t row = first; row < first + rows; row++, out += dim) {
        if (const int64_t set = head.values ? row : row / head.how.group; set != there) {
            spread(head, head.scales + 2 * set * head.across, dim, scale);
            if (KIND != FP8) spread(head, head.zeros + 2 * set * head.across, dim, zero);
            there = set;
        }
        const uint8_t* in = head.codes + row * head.code_bytes;
        constexpr int BYTES = KIND == INT4 ? LANES / 2 : LANES;
        auto value = [&](const uint8_t* codes, int d) {
            const Vec product = codes16<KIND>(codes) * load(scale + d);
            return KIND == FP8 ? product : product + load(zero + d);
        };
        int d = 0;
        for (; d + LANES <= dim; d += LANES, in += BYTES) store(out + d, value(in, d));
        if (d < dim) {  // the last channels of a width that is no multiple of 16
            uint8_t codes[LANES] = {};
            T last[LANES];
            std::memcpy(codes, in, head.code_bytes - d / LANES * BYTES);
            store(last, value(codes, d));
            std::memcpy(out + d, last, (dim - d) * sizeof(T));
        }
    }
}

// Decodes rows [first, first + rows) of an encoded block's head to `out`. A row has `dim` channels.
template <class T>
void decode_rows(const Coding& how, const char* block, int kv, int dim, int64_t first, int64_t rows, T* out) {
    const EncodedHead head(how, block, kv, dim);
    int64_t encoded = how.quantized - first;
    encoded = encoded < 0 ? 0 : encoded < rows ? encoded : rows;
    if (how.is_float) decode_rows_of<FP8>(head, dim, first, encoded, out);
    else if (how.bits == 8) decode_rows_of<INT8>(head, dim, first, encoded, out);
    else decode_rows_of<INT4>(head, dim, first, encoded, out);
    if (encoded < rows)
        std::memcpy(out + encoded * dim, head.kept + (first + encoded - how.quantized) * dim * sizeof(T),
                    (rows - encoded) * dim * sizeof(T));
}

}  // namespace
