// What chunks take beside forward passes: their KV put in place with its keys turned (`runtime.rope`), and what recomputing
// some tokens changed carried over to others (`runtime.carry`). Both are there in torch, too.

#include <vector>

#include "vectors.h"

namespace {

constexpr int ROWS = 4;  // tokens of one product

}  // namespace

extern "C" {

struct Plane {  // keys or values of one layer
    int64_t from, to, from_head, to_head;  // addresses, and bytes from head to head
    const float *cosine, *sine;            // of the pairs' angles; null: rows are only copied
    int32_t heads, dim, pairs, padding;
};

struct Window { int64_t known, known_end, rest, rest_end, weights; };  // ranges of positions; where its weights begin

struct Carry {
    const int64_t* planes;    // addresses: keys and values of each layer in turn, `[heads, positions, dim]`
    const void* before;       // `[planes, heads, known, dim]`
    const int64_t* known;     // positions, window after window
    const int64_t* rest;
    const Window* windows;
    const float* weights;     // of each window `[rest, known]`
    const float* cosine;      // by position from `first` on, `[positions, pairs]`; null: keys are not turned
    const float* sine;
    int64_t first, head_bytes;
    int32_t count, heads, dim, pairs, changed, windowed, itemsize;  // planes ... known positions, windows ...
};

}  // extern "C"

namespace {

// Pairs are dimension d and d + pairs; those behind are left alone. `back`: the other way round.
void turn(float* row, const float* cosine, const float* sine, int pairs, bool back = false) {
    const float direction = back ? -1 : 1;
    for (int pair = 0; pair < pairs; pair++) {
        const float a = row[pair], b = row[pair + pairs], s = direction * sine[pair];
        row[pair] = a * cosine[pair] - b * s;
        row[pair + pairs] = b * cosine[pair] + a * s;
    }
}

template <typename T>
void move_head(const Plane& p, int64_t rows, const T* from, T* to) {
    if (!p.cosine) {
        memcpy(to, from, rows * p.dim * sizeof(T));
        return;
    }
    std::vector<float> wide(p.dim);
    for (int64_t row = 0; row < rows; row++, from += p.dim, to += p.dim) {
        for (int d = 0; d < p.dim; d += LANES) store(&wide[d], load(from + d));
        turn(wide.data(), p.cosine, p.sine, p.pairs);
        for (int d = 0; d < p.dim; d += LANES) store(to + d, load(&wide[d]));
    }
}

// `sums[row, 0 .. COUNT * LANES)` of the rows' weights with what changed, both with `dim` numbers from row to row.
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

template <typename T>
void carry_head(const Carry& c, T* rows, const T* before, bool turned) {
    const int64_t dim = c.dim;
    std::vector<float> delta(c.changed * dim), sums(ROWS * dim);
    for (int64_t at = 0; at < c.changed; at++) {
        float* to = &delta[at * dim];
        const T* now = rows + c.known[at] * dim;
        for (int64_t d = 0; d < dim; d += LANES) store(to + d, load(now + d) - load(before + at * dim + d));
        const int64_t angles = (c.known[at] - c.first) * c.pairs;
        if (turned) turn(to, c.cosine + angles, c.sine + angles, c.pairs, true);
    }
    for (const Window* window = c.windows; window < c.windows + c.windowed; window++) {
        const int64_t known = window->known_end - window->known;
        for (int64_t rest = window->rest; rest < window->rest_end; rest += ROWS) {
            const int64_t many = window->rest_end - rest < ROWS ? window->rest_end - rest : ROWS;
            const float* weights[ROWS];
            for (int64_t row = 0; row < ROWS; row++)  // those beyond the last are computed and not used
                weights[row] = c.weights + window->weights + (rest - window->rest + (row < many ? row : 0)) * known;
            const float* from = &delta[window->known * dim];
            int64_t d = 0;
            for (; d + 4 * LANES <= dim; d += 4 * LANES) product<4>(from + d, dim, weights, known, &sums[d]);
            for (; d < dim; d += LANES) product<1>(from + d, dim, weights, known, &sums[d]);
            for (int64_t row = 0; row < many; row++) {
                const int64_t position = c.rest[rest + row];
                float* sum = &sums[row * dim];
                const int64_t angles = (position - c.first) * c.pairs;
                if (turned) turn(sum, c.cosine + angles, c.sine + angles, c.pairs);
                T* to = rows + position * dim;
                for (int64_t d = 0; d < dim; d += LANES) store(to + d, load(to + d) + load(sum + d));
            }
        }
    }
}

}  // namespace

extern "C" {

// Puts `rows` tokens in place. `itemsize` is 2 (bfloat16) or 4 (float32), dimensions are a multiple of 16.
void keepwarm_move(const Plane* planes, int64_t count, int64_t rows, int itemsize, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t plane = 0; plane < count; plane++) {
        const Plane& p = planes[plane];
        for (int64_t head = 0; head < p.heads; head++) {
            const char* from = (const char*)p.from + head * p.from_head;
            char* to = (char*)p.to + head * p.to_head;
            if (itemsize == 2) move_head(p, rows, (const bf16*)from, (bf16*)to);
            else move_head(p, rows, (const float*)from, (float*)to);
        }
    }
}

void keepwarm_carry(const Carry* carry, int threads) {
    const Carry& c = *carry;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t part = 0; part < (int64_t)c.count * c.heads; part++) {
        const int64_t plane = part / c.heads, head = part % c.heads;
        char* rows = (char*)c.planes[plane] + head * c.head_bytes;
        const char* before = (const char*)c.before + part * c.changed * c.dim * c.itemsize;
        const bool turned = plane % 2 == 0 && c.cosine;
        if (c.itemsize == 2) carry_head(c, (bf16*)rows, (const bf16*)before, turned);
        else carry_head(c, (float*)rows, (const float*)before, turned);
    }
}

}  // extern "C"
