// A head in bfloat16 in two parts of six bits for each weight, without loss: how it is packed, and how it is unpacked.
//
// The values of bfloat16, in order, are cut into 64 cells. A cell has at most 64 of them, one behind the other. The first
// part of a weight is the number of its cell, the second part its place in the cell. So both tell a weight, and the first one
// alone tells it to the width of a cell. Weights in no cell are listed (twelve.h).
//
// Cells are chosen for a matrix. Aligned blocks of 64 values, by how many weights have them, are cells until nearly all
// weights have one. Then the cell that makes estimates worst is cut in half, until there are 64. Six bits tell weights to
// 3.8 % this way (root mean square; Gemma 3 270M). With the upper six of twelve bits it would be 11 %, with eight 2.7 %.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "vectors.h"

extern "C" {

struct WeightMatrix {        // bfloat16 [rows][columns], to be packed in panels of `across` columns
    const uint16_t* at;
    int64_t rows, columns, across;
};

struct WeightCells {         // bits of bfloat16, by cell
    uint16_t first[64];      // a cell's first value; the others follow
    uint16_t middle[64];     // stands for a weight where only the first part is read
    uint8_t count[64];       // its values; 0: not used
};

}  // extern "C"

namespace {

constexpr int GROUP = 128, PAIRED = 8;     // weights of a group; their columns
constexpr int PART_BYTES = GROUP * 6 / 8;  // of a group
constexpr uint8_t NO_CODE = 255;

// Returns what processors multiply: they take numbers below the normal ones for zero.
inline float factor_of(const void* at) {
    uint16_t bits;
    std::memcpy(&bits, at, sizeof bits);
    return bits & 0x7f80 ? widened_bf16(bits) : 0.f;
}

// ---- choosing cells ----

// A run of values, and what estimating its weights by their mean costs.
struct Cell {
    int first, count;
    double weights = 0, mean, cost = 0;
    Cell(const int64_t* seen, int first, int count) : first(first), count(count), mean(widened_bf16(first)) {
        double sum = 0;
        for (int i = first; i < first + count; i++) weights += seen[i], sum += seen[i] * (double)widened_bf16(i);
        if (!weights || !std::isfinite(mean)) return;  // infinities, and what is no number
        mean = sum / weights;
        for (int i = first; i < first + count; i++) cost += seen[i] * (widened_bf16(i) - mean) * (widened_bf16(i) - mean);
    }
};

// Chooses the cells for weights of which seen[bits] have these bits.
inline std::vector<Cell> chosen_cells(const int64_t* seen) {
    constexpr int CELLS = 64, MOST = 64, ENOUGH = 1024;  // of so many weights one may have no cell
    double left = 0;
    std::vector<Cell> all, cells;
    for (int first = 0; first < 1 << 16; first += MOST) {
        all.emplace_back(seen, first, MOST);
        left += all.back().weights;
    }
    std::stable_sort(all.begin(), all.end(), [](const Cell& a, const Cell& b) { return a.weights > b.weights; });
    const double enough = left / ENOUGH;
    for (int i = 0; i < CELLS && left > enough && all[i].weights; i++) left -= all[i].weights, cells.push_back(all[i]);
    while (cells.size() < CELLS) {
        size_t best = 0;
        double most = 0;
        for (size_t i = 0; i < cells.size(); i++) {
            const Cell& c = cells[i];
            if (c.count == 1) continue;
            const double gain = c.cost - Cell(seen, c.first, c.count / 2).cost - Cell(seen, c.first + c.count / 2, c.count / 2).cost;
            if (gain > most) best = i, most = gain;
        }
        if (!most) break;
        const Cell c = cells[best];
        cells[best] = Cell(seen, c.first, c.count / 2), cells.emplace_back(seen, c.first + c.count / 2, c.count / 2);
    }
    return cells;
}

// Returns the bits of bfloat16 that are nearest to a number.
inline uint16_t nearest(double value) {
    const float narrow = (float)value;
    uint32_t bits;
    std::memcpy(&bits, &narrow, sizeof bits);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline void choose(const int64_t* seen, WeightCells& to) {
    to = {};
    int i = 0;
    for (const Cell& cell : chosen_cells(seen))
        to.first[i] = cell.first, to.count[i] = cell.count, to.middle[i++] = nearest(cell.mean);
}

// ---- packing ----

// Each value's cell.
struct CellCodes {
    static constexpr int PARTS = 2;
    const WeightCells& cells;
    uint8_t code[1 << 16];
    explicit CellCodes(const WeightCells& cells) : cells(cells) {
        std::memset(code, NO_CODE, sizeof code);
        for (int i = 0; i < 64; i++) std::memset(code + cells.first[i], i, cells.count[i]);
    }
    bool has(uint16_t weight) const { return code[weight] != NO_CODE; }
    float estimate(uint16_t weight) const { return widened_bf16(cells.middle[has(weight) ? code[weight] : 0]); }
};

// Puts a number of six bits to its place in a part of a group: [32 words] of two and a half numbers, [32] bytes of the rest.
inline void put_six(uint8_t* part, int number, uint8_t value) {
    const int vector = number / 32, word = number % 32;
    uint8_t *const low = part + 2 * word, *const more = part + 64 + word;
    switch (vector) {
        case 0: *low |= value; break;
        case 1: *low |= value << 6, low[1] |= value >> 2; break;
        case 2: low[1] |= value << 4, *more |= value >> 4 << 6; break;
        default: *more |= value;
    }
}

constexpr double LARGE = 1e18;  // sums of products of smaller norms do not overflow

// Sets errors[r] so that a row of x times its weights is off by at most errors[r] |x|, by their norms (Cauchy-Schwarz), if
// only the first part is read. Both ways to add up round by at most 4 `across` 2^-23 of the weights' norm.
inline void bound_errors(const WeightMatrix& m, const CellCodes& codes, int64_t panel, float* errors) {
    for (int r = 0; r < LANES; r++) {
        const int64_t row = panel * LANES + r;
        double wrong = 0, norm = 0;
        for (int64_t c = 0; c < m.columns && row < m.rows; c++) {
            const uint16_t bits = m.at[row * m.columns + c];
            const double weight = widened_bf16(bits), estimate = codes.estimate(bits);
            if (codes.has(bits)) wrong += (weight - estimate) * (weight - estimate);
            norm += std::max(weight * weight, estimate * estimate);
        }
        // With larger weights, a sum may overflow on the way, so that nothing bounds it.
        errors[r] = norm < LARGE * LARGE ? (float)((std::sqrt(wrong) + std::sqrt(norm) * m.across * 0x1p-20) * (1 + 1e-6))
                                         : std::numeric_limits<float>::infinity();
    }
}

// ---- reading ----

#if defined(__AVX512BW__)
using Sixes = __m512i;  // [32] numbers; above their six bits may be anything

// Reads the four vectors of a part of a group.
inline void sixes(const uint8_t* part, Sixes* to) {
    const __m512i low = _mm512_loadu_si512(part), more = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)(part + 64)));
    to[0] = low, to[1] = _mm512_srli_epi16(low, 6), to[3] = more;
    to[2] = _mm512_or_si512(_mm512_srli_epi16(low, 12), _mm512_and_si512(_mm512_srli_epi16(more, 2), _mm512_set1_epi16(0x30)));
}

// Looks up the four vectors of a part of a group.
inline void look_up_cells(const uint8_t* part, const uint16_t* values, __m512i* to) {
    const __m512i left = _mm512_loadu_si512(values), right = _mm512_loadu_si512(values + 32);
    Sixes cell[4];
    sixes(part, cell);
    for (int i = 0; i < 4; i++) to[i] = _mm512_permutex2var_epi16(left, cell[i], right);  // it takes six bits of each number
}

// Unpacks a group.
inline void unpack_cells(const uint8_t* part, const uint8_t* rest, const WeightCells& cells, uint16_t* to) {
    __m512i first[4];
    look_up_cells(part, cells.first, first);
    Sixes place[4];
    sixes(rest, place);
    for (int i = 0; i < 4; i++)
        _mm512_storeu_si512(to + 32 * i, _mm512_add_epi16(first[i], _mm512_and_si512(place[i], _mm512_set1_epi16(63))));
}

// Returns what a group's first part tells of its weights.
INLINE void estimated(const uint8_t* part, const WeightCells& cells, Vec* to) {
    __m512i middle[4];
    look_up_cells(part, cells.middle, middle);
    for (int i = 0; i < 4; i++) to[i] = (Vec)middle[i];
}
#elif defined(__ARM_NEON)
// Reads 16 numbers of each of the four vectors.
inline void sixes(const uint8_t* part, int half, uint8x16_t* to) {
    const uint8x16x2_t low = vld2q_u8(part + 32 * half);  // lower bytes, upper bytes
    const uint8x16_t more = vld1q_u8(part + 64 + 16 * half), six = vdupq_n_u8(63);
    to[0] = vandq_u8(low.val[0], six), to[3] = vandq_u8(more, six);
    to[1] = vandq_u8(vorrq_u8(vshrq_n_u8(low.val[0], 6), vshlq_n_u8(low.val[1], 2)), six);
    to[2] = vorrq_u8(vshrq_n_u8(low.val[1], 4), vshlq_n_u8(vshrq_n_u8(more, 6), 4));
}

// Looks up 16 weights of each of the four vectors of a part of a group, and adds their places.
inline void look_up_cells(const uint8_t* part, int half, const uint8x16x4_t& low, const uint8x16x4_t& high,
                          const uint8x16_t* place, uint16_t* to) {
    uint8x16_t cell[4];
    sixes(part, half, cell);
    for (int i = 0; i < 4; i++) {
        const uint8x16_t lower = vqtbl4q_u8(low, cell[i]), upper = vqtbl4q_u8(high, cell[i]);
        uint16_t* const at = to + 32 * i + 16 * half;
        vst1q_u16(at, vaddw_u8(vreinterpretq_u16_u8(vzip1q_u8(lower, upper)), vget_low_u8(place[i])));
        vst1q_u16(at + 8, vaddw_u8(vreinterpretq_u16_u8(vzip2q_u8(lower, upper)), vget_high_u8(place[i])));
    }
}

inline void bytes_of(const uint16_t* values, uint8x16x4_t& low, uint8x16x4_t& high) {
    for (int i = 0; i < 4; i++) {
        const uint8x16x2_t some = vld2q_u8((const uint8_t*)(values + 16 * i));
        low.val[i] = some.val[0], high.val[i] = some.val[1];
    }
}

// Unpacks a group.
inline void unpack_cells(const uint8_t* part, const uint8_t* rest, const WeightCells& cells, uint16_t* to) {
    uint8x16x4_t low, high;
    bytes_of(cells.first, low, high);
    for (int half = 0; half < 2; half++) {
        uint8x16_t place[4];
        sixes(rest, half, place);
        look_up_cells(part, half, low, high, place, to);
    }
}

// Returns what a group's first part tells of its weights.
INLINE void estimated(const uint8_t* part, const WeightCells& cells, Vec* to) {
    alignas(64) uint16_t value[GROUP];
    uint8x16x4_t low, high;
    const uint8x16_t none[4] = {};
    bytes_of(cells.middle, low, high);
    for (int half = 0; half < 2; half++) look_up_cells(part, half, low, high, none, value);
    for (int i = 0; i < 4; i++) to[i] = of_memory<Vec>(value + 32 * i);
}
#endif

// Prefetches a part of a group.
INLINE void ask_for_part(const uint8_t* part) { __builtin_prefetch(part, 0, 2), __builtin_prefetch(part + PART_BYTES / 2, 0, 2); }

}  // namespace
