// What a step is given: the model, the rows, and where keys and values lie. The structures of decoder.py and places.py.
#pragma once

#include <algorithm>
#include <atomic>
#include <thread>
#include <type_traits>

#include "codes.h"

namespace {

constexpr int PAGE = 8;     // positions
constexpr int UNIT = 64;    // positions; eight pages
constexpr int PART = 512;   // positions; eight units
constexpr int WIDE = 64;    // rows; beyond, tasks of attention are rows instead of parts. The sums stay the same
constexpr int MOST_EXPERTS = 1024;

template <int N> using Count = std::integral_constant<int, N>;

}  // namespace

extern "C" {

struct Norm {  // float32 [width]; null where there is none
    const float *weight, *bias;
};

// Weights are packed, in the model's dtype; biases are float32. Either is null where the model has none.
struct Mlp {
    const float *gate_bias, *up_bias, *down_bias;
    const void *gate, *up, *down;
    int64_t inner;  // its width; 0: there is none
};

struct Experts {  // of a layer: experts.h
    const void* router;       // [count + gates, hidden], packed by single elements
    const float* router_bias; // [count]
    Mlp all;                  // one expert behind the other; `inner` is one's
    int32_t count, chosen;    // experts, and how many of them a row has; 0: the layer has none
    int32_t over_all;         // their weights are shares of all experts', not of the chosen ones'
    int32_t gates;            // 1: the router's last row gates the layer's own MLP
};

struct Layer {  // with experts, `mlp` is one that every row has beside them
    Norm before, q, k, after, before_mlp, after_mlp;
    const float *qkv_bias, *o_bias;
    const float *cosine, *sine;          // [positions, rotary / 2]; null in a layer that does not rotate
    const float* sinks;                  // [heads], scores (in powers of two) of a position without a value
    const void *qkv, *o;
    Mlp mlp;
    Experts experts;
    int32_t window, unused;              // positions a row attends to, with its own; 0: all
};

enum Activation : int32_t { SILU, GELU_TANH, GELU, RELU, RELU_SQUARED, CLAMPED };

// Facts that a model's code has beside its weights: see decoder.py and families/.
struct Model {
    int32_t layers, hidden, heads, kv_heads, dim, inner, vocab, is_bf16;  // `inner`: the widest MLP's
    int32_t experts, chosen, expert;     // the most of a layer, and the widest one's width; 0: no layer has experts
    int32_t rotary;                      // dims of a head that are rotated, the first ones
    int32_t interleaved;                 // whether neighbours are rotated together, not halves
    int32_t centred;                     // norms subtract the mean (layer norm), or do not (RMS norm)
    int32_t wide;                        // norms of queries and keys run over all heads at once
    int32_t parallel;                    // attention and MLP read the same state of the row
    int32_t activation;
    float epsilon, scale;
    float alpha, limit;                  // of the activation `CLAMPED`
    float embedded, residual, logit;     // what embeddings, each layer's two results and logits are multiplied by
    float score_cap, logit_cap;          // bounds of scores (in powers of two) and logits, by tanh; 0: none
    const void *embedding, *head;        // [vocab, hidden] as the model has it; packed
    Norm norm;
    const Layer* layer;
};

struct Region {  // memory that holds keys and values: rows of `dim` elements, one after another; or one encoded block
    char* base;            // layer 0, keys, head 0, row 0
    int64_t value, layer;  // bytes from keys to values; from one layer to the next
    int64_t head[2];       // from one head's keys to the next head's; of values
    Coding coding;
};

struct Move {  // rows to bring to another place before a layer is attended to: pages that lie in two regions
    int64_t from, to, rows;  // region << 32 | row
};

struct Work {  // rows of the step that read the same pages of positions [first_unit * 64, last_unit * 64)
    int32_t first_unit, last_unit, row, rows;  // `row` is an index into Step::members
    int64_t pages;                             // index into Step::pages of the first unit's first page
};

struct Step {
    int32_t rows, works, outputs, threads;
    int32_t first, last;                // layers to run: a step may be run in several calls, with the same scratch
    int32_t moves;
    int32_t stopped;                    // set: the layer whose keys and values did not come; else `last`
    int32_t places;                     // not 0: the last layer only writes its keys and values
    const int32_t *tokens, *positions;  // [rows]
    const int64_t* slots;               // [rows]: region << 32 | row, where the new key and value go
    const Region* regions;
    const int64_t* pages;               // region << 32 | first row, per page
    const Work* work;                   // ordered: a row's works by position
    const int32_t* members;
    const Move* move;
    const int32_t* wanted;              // [outputs]: rows whose logits are asked for; none: no head is run
    float* scratch;
    float* logits;                      // [outputs, vocab]
    void (*take)(const void* job, int32_t layer);  // a thread's part of bringing a layer's keys and values; or null
    const void* job;
    const int32_t* wrong;               // not 0 as soon as that fails
#if defined(ADAPTERS)
    const struct Adapters* adapters;    // adapters.h: every row has one
#endif
};

}  // extern "C"

namespace {

// Which rows go to which experts. A slot is a row at one of its experts; an expert's slots lie together.
template <class Rows>
struct Routes {
    Rows taken, inner;          // [slots, hidden], normed; [slots, expert], gated
    float *normed, *score;      // [rows, hidden]; [rows, across]
    float *share, *factor;      // what an expert's result is multiplied by: [rows, chosen]; [slots]
    int32_t *expert, *slot;     // [rows, chosen], by falling score: which expert; where
    int32_t *row;               // [slots]
    int32_t *first, *last;      // [experts]: an expert's slots
    int32_t across;             // experts and a gate, in whole pairs of panels
    int64_t slots, own;         // behind the experts' slots, from `own` on, each row has one for the layer's own MLP
    template <class Take>
    void place(const Model& m, int rows, Take take) {
        const int64_t all = (int64_t)rows * m.chosen;
        own = all + std::min<int64_t>(m.experts, all) * (Rows::TOGETHER - 1);
        slots = m.chosen ? own + rows : 0;
        across = (m.experts + 1 + 2 * LANES - 1) / (2 * LANES) * 2 * LANES;
        taken = Rows(m.hidden, take(Rows::size(own, m.hidden)));
        inner = Rows(m.expert, take(Rows::size(own, m.expert)));
        normed = take(m.chosen ? (int64_t)rows * m.hidden : 0);
        score = take(m.chosen ? (int64_t)rows * across : 0);
        share = take(all), factor = take(slots);
        expert = (int32_t*)take(all), slot = (int32_t*)take(all), row = (int32_t*)take(slots);
        first = (int32_t*)take(m.experts), last = (int32_t*)take(m.experts);
    }
};

// What a step computes with. `Rows` is how the operands of products are held: see products.h and tiles.h.
template <class Rows>
struct Scratch {
    Rows h, mixed, inner;  // [rows, hidden], normed; [rows, heads * dim], attended; [rows, inner], gated
    Routes<Rows> routes;
    float *x, *y, *q, *maximum, *total, *part;
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
        q = take((int64_t)s.rows * (m.heads + 2 * m.kv_heads) * m.dim);  // first: callers look at it between layers
        h = Rows(m.hidden, take(Rows::size(s.rows, m.hidden)));
        mixed = Rows(m.heads * m.dim, take(Rows::size(s.rows, m.heads * m.dim)));
        inner = Rows(m.inner, take(Rows::size(s.rows, m.inner)));
        x = take((int64_t)s.rows * m.hidden);
        y = take(m.layer[0].after.weight || m.layer[0].after_mlp.weight ? (int64_t)s.rows * m.hidden : 0);
        maximum = take(wide ? 0 : parts * lanes);
        total = take(wide ? 0 : parts * lanes);
        part = take(wide ? 0 : parts * lanes * m.dim);
        routes.place(m, s.rows, take);
        size = p - s.scratch;
    }
};

// Where a head's rows begin.
inline char* rows_of(const Region& r, int layer, int kv, int head) {
    return r.base + layer * r.layer + kv * r.value + head * r.head[kv];
}

// Where a row lies that is not encoded.
template <class T>
inline T* address(const Step& s, const Model& m, int64_t place, int layer, int kv, int head) {
    return (T*)rows_of(s.regions[place >> 32], layer, kv, head) + (place & 0xffffffff) * m.dim;
}

// Copies or decodes rows of one head to another region.
template <class T>
inline void bring(const Model& m, const Region& from, int64_t row, const Region& to, int64_t at, int64_t rows, int layer,
                  int kv, int head) {
    const char* source = rows_of(from, layer, kv, head);
    T* target = (T*)rows_of(to, layer, kv, head) + at * m.dim;
    if (from.coding.bits) decode_rows(from.coding, source, kv, m.dim, row, rows, target);
    else std::memcpy(target, (const T*)source + row * m.dim, rows * m.dim * sizeof(T));
}

// Stores 16 sums of one row, `columns` of them at most: y (+)= (value + bias) factor, the factor where there is one.
template <bool SCALED>
inline void put_sums(Vec value, float* y, const float* bias, float factor, bool add, int columns) {
    if (columns < LANES) {  // the last columns of an odd width
        for (int n = 0; n < columns; n++) y[n] = (value[n] + (bias ? bias[n] : 0.f)) * (SCALED ? factor : 1.f) + (add ? y[n] : 0.f);
        return;
    }
    if (bias) value += load(bias);
    // Not left to the compiler, which may join a product and a sum in one place and not in another.
    if constexpr (SCALED) value = add ? fma(value, splat(factor), load(y)) : value * splat(factor);
    else if (add) value += load(y);
    store(y, value);
}

// Where the threads of a step wait for each other. Not OpenMP's barrier: its library puts threads to sleep as soon as it
// knows more of them than there are processors, as in a process whose requests come from two threads in turn. Waking
// them, ten times a layer, would cost as much as half a decoding step.
class Barrier {
public:
    void wait(int threads) {
        if (threads == 1) return;
        const int now = round.load(std::memory_order_acquire);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
            arrived.store(0, std::memory_order_relaxed);
            round.store(now + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round.load(std::memory_order_acquire) == now; spins++) {
            if (spins >= SPINS) std::this_thread::yield();  // somebody else may need this processor to get here
#if defined(__x86_64__)
            else __builtin_ia32_pause();
#endif
        }
    }

private:
    static constexpr int SPINS = 4096;
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<int> round{0};
};

// The columns of a product that thread `id` of `of` computes: whole panels of 32.
struct Share {
    int from, to;
    Share(int n, int id, int of) {
        int panels = (n + 2 * LANES - 1) / (2 * LANES);
        from = (int64_t)panels * id / of * 2 * LANES, to = (int64_t)panels * (id + 1) / of * 2 * LANES;
        if (to > n) to = n;
    }
};

// Two panels of 16 columns of packed weights, and where those of the next product stand: they are asked for meanwhile.
template <class W>
struct Panels {
    const W *left, *right, *next_left = nullptr, *next_right = nullptr;
};

}  // namespace
