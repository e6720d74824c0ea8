// Norms of one row.
#pragma once

#include <cmath>

#include "model.h"

namespace {

template <bool CENTRED, class Put>
inline void normed(const float* x, const Norm& norm, int n, float epsilon, Put put) {
    Vec mean{}, square{};
    if constexpr (CENTRED) {
        for (int i = 0; i < n; i += LANES) mean += load(x + i);
        mean = splat(sum(mean) / n);
    }
    const auto centred = [&](int i) { return CENTRED ? load(x + i) - mean : load(x + i); };
    for (int i = 0; i < n; i += LANES) { const Vec v = centred(i); square = fma(v, v, square); }
    const Vec factor = splat(1.f / std::sqrt(sum(square) / n + epsilon));
    if (norm.bias)
        for (int i = 0; i < n; i += LANES) put(i, centred(i) * factor * load(norm.weight + i) + load(norm.bias + i));
    else
        for (int i = 0; i < n; i += LANES) put(i, centred(i) * factor * load(norm.weight + i));
}

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

// Prefetches the norms that follow a layer's first product. Memory is otherwise idle while one thread norms a row and the
// others wait for it.
inline void ask_for_norms(const Model& m, int layer) {
    const Layer& w = m.layer[layer];
    for (const Norm& norm : {w.after, w.before_mlp, w.after_mlp, layer + 1 < m.layers ? m.layer[layer + 1].before : m.norm})
        for (int i = 0; norm.weight && i < m.hidden; i += LANES) __builtin_prefetch(norm.weight + i, 0, 2);
}

}  // namespace
