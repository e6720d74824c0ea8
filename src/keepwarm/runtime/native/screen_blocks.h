// The two parts of a head in Q8_0 or Q6_K: the upper 4 bits of its codes, and the others. With the middle of what the
// others may be in their place, a column's product is wrong by at most that middle times |x| and the block's scale.
#pragma once

#include "quantized.h"
#include "screen.h"

namespace {

// What the sums from upper bits need of a row's block. Where its halves share a scale, the first has all.
struct Known {
    float less[2];   // the sum of x, times the middle and what is subtracted from a code
    float wrong[2];  // the sum of |x|, times the middle and the scale
};

template <int KIND>
struct Parts {
    static constexpr Shape SHAPE = shape_of(KIND);
    static constexpr float STEP = 1 << (SHAPE.bits - 4), MIDDLE = (STEP - 1) / 2;
};

inline Vec size_of(Vec x) { return as_floats(as_ints(x) & 0x7fffffff); }

// Estimates the sums of MB rows with a panel's 16 columns, and bounds their errors, but for those of rounding.
template <int KIND, int MB>
__attribute__((noinline)) void upper_sums(const Rounded* x, const Known* known, int64_t blocks, const QuantPanel& panel,
                                          Vec* to, Vec* wrong) {
    const Vec step = splat(Parts<KIND>::STEP);
    Format<KIND, UPPER> f(panel);
    Vec sums[MB] = {}, errors[MB] = {};
    for (int64_t b = 0; b < blocks; b++, x += QuantRows::BLOCK) {
        f.next(b);
        const Vec size = size_of(f.scale), other_size = size_of(f.other);
#pragma GCC unroll 4
        for (int m = 0; m < MB; m++) {
            const Known& k = known[m * blocks + b];
            Sums left[] = {sums_from(0)}, right[] = {sums_from(0)};
            add_products<4, 4>(left, f.code, x[m].x, 0), add_products<4, 4>(right, f.code + 4, x[m].x + LANES, 0);
            Vec value;  // within a half it is exact
            if constexpr (f.SPLIT) {
                value = fma(floats(*left), step, splat(k.less[0])) * f.scale;
                value = fma(fma(floats(*right), step, splat(k.less[1])), f.other, value);
                errors[m] = fma(other_size, splat(k.wrong[1]), errors[m]);
            } else {
                value = fma(floats(both(*left, *right)), step, splat(k.less[0])) * f.scale;
            }
            sums[m] = fma(value, splat(x[m].scale), sums[m]);
            errors[m] = fma(size, splat(k.wrong[0]), errors[m]);
        }
    }
    for (int m = 0; m < MB; m++) to[m] = sums[m], wrong[m] = errors[m];
}

template <int KIND>
inline void upper_sums(const QuantRows& x, int rows, const Known* known, const QuantPanel& panel, Vec* to, Vec* wrong) {
    auto some = [&](auto count) { upper_sums<KIND, count>(x.row(0), known, x.blocks, panel, to, wrong); };
    if (rows == 4) return some(Count<4>{});
    if (rows == 3) return some(Count<3>{});
    return rows == 2 ? some(Count<2>{}) : some(Count<1>{});
}

template <int KIND>
class BlockHead {
    const QuantRows& x;
    const int rows;
    Known* const known;  // [rows, blocks]
    const QuantPanel* const panels;
    const Vec slack;

public:
    static constexpr float near = 0x1p-20f;  // what the factor's rounding makes equal

    // Both ways to add up round each of `blocks` sums of numbers that are at most 22 times as large as the error's.
    BlockHead(const Model& m, const QuantRows& x, int rows, float* known)
        : x(x), rows(rows), known((Known*)known), panels((const QuantPanel*)m.head), slack(splat(1 + 1e-5f * (x.blocks + 4))) {}

    void know(int row) const {
        using P = Parts<KIND>;
        const Rounded* from = x.row(row);
        Known* const to = known + row * x.blocks;
        for (int64_t b = 0; b < x.blocks; b++, from += QuantRows::BLOCK) {
            int32_t total[2] = {}, size[2] = {};
            for (int c = 0; c < COLUMNS; c++) {
                const int half = P::SHAPE.split() && c >= LANES;
                total[half] += from->x[c], size[half] += from->x[c] < 0 ? -from->x[c] : from->x[c];
            }
            for (int h = 0; h < 2; h++)
                to[b].less[h] = (P::MIDDLE - P::SHAPE.less) * total[h], to[b].wrong[h] = P::MIDDLE * from->scale * size[h];
        }
    }

    template <class Take>
    int estimate(int column, int, Take take) const {
        Vec sums[SCREENED], wrong[SCREENED];
        upper_sums<KIND>(x, rows, known, panels[column / LANES], sums, wrong);
        const Vec large = splat(1e30f), unbounded = splat(std::numeric_limits<float>::infinity());  // sums may overflow on the way
        for (int row = 0; row < rows; row++)
            take(row, column, sums[row], pick(wrong[row] > large, unbounded, fma(wrong[row], slack, sums[row])));
        return column + LANES;
    }

    void whole_sums(int row, int column, int other, Vec* to) const {
        panel_sums<KIND, 1, ALONE>(x.row(row), x.blocks, panels[column / LANES], to);
        if (other != column) panel_sums<KIND, 1, ALONE>(x.row(row), x.blocks, panels[other / LANES], to + 1);
    }

    void ask_for(int column) const {
        const QuantPanel& panel = panels[column / LANES];
        const int64_t columns = x.blocks * COLUMNS, apart = apart_bytes(KIND, columns), front = panel_bytes(KIND, columns) - apart;
        for (int64_t at = 0; at < front; at += 64) __builtin_prefetch(panel.at + at);
        for (int64_t at = 0; at < apart; at += 64) __builtin_prefetch(panel.at + (int64_t)panel.apart * 64 + at);
    }
};

inline bool screens(const Model& m, const QuantRows&, int rows) {
    return in_order(m, rows) && shape_of(((const QuantPanel*)m.head)->kind).apart;
}

inline void largest_logits(const Model& m, Step& s, const QuantRows& x, int rows, float* known, float* found, int id, int of,
                           Barrier& barrier) {
    const auto run = [&](auto kind) {
        const BlockHead<kind> head(m, x, rows, known);
        Screen<BlockHead<kind>>(m, s, head, rows, found).run(id, of, barrier);
    };
    if (((const QuantPanel*)m.head)->kind == Q8_PARTS) run(Count<Q8_PARTS>{});
    else run(Count<Q6_PARTS>{});
}

}  // namespace
