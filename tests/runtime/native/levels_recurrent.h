// Layers with a state, in plain loops in float64: what `levels_driver.cpp` compares those of the kernels with.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "model.h"

namespace {

using Row = std::vector<double>;

constexpr int KERNEL = 3, NET_HEADS = 4, NET_KEYS = 2, NET_DIM = 32, NET_KEY_DIM = 16;
constexpr int CHANNELS = 2 * NET_KEYS * NET_KEY_DIM + NET_HEADS * NET_DIM, NET_READS = CHANNELS + NET_HEADS * (NET_DIM + 2);

double sigmoid_of(double x) { return 1 / (1 + std::exp(-x)); }

// The sums of each channel's last inputs; `weight` is [KERNEL, channels].
std::vector<Row> convolved_plain(const std::vector<Row>& inputs, const float* weight) {
    std::vector<Row> found;
    for (int p = 0; p < (int)inputs.size(); p++) {
        const int channels = inputs[p].size();
        Row sums(channels, 0.0);
        for (int t = 0; t < KERNEL; t++)
            for (int i = 0; i < channels && p - KERNEL + 1 + t >= 0; i++)
                sums[i] += inputs[p - KERNEL + 1 + t][i] * weight[t * channels + i];
        found.push_back(sums);
    }
    return found;
}

// What the last product of a layer with a short convolution takes, from the rows of its first product.
std::vector<Row> short_plain(const std::vector<Row>& read, const float* weight) {
    const int hidden = read[0].size() / 3;
    std::vector<Row> inputs;
    for (const Row& row : read) {
        Row input(hidden);
        for (int i = 0; i < hidden; i++) input[i] = row[i] * row[2 * hidden + i];
        inputs.push_back(input);
    }
    std::vector<Row> sums = convolved_plain(inputs, weight);
    for (size_t p = 0; p < sums.size(); p++)
        for (int i = 0; i < hidden; i++) sums[p][i] *= read[p][hidden + i];
    return sums;
}

// The same of a gated delta net and of Mamba-2, which apply each row's change of the state as it is written down.
std::vector<Row> delta_plain(const std::vector<Row>& read, const float* weight, const Delta& net) {
    const int keys = NET_KEYS * NET_KEY_DIM;
    std::vector<Row> inputs, found;
    for (const Row& row : read) inputs.emplace_back(row.begin(), row.begin() + CHANNELS);
    std::vector<Row> state(NET_HEADS, Row(NET_KEY_DIM * NET_DIM, 0.0));
    const std::vector<Row> sums = convolved_plain(inputs, weight);
    for (size_t p = 0; p < sums.size(); p++) {
        Row made(sums[p]), results(NET_HEADS * NET_DIM);
        for (double& each : made) each *= sigmoid_of(each);
        for (int head = 0; head < 2 * NET_KEYS && !net.skip; head++) {
            double square = 1e-6;
            for (int i = 0; i < NET_KEY_DIM; i++) square += made[head * NET_KEY_DIM + i] * made[head * NET_KEY_DIM + i];
            for (int i = 0; i < NET_KEY_DIM; i++)
                made[head * NET_KEY_DIM + i] /= std::sqrt(square) * (head < NET_KEYS ? std::sqrt((double)NET_KEY_DIM) : 1);
        }
        for (int head = 0; head < NET_HEADS; head++) {
            const double *const q = &made[head / (NET_HEADS / NET_KEYS) * NET_KEY_DIM], *const k = q + keys;
            const double *const gate = &read[p][CHANNELS + head * NET_DIM], *const rates = &read[p][CHANNELS + NET_HEADS * NET_DIM];
            const double far = std::log1p(std::exp(rates[net.skip ? head : NET_HEADS + head] + net.step[head]));
            const double by = std::exp2(net.decay[head] * far), step = net.skip ? far : sigmoid_of(rates[head]);
            double square = 0;
            for (int d = 0; d < NET_DIM; d++) {
                double seen = 0, result = 0;
                const double value = made[2 * keys + head * NET_DIM + d];
                for (int i = 0; i < NET_KEY_DIM; i++) seen += (state[head][i * NET_DIM + d] *= by) * k[i];
                const double change = (net.skip ? value : value - seen) * step;
                for (int i = 0; i < NET_KEY_DIM; i++) result += (state[head][i * NET_DIM + d] += k[i] * change) * q[i];
                if (net.skip) result = (result + net.skip[head] * value) * gate[d] * sigmoid_of(gate[d]);
                results[head * NET_DIM + d] = result, square += result * result;
            }
            for (int d = 0; d < NET_DIM && !net.skip; d++)
                results[head * NET_DIM + d] *= net.norm[d] / std::sqrt(square / NET_DIM + 1e-5) * gate[d] * sigmoid_of(gate[d]);
        }
        constexpr int GROUP = NET_HEADS / NET_KEYS * NET_DIM;  // Mamba-2 norms heads together that share keys
        for (int at = 0; at < NET_HEADS * NET_DIM && net.skip; at += GROUP) {
            double square = 0;
            for (int i = at; i < at + GROUP; i++) square += results[i] * results[i];
            for (int i = at; i < at + GROUP; i++) results[i] *= net.norm[i] / std::sqrt(square / GROUP + 1e-5);
        }
        found.push_back(results);
    }
    return found;
}

}  // namespace
