// The largest logit of a row, where nobody asks for the others: most of the head's weights are then read in part.
//
// A head in Q8_0 or Q6_K is packed with the upper 4 bits of its codes apart from the others. They tell a logit up to an
// error: with the middle of what the others may be in their place, a column's product is wrong by at most that middle
// times |x| and the block's scale. So first an upper bound of each logit is found from the upper bits, and a lower bound of
// the largest one: the exact logits beside the best estimate. Only panels that may hold a logit as large are then
// multiplied whole, as without all this; the others get minus infinity. Which panels these are depends on the number of
// threads, but the largest logit and its place do not.
#pragma once

#include <cmath>
#include <limits>

#include "barrier.h"
#include "products.h"
#include "quantized.h"

namespace {

constexpr int SCREENED = 4;  // at most so many rows: together, more of them have most panels multiplied whole

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

template <int KIND>
void know(const Rounded* x, int64_t blocks, Known* to) {
    using P = Parts<KIND>;
    for (int64_t b = 0; b < blocks; b++, x += QuantRows::BLOCK) {
        int32_t total[2] = {}, size[2] = {};
        for (int c = 0; c < COLUMNS; c++) {
            const int half = P::SHAPE.split() && c >= LANES;
            total[half] += x->x[c], size[half] += x->x[c] < 0 ? -x->x[c] : x->x[c];
        }
        for (int h = 0; h < 2; h++)
            to[b].less[h] = (P::MIDDLE - P::SHAPE.less) * total[h], to[b].wrong[h] = P::MIDDLE * x->scale * size[h];
    }
}

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
            const Sums left = add_half<4>(sums_from(0), f.code, x[m].x), right = add_half<4>(sums_from(0), f.code + 4, x[m].x + LANES);
            Vec value;  // within a half it is exact
            if constexpr (f.SPLIT) {
                value = fma(floats(left), step, splat(k.less[0])) * f.scale;
                value = fma(fma(floats(right), step, splat(k.less[1])), f.other, value);
                errors[m] = fma(other_size, splat(k.wrong[1]), errors[m]);
            } else {
                value = fma(floats(both(left, right)), step, splat(k.less[0])) * f.scale;
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

// Whether this head can be screened for so many rows. A cap's rounding is not known to keep the order.
inline bool screens(const Model& m, int rows) {
    return rows && rows <= SCREENED && shape_of(((const QuantPanel*)m.head)->kind).apart && m.logit > 0 && !m.logit_cap;
}

// Finds the logits of rows that may be the largest, for the columns of thread `id` of `of` threads. `known` has room for
// [rows, blocks], and `found` for [threads, rows].
template <int KIND>
class Screen {
public:
    Screen(const Model& m, Step& s, const QuantRows& x, int rows, Known* known, float* found)
        : m(m), s(s), x(x), rows(rows), known(known), found(found), head((const QuantPanel*)m.head) {}

    void run(int id, int of, Barrier& barrier) {
        for (int row = id; row < rows; row += of) know<KIND>(x.row(row), x.blocks, known + row * x.blocks);
        barrier.wait(of);
        const Share share(m.vocab, id, of);
        bound(share, found + id * rows);
        barrier.wait(of);
        int whole = 0;
        for (int row = 0; row < rows; row++) {
            float least = found[row];
            for (int i = 1; i < of; i++) least = std::max(least, found[i * rows + row]);
            // The factor's rounding may make two logits equal, and numbers below the normal ones are rounded more.
            whole += choose(share, row, least - std::abs(least) * 0x1p-20f - 1e-30f);
        }
        __atomic_fetch_add(&s.whole, whole, __ATOMIC_RELAXED);
    }

private:
    const Model& m;
    Step& s;
    const QuantRows& x;
    int rows;
    Known* known;
    float* found;
    const QuantPanel* head;

    float* logits(int row, int column) const { return s.logits + (int64_t)row * m.vocab + column; }
    Vec whole_sums(int row, int column) const {
        Vec sums;
        panel_sums<KIND, 1, ALONE>(x.row(row), x.blocks, head[column / LANES], &sums);
        return sums;
    }

    // Writes upper bounds of the logits, without the factor, and to `least` a lower bound of each row's largest one.
    void bound(const Share& share, float* least) const {
        constexpr float NONE = -std::numeric_limits<float>::infinity();
        // Both ways to add up round each of `blocks` sums of numbers that are at most 22 times as large as the error's.
        const Vec slack = splat(1 + 1e-5f * (x.blocks + 4));
        Vec best[SCREENED], place[SCREENED] = {}, sums[SCREENED], wrong[SCREENED];
        for (Vec& each : best) each = splat(NONE);
        for (int c = share.from; c < share.to; c += LANES) {
            upper_sums<KIND>(x, rows, known, head[c / LANES], sums, wrong);
            for (int row = 0; row < rows; row++) {
                const Vec above = fma(wrong[row], slack, sums[row]);
                if (const int columns = share.to - c; columns < LANES) {  // the last panel's other columns are no tokens
                    float sum[LANES], most[LANES];
                    store(sum, sums[row]), store(most, above);
                    for (int o = columns; o < LANES; o++) sum[o] = NONE;
                    std::memcpy(logits(row, c), most, columns * sizeof(float));
                    sums[row] = load(sum);
                } else {
                    store(logits(row, c), above);
                }
                const auto more = sums[row] > best[row];
                best[row] = pick(more, sums[row], best[row]), place[row] = pick(more, splat(c / LANES), place[row]);
            }
        }
        for (int row = 0; row < rows; row++) least[row] = share.from < share.to ? largest_near(row, best[row], place[row]) : NONE;
    }

    // Returns the largest of the logits of the panel with the best estimate.
    float largest_near(int row, Vec best, Vec place) const {
        float each[LANES], panel[LANES];
        store(each, best), store(panel, place);
        const int column = (int)panel[std::max_element(each, each + LANES) - each] * LANES;
        store(each, whole_sums(row, column));
        return *std::max_element(each, each + std::min(LANES, m.vocab - column));
    }

    void ask_for_panel(int column) const {
        const QuantPanel& panel = head[column / LANES];
        const int64_t apart = apart_bytes(KIND, m.hidden), front = panel_bytes(KIND, m.hidden) - apart;
        for (int64_t at = 0; at < front; at += 64) __builtin_prefetch(panel.at + at);
        for (int64_t at = 0; at < apart; at += 64) __builtin_prefetch(panel.at + (int64_t)panel.apart * 64 + at);
    }

    // Sets the logits of each panel that may hold one of at least `least`. Returns how many such panels there are.
    int choose(const Share& share, int row, float least) const {
        int whole = 0, last = share.to;
        const auto multiply = [&] {  // one panel later, so that memory has time to bring it
            if (last == share.to) return;
            put_sums<true>(whole_sums(row, last), logits(row, last), nullptr, m.logit, false, std::min(LANES, share.to - last));
            whole++;
        };
        for (int c = share.from; c < share.to; c += LANES) {
            float* const at = logits(row, c);
            const int columns = std::min(LANES, share.to - c);
            bool may = false;
            for (int o = 0; o < columns; o++) may |= !(at[o] < least);  // what is no number may be anything
            if (may) ask_for_panel(c), multiply(), last = c;
            else std::fill(at, at + columns, -std::numeric_limits<float>::infinity());
        }
        multiply();
        return whole;
    }
};

inline void largest_logits(const Model& m, Step& s, const QuantRows& x, int rows, void* known, float* found, int id, int of,
                           Barrier& barrier) {
    const auto run = [&](auto kind) { Screen<kind>(m, s, x, rows, (Known*)known, found).run(id, of, barrier); };
    if (((const QuantPanel*)m.head)->kind == Q8_PARTS) run(Count<Q8_PARTS>{});
    else run(Count<Q6_PARTS>{});
}

}  // namespace
