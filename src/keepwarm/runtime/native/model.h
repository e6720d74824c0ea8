// The structures that a step reads: the model, the rows, and where keys and values are. structures.py and places.py
// have the same ones.
#pragma once

#include <algorithm>
#include <type_traits>

#include "barrier.h"
#include "codes.h"
#include "shares.h"

namespace {

constexpr int PAGE = 8;     // positions
constexpr int UNIT = 64;    // positions; eight pages
constexpr int PART = 512;   // positions; eight units
constexpr int TASK = 48;    // lanes (a row with one of its heads) that a task of attention has, at most; more on matrix units
constexpr int MANY_ROWS = 64;  // parts' results of more rows would need much memory where threads and positions are many
constexpr int MOST_EXPERTS = 1024;

template <int N> using Count = std::integral_constant<int, N>;

}  // namespace

extern "C" {

struct Norm {  // float32 [width]; null if the model has none
    const float *weight, *bias;
};

// Weights are packed, without rounding; biases are float32. A pointer is null if the model has no such part.
struct Mlp {
    const float *gate_bias, *up_bias, *down_bias;
    const void *gate, *up, *down;
    int64_t inner;  // its width; 0 if there is no MLP
};

struct Experts {  // the experts of one layer (experts.h)
    const void* router;       // [count + gates, hidden], packed by single elements
    const float* router_bias; // [count]
    Mlp all;                  // the weights of all experts, one expert after the other; `inner` is one expert's width
    int32_t count, chosen;    // how many experts there are, and how many a row uses; 0 if the layer has none
    int32_t over_all;         // 1 if the softmax runs over all experts' scores; 0 if only over the chosen ones'
    int32_t gates;            // 1 if the router's last row gates the layer's own MLP
    int32_t sigmoid;          // 1 if a share is the sigmoid of a score, and no softmax
    float least, factor;      // of these: they are divided by their sum and `least`, unless it is negative; then multiplied
    const float* correction;  // [count]: is added to the sigmoids for the choice alone; or null
    const float* scale;       // [count]: an expert's share is multiplied by it; or null
    // Where experts stand beside the layer's MLP and have norms of their own (Gemma 4): of the row for the router and for
    // the experts, and of their results and the MLP's, before both are added. Null elsewhere.
    Norm scored, before, after, after_own;
};

struct Convolution {  // a short convolution over each channel's last inputs (recurrent.h)
    const float *weight, *bias;  // [kernel, channels], the oldest input's weights first; [channels]
    int32_t kernel;              // how many inputs it reads, the row's own included; 0 if the layer has none
    int32_t channels;
};

struct Delta {  // a gated delta net, or Mamba-2 (delta.h)
    const float *decay, *step, *norm;  // [heads]: the factor of a row's step, and what is added to it; [dim]
    const float* skip;                 // of Mamba-2, [heads]: the factor of a row's values; its `norm` is [heads * dim]
    int32_t heads, key_heads;          // heads of values, and of queries and keys; 0 if the layer is none
    int32_t dim, key_dim;              // widths of a head
    int32_t tiled, unused;             // 1 if heads of values that share a head of keys lie `key_heads` apart; 0: side by side
};

// What a layer adds to a row from a vector that the row's token has for this layer (Gemma 4's per-layer embeddings):
// x += norm(up (act(gate x) * vector)).
struct PerLayer {
    const void *gate, *up;  // [width, hidden], [hidden, width]; null: the layer has none
    Norm after;
};

// In a layer with experts, `mlp` is the one that every row uses beside them. In a layer with a convolution, `qkv` gives
// its two gates and its inputs, [2 gates + inputs, hidden], and `o` takes its results. In a gated delta net, `qkv` gives
// the convolution's inputs (queries, keys, values), the gate, the step and the decay's rate of each head. In Mamba-2 it
// is the same, but one rate of a head gives both. A layer that `shares` reads keys and values of an earlier layer, whose
// number it has in `kv`; its `qkv` gives queries alone.
struct Layer {
    Norm before, q, k, v, after, before_mlp, after_mlp;
    const float *qkv_bias, *o_bias;
    const float *cosine, *sine;          // [positions, rotary / 2]; null if the layer does not rotate
    const float* factors;                // [positions]: a row's queries are multiplied by it; or null
    const float* sinks;                  // [heads]: the score (as a power of two) of a position that has no value
    const float* gate_bias;
    const void *qkv, *o, *gate;          // `gate`, [heads * dim, hidden]: attention's results are multiplied by its sigmoid
    Mlp mlp;
    Experts experts;
    Convolution convolution;
    Delta delta;
    PerLayer per_layer;
    int32_t kv_heads, dim;               // of its attention: heads of keys, and a head's width
    int32_t rotary;                      // how many dims of a head are rotated; they are the first ones
    int32_t shares;
    int32_t window;                      // how many positions a row attends to, its own included; 0: all
    int32_t kv, state;                   // its number among the layers with keys and values, or with a state; -1: it has none
    float factor;                        // a row is multiplied by it behind the layer
};

enum Activation : int32_t { SILU, GELU_TANH, GELU, RELU, RELU_SQUARED, CLAMPED };

// A model: its weights, and the facts that its code states beside them (decoder.py, families/).
struct Model {
    int32_t layers, hidden, heads, inner, vocab;  // `inner`: the widest MLP's width
    int32_t is_bf16, widens, narrow_tables;       // all of it is bfloat16; only the weights of products are; tables are
    int32_t tied;                                 // the packed head, of bfloat16, is the embedding, too
    int32_t experts, chosen, expert;     // the most in any layer, and the widest expert's width; 0 if no layer has experts
    int32_t per_layer;                   // the width of a token's vectors for the layers; 0: it has none
    int32_t interleaved;                 // 1 if neighbouring dims are rotated together; 0 if halves are
    int32_t centred;                     // 1 if norms subtract the mean (layer norm); 0 if they do not (RMS norm)
    int32_t wide;                        // 1 if norms of queries and keys run over all heads at once
    int32_t parallel;                    // 1 if attention and MLP read the same state of a row
    int32_t activation;
    float epsilon, scale;
    float alpha, limit;                  // constants of the activation `CLAMPED`
    float embedded, residual, logit;     // the factors of embeddings, of each layer's two results, and of logits
    float looked_up, projected, summed;  // factors of a token's vectors: as looked up, as made of its embedding, of both
    float score_cap, logit_cap;          // tanh bounds scores (as powers of two) and logits by these; 0: no bound
    const void *embedding, *head;        // both [vocab, hidden]: the first as the model has it, the second packed
    const float* errors;                 // [vocab], of a head of bfloat16 in two parts (`bound_errors`, twelve.h); else null
    const void *per_layer_table;         // [vocab, layers * per_layer], as `embedding`
    const void *per_layer_projection;    // [layers * per_layer, hidden], packed
    Norm norm, per_layer_norm;           // the second one is [per_layer]
    const Layer* layer;
};

struct Plane {  // keys or values of one layer
    char* base;     // address of head 0, row 0
    int64_t head;   // distance in bytes from one head to the next
};

struct Region {  // memory with keys and values: rows of `dim` elements, one after another; or one encoded block
    char* base;            // address of layer 0's keys, head 0, row 0
    int64_t value, layer;  // distances in bytes: from keys to values, and from one layer to the next
    int64_t head[2];       // distances in bytes from one head to the next: of keys, and of values
    Coding coding;
    const Plane* plane;    // [layers with keys and values][2], where layers differ in shape; null: `base` and distances count
};

struct Move {  // rows to copy before a layer is attended to, so that no page spans two regions
    int64_t from, to, rows;  // region << 32 | row
};

struct Work {  // rows of the step that read the same pages: positions [first_unit * 64, last_unit * 64)
    int32_t first_unit, last_unit, row, rows;  // `row` is an index into Step::members
    int64_t pages;                             // an index into Step::pages: the first unit's first page
};

// Consecutive rows of one sequence, in a model whose layers have a state. Each layer's state before the first row lies at
// `state`, and the one behind the last row is written there.
struct Run {
    int32_t row, rows;
    int32_t keep, keeps;  // indices into Step::keep
    float* const* state;  // [layers with a state]
};

struct Keep {  // a row of a run, and where each layer's state behind it is written, besides
    int64_t row;
    float* const* state;
};

struct Step {
    int32_t rows, works, outputs, threads;
    int32_t first, last;                // the layers to run; a step may be run in several calls, with the same scratch
    int32_t moves;
    int32_t stopped;                    // output: the layer whose keys and values did not come; else `last`
    int32_t places;                     // 1 if the last layer only writes its keys and values
    int32_t largest;                    // 1 if only the largest logit of a row is asked for: others may be minus infinity
    int32_t whole;                      // output: how many of the head's panels were then multiplied whole, over all rows
    const int32_t *tokens, *positions;  // [rows]
    const int64_t* slots;               // [rows]: where a row's key and value are written, region << 32 | row
    const Region* regions;
    const int64_t* pages;               // for each page, region << 32 | first row
    const Work* work;                   // in order of position
    const int32_t* members;
    const Move* move;
    const int32_t* wanted;              // [outputs]: rows whose logits are asked for; without any, no head is run
    float* scratch;
    float* logits;                      // [outputs, vocab]
    void (*take)(const void* job, int32_t layer);  // each thread calls it to help read a layer's keys and values; or null
    const void* job;
    const int32_t* wrong;               // it is not 0 as soon as a read fails
    const Run* run;                     // [runs]: all rows, in order; none if no layer has a state
    const Keep* keep;
    int64_t runs;
#if defined(ADAPTERS)
    const struct Adapters* adapters;    // see adapters.h; every row has one
#endif
};

}  // extern "C"

namespace {

// The assignment of rows to experts. A slot is a pair of a row and one of its experts. An expert's slots are consecutive.
template <class Rows>
struct Routes {
    Rows taken, inner;          // [slots, hidden]: normed rows; [slots, expert]: gated values. An expert's rows begin anywhere.
    float *normed, *score;      // [rows, hidden]; [rows, across]
    float *share, *factor;      // factors of experts' results, by row [rows, chosen] and by slot [slots]
    int32_t *expert, *slot;     // [rows, chosen], by falling score: the expert's number, and its slot
    int32_t *row;               // [slots]
    int32_t *first, *last;      // [experts]: an expert's slots
    int32_t across;             // the number of experts and a gate, rounded up to whole pairs of panels
    int64_t slots, own;         // the slots from `own` on, one per row, are for the layer's own MLP
    template <class Take>
    void place(const Model& m, int rows, Take take) {
        const int64_t all = (int64_t)rows * m.chosen;
        own = all + std::min<int64_t>(m.experts, all) * (Rows::TOGETHER - 1);
        slots = m.chosen ? own + rows : 0;
        across = (m.experts + 1 + 2 * LANES - 1) / (2 * LANES) * 2 * LANES;
        taken = Rows(m.hidden, 0, take(Rows::size(own, m.hidden)));
        inner = Rows(m.expert, 0, take(Rows::size(own, m.expert)));
        normed = take(m.chosen ? (int64_t)rows * m.hidden : 0);
        score = take(m.chosen ? (int64_t)rows * across : 0);
        share = take(all), factor = take(slots);
        expert = (int32_t*)take(all), slot = (int32_t*)take(all), row = (int32_t*)take(slots);
        first = (int32_t*)take(m.experts), last = (int32_t*)take(m.experts);
    }
};

// The width of a layer's first product.
inline int reads(const Model& m, const Layer& w) {
    if (w.state < 0) return (m.heads + (w.shares ? 0 : 2 * w.kv_heads)) * w.dim;
    return w.delta.heads ? w.convolution.channels + w.delta.heads * (w.delta.dim + (w.delta.skip ? 1 : 2)) : 3 * m.hidden;
}

// The width of what the last product of a layer's first part takes.
inline int mixes(const Model& m, const Layer& w) {
    return w.delta.heads ? w.delta.heads * w.delta.dim : w.convolution.kernel ? m.hidden : m.heads * w.dim;
}

// What a layer with `delta` computes of a row before the recurrence: queries, keys and values, [channels]; each head's
// decay, and then its step, [heads]; the product of query and key, [key heads]. The results replace the values.
inline int made_of(const Layer& w) {
    return (w.convolution.channels + 2 * w.delta.heads + w.delta.key_heads + LANES - 1) / LANES * LANES;
}

// Divides the lanes of each key head into tasks of `each` lanes that attend to all positions, so that the threads' work is
// most even. `cost` is the longest work of a thread: scores for whole vectors of lanes, sums of values lane by lane, and
// what a task does once, which takes as long as `once` lanes.
struct Even {
    int each, cost = INT32_MAX;
    Even(int lanes, int heads, int threads, int most = TASK, int once = LANES) : each(most) {
        for (; most > 0; most -= LANES / 2) {
            const int tasks = heads * ((lanes + most - 1) / most);
            const int longest = (tasks + threads - 1) / threads * (of(std::min(most, lanes)) + once);
            if (longest < cost) each = most, cost = longest;
        }
    }
    static int of(int lanes) { return (lanes + LANES - 1) / LANES * LANES + lanes; }
};

// Says whether so many rows of a step divide attention by rows, and not by parts of the positions. That is less even, but
// it keeps and merges no part's result, which costs a fifth. The sums stay the same.
inline bool by_rows(const Model& m, const Step& s, int rows) {
    if (s.works != 1) return false;
    if (rows > MANY_ROWS || s.threads == 1) return true;
    for (int layer = 0, heads = 0; layer < m.layers; layer++) {
        const Layer& w = m.layer[layer];
        if (w.state >= 0 || w.kv_heads == heads) continue;
        heads = w.kv_heads;
        const int lanes = rows * (m.heads / heads), tasks = (lanes + TASK - 1) / TASK;
        const int64_t work = (int64_t)heads * (Even::of(lanes) + tasks * LANES);
        if (5ll * s.threads * Even(lanes, heads, s.threads).cost > 6 * work) return false;
    }
    return true;
}

// A step's scratch memory. `Rows` is the form of the products' operands: see products.h and tiles.h.
template <class Rows>
struct Scratch {
    Rows h, mixed, inner;  // [rows, hidden]: normed; [rows, heads * dim]: attention's results; [rows, inner]: gated.
                           // `mixed` has room for the results of layers with a state, too
    Routes<Rows> routes;
    float *x, *y, *q, *maximum, *total, *part;
    float* z;              // [rows, hidden]: results of experts that have norms of their own
    float *known, *found;  // see screen.h and screen_blocks.h
    float *inputs, *looked;  // [rows, layers, per_layer]: tokens' vectors; [threads, layers, per_layer]
    float* made;  // of a gated delta net, see `made_of`; or gates of attention's results, [rows, heads * dim]
    int64_t lanes, size;  // `lanes`: those whose parts' results are kept
    int32_t parts, mix;  // `mix`: the widest layer's `mixes`
    int32_t lowest;      // of the rows' positions
    // Whether attention is divided by rows and keeps no part's result: of all rows, and of those alone whose logits are
    // asked for, in layers that share.
    bool wide, wide_behind;
    Scratch(const Model& m, const Step& s) {
        int32_t last = 0;
        lowest = INT32_MAX;
        for (int i = 0; i < s.rows; i++) last = std::max(last, s.positions[i]), lowest = std::min(lowest, s.positions[i]);
        parts = last / PART + 1;
        wide = by_rows(m, s, s.rows), wide_behind = by_rows(m, s, s.outputs);
        float* p = s.scratch;
        auto take = [&](int64_t n) { float* at = p; p += (n + 15) / 16 * 16; return at; };
        // The queries lie first, because callers read them between layers.
        int read = 0, more = 0, dim = 0;
        bool apart = false, shares = false;
        mix = 0;
        for (int layer = 0; layer < m.layers; layer++) {
            const Layer& w = m.layer[layer];
            read = std::max(read, reads(m, w)), mix = std::max(mix, mixes(m, w)), dim = std::max(dim, w.dim);
            apart = apart || w.experts.after.weight, shares = shares || w.shares;
            more = std::max(more, w.delta.heads ? made_of(w) : w.gate ? m.heads * w.dim : 0);
        }
        q = take((int64_t)s.rows * read);
        made = take((int64_t)s.rows * more);
        h = Rows(m.hidden, s.rows, take(Rows::size(s.rows, m.hidden)));
        mixed = Rows(mix, s.rows, take(Rows::size(s.rows, mix)));
        inner = Rows(m.inner, s.rows, take(Rows::size(s.rows, m.inner)));
        x = take((int64_t)s.rows * m.hidden);
        y = take(m.layer[0].after.weight || m.layer[0].after_mlp.weight ? (int64_t)s.rows * m.hidden : 0);
        z = take(apart ? (int64_t)s.rows * m.hidden : 0);
        lanes = (int64_t)std::max(wide ? 0 : s.rows, shares && !wide_behind ? s.outputs : 0) * m.heads;
        maximum = take(parts * lanes);
        total = take(parts * lanes);
        part = take(parts * lanes * dim);
        routes.place(m, s.rows, take);
        known = take(s.largest ? (int64_t)s.outputs * m.hidden / 8 : 0);
        found = take(s.largest ? (int64_t)s.outputs * s.threads : 0);
        inputs = take((int64_t)s.rows * m.layers * m.per_layer);
        looked = take((int64_t)s.threads * m.layers * m.per_layer);
        size = p - s.scratch;
    }

    // Returns the first part of the positions to which any row attends in a layer.
    int first_part(const Layer& w) const { return w.window && lowest >= w.window ? (lowest - w.window + 1) / PART : 0; }
};

// Returns where a head's rows begin. `layer` is a number among the layers with keys and values.
inline char* rows_of(const Region& r, int layer, int kv, int head) {
    if (r.plane) return r.plane[2 * layer + kv].base + head * r.plane[2 * layer + kv].head;
    return r.base + layer * r.layer + kv * r.value + head * r.head[kv];
}

// Returns the address of a row. The row must not be encoded.
template <class T>
inline T* address(const Step& s, const Model& m, int64_t place, int layer, int kv, int head) {
    const Layer& w = m.layer[layer];
    return (T*)rows_of(s.regions[place >> 32], w.kv, kv, head) + (place & 0xffffffff) * w.dim;
}

// Copies rows of one head to another region. Encoded rows are decoded.
template <class T>
inline void bring(const Model& m, const Region& from, int64_t row, const Region& to, int64_t at, int64_t rows, int layer,
                  int kv, int head) {
    const Layer& w = m.layer[layer];
    const char* source = rows_of(from, w.kv, kv, head);
    T* target = (T*)rows_of(to, w.kv, kv, head) + at * w.dim;
    if (from.coding.bits) decode_rows(from.coding, source, kv, w.dim, row, rows, target);
    else std::memcpy(target, (const T*)source + row * w.dim, rows * w.dim * sizeof(T));
}

// Stores 16 sums of one row, or only the first `columns`: y (+)= (value + bias) factor. Without SCALED there is no factor.
template <bool SCALED>
inline void put_sums(Vec value, float* y, const float* bias, float factor, bool add, int columns) {
    if (columns < LANES) {  // the last columns of an odd width
        float of[LANES];
        store(of, value);
        for (int n = 0; n < columns; n++) y[n] = (of[n] + (bias ? bias[n] : 0.f)) * (SCALED ? factor : 1.f) + (add ? y[n] : 0.f);
        return;
    }
    if (bias) value += load(bias);
    // The compiler may fuse a product and a sum in one place and not in another. So the code says where to fuse.
    if constexpr (SCALED) value = add ? fma(value, splat(factor), load(y)) : value * splat(factor);
    else if (add) value += load(y);
    store(y, value);
}

// How many rows one behind the other are computed by one thread: of many, four may lie in one line of the cache (products.h).
inline int together(int rows) { return rows < 12 ? 1 : 4; }

// Calls `each(row)` for the rows that thread `id` of `of` threads computes.
template <class Each>
inline void rows_of(int rows, int id, int of, Each each) {
    const int near = together(rows);
    for (int first = id * near; first < rows; first += of * near)
        for (int row = first; row < std::min(rows, first + near); row++) each(row);
}

constexpr int LATER_PANELS = 6;

// Two panels of 16 columns of packed weights, and the two of the next product. The latter are prefetched meanwhile.
template <class W>
struct Panels {
    const W *left, *right, *next_left = nullptr, *next_right = nullptr;
    int each = LANES * sizeof(W);  // bytes of the next ones that are prefetched at once
    // Prefetches what says where later panels lie. It is read too seldom for a processor to do that by itself.
    void ask_for_places() const {
        for (const W* next : {next_left, next_right})
            if (next) __builtin_prefetch(next + LATER_PANELS);
    }
};

}  // namespace
