// Decoding blocks of quantized KV (`keepwarm.core.codecs`, whose bits these are) straight into where the KV goes.
//
// A code has at most 8 bits and a scale 11, so their product is exact in float32: whether the sum is fused with it makes
// no difference.

#include <cstdint>
#include <cstring>

namespace {

float widen(uint16_t half) {
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
}

inline void narrow(float x, float* p) { *p = x; }
inline void narrow(float x, uint16_t* p) {  // bfloat16, to nearest even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    *p = (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

constexpr int MOST = 1024;  // channels

struct Block {
    const uint8_t *scales, *zeros, *codes, *kept;
};

template <typename T>
void decode_head(const Block& b, const float* table, int bits, int kv, int64_t group, int64_t dim, int64_t quantized,
                 int64_t tokens, T* out) {
    const int64_t code_bytes = (dim * bits + 7) / 8, across = kv ? (dim + group - 1) / group : dim;
    float scale[MOST], zero[MOST], code[MOST + 1];
    for (int64_t t = 0; t < tokens; ++t) {
        T* row = out + t * dim;
        if (t >= quantized) {
            std::memcpy(row, b.kept + (t - quantized) * dim * sizeof(T), dim * sizeof(T));
            continue;
        }
        if (kv || t % group == 0) {
            const int64_t first = (kv ? t : t / group) * across;
            for (int64_t i = 0; i < across; ++i) {
                uint16_t half;
                std::memcpy(&half, b.scales + 2 * (first + i), 2);
                const float s = widen(half);
                float z = 0;
                if (b.zeros) {
                    std::memcpy(&half, b.zeros + 2 * (first + i), 2);
                    z = widen(half);
                }
                if (!kv) {
                    scale[i] = s, zero[i] = z;
                } else {
                    const int64_t end = (i + 1) * group < dim ? (i + 1) * group : dim;
                    for (int64_t d = i * group; d < end; ++d) scale[d] = s, zero[d] = z;
                }
            }
        }
        const uint8_t* in = b.codes + t * code_bytes;
        if (table) {
            for (int64_t d = 0; d < dim; ++d) code[d] = table[in[d]];
        } else if (bits == 4) {
            for (int64_t d = 0; d < code_bytes; ++d) {
                code[2 * d] = (float)(in[d] & 15);
                code[2 * d + 1] = (float)(in[d] >> 4);
            }
        } else {
            for (int64_t d = 0; d < dim; ++d) code[d] = (float)in[d];
        }
        if (b.zeros) {
            for (int64_t d = 0; d < dim; ++d) {
                const float product = code[d] * scale[d];
                narrow(product + zero[d], row + d);
            }
        } else {
            for (int64_t d = 0; d < dim; ++d) narrow(code[d] * scale[d], row + d);
        }
    }
}

}  // namespace

extern "C" {

// Writes the first `wanted` of a block's tokens. `table` holds the 256 values of a one-byte float, or is null; strides are
// bytes from head to head. Returns 0, or 1 for what it does not do.
int keepwarm_decode(const uint8_t* packed, int64_t packed_stride, uint8_t* out, int64_t out_stride, int64_t heads,
                    int64_t dim, int itemsize, int bits, const float* table, int kv, int64_t group, int64_t quantized,
                    int64_t wanted) {
    if (dim > MOST || (itemsize != 2 && itemsize != 4)) return 1;
    const int64_t across = kv ? (dim + group - 1) / group : dim;
    const int64_t numbers = 2 * across * (kv ? quantized : (quantized + group - 1) / group);
    for (int64_t h = 0; h < heads; ++h) {
        const uint8_t* at = packed + h * packed_stride;
        Block b;
        b.scales = at, at += numbers;
        b.zeros = table ? nullptr : at, at += table ? 0 : numbers;
        b.codes = at, at += quantized * ((dim * bits + 7) / 8);
        b.kept = at;
        if (itemsize == 2)
            decode_head(b, table, bits, kv, group, dim, quantized, wanted, (uint16_t*)(out + h * out_stride));
        else
            decode_head(b, table, bits, kv, group, dim, quantized, wanted, (float*)(out + h * out_stride));
    }
    return 0;
}

}  // extern "C"
