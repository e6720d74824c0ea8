// What tiles.h takes from the matrix units, for processors that have none. A test compiles the kernels with
// `-include emulated_tiles.h -DTILES`, for AVX512_BF16, which rounds and unpacks as before.
#pragma once

#include <cstdint>
#include <cstring>

#define __AMX_BF16__ 1
#define EMULATED_TILES 1

namespace {

struct alignas(64) EmulatedTile { uint8_t row[16][64]; };
static thread_local EmulatedTile emulated[8];

struct TileRegisters { TileRegisters() {} };

template <int T> inline void tile_load(const void* p, int64_t stride = 64) {
    for (int i = 0; i < 16; i++) std::memcpy(emulated[T].row[i], (const char*)p + i * stride, 64);
}
template <int T> inline void tile_store(float* p) { std::memcpy(p, &emulated[T], sizeof emulated[T]); }
template <int T> inline void tile_zero() { std::memset(&emulated[T], 0, sizeof emulated[T]); }

// A row's pairs of bfloat16, as floats.
inline void emulated_pairs(const uint8_t* row, float* first, float* second) {
    uint32_t bits[16], one[16], two[16];
    std::memcpy(bits, row, 64);
    for (int i = 0; i < 16; i++) one[i] = bits[i] << 16, two[i] = bits[i] & 0xffff0000u;
    std::memcpy(first, one, 64), std::memcpy(second, two, 64);
}

template <int C, int A, int B> inline void tile_add() {  // C += A B, by pairs of inner elements, in order
    float sums[16][16], left[2][16][16], right[2][16][16];
    std::memcpy(sums, &emulated[C], sizeof sums);
    for (int i = 0; i < 16; i++) {
        emulated_pairs(emulated[A].row[i], left[0][i], left[1][i]);
        emulated_pairs(emulated[B].row[i], right[0][i], right[1][i]);
    }
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < 16; k++)
            for (int i = 0; i < 2; i++)
                for (int n = 0; n < 16; n++) sums[row][n] += left[i][row][k] * right[i][k][n];
    std::memcpy(&emulated[C], sums, sizeof sums);
}

}  // namespace
