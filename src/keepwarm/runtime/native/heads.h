// What is done with a row's queries, keys and values before attention.
#pragma once

#include <cmath>

#include "norms.h"

namespace {

// Rotates the first dims of one head in place. Most models pair a dim of the first half with one of the second half;
// some pair neighbours.
inline void rotate(const Model& m, const Layer& w, float* x, const float* c, const float* s) {
    const int half = w.rotary / 2;
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

// Norms and rotates a row's queries and keys, and writes its key and value to the row's slot. A layer that shares has
// queries alone.
template <class T>
void place_row(const Model& m, const Step& s, float* queries, const Layer& w, int layer, int row) {
    const int dim = w.dim, keys = w.shares ? 0 : w.kv_heads;
    float* q = queries + (int64_t)row * reads(m, w);
    const int64_t at = (int64_t)s.positions[row] * (w.rotary / 2);
    auto norm = [&](float* x, const Norm& by, int n) {
        if (by.weight) normed(m, x, by, n, [&](int i, Vec v) { store(x + i, v); });
    };
    if (m.wide) norm(q, w.q, m.heads * dim), norm(q + m.heads * dim, w.k, keys * dim);
    for (int head = 0; head < m.heads + keys; head++) {
        float* x = q + head * dim;
        if (!m.wide) norm(x, head < m.heads ? w.q : w.k, dim);
        if (w.cosine) rotate(m, w, x, w.cosine + at, w.sine + at);
    }
    for (int head = 0; head < keys; head++) norm(q + (m.heads + keys + head) * dim, w.v, dim);
    if (w.factors)
        for (int i = 0; i < m.heads * dim; i += LANES) store(q + i, load(q + i) * splat(w.factors[s.positions[row]]));
    for (int kv = 0; kv < 2; kv++)
        for (int head = 0; head < keys; head++) {
            const float* from = q + (m.heads + kv * keys + head) * dim;
            T* to = address<T>(s, m, s.slots[row], layer, kv, head);
            for (int i = 0; i < dim; i += LANES) store(to + i, load(from + i));
        }
}

}  // namespace
