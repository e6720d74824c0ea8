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

#include "delta.h"
#include "experts.h"
#include "guarded.h"
#include "heads.h"
#include "lanes.h"
#include "products.h"
#include "tile_lanes.h"
#include "wanted.h"
#if defined(QUANTIZED)
#include "screen_blocks.h"
#else
#include "screen_narrow.h"
#endif
#if defined(ADAPTERS)
#include "adapters.h"
#endif

namespace {

// A way to compute a step: the dtype of keys and values, that of weights, and the code for products and attention.
template <class T, class X = float, class W = T>
struct Vectors {
    using Element = T;
    using Weight = W;
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
    using Weight = bf16;
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
using Widened = Vectors<float, float, bf16>;  // the numbers are the same: each weight is widened where it is used
#endif

// Writes a token's row of a table, [width], times a factor.
template <class T>
inline void look_up(const Model& m, const void* table, int token, int width, float factor, float* to) {
#if defined(QUANTIZED)
    look_up((const QuantPanel*)table, token, width, factor, to);
#else
    const auto write = [&](const auto* all) {
        const auto* const from = all + (int64_t)token * width;
        for (int i = 0; i < width; i += LANES) store(to + i, load(from + i) * splat(factor));
    };
    if (m.narrow_tables) write((const bf16*)table);
    else write((const T*)table);
#endif
}

// Writes a token's embedding, [hidden], times a factor.
template <class T>
inline void embed(const Model& m, int token, float* to) {
    if (!m.tied) return look_up<T>(m, m.embedding, token, m.hidden, m.embedded, to);
    const bf16* const panel = (const bf16*)m.embedding + (int64_t)token / LANES * LANES * m.hidden + token % LANES;
    for (int i = 0; i < m.hidden; i++) to[i] = widened_bf16(panel[i * LANES].bits) * m.embedded;
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

// Calls `take` with a head's width in vectors, as a constant. Returns false if this build lacks the width.
template <class Take>
inline bool with_dim(int dim, Take take) {
    switch (dim / LANES) {
        case 1: return take(Count<1>{}), true;
        case 2: return take(Count<2>{}), true;
        case 4: return take(Count<4>{}), true;
        case 8: return take(Count<8>{}), true;
        case 16: return take(Count<16>{}), true;
        case 32: return take(Count<32>{}), true;
    }
    return false;
}

// Makes the vectors that the rows' tokens have for each layer, [rows, layers, width]: their own ones, and what is made of
// their embeddings. `looked` has room for one token's.
template <class T, class W, class Rows>
void per_layer_inputs(const Model& m, const Step& s, const Scratch<Rows>& b, int id, int of, Barrier& barrier) {
    const int width = m.per_layer, all = m.layers * width;
    float* const looked = b.looked + (int64_t)id * all;
    rows_of(s.rows, id, of, [&](int row) {
        normed(m, b.x + (int64_t)row * m.hidden, Norm{}, m.hidden, [&](int i, Vec v) { b.h.put(row, i, v); });
    });
    barrier.wait(of);
    linear<W>(b.h, s.rows, m.per_layer_projection, all, b.inputs, id, of, nullptr, m.projected);
    barrier.wait(of);
    rows_of(s.rows, id, of, [&](int row) {
        look_up<T>(m, m.per_layer_table, s.tokens[row], all, m.looked_up, looked);
        for (int layer = 0; layer < m.layers; layer++) {
            float *const at = b.inputs + (int64_t)row * all + layer * width, *const own = looked + layer * width;
            normed(m, at, m.per_layer_norm, width, [&](int i, Vec v) { store(at + i, (v + load(own + i)) * splat(m.summed)); });
        }
    });
    barrier.wait(of);
}

template <class How>
int forward(const Model& m, Step& s) {
    using T = typename How::Element;
    using W = typename How::Weight;
    using Rows = typename How::Rows;
    const Scratch<Rows> b(m, s);
    const int kept = std::max(last_kept(m), s.first);  // behind this layer, rows without logits are not needed
    const bool few = s.last == m.layers && s.outputs && fewer(s);
    const Wanted wanted(few ? s : Step{});
    int next = 0;
    bool enough = true;  // whether every thread got the memory it needs
    Barrier barrier;
    Turns turns;
#pragma omp parallel num_threads(s.threads)
    {
        const Rounding rounding;
        [[maybe_unused]] const typename How::Thread thread;
        if (!has_room<W>(b, s.rows)) __atomic_store_n(&enough, false, __ATOMIC_RELAXED);
        int stopped = s.last;
        const int id = omp_get_thread_num(), of = omp_get_num_threads();
        [[maybe_unused]] Turn turn{turns};
        auto norm = [&](int row, const Norm& by, const Rows& h, int to) {
            normed(m, b.x + (int64_t)row * m.hidden, by, m.hidden, [&](int i, Vec v) { h.put(to, i, v); });
        };
#if defined(ADAPTERS)
        Adapted<W, Rows> adapted(m, s, id, of, barrier);
#endif
        // Ends a sublayer: where the model norms its result, x += the normed result. Else `linear` has added it already.
        // Then x is multiplied by `factor`, where there is a norm.
        auto settle = [&](int rows, const Norm& after, float factor = 1) {
            barrier.wait(of);
            for (int row = id; row < rows && after.weight; row += of) {
                float* const x = b.x + (int64_t)row * m.hidden;
                normed(m, b.y + (int64_t)row * m.hidden, after, m.hidden,
                       [&](int i, Vec v) { store(x + i, fma(v, splat(m.residual), load(x + i)) * splat(factor)); });
            }
            if (after.weight) barrier.wait(of);
        };
        // x += the result of attention or of the MLP, for the first `rows` rows.
        auto back = [&](const Rows& from, int rows, const void* weight, const float* bias, const Norm& after, float factor = 1) {
            float* const y = after.weight ? b.y : b.x;
#if defined(ADAPTERS)
            adapted.back(from, rows, weight, y, bias, after.weight ? 1 : m.residual, !after.weight);
#else
            linear<W>(from, rows, weight, m.hidden, y, id, of, bias, after.weight ? 1 : m.residual, !after.weight, &turn);
#endif
            settle(rows, after, factor);
        };
        // x += norm(norm(MLP) + norm(experts)), for the first `rows` rows.
        auto mix_experts = [&](const Layer& w, int rows, const Rows& h, const Rows& inner) {
            const Experts& e = w.experts;
            rows_of(rows, id, of, [&](int row) {
                norm(row, w.before_mlp, h, row);
                normed(m, b.x + (int64_t)row * m.hidden, e.scored, m.hidden,
                       [&](int i, Vec v) { store(b.routes.normed + (int64_t)row * m.hidden + i, v); });
            });
            barrier.wait(of);
            widen<W>(m, w.mlp, h, inner, rows, id, of);
            barrier.wait(of);
            linear<W>(inner, rows, w.mlp.down, m.hidden, b.y, id, of, nullptr);
            run_experts<W, typename How::Router>(m, w, b, h, rows, b.z, true, id, of, barrier);
            barrier.wait(of);
            for (int row = id; row < rows; row += of) {
                float *const y = b.y + (int64_t)row * m.hidden, *const z = b.z + (int64_t)row * m.hidden;
                normed(m, y, e.after_own, m.hidden, [&](int i, Vec v) { store(y + i, v); });
                normed(m, z, e.after, m.hidden, [&](int i, Vec v) { store(y + i, load(y + i) + v); });
            }
            settle(rows, w.after_mlp, w.factor);
        };
        // x += norm(up (act(gate x) * vector)), for the first rows, which are `origin` of the step's rows; or all, in order.
        auto per_layer = [&](const Layer& w, int layer, int rows, const int32_t* origin, const Rows& h) {
            const int width = m.per_layer;
            const Rows inner = b.inner.of(width, rows);
            rows_of(rows, id, of, [&](int row) { norm(row, Norm{}, h, row); });
            barrier.wait(of);
            linear<W>(h, rows, w.per_layer.gate, width, b.y, id, of, nullptr);
            barrier.wait(of);
            rows_of(rows, id, of, [&](int row) {
                const float* const own = b.inputs + ((int64_t)(origin ? origin[row] : row) * m.layers + layer) * width;
                const float* const gate = b.y + (int64_t)row * width;
                with_activation(m, [&](auto kind) {
                    for (int i = 0; i < width; i += LANES) inner.put(row, i, activated<kind>(load(gate + i)) * load(own + i));
                });
            });
            barrier.wait(of);
            linear<W>(inner, rows, w.per_layer.up, m.hidden, b.y, id, of, nullptr);
            settle(rows, w.per_layer.after, w.factor);
        };
        for (int row = id; row < s.rows && s.first == 0; row += of) embed<T>(m, s.tokens[row], b.x + (int64_t)row * m.hidden);
        // Experts' rows need no clearing: their widths fill whole tiles.
        if (id == 0) b.h.clear(s.rows), b.mixed.clear(s.rows), b.inner.clear(s.rows);
        barrier.wait(of);
        if (!__atomic_load_n(&enough, __ATOMIC_RELAXED)) stopped = s.first;
        else if (m.per_layer && s.first == 0) per_layer_inputs<T, W>(m, s, b, id, of, barrier);
        for (int layer = s.first; layer < stopped; layer++) {
            const Layer& w = m.layer[layer];
            const bool end = layer == kept, behind = layer > kept && few;
            const Step& t = behind ? wanted.rest : s;
            const Rows first = b.h.of(m.hidden, t.rows);
            rows_of(t.rows, id, of, [&](int row) { norm(row, w.before, first, row); });
            barrier.wait(of);
            if (id < t.rows) ask_for_norms(m, layer);
            const Onward on = end && few ? wanted.onward() : Onward{t.rows};
            const Rows h = b.h.of(m.hidden, on.rows), mixed = b.mixed.of(mixes(m, w), on.rows), inner = b.inner.of(w.mlp.inner, on.rows);
#if defined(ADAPTERS)
            adapted.enter(layer, behind ? s.wanted : nullptr);
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
                adapted.read(first, s.rows, reads(m, w), b.q);
#else
                linear<W>(first, s.rows, w.qkv, reads(m, w), b.q, id, of, w.qkv_bias, 1, false, &turn);
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
                adapted.read(first, t.rows, reads(m, w), b.q);
                if (w.gate) adapted.gate(first, t.rows, b.made);
#else
                linear<W>(first, t.rows, w.qkv, reads(m, w), b.q, id, of, w.qkv_bias, 1, false, &turn);
                if (w.gate) linear<W>(first, t.rows, w.gate, m.heads * w.dim, b.made, id, of, w.gate_bias);
#endif
                // This comes late, so that attention finds the layer's keys and values in the processor's cache.
                if (s.take && !w.shares) s.take(s.job, w.kv);
                barrier.wait(of);
                if (s.take && __atomic_load_n(s.wrong, __ATOMIC_RELAXED)) {  // this layer has changed nothing yet
                    stopped = layer;
                    break;
                }
                if (id == 0) next = 0;
                for (int row = id; row < t.rows; row += of) place_row<T>(m, t, b.q, w, layer, row);
                const int planes = w.shares ? 0 : 2 * w.kv_heads;
                for (int i = id; i < s.moves * planes; i += of) {
                    const Move& v = s.move[i / planes];
                    bring<T>(m, s.regions[v.from >> 32], v.from & 0xffffffff, s.regions[v.to >> 32], v.to & 0xffffffff, v.rows,
                             layer, i % 2, i / 2 % w.kv_heads);
                }
                barrier.wait(of);
                if (s.places && layer + 1 == s.last || end && !s.outputs) break;
                go_on();
                with_dim(w.dim, [&](auto vectors) {
                    const Step& step = on.row ? wanted.step : t;
                    const bool wide = behind ? b.wide_behind : b.wide;
                    attention<typename How::template Lanes<vectors>>(m, step, b, wide, mixed, on, layer, id, of, next, barrier);
                });
            }
            if (!m.parallel) back(mixed, on.rows, w.o, w.o_bias, w.after);
            if (w.experts.after.weight) {
                mix_experts(w, on.rows, h, inner);
                continue;
            }
            if (w.experts.count) {
                rows_of(on.rows, id, of, [&](int row) {
                    normed(m, b.x + (int64_t)row * m.hidden, w.before_mlp, m.hidden,
                           [&](int i, Vec v) { h.put(row, i, v), store(b.routes.normed + (int64_t)row * m.hidden + i, v); });
                });
                barrier.wait(of);
                const bool apart = w.after_mlp.weight;
                run_experts<W, typename How::Router>(m, w, b, h, on.rows, apart ? b.y : b.x, apart, id, of, barrier);
                settle(on.rows, w.after_mlp, w.factor);
                continue;
            }
            rows_of(on.rows, id, of, [&](int row) { norm(row, w.before_mlp, h, row); });
            barrier.wait(of);
#if defined(ADAPTERS)
            adapted.widen(w.mlp, h, inner, on.rows);
#else
            widen<W>(m, w.mlp, h, inner, on.rows, id, of, &turn);
#endif
            barrier.wait(of);
            if (m.parallel) back(mixed, on.rows, w.o, w.o_bias, w.after);
            back(inner, on.rows, w.mlp.down, w.mlp.down_bias, w.after_mlp, m.per_layer ? 1 : w.factor);
            if (m.per_layer) per_layer(w, layer, on.rows, behind ? s.wanted : on.row, h);
        }
        const int outputs = stopped == m.layers && enough ? s.outputs : 0;
        const Rows h = b.h.of(m.hidden, outputs);
        rows_of(outputs, id, of, [&](int i) { norm(few ? i : s.wanted[i], m.norm, h, i); });
        barrier.wait(of);
        if (s.largest && screens(m, h, outputs)) largest_logits(m, s, h, outputs, b.known, b.found, id, of, barrier);
        else linear_of<typename Rows::template HeadWeight<W>>(h, outputs, m.head, m.vocab, s.logits, id, of, nullptr, m.logit, false);
        finish<typename How::Logit>(s.logits, outputs, m.vocab, m.logit_cap, id, of);
        if (id == 0) s.stopped = stopped;
    }
    return enough ? 0 : NO_MEMORY;
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
        for (int i = 0; i < 2 * m->layer[layer].kv_heads && m->layer[layer].kv >= 0 && !m->layer[layer].shares; i++)
            if (m->is_bf16) bring<bf16>(*m, *from, row, *to, at, rows, layer, i % 2, i / 2);
            else bring<float>(*m, *from, row, *to, at, rows, layer, i % 2, i / 2);
}

// Runs a step's layers [first, last), and the model's head after the last one. Returns 0; 1 if this build lacks the head
// width; or NO_MEMORY, and then nothing is changed.
int keepwarm_forward(const Model* m, Step* s) {
    for (int layer = 0; layer < m->layers; layer++)
        if (m->layer[layer].kv >= 0 && !with_dim(m->layer[layer].dim, [](auto) {})) return 1;
    return guarded([&] {
#if !defined(QUANTIZED)
        if (m->widens) return forward<Widened>(*m, *s);
#endif
        return m->is_bf16 ? forward<Narrow>(*m, *s) : forward<Full>(*m, *s);
    });
}
}
