// LoRA adapters (arXiv:2106.09685): y = W x + B (s A x), of an adapter of its own for each row, beside weights that all
// rows share. This is a library of its own (`ADAPTERS`), so that rows without an adapter run the code that they always had.
//
// A row's bits depend on the row and on its adapter alone: A x is summed in parts of fixed columns, which are added in
// order; B's columns are summed rank by rank; each product with a weight is the one of `product`. A and B are float32.
#pragma once

#include "attention.h"
#include "products.h"
#include "tiles.h"
#if defined(QUANTIZED)
#include "quantized.h"
#endif

extern "C" {

struct Narrowing {        // A, of all the weights that read one operand, one under the other
    const float* weight;  // [ranks, width]; null: none of them is adapted
    const float* scale;   // [ranks]
    int64_t ranks;        // a multiple of 4, filled up with zeros
};

struct Widening {         // B of one weight, or of 16 of its outputs
    const float* weight;  // [out / 16][rank][16]; null: it is not adapted
    int32_t first, rank;  // which of the operand's ranks are its own
};

struct AdapterLayer {
    Narrowing first, o, mlp, down;
    const Widening *reads, *gates;  // [outputs / 16]: of the layer's first product, and of attention's gate; null: neither is adapted
    Widening out, gate, up, last;
};

struct Adapters {
    const AdapterLayer* const* adapter;  // [adapters], each [layers]
    const int32_t* of;                   // [rows]: a row's adapter
    float* sums;                         // [parts, rows, ranks]
    float* narrow;                       // [rows, ranks]: s A x
    int64_t ranks;                       // the most of any adapter's operand
};

}  // extern "C"

namespace {

constexpr int SUMMED = 1024;  // columns of A x that are summed apart
constexpr int RANKS = WHOLE ? 4 : 2, NARROWED = WHOLE ? 4 : 2;  // ranks and rows whose sums are taken at once

// Sums of N rows' columns [from, to) with all ranks of A, to `sums`, [rows, ranks].
template <int N, class Rows>
void narrow_rows(const Narrowing& a, const Rows& x, int row, int width, int from, int to, float* sums, int64_t ranks) {
    for (int64_t rank = 0; rank < a.ranks; rank += RANKS) {
        Vec sum_of[N][RANKS] = {};
        const float* weight = a.weight + rank * width;
        for (int c = from; c < to; c += LANES) {
            Vec value[N];
            for (int i = 0; i < N; i++) value[i] = x.get(row + i, c);
            for (int j = 0; j < RANKS; j++) {
                const Vec w = load(weight + (int64_t)j * width + c);
                for (int i = 0; i < N; i++) sum_of[i][j] = fma(value[i], w, sum_of[i][j]);
            }
        }
        for (int i = 0; i < N; i++)
            for (int j = 0; j < RANKS; j++) sums[(row + i) * ranks + rank + j] = sum(sum_of[i][j]);
    }
}

// B (s A x) of 16 columns from `column` on; `narrow` is the row's s A x.
inline Vec widened_by(const Widening& b, const float* narrow, int column) {
    Vec value{};
    const float* weight = b.weight + (int64_t)column * b.rank;
    for (int j = 0; j < b.rank; j++, weight += LANES) value = fma(splat(narrow[b.first + j]), load(weight), value);
    return value;
}

// What the adapters of a step add, in one thread of it.
template <class T, class Rows>
class Adapted {
    template <class W> using Panel = Panels<typename Rows::template Weight<W>>;
    const Model& m;
    const Adapters& a;
    Barrier& barrier;
    const int id, of;
    int layer = 0;
    const int32_t* row_of = nullptr;  // which rows of the step the operands' rows are; null: the first is the first

    const AdapterLayer& layer_of(int row) const { return a.adapter[a.of[row_of ? row_of[row] : row]][layer]; }
    const float* narrow(int row) const { return a.narrow + row * a.ranks; }
    Vec more(const Widening& b, int row, int column) const { return b.weight ? widened_by(b, narrow(row), column) : Vec{}; }
    Vec more_by_panel(const Widening* b, int row, int column) const { return b ? more(b[column / LANES], row, 0) : Vec{}; }

    // s A x of all rows. All threads call it once the operand is whole, and find it whole behind it.
    void narrow_all(const Rows& x, int rows, int width, Narrowing AdapterLayer::*of_operand, float factor) {
        const int parts = (width + SUMMED - 1) / SUMMED, blocks = (rows + NARROWED - 1) / NARROWED;
        const int64_t tasks = (int64_t)parts * blocks;
        for (int64_t task = tasks * id / of; task < tasks * (id + 1) / of; task++) {
            const int part = task / blocks, from = part * SUMMED, to = std::min(width, from + SUMMED);
            float* const sums = a.sums + (int64_t)part * rows * a.ranks;
            for (int row = task % blocks * NARROWED, end = std::min(rows, row + NARROWED); row < end;) {
                const AdapterLayer* const w = &layer_of(row);
                const Narrowing& by = w->*of_operand;
                int same = 1;
                while (row + same < end && &layer_of(row + same) == w) same++;
                if (!by.weight) { row += same; continue; }
                switch (same) {
                    case 4: narrow_rows<4>(by, x, row, width, from, to, sums, a.ranks); break;
                    case 3: narrow_rows<3>(by, x, row, width, from, to, sums, a.ranks); break;
                    case 2: narrow_rows<2>(by, x, row, width, from, to, sums, a.ranks); break;
                    default: narrow_rows<1>(by, x, row, width, from, to, sums, a.ranks);
                }
                row += same;
            }
        }
        barrier.wait(of);
        for (int row = id; row < rows; row += of) {
            const Narrowing& by = layer_of(row).*of_operand;
            for (int64_t rank = 0; by.weight && rank < by.ranks; rank++) {
                float value = 0;
                for (int part = 0; part < parts; part++) value += a.sums[((int64_t)part * rows + row) * a.ranks + rank];
                a.narrow[row * a.ranks + rank] = value * (by.scale[rank] * factor);
            }
        }
        barrier.wait(of);
    }

    // Gives the sums of this thread's columns to `take(row, column, columns, 16 values)`.
    template <class Take>
    void multiply(const Rows& x, int rows, const void* weight, int n, Take take) const {
        using Weight = typename Rows::template Weight<T>;
        const Share share(n, id, of);
        for (int from = 0, step = rows_at_once(x); from < rows; from += step)
            for (int c = share.from; c < share.to; c += 2 * LANES) {
                const bool both = c + LANES < n;
                const Weight *left = (const Weight*)weight + c / LANES * x.panel(), *right = both ? left + x.panel() : left;
                const Panel<T> panels{left, right, left + 2 * x.panel(), right + 2 * x.panel()};
                product(x, from, std::min(from + step, rows), panels, [&](int row, Vec first, Vec second) {
                    take(row, c, first);
                    if (both) take(row, c + LANES, second);
                });
            }
    }

    static Vec biased_by(Vec value, const float* bias, int column) { return bias ? value + load(bias + column) : value; }

    void put_by_panel(const Rows& x, int rows, const void* weight, int n, const Widening* AdapterLayer::*by, float* y,
                      const float* bias) const {
        multiply(x, rows, weight, n, [&](int row, int c, Vec value) {
            value += more_by_panel(layer_of(row).*by, row, c);
            put_sums<false>(value, y + (int64_t)row * n + c, bias ? bias + c : nullptr, 1, false, n - c);
        });
    }

    template <int KIND>
    void gated(const Mlp& w, const Rows& x, const Rows& inner, int rows) const {
        using Weight = typename Rows::template Weight<T>;
        const Share share(w.inner, id, of);
        const int64_t panel = x.panel();
        for (int from = 0, step = rows_at_once(x); from < rows; from += step)
            for (int c = share.from; c < share.to; c += LANES) {
                const Weight *gate = (const Weight*)w.gate + c / LANES * panel, *up = (const Weight*)w.up + c / LANES * panel;
                product(x, from, std::min(from + step, rows), Panel<T>{gate, up, gate + panel, up + panel}, [&](int row, Vec first, Vec second) {
                    const AdapterLayer& by = layer_of(row);
                    first = biased_by(first + more(by.gate, row, c), w.gate_bias, c);
                    second = biased_by(second + more(by.up, row, c), w.up_bias, c);
                    inner.put(row, c, gated_value<KIND>(m, first, second));
                });
            }
    }

public:
    Adapted(const Model& m, const Step& s, int id, int of, Barrier& barrier)
        : m(m), a(*s.adapters), barrier(barrier), id(id), of(of) {}

    // From now on rows are those of a layer: some of the step's, or all with null.
    void enter(int number, const int32_t* rows) { layer = number, row_of = rows; }
    void go_on(const Onward& on) { if (on.row) row_of = on.row; }

    // The layer's first product of normed rows, of width n.
    void read(const Rows& x, int rows, int n, float* y) {
        const Layer& w = m.layer[layer];
        narrow_all(x, rows, m.hidden, &AdapterLayer::first, 1);
        put_by_panel(x, rows, w.qkv, n, &AdapterLayer::reads, y, w.qkv_bias);
    }

    // Attention's gate, of the same rows. `read` comes before.
    void gate(const Rows& x, int rows, float* y) {
        const Layer& w = m.layer[layer];
        put_by_panel(x, rows, w.gate, m.heads * w.dim, &AdapterLayer::gates, y, w.gate_bias);
    }

    // What attention or, by `weight`, the MLP gives: y (+)= (W x + B (s A x) + bias) factor.
    void back(const Rows& x, int rows, const void* weight, float* y, const float* bias, float factor, bool add) {
        const bool is_o = weight == m.layer[layer].o;
        const Widening AdapterLayer::*by = is_o ? &AdapterLayer::out : &AdapterLayer::last;
        narrow_all(x, rows, is_o ? mixes(m, m.layer[layer]) : m.layer[layer].mlp.inner, is_o ? &AdapterLayer::o : &AdapterLayer::down, 1);
        multiply(x, rows, weight, m.hidden, [&](int row, int c, Vec value) {
            float* const at = y + (int64_t)row * m.hidden + c;
            put_sums<true>(value + more(layer_of(row).*by, row, c), at, bias ? bias + c : nullptr, factor, add, LANES);
        });
    }

    // The first part of an MLP.
    void widen(const Mlp& w, const Rows& x, const Rows& inner, int rows) {
        narrow_all(x, rows, m.hidden, &AdapterLayer::mlp, 1);
        with_activation(m, [&](auto kind) {
            if (w.gate) return gated<kind>(w, x, inner, rows);
            multiply(x, rows, w.up, w.inner, [&](int row, int c, Vec value) {
                value = biased_by(value + more(layer_of(row).up, row, c), w.up_bias, c);
                inner.put(row, c, activated<kind>(value));
            });
        });
    }
};

}  // namespace
