// The lean decoder's forward pass: one call runs every layer for the next tokens of one or of many sequences.
//
// The arithmetic of a row depends on that row and on the keys and values before it. It does not depend on how many rows
// run beside it, on who shares its prefix, or on the number of threads. So a batched answer equals a solo one. This
// holds because each sum below has one fixed order:
//   - a product with a weight adds over the inner dimension, by 1, 2 or 32 elements at a time;
//   - attention walks the positions in units of 64 by online softmax (FlashAttention, arXiv:2205.14135, algorithm 1) and
//     merges parts of 512 by log-sum-exp (Hydragen, arXiv:2402.05099, eq. 5). It counts both from position 0, in order.
//
// Activations are float32. So are the operands of products, unless the processor multiplies bfloat16: then they are
// rounded to it once per product, and multiplied by pairs (products.h, lanes.h) or by the matrix units (tiles.h,
// tile_lanes.h). Keys and values are read in place, page by page, wherever they are stored. Encoded ones are decoded a
// unit at a time, just before their use: see Region and Work in model.h, and Pages in attention.h.

#include <omp.h>
#include <vector>

#include "delta.h"
#include "experts.h"
#include "guarded.h"
#include "lanes.h"
#include "norms.h"
#include "products.h"
#include "tile_lanes.h"
#if defined(QUANTIZED)
#include "screen_blocks.h"
#else
#include "screen_narrow.h"
#endif
#if defined(ADAPTERS)
#include "adapters.h"
#endif

namespace {

// A way to compute a step: the dtype of weights, keys and values, and the code for products and attention.
template <class T, class X = float>
struct Vectors {
    using Element = T;
    using Logit = T;  // logits are rounded to this dtype
    using Rows = PlainRows<X>;
    using Router = T;     // the dtype of routers' weights
    struct Thread {};
    template <int DV> using Lanes = ::Lanes<T, X, DV>;
    static constexpr int DEEP = Operand<X>::MANY;  // so many elements of an inner dimension are packed together
};

#if defined(HAS_TILES)
struct Tiles {
    using Element = bf16;
    using Logit = bf16;
    using Rows = TileRows;
    using Router = bf16;
    using Thread = TileRegisters;
    template <int DV> using Lanes = TileLanes<DV>;
    static constexpr int DEEP = ::DEEP;
};
using Half = Tiles;
#elif defined(HAS_PAIRS)
using Half = Vectors<bf16, Pair>;
#else
using Half = Vectors<bf16>;
#endif

#if defined(QUANTIZED)  // this builds a separate library: it multiplies in 8 bits, and attends as above
template <class How>
struct Quantized : How {
    using Logit = float;
    using Rows = QuantRows;
    using Router = float;
};
using Narrow = Quantized<Half>;
using Full = Quantized<Vectors<float>>;
#else
using Narrow = Half;
using Full = Vectors<float>;
#endif

// Norms a row and gives it to `put(column, 16 values)`. Without a norm the row is given unchanged.
template <class Put>
inline void normed(const Model& m, const float* x, const Norm& norm, int n, Put put) {
    if (!norm.weight)
        for (int i = 0; i < n; i += LANES) put(i, load(x + i));
    else if (m.centred)
        normed<true>(x, norm, n, m.epsilon, put);
    else
        normed<false>(x, norm, n, m.epsilon, put);
}

// Rotates the first dims of one head in place. Most models pair a dim of the first half with one of the second half;
// some pair neighbours.
inline void rotate(const Model& m, float* x, const float* c, const float* s) {
    const int half = m.rotary / 2;
    auto pair = [&](float& first, float& second, int i) {
        const float a = first, b = second;
        first = std::fma(a, c[i], -b * s[i]);
        second = std::fma(b, c[i], a * s[i]);
    };
    if (m.interleaved)
        for (int i = 0; i < half; i++) pair(x[2 * i], x[2 * i + 1], i);
    else  // the compiler turns this loop into vectors only if it stands apart
        for (int i = 0; i < half; i++) pair(x[i], x[i + half], i);
}

// Norms and rotates a row's queries and keys, and writes its key and value to the row's slot.
template <class T>
void place_row(const Model& m, const Step& s, float* queries, const Layer& w, int layer, int row) {
    float* q = queries + (int64_t)row * (m.heads + 2 * m.kv_heads) * m.dim;
    const int64_t at = (int64_t)s.positions[row] * (m.rotary / 2);
    auto norm = [&](float* x, const Norm& by, int n) {
        if (by.weight) normed(m, x, by, n, [&](int i, Vec v) { store(x + i, v); });
    };
    if (m.wide) norm(q, w.q, m.heads * m.dim), norm(q + m.heads * m.dim, w.k, m.kv_heads * m.dim);
    for (int head = 0; head < m.heads + m.kv_heads; head++) {
        float* x = q + head * m.dim;
        if (!m.wide) norm(x, head < m.heads ? w.q : w.k, m.dim);
        if (w.cosine) rotate(m, x, w.cosine + at, w.sine + at);
    }
    if (w.factors)
        for (int i = 0; i < m.heads * m.dim; i += LANES) store(q + i, load(q + i) * splat(w.factors[s.positions[row]]));
    for (int kv = 0; kv < 2; kv++)
        for (int head = 0; head < m.kv_heads; head++) {
            const float* from = q + (m.heads + kv * m.kv_heads + head) * m.dim;
            T* to = address<T>(s, m, s.slots[row], layer, kv, head);
            for (int i = 0; i < m.dim; i += LANES) store(to + i, load(from + i));
        }
}

// Caps the columns of thread `id` of `of` threads, and rounds them to T, to nearest even, as a model rounds its own
// logits. They are still stored as floats.
template <class T>
void finish(float* y, int rows, int n, float cap, int id, int of) {
    const Share share(n, id, of);
    for (int row = 0; row < rows && cap; row++)
        for (int i = share.from; i < share.to; i++) y[(int64_t)row * n + i] = capped(splat(y[(int64_t)row * n + i]), cap)[0];
    if (sizeof(T) == sizeof(float)) return;
    for (int row = 0; row < rows; row++)
        for (int i = share.from; i < share.to; i++) {
            uint32_t bits;
            std::memcpy(&bits, y + (int64_t)row * n + i, sizeof bits);
            const uint32_t near = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
            bits = (bits & 0x7fffffffu) > 0x7f800000u ? bits : near;  // rounding could turn NaN into infinity
            std::memcpy(y + (int64_t)row * n + i, &bits, sizeof bits);
        }
}

// The rows of a step whose logits are asked for. Only these continue after the last layer's keys and values are written.
struct Wanted {
    Step step;  // its works have only those rows
    std::vector<int32_t> members, place;
    std::vector<Work> work;
    Wanted(const Step& s) : step(s), place(s.rows, -1) {
        for (int i = 0; i < s.outputs; i++) place[s.wanted[i]] = i;
        for (int i = 0; i < s.works; i++) {
            Work some = s.work[i];
            some.row = members.size();
            for (int j = 0; j < s.work[i].rows; j++)
                if (const int row = s.members[s.work[i].row + j]; place[row] >= 0) members.push_back(row);
            some.rows = members.size() - some.row;
            if (some.rows) work.push_back(some);
        }
        step.works = work.size(), step.work = work.data(), step.members = members.data();
    }
    Onward onward() const { return {step.outputs, step.wanted, place.data()}; }
};

// Whether logits are asked for fewer rows than all, in rising order.
inline bool fewer(const Step& s) {
    for (int i = 1; i < s.outputs; i++)
        if (s.wanted[i] <= s.wanted[i - 1]) return false;
    return s.outputs < s.rows;
}

template <class How, int DV>
int forward(const Model& m, Step& s) {
    using T = typename How::Element;
    using Rows = typename How::Rows;
    using Lanes = typename How::template Lanes<DV>;
    const Scratch<Rows> b(m, s);
    const int width = (m.heads + 2 * m.kv_heads) * m.dim;
    const bool few = s.last == m.layers && s.outputs && fewer(s);
    const Wanted wanted(few ? s : Step{});
    int next = 0;
    bool enough = true;  // whether every thread got the memory it needs
    Barrier barrier;
#pragma omp parallel num_threads(s.threads)
    {
        const Rounding rounding;
        [[maybe_unused]] const typename How::Thread thread;
        if (!has_room<T>(b, s.rows)) __atomic_store_n(&enough, false, __ATOMIC_RELAXED);
        int stopped = s.last;
        const int id = omp_get_thread_num(), of = omp_get_num_threads();
        auto norm = [&](int row, const Norm& by, const Rows& h, int to) {
            normed(m, b.x + (int64_t)row * m.hidden, by, m.hidden, [&](int i, Vec v) { h.put(to, i, v); });
        };
#if defined(ADAPTERS)
        Adapted<T, Rows> adapted(m, s, id, of, barrier);
#endif
        // Ends a sublayer: where the model norms its result, x += the normed result. Else `linear` has added it already.
        auto settle = [&](int rows, const Norm& after) {
            barrier.wait(of);
            for (int row = id; row < rows && after.weight; row += of) {
                float* const x = b.x + (int64_t)row * m.hidden;
                normed(m, b.y + (int64_t)row * m.hidden, after, m.hidden,
                       [&](int i, Vec v) { store(x + i, fma(v, splat(m.residual), load(x + i))); });
            }
            if (after.weight) barrier.wait(of);
        };
        // x += the result of attention or of the MLP, for the first `rows` rows.
        auto back = [&](const Rows& from, int rows, const void* weight, const float* bias, const Norm& after) {
            float* const y = after.weight ? b.y : b.x;
#if defined(ADAPTERS)
            adapted.back(from, rows, weight, y, bias, after.weight ? 1 : m.residual, !after.weight);
#else
            linear<T>(from, rows, weight, m.hidden, y, id, of, bias, after.weight ? 1 : m.residual, !after.weight);
#endif
            settle(rows, after);
        };
        for (int row = id; row < s.rows && s.first == 0; row += of) {
#if defined(QUANTIZED)
            look_up((const QuantPanel*)m.embedding, s.tokens[row], m.hidden, m.embedded, b.x + (int64_t)row * m.hidden);
#else
            const T* from = (const T*)m.embedding + (int64_t)s.tokens[row] * m.hidden;
            for (int i = 0; i < m.hidden; i += LANES)
                store(b.x + (int64_t)row * m.hidden + i, load(from + i) * splat(m.embedded));
#endif
        }
        // Experts' rows need no clearing: their widths fill whole tiles.
        if (id == 0) b.h.clear(s.rows), b.mixed.clear(s.rows), b.inner.clear(s.rows);
        barrier.wait(of);
        if (!__atomic_load_n(&enough, __ATOMIC_RELAXED)) stopped = s.first;
        for (int layer = s.first; layer < stopped; layer++) {
            const Layer& w = m.layer[layer];
            rows_of(s.rows, id, of, [&](int row) { norm(row, w.before, b.h, row); });
            barrier.wait(of);
            const bool end = layer + 1 == m.layers;
            const Onward on = end && few ? wanted.onward() : Onward{s.rows};
            const Rows h = b.h.of(m.hidden, on.rows), mixed = b.mixed.of(mixes(m, w), on.rows), inner = b.inner.of(w.mlp.inner, on.rows);
#if defined(ADAPTERS)
            adapted.enter(layer);
#endif
            // Keeps only the rows that go on. No layer's first part reads x.
            auto go_on = [&] {
                for (int i = 0; id == 0 && on.row && i < on.rows; i++)
                    std::memmove(b.x + (int64_t)i * m.hidden, b.x + (int64_t)on.row[i] * m.hidden, m.hidden * sizeof(float));
#if defined(ADAPTERS)
                adapted.go_on(on);
#endif
            };
            if (w.state >= 0) {
#if defined(ADAPTERS)
                adapted.read(b.h, s.rows, reads(m, w), b.q);
#else
                linear<T>(b.h, s.rows, w.qkv, reads(m, w), b.q, id, of, w.qkv_bias);
#endif
                barrier.wait(of);
                const bool last = end && !s.outputs;
                if (!last) go_on();
                if (w.delta.heads) {
                    prepare(m, s, w, b.q, b.made, id, of);
                    barrier.wait(of);
                    recur(s, w, b.made, id, of);
                } else if (!last) {
                    convolve(m, s, w, b.q, on, mixed, id, of);
                }
                barrier.wait(of);
                keep_inputs(m, s, w, b.q, id, of);
                if (last) break;
                if (w.delta.heads) gate_results(m, w, b.q, b.made, on, mixed, id, of), barrier.wait(of);
            } else {
#if defined(ADAPTERS)
                adapted.read(b.h, s.rows, width, b.q);
                if (w.gate) adapted.gate(b.h, s.rows, b.made);
#else
                linear<T>(b.h, s.rows, w.qkv, width, b.q, id, of, w.qkv_bias);
                if (w.gate) linear<T>(b.h, s.rows, w.gate, m.heads * m.dim, b.made, id, of, w.gate_bias);
#endif
                // This comes late, so that attention finds the layer's keys and values in the processor's cache.
                if (s.take) s.take(s.job, w.kv);
                barrier.wait(of);
                if (s.take && __atomic_load_n(s.wrong, __ATOMIC_RELAXED)) {  // this layer has changed nothing yet
                    stopped = layer;
                    break;
                }
                if (id == 0) next = 0;
                for (int row = id; row < s.rows; row += of) place_row<T>(m, s, b.q, w, layer, row);
                for (int i = id; i < s.moves * 2 * m.kv_heads; i += of) {
                    const Move& v = s.move[i / (2 * m.kv_heads)];
                    bring<T>(m, s.regions[v.from >> 32], v.from & 0xffffffff, s.regions[v.to >> 32], v.to & 0xffffffff, v.rows,
                             layer, i % 2, i / 2 % m.kv_heads);
                }
                barrier.wait(of);
                if (s.places && layer + 1 == s.last || end && !s.outputs) break;
                go_on();
                attention<Lanes>(m, on.row ? wanted.step : s, b, mixed, on, layer, id, of, next, barrier);
            }
            if (!m.parallel) back(mixed, on.rows, w.o, w.o_bias, w.after);
            if (w.experts.count) {
                rows_of(on.rows, id, of, [&](int row) {
                    normed(m, b.x + (int64_t)row * m.hidden, w.before_mlp, m.hidden,
                           [&](int i, Vec v) { h.put(row, i, v), store(b.routes.normed + (int64_t)row * m.hidden + i, v); });
                });
                barrier.wait(of);
                const bool apart = w.after_mlp.weight;
                run_experts<T, typename How::Router>(m, w, b, h, on.rows, apart ? b.y : b.x, apart, id, of, barrier);
                settle(on.rows, w.after_mlp);
                continue;
            }
            rows_of(on.rows, id, of, [&](int row) { norm(row, w.before_mlp, h, row); });
            barrier.wait(of);
#if defined(ADAPTERS)
            adapted.widen(w.mlp, h, inner, on.rows);
#else
            widen<T>(m, w.mlp, h, inner, on.rows, id, of);
#endif
            barrier.wait(of);
            if (m.parallel) back(mixed, on.rows, w.o, w.o_bias, w.after);
            back(inner, on.rows, w.mlp.down, w.mlp.down_bias, w.after_mlp);
        }
        const int outputs = stopped == m.layers && enough ? s.outputs : 0;
        const Rows h = b.h.of(m.hidden, outputs);
        rows_of(outputs, id, of, [&](int i) { norm(few ? i : s.wanted[i], m.norm, h, i); });
        barrier.wait(of);
        if (s.largest && screens(m, h, outputs)) largest_logits(m, s, h, outputs, b.known, b.found, id, of, barrier);
        else linear<T>(h, outputs, m.head, m.vocab, s.logits, id, of, nullptr, m.logit);
        finish<typename How::Logit>(s.logits, outputs, m.vocab, m.logit_cap, id, of);
        if (id == 0) s.stopped = stopped;
    }
    return enough ? 0 : NO_MEMORY;
}

template <int DV>
int forward(const Model& m, Step& s) {
    return guarded([&] { return m.is_bf16 ? forward<Narrow, DV>(m, s) : forward<Full, DV>(m, s); });
}

}  // namespace

extern "C" {

// Returns how many elements of an inner dimension are packed together in bfloat16 weights: 32 for the matrix units, 2 for
// pairs, else 1.
int keepwarm_deep() { return Half::DEEP; }

// Returns the number of floats that a step needs as scratch memory.
int64_t keepwarm_scratch(const Model* m, const Step* s) {
    return m->is_bf16 ? Scratch<Narrow::Rows>(*m, *s).size : Scratch<Full::Rows>(*m, *s).size;
}

// Copies `rows` rows of every layer and head from one place to another. Encoded rows are decoded.
void keepwarm_copy(const Model* m, const Region* from, int64_t row, const Region* to, int64_t at, int64_t rows) {
    for (int layer = 0; layer < m->layers; layer++)
        for (int i = 0; i < 2 * m->kv_heads && m->layer[layer].kv >= 0; i++)
            if (m->is_bf16) bring<bf16>(*m, *from, row, *to, at, rows, layer, i % 2, i / 2);
            else bring<float>(*m, *from, row, *to, at, rows, layer, i % 2, i / 2);
}

// Runs a step's layers [first, last), and the model's head after the last one. Returns 0; 1 if this build lacks the head
// width; or NO_MEMORY, and then nothing is changed.
int keepwarm_forward(const Model* m, Step* s) {
    switch (m->dim / LANES) {
        case 1: return forward<1>(*m, *s);
        case 2: return forward<2>(*m, *s);
        case 4: return forward<4>(*m, *s);
        case 8: return forward<8>(*m, *s);
        case 16: return forward<16>(*m, *s);
    }
    return 1;
}
}
