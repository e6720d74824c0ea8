// Weights in the blocks of a GGUF file: how to read a block, how to pack blocks for products, and how to widen them for
// the plain product that the packed ones are compared with.
//
// A weight is scale * (code - less) or scale * code - least. A scale belongs to 32 columns of one output, or to 16.
// 16 outputs are packed side by side as a panel. A panel is a series of groups of blocks of 32 columns. A group has its
// blocks' scales first, and then their codes. So memory is read as one stream, in whole lines.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "vectors.h"

namespace {

enum BlockKind : int32_t { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14 };  // as in ggml

constexpr int COLUMNS = 32;  // columns of a block here; a file's block may have 256
constexpr int SUPER = 8;     // in Q4_K, Q5_K and Q6_K so many blocks share a factor of their scales

// The shape of a kind. `columns` and `bytes` are those of a block in the file, and `bits` those of a code. For 16 outputs,
// a packed block has `codes` bytes of codes and `scales` bytes of scales, and the blocks of a group share `shared` bytes of
// scales. `less` is subtracted from a code.
struct Shape {
    int columns, bytes, bits, codes, scales, shared, less;
    bool least;  // whether a block has a least value beside its scale
    constexpr int group() const { return shared ? SUPER : scales == 32 ? 2 : 1; }
    constexpr int heads() const { return (shared + group() * scales + 63) / 64 * 64; }  // bytes of a group's scales
};

constexpr Shape shape_of(int kind) {
    switch (kind) {
        case Q4_0: return {32, 18, 4, 256, 32, 0, 8, false};
        case Q4_1: return {32, 20, 4, 256, 64, 0, 0, true};
        case Q5_0: return {32, 22, 5, 320, 32, 0, 16, false};
        case Q5_1: return {32, 24, 5, 320, 64, 0, 0, true};
        case Q8_0: return {32, 34, 8, 512, 32, 0, 128, false};
        case Q4_K: return {256, 144, 4, 256, 32, 64, 0, true};
        case Q5_K: return {256, 176, 5, 320, 32, 64, 0, true};
        case Q6_K: return {256, 210, 6, 384, 32, 32, 32, false};
    }
    return {};
}

// One output's block of 32 columns. In kinds with shared factors, `scale` and `least` are integers of 6 or 8 bits that
// are multiplied with `factor`.
struct Block {
    uint8_t code[COLUMNS];
    uint16_t factor[2];  // in half precision: the factor of scales, and that of least values
    int32_t scale[2];    // the scales of the first and of the last 16 columns; 1 if `factor` is the whole scale
    int32_t least;
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
    if (i < 4) to.scale[0] = from[i] & 63, to.least = from[i + 4] & 63;
    else to.scale[0] = (from[i + 4] & 15) | from[i - 4] >> 6 << 4, to.least = from[i + 4] >> 4 | from[i] >> 6 << 4;
    to.scale[1] = to.scale[0];
}

inline void half_block(const uint8_t* from, int i, uint8_t* code) {  // two blocks share each byte
    for (int c = 0; c < COLUMNS; c++) code[c] = i % 2 ? from[i / 2 * COLUMNS + c] >> 4 : from[i / 2 * COLUMNS + c] & 15;
}

// Reads block `b` of a row in the file.
inline Block read_block(int kind, const uint8_t* row, int b) {
    const Shape s = shape_of(kind);
    const int i = b % (s.columns / COLUMNS);
    const uint8_t* p = row + (int64_t)(b / (s.columns / COLUMNS)) * s.bytes;
    Block to{{}, {}, {1, 1}, 1};
    std::memcpy(to.factor, p, kind == Q6_K ? 0 : 2);
    std::memcpy(to.factor + 1, p + 2, s.least ? 2 : 0);
    if (s.least && !s.shared) to.factor[1] ^= 0x8000;  // these kinds add the least value, the others subtract it
    switch (kind) {
        case Q4_0: nibbles(p + 2, to.code); break;
        case Q4_1: nibbles(p + 4, to.code); break;
        case Q5_0: nibbles(p + 6, to.code), fifth_bits(p + 2, to.code); break;
        case Q5_1: nibbles(p + 8, to.code), fifth_bits(p + 4, to.code); break;
        case Q8_0:
            for (int c = 0; c < COLUMNS; c++) to.code[c] = p[2 + c] ^ 0x80;
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
            std::memcpy(to.factor, p + 208, 2);
        }
    }
    return to;
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

inline int64_t blocks_of(int64_t columns) { return columns / COLUMNS; }

inline int64_t panel_bytes(int kind, int64_t columns) {
    const Shape s = shape_of(kind);
    return (blocks_of(columns) + s.group() - 1) / s.group() * (s.heads() + s.group() * s.codes);
}

// Packs the codes of 16 outputs' blocks, for `Format` in quantized.h: `[8][16 outputs][4]`, four columns together.
inline void pack_codes(int bits, const Block* block, uint8_t* to) {
    for (int o = 0; o < LANES; o++)
        for (int c = 0; c < COLUMNS; c++) {
            const int code = block[o].code[c], i = c / 4, at = o * 4 + c % 4;
            if (bits == 8) {
                to[i * 64 + at] = code;
                continue;
            }
            to[i % 4 * 64 + at] |= (code & 15) << i / 4 * 4;
            if (bits == 5) to[256 + at] |= (code >> 4) << i;
            if (bits == 6) to[256 + i / 4 * 64 + at] |= (code >> 4) << i % 4 * 2;
        }
}

// Packs up to 16 rows of the file as one panel. `to` must hold zeros.
inline void pack_panel(int kind, const uint8_t* rows, int64_t row_bytes, int count, int64_t columns, uint8_t* to) {
    const Shape s = shape_of(kind);
    uint8_t* scales = nullptr;
    for (int64_t b = 0; b < blocks_of(columns); b++) {
        Block block[LANES] = {};
        for (int o = 0; o < count; o++) block[o] = read_block(kind, rows + o * row_bytes, b);
        if (b % s.group() == 0) scales = to, to += s.heads();
        pack_codes(s.bits, block, to);
        to += s.codes;
        uint8_t* const own = scales + s.shared + b % s.group() * s.scales;
        uint8_t* const first = s.shared ? scales : own;
        for (int o = 0; o < LANES; o++) {
            std::memcpy(first + o * 2, &block[o].factor[0], 2);
            if (s.least) std::memcpy(first + 32 + o * 2, &block[o].factor[1], 2);
            if (s.shared) own[o] = block[o].scale[0], own[LANES + o] = s.least ? block[o].least : block[o].scale[1];
        }
    }
}

// Widens a row of the file to floats, operation by operation as the format defines it.
inline void widen_row(int kind, const uint8_t* row, int64_t columns, float* to) {
    const Shape s = shape_of(kind);
    for (int64_t b = 0; b < blocks_of(columns); b++) {
        const Block block = read_block(kind, row, b);
        const float factor = widened_half(block.factor[0]), least = widened_half(block.factor[1]) * block.least;
        for (int c = 0; c < COLUMNS; c++) {
            const float value = factor * block.scale[c / 16] * (block.code[c] - s.less);
            to[b * COLUMNS + c] = s.least ? value - least : value;
        }
    }
}

}  // namespace
