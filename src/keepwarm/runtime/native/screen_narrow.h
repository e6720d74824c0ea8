// The two parts of a head in bfloat16: the upper eight of the twelve bits of its weights, and the others (twelve.h).
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
    const WeightPanel* const panels;
    const float* const errors;

    static WeightPanel first_part(const WeightPanel& panel) {
        WeightPanel first = panel;
        first.rest = nullptr;
        return first;
    }

public:
    static constexpr float near = 0x1.04p-7f;  // logits are rounded to bfloat16

    NarrowHead(const Model& m, const Rows& x, int rows, float* norms)
        : x(x), rows(rows), norms(norms), panels((const WeightPanel*)m.head), errors(m.errors) {}

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
        const WeightPanel* const at = panels + column / LANES;
        const bool both = column + LANES < to;
        const WeightPanel left = first_part(at[0]), right = both ? first_part(at[1]) : left;
        const auto give = [&](int row, int c, Vec sums) { take(row, c, sums, fma(load(errors + c), splat(norms[row]), sums)); };
        product(x, 0, rows, Panels<WeightPanel>{&left, &right, at + 2, at + 3}, [&](int row, Vec first, Vec second) {
            give(row, column, first);
            if (both) give(row, column + LANES, second);
        });
        return column + 2 * LANES;
    }

    // All rows before this one are multiplied, too, since a product of tiles begins with a tile.
    Vec whole_sums(int row, int column) const {
        const WeightPanel* const panel = panels + column / LANES;
        Vec sums;
        product(x, row / Rows::TOGETHER * Rows::TOGETHER, row + 1, Panels<WeightPanel>{panel, panel}, [&](int of, Vec first, Vec) {
            if (of == row) sums = first;
        });
        return sums;
    }

    void ask_for(int column) const {
        const WeightPanel& panel = panels[column / LANES];
        const int64_t groups = x.elements() / GROUP, front = groups * group_bytes(true), rest = groups * REST_BYTES;
        for (int64_t at = 0; at < front; at += 64) __builtin_prefetch(panel.at + at);
        for (int64_t at = 0; at < rest; at += 64) __builtin_prefetch(panel.rest + at);
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
