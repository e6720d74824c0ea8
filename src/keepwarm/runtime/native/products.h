// Products with packed weights, element by element or pair by pair. The functions that use the sums of a product serve
// every kind of product.
//
// Weights are packed [out / 16][in / n][16][n], with n elements in an operand (operands.h). If operands are floats,
// bfloat16 weights are widened. If operands are pairs, weights are in 12 bits (twelve.h).
#pragma once

#include <algorithm>
#include <utility>

#include "model.h"
#include "operands.h"
#include "twelve.h"

namespace {

constexpr int CACHED = 512 << 10;  // bytes of rows that are used at once: at most half of a common second-level cache

// [rows, width]. Where a product computes the sums of a whole block of rows, some operands of each row lie side by side:
// [rows / BLOCK][width / NEAR][BLOCK][NEAR]. It then reads one stream, and not one for each row. Other rows lie one behind
// the other, and so do all rows where the sums of a block need more registers than there are. Widths are whole vectors.
template <class X>
struct PlainRows {
    using Element = typename Operand<X>::Element;
    static constexpr int BLOCK = SUMS, MANY = Operand<X>::MANY;  // BLOCK: rows whose sums are computed at once
    static constexpr int NEAR = 4;
    static constexpr int TOGETHER = 1;  // an expert's rows begin at a multiple of this
    static constexpr int UNIT = LANES;  // one thread must put so many columns of a row, from a multiple on
    static constexpr int KEPT = MANY == 1 ? WHOLE ? 24 : 12 : WHOLE ? 4 : 3;  // for more rows, weights may be widened or unpacked once
    template <class T> using Weight = std::conditional_t<MANY == 1, T, WeightPanel>;
    template <class T> using HeadWeight = std::conditional_t<MANY == 1, T, HeadPanel>;
    X* p = nullptr;
    int64_t width = 0;  // in operands
    int beside = 0;     // the first rows, of whole blocks
    PlainRows() = default;
    PlainRows(int width, int rows, float* p) : p((X*)p), width(width / MANY), beside(WHOLE ? rows / BLOCK * BLOCK : 0) {}
    PlainRows of(int width, int rows) const { return {width, rows, (float*)p}; }  // others in the same memory
    static int64_t size(int64_t rows, int width) { return rows * width / MANY; }
    void clear(int) const {}
    int64_t row_bytes() const { return width * sizeof(X); }
    int columns() const { return width * MANY; }
    int64_t panel() const { return MANY == 1 ? elements() : 1; }  // from one panel to the next
    int64_t elements() const { return (width * MANY + PAIRED - 1) / PAIRED * PAIRED * LANES; }  // weights of a panel
    X* at(int row) const { return p + (row < beside ? row / BLOCK * BLOCK * width + row % BLOCK * NEAR : row * width); }
    void put(int row, int column, Vec v) const {
        if (row >= beside) return store((Element*)at(row) + column, v);
        X each[LANES / MANY], *to = at(row) + column / MANY * BLOCK;
        store((Element*)each, v);
        for (int i = 0; i < LANES / MANY; i += NEAR) std::memcpy(to + i * BLOCK, each + i, NEAR * sizeof(X));
    }
    // Of one of the last rows: a pair, and a number.
    Vec pair(int row, int64_t column) const { return Operand<X>::splat(at(row) + column / MANY); }
    float number(int row, int64_t column) const { return factor_of((const Element*)at(row) + column); }
    Vec get(int row, int column) const {
        if (row >= beside) return load((const Element*)at(row) + column);
        X each[LANES / MANY], *from = at(row) + column / MANY * BLOCK;
        for (int i = 0; i < LANES / MANY; i += NEAR) std::memcpy(each + i, from + i * BLOCK, NEAR * sizeof(X));
        return load((const Element*)each);
    }
};

// The operands of MB rows, which lie beside each other if BESIDE.
template <int MB, bool BESIDE, class X>
struct Operands {
    static constexpr int NEAR = PlainRows<X>::NEAR;
    const X* const p;
    const int64_t width;
    Operands(const PlainRows<X>& x, int row) : p(x.at(row)), width(x.width) {}
    // Returns operand i + at of row m, where i is a multiple of NEAR and `at` is less.
    INLINE Vec operator()(int64_t i, int at, int m) const {
        return Operand<X>::splat(BESIDE ? p + i * PlainRows<X>::BLOCK + m * NEAR + at : p + m * width + i + at);
    }
};

// Calls `take(operands)` for MB rows.
template <int MB, class X, class Take>
inline void with_operands(const PlainRows<X>& x, int row, Take take) {
    if constexpr (WHOLE && MB == PlainRows<X>::BLOCK)
        if (row < x.beside) return take(Operands<MB, true, X>(x, row));
    take(Operands<MB, false, X>(x, row));
}

// Sets `to` to the sums of MB rows with one panel of 16 columns.
template <int MB, class X, class Of, class W>
inline void panel_sums(const Of& operand, int64_t width, const W* panel, const W* next, int each, Vec* to) {
    const char* const ahead = (const char*)(next ? next : panel);
    Vec sums[MB] = {};
    for (int64_t i = 0; i < width; i++) {
        __builtin_prefetch(ahead + i * each, 0, 2);
        const Vec w = load(panel + i * LANES);
        for (int m = 0; m < MB; m++) sums[m] = Operand<X>::add(operand(i, 0, m), w, sums[m]);
    }
    for (int m = 0; m < MB; m++) to[m] = sums[m];
}

// Gives the sums of MB rows with two panels of 16 columns to `take(row, left 16, right 16)`.
template <int MB, class X, class W, class Take>
inline void plain_product(const PlainRows<X>& x, int& row, const Panels<W>& w, Take take) {
    with_operands<MB>(x, row, [&](auto operand) {
        if constexpr (!WHOLE && MB > 3) {  // there are no registers for the sums of both
            Vec left[MB], right[MB];
            panel_sums<MB, X>(operand, x.width, w.left, w.next_left, w.each, left);
            panel_sums<MB, X>(operand, x.width, w.right, w.next_right, w.each, right);
            for (int m = 0; m < MB; m++) take(row++, left[m], right[m]);
            return;
        }
        const char* const next_left = (const char*)(w.next_left ? w.next_left : w.left);
        const char* const next_right = (const char*)(w.next_right ? w.next_right : w.right);
        Vec sums[MB][2] = {};
        for (int64_t i = 0; i < x.width; i += operand.NEAR)
#pragma GCC unroll 4
            for (int at = 0; at < operand.NEAR; at++) {
                __builtin_prefetch(next_left + (i + at) * w.each, 0, 2), __builtin_prefetch(next_right + (i + at) * w.each, 0, 2);
                const Vec l = load(w.left + (i + at) * LANES), r = load(w.right + (i + at) * LANES);
                for (int m = 0; m < MB; m++) {
                    const Vec a = operand(i, at, m);
                    sums[m][0] = Operand<X>::add(a, l, sums[m][0]);
                    sums[m][1] = Operand<X>::add(a, r, sums[m][1]);
                }
            }
        for (int m = 0; m < MB; m++) take(row++, sums[m][0], sums[m][1]);
    });
}

// Calls `rows(Count<n>{})`, which moves `row` on by n, up to `to`.
template <int BLOCK, class Some>
inline void by_blocks(const int& row, int to, Some rows) {
    while (to - row >= BLOCK) rows(Count<BLOCK>{});
    if constexpr (BLOCK > 8)
        if (to - row >= 8) rows(Count<8>{});
    if (to - row >= 4) rows(Count<4>{});
    switch (to - row) {
        case 3: return rows(Count<3>{});
        case 2: return rows(Count<2>{});
        case 1: return rows(Count<1>{});
    }
}

// Returns how many calls that makes for so many rows.
template <int BLOCK>
inline int blocks_of_rows(int rows) {
    int blocks = 0, row = 0;
    by_blocks<BLOCK>(row, rows, [&](auto count) { row += count, blocks++; });
    return blocks;
}

// Does the same for rows [from, to).
template <class X, class W, class Take>
void product(const PlainRows<X>& x, int from, int to, const Panels<W>& w, Take take) {
    int row = from;
    Panels<W> now = w;
    const W* later = nullptr;
    // With more than one block, the first prefetches the left panel and the second the right one.
    if (to - from > x.BLOCK) later = std::exchange(now.next_right, nullptr);
    auto rows = [&](auto count) {
        plain_product<count>(x, row, now, take);
        now.next_left = nullptr, now.next_right = std::exchange(later, nullptr);
    };
    by_blocks<PlainRows<X>::BLOCK>(row, to, rows);
}

// Reserves the room that this thread needs for products of so many rows. Returns whether it got it.
template <class T, class Rows>
inline bool has_room(const Scratch<Rows>& b, int rows) {
    if constexpr (std::is_same_v<T, bf16> && Rows::KEPT) {  // two panels of the widest product, by its form
        const int64_t most = std::max({b.h.elements(), Rows(b.mix, 0, nullptr).elements(), b.inner.elements(), b.routes.inner.elements()});
        return rows <= Rows::KEPT || thread_room(std::is_same_v<Rows, PlainRows<float>> ? 2 * most : most);
    }
    return true;
}

template <class Take>
void product(const PlainRows<float>& x, int from, int to, const Panels<bf16>& w, Take take) {
    if (to - from <= x.KEPT) return product<float, bf16, Take>(x, from, to, w, take);
    float *const left = thread_room(2 * x.panel()), *const right = left + x.panel();  // widened once for many rows
    for (int64_t i = 0; i < x.panel(); i += LANES) store(left + i, load(w.left + i)), store(right + i, load(w.right + i));
    const Panels<float> whole{left, right, (const float*)w.next_left, (const float*)w.next_right, w.each};
    product<float, float, Take>(x, from, to, whole, take);
}

#if defined(HAS_PAIRS)
// Gives the sums of MB rows, as `plain_product` does, and unpacks the panels meanwhile.
template <int MB, class Panel, class Take>
inline void unpacked_product(const PlainRows<Pair>& x, int& row, PanelReader<Panel>& left, PanelReader<Panel>& right,
                             const Panels<Pair>& w, Take take) {
    static_assert(PlainRows<Pair>::NEAR * 2 == PAIRED, "a group is unpacked for operands that are near each other");
    const char* const next_left = w.next_left ? (const char*)w.next_left : (const char*)left.from;
    const char* const next_right = w.next_right ? (const char*)w.next_right : (const char*)right.from;
    with_operands<MB>(x, row, [&](auto operand) {
        Vec sums[MB][2] = {};
        for (int64_t i = 0; i < x.width; i += operand.NEAR) {
            const Pair *l = (const Pair*)left.take(1), *r = (const Pair*)right.take(1);
#pragma GCC unroll 4
            for (int at = 0; at < operand.NEAR; at++) {
                __builtin_prefetch(next_left + (i + at) * w.each, 0, 2), __builtin_prefetch(next_right + (i + at) * w.each, 0, 2);
                const Vec one = load(l + at * LANES), two = load(r + at * LANES);
                for (int m = 0; m < MB; m++) {
                    const Vec a = operand(i, at, m);
                    sums[m][0] = Operand<Pair>::add(a, one, sums[m][0]);
                    sums[m][1] = Operand<Pair>::add(a, two, sums[m][1]);
                }
            }
        }
        for (int m = 0; m < MB; m++) take(row++, sums[m][0], sums[m][1]);
    });
}

// The first block of rows unpacks the panels, unless it has no registers for the sums of both. Others find them in this
// thread's room.
template <class Panel, class Take>
void product(const PlainRows<Pair>& x, int from, int to, const Panels<Panel>& w, Take take) {
    w.ask_for_places();
    alignas(64) bf16 passing[2 * GROUP];
    const bool keeps = to - from > x.KEPT && (!WHOLE || blocks_of_rows<PlainRows<Pair>::BLOCK>(to - from) > 1);
    const int64_t places = keeps ? x.elements() : GROUP;
    bf16 *const room = keeps ? (bf16*)thread_room(places) : passing, *const second = room + places;
    PanelReader<Panel> left(*w.left, room, places), right(*w.right, second, places);
    Panels<Pair> whole{(const Pair*)(w.left->others ? room : (const bf16*)w.left->at),
                       (const Pair*)(w.right->others ? second : (const bf16*)w.right->at)};
    if (w.next_left) whole.next_left = (const Pair*)w.next_left->at, whole.each = vector_bytes(*w.next_left);
    if (w.next_right) whole.next_right = (const Pair*)w.next_right->at;
    left.ask_for_rest(w.next_left), right.ask_for_rest(w.next_right);
    const Pair* later = nullptr;
    if (keeps) later = std::exchange(whole.next_right, nullptr);  // as above
    int row = from;
    if (keeps && !WHOLE) left.take(x.elements() / GROUP), right.take(x.elements() / GROUP);
    by_blocks<PlainRows<Pair>::BLOCK>(row, to, [&](auto count) {
        if (row == from && (WHOLE || !keeps)) unpacked_product<count>(x, row, left, right, whole, take);
        else plain_product<count>(x, row, whole, take);
        whole.next_left = nullptr, whole.next_right = std::exchange(later, nullptr);
    });
}
#endif

// Returns how many rows to use at once, so that they stay in the cache while every panel reads them again.
template <class Rows>
inline int rows_at_once(const Rows& x) {
    const int rows = CACHED / x.row_bytes() / Rows::BLOCK * Rows::BLOCK;
    return rows ? rows : Rows::BLOCK;
}

template <class Weight, bool SCALED, class Rows>
void linear_by(const Rows& x, int m, const void* weight, int n, float* y, int id, int of, const float* bias, float factor,
               bool add, Turn* turn) {
    const int step = rows_at_once(x);
    Assigned mine(n, (m + step - 1) / step, id, of, turn);
    for (int block, c; mine.next(block, c);) {
        const int from = block * step;
        const Weight *left = (const Weight*)weight + c / LANES * x.panel(), *right = c + LANES < n ? left + x.panel() : left;
        const Panels<Weight> panels{left, right, left + 2 * x.panel(), right + 2 * x.panel()};
        const int columns = n - c;
        product(x, from, from + step < m ? from + step : m, panels, [&](int row, Vec first, Vec second) {
            float* at = y + (int64_t)row * n + c;
            put_sums<SCALED>(first, at, bias ? bias + c : nullptr, factor, add, columns);
            if (columns > LANES)
                put_sums<SCALED>(second, at + LANES, bias ? bias + c + LANES : nullptr, factor, add, columns - LANES);
        });
    }
}

// Computes y[m, n] (+)= (sum_k x[m, k] w[n, k] + bias[n]) factor, for the columns of thread `id` of `of` threads; with
// `turn`, for columns that it takes in turn. Barriers must be before and behind such a product. Most models have no
// factor. A test for it within the loops would cost them two hundredths of a step.
template <class Weight, class Rows>
void linear_of(const Rows& x, int m, const void* weight, int n, float* y, int id, int of, const float* bias, float factor, bool add,
               Turn* turn = nullptr) {
    if (factor == 1) linear_by<Weight, false>(x, m, weight, n, y, id, of, bias, factor, add, turn);
    else linear_by<Weight, true>(x, m, weight, n, y, id, of, bias, factor, add, turn);
}

template <class T, class Rows>
void linear(const Rows& x, int m, const void* weight, int n, float* y, int id, int of, const float* bias = nullptr,
            float factor = 1, bool add = false, Turn* turn = nullptr) {
    linear_of<typename Rows::template Weight<T>>(x, m, weight, n, y, id, of, bias, factor, add, turn);
}

template <int KIND>
inline Vec activated(Vec x) {
    if constexpr (KIND == SILU) return silu(x);
    if constexpr (KIND == GELU_TANH) return gelu_tanh(x);
    if constexpr (KIND == GELU) return gelu(x);
    const Vec positive = max(x, Vec{});
    return KIND == RELU ? positive : positive * positive;
}

inline Vec biased(Vec x, const float* bias, int at) { return bias ? x + load(bias + at) : x; }

// Returns act(gate) up. gpt-oss bounds both, and adds one to `up`.
template <int KIND>
inline Vec gated_value(const Model& m, Vec gate, Vec up) {
    if constexpr (KIND == CLAMPED) {
        const Vec limit = splat(m.limit), least = splat(-m.limit);
        gate = pick(gate > limit, limit, gate);
        up = pick(up > limit, limit, max(up, least));
        return (up + splat(1.f)) * gate * (splat(1.f) / (splat(1.f) + exp2v(gate * splat(m.alpha * -1.44269504f))));
    } else {
        return activated<KIND>(gate) * up;
    }
}

// Computes inner = act(x gate + bias) * (x up + bias), for rows [from, to) and the 16 columns of one panel, from c on.
template <int KIND, bool BIASED, class Rows, class Weight>
inline void gate_panel(const Model& m, const Rows& x, const Rows& inner, int from, int to, int c,
                       const Panels<Weight>& panels, const float* gate_bias, const float* up_bias) {
    product(x, from, to, panels, [&](int row, Vec first, Vec second) {
        if constexpr (BIASED) first = biased(first, gate_bias, c), second = biased(second, up_bias, c);
        inner.put(row, c, gated_value<KIND>(m, first, second));
    });
}

// Does that for all rows, and the columns of thread `id` of `of` threads or of its turn.
template <class T, int KIND, bool BIASED, class Rows>
void gated(const Model& m, const Mlp& w, const Rows& x, const Rows& inner, int rows, int id, int of, Turn* turn) {
    using Weight = typename Rows::template Weight<T>;
    const int64_t panel = x.panel();
    const int step = rows_at_once(x);
    Assigned mine(w.inner, (rows + step - 1) / step, id, of, turn);
    for (int block, pair; mine.next(block, pair);)
        for (int c = pair; c < pair + PAIR && c < w.inner; c += LANES) {
            const Weight *gate = (const Weight*)w.gate + c / LANES * panel, *up = (const Weight*)w.up + c / LANES * panel;
            const Panels<Weight> panels{gate, up, gate + panel, up + panel};
            const int from = block * step;
            gate_panel<KIND, BIASED>(m, x, inner, from, std::min(from + step, rows), c, panels, w.gate_bias, w.up_bias);
        }
}

// Does the same without a gate: inner = act(x up + bias).
template <class T, int KIND, class Rows>
void plain(const Mlp& w, const Rows& x, const Rows& inner, int rows, int id, int of, Turn* turn) {
    using Weight = typename Rows::template Weight<T>;
    const int64_t panel = x.panel();
    const int step = rows_at_once(x);
    Assigned mine(w.inner, (rows + step - 1) / step, id, of, turn);
    for (int block, c; mine.next(block, c);) {
        const int from = block * step;
        const bool both = c + LANES < w.inner;
        const Weight *left = (const Weight*)w.up + c / LANES * panel, *right = both ? left + panel : left;
        const int last = from + step < rows ? from + step : rows;
        product(x, from, last, Panels<Weight>{left, right, left + 2 * panel, right + 2 * panel}, [&](int row, Vec first, Vec second) {
            inner.put(row, c, activated<KIND>(biased(first, w.up_bias, c)));
            if (both) inner.put(row, c + LANES, activated<KIND>(biased(second, w.up_bias, c + LANES)));
        });
    }
}

// Gives the activation to `take` as a constant. If it were chosen within the loops, the sums would lose their registers:
// steps of 24 rows took 1.4 times as long.
template <class Take>
inline void with_activation(const Model& m, Take take) {
    switch (m.activation) {
        case SILU: return take(Count<SILU>{});
        case GELU_TANH: return take(Count<GELU_TANH>{});
        case GELU: return take(Count<GELU>{});
        case RELU: return take(Count<RELU>{});
        case CLAMPED: return take(Count<CLAMPED>{});
        default: return take(Count<RELU_SQUARED>{});
    }
}

// Computes an MLP up to its inner values, for the columns of thread `id` of `of` threads or of its turn, as `linear` does.
template <class T, class Rows>
void widen(const Model& m, const Mlp& w, const Rows& x, const Rows& inner, int rows, int id, int of, Turn* turn = nullptr) {
    with_activation(m, [&](auto kind) {
        if (!w.gate) return plain<T, kind>(w, x, inner, rows, id, of, turn);
        if (w.gate_bias || w.up_bias) return gated<T, kind, true>(m, w, x, inner, rows, id, of, turn);
        gated<T, kind, false>(m, w, x, inner, rows, id, of, turn);
    });
}

}  // namespace
