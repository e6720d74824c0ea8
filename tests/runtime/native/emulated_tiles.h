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

inline float emulated_at(int tile, int row, int number) {  // a bfloat16 of a row
    uint16_t half;
    std::memcpy(&half, emulated[tile].row[row] + 2 * number, 2);
    const uint32_t bits = (uint32_t)half << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

template <int C, int A, int B> inline void tile_add() {  // C += A B, by pairs of inner elements, in order
    for (int row = 0; row < 16; row++) {
        float sums[16];
        std::memcpy(sums, emulated[C].row[row], 64);
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < 16; n++)
                for (int i = 0; i < 2; i++) sums[n] += emulated_at(A, row, 2 * k + i) * emulated_at(B, k, 2 * n + i);
        std::memcpy(emulated[C].row[row], sums, 64);
    }
}

}  // namespace
