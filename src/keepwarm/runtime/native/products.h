// Products with packed weights, element by element: float32, and bfloat16 weights where there are no matrix units.
//
// Weights are packed [out / 16][in][16]; the other operand is float32.
#pragma once

#include <vector>

#include "model.h"

namespace {

struct FloatRows {  // [rows, width]
    static constexpr bool KEEPS_UP = true;
    float* p = nullptr;
    int64_t width = 0;
    FloatRows() = default;
    FloatRows(int width, float* p) : p(p), width(width) {}
    static int64_t size(int64_t rows, int width) { return rows * width; }
    void clear(int) const {}
    float* at(int row, int column) const { return p + row * width + column; }
    void put(int row, int column, Vec v) const { store(at(row, column), v); }
};

// y[m, n] (+)= sum_k x[m, k] w[n, k] + bias[n] for 16 * NV columns, of which `columns` are stored.
template <class T, int MB, int NV>
inline void tile(const float* x, int64_t ldx, const T* w, int k, float* y, int64_t ldy, const float* bias, bool add, int columns) {
    Vec acc[MB][NV] = {};
    for (int i = 0; i < k; i++) {
        Vec b[NV];
        for (int v = 0; v < NV; v++) b[v] = load(w + ((int64_t)v * k + i) * LANES);
        for (int m = 0; m < MB; m++) {
            Vec a = splat(x[m * ldx + i]);
            for (int v = 0; v < NV; v++) acc[m][v] = fma(a, b[v], acc[m][v]);
        }
    }
    for (int m = 0; m < MB; m++)
        for (int v = 0; v < NV; v++) put_sums(acc[m][v], y + m * ldy + v * LANES, bias ? bias + v * LANES : nullptr, add, columns - v * LANES);
}

template <class T, int NV>
void panel(const float* x, int64_t ldx, int m, const T* w, int k, float* y, int64_t ldy, const float* bias, bool add, int columns) {
    for (; m >= 12; m -= 12, x += 12 * ldx, y += 12 * ldy) tile<T, 12, NV>(x, ldx, w, k, y, ldy, bias, add, columns);
    if (m >= 8) tile<T, 8, NV>(x, ldx, w, k, y, ldy, bias, add, columns), m -= 8, x += 8 * ldx, y += 8 * ldy;
    if (m >= 4) tile<T, 4, NV>(x, ldx, w, k, y, ldy, bias, add, columns), m -= 4, x += 4 * ldx, y += 4 * ldy;
    switch (m) {
        case 3: return tile<T, 3, NV>(x, ldx, w, k, y, ldy, bias, add, columns);
        case 2: return tile<T, 2, NV>(x, ldx, w, k, y, ldy, bias, add, columns);
        case 1: return tile<T, 1, NV>(x, ldx, w, k, y, ldy, bias, add, columns);
    }
}

// y[m, n] (+)= sum_k x[m, k] w[n, k] + bias[n], the columns of thread `id` of `of`.
template <class T>
void linear(const FloatRows& rows, int m, const void* weight, int n, float* y, int id, int of, const float* bias = nullptr,
            bool add = false) {
    static thread_local std::vector<float> wide;
    const Share share(n, id, of);
    const float* x = rows.p;
    const int64_t k = rows.width, ldy = n;
    for (int c = share.from; c < share.to; c += 2 * LANES) {
        const T* w = (const T*)weight + (int64_t)c * k;
        const float* b = bias ? bias + c : nullptr;
        const int columns = share.to - c;
        if (m > 24 && sizeof(T) < sizeof(float)) {  // widened once for many rows; the values are the same
            const int64_t n = k * (columns > LANES ? 2 * LANES : LANES);
            wide.resize(n);
            for (int64_t i = 0; i < n; i += LANES) store(wide.data() + i, load(w + i));
            if (columns > LANES) panel<float, 2>(x, k, m, wide.data(), k, y + c, ldy, b, add, columns);
            else panel<float, 1>(x, k, m, wide.data(), k, y + c, ldy, b, add, columns);
        } else if (columns > LANES) panel<T, 2>(x, k, m, w, k, y + c, ldy, b, add, columns);
        else panel<T, 1>(x, k, m, w, k, y + c, ldy, b, add, columns);
    }
}

// inner = silu(h gate) * (h up), the columns of thread `id` of `of`.
template <class T>
void gated(const Scratch<FloatRows>& b, int m, const void* gate, const void* up, int n, int id, int of) {
    linear<T>(b.h, m, gate, n, b.inner.p, id, of);
    linear<T>(b.h, m, up, n, b.up, id, of);
    const Share mine(n, id, of);
    for (int row = 0; row < m; row++)
        for (int i = mine.from; i < mine.to; i += LANES) {
            float* at = b.inner.at(row, i);
            store(at, silu(load(at)) * load(b.up + (int64_t)row * n + i));
        }
}

}  // namespace
