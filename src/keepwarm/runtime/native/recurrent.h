// Layers with a state: what a row computes depends on earlier rows through the state that they left.
//
// A row's results and the state behind it have one fixed order of sums, whatever the rows beside it and wherever a step
// begins. So the state is right behind every row, and is written wherever the step asks for it (`Run` and `Keep`).
#pragma once

#include "model.h"

namespace {

constexpr int MOST_INPUTS = 8;  // of a short convolution

// The last inputs of a short convolution up to one row, the oldest first. An input is the product of a gate and a value,
// both of which lie in the row's `read`, [gate, gate of the result, value]. Inputs before the run lie in the state,
// [kernel - 1, hidden].
struct Inputs {
    const float *gate[MOST_INPUTS], *value[MOST_INPUTS];  // no value: `gate` is the input itself
    Inputs(const Model& m, const Run& run, const float* read, const float* state, int row, int count, int kernel) {
        for (int i = 0; i < count; i++) {
            const int at = row - run.row - (count - 1) + i;
            const float* const there = read + (int64_t)(run.row + at) * 3 * m.hidden;
            gate[i] = at < 0 ? state + (int64_t)(kernel - 1 + at) * m.hidden : there;
            value[i] = at < 0 ? nullptr : there + 2 * m.hidden;
        }
    }
    Vec at(int i, int column) const {
        const Vec input = load(gate[i] + column);
        return value[i] ? input * load(value[i] + column) : input;
    }
};

// Computes the rows of thread `id` of `of` threads, as operands of the layer's last product.
template <class Rows>
void convolve(const Model& m, const Step& s, const Layer& w, const float* read, const Onward& on, const Rows& results, int id,
              int of) {
    const Convolution& c = w.convolution;
    for (int i = 0; i < s.runs; i++) {
        const Run& run = s.run[i];
        for (int row = run.row; row < run.row + run.rows; row++) {
            const int to = on.to(row);
            if (row % of != id || to < 0) continue;
            const Inputs inputs(m, run, read, run.state[w.state], row, c.kernel, c.kernel);
            const float* const gate = read + (int64_t)row * 3 * m.hidden + m.hidden;
            for (int n = 0; n < m.hidden; n += LANES) {
                Vec value = c.bias ? load(c.bias + n) : Vec{};
                for (int t = 0; t < c.kernel; t++) value = fma(inputs.at(t, n), load(c.weight + t * m.hidden + n), value);
                results.put(to, n, load(gate + n) * value);
            }
        }
    }
}

// Writes the states behind the rows that are to be kept, and behind each run's last row. All rows must be computed. The
// states of a run are written by one thread, in order, since they may need the one that is overwritten last.
inline void keep_inputs(const Model& m, const Step& s, const Layer& w, const float* read, int id, int of) {
    const int kernel = w.convolution.kernel;
    for (int i = id; i < s.runs; i += of) {
        const Run& run = s.run[i];
        auto write = [&](int row, float* to) {
            const Inputs inputs(m, run, read, run.state[w.state], row, kernel - 1, kernel);
            for (int t = 0; t < kernel - 1; t++)
                for (int n = 0; n < m.hidden; n += LANES) store(to + t * m.hidden + n, inputs.at(t, n));
        };
        for (int k = run.keep; k < run.keep + run.keeps; k++) write(s.keep[k].row, s.keep[k].state[w.state]);
        write(run.row + run.rows - 1, run.state[w.state]);
    }
}

}  // namespace
