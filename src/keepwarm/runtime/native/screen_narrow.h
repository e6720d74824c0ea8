// The two parts of a head in bfloat16: six bits that tell its weights' cells, and six that tell all (cells.h).
#pragma once

#include "products.h"
#include "screen.h"
#include "tiles.h"

namespace {

#if defined(HAS_PAIRS) || defined(HAS_TILES)
template <class Rows>
class NarrowHead {
    const Rows& x;
    const int rows;
    float* const norms;  // [rows], of x
    const HeadPanel* const panels;
    const float* const errors;

    // Sets `to` to the estimates of MB rows in two panels. They are added up in another order than whole sums. The next two
    // panels are prefetched as they lie in memory, the left one first: memory brings one stream faster than two.
    template <int MB>
    __attribute__((noinline)) void first_sums(const HeadPanel* const (&panel)[2], const uint8_t* next, Vec (*to)[2]) const {
        constexpr int CHAINS = MB == 1 ? 4 : MB == 2 ? 2 : 1;  // a sum alone would wait for itself
        const WeightCells& cells = *panel[0]->cells;
        Vec sums[MB][2][CHAINS] = {};
        for (int64_t group = 0, at = 0; at < x.elements() / GROUP * PART_BYTES; group++, at += PART_BYTES)
#pragma GCC unroll 2
            for (int side = 0; side < 2; side++) {
                ask_for_part(next + 2 * at + side * PART_BYTES);
                Vec weight[4];
                estimated(panel[side]->at + at, cells, weight);
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++)
#pragma GCC unroll 4
                    for (int m = 0; m < MB; m++) {
                        Vec& sum = sums[m][side][i % CHAINS];
                        sum = add_pairs(x.pair(m, group * PAIRED + 2 * i), weight[i], sum);
                    }
            }
        for (int m = 0; m < MB; m++)
            for (int side = 0; side < 2; side++) {
                to[m][side] = sums[m][side][0];
                for (int i = 1; i < CHAINS; i++) to[m][side] += sums[m][side][i];
            }
        for (int side = 0; side < 2; side++) add_listed(*panel[side], MB, side, to);
    }

    // Adds what weights in no cell differ by from the middle of the first one, which has stood for them.
    void add_listed(const HeadPanel& panel, int rows, int side, Vec (*to)[2]) const {
        const float stood = factor_of(panel.cells->middle);
        float sums[SCREENED][LANES];
        for (int m = 0; m < rows; m++) store(sums[m], to[m][side]);
        for (const uint32_t* other = panel.others; *other != LAST; other += 2) {
            const int64_t number = *other >> 9;
            const int within = number % GROUP, lane = within % 32 / 2;
            const int64_t column = number / GROUP * PAIRED + within / 32 * 2 + within % 2;
            const uint16_t weight = (other[1] & 255) << 8 | (other[0] & 255);
            const float more = factor_of(&weight) - stood;
            for (int m = 0; m < rows; m++) sums[m][lane] += more * x.number(m, column);
        }
        for (int m = 0; m < rows; m++) to[m][side] = load(sums[m]);
    }

public:
    static constexpr float near = 0x1.04p-7f;  // logits are rounded to bfloat16
    static_assert(Rows::BLOCK > SCREENED, "no row lies beside others, so `pair` finds it");

    NarrowHead(const Model& m, const Rows& x, int rows, float* norms)
        : x(x), rows(rows), norms(norms), panels((const HeadPanel*)m.head), errors(m.errors) {}

    void know(int row) const {
        double sum = 0;
        for (int c = 0; c < x.columns(); c += LANES) {
            float each[LANES];
            store(each, x.get(row, c));
            for (const float value : each) sum += (double)value * value;
        }
        norms[row] = sum < LARGE * LARGE ? (float)(std::sqrt(sum) * (1 + 1e-6)) : std::numeric_limits<float>::infinity();
    }

    template <class Take>
    int estimate(int column, int to, Take take) const {
        const HeadPanel* const at = panels + column / LANES;
        const bool both = column + LANES < to;
        const HeadPanel* const panel[2] = {at, at + both};
        Panels<HeadPanel>{at, at, at + 2, at + 3}.ask_for_places();
        __builtin_prefetch(errors + column + 8 * LANES), __builtin_prefetch(errors + column + 9 * LANES);
        const uint8_t* const next = at[2].at ? at[2].at : at->at;  // behind the last panel there is none
        Vec sums[SCREENED][2];
        switch (rows) {
            case 1: first_sums<1>(panel, next, sums); break;
            case 2: first_sums<2>(panel, next, sums); break;
            case 3: first_sums<3>(panel, next, sums); break;
            default: first_sums<4>(panel, next, sums);
        }
        for (int row = 0; row < rows; row++)
            for (int side = 0; side <= both; side++) {
                const int c = column + side * LANES;
                take(row, c, sums[row][side], fma(load(errors + c), splat(norms[row]), sums[row][side]));
            }
        return column + 2 * LANES;
    }

    // All rows before this one are multiplied, too, since a product of tiles begins with a tile.
    void whole_sums(int row, int column, int other, Vec* to) const {
        const Panels<HeadPanel> both{panels + column / LANES, panels + other / LANES};
        product(x, row / Rows::TOGETHER * Rows::TOGETHER, row + 1, both, [&](int of, Vec first, Vec second) {
            if (of == row) to[0] = first, to[1] = second;
        });
    }

    void ask_for(int column) const {
        const HeadPanel& panel = panels[column / LANES];
        for (int64_t at = 0, bytes = x.elements() / GROUP * PART_BYTES; at < bytes; at += 64)
            __builtin_prefetch(panel.at + at), __builtin_prefetch(panel.rest + at);
    }
};

template <class Rows>
inline bool screens(const Model& m, const Rows&, int rows) { return in_order(m, rows) && m.errors; }

template <class Rows>
inline void largest_logits(const Model& m, Step& s, const Rows& x, int rows, float* norms, float* found, int id, int of,
                           Barrier& barrier) {
    const NarrowHead<Rows> head(m, x, rows, norms);
    Screen<NarrowHead<Rows>>(m, s, head, rows, found).run(id, of, barrier);
}
#endif

// Operands that are floats have no such head.
inline bool screens(const Model&, const PlainRows<float>&, int) { return false; }
inline void largest_logits(const Model&, Step&, const PlainRows<float>&, int, float*, float*, int, int, Barrier&) {}

}  // namespace
