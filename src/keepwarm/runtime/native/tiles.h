// Products with the processor's bfloat16 matrix units (AMX). A tile has 16 rows of 64 bytes.
//
// A processor renames tile registers, as all others, but has few to spare, and fewer while another thread runs on its core.
// Where eight held data, products waited for free ones: each took 2.4 times as long on an Emerald Rapids. So operands are
// loaded just before their use, into two registers, though one is then loaded more often; and sums that are no longer needed
// are set to zero, which frees their registers.
//
// Each sum adds the products of 32 consecutive inner elements, tile by tile, in order. What is in the tile's other rows
// does not matter. Weights are packed [out / 16][in / 32][16 pairs][16][2] in 12 bits (twelve.h), and padded with zeros. The
// other operand's columns are padded with zeros, too.
#pragma once

#include <algorithm>

#include "model.h"
#include "twelve.h"

#if defined(TILES) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define HAS_TILES 1

namespace {

constexpr int DEEP = 32;                // inner elements in a tile
constexpr int TILE = LANES * DEEP;      // elements of an operand's tile
constexpr int AHEAD = 2;                // weights are unpacked so many tiles before they are used: their bytes must be
                                        // in the cache by then
constexpr int ASKED = 4;                // weights are prefetched so many tiles before they are unpacked
constexpr int BETWEEN = 4;              // tiles between which some rows' sums are given
constexpr int PASSING = 2 * AHEAD;      // places for unpacked tiles that no other rows need
static_assert((PASSING & (PASSING - 1)) == 0, "a tile's place is its number, masked");

#if !defined(EMULATED_TILES)  // a test defines what follows for processors without matrix units
// Configures six tile registers of its thread, of full size, for as long as it lives: 0 to 3 for sums, 4 and 5 for operands.
struct TileRegisters {
    TileRegisters() {
        struct alignas(64) { uint8_t palette = 1, start = 0, none[14] = {}; uint16_t bytes[16] = {}; uint8_t rows[16] = {}; } shape;
        for (int i = 0; i < 6; i++) shape.bytes[i] = 64, shape.rows[i] = 16;
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

#endif

struct TileRows {  // [rows, width], rounded to bfloat16, as [rows / 16][width / 32] tiles
    static constexpr int BLOCK = 2 * LANES;  // rows whose sums are computed at once
    static constexpr int TOGETHER = LANES;   // rows of a tile: they are multiplied with the same weights
    static constexpr int UNIT = LANES;
    static constexpr int KEPT = BLOCK;       // for more rows, weights are unpacked only once
    template <class> using Weight = WeightPanel;
    template <class> using HeadWeight = HeadPanel;
    bf16* p = nullptr;
    int width = 0, across = 0;
    TileRows() = default;
    TileRows(int width, int, float* p) : p((bf16*)p), width(width), across((width + DEEP - 1) / DEEP) {}
    TileRows of(int width, int rows) const { return {width, rows, (float*)p}; }
    static int64_t size(int64_t rows, int width) { return (rows + 15) / 16 * ((width + DEEP - 1) / DEEP) * TILE / 2; }
    void clear(int rows) const {  // padding is multiplied with zeros, so it must not be NaN
        if (width % DEEP) std::memset(p, 0, size(rows, width) * sizeof(float));
    }
    int64_t row_bytes() const { return across * DEEP * sizeof(bf16); }
    int columns() const { return width; }
    int64_t panel() const { return 1; }  // from one panel to the next
    int64_t elements() const { return (int64_t)across * TILE; }  // weights of a panel
    const bf16* tile(int row) const { return p + (int64_t)(row / LANES) * across * TILE; }
    bf16* place(unsigned row, unsigned column) const {  // without a sign, divisions are shifts
        return p + ((int64_t)(row / LANES) * across + column / DEEP) * TILE + row % LANES * DEEP + column % DEEP;
    }
    void put(int row, int column, Vec v) const {  // what is below the normal numbers is zero, as for the matrix units
        _mm256_storeu_si256((__m256i*)place(row, column), (__m256i)_mm512_cvtneps_pbh((__m512)v));
    }
    Vec get(int row, int column) const { return load(place(row, column)); }
    float number(int row, int column) const { return factor_of(place(row, column)); }
    Vec pair(int row, int column) const {
        int32_t bits;
        std::memcpy(&bits, place(row, column), sizeof bits);
        return as_floats(filled<VecI>(bits));
    }
};

// The tiles of a panel. They are unpacked in order, to room for `places` of them.
template <class Panel>
class PanelTiles {
    PanelReader<Panel> reader;
    const uint8_t *const from, *const next;
    const int bytes, next_bytes;  // of a tile
    const bf16* const at;
    const int across, mask;  // mask: of a tile's number, for its place
    int unpacked = 0;

    // Asks for a tile's bytes. What is behind the last tile lies in the next panel.
    void ask(int tile) const {
        const int beyond = tile - across;
        const uint8_t* const there = beyond < 0 ? from + (int64_t)tile * bytes : next + (int64_t)beyond * next_bytes;
        for (int i = 0; (beyond < 0 || next) && i < (beyond < 0 ? bytes : next_bytes); i += 64) __builtin_prefetch(there + i, 0, 2);
    }

public:
    PanelTiles(const Panel& panel, const Panel* following, bf16* room, int places, int across)
        : reader(panel, room, (int64_t)places * TILE), from(panel.at), next(following ? following->at : nullptr),
          bytes(vector_bytes(panel) * (TILE / 32)), next_bytes(next ? vector_bytes(*following) * (TILE / 32) : 0),
          at(panel.others ? room : (const bf16*)panel.at), across(across), mask(panel.others && places < across ? PASSING - 1 : -1) {}
    void unpack(int last) {  // all up to this one
        for (; unpacked <= last && unpacked < across; unpacked++) {
            ask(unpacked + ASKED);
            reader.take(TILE / GROUP);
        }
    }
    const bf16* tile(int k) const { return at + (int64_t)(k & mask) * TILE; }
};

// Gives the sums of rows [from, to) with two panels to `take(row, left 16, right 16)`. It gives those of 32 rows while
// the matrix unit works on the next 32. The first 32 unpack the panels; the others find them in this thread's room.
template <class Panel, class Take>
void product(const TileRows& x, int from, int to, const Panels<Panel>& w, Take take) {
    w.ask_for_places();
    constexpr int BOTH = TileRows::BLOCK;
    alignas(64) float sums[2][4][LANES * LANES];
    alignas(64) bf16 passing[2 * PASSING * TILE];
    const bool keeps = to - from > x.KEPT;
    const int places = keeps ? x.across : PASSING;
    bf16* const room = keeps ? (bf16*)thread_room(x.elements()) : passing;
    PanelTiles<Panel> left(*w.left, w.next_left, room, places, x.across);
    PanelTiles<Panel> right(*w.right, w.next_right, room + places * TILE, places, x.across);
    const int each = (BOTH * BETWEEN + x.across - 1) / x.across;
    int side = 0, begin = from, given = from, end = from;
    auto give = [&](int rows) {
        for (int last = given + rows < end ? given + rows : end; given < last; given++) {
            const float* at = sums[!side][(given - begin) / LANES * 2] + (given - begin) % LANES * LANES;
            take(given, load(at), load(at + LANES * LANES));
        }
    };
    for (int row = from; row < to; row += BOTH, side = !side) {
        const bf16 *upper = x.tile(row), *lower = row + LANES < to ? x.tile(row + LANES) : nullptr;
        tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
        for (int k = 0; k < x.across;) {
            for (const int last = std::min(k + BETWEEN, x.across); k < last; k++, upper += TILE) {
                if (row == from) left.unpack(k + AHEAD), right.unpack(k + AHEAD);
                tile_load<4>(upper), tile_load<5>(left.tile(k)), tile_add<0, 4, 5>();
                tile_load<5>(right.tile(k)), tile_add<1, 4, 5>();
                if (!lower) continue;
                tile_load<4>(lower), lower += TILE, tile_add<3, 4, 5>();
                tile_load<5>(left.tile(k)), tile_add<2, 4, 5>();
            }
            give(each);
        }
        tile_store<0>(sums[side][0]), tile_store<1>(sums[side][1]);
        if (row + LANES < to) tile_store<2>(sums[side][2]), tile_store<3>(sums[side][3]);
        begin = given = row, end = row + BOTH < to ? row + BOTH : to;
    }
    tile_zero<2>(), tile_zero<3>();  // attention uses the others
    give(BOTH);
}

}  // namespace
#endif
