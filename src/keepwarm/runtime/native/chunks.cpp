// What chunks need beside forward passes. This code puts their KV in place and rotates its keys (`runtime.blend.rope`),
// sums the attention that each of their tokens gets (`runtime.blend.scatter.Watch`), and carries the changes of recomputed
// tokens over to others (`runtime.blend.carry`). The same exists in torch, for machines without a compiler.

#include <omp.h>
#include <algorithm>
#include <vector>

#include "guarded.h"
#include "vectors.h"

namespace {

constexpr int ROWS = 4;    // tokens that are multiplied at once
constexpr int PART = 128;  // positions whose attention one thread computes in turn; a multiple of ROWS
constexpr float NEVER = -1e30f;

}  // namespace

extern "C" {

struct Plane {  // the keys or the values of one layer
    int64_t from, to, from_head, to_head;  // two addresses, and the distances in bytes from head to head
    const float *cosine, *sine;            // of the pairs' angles; if null, rows are only copied
    int32_t heads, dim, pairs, padding;
};

// Two ranges, of the recomputed (known) positions and of the rest. `smooth` is where the window's smoothing matrix begins,
// `[1 + known, known]`.
struct Window { int64_t known, known_end, rest, rest_end, smooth; };

struct Near { int32_t known[2]; float share[2]; };  // for one position: two known ones of its window, and their weights

struct Carry {
    const int64_t* planes;    // addresses of each layer's keys and values in turn, `[heads, positions, dim]`
    const void* before;       // what stood at known positions before, `[planes, heads, known, dim]`
    const int64_t* known;     // known positions, window after window
    const int64_t* rest;      // the other positions, window after window
    const Window* windows;
    const float* smooth;      // the windows' smoothing matrices
    const Near* near;         // one for each position of `rest`
    const float* cosine;      // by position from `first` on, `[positions, pairs]`; if null, keys are not rotated
    const float* sine;
    int64_t first, head_bytes;
    int32_t count, heads, dim, pairs, changed, windowed, itemsize;  // `count` planes, `changed` known, `windowed` windows
};

struct Seen {
    const void* keys;          // `[kv_heads, total, dim]`, with `key_head` from head to head
    const float* queries;      // `[rows, heads, dim]`, with `query_row` from row to row
    const int64_t* positions;  // of the rows
    float* mass;               // `[total]`; sums are added to it
    int64_t key_head, query_row, total;  // two distances in elements; the number of positions
    int32_t rows, heads, kv_heads, dim, itemsize;
    float scale;               // of scores, times the binary logarithm of e
};

}  // extern "C"

namespace {

// Sets scores `[ROWS, COUNT * LANES]` of keys `[ROWS, dim]` with queries `[dim, lanes]`. Scores and queries have `lanes`
// numbers from row to row.
template <int COUNT>
void score(const float* keys, const float* queries, int dim, int lanes, float* scores) {
    Vec sums[ROWS][COUNT] = {};
    for (int d = 0; d < dim; d++)
        for (int row = 0; row < ROWS; row++)
            for (int i = 0; i < COUNT; i++)
                sums[row][i] = fma(splat(keys[row * dim + d]), load(queries + d * lanes + i * LANES), sums[row][i]);
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < COUNT; i++) store(scores + row * lanes + i * LANES, sums[row][i]);
}

// Sets the scores of positions [from, to) under one key head, `[to - from, lanes]`. A lane is a row with one of the head's
// queries. `scores` has room for a multiple of ROWS positions, and `wide` for ROWS keys.
template <typename T>
void score_part(const Seen& s, int head, int64_t from, int64_t to, const float* queries, const int32_t* last, int lanes,
                float* scores, float* wide) {
    const int32_t lowest = *std::min_element(last, last + lanes);
    for (int64_t at = from; at < to; at += ROWS, scores += ROWS * lanes) {
        for (int64_t row = 0; row < ROWS; row++) {  // after the last position its key is repeated
            const T* key = (const T*)s.keys + head * s.key_head + std::min(at + row, to - 1) * s.dim;
            for (int d = 0; d < s.dim; d += LANES) store(wide + row * s.dim + d, load(key + d));
        }
        int lane = 0;
        for (; WHOLE && lane + 3 * LANES <= lanes; lane += 3 * LANES) score<3>(wide, queries + lane, s.dim, lanes, scores + lane);
        for (; WHOLE && lane + 2 * LANES <= lanes; lane += 2 * LANES) score<2>(wide, queries + lane, s.dim, lanes, scores + lane);
        for (; lane < lanes; lane += LANES) score<1>(wide, queries + lane, s.dim, lanes, scores + lane);
        for (int64_t row = 0; at + ROWS > lowest && row < ROWS; row++)
            for (lane = 0; lane < lanes; lane++)
                if (at + row > last[lane]) scores[row * lanes + lane] = NEVER;
    }
}

template <typename T>
void see(const Seen& s, int threads) {
    const int group = s.heads / s.kv_heads, lanes = (s.rows * group + LANES - 1) / LANES * LANES;
    const int64_t parts = (s.total + PART - 1) / PART, each = (int64_t)s.kv_heads * lanes;
    std::vector<float> queries(each * s.dim), scores(s.kv_heads * parts * PART * lanes), most(parts * each), sums(parts * each);
    std::vector<float> top(each, NEVER), whole(each), wide((int64_t)threads * ROWS * s.dim);
    std::vector<int32_t> last(lanes, INT32_MAX);  // padding lanes see all; `whole` gives them weight 0
    for (int i = 0; i < s.rows * group; i++) {
        last[i] = s.positions[i / group];
        for (int head = 0; head < s.kv_heads; head++)
            for (int d = 0; d < s.dim; d++)
                queries[(head * s.dim + d) * lanes + i] =
                    s.queries[i / group * s.query_row + (head * group + i % group) * s.dim + d] * s.scale;
    }
#pragma omp parallel num_threads(threads)
    {
        auto scored = [&](int64_t part, int head) { return &scores[(head * parts + part) * PART * lanes]; };
        auto many = [&](int64_t part) { return std::min<int64_t>(s.total - part * PART, PART); };
#pragma omp for schedule(static)
        for (int64_t part = 0; part < parts; part++)
            for (int head = 0; head < s.kv_heads; head++) {
                const int64_t from = part * PART;
                float* at = scored(part, head);
                score_part<T>(s, head, from, from + many(part), &queries[head * s.dim * lanes], last.data(), lanes, at,
                              &wide[(int64_t)omp_get_thread_num() * ROWS * s.dim]);
                for (int lane = 0; lane < lanes; lane += LANES) {
                    Vec high = splat(NEVER);
                    for (int64_t t = 0; t < many(part); t++) high = max(high, load(at + t * lanes + lane));
                    store(&most[part * each + head * lanes + lane], high);
                }
            }
#pragma omp single
        for (int64_t part = 0; part < parts; part++)
            for (int64_t lane = 0; lane < each; lane++) top[lane] = std::max(top[lane], most[part * each + lane]);
#pragma omp for schedule(static)
        for (int64_t part = 0; part < parts; part++)
            for (int head = 0; head < s.kv_heads; head++)
                for (int lane = 0; lane < lanes; lane += LANES) {
                    const Vec high = load(&top[head * lanes + lane]);
                    Vec total{};
                    for (int64_t t = 0; t < many(part); t++) {
                        float* at = scored(part, head) + t * lanes + lane;
                        const Vec score = load(at), weight = pick(score > splat(NEVER), exp2v(score - high), Vec{});
                        store(at, weight), total += weight;
                    }
                    store(&sums[part * each + head * lanes + lane], total);
                }
#pragma omp single
        for (int64_t lane = 0; lane < each; lane++) {
            for (int64_t part = 0; part < parts; part++) whole[lane] += sums[part * each + lane];
            whole[lane] = lane % lanes < s.rows * group ? 1 / whole[lane] : 0;
        }
#pragma omp for schedule(static)
        for (int64_t part = 0; part < parts; part++)
            for (int64_t t = 0; t < many(part); t++) {
                Vec total{};
                for (int head = 0; head < s.kv_heads; head++)
                    for (int lane = 0; lane < lanes; lane += LANES)
                        total = fma(load(scored(part, head) + t * lanes + lane), load(&whole[head * lanes + lane]), total);
                s.mass[part * PART + t] += sum(total);
            }
    }
}

// Rotates a row. Dims d and d + pairs are a pair; later dims stay as they are. `back` rotates the other way round.
void turn(float* row, const float* cosine, const float* sine, int pairs, bool back = false) {
    const float direction = back ? -1 : 1;
    for (int pair = 0; pair < pairs; pair++) {
        const float a = row[pair], b = row[pair + pairs], s = direction * sine[pair];
        row[pair] = a * cosine[pair] - b * s;
        row[pair + pairs] = b * cosine[pair] + a * s;
    }
}

// Copies a head's rows and rotates them. `wide` has room for one row.
template <typename T>
void move_head(const Plane& p, int64_t rows, const T* from, T* to, float* wide) {
    if (!p.cosine) {
        memcpy(to, from, rows * p.dim * sizeof(T));
        return;
    }
    for (int64_t row = 0; row < rows; row++, from += p.dim, to += p.dim) {
        for (int d = 0; d < p.dim; d += LANES) store(&wide[d], load(from + d));
        turn(wide, p.cosine, p.sine, p.pairs);
        for (int d = 0; d < p.dim; d += LANES) store(to + d, load(&wide[d]));
    }
}

// Sets `sums[row, 0 .. COUNT * LANES)` to the rows' weights times `from`. Both have `dim` numbers from row to row.
template <int COUNT>
void product(const float* from, int64_t dim, const float* const* weights, int64_t known, float* sums) {
    Vec sum[ROWS][COUNT] = {};
    for (int64_t k = 0; k < known; k++, from += dim)
        for (int at = 0; at < COUNT; at++) {
            const Vec change = load(from + at * LANES);
            for (int row = 0; row < ROWS; row++) sum[row][at] = fma(splat(weights[row][k]), change, sum[row][at]);
        }
    for (int row = 0; row < ROWS; row++)
        for (int at = 0; at < COUNT; at++) store(sums + row * dim + at * LANES, sum[row][at]);
}

// Smooths a window's changes into `[1 + known, dim]`. It writes a multiple of ROWS rows; those after the last are unused.
void smoothed(const float* smooth, int64_t known, const float* changes, int64_t dim, float* into) {
    for (int64_t row = 0; row <= known; row += ROWS, into += ROWS * dim) {
        const float* weights[ROWS];
        for (int64_t i = 0; i < ROWS; i++) weights[i] = smooth + std::min(row + i, known) * known;
        int64_t d = 0;
        for (; WHOLE && d + 4 * LANES <= dim; d += 4 * LANES) product<4>(changes + d, dim, weights, known, into + d);
        for (; d < dim; d += LANES) product<1>(changes + d, dim, weights, known, into + d);
    }
}

// Returns how many floats `carry_head` needs.
int64_t carry_room(const Carry& c) { return (2 * c.changed + 1 + ROWS + 1) * (int64_t)c.dim; }

template <typename T>
void carry_head(const Carry& c, T* rows, const T* before, bool turned, float* room) {
    const int64_t dim = c.dim;
    float *const delta = room, *const smooth = delta + c.changed * dim, *const change = smooth + (c.changed + 1 + ROWS) * dim;
    for (int64_t at = 0; at < c.changed; at++) {
        float* to = &delta[at * dim];
        const T* now = rows + c.known[at] * dim;
        for (int64_t d = 0; d < dim; d += LANES) store(to + d, load(now + d) - load(before + at * dim + d));
        const int64_t angles = (c.known[at] - c.first) * c.pairs;
        if (turned) turn(to, c.cosine + angles, c.sine + angles, c.pairs, true);
    }
    for (const Window* window = c.windows; window < c.windows + c.windowed; window++) {
        smoothed(c.smooth + window->smooth, window->known_end - window->known, &delta[window->known * dim], dim, &smooth[0]);
        for (int64_t rest = window->rest; rest < window->rest_end; rest++) {
            const Near& near = c.near[rest];
            const float *common = &smooth[0], *left = common + (1 + near.known[0]) * dim;
            const float* right = common + (1 + near.known[1]) * dim;
            const Vec share[2] = {splat(near.share[0]), splat(near.share[1])};
            for (int64_t d = 0; d < dim; d += LANES)
                store(&change[d], fma(share[1], load(right + d), fma(share[0], load(left + d), load(common + d))));
            const int64_t angles = (c.rest[rest] - c.first) * c.pairs;
            if (turned) turn(&change[0], c.cosine + angles, c.sine + angles, c.pairs);
            T* to = rows + c.rest[rest] * dim;
            for (int64_t d = 0; d < dim; d += LANES) store(to + d, load(to + d) + load(&change[d]));
        }
    }
}

}  // namespace

extern "C" {

// All of these return 0, or NO_MEMORY, and then nothing is changed.

// Puts `rows` tokens in place. `itemsize` is 2 (bfloat16) or 4 (float32). Dims are a multiple of 16.
int keepwarm_move(const Plane* planes, int64_t count, int64_t rows, int itemsize, int threads) {
    return guarded([&] {
        int64_t dim = 0;
        for (int64_t plane = 0; plane < count; plane++) dim = std::max<int64_t>(dim, planes[plane].dim);
        std::vector<float> wide(threads * dim);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
        for (int64_t plane = 0; plane < count; plane++) {
            const Plane& p = planes[plane];
            float* mine = wide.data() + omp_get_thread_num() * dim;
            for (int64_t head = 0; head < p.heads; head++) {
                const char* from = (const char*)p.from + head * p.from_head;
                char* to = (char*)p.to + head * p.to_head;
                if (itemsize == 2) move_head(p, rows, (const bf16*)from, (bf16*)to, mine);
                else move_head(p, rows, (const float*)from, (float*)to, mine);
            }
        }
        return 0;
    });
}

// Adds to each position's mass the attention that it gets, summed over all rows and heads. Dims are a multiple of 16.
int keepwarm_see(const Seen* seen, int threads) {
    return guarded([&] {
        if (seen->itemsize == 2) see<bf16>(*seen, threads);
        else see<float>(*seen, threads);
        return 0;
    });
}

int keepwarm_carry(const Carry* carry, int threads) {
    const Carry& c = *carry;
    return guarded([&] {
        std::vector<float> room(threads * carry_room(c));
#pragma omp parallel for num_threads(threads) schedule(dynamic)
        for (int64_t part = 0; part < (int64_t)c.count * c.heads; part++) {
            const int64_t plane = part / c.heads, head = part % c.heads;
            char* rows = (char*)c.planes[plane] + head * c.head_bytes;
            const char* before = (const char*)c.before + part * c.changed * c.dim * c.itemsize;
            const bool turned = plane % 2 == 0 && c.cosine;
            float* mine = room.data() + omp_get_thread_num() * carry_room(c);
            if (c.itemsize == 2) carry_head(c, (bf16*)rows, (const bf16*)before, turned, mine);
            else carry_head(c, (float*)rows, (const float*)before, turned, mine);
        }
        return 0;
    });
}

}  // extern "C"
