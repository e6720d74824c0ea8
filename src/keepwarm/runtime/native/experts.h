// Experts are MLPs. A router chooses some of them for each row.
//
// A row's scores, its choice, its products and the sum of its experts' results each have one fixed order. The rows beside
// it change nothing. Scores are sums of float32 operands in every dtype, because rounding a score could change the choice.
// An expert's rows run together, so its weights are read once per step. A row's results are added in order of the experts'
// numbers.
#pragma once

#include "norms.h"
#include "products.h"

namespace {

// Computes score = x router for `rows` rows, as thread `id` of `of` threads. `x` is not rounded. The router is of dtype T.
template <class T, class Rows>
void score_rows(const Model& m, const Experts& e, const Routes<Rows>& r, int rows, int id, int of) {
    constexpr int BLOCK = PlainRows<float>::BLOCK;
    const PlainRows<float> x(m.hidden, 0, r.normed);
    const int pairs = (e.count + e.gates + 2 * LANES - 1) / (2 * LANES);
    for (int task = id; task < (rows + BLOCK - 1) / BLOCK * pairs; task += of) {
        const int from = task / pairs * BLOCK, c = task % pairs * 2 * LANES;
        const bool both = c + LANES < e.count + e.gates;
        const T *left = (const T*)e.router + c / LANES * x.panel(), *right = both ? left + x.panel() : left;
        product<float, T>(x, from, from + BLOCK < rows ? from + BLOCK : rows, {left, right}, [&](int row, Vec first, Vec second) {
            store(r.score + (int64_t)row * r.across + c, first);
            store(r.score + (int64_t)row * r.across + c + LANES, second);
        });
    }
}

// Chooses the experts with the highest scores, the first of equals.
inline void choose_highest(const Experts& e, const float* score, bool* taken, int32_t* expert) {
    for (int rank = 0; rank < e.chosen; rank++) {
        int best = -1;
        for (int i = 0; i < e.count; i++)
            if (!taken[i] && (best < 0 || score[i] > score[best])) best = i;
        taken[best] = true, expert[rank] = best;
    }
}

// Does so by sigmoids of the scores, with a correction that has no part in a share (DeepSeek-V3, arXiv:2412.19437,
// eq. 16). It overwrites the scores.
inline void choose_by_sigmoid(const Experts& e, float* score, int across, int32_t* expert, float* share) {
    bool taken[MOST_EXPERTS] = {};
    float value[MOST_EXPERTS + 2 * LANES];
    for (int i = 0; i < across; i += LANES) store(value + i, sigmoid(load(score + i)));
    for (int i = 0; i < e.count; i++) score[i] = value[i] + (e.correction ? e.correction[i] : 0.f);
    choose_highest(e, score, taken, expert);
    float sum = e.least;
    for (int rank = 0; rank < e.chosen && e.least >= 0; rank++) sum += value[expert[rank]];
    for (int rank = 0; rank < e.chosen; rank++) share[rank] = value[expert[rank]] / (e.least < 0 ? 1.f : sum) * e.factor;
}

// Chooses experts and sets each one's share by softmax. It overwrites the scores.
inline void choose(const Experts& e, float* score, int across, int32_t* expert, float* share) {
    bool taken[MOST_EXPERTS] = {};
    for (int i = 0; i < e.count && e.router_bias; i++) score[i] += e.router_bias[i];
    choose_highest(e, score, taken, expert);
    const float top = score[expert[0]];
    for (int i = 0; i < across; i++) score[i] = i < e.count && (e.over_all || taken[i]) ? (score[i] - top) * 1.44269504f : -200.f;
    Vec total{};
    for (int i = 0; i < across; i += LANES) {
        const Vec s = load(score + i), weight = pick(s < splat(-126.f), Vec{}, exp2v(s));
        store(score + i, weight);
        total += weight;
    }
    const float all = sum(total);
    for (int rank = 0; rank < e.chosen; rank++) share[rank] = score[expert[rank]] / all;
}

// Chooses experts for row `row`, and computes the gate of the layer's own MLP. `factor` is the layer's factor of results.
template <class Rows>
void choose_row(const Model& m, const Experts& e, const Routes<Rows>& r, int row, float factor) {
    float* const score = r.score + (int64_t)row * r.across;
    r.row[r.own + row] = row;
    r.factor[r.own + row] = e.gates ? sigmoid(splat(score[e.count]))[0] * factor : factor;
    float* const share = r.share + (int64_t)row * e.chosen;
    if (e.sigmoid) choose_by_sigmoid(e, score, r.across, r.expert + (int64_t)row * e.chosen, share);
    else choose(e, score, r.across, r.expert + (int64_t)row * e.chosen, share);
    const int32_t* const expert = r.expert + (int64_t)row * e.chosen;
    for (int rank = 0; rank < e.chosen; rank++) share[rank] *= e.scale ? e.scale[expert[rank]] * factor : factor;
}

// Gives each pair of a row and one of its experts a slot, ordered by expert and then by row.
template <class Rows>
void group(const Experts& e, const Routes<Rows>& r, int rows) {
    for (int i = 0; i < e.count; i++) r.last[i] = 0;
    for (int64_t i = 0; i < (int64_t)rows * e.chosen; i++) r.last[r.expert[i]]++;
    for (int i = 0, at = 0; i < e.count; i++) {
        const int many = r.last[i];
        r.first[i] = r.last[i] = at;
        at += (many + Rows::TOGETHER - 1) / Rows::TOGETHER * Rows::TOGETHER;
    }
    for (int64_t i = 0; i < (int64_t)rows * e.chosen; i++) {
        const int slot = r.slot[i] = r.last[r.expert[i]]++;
        r.row[slot] = i / e.chosen, r.factor[slot] = r.share[i];
    }
}

// Returns the next expert after `i` that has rows, or `count` after the last one.
template <class Rows>
inline int following(const Experts& e, const Routes<Rows>& r, int i) {
    for (i++; i < e.count && r.first[i] == r.last[i];) i++;
    return i;
}

// Computes the experts' inner values. Thread `id` of `of` threads takes every `of`th panel of all that the step needs.
template <class T, int KIND, bool BIASED, class Rows>
void widen_experts(const Model& m, const Experts& e, const Routes<Rows>& r, int id, int of) {
    using Weight = typename Rows::template Weight<T>;
    const int64_t panel = r.taken.panel(), inner = e.all.inner;
    const Weight *gates = (const Weight*)e.all.gate, *ups = (const Weight*)e.all.up;
    const float *gate_bias = nullptr, *up_bias = nullptr;
    const int step = rows_at_once(r.taken);
    int turn = 0;
    for (int i = following(e, r, -1), after; i < e.count; i = after) {
        after = following(e, r, i);
        if constexpr (BIASED) {
            gate_bias = e.all.gate_bias ? e.all.gate_bias + i * inner : nullptr;
            up_bias = e.all.up_bias ? e.all.up_bias + i * inner : nullptr;
        }
        for (int from = r.first[i]; from < r.last[i]; from += step)
            for (int64_t c = 0; c < inner; c += LANES, turn += c % Rows::UNIT == 0) {
                if (turn % of != id) continue;
                const int64_t at = (i * inner + c) / LANES * panel, ahead = c + of * LANES - inner;
                const int64_t next = ahead < 0 ? at + of * panel : (after * inner + ahead) / LANES * panel;
                Panels<Weight> panels{gates + at, ups + at};
                if (ahead < 0 || ahead < inner && after < e.count) panels.next_left = gates + next, panels.next_right = ups + next;
                gate_panel<KIND, BIASED>(m, r.taken, r.inner, from, from + step < r.last[i] ? from + step : r.last[i], c, panels,
                                         gate_bias, up_bias);
            }
    }
}

template <class T, class Rows>
void widen_experts(const Model& m, const Experts& e, const Routes<Rows>& r, int id, int of) {
    with_activation(m, [&](auto kind) {
        if (e.all.gate_bias || e.all.up_bias) return widen_experts<T, kind, true>(m, e, r, id, of);
        widen_experts<T, kind, false>(m, e, r, id, of);
    });
}

// Computes y[row[slot]] += (sum_k x[slot, k] w[n, k] + bias[n]) factor[slot], for slots [first, last) and the columns of
// thread `id`. `then` points to the weights that are read next, or is null.
template <class T, bool BIASED, class Rows>
void narrow(const Rows& x, int first, int last, const void* weight, const void* then, int n, const float* bias,
            const int32_t* row, const float* factor, float* y, int id, int of) {
    using Weight = typename Rows::template Weight<T>;
    const Share share(n, id, of);
    const int64_t panel = x.panel();
    for (int from = first, step = rows_at_once(x); from < last; from += step)
        for (int c = share.from; c < share.to; c += 2 * LANES) {
            const bool both = c + LANES < n;
            const Weight *left = (const Weight*)weight + c / LANES * panel, *right = both ? left + panel : left;
            Panels<Weight> panels{left, right, left + 2 * panel, right + 2 * panel};
            if (c + 2 * LANES >= share.to) {
                panels.next_left = then ? (const Weight*)then + share.from / LANES * panel : nullptr;
                panels.next_right = then ? panels.next_left + panel : nullptr;
            }
            product(x, from, from + step < last ? from + step : last, panels, [&](int slot, Vec one, Vec two) {
                float* const at = y + (int64_t)row[slot] * n + c;
                const Vec by = splat(factor[slot]);
                if constexpr (BIASED) one += load(bias + c), two += load(bias + (both ? c + LANES : c));
                store(at, fma(one, by, load(at)));
                if (both) store(at + LANES, fma(two, by, load(at + LANES)));
            });
        }
}

template <class T, bool BIASED, class Rows>
void narrow_experts(const Model& m, const Experts& e, const Routes<Rows>& r, float* y, int id, int of) {
    const int64_t one = m.hidden / LANES * r.inner.panel() * sizeof(typename Rows::template Weight<T>);  // bytes
    for (int i = following(e, r, -1), after; i < e.count; i = after) {
        after = following(e, r, i);
        const char *down = (const char*)e.all.down, *then = after < e.count ? down + after * one : nullptr;
        const float* bias = BIASED ? e.all.down_bias + (int64_t)i * m.hidden : nullptr;
        narrow<T, BIASED>(r.inner, r.first[i], r.last[i], down + i * one, then, m.hidden, bias, r.row, r.factor, y, id, of);
    }
}

// Adds to y the results of a layer's experts and, unless these have norms of their own, of its MLP beside them, for the
// first `rows` rows. With `fresh`, y is set to zero before. The normed input is in h and, without rounding, in
// b.routes.normed. Threads do not wait for each other at the end.
template <class T, class Router, class Rows>
void run_experts(const Model& m, const Layer& w, const Scratch<Rows>& b, const Rows& h, int rows, float* y, bool fresh, int id,
                 int of, Barrier& barrier) {
    const Experts& e = w.experts;
    const Routes<Rows>& r = b.routes;
    const bool beside = w.mlp.inner && !e.after.weight;
    const Rows inner = b.inner.of(w.mlp.inner, rows);
    score_rows<Router>(m, e, r, rows, id, of);
    barrier.wait(of);
    for (int row = id; row < rows; row += of) choose_row(m, e, r, row, fresh ? 1.f : m.residual);
    barrier.wait(of);
    if (id == 0) group(e, r, rows);
    for (int row = id; row < rows && e.before.weight; row += of)
        normed(m, b.x + (int64_t)row * m.hidden, e.before, m.hidden,
               [&](int i, Vec v) { store(r.normed + (int64_t)row * m.hidden + i, v); });
    barrier.wait(of);
    for (int64_t i = id; i < (int64_t)rows * e.chosen; i += of)
        for (int c = 0; c < m.hidden; c += LANES) r.taken.put(r.slot[i], c, load(r.normed + i / e.chosen * m.hidden + c));
    for (int row = id; row < rows && fresh; row += of) std::memset(y + (int64_t)row * m.hidden, 0, m.hidden * sizeof(float));
    barrier.wait(of);
    widen_experts<T>(m, e, r, id, of);
    if (beside) widen<T>(m, w.mlp, h, inner, rows, id, of);
    barrier.wait(of);
    if (e.all.down_bias) narrow_experts<T, true>(m, e, r, y, id, of);
    else narrow_experts<T, false>(m, e, r, y, id, of);
    if (beside)
        narrow<T, false>(inner, 0, rows, w.mlp.down, nullptr, m.hidden, nullptr, r.row + r.own, r.factor + r.own, y, id, of);
}

}  // namespace
