// Attention: which lanes read which positions, and how parts are merged. lanes.h and tile_lanes.h compute one unit.
#pragma once

#include <algorithm>
#include <cmath>

#include "model.h"

namespace {

constexpr float NEVER = -1e30f;

// Says for each lane whether it does not attend to a position.
inline VecI unseen(int at, VecI position, int window) { return (position < at) | (position - window >= at); }

// Up to MOST query lanes of one key head. A lane is a row of the step with one of the key head's query heads.
template <int CAPACITY>
struct LaneList {
    static constexpr int MOST = CAPACITY;
    static_assert(MOST >= TASK);
    alignas(64) float maximum[MOST], total[MOST];
    alignas(64) int32_t where[MOST];
    float* acc[MOST + 8];  // null after the last lane
    int row[MOST], head[MOST];
    int n, vl;  // the number of lanes, and of vectors that hold them
    int32_t lowest, highest;
    int32_t window;  // how many positions a lane attends to, its own included

    LaneList(const Model& m, const Step& s, const int32_t* rows, int first, int last, int layer, int kv_head) : acc{} {
        window = m.layer[layer].window ? m.layer[layer].window : INT32_MAX / 2;
        const int group = m.heads / m.layer[layer].kv_heads;
        n = last - first < MOST ? last - first : MOST;
        vl = (n + LANES - 1) / LANES;
        lowest = INT32_MAX, highest = -1;
        for (int i = 0; i < vl * LANES; i++) {
            where[i] = -1, maximum[i] = NEVER, total[i] = 0;
            if (i >= n) continue;
            row[i] = rows[(first + i) / group], head[i] = kv_head * group + (first + i) % group;
            where[i] = s.positions[row[i]];
            lowest = where[i] < lowest ? where[i] : lowest;
            highest = where[i] > highest ? where[i] : highest;
        }
    }

    // Returns the first unit to which any lane attends. Earlier units are not read, so they may be missing.
    int first_unit() const { return lowest < window ? 0 : (lowest - window + 1) / UNIT; }

    // Says whether some lane attends to fewer than all of `count` positions.
    bool masks(int first, int count) const { return first + count - 1 > lowest || first <= highest - window; }

    // Returns a lane's query; null after the last lane.
    const float* query(const Model& m, const Layer& w, const float* q, int i) const {
        return i < n ? q + (int64_t)row[i] * reads(m, w) + head[i] * w.dim : nullptr;
    }
};

// The addresses of a unit's pages and of the next unit's pages. After the last unit, the next ones are the same again.
// Encoded pages are decoded one unit at a time, into `decoded`, which has room for one unit's keys and values.
template <class T>
struct Pages {
    static constexpr int MANY = UNIT / PAGE;
    const T *page[2][MANY], *next[2 * MANY];
    Pages(const Model& m, const Step& s, const Work& work, int layer, int head, int unit, T* decoded) {
        const int64_t* pages = s.pages + work.pages + (int64_t)(unit - work.first_unit) * MANY;
        const int dim = m.layer[layer].dim, ahead = unit + 1 < work.last_unit ? MANY : 0;
        for (int kv = 0; kv < 2; kv++)
            for (int p = 0; p < MANY; p++) {
                T* room = decoded + (kv * MANY + p) * PAGE * dim;
                page[kv][p] = at<true>(m, s, pages[p], layer, kv, head, room);
                next[kv * MANY + p] = at<false>(m, s, pages[ahead + p], layer, kv, head, room);
            }
    }

private:
    // Codes of the next unit's encoded pages are prefetched here. The unit's arithmetic prefetches only the decoded rows.
    template <bool NOW>
    static const T* at(const Model& m, const Step& s, int64_t place, int layer, int kv, int head, T* room) {
        const Region& r = s.regions[place >> 32];
        const Layer& w = m.layer[layer];
        const int64_t row = place & 0xffffffff;
        const char* block = rows_of(r, w.kv, kv, head);
        if (!r.coding.bits) return (const T*)block + row * w.dim;
        if (NOW) {
            decode_rows(r.coding, block, kv, w.dim, row, PAGE, room);
        } else {
            const EncodedHead ahead(r.coding, block, kv, w.dim);
            const uint8_t* codes = ahead.codes + row * ahead.code_bytes;
            for (int64_t i = 0; i < PAGE * ahead.code_bytes; i += 64) __builtin_prefetch(codes + i);
        }
        return room;
    }
};

// The rows that continue after a layer's attention: all of them in their places, or some of them, moved to the front.
struct Onward {
    int rows;
    const int32_t *row = nullptr, *place = nullptr;  // [rows]: which rows of the step; [rows of the step]: their new places
    int from(int i) const { return row ? row[i] : i; }
    int to(int row) const { return place ? place[row] : row; }
};

// Returns the sum of a lane's weights. It includes the sink's weight, though a sink has no value.
inline float with_sink(const Layer& w, int head, float maximum, float total) {
    return w.sinks ? total + exp2v(splat(w.sinks[head] - maximum))[0] : total;
}

// Merges one part's softmax into a running one by log-sum-exp.
inline void absorb(float& maximum, float& total, float* acc, float m, float t, const float* part, int dim) {
    const float top = maximum > m ? maximum : m;
    const float below[LANES] = {maximum - top, m - top};
    const Vec weights = exp2v(load(below));  // a library's exp2 could round otherwise on another machine
    const float a = weights[0], b = weights[1];
    total = std::fma(b, t, a * total);
    maximum = top;
    for (int d = 0; d < dim; d += LANES) store(acc + d, fused(splat(b), load(part + d), splat(a) * load(acc + d)));
}

// Puts 16 of a row's results into mixed[to], multiplied by their gates if the layer has some.
template <class Rows>
inline void put_result(const Model& m, const Scratch<Rows>& b, const Rows& mixed, int layer, int row, int to, int column, Vec value) {
    const Layer& w = m.layer[layer];
    if (w.gate) value *= sigmoid(load(b.made + (int64_t)row * m.heads * w.dim + column));
    mixed.put(to, column, value);
}

// One task of a step with few rows: lanes [first, last) attend to one part of the positions, for one key head. If there are
// several works, these are the lanes of whole rows that go on: a row is at another place in each work, and one task must add
// up all its units of a part, in order.
template <class Lanes, class Rows>
void attend_part(const Model& m, const Step& s, const Scratch<Rows>& b, const Onward& on, int layer, int head, int part, int first,
                 int last) {
    constexpr int DIM = Lanes::DIM, UNITS = PART / UNIT;
    const int group = m.heads / m.layer[layer].kv_heads;
    const bool one = s.works == 1;
    for (int lane = first; lane < last; lane++) {
        const int row = one ? s.members[s.work[0].row + lane / group] : on.from(lane / group);
        const int64_t cell = part * b.lanes + (int64_t)row * m.heads + head * group + lane % group;
        b.maximum[cell] = NEVER, b.total[cell] = 0;
        std::memset(b.part + cell * DIM, 0, DIM * sizeof(float));
    }
    for (int i = 0; i < s.works; i++) {
        const Work& work = s.work[i];
        int from = work.first_unit > part * UNITS ? work.first_unit : part * UNITS;
        int to = work.last_unit < (part + 1) * UNITS ? work.last_unit : (part + 1) * UNITS;
        if (from >= to) continue;
        const int32_t* const rows = s.members + work.row;  // in rising order
        const auto place = [&](int lane) {  // where the lanes of this row and of later ones begin
            if (one || lane / group == on.rows) return one ? lane : work.rows * group;
            return (int)(std::lower_bound(rows, rows + work.rows, on.from(lane / group)) - rows) * group;
        };
        for (int lane = place(first), end = place(last); lane < end; lane += Lanes::MOST) {
            Lanes l(m, s, b.q, rows, lane, end, layer, head);
            for (int i = 0; i < l.n; i++) {
                int64_t cell = part * b.lanes + (int64_t)l.row[i] * m.heads + l.head[i];
                l.maximum[i] = b.maximum[cell], l.total[i] = b.total[cell], l.acc[i] = b.part + cell * DIM;
            }
            walk(m, s, l, work, layer, head, std::max(from, l.first_unit()), to);
            for (int i = 0; i < l.n; i++) {
                int64_t cell = part * b.lanes + (int64_t)l.row[i] * m.heads + l.head[i];
                b.maximum[cell] = l.maximum[i], b.total[cell] = l.total[i];
            }
        }
    }
}

// One task of a step with many rows of one sequence: some lanes attend to all positions, for one key head.
template <class Lanes, class Rows>
void attend_lanes(const Model& m, const Step& s, const Scratch<Rows>& b, const Rows& mixed, const Onward& on, int layer, int head,
                  int first, int last) {
    constexpr int DIM = Lanes::DIM, UNITS = PART / UNIT;
    const Work& work = s.work[0];
    Lanes l(m, s, b.q, s.members + work.row, first, last, layer, head);
    alignas(64) float part[Lanes::MOST * DIM], all[Lanes::MOST * DIM];
    float maximum[Lanes::MOST], total[Lanes::MOST];
    for (int i = 0; i < l.n; i++) maximum[i] = NEVER, total[i] = 0, l.acc[i] = part + i * DIM;
    std::memset(all, 0, l.n * DIM * sizeof(float));
    for (int p = l.first_unit() / UNITS; p * PART <= l.highest; p++) {
        for (int i = 0; i < l.vl * LANES; i++) l.maximum[i] = NEVER, l.total[i] = 0;
        std::memset(part, 0, l.n * DIM * sizeof(float));
        int to = work.last_unit < (p + 1) * UNITS ? work.last_unit : (p + 1) * UNITS;
        walk(m, s, l, work, layer, head, std::max(p * UNITS, l.first_unit()), to);
        for (int i = 0; i < l.n; i++) absorb(maximum[i], total[i], all + i * DIM, l.maximum[i], l.total[i], l.acc[i], DIM);
    }
    for (int i = 0; i < l.n; i++) {
        const Vec factor = splat(1.f / with_sink(m.layer[layer], l.head[i], maximum[i], total[i]));
        for (int d = 0; d < DIM; d += LANES)
            put_result(m, b, mixed, layer, l.row[i], on.to(l.row[i]), l.head[i] * DIM + d, load(all + i * DIM + d) * factor);
    }
}

// Merges the parts of one row, in order of position, into mixed[to].
template <class Lanes, class Rows>
void merge_row(const Model& m, const Step& s, const Scratch<Rows>& b, const Rows& mixed, int layer, int row, int to) {
    constexpr int DIM = Lanes::DIM;
    for (int head = 0; head < m.heads; head++) {
        const int64_t lane = (int64_t)row * m.heads + head;
        alignas(64) float out[DIM] = {};
        float maximum = NEVER, total = 0;
        for (int p = b.first_part(m.layer[layer]); p <= s.positions[row] / PART; p++) {
            int64_t cell = p * b.lanes + lane;
            absorb(maximum, total, out, b.maximum[cell], b.total[cell], b.part + cell * DIM, DIM);
        }
        const Vec factor = splat(1.f / with_sink(m.layer[layer], head, maximum, total));
        for (int d = 0; d < DIM; d += LANES) put_result(m, b, mixed, layer, row, to, head * DIM + d, load(out + d) * factor);
    }
}

template <class Lanes, class Rows>
void attention(const Model& m, const Step& s, const Scratch<Rows>& b, bool wide, const Rows& mixed, const Onward& on, int layer,
               int id, int of, int& next, Barrier& barrier) {
    const int kv_heads = m.layer[layer].kv_heads, group = m.heads / kv_heads, lanes = (s.works == 1 ? s.work[0].rows : on.rows) * group;
    const int begin = wide ? 0 : b.first_part(m.layer[layer]), parts = wide ? 1 : b.parts - begin;
    int most = wide ? Even(lanes, kv_heads, of, Lanes::MOST, Lanes::ONCE).each : Lanes::MOST;
    const auto each = [&] { return s.works == 1 ? most : std::max(most / group, 1) * group; };
    const auto slices = [&] { return (lanes + each() - 1) / each(); };
    while (!wide && most > LANES && kv_heads * parts * slices() < 2 * of) most -= LANES;  // so that every thread gets tasks
    const int tasks = kv_heads * parts * slices();
    for (;;) {
        int task;
#pragma omp atomic capture
        task = next++;
        if (task >= tasks) break;
        const int head = task % kv_heads, rest = tasks / kv_heads - 1 - task / kv_heads;  // the longest tasks come first
        const int first = rest % slices() * each(), last = std::min(first + each(), lanes);
        if (wide) attend_lanes<Lanes>(m, s, b, mixed, on, layer, head, first, last);
        else attend_part<Lanes>(m, s, b, on, layer, head, begin + rest / slices(), first, last);
    }
    barrier.wait(of);
    if (wide) return;
    rows_of(on.rows, id, of, [&](int i) { merge_row<Lanes>(m, s, b, mixed, layer, on.from(i), i); });
    barrier.wait(of);
}

}  // namespace
