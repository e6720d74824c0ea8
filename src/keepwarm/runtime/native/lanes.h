// One unit of attention with vectors, operand by operand (operands.h). Operands are float32, or bfloat16 in pairs or
// widened.
//
// Products of queries and keys take two dims as a pair; keys are stored in this order already. Products of weights and
// values take two positions as a pair; values are interleaved for that once per unit. With pairs the weights are rounded
// to bfloat16, as flash attention does. Their total is not rounded.
#pragma once

#include "attention.h"
#include "operands.h"

namespace {

constexpr int BLOCK = 3;    // vectors of query lanes that are handled at once

// Returns keys [n positions][dim] as operands, in place or widened to `scratch`.
inline const float* key_rows(const float* p, int, float*) { return p; }
inline const float* key_rows(const bf16* p, int n, float* scratch) {
    for (int i = 0; i < n; i += LANES) store(scratch + i, load(p + i));
    return scratch;
}

// Returns values [count positions][dim] as operands [count / n][dim].
template <class T>
inline const float* value_rows(const T* p, int dim, int count, float* scratch) { return key_rows(p, count * dim, scratch); }

// Sets p[t][i] = 2^(s[t][i] - top[i]) as operands, for `count` positions and VL vectors of lanes, and adds them to `total`.
template <int VL>
inline void weigh(const float* s, float* p, int count, int first, const VecI* position, int window, bool masked,
                  const Vec* top, Vec* total) {
    for (int t = 0; t < count; t++)
        for (int v = 0; v < VL; v++) {
            Vec weight = exp2v(load(s + (t * VL + v) * LANES) - top[v]);
            if (masked) weight = pick(unseen(first + t, position[v], window), Vec{}, weight);
            total[v] += weight;
            store(p + (t * VL + v) * LANES, weight);
        }
}

inline Vec decay(float*, Vec x) { return exp2v(x); }

#if defined(HAS_PAIRS)
inline const Pair* key_rows(const bf16* p, int, Pair*) { return (const Pair*)p; }

inline const Pair* value_rows(const bf16* p, int dim, int count, Pair* scratch) {
    for (int t = 0; t < count; t += 2)
        for (int d = 0; d < dim; d += LANES) {  // what follows the last position may be anything
            const VecH a = of_memory<VecH>(p + t * dim + d), b = t + 1 < count ? of_memory<VecH>(p + (t + 1) * dim + d) : VecH{};
            store(scratch + t / 2 * dim + d, paired(a, b));
        }
    return scratch;
}

template <int VL>
inline void weigh(const float* s, Pair* p, int count, int first, const VecI* position, int window, bool masked,
                  const Vec* top, Vec* total) {
    Vec odd[VL] = {};
    for (int t = 0; t < count; t += 2)
        for (int v = 0; v < VL; v++) {
            const float* at = s + (t * VL + v) * LANES;
            Vec a = exp2_short(load(at) - top[v]), b = t + 1 < count ? exp2_short(load(at + VL * LANES) - top[v]) : Vec{};
            if (masked) {
                a = pick(unseen(first + t, position[v], window), Vec{}, a);
                b = pick(unseen(first + t + 1, position[v], window), Vec{}, b);
            }
            total[v] += a, odd[v] += b;
            store(p + (t / 2 * VL + v) * LANES, paired(a, b));
        }
    for (int v = 0; v < VL; v++) total[v] += odd[v];
}

inline Vec decay(Pair*, Vec x) { return exp2_short(x); }
#endif

// Sets acc[i] = acc[i] * factor[i] + sum_t p[t][i] values[t] for LB lanes, or for fewer if an acc is null. `count` is the
// number of operands.
template <int LB, int DV, class X>
inline void gather(const X* p, int stride, const float* factor, const X* const* values, int count, float* const* acc) {
    constexpr int ROWS = PAGE / Operand<X>::MANY;  // operands of a page, per dim
    constexpr int ONCE = !WHOLE ? 1 : DV < 16 ? DV : 16;  // vectors of a value that are handled at once
    for (int from = 0; from < DV; from += ONCE) {
        Vec sums[LB][ONCE];
        for (int i = 0; i < LB; i++)
            for (int d = 0; d < ONCE; d++) sums[i][d] = acc[i] ? load(acc[i] + (from + d) * LANES) * splat(factor[i]) : Vec{};
        for (int t = 0; t < count; t++) {
            const X* value = values[t / ROWS] + ((t % ROWS) * DV + from) * LANES;
            Vec row[ONCE];
            for (int d = 0; d < ONCE; d++) row[d] = load(value + d * LANES);
            for (int i = 0; i < LB; i++) {
                const Vec weight = Operand<X>::splat(p + t * stride + i);
                for (int d = 0; d < ONCE; d++) sums[i][d] = Operand<X>::add(weight, row[d], sums[i][d]);
            }
        }
        for (int i = 0; i < LB; i++)
            for (int d = 0; d < ONCE && acc[i]; d++) store(acc[i] + (from + d) * LANES, sums[i][d]);
    }
}

// Caps the scores of a unit, and finds each lane's highest score again. It is no part of the loop that computes the
// scores, because that loop needs all registers.
template <int VL>
__attribute__((noinline)) void cap_scores(float* score, int count, float cap, const Vec* maximum, Vec* top) {
    for (int v = 0; v < VL; v++) top[v] = maximum[v];
    for (int t = 0; t < count; t++)
        for (int v = 0; v < VL; v++) {
            float* const at = score + (t * VL + v) * LANES;
            const Vec s = load(at), value = pick(s > splat(NEVER / 2), capped(s, cap), s);
            store(at, value);
            top[v] = max(top[v], value);
        }
}

// Fetches the next unit's rows [t, t + count) of keys and values while this unit is computed.
template <int BYTES>
inline void ask_for_next(const char* const* ahead, int t, int count) {
    for (int kv = 0; kv < 2; kv++)
        for (int at = 0; at < count * BYTES; at += 64)
            __builtin_prefetch(ahead[kv * (UNIT / PAGE) + t / PAGE] + (t % PAGE) * BYTES + at);
}

// Masks the scores of positions [t, last) of a unit, which begins at `first`, and finds the highest ones.
template <int VL>
inline void find_top(float* score, int t, int last, int first, const VecI* position, int window, bool masked, Vec* top) {
    for (; t < last; t++)
        for (int v = 0; v < VL; v++) {
            float* const at = score + (t * VL + v) * LANES;
            Vec value = load(at);
            if (masked) store(at, value = pick(unseen(first + t, position[v], window), splat(NEVER), value));
            top[v] = max(top[v], value);
        }
}

// Attends to one unit of positions with VL vectors of query lanes. `q` is [dim operands][VL * 16], scaled. `maximum`,
// `total` and `acc` are each lane's state.
template <int VL, int DV, int BYTES, class X>
void attend(const X* q, const X* const* keys, const X* const* values, const char* const* ahead, int count, int first,
            const VecI* position, int window, bool masked, float cap, Vec* maximum, Vec* total, float* const* acc) {
    constexpr int MANY = Operand<X>::MANY, DIM = DV * LANES / MANY;
    constexpr int KEYS = WHOLE && VL == 1 ? 8 : 4, ONCE = WHOLE ? VL : 1;  // keys and vectors that are handled at once
    alignas(64) float score[UNIT * VL * LANES];
    alignas(64) X weight[UNIT / MANY * VL * LANES + LANES];  // the last lanes' reads run past the end
    Vec top[VL];
    for (int v = 0; v < VL; v++) top[v] = maximum[v];
    for (int t = 0; t < count; t += KEYS) {
        const X* k = keys[t / PAGE] + (t % PAGE) * DIM;
        ask_for_next<BYTES>(ahead, t, KEYS);
        for (int from = 0; from < VL; from += ONCE) {
            Vec s[KEYS][ONCE] = {};
            for (int d = 0; d < DIM; d++) {
                Vec a[ONCE];
                for (int v = 0; v < ONCE; v++) a[v] = load(q + (d * VL + from + v) * LANES);
#pragma GCC unroll 8
                for (int j = 0; j < KEYS; j++) {  // without unrolling, the sums would be kept in memory
                    const Vec b = Operand<X>::splat(k + j * DIM + d);
                    for (int v = 0; v < ONCE; v++) s[j][v] = Operand<X>::add(a[v], b, s[j][v]);
                }
            }
            for (int j = 0; j < KEYS; j++)
                for (int v = 0; v < ONCE; v++) store(score + ((t + j) * VL + from + v) * LANES, s[j][v]);
            if (masked || t + KEYS > count) continue;
            for (int j = 0; j < KEYS; j++)
                for (int v = 0; v < ONCE; v++) top[from + v] = max(top[from + v], s[j][v]);
        }
    }
    const int known = masked ? 0 : count / KEYS * KEYS;  // positions whose scores are in `top`
    find_top<VL>(score, known, count, first, position, window, masked, top);
    if (cap) cap_scores<VL>(score, count, cap, maximum, top);
    alignas(64) float factor[VL * LANES + LANES];
    for (int v = 0; v < VL; v++) {
        const Vec f = decay(weight, maximum[v] - top[v]);
        store(factor + v * LANES, f);
        total[v] *= f;
        maximum[v] = top[v];
    }
    weigh<VL>(score, weight, count, first, position, window, masked, top, total);
    constexpr int MOST = !WHOLE ? SUMS : DV <= 4 ? 6 : DV <= 8 ? 3 : 1;  // lanes that are handled at once
    const int operands = (count + MANY - 1) / MANY;
    for (int lane = 0; lane < VL * LANES && acc[lane]; lane += MOST) {
        if (MOST > 3 && !acc[lane + 3])
            gather<3, DV>(weight + lane, VL * LANES, factor + lane, values, operands, acc + lane);
        else
            gather<MOST, DV>(weight + lane, VL * LANES, factor + lane, values, operands, acc + lane);
    }
}

// The query lanes, with queries as operands X of elements T.
template <class T, class X, int DV>
struct Lanes : LaneList<BLOCK * LANES> {
    static constexpr int DIM = DV * LANES, OPERANDS = DIM / Operand<X>::MANY, ONCE = LANES;  // ONCE: see `Even`
    using LaneList::MOST;
    alignas(64) X q[OPERANDS * MOST];
    Lanes(const Model& m, const Step& s, const float* queries, const int32_t* rows, int first, int last, int layer, int kv_head)
        : LaneList(m, s, rows, first, last, layer, kv_head) {
        for (int i = 0; i < vl * LANES; i++) {
            const float* from = query(m, m.layer[layer], queries, i);
            alignas(64) X row[OPERANDS] = {};
            for (int d = 0; from && d < DIM; d += LANES)
                store((typename Operand<X>::Element*)row + d, load(from + d) * splat(m.scale));
            for (int d = 0; d < OPERANDS; d++) q[d * vl * LANES + i] = row[d];
        }
    }
};

// Attends to the units [from, to) of a work's pages. It continues from the lanes' maximum, total and acc.
template <class T, class X, int DV>
void walk(const Model& m, const Step& s, Lanes<T, X, DV>& l, const Work& work, int layer, int head, int from, int to) {
    constexpr int DIM = DV * LANES;
    alignas(64) X wide[2][UNIT * DIM];
    alignas(64) T decoded[2 * UNIT * DIM];
    VecI position[BLOCK];
    Vec maximum[BLOCK], total[BLOCK];
    for (int v = 0; v < l.vl; v++) {
        position[v] = of_memory<VecI>(l.where + v * LANES);
        maximum[v] = load(l.maximum + v * LANES), total[v] = load(l.total + v * LANES);
    }
    for (int unit = from; unit < to; unit++) {
        int first = unit * UNIT, count = l.highest + 1 - first < UNIT ? l.highest + 1 - first : UNIT;
        if (count <= 0) break;
        const Pages<T> pages(m, s, work, layer, head, unit, decoded);
        const X *keys[UNIT / PAGE], *values[UNIT / PAGE];
        for (int p = 0; p * PAGE < count; p++) {
            X* const room = wide[1] + p * PAGE * DIM;
            keys[p] = key_rows(pages.page[0][p], PAGE * DIM, wide[0] + p * PAGE * DIM);
            values[p] = value_rows(pages.page[1][p], DIM, count - p * PAGE < PAGE ? count - p * PAGE : PAGE, room);
        }
        const char* const* ahead = (const char* const*)pages.next;
        const bool masked = l.masks(first, count);
        auto attended = [&](auto vectors) {
            attend<vectors, DV, DIM * sizeof(T)>(l.q, keys, values, ahead, count, first, position, l.window, masked,
                                m.score_cap, maximum, total, l.acc);
        };
        switch (l.vl) {
            case 1: attended(Count<1>{}); break;
            case 2: attended(Count<2>{}); break;
            default: attended(Count<3>{});
        }
    }
    for (int v = 0; v < l.vl; v++) store(l.maximum + v * LANES, maximum[v]), store(l.total + v * LANES, total[v]);
}

}  // namespace
