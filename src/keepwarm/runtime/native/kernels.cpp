// The lean decoder's forward pass: one call runs every layer for the next tokens of one or of many sequences.
//
// Every row's arithmetic depends on that row and on the keys and values before it, and on nothing else: not on how many
// rows run beside it, not on who shares its prefix, not on the number of threads. That is what keeps batched answers
// equal to solo ones. It holds because each sum below has one fixed order:
//   - a product with a weight adds over the inner dimension, element by element;
//   - attention walks the positions in units of 64 by online softmax (FlashAttention, arXiv:2205.14135, algorithm 1) and
//     merges parts of 512 by log-sum-exp (Hydragen, arXiv:2402.05099, eq. 5), both counted from position 0, in order.
//
// Weights are packed [out / 16][in][16]; activations are float32. Keys and values are read in place, page by page, wherever
// they lie: see Region and Work.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
#include <vector>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;
constexpr int PAGE = 8;     // positions
constexpr int UNIT = 64;    // positions; eight pages
constexpr int PART = 512;   // positions; eight units
constexpr int BLOCK = 3;    // vectors of query lanes handled at once
constexpr int WIDE = 64;    // rows; beyond, tasks of attention are rows instead of parts. The sums stay the same
constexpr float NEVER = -1e30f;

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t VecI __attribute__((vector_size(LANES * 4)));
typedef uint16_t VecH __attribute__((vector_size(LANES * 2)));
typedef uint32_t VecU __attribute__((vector_size(LANES * 4)));

struct bf16 { uint16_t bits; };

inline Vec splat(float x) { return x - Vec{}; }

inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;  // contracted by -ffp-contract=fast
#endif
}

inline Vec load(const float* p) { Vec v; std::memcpy(&v, p, sizeof v); return v; }
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
inline Vec load(const bf16* p) {
    VecH h;
    std::memcpy(&h, p, sizeof h);
    return (Vec)(__builtin_convertvector(h, VecU) << 16);
}
inline float widen(float x) { return x; }
inline float widen(bf16 x) { uint32_t bits = (uint32_t)x.bits << 16; float f; std::memcpy(&f, &bits, 4); return f; }
inline void narrow(float x, float* p) { *p = x; }
inline void narrow(float x, bf16* p) {  // round to nearest even, as torch does
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    p->bits = (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float sum(Vec v) {
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) v[i] += v[i + width];
    return v[0];
}

inline Vec max(Vec a, Vec b) {
#if defined(__AVX512F__)
    return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

// 2^x with a relative error below 3e-7: Cody-Waite reduction, then the exponential series to the seventh power.
inline Vec exp2v(Vec x) {
    x = max(x, splat(-126.f));
    x = x > splat(126.f) ? splat(126.f) : x;
    VecI n = __builtin_convertvector(x + (x < Vec{} ? splat(-0.5f) : splat(0.5f)), VecI);
    Vec f = (x - __builtin_convertvector(n, Vec)) * splat(0.693147180559945f);
    Vec p = splat(1.f / 5040);
    p = fma(p, f, splat(1.f / 720));
    p = fma(p, f, splat(1.f / 120));
    p = fma(p, f, splat(1.f / 24));
    p = fma(p, f, splat(1.f / 6));
    p = fma(p, f, splat(0.5f));
    p = fma(p, f, splat(1.f));
    p = fma(p, f, splat(1.f));
    return (Vec)((VecI)p + (n << 23));
}

}  // namespace

extern "C" {

struct Layer {  // weights are packed, in the model's dtype; norms and biases are float32; null where the model has none
    const float *norm1, *bias, *q_norm, *k_norm, *norm2;
    const void *qkv, *o, *gate, *up, *down;
};

struct Model {
    int32_t layers, hidden, heads, kv_heads, dim, inner, vocab, is_bf16;
    float epsilon, scale;
    const void *embedding, *head;        // [vocab, hidden] as the model has it; packed
    const float *norm, *cosine, *sine;   // the last two [positions, dim / 2]
    const Layer* layer;
};

struct Region {  // memory that holds keys and values: rows of `dim` elements, one after another
    char* base;            // layer 0, keys, head 0, row 0
    int64_t plane, head;   // bytes from keys to values to the next layer's keys; from one head to the next
};

struct Work {  // rows of the step that read the same pages of positions [first_unit * 64, last_unit * 64)
    int32_t first_unit, last_unit, row, rows;  // `row` is an index into Step::members
    int64_t pages;                             // index into Step::pages of the first unit's first page
};

struct Step {
    int32_t rows, works, outputs, threads;
    int32_t first, last;                // layers to run: a step may be run in several calls, with the same scratch
    const int32_t *tokens, *positions;  // [rows]
    const int64_t* slots;               // [rows]: region << 32 | row, where the new key and value go
    const Region* regions;
    const int64_t* pages;               // region << 32 | first row, per page
    const Work* work;                   // ordered: a row's works by position
    const int32_t* members;
    const int32_t* wanted;              // [outputs]: rows whose logits are asked for; none: no head is run
    float* scratch;
    float* logits;                      // [outputs, vocab]
};

}  // extern "C"

namespace {

struct Scratch {
    float *x, *h, *q, *inner, *up, *maximum, *total, *part;
    int64_t lanes, size;
    int32_t parts;
    bool wide;  // one sequence with many rows: tasks are rows, and no part's result is kept
    Scratch(const Model& m, const Step& s) {
        int32_t last = 0;
        for (int i = 0; i < s.rows; i++) last = s.positions[i] > last ? s.positions[i] : last;
        parts = last / PART + 1;
        wide = s.works == 1 && s.rows > WIDE;
        lanes = (int64_t)s.rows * m.heads;
        float* p = s.scratch;
        auto take = [&](int64_t n) { float* at = p; p += (n + 15) / 16 * 16; return at; };
        int64_t most = m.heads * m.dim > m.hidden ? m.heads * m.dim : m.hidden;
        x = take((int64_t)s.rows * m.hidden);
        h = take((int64_t)s.rows * most);
        q = take((int64_t)s.rows * (m.heads + 2 * m.kv_heads) * m.dim);
        inner = take((int64_t)s.rows * m.inner);
        up = take((int64_t)s.rows * m.inner);
        maximum = take(wide ? 0 : parts * lanes);
        total = take(wide ? 0 : parts * lanes);
        part = take(wide ? 0 : parts * lanes * m.dim);
        size = p - s.scratch;
    }
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
        for (int v = 0; v < NV; v++) {
            float* out = y + m * ldy + v * LANES;
            Vec value = acc[m][v];
            if (columns < (v + 1) * LANES) {  // the last columns of an odd width
                for (int n = 0; n < columns - v * LANES; n++)
                    out[n] = value[n] + (bias ? bias[v * LANES + n] : 0.f) + (add ? out[n] : 0.f);
                continue;
            }
            if (bias) value += load(bias + v * LANES);
            if (add) value += load(out);
            store(out, value);
        }
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

// The columns of a product that thread `id` of `of` computes: whole panels of 32.
struct Share {
    int from, to;
    Share(int n, int id, int of) {
        int panels = (n + 2 * LANES - 1) / (2 * LANES);
        from = (int64_t)panels * id / of * 2 * LANES, to = (int64_t)panels * (id + 1) / of * 2 * LANES;
        if (to > n) to = n;
    }
};

template <class T>
void linear(const float* x, int64_t ldx, int m, const void* weight, int k, int n, float* y, int64_t ldy, int id, int of,
            const float* bias = nullptr, bool add = false) {
    static thread_local std::vector<float> wide;
    const Share share(n, id, of);
    for (int c = share.from; c < share.to; c += 2 * LANES) {
        const T* w = (const T*)weight + (int64_t)c * k;
        const float* b = bias ? bias + c : nullptr;
        const int columns = share.to - c;
        if (m > 24 && sizeof(T) < sizeof(float)) {  // widened once for many rows; the values are the same
            const int64_t n = (int64_t)k * (columns > LANES ? 2 * LANES : LANES);
            wide.resize(n);
            for (int64_t i = 0; i < n; i += LANES) store(wide.data() + i, load(w + i));
            if (columns > LANES) panel<float, 2>(x, ldx, m, wide.data(), k, y + c, ldy, b, add, columns);
            else panel<float, 1>(x, ldx, m, wide.data(), k, y + c, ldy, b, add, columns);
        } else if (columns > LANES) panel<T, 2>(x, ldx, m, w, k, y + c, ldy, b, add, columns);
        else panel<T, 1>(x, ldx, m, w, k, y + c, ldy, b, add, columns);
    }
}

void rms_norm(const float* x, const float* weight, int n, float epsilon, float* y) {
    Vec square{};
    for (int i = 0; i < n; i += LANES) { Vec v = load(x + i); square = fma(v, v, square); }
    Vec factor = splat(1.f / std::sqrt(sum(square) / n + epsilon));
    for (int i = 0; i < n; i += LANES) store(y + i, load(x + i) * factor * load(weight + i));
}

// Rotates one head in place: halves are pairs, as transformers' rotate_half has it.
inline void rotate(float* x, const float* c, const float* s, int dim) {
    for (int i = 0; i < dim / 2; i++) {
        float a = x[i], b = x[i + dim / 2];
        x[i] = std::fma(a, c[i], -b * s[i]);
        x[i + dim / 2] = std::fma(b, c[i], a * s[i]);
    }
}

template <class T>
inline T* address(const Step& s, const Model& m, int64_t place, int layer, int kv, int head) {
    const Region& r = s.regions[place >> 32];
    char* at = r.base + (2 * layer + kv) * r.plane + head * r.head + (place & 0xffffffff) * m.dim * (int64_t)sizeof(T);
    return (T*)at;
}

// Norms and rotates a row's queries and keys; writes its key and value where they belong.
template <class T>
void place_row(const Model& m, const Step& s, const Scratch& b, const Layer& w, int layer, int row) {
    float* q = b.q + (int64_t)row * (m.heads + 2 * m.kv_heads) * m.dim;
    const float* c = m.cosine + (int64_t)s.positions[row] * (m.dim / 2);
    const float* n = m.sine + (int64_t)s.positions[row] * (m.dim / 2);
    for (int head = 0; head < m.heads + m.kv_heads; head++) {
        float* x = q + head * m.dim;
        const float* norm = head < m.heads ? w.q_norm : w.k_norm;
        if (norm) rms_norm(x, norm, m.dim, m.epsilon, x);
        rotate(x, c, n, m.dim);
    }
    for (int kv = 0; kv < 2; kv++)
        for (int head = 0; head < m.kv_heads; head++) {
            const float* from = q + (m.heads + kv * m.kv_heads + head) * m.dim;
            T* to = address<T>(s, m, s.slots[row], layer, kv, head);
            for (int i = 0; i < m.dim; i++) narrow(from[i], to + i);
        }
}

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

// Up to BLOCK vectors of query lanes of one key head: a lane is a row of the step and one of the head's query heads.
template <int DV>
struct Lanes {
    static constexpr int DIM = DV * LANES, MOST = BLOCK * LANES;
    alignas(64) float q[DIM * MOST];
    alignas(64) float maximum[MOST], total[MOST];
    alignas(64) int32_t where[MOST];
    float* acc[MOST + 8];  // null behind the last lane
    int row[MOST], head[MOST];
    int n, vl;
    int32_t lowest, highest;

    Lanes(const Model& m, const Step& s, const Scratch& b, const int32_t* rows, int first, int last, int kv_head) : acc{} {
        const int group = m.heads / m.kv_heads, width = (m.heads + 2 * m.kv_heads) * DIM;
        n = last - first < MOST ? last - first : MOST;
        vl = (n + LANES - 1) / LANES;
        lowest = INT32_MAX, highest = -1;
        for (int i = 0; i < vl * LANES; i++) {
            where[i] = -1, maximum[i] = NEVER, total[i] = 0;
            if (i >= n) {
                for (int d = 0; d < DIM; d++) q[d * vl * LANES + i] = 0;
                continue;
            }
            row[i] = rows[(first + i) / group], head[i] = kv_head * group + (first + i) % group;
            where[i] = s.positions[row[i]];
            lowest = where[i] < lowest ? where[i] : lowest;
            highest = where[i] > highest ? where[i] : highest;
            const float* from = b.q + (int64_t)row[i] * width + head[i] * DIM;
            for (int d = 0; d < DIM; d++) q[d * vl * LANES + i] = from[d] * m.scale;
        }
    }
};

// Attends to the units [from, to) of a work's pages, going on from the lanes' maximum, total and acc.
template <class T, int DV>
void walk(const Model& m, const Step& s, Lanes<DV>& l, const Work& work, int layer, int head, int from, int to) {
    constexpr int DIM = DV * LANES;
    alignas(64) float wide[2][UNIT * DIM];
    VecI position[BLOCK];
    Vec maximum[BLOCK], total[BLOCK];
    for (int v = 0; v < l.vl; v++) {
        std::memcpy(&position[v], l.where + v * LANES, sizeof(VecI));
        maximum[v] = load(l.maximum + v * LANES), total[v] = load(l.total + v * LANES);
    }
    for (int unit = from; unit < to; unit++) {
        int first = unit * UNIT, count = l.highest + 1 - first < UNIT ? l.highest + 1 - first : UNIT;
        if (count <= 0) break;
        const float *keys[UNIT / PAGE], *values[UNIT / PAGE];
        const char* ahead[2 * UNIT / PAGE];
        const int64_t* pages = s.pages + work.pages + (int64_t)(unit - work.first_unit) * (UNIT / PAGE);
        for (int p = 0; p < UNIT / PAGE; p++)
            for (int kv = 0; kv < 2; kv++)
                ahead[kv * (UNIT / PAGE) + p] =
                    (const char*)address<T>(s, m, pages[unit + 1 < work.last_unit ? UNIT / PAGE + p : 0], layer, kv, head);
        for (int p = 0; p * PAGE < count; p++) {
            int64_t place = pages[p];
            keys[p] = unit_rows(address<T>(s, m, place, layer, 0, head), PAGE * DIM, wide[0] + p * PAGE * DIM);
            values[p] = unit_rows(address<T>(s, m, place, layer, 1, head), PAGE * DIM, wide[1] + p * PAGE * DIM);
        }
        bool masked = first + count - 1 > l.lowest;
        switch (l.vl) {
            case 1: attend<1, DV>(l.q, keys, values, ahead, DIM * sizeof(T), count, first, position, masked, maximum, total, l.acc); break;
            case 2: attend<2, DV>(l.q, keys, values, ahead, DIM * sizeof(T), count, first, position, masked, maximum, total, l.acc); break;
            default: attend<3, DV>(l.q, keys, values, ahead, DIM * sizeof(T), count, first, position, masked, maximum, total, l.acc);
        }
    }
    for (int v = 0; v < l.vl; v++) store(l.maximum + v * LANES, maximum[v]), store(l.total + v * LANES, total[v]);
}

// Merges one part's softmax into a running one by log-sum-exp.
inline void absorb(float& maximum, float& total, float* acc, float m, float t, const float* part, int dim) {
    float top = std::fmax(maximum, m), a = std::exp2(maximum - top), b = std::exp2(m - top);
    total = std::fma(b, t, a * total);
    maximum = top;
    for (int d = 0; d < dim; d += LANES) store(acc + d, fma(splat(b), load(part + d), splat(a) * load(acc + d)));
}

// A task of a step with few rows: what the rows read in one part of the positions, for one key head.
template <class T, int DV>
void attend_part(const Model& m, const Step& s, const Scratch& b, int layer, int head, int part) {
    constexpr int DIM = DV * LANES, UNITS = PART / UNIT;
    for (int i = 0; i < s.works; i++) {
        const Work& work = s.work[i];
        int from = work.first_unit > part * UNITS ? work.first_unit : part * UNITS;
        int to = work.last_unit < (part + 1) * UNITS ? work.last_unit : (part + 1) * UNITS;
        if (from >= to) continue;
        const int lanes = work.rows * (m.heads / m.kv_heads);
        for (int first = 0; first < lanes; first += Lanes<DV>::MOST) {
            Lanes<DV> l(m, s, b, s.members + work.row, first, lanes, head);
            for (int i = 0; i < l.n; i++) {
                int64_t cell = part * b.lanes + (int64_t)l.row[i] * m.heads + l.head[i];
                l.maximum[i] = b.maximum[cell], l.total[i] = b.total[cell], l.acc[i] = b.part + cell * DIM;
            }
            walk<T, DV>(m, s, l, work, layer, head, from, to);
            for (int i = 0; i < l.n; i++) {
                int64_t cell = part * b.lanes + (int64_t)l.row[i] * m.heads + l.head[i];
                b.maximum[cell] = l.maximum[i], b.total[cell] = l.total[i];
            }
        }
    }
}

// A task of a step with many rows of one sequence: some of its lanes, over all positions, for one key head.
template <class T, int DV>
void attend_lanes(const Model& m, const Step& s, const Scratch& b, int layer, int head, int first, int last) {
    constexpr int DIM = DV * LANES, UNITS = PART / UNIT;
    const Work& work = s.work[0];
    Lanes<DV> l(m, s, b, s.members + work.row, first, last, head);
    alignas(64) float part[Lanes<DV>::MOST * DIM], all[Lanes<DV>::MOST * DIM];
    float maximum[Lanes<DV>::MOST], total[Lanes<DV>::MOST];
    for (int i = 0; i < l.n; i++) maximum[i] = NEVER, total[i] = 0, l.acc[i] = part + i * DIM;
    std::memset(all, 0, sizeof all);
    for (int p = 0; p * PART <= l.highest; p++) {
        for (int i = 0; i < l.vl * LANES; i++) l.maximum[i] = NEVER, l.total[i] = 0;
        std::memset(part, 0, sizeof part);
        int to = work.last_unit < (p + 1) * UNITS ? work.last_unit : (p + 1) * UNITS;
        walk<T, DV>(m, s, l, work, layer, head, p * UNITS, to);
        for (int i = 0; i < l.n; i++) absorb(maximum[i], total[i], all + i * DIM, l.maximum[i], l.total[i], l.acc[i], DIM);
    }
    for (int i = 0; i < l.n; i++) {
        float* out = b.h + ((int64_t)l.row[i] * m.heads + l.head[i]) * DIM;
        for (int d = 0; d < DIM; d += LANES) store(out + d, load(all + i * DIM + d) * splat(1.f / total[i]));
    }
}

// Merges the parts of one row, in order of position, into h[row].
void merge_row(const Model& m, const Step& s, const Scratch& b, int row) {
    for (int head = 0; head < m.heads; head++) {
        int64_t lane = (int64_t)row * m.heads + head;
        float maximum = NEVER, total = 0, *out = b.h + lane * m.dim;
        std::memset(out, 0, m.dim * sizeof(float));
        for (int p = 0; p <= s.positions[row] / PART; p++) {
            int64_t cell = p * b.lanes + lane;
            absorb(maximum, total, out, b.maximum[cell], b.total[cell], b.part + cell * m.dim, m.dim);
        }
        for (int d = 0; d < m.dim; d += LANES) store(out + d, load(out + d) * splat(1.f / total));
    }
}

template <class T, int DV>
void attention(const Model& m, const Step& s, const Scratch& b, int layer, int id, int of, int& next) {
    const int lanes = s.work[0].rows * (m.heads / m.kv_heads), blocks = (lanes + Lanes<DV>::MOST - 1) / Lanes<DV>::MOST;
    const int tasks = m.kv_heads * (b.wide ? blocks : b.parts);
    for (;;) {
        int task;
#pragma omp atomic capture
        task = next++;
        if (task >= tasks) break;
        int head = task % m.kv_heads, i = tasks / m.kv_heads - 1 - task / m.kv_heads;  // the longest first
        if (b.wide) {
            const int first = i * Lanes<DV>::MOST;
            attend_lanes<T, DV>(m, s, b, layer, head, first, first + Lanes<DV>::MOST < lanes ? first + Lanes<DV>::MOST : lanes);
        } else {
            attend_part<T, DV>(m, s, b, layer, head, i);
        }
    }
#pragma omp barrier
    if (b.wide) return;
    for (int row = id; row < s.rows; row += of) merge_row(m, s, b, row);
#pragma omp barrier
}

template <class T, int DV>
void forward(const Model& m, const Step& s) {
    const Scratch b(m, s);
    const int width = (m.heads + 2 * m.kv_heads) * m.dim;
    int next = 0;
#pragma omp parallel num_threads(s.threads)
    {
        const int id = omp_get_thread_num(), of = omp_get_num_threads();
        auto norm_rows = [&](const float* weight) {
            for (int row = id; row < s.rows; row += of)
                rms_norm(b.x + (int64_t)row * m.hidden, weight, m.hidden, m.epsilon, b.h + (int64_t)row * m.hidden);
        };
        for (int row = id; row < s.rows && s.first == 0; row += of) {
            const T* from = (const T*)m.embedding + (int64_t)s.tokens[row] * m.hidden;
            for (int i = 0; i < m.hidden; i++) b.x[(int64_t)row * m.hidden + i] = widen(from[i]);
        }
        for (int layer = s.first; layer < s.last; layer++) {
            const Layer& w = m.layer[layer];
            norm_rows(w.norm1);
#pragma omp barrier
            linear<T>(b.h, m.hidden, s.rows, w.qkv, m.hidden, width, b.q, width, id, of, w.bias);
            if (!b.wide) {
                for (int64_t i = id; i < b.parts * b.lanes; i += of) b.maximum[i] = NEVER, b.total[i] = 0;
                for (int p = id; p < b.parts; p += of)
                    std::memset(b.part + p * b.lanes * m.dim, 0, b.lanes * m.dim * sizeof(float));
            }
#pragma omp barrier
            if (id == 0) next = 0;
            for (int row = id; row < s.rows; row += of) place_row<T>(m, s, b, w, layer, row);
#pragma omp barrier
            attention<T, DV>(m, s, b, layer, id, of, next);
            linear<T>(b.h, m.heads * m.dim, s.rows, w.o, m.heads * m.dim, m.hidden, b.x, m.hidden, id, of, nullptr, true);
#pragma omp barrier
            norm_rows(w.norm2);
#pragma omp barrier
            linear<T>(b.h, m.hidden, s.rows, w.gate, m.hidden, m.inner, b.inner, m.inner, id, of);
            linear<T>(b.h, m.hidden, s.rows, w.up, m.hidden, m.inner, b.up, m.inner, id, of);
            const Share mine(m.inner, id, of);  // the columns that this thread has just written
            for (int row = 0; row < s.rows; row++)
                for (int i = mine.from; i < mine.to; i += LANES) {
                    float* at = b.inner + (int64_t)row * m.inner + i;
                    Vec g = load(at);
                    Vec sigmoid = splat(1.f) / (splat(1.f) + exp2v(g * splat(-1.44269504f)));
                    store(at, g * sigmoid * load(b.up + (int64_t)row * m.inner + i));
                }
#pragma omp barrier
            linear<T>(b.inner, m.inner, s.rows, w.down, m.inner, m.hidden, b.x, m.hidden, id, of, nullptr, true);
#pragma omp barrier
        }
        const int outputs = s.last == m.layers ? s.outputs : 0;
        for (int i = id; i < outputs; i += of)
            rms_norm(b.x + (int64_t)s.wanted[i] * m.hidden, m.norm, m.hidden, m.epsilon, b.h + (int64_t)i * m.hidden);
#pragma omp barrier
        linear<T>(b.h, m.hidden, outputs, m.head, m.hidden, m.vocab, s.logits, m.vocab, id, of);
    }
}

}  // namespace

extern "C" {

// Floats of scratch that a step needs.
int64_t keepwarm_scratch(const Model* m, const Step* s) { return Scratch(*m, *s).size; }

// Copies `rows` rows of every layer and head from one place to another.
void keepwarm_copy(const Model* m, const Region* from, int64_t row, const Region* to, int64_t at, int64_t rows) {
    const int64_t width = (int64_t)m->dim * (m->is_bf16 ? 2 : 4);
    for (int plane = 0; plane < 2 * m->layers; plane++)
        for (int head = 0; head < m->kv_heads; head++)
            std::memcpy(to->base + plane * to->plane + head * to->head + at * width,
                        from->base + plane * from->plane + head * from->head + row * width, rows * width);
}

// Runs a step's layers [first, last), and the head after the last one. 0, or 1 for a head width that this build does not have.
int keepwarm_forward(const Model* m, const Step* s) {
    switch (m->dim / LANES * 2 + (m->is_bf16 ? 1 : 0)) {
        case 2: forward<float, 1>(*m, *s); return 0;
        case 3: forward<bf16, 1>(*m, *s); return 0;
        case 4: forward<float, 2>(*m, *s); return 0;
        case 5: forward<bf16, 2>(*m, *s); return 0;
        case 8: forward<float, 4>(*m, *s); return 0;
        case 9: forward<bf16, 4>(*m, *s); return 0;
        case 16: forward<float, 8>(*m, *s); return 0;
        case 17: forward<bf16, 8>(*m, *s); return 0;
    }
    return 1;
}
}
