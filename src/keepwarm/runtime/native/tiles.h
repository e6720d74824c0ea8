// Products with the processor's bfloat16 matrix units (AMX). A tile has 16 rows of 64 bytes.
//
// Each sum adds the products of 32 consecutive inner elements, tile by tile, in order. What is in the tile's other rows
// does not matter. Weights are packed [out / 16][in / 32][16 pairs][16][2] and padded with zeros. The other operand's
// columns are padded with zeros, too.
#pragma once

#include "model.h"

#if defined(TILES) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define HAS_TILES 1

namespace {

constexpr int DEEP = 32;                // inner elements in a tile
constexpr int TILE = LANES * DEEP;      // elements of an operand's tile
constexpr int AHEAD = 4;                // weights are prefetched so many tiles before they are used

// Configures the tile registers of its thread, all of full size, for as long as it lives.
struct TileRegisters {
    TileRegisters() {
        struct alignas(64) { uint8_t palette = 1, start = 0, none[14] = {}; uint16_t bytes[16] = {}; uint8_t rows[16] = {}; } shape;
        for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = 16;
        asm volatile("ldtilecfg (%0)" ::"r"(&shape) : "memory");
    }
    ~TileRegisters() { asm volatile("tilerelease"); }
};

// These are written in assembly because the compilers' intrinsics do not declare that they read memory.
template <int T> inline void tile_load(const void* p, int64_t stride = 64) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(stride) : "memory");
}
template <int T> inline void tile_store(float* p) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(p), "r"((int64_t)64) : "memory");
}
template <int T> inline void tile_zero() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
template <int C, int A, int B> inline void tile_add() {  // C += A B
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

struct TileRows {  // [rows, width], rounded to bfloat16, as [rows / 16][width / 32] tiles
    static constexpr int BLOCK = 2 * LANES;  // rows whose sums are computed at once
    static constexpr int TOGETHER = LANES;   // rows of a tile: they are multiplied with the same weights
    template <class> using Weight = bf16;
    bf16* p = nullptr;
    int width = 0, across = 0;
    TileRows() = default;
    TileRows(int width, float* p) : p((bf16*)p), width(width), across((width + DEEP - 1) / DEEP) {}
    static int64_t size(int64_t rows, int width) { return (rows + 15) / 16 * ((width + DEEP - 1) / DEEP) * TILE / 2; }
    void clear(int rows) const {  // padding is multiplied with zeros, so it must not be NaN
        if (width % DEEP) std::memset(p, 0, size(rows, width) * sizeof(float));
    }
    int64_t row_bytes() const { return across * DEEP * sizeof(bf16); }
    int64_t panel() const { return (int64_t)across * TILE; }
    const bf16* tile(int row) const { return p + (int64_t)(row / LANES) * across * TILE; }
    void put(int row, int column, Vec v) const {
        store(p + ((int64_t)(row / LANES) * across + column / DEEP) * TILE + row % LANES * DEEP + column % DEEP, v);
    }
};

// Gives the sums of rows [from, to) with two panels to `take(row, left 16, right 16)`. It gives those of 32 rows while
// the matrix unit works on the next 32.
template <class Take>
void product(const TileRows& x, int from, int to, const Panels<bf16>& w, Take take) {
    constexpr int BOTH = TileRows::BLOCK;
    alignas(64) float sums[2][4][LANES * LANES];
    const int each = (BOTH + x.across - 1) / x.across;
    int side = 0, begin = from, given = from, end = from;
    auto give = [&](int rows) {
        for (int last = given + rows < end ? given + rows : end; given < last; given++) {
            const float* at = sums[!side][(given - begin) / LANES * 2] + (given - begin) % LANES * LANES;
            take(given, load(at), load(at + LANES * LANES));
        }
    };
    for (int row = from; row < to; row += BOTH, side = !side) {
        const bf16 *upper = x.tile(row), *lower = row + LANES < to ? x.tile(row + LANES) : nullptr;
        const bf16 *l = w.left, *r = w.right;
        tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
        for (int k = 0; k < x.across; k++, l += TILE, r += TILE, upper += TILE) {
            if (row == from) {
                const int beyond = k + AHEAD - x.across;  // from 0 on, what is ahead lies in the next panels
                const bf16* left = beyond < 0 || !w.next_left ? l + AHEAD * TILE : w.next_left + beyond * TILE;
                const bf16* right = beyond < 0 || !w.next_right ? r + AHEAD * TILE : w.next_right + beyond * TILE;
                for (int at = 0; at < TILE; at += DEEP) __builtin_prefetch(left + at, 0, 2), __builtin_prefetch(right + at, 0, 2);
            }
            tile_load<4>(upper), tile_load<6>(l), tile_load<7>(r);
            tile_add<0, 4, 6>(), tile_add<1, 4, 7>();
            if (lower) {
                tile_load<5>(lower), lower += TILE;
                tile_add<2, 5, 6>(), tile_add<3, 5, 7>();
            }
            give(each);
        }
        tile_store<0>(sums[side][0]), tile_store<1>(sums[side][1]);
        if (row + LANES < to) tile_store<2>(sums[side][2]), tile_store<3>(sums[side][3]);
        begin = given = row, end = row + BOTH < to ? row + BOTH : to;
    }
    give(BOTH);
}

}  // namespace
#endif
