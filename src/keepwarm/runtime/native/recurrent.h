// Layers with a state: what a row computes depends on earlier rows through the state that they left.
//
// A row's results and the state behind it have one fixed order of sums, whatever the rows beside it and wherever a step
// begins. So the state is right behind every row, and is written wherever the step asks for it (`Run` and `Keep`).
#pragma once

#include "attention.h"

namespace {

constexpr int MOST_INPUTS = 8;  // of a short convolution

// The last inputs of a short convolution up to one row, the oldest first. A row's inputs are columns of its first product:
// [gate of the input, gate of the result, value], whose first and last are multiplied; of a gated delta net they are the
// first columns as they are. Inputs before the run lie in the state, [kernel - 1, channels].
struct Inputs {
    const float *gate[MOST_INPUTS], *value[MOST_INPUTS];  // no value: `gate` is the input itself
    Inputs(const Model& m, const Layer& w, const Run& run, const float* read, int row, int count) {
        const Convolution& c = w.convolution;
        const float* const state = run.state[w.state];
        for (int i = 0; i < count; i++) {
            const int at = row - run.row - (count - 1) + i;
            const float* const there = read + (int64_t)(run.row + at) * reads(m, w);
            gate[i] = at < 0 ? state + (int64_t)(c.kernel - 1 + at) * c.channels : there;
            value[i] = at < 0 || w.delta.heads ? nullptr : there + 2 * m.hidden;
        }
    }
    Vec at(int i, int column) const {
        const Vec input = load(gate[i] + column);
        return value[i] ? input * load(value[i] + column) : input;
    }
};

// Gives the sums of a row's channels to `put(column, 16 values)`.
template <class Put>
inline void convolved(const Model& m, const Layer& w, const Run& run, const float* read, int row, Put put) {
    const Convolution& c = w.convolution;
    const Inputs inputs(m, w, run, read, row, c.kernel);
    for (int n = 0; n < c.channels; n += LANES) {
        Vec value = c.bias ? load(c.bias + n) : Vec{};
        for (int t = 0; t < c.kernel; t++) value = fma(inputs.at(t, n), load(c.weight + (int64_t)t * c.channels + n), value);
        put(n, value);
    }
}

// Calls `each(run, row)` for the rows of thread `id` of `of` threads.
template <class Each>
inline void rows_of_runs(const Step& s, int id, int of, Each each) {
    for (int i = 0; i < s.runs; i++)
        for (int row = s.run[i].row; row < s.run[i].row + s.run[i].rows; row++)
            if (row / together(s.rows) % of == id) each(s.run[i], row);
}

// Computes rows of a short convolution, as operands of the layer's last product.
template <class Rows>
void convolve(const Model& m, const Step& s, const Layer& w, const float* read, const Onward& on, const Rows& results, int id,
              int of) {
    rows_of_runs(s, id, of, [&](const Run& run, int row) {
        const int to = on.to(row);
        const float* const gate = read + (int64_t)row * reads(m, w) + m.hidden;
        if (to >= 0) convolved(m, w, run, read, row, [&](int n, Vec value) { results.put(to, n, load(gate + n) * value); });
    });
}

// Writes the inputs behind the rows that are to be kept, and behind each run's last row. All rows must be computed. The
// inputs of a run are written by one thread, in order, since they may need those that are overwritten last.
inline void keep_inputs(const Model& m, const Step& s, const Layer& w, const float* read, int id, int of) {
    const Convolution& c = w.convolution;
    for (int i = id; i < s.runs; i += of) {
        const Run& run = s.run[i];
        auto write = [&](int row, float* to) {
            const Inputs inputs(m, w, run, read, row, c.kernel - 1);
            for (int t = 0; t < c.kernel - 1; t++)
                for (int n = 0; n < c.channels; n += LANES) store(to + (int64_t)t * c.channels + n, inputs.at(t, n));
        };
        for (int k = run.keep; k < run.keep + run.keeps; k++) write(s.keep[k].row, s.keep[k].state[w.state]);
        write(run.row + run.rows - 1, run.state[w.state]);
    }
}

}  // namespace
