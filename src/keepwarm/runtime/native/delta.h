// The gated delta net (arXiv:2412.06464): each head of values has a state S, [key dim, dim], which a row changes:
//
//     S' = decay S + k (step (v - decay S k))    and the row's result is S' q.
//
// Rows are computed one after another. Columns of S are independent of each other, so vectors and threads run over them.
// S k and S q are summed in one pass, since S' q = decay S q + (k q) step (v - decay S k).
//
// Mamba-2 (arXiv:2405.21060) is this without the delta rule, S' = decay S + k (step v), and adds each row's values times
// a factor to its result. Its keys and queries are called B and C there, its values x, and the step dt.
#pragma once

#include "norms.h"
#include "recurrent.h"

namespace {

constexpr int MOST_KEYS = 256;  // the widest head of queries and keys

// Scales a head of queries or keys to the length `length`.
inline void scale_to(float* x, int dim, float length) {
    Vec square{};
    for (int i = 0; i < dim; i += LANES) { const Vec v = load(x + i); square = fma(v, v, square); }
    const Vec factor = splat(length / std::sqrt(sum(square) + 1e-6f));
    for (int i = 0; i < dim; i += LANES) store(x + i, load(x + i) * factor);
}

// Computes what the recurrence reads of each row of thread `id` of `of` threads; see `made_of`.
inline void prepare(const Model& m, const Step& s, const Layer& w, const float* read, float* made, int id, int of) {
    const Delta& d = w.delta;
    const int channels = w.convolution.channels, keys = d.key_heads * d.key_dim;
    rows_of_runs(s, id, of, [&](const Run& run, int row) {
        float* const to = made + (int64_t)row * made_of(w);
        convolved(m, w, run, read, row, [&](int n, Vec value) { store(to + n, silu(value)); });
        float *const decay = to + channels, *const step = decay + d.heads, *const product = step + d.heads;
        for (int head = 0; head < d.key_heads; head++) {
            float *const q = to + head * d.key_dim, *const k = q + keys;
            if (!d.skip) scale_to(q, d.key_dim, 1 / std::sqrt((float)d.key_dim)), scale_to(k, d.key_dim, 1);
            Vec both{};
            for (int i = 0; i < d.key_dim; i += LANES) both = fma(load(q + i), load(k + i), both);
            product[head] = sum(both);
        }
        const float* const rates = read + (int64_t)row * reads(m, w) + channels + d.heads * d.dim;
        for (int head = 0; head < d.heads; head++) {
            const Vec far = softplus(splat(rates[(d.skip ? 0 : d.heads) + head] + d.step[head]));
            step[head] = (d.skip ? far : sigmoid(splat(rates[head])))[0];
            decay[head] = exp2v(far * splat(d.decay[head]))[0];
        }
    });
}

// Columns of a state that are computed together: W vectors of one head. They lie in the state one under the other,
// [key dim, W * 16].
template <int W>
struct Columns {
    alignas(64) float s[MOST_KEYS * W * LANES];
    const int dim;

    Columns(const float* from, int dim) : dim(dim) { std::memcpy(s, from, sizeof(float) * dim * W * LANES); }

    // Computes a row's result in place of its values, and changes the state. With RULE it is the delta rule; without, the
    // values times `skip` are added to the result.
    template <bool RULE>
    void row(const float* q, const float* k, float product, float decay, float step, float skip, float* value) {
        Vec with_key[2][W] = {}, with_query[2][W] = {}, change[W];  // sums over even and over odd keys
        for (int i = 0; i < dim; i += 2)
            for (int odd = 0; odd < 2; odd++)
                for (int v = 0; v < W; v++) {
                    const Vec now = load(s + ((i + odd) * W + v) * LANES);
                    if (RULE) with_key[odd][v] = fma(now, splat(k[i + odd]), with_key[odd][v]);
                    with_query[odd][v] = fma(now, splat(q[i + odd]), with_query[odd][v]);
                }
        for (int v = 0; v < W; v++) {
            const Vec given = load(value + v * LANES), asked = with_query[0][v] + with_query[1][v];
            const Vec rest = RULE ? fma(with_key[0][v] + with_key[1][v], splat(-decay), given) : given;
            change[v] = rest * splat(step);
            const Vec result = fused(splat(product), change[v], asked * splat(decay));
            store(value + v * LANES, RULE ? result : fma(given, splat(skip), result));
        }
        for (int i = 0; i < dim; i++)
            for (int v = 0; v < W; v++) {
                float* const at = s + (i * W + v) * LANES;
                store(at, fused(splat(k[i]), change[v], load(at) * splat(decay)));
            }
    }

    void keep(float* to) const { std::memcpy(to, s, sizeof(float) * dim * W * LANES); }
};

// Computes one task of the recurrence: some columns of a run's state.
template <int W, bool RULE>
void recur(const Step& s, const Layer& w, const Run& run, float* made, int part) {
    const Delta& d = w.delta;
    const int width = W * LANES, keys = d.key_heads * d.key_dim, channels = w.convolution.channels;
    const int head = part / (d.dim / width), of_keys = d.tiled ? head % d.key_heads : head / (d.heads / d.key_heads);
    const int64_t at = (int64_t)(w.convolution.kernel - 1) * channels + (int64_t)part * d.key_dim * width;
    Columns<W> columns(run.state[w.state] + at, d.key_dim);
    int keep = run.keep;
    for (int row = run.row; row < run.row + run.rows; row++) {
        float *const here = made + (int64_t)row * made_of(w), *const q = here + of_keys * d.key_dim, *const k = q + keys;
        float* const value = here + 2 * keys + part * width;
        const float *const decay = here + channels, *const step = decay + d.heads, *const product = step + d.heads;
        columns.template row<RULE>(q, k, product[of_keys], decay[head], step[head], RULE ? 0 : d.skip[head], value);
        if (keep < run.keep + run.keeps && s.keep[keep].row == row) columns.keep(s.keep[keep++].state[w.state] + at);
    }
    columns.keep(run.state[w.state] + at);
}

// Computes the recurrence of all rows, as thread `id` of `of` threads.
inline void recur(const Step& s, const Layer& w, float* made, int id, int of) {
    const Delta& d = w.delta;
    const int vectors = d.dim % (2 * LANES) ? 1 : 2, parts = d.heads * d.dim / (vectors * LANES);
    for (int64_t task = id; task < s.runs * parts; task += of) {
        const Run& run = s.run[task / parts];
        const int part = task % parts;
        if (d.skip) vectors == 2 ? recur<2, false>(s, w, run, made, part) : recur<1, false>(s, w, run, made, part);
        else vectors == 2 ? recur<2, true>(s, w, run, made, part) : recur<1, true>(s, w, run, made, part);
    }
}

// Norms and gates the results of the rows that go on, as operands of the layer's last product. Mamba-2 gates first, and
// norms the heads together that share keys.
template <class Rows>
void gate_results(const Model& m, const Layer& w, const float* read, float* made, const Onward& on, const Rows& results,
                  int id, int of) {
    const Delta& d = w.delta;
    const int channels = w.convolution.channels, values = 2 * d.key_heads * d.key_dim, all = d.heads * d.dim;
    const int width = d.skip ? all / d.key_heads : d.dim;
    rows_of(on.rows, id, of, [&](int i) {
        float* const from = made + (int64_t)on.from(i) * made_of(w) + values;
        const float* const gate = read + (int64_t)on.from(i) * reads(m, w) + channels;
        for (int n = 0; n < all && d.skip; n += LANES) store(from + n, load(from + n) * silu(load(gate + n)));
        for (int at = 0; at < all; at += width)
            normed<false>(from + at, Norm{d.skip ? d.norm + at : d.norm, nullptr}, width, m.epsilon, [&](int n, Vec value) {
                results.put(i, at + n, d.skip ? value : value * silu(load(gate + at + n)));
            });
    });
}

}  // namespace
