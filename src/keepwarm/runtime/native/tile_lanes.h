// One unit of attention with the matrix units. Keys, values, queries and weights are bfloat16; sums are float32.
//
// Scores are [position][lane]. So keys can be loaded as a tile's rows just as they are stored, and a lane's maximum and
// total need no sum across a vector. The result is [dim][lane]. So values are transposed, once per unit for all lanes.
#pragma once

#include "attention.h"
#include "operands.h"
#include "tiles.h"

#if defined(HAS_TILES)
namespace {

constexpr int SQUARE = LANES * LANES;

inline void transpose(__m512i (&r)[LANES]) {  // a matrix of 16 by 16 numbers of 32 bits
    __m512i t[LANES];
    for (int i = 0; i < 16; i += 2) t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0x88);
            t[i + j + 4] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0xdd);
        }
    for (int j = 0; j < 8; j++) {
        r[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
        r[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd);
    }
}

template <int DV>
struct TileLanes : LaneList<8 * LANES> {
    static constexpr int DIM = DV * LANES, STEPS = (DIM + DEEP - 1) / DEEP, FULL = STEPS * DEEP;
    static constexpr int ONCE = 4 * LANES;  // see `Even`: values are transposed
    using LaneList::MOST;
    alignas(64) bf16 q[MOST / LANES][STEPS][TILE];  // [pair of dims][lane][2]
    TileLanes(const Model& m, const Step& s, const float* queries, const int32_t* rows, int first, int last, int layer,
              int kv_head)
        : LaneList(m, s, rows, first, last, layer, kv_head) {
        for (int v = 0; v < vl; v++)
            for (int k = 0; k < STEPS; k++) {
                __m512i turned[LANES];
                for (int i = 0; i < LANES; i++) {
                    const float* from = query(m, m.layer[layer], queries, v * LANES + i);
                    alignas(64) bf16 pairs[DEEP] = {};
                    for (int d = 0; from && d < DEEP && k * DEEP + d < DIM; d += LANES)
                        store(pairs + d, load(from + k * DEEP + d) * splat(m.scale));
                    turned[i] = _mm512_load_si512(pairs);
                }
                transpose(turned);
                for (int i = 0; i < LANES; i++) _mm512_store_si512(q[v][k] + i * DEEP, turned[i]);
            }
    }
};

// Returns one unit's keys or values [64][FULL]. They stay in place if the unit is full and its pages are consecutive;
// else they are copied and padded with zeros.
template <int DIM, int FULL>
inline const bf16* unit_rows(const bf16* const* page, int count, bf16* copy) {
    bool whole = count == UNIT && DIM == FULL;
    for (int p = 1; p < UNIT / PAGE; p++) whole = whole && page[p] == page[0] + p * PAGE * DIM;
    if (whole) return page[0];
    std::memset(copy, 0, UNIT * FULL * sizeof(bf16));
    for (int t = 0; t < count; t++) std::memcpy(copy + t * FULL, page[t / PAGE] + t % PAGE * DIM, DIM * sizeof(bf16));
    return copy;
}

// Transposes values [64][FULL] to tiles [FULL / 16][2] of [16 dims][32 positions].
template <int FULL>
inline void turn(const bf16* values, bf16 (*turned)[2][TILE]) {
    for (int half = 0; half < 2; half++)
        for (int d = 0; d < FULL; d += DEEP) {
            __m512i low[LANES], high[LANES];
            for (int i = 0; i < LANES; i++) {
                const bf16* at = values + (half * DEEP + 2 * i) * FULL + d;
                const __m512i a = _mm512_loadu_si512(at), b = _mm512_loadu_si512(at + FULL);
                low[i] = _mm512_unpacklo_epi16(a, b), high[i] = _mm512_unpackhi_epi16(a, b);
            }
            transpose(low), transpose(high);
            for (int i = 0; i < LANES; i++) {  // of each eight dims, unpacking puts four into `low` and four into `high`
                const int dim = i / 4 * 8 + i % 4;
                _mm512_store_si512(turned[(d + dim) / LANES][half] + dim % LANES * DEEP, low[i]);
                _mm512_store_si512(turned[(d + dim + 4) / LANES][half] + (dim + 4) % LANES * DEEP, high[i]);
            }
        }
}

// Prefetches the next unit's cache lines, a few at a time, while a unit is computed.
template <int DIM>
struct Ahead {
    static constexpr int LINES = PAGE * DIM / DEEP;  // cache lines of a page
    const bf16* const* pages;
    int at = 0;
    void ask(int lines) {
        for (int last = at + lines; at < last && at < 2 * UNIT / PAGE * LINES; at++)
            __builtin_prefetch(pages[at / LINES] + at % LINES * DEEP, 0, 2);
    }
};

// Computes a half of `score` [64][16], of 64 positions for 16 lanes.
template <int FULL>
inline void score_half(const bf16 (*q)[TILE], const bf16* keys, float* score, int half) {
    keys += half * 2 * LANES * FULL, score += half * 2 * SQUARE;
    tile_zero<0>(), tile_zero<1>();
    for (int k = 0; k < FULL / DEEP; k++) {
        const bf16* at = keys + k * DEEP;
        tile_load<4>(q[k]);
        tile_load<5>(at, FULL * 2), tile_add<0, 5, 4>();
        tile_load<5>(at + LANES * FULL, FULL * 2), tile_add<1, 5, 4>();
    }
    tile_store<0>(score), tile_store<1>(score + SQUARE);
}

// Sets weight [pair of positions][16][2] = 2^(score - maximum), with the new maximum. Returns the factor of earlier sums.
// Calls `meanwhile` STEPS times, each time with the next number.
template <int STEPS, int DIM, class Meanwhile>
inline Vec weigh_unit(float* score, int first, VecI position, int window, bool masked, float* maximum, float* total,
                      bf16* weight, Ahead<DIM>& ahead, int lines, Meanwhile meanwhile) {
    constexpr int PARTIAL = 4;
    static_assert(UNIT % (STEPS * PARTIAL) == 0, "a step weighs whole groups of positions");
    const Vec before = load(maximum);
    Vec tops[PARTIAL] = {before, before, before, before}, part[PARTIAL] = {};
    if (masked)
        for (int t = 0; t < UNIT; t++)
            store(score + t * LANES, unseen(first + t, position, window) ? splat(NEVER) : load(score + t * LANES));
    for (int t = 0; t < UNIT; t += PARTIAL)
#pragma GCC unroll 4
        for (int i = 0; i < PARTIAL; i++) tops[i] = max(tops[i], load(score + (t + i) * LANES));
    const Vec top = max(max(tops[0], tops[1]), max(tops[2], tops[3])), factor = exp2_short(before - top);
    for (int step = 0; step < STEPS; step++) {
        meanwhile(step);
        for (int t = step * UNIT / STEPS; t < (step + 1) * UNIT / STEPS; t += PARTIAL) {
            Vec p[PARTIAL];
#pragma GCC unroll 4
            for (int i = 0; i < PARTIAL; i++) {
                p[i] = exp2_short(load(score + (t + i) * LANES) - top);
                if (masked) p[i] = unseen(first + t + i, position, window) ? Vec{} : p[i];
                part[i] += p[i];
            }
            for (int i = 0; i < PARTIAL; i += 2) _mm512_store_si512(weight + (t + i) * LANES, (__m512i)paired(p[i], p[i + 1]));
            ahead.ask(lines);
        }
    }
    store(total, fma(load(total), factor, (part[0] + part[1]) + (part[2] + part[3])));
    store(maximum, top);
    return factor;
}

// Sets two rows of tiles, from d on, of out [FULL][16] to the weighted sums of the values.
inline void gather_pair(const bf16* weight, const bf16 (*values)[2][TILE], float* out, int d) {
    tile_zero<0>(), tile_zero<1>();
    for (int half = 0; half < 2; half++) {
        tile_load<4>(weight + half * TILE);
        tile_load<5>(values[d][half]), tile_add<0, 5, 4>();
        tile_load<5>(values[d + 1][half]), tile_add<1, 5, 4>();
    }
    tile_store<0>(out + d * SQUARE), tile_store<1>(out + (d + 1) * SQUARE);
}

// Attends to the units [from, to) of a work's pages. It continues from the lanes' maximum, total and acc.
template <int DV>
void walk(const Model& m, const Step& s, TileLanes<DV>& l, const Work& work, int layer, int head, int from, int to) {
    using Lanes = TileLanes<DV>;
    constexpr int DIM = Lanes::DIM, FULL = Lanes::FULL;
    alignas(64) float sums[Lanes::MOST / LANES][FULL * LANES];  // [dim][lane]
    alignas(64) bf16 decoded[2 * UNIT * DIM], copy[2][UNIT * FULL], turned[FULL / LANES][2][TILE], weight[2][UNIT * LANES];
    alignas(64) float score[2][UNIT * LANES], out[FULL * LANES];
    VecI position[Lanes::MOST / LANES];
    int lowest[Lanes::MOST / LANES], highest[Lanes::MOST / LANES];
    auto exchange = [&](bool enter) {  // acc is [lane][dim]
        for (int v = 0; v < l.vl; v++)
            for (int d = 0; d < DIM; d += LANES) {
                __m512i r[LANES];
                float *const *acc = l.acc + v * LANES, *sum = sums[v] + d * LANES;
                for (int i = 0; i < LANES; i++)
                    r[i] = !enter ? _mm512_load_si512(sum + i * LANES) : acc[i] ? _mm512_loadu_si512(acc[i] + d) : __m512i{};
                transpose(r);
                for (int i = 0; i < LANES; i++)
                    if (enter) _mm512_store_si512(sum + i * LANES, r[i]);
                    else if (acc[i]) _mm512_storeu_si512(acc[i] + d, r[i]);
            }
    };
    std::memset(sums, 0, l.vl * sizeof sums[0]);
    bool fresh = true;
    for (int i = 0; i < l.n; i++) fresh = fresh && l.total[i] == 0;
    if (!fresh) exchange(true);
    for (int v = 0; v < l.vl; v++) {
        std::memcpy(&position[v], l.where + v * LANES, sizeof(VecI));
        lowest[v] = INT32_MAX, highest[v] = -1;
        for (int i = v * LANES; i < (v + 1) * LANES && i < l.n; i++) {
            lowest[v] = l.where[i] < lowest[v] ? l.where[i] : lowest[v];
            highest[v] = l.where[i] > highest[v] ? l.where[i] : highest[v];
        }
    }
    for (int unit = from; unit < to; unit++) {
        const int first = unit * UNIT, count = l.highest + 1 - first < UNIT ? l.highest + 1 - first : UNIT;
        if (count <= 0) break;
        const Pages<bf16> pages(m, s, work, layer, head, unit, decoded);
        const bf16* keys = unit_rows<DIM, FULL>(pages.page[0], count, copy[0]);
        turn<FULL>(unit_rows<DIM, FULL>(pages.page[1], count, copy[1]), turned);
        int active[Lanes::MOST / LANES + 1], n = 0;
        for (int v = 0; v < l.vl; v++)
            if (highest[v] >= first && first + UNIT - 1 > lowest[v] - l.window) active[n++] = v;
        if (!n) continue;
        // A vector of lanes is weighed while the matrix unit scores the next one and gathers the one before, a little of
        // both between the vector units' steps. A processor does not look ahead far enough to find that by itself.
        constexpr int STEPS = 4, PIECES = 2 + FULL / DEEP;
        Ahead<DIM> ahead{pages.next};  // the next unit is fetched while this one is computed
        const int lines = (2 * UNIT * DIM / DEEP + 16 * n - 1) / (16 * n);
        Vec factor[2];
        score_half<FULL>(l.q[active[0]], keys, score[0], 0), score_half<FULL>(l.q[active[0]], keys, score[0], 1);
        for (int i = 0; i <= n; i++) {
            auto matrices = [&](int step) {
                for (int piece = step * PIECES / STEPS; piece < (step + 1) * PIECES / STEPS; piece++)
                    if (piece < 2 && i + 1 < n) score_half<FULL>(l.q[active[i + 1]], keys, score[(i + 1) % 2], piece);
                    else if (piece >= 2 && i) gather_pair(weight[(i - 1) % 2], turned, out, 2 * (piece - 2));
            };
            if (i < n) {
                const int v = active[i];
                if (m.score_cap)
                    for (float* at = score[i % 2]; at < score[i % 2] + UNIT * LANES; at += LANES) store(at, capped(load(at), m.score_cap));
                const bool masked = first + UNIT - 1 > lowest[v] || first <= highest[v] - l.window;
                factor[i % 2] = weigh_unit<STEPS>(score[i % 2], first, position[v], l.window, masked, l.maximum + v * LANES,
                                                  l.total + v * LANES, weight[i % 2], ahead, lines, matrices);
            } else {
                for (int step = 0; step < STEPS; step++) matrices(step);
            }
            for (int d = 0; i && d < FULL * LANES; d += LANES) {
                float* sum = sums[active[i - 1]] + d;
                store(sum, fma(load(sum), factor[(i - 1) % 2], load(out + d)));
            }
        }
    }
    exchange(false);
}

}  // namespace
#endif
