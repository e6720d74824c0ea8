// Weights in the blocks of a GGUF file, or in the groups of 4 bits of a quantized folder: how to read a block, how to pack
// blocks for products, and how to widen them for the plain product that the packed ones are compared with.
//
// A weight is scale * (code - less) or scale * code - least. A scale belongs to 32 columns of one output, to 16, or to a
// group of more. Weights that nobody quantized lie beside these as floats.
// 16 outputs are packed side by side as a panel. A panel is a series of groups of blocks of 32 columns. A group has its
// blocks' scales first, and then their codes. So memory is read as one stream, in whole lines.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "vectors.h"

namespace {

enum BlockKind : int32_t {  // as in ggml, except the last ones: kinds that are packed in two parts, for a head (screen.h),
                           // and those whose scales belong to 32, 64 and 128 columns
    F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14,
    IQ4_NL = 20, IQ4_XS = 23, BF16 = 30, MXFP4 = 39, Q8_PARTS = 108, Q6_PARTS = 114, INT4_32 = 132, INT4_64 = 164, INT4_128 = 228
};

constexpr int COLUMNS = 32;  // columns of a block here; a file's block may have 256
constexpr int SUPER = 8;     // in kinds whose blocks have 256 columns, so many blocks here share a factor of their scales

// What codes of 4 bits stand for, where they are no numbers themselves: as in ggml, with `Shape::less` added.
enum CodeBook : int { NONE, IQ4, FP4 };
constexpr uint8_t BOOKS[3][16] = {
    {},
    {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},
    {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4},  // in halves
};

// The shape of a kind. `columns` and `bytes` are those of a block in the file, and `bits` those of a code. For 16 outputs,
// a packed block has `codes` bytes of codes and `scales` bytes of scales, and the blocks of a group share `shared` bytes of
// scales. `less` is subtracted from a code.
struct Shape {
    int columns, bytes, bits, codes, scales, shared, less;
    bool least;    // whether a block has a least value beside its scale
    int each = 0;  // so many blocks have one scale, of 24 bits, and one zero (INT4)
    CodeBook book = NONE;
    int apart = 0;  // so many bytes of a block's codes lie behind all of the weight's panels: all but their upper 4 bits
    constexpr int group() const { return each ? each : shared ? SUPER : scales == 32 ? 2 : scales == 16 ? 4 : 1; }
    constexpr int heads() const { return (shared + group() * scales + 63) / 64 * 64; }  // bytes of a group's scales
    constexpr int wide() const { return book == IQ4 ? 8 : book == FP4 ? 5 : bits; }   // bits of what a code stands for
    constexpr bool split() const { return columns == 256 && scales == 32 && (!least || bits == 2); }  // two scales a block
    int number(int code) const { return (book ? BOOKS[book][code] : code) - less; }
};

constexpr Shape shape_of(int kind) {
    switch (kind) {
        case Q4_0: return {32, 18, 4, 256, 32, 0, 8, false};
        case Q4_1: return {32, 20, 4, 256, 64, 0, 0, true};
        case Q5_0: return {32, 22, 5, 320, 32, 0, 16, false};
        case Q5_1: return {32, 24, 5, 320, 64, 0, 0, true};
        case Q8_0: return {32, 34, 8, 512, 32, 0, 128, false};
        case Q8_PARTS: return {32, 34, 8, 512, 32, 0, 128, false, 0, NONE, 256};
        case Q2_K: return {256, 84, 2, 128, 32, 64, 0, true};
        case Q3_K: return {256, 110, 3, 192, 32, 32, 4, false};
        case Q4_K: return {256, 144, 4, 256, 32, 64, 0, true};
        case Q5_K: return {256, 176, 5, 320, 32, 64, 0, true};
        case Q6_K: return {256, 210, 6, 384, 32, 32, 32, false};
        case Q6_PARTS: return {256, 210, 6, 384, 32, 32, 32, false, 0, NONE, 128};
        case IQ4_NL: return {32, 18, 4, 256, 32, 0, 128, false, 0, IQ4};
        case IQ4_XS: return {256, 136, 4, 256, 16, 32, 128, false, 0, IQ4};
        case MXFP4: return {32, 17, 4, 256, 16, 0, 16, false, 0, FP4};
        case F32: return {32, 128, 32, 2048, 0, 0, 0, false};
        case F16: case BF16: return {32, 64, 16, 1024, 0, 0, 0, false};
        case INT4_32: return {32, 0, 4, 256, 0, 64, 0, true, 1};
        case INT4_64: return {32, 0, 4, 256, 0, 64, 0, true, 2};
        case INT4_128: return {32, 0, 4, 256, 0, 64, 0, true, 4};
    }
    return {};
}

enum Layout : int32_t { GPTQ = 0, GPTQ_2 = 1, AWQ = 2, COMPRESSED = 3 };  // of weights in INT4; as in grouped.py

// A weight [rows, columns] as a file has it. In INT4, `raw` holds words of eight codes, and a scale belongs to `group`
// columns; without `zeros` every zero is 8. Everywhere else `raw` holds rows of blocks.
struct Source {
    const uint8_t *raw, *scales, *zeros;
    int64_t rows, columns, group;
    int32_t kind, layout, scale_kind, first;  // the kind of scales is F16, BF16 or F32; in INT4 the rows are those from `first` on
    int64_t across;                           // of so many rows that the tensors have
    int64_t row_bytes() const { return columns / shape_of(kind).columns * shape_of(kind).bytes; }
};

// One output's block of 32 columns. In kinds with shared factors, `scale` and `least` are integers of 4 to 8 bits that
// are multiplied with `factor`.
struct Block {
    uint8_t code[COLUMNS];
    uint16_t factor[2];  // in half precision: the factor of scales, and that of least values; in MXFP4 an exponent
    int32_t scale[2];    // the scales of the first and of the last 16 columns; 1 if `factor` is the whole scale
    int32_t least[2];    // the same of the least values
    float whole;         // in INT4 the scale; then `least` is what is subtracted from a code
};

inline void nibbles(const uint8_t* from, uint8_t* code) {
    for (int i = 0; i < 16; i++) code[i] = from[i] & 15, code[16 + i] = from[i] >> 4;
}

inline void fifth_bits(const uint8_t* from, uint8_t* code) {
    uint32_t bits;
    std::memcpy(&bits, from, sizeof bits);
    for (int i = 0; i < COLUMNS; i++) code[i] |= (bits >> i & 1) << 4;
}

// Reads the scale and the least value, 6 bits each, of block `i` of eight.
inline void six_bits(const uint8_t* from, int i, Block& to) {
    if (i < 4) to.scale[0] = from[i] & 63, to.least[0] = from[i + 4] & 63;
    else to.scale[0] = (from[i + 4] & 15) | from[i - 4] >> 6 << 4, to.least[0] = from[i + 4] >> 4 | from[i] >> 6 << 4;
    to.scale[1] = to.scale[0], to.least[1] = to.least[0];
}

// Reads scale `i` of sixteen of Q3_K, which has 6 bits in two places.
inline int split_scale(const uint8_t* from, int i) {
    return ((from[i % 8] >> i / 8 * 4 & 15) | (from[8 + i % 4] >> i / 4 * 2 & 3) << 4) - 32;
}

// Reads the codes of 2 bits of block `i`: four blocks share each byte.
inline void two_bits(const uint8_t* from, int i, uint8_t* code) {
    for (int c = 0; c < COLUMNS; c++) code[c] = from[i / 4 * COLUMNS + c] >> i % 4 * 2 & 3;
}

inline void half_block(const uint8_t* from, int i, uint8_t* code) {  // two blocks share each byte
    for (int c = 0; c < COLUMNS; c++) code[c] = i % 2 ? from[i / 2 * COLUMNS + c] >> 4 : from[i / 2 * COLUMNS + c] & 15;
}

inline float widened_half(uint16_t bits) {
    const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff;
    uint32_t wide = rest >= 0x7c00 ? rest << 13 | 0x7f800000 : (rest << 13) + (112u << 23);
    float value;
    if (rest < 0x400) return (value = rest * 0x1p-24f, sign ? -value : value);  // a subnormal number
    wide |= sign;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

// Returns 2^(exponent - 128).
inline float half_power(int exponent) {
    const uint32_t bits = exponent < 2 ? 0x200000u << exponent : (uint32_t)(exponent - 1) << 23;  // the first is subnormal
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Returns the number at an index of an array of a kind: F16, BF16 or F32.
inline float number_at(int kind, const uint8_t* from, int64_t i) {
    float value;
    if (kind == F32) return std::memcpy(&value, from + 4 * i, sizeof value), value;
    uint16_t bits;
    std::memcpy(&bits, from + 2 * i, sizeof bits);
    return kind == F16 ? widened_half(bits) : widened_bf16(bits);
}

// Returns code `i` of word `at`. AWQ has the codes of a word's eight numbers in an order of its own.
inline int code_at(const uint8_t* words, int64_t at, int i, bool awq = false) {
    constexpr int ORDER[] = {0, 4, 1, 5, 2, 6, 3, 7};
    uint32_t word;
    std::memcpy(&word, words + 4 * at, sizeof word);
    return word >> 4 * (awq ? ORDER[i] : i) & 15;
}

inline int int4_code(const Source& s, int64_t n, int64_t c) {
    if (s.layout == COMPRESSED) return code_at(s.raw, n * (s.columns / 8) + c / 8, c % 8);
    if (s.layout == AWQ) return code_at(s.raw, c * (s.across / 8) + n / 8, n % 8, true);
    return code_at(s.raw, c / 8 * s.across + n, c % 8);
}

inline int int4_zero(const Source& s, int64_t n, int64_t g) {
    if (!s.zeros) return 8;
    if (s.layout == COMPRESSED) return code_at(s.zeros, n / 8 * (s.columns / s.group) + g, n % 8);
    return code_at(s.zeros, g * (s.across / 8) + n / 8, n % 8, s.layout == AWQ) + (s.layout == GPTQ);  // one less is stored
}

inline Block read_int4(const Source& s, int64_t n, int64_t b) {
    Block to{};
    const int64_t g = b * COLUMNS / s.group;
    n += s.first;
    for (int c = 0; c < COLUMNS; c++) to.code[c] = int4_code(s, n, b * COLUMNS + c);
    to.least[0] = int4_zero(s, n, g);
    to.whole = number_at(s.scale_kind, s.scales, s.layout == COMPRESSED ? n * (s.columns / s.group) + g : g * s.across + n);
    return to;
}

// Reads block `b` of row `n`.
inline Block read_block(const Source& from, int64_t n, int64_t b) {
    const int kind = from.kind == Q8_PARTS ? Q8_0 : from.kind == Q6_PARTS ? Q6_K : from.kind;  // as the file has it
    const Shape s = shape_of(kind);
    if (s.each) return read_int4(from, n, b);
    const uint8_t* const row = from.raw + n * from.row_bytes();
    const int i = b % (s.columns / COLUMNS);
    const uint8_t* p = row + (int64_t)(b / (s.columns / COLUMNS)) * s.bytes;
    Block to{{}, {}, {1, 1}, {1, 1}, 0};
    std::memcpy(to.factor, p + (kind == Q2_K ? 80 : kind == Q3_K ? 108 : kind == Q6_K ? 208 : 0), kind == MXFP4 ? 1 : 2);
    std::memcpy(to.factor + 1, p + (kind == Q2_K ? 82 : 2), s.least ? 2 : 0);
    if (s.least && !s.shared) to.factor[1] ^= 0x8000;  // these kinds add the least value, the others subtract it
    switch (kind) {
        case Q4_0: case IQ4_NL: nibbles(p + 2, to.code); break;
        case Q4_1: nibbles(p + 4, to.code); break;
        case Q5_0: nibbles(p + 6, to.code), fifth_bits(p + 2, to.code); break;
        case Q5_1: nibbles(p + 8, to.code), fifth_bits(p + 4, to.code); break;
        case Q8_0:
            for (int c = 0; c < COLUMNS; c++) to.code[c] = p[2 + c] ^ 0x80;
            break;
        case MXFP4: nibbles(p + 1, to.code); break;
        case IQ4_XS:
            nibbles(p + 8 + i * 16, to.code);
            to.scale[0] = to.scale[1] = ((p[4 + i / 2] >> i % 2 * 4 & 15) | (p[2 + i / 4] >> i % 4 * 2 & 3) << 4) - 32;
            break;
        case Q2_K:
            two_bits(p + 16, i, to.code);
            for (int h = 0; h < 2; h++) to.scale[h] = p[2 * i + h] & 15, to.least[h] = p[2 * i + h] >> 4;
            break;
        case Q3_K:
            two_bits(p + 32, i, to.code);
            for (int c = 0; c < COLUMNS; c++) to.code[c] |= (p[c] >> i & 1) << 2;
            for (int h = 0; h < 2; h++) to.scale[h] = split_scale(p + 96, 2 * i + h);
            break;
        case Q4_K: six_bits(p + 4, i, to), half_block(p + 16, i, to.code); break;
        case Q5_K:
            six_bits(p + 4, i, to), half_block(p + 48, i, to.code);
            for (int c = 0; c < COLUMNS; c++) to.code[c] |= (p[16 + c] >> i & 1) << 4;
            break;
        case Q6_K: {
            const uint8_t *low = p + i / 4 * 64 + i % 2 * COLUMNS, *high = p + 128 + i / 4 * COLUMNS;
            for (int c = 0; c < COLUMNS; c++)
                to.code[c] = (i % 4 / 2 ? low[c] >> 4 : low[c] & 15) | (high[c] >> i % 4 * 2 & 3) << 4;
            for (int h = 0; h < 2; h++) to.scale[h] = (int8_t)p[192 + 2 * i + h];
        }
    }
    return to;
}

inline int64_t blocks_of(int64_t columns) { return columns / COLUMNS; }

inline int64_t panel_bytes(int kind, int64_t columns) {
    const Shape s = shape_of(kind);
    return (blocks_of(columns) + s.group() - 1) / s.group() * (s.heads() + s.group() * (s.codes - s.apart)) + blocks_of(columns) * s.apart;
}

// Returns how many of them lie apart.
inline int64_t apart_bytes(int kind, int64_t columns) { return blocks_of(columns) * shape_of(kind).apart; }

// A panel of a weight. Panels of one weight may differ in kind: queries, keys and values are stacked as one weight.
struct QuantPanel {
    const uint8_t* at;
    int32_t kind;
    uint32_t apart;  // where the rest of its codes lies, if it lies apart: so many lines of 64 bytes behind `at`
};

// Packs the codes of 16 outputs' blocks, for `Format` in quantized.h: `[8][16 outputs][4]`, four columns together.
inline void pack_codes(int bits, const Block* block, uint8_t* to) {
    for (int o = 0; o < LANES; o++)
        for (int c = 0; c < COLUMNS; c++) {
            const int code = block[o].code[c], i = c / 4, at = o * 4 + c % 4;
            if (bits == 8) {
                to[i * 64 + at] = code;
                continue;
            }
            if (bits < 4) {
                to[i / 4 * 64 + at] |= (code & 3) << i % 4 * 2;
                if (bits == 3) to[128 + at] |= (code >> 2) << i;
                continue;
            }
            to[i % 4 * 64 + at] |= (code & 15) << i / 4 * 4;
            if (bits == 5) to[256 + at] |= (code >> 4) << i;
            if (bits == 6) to[256 + i / 4 * 64 + at] |= (code >> 4) << i % 4 * 2;
        }
}

// Packs codes in two parts: their upper 4 bits, and the others.
inline void pack_parts(int bits, const Block* block, uint8_t* upper, uint8_t* lower) {
    Block high[LANES], low[LANES];
    const int rest = bits - 4;
    for (int o = 0; o < LANES; o++)
        for (int c = 0; c < COLUMNS; c++)
            high[o].code[c] = block[o].code[c] >> rest, low[o].code[c] = block[o].code[c] & ((1 << rest) - 1);
    pack_codes(4, high, upper), pack_codes(rest, low, lower);
}

// Packs the scales of 16 outputs' groups as the upper 24 bits of floats: 16 bits of each, 8 bits of each, and the zeros.
inline void pack_int4_scales(const Block* block, uint8_t* to) {
    for (int o = 0; o < LANES; o++) {
        uint32_t bits;
        std::memcpy(&bits, &block[o].whole, sizeof bits);
        const uint16_t high = bits >> 16;
        std::memcpy(to + o * 2, &high, sizeof high);
        to[32 + o] = bits >> 8, to[48 + o] = block[o].least[0];
    }
}

// Packs the scales of 16 outputs' blocks: factors to `shared`, if blocks share them, and what is a block's own to `own`.
inline void pack_scales(const Shape& s, const Block* block, uint8_t* shared, uint8_t* own) {
    for (int o = 0; o < LANES; o++) {
        const Block& b = block[o];
        if (s.book == FP4) {  // an exponent of 8 bits, as floats have it, of half of what it says in the file
            own[o] = b.factor[0] ? b.factor[0] - 1 : 0;
            continue;
        }
        uint8_t* const factors = s.shared ? shared : own;
        std::memcpy(factors + o * 2, &b.factor[0], 2);
        if (s.least) std::memcpy(factors + 32 + o * 2, &b.factor[1], 2);
        if (!s.shared) continue;
        own[o] = s.split() && s.least ? b.scale[0] | b.least[0] << 4 : b.scale[0];
        if (s.split() && s.least) own[LANES + o] = b.scale[1] | b.least[1] << 4;
        else if (s.scales > LANES) own[LANES + o] = s.least ? b.least[0] : b.scale[1];
    }
}

// Packs up to 16 rows of floats of so many bytes: [columns][16 outputs].
inline void pack_floats(const Source& from, int64_t first, int count, int bytes, uint8_t* to) {
    for (int64_t c = 0; c < from.columns; c++)
        for (int o = 0; o < count; o++)
            std::memcpy(to + (c * LANES + o) * bytes, from.raw + ((first + o) * from.columns + c) * bytes, bytes);
}

// Packs up to 16 rows as one panel, and what lies apart to `apart`. Both must hold zeros.
inline void pack_panel(const Source& from, int64_t first, int count, uint8_t* to, uint8_t* apart) {
    const Shape s = shape_of(from.kind);
    if (s.bits >= 16) return pack_floats(from, first, count, s.bits / 8, to);
    uint8_t* scales = nullptr;
    for (int64_t b = 0; b < blocks_of(from.columns); b++) {
        Block block[LANES] = {};
        for (int o = 0; o < count; o++) block[o] = read_block(from, first + o, b);
        const bool begins = b % s.group() == 0;
        if (begins) scales = to, to += s.heads();
        if (s.apart) pack_parts(s.bits, block, to, apart + b * s.apart);
        else pack_codes(s.bits, block, to);
        to += s.codes - s.apart;
        if (s.each) {
            if (begins) pack_int4_scales(block, scales);
            continue;
        }
        pack_scales(s, block, scales, scales + s.shared + b % s.group() * s.scales);
    }
}

// Widens row `n` to floats, operation by operation as the format defines it.
inline void widen_row(const Source& from, int64_t n, float* to) {
    const Shape s = shape_of(from.kind);
    if (s.bits >= 16) {
        for (int64_t c = 0; c < from.columns; c++) to[c] = number_at(from.kind, from.raw, n * from.columns + c);
        return;
    }
    for (int64_t b = 0; b < blocks_of(from.columns); b++, to += COLUMNS) {
        const Block block = read_block(from, n, b);
        const float factor = s.book == FP4 ? half_power(block.factor[0]) : widened_half(block.factor[0]);
        const float under = widened_half(block.factor[1]);
        for (int c = 0; c < COLUMNS; c++) {
            const float value = factor * block.scale[c / 16] * s.number(block.code[c]);
            if (s.each) to[c] = block.whole * (block.code[c] - block.least[0]);
            else to[c] = s.least ? value - under * block.least[c / 16] : value;
        }
    }
}

}  // namespace
