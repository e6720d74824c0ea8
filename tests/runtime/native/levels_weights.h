// Weights of the kernels' tests without Python (`levels_driver.cpp`): as float64 has them, and as the kernels read them.
#pragma once

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "model.h"
#include "twelve.cpp"

namespace {

#if defined(__aarch64__)
using Float16 = __fp16;
#else
using Float16 = _Float16;
#endif

enum Numbers { FLOAT32, BFLOAT16, BLOCKS };

// A kind of blocks: ggml's number, columns and bytes of a block; where its factors of scales and of least values are, and
// what the latter is in units of the former; and the spread of a weight whose factor is 1. MXFP4 has exponents instead. The
// last ones are Q8_0 and Q6_K as a head is packed.
struct Form { int number, columns, bytes, factor, least; double units, spread; };
constexpr Form FORMS[] = {
    {2, 32, 18, 0, -1, 0, 4.6}, {3, 32, 20, 0, 2, -7.5, 4.6}, {6, 32, 22, 0, -1, 0, 9.2}, {7, 32, 24, 0, 2, -15.5, 9.2},
    {8, 32, 34, 0, -1, 0, 74}, {10, 256, 84, 80, 82, 1.5, 15}, {11, 256, 110, 108, -1, 0, 42}, {12, 256, 144, 0, 2, 7.5, 165},
    {13, 256, 176, 0, 2, 15.5, 330}, {14, 256, 210, 208, -1, 0, 1370}, {20, 32, 18, 0, -1, 0, 74}, {23, 256, 136, 0, -1, 0, 1370},
    {39, 32, 17, -1, -1, 0, 0}, {108, 32, 34, 0, -1, 0, 74}, {114, 256, 210, 208, -1, 0, 1370},
};

Numbers kind;
int deep;  // elements of an inner dimension that are packed together
int64_t (*panel_bytes)(int, int64_t);
struct FileWeight {  // `Source` of blocks.h
    const uint8_t *raw, *scales, *zeros;
    int64_t rows, columns, group;
    int32_t kind, layout, scale_kind, first;
    int64_t across;
};
struct QuantPanel {  // as blocks.h has it
    const uint8_t* at;
    int32_t kind;
    uint32_t apart;
};
void (*pack)(const FileWeight*, uint8_t*, int, QuantPanel*);
void (*widened)(const FileWeight*, const int64_t*, int64_t, float*);
std::mt19937 drawn(1);

float as_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
    std::memcpy(&x, &bits, 4);
    return x;
}

template <class T>
T* room(size_t count) {
    void* found = std::aligned_alloc(64, (count * sizeof(T) + 4096) / 64 * 64);
    std::memset(found, 0, (count * sizeof(T) + 4096) / 64 * 64);
    return (T*)found;
}

// A weight [out, in], as float64 has it, and packed as packing.py and blocks.py do it. `size` is a power of two.
struct Weight {
    std::vector<double> plain;
    int out, in;
    void* packed;
    float* errors = nullptr;  // of a head of bfloat16 in two parts
    Weight(int out, int in, int size, bool is_head = false) : plain((size_t)out * in), out(out), in(in) {
        std::normal_distribution<float> normal(0, size / std::sqrt((float)in));
        for (auto& each : plain) { const float x = normal(drawn); each = kind == BFLOAT16 ? as_bf16(x) : x; }
        if (kind == BLOCKS) { in_blocks(size / std::sqrt((double)in), is_head); return; }
        const int by = deep > 1 ? 2 : 1, unit = deep > 1 ? std::max(deep, PAIRED) : 1, across = (in + unit - 1) / unit * unit;
        packed = numbers((size_t)(out + 15) / 16 * 16 * across, [&](auto put) {
            for (int o = 0; o < out; o++)
                for (int i = 0; i < in; i++)
                    put((((size_t)(o / 16) * (across / by) + i / by) * 16 + o % 16) * by + i % by, plain[(size_t)o * in + i]);
        });
        if (deep > 1) packed = in_panels(across, is_head);
    }
    void* in_panels(int64_t across, bool is_head) {  // as twelve.py does it; those of every other weight stay in 16 bits
        static bool other = false;
        other = !other;
        const bool wide = other && !is_head;
        const WeightMatrix matrix{(const uint16_t*)rows(), out, in, across};
        std::vector<int64_t> ends((out + 15) / 16);
        WeightPanel* table = room<WeightPanel>(ends.size() + 4);
        if (is_head) {
            WeightCells* const cells = room<WeightCells>(1);
            keepwarm_cells_plan(&matrix, cells, ends.data(), 1);
            errors = room<float>(out + LANES);
            uint8_t* const rest = room<uint8_t>(ends.size() * across / PAIRED * PART_BYTES);
            keepwarm_cells_pack(&matrix, cells, ends.data(), room<uint8_t>(ends.back()), rest, errors, table, 1);
        } else if (wide) {
            for (size_t i = 0; i < ends.size(); i++) table[i].at = (const uint8_t*)packed + i * across * 16 * 2;
        } else {
            uint8_t upper[16];
            keepwarm_twelve_plan(&matrix, upper, ends.data(), 1);
            keepwarm_twelve_pack(&matrix, upper, ends.data(), room<uint8_t>(ends.back()), table, 1);
        }
        return table;
    }
    void* rows() const {  // as the model has it
        if (kind == BLOCKS) return packed;
        return numbers(plain.size(), [&](auto put) { for (size_t i = 0; i < plain.size(); i++) put(i, plain[i]); });
    }
    template <class Fill>
    static void* numbers(size_t count, Fill fill) {
        float* floats = room<float>(count);
        uint16_t* halves = room<uint16_t>(count);
        fill([&](size_t at, double value) {
            floats[at] = value;
            uint32_t bits;
            std::memcpy(&bits, floats + at, 4);
            halves[at] = bits >> 16;
        });
        return kind == BFLOAT16 ? (void*)halves : (void*)floats;
    }
    void in_blocks(double size, bool is_head) {  // random bytes of the next kind, with factors that give weights of this size
        static int next = 0, heads = 0;
        constexpr int LAST = sizeof FORMS / sizeof *FORMS - 2;
        const Form& of = FORMS[is_head ? LAST + heads++ % 2 : next++ % LAST];
        const int panels = (out + 15) / 16;
        std::vector<uint8_t> file((size_t)out * (in / of.columns) * of.bytes);
        for (auto& byte : file) byte = drawn();
        for (size_t at = 0; at < file.size(); at += of.bytes) {
            const Float16 factor = size / (of.spread + !of.spread) * (0.5 + drawn() % 64 / 64.), least = factor * of.units;
            if (of.factor < 0) file[at] = 120 + drawn() % 4;
            else std::memcpy(&file[at + of.factor], &factor, 2);
            if (of.least >= 0) std::memcpy(&file[at + of.least], &least, 2);
        }
        const FileWeight weight{file.data(), nullptr, nullptr, out, in, 0, of.number, 0, 0, 0};
        std::vector<float> wide(plain.size());
        for (int64_t row = 0; row < out; row++) widened(&weight, &row, 1, &wide[row * in]);
        plain.assign(wide.begin(), wide.end());
        const int64_t bytes = panel_bytes(of.number, in);
        uint8_t* memory = room<uint8_t>(bytes * panels);
        QuantPanel* table = room<QuantPanel>(panels + 4);
        pack(&weight, memory, 1, table);
        packed = table;
    }
    std::vector<double> times(const std::vector<double>& x) const {
        std::vector<double> y(out, 0.0);
        for (int o = 0; o < out; o++)
            for (int i = 0; i < in; i++) y[o] += plain[(size_t)o * in + i] * x[i];
        return y;
    }
};

}  // namespace
