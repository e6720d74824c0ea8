// A unit of attention with vectors, element by element: float32, and bfloat16 where there are no matrix units.
#pragma once

#include "attention.h"

namespace {

constexpr int BLOCK = 3;    // vectors of query lanes handled at once

inline const float* unit_rows(const float* p, int, float*) { return p; }
inline const float* unit_rows(const bf16* p, int n, float* scratch) {
    for (int i = 0; i < n; i += LANES) store(scratch + i, load(p + i));
    return scratch;
}

// acc[i] = acc[i] * factor[i] + sum_t p[t][i] values[t] for LB lanes; a null acc ends them early.
template <int LB, int DV>
inline void gather(const float* p, int stride, const float* factor, const float* const* values, int count, float* const* acc) {
    Vec sums[LB][DV];
    for (int i = 0; i < LB; i++)
        for (int d = 0; d < DV; d++) sums[i][d] = acc[i] ? load(acc[i] + d * LANES) * splat(factor[i]) : Vec{};
    for (int t = 0; t < count; t++) {
        const float* value = values[t / PAGE] + (t % PAGE) * DV * LANES;
        Vec row[DV];
        for (int d = 0; d < DV; d++) row[d] = load(value + d * LANES);
        for (int i = 0; i < LB; i++) {
            Vec weight = splat(p[t * stride + i]);
            for (int d = 0; d < DV; d++) sums[i][d] = fma(weight, row[d], sums[i][d]);
        }
    }
    for (int i = 0; i < LB; i++)
        for (int d = 0; d < DV && acc[i]; d++) store(acc[i] + d * LANES, sums[i][d]);
}

// One unit of positions for VL vectors of query lanes. q: [dim][VL * 16], scaled; state per lane.
template <int VL, int DV>
void attend(const float* q, const float* const* keys, const float* const* values, const char* const* ahead, int row_bytes,
            int count, int first, const VecI* position, bool masked, Vec* maximum, Vec* total, float* const* acc) {
    constexpr int DIM = DV * LANES, KEYS = 4;  // keys at once
    alignas(64) float score[UNIT * VL * LANES + LANES];  // the last lanes' reads run over
    Vec top[VL];
    for (int v = 0; v < VL; v++) top[v] = maximum[v];
    for (int t = 0; t < count; t += KEYS) {
        const float* k = keys[t / PAGE] + (t % PAGE) * DIM;
        for (int kv = 0; kv < 2; kv++)  // the next unit comes from memory while this one is computed
            for (int at = 0; at < KEYS * row_bytes; at += 64)
                __builtin_prefetch(ahead[kv * (UNIT / PAGE) + t / PAGE] + (t % PAGE) * row_bytes + at);
        Vec s[KEYS][VL] = {};
        for (int d = 0; d < DIM; d++) {
            Vec a[VL];
            for (int v = 0; v < VL; v++) a[v] = load(q + (d * VL + v) * LANES);
            for (int j = 0; j < KEYS; j++) {
                Vec b = splat(k[j * DIM + d]);
                for (int v = 0; v < VL; v++) s[j][v] = fma(a[v], b, s[j][v]);
            }
        }
        for (int j = 0; j < KEYS && t + j < count; j++)
            for (int v = 0; v < VL; v++) {
                if (masked) s[j][v] = (first + t + j > position[v]) ? splat(NEVER) : s[j][v];
                store(score + ((t + j) * VL + v) * LANES, s[j][v]);
                top[v] = max(top[v], s[j][v]);
            }
    }
    alignas(64) float factor[VL * LANES + LANES];
    for (int v = 0; v < VL; v++) {
        Vec f = exp2v(maximum[v] - top[v]);
        store(factor + v * LANES, f);
        total[v] *= f;
        maximum[v] = top[v];
    }
    for (int t = 0; t < count; t++)
        for (int v = 0; v < VL; v++) {
            float* at = score + (t * VL + v) * LANES;
            Vec p = exp2v(load(at) - top[v]);
            if (masked) p = (first + t > position[v]) ? Vec{} : p;
            total[v] += p;
            store(at, p);
        }
    constexpr int MOST = DV <= 4 ? 6 : 3;  // lanes at once
    for (int lane = 0; lane < VL * LANES && acc[lane]; lane += MOST) {
        if (MOST == 6 && !acc[lane + 3])
            gather<3, DV>(score + lane, VL * LANES, factor + lane, values, count, acc + lane);
        else
            gather<MOST, DV>(score + lane, VL * LANES, factor + lane, values, count, acc + lane);
    }
}

template <class T, int DV>
struct Lanes : LaneList<BLOCK * LANES> {
    static constexpr int DIM = DV * LANES;
    using LaneList::MOST;
    alignas(64) float q[DIM * MOST];
    Lanes(const Model& m, const Step& s, const float* queries, const int32_t* rows, int first, int last, int kv_head)
        : LaneList(m, s, rows, first, last, kv_head) {
        for (int i = 0; i < vl * LANES; i++) {
            const float* from = query(m, queries, i);
            for (int d = 0; d < DIM; d++) q[d * vl * LANES + i] = from ? from[d] * m.scale : 0;
        }
    }
};

// Attends to the units [from, to) of a work's pages, going on from the lanes' maximum, total and acc.
template <class T, int DV>
void walk(const Model& m, const Step& s, Lanes<T, DV>& l, const Work& work, int layer, int head, int from, int to) {
    constexpr int DIM = DV * LANES;
    alignas(64) float wide[2][UNIT * DIM];
    alignas(64) T decoded[2 * UNIT * DIM];
    VecI position[BLOCK];
    Vec maximum[BLOCK], total[BLOCK];
    for (int v = 0; v < l.vl; v++) {
        std::memcpy(&position[v], l.where + v * LANES, sizeof(VecI));
        maximum[v] = load(l.maximum + v * LANES), total[v] = load(l.total + v * LANES);
    }
    for (int unit = from; unit < to; unit++) {
        int first = unit * UNIT, count = l.highest + 1 - first < UNIT ? l.highest + 1 - first : UNIT;
        if (count <= 0) break;
        const Pages<T> pages(m, s, work, layer, head, unit, decoded);
        const float *keys[UNIT / PAGE], *values[UNIT / PAGE];
        for (int p = 0; p * PAGE < count; p++) {
            keys[p] = unit_rows(pages.page[0][p], PAGE * DIM, wide[0] + p * PAGE * DIM);
            values[p] = unit_rows(pages.page[1][p], PAGE * DIM, wide[1] + p * PAGE * DIM);
        }
        const char* const* ahead = (const char* const*)pages.next;
        bool masked = first + count - 1 > l.lowest;
        switch (l.vl) {
            case 1: attend<1, DV>(l.q, keys, values, ahead, DIM * sizeof(T), count, first, position, masked, maximum, total, l.acc); break;
            case 2: attend<2, DV>(l.q, keys, values, ahead, DIM * sizeof(T), count, first, position, masked, maximum, total, l.acc); break;
            default: attend<3, DV>(l.q, keys, values, ahead, DIM * sizeof(T), count, first, position, masked, maximum, total, l.acc);
        }
    }
    for (int v = 0; v < l.vl; v++) store(l.maximum + v * LANES, maximum[v]), store(l.total + v * LANES, total[v]);
}

}  // namespace
