// Functions for weights in blocks of few bits, beside the steps: packing, widening, and a plain product to compare with.

#include <omp.h>
#include <algorithm>

#include "blocks.h"
#include "guarded.h"

namespace {

// Computes the sums of a widened row with `count` rows of floats. Each is made of 16 partial sums, always in one order.
inline void plain_sums(const float* w, const float* x, int64_t columns, int count, float* y, int64_t stride) {
    for (int i = 0; i < count; i++, x += columns) {
        Vec total{};
        for (int64_t c = 0; c < columns; c += LANES) total = fma(load(w + c), load(x + c), total);
        y[i * stride] = sum(total);
    }
}

}  // namespace

extern "C" {

// Returns the bytes of a panel of 16 outputs, or 0 for an unknown kind.
int64_t keepwarm_panel_bytes(int kind, int64_t columns) { return shape_of(kind).codes ? panel_bytes(kind, columns) : 0; }

// Return the bytes of a row in the file (0 in INT4, which has no rows), and the number of columns that must divide a row's
// width.
int64_t keepwarm_row_bytes(const Source* from) { return from->row_bytes(); }
int keepwarm_block_columns(int kind) { return shape_of(kind).each ? shape_of(kind).each * COLUMNS : shape_of(kind).columns; }

// Packs a weight as panels, and writes where they lie to `table`. `to` must hold zeros.
void keepwarm_pack(const Source* from, uint8_t* to, int threads, QuantPanel* table) {
    const int64_t panels = (from->rows + LANES - 1) / LANES, rest = apart_bytes(from->kind, from->columns);
    const int64_t each = panel_bytes(from->kind, from->columns) - rest;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < panels; i++) {
        const int64_t first = i * LANES;
        uint8_t *const at = to + i * each, *const apart = to + panels * each + i * rest;
        pack_panel(*from, first, (int)std::min<int64_t>(LANES, from->rows - first), at, apart);
        table[i] = {at, from->kind, (uint32_t)((apart - at) / 64)};
    }
}

// Widens some rows to floats, [count][columns].
void keepwarm_widen(const Source* from, const int64_t* row, int64_t count, float* to) {
    for (int64_t i = 0; i < count; i++) widen_row(*from, row[i], to + i * from->columns);
}

// Sets y[i][n] to the sum of x[i] with row n, in float32. Nothing is rounded to fewer bits.
int keepwarm_plain_product(const Source* from, const float* x, int64_t count, float* y, int threads) {
    return guarded([&] {
        const int64_t rows = from->rows, columns = from->columns;
        std::vector<float> room((size_t)threads * columns);
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t n = 0; n < rows; n++) {
            float* w = room.data() + (int64_t)omp_get_thread_num() * columns;
            widen_row(*from, n, w);
            plain_sums(w, x, columns, (int)count, y + n, rows);
        }
        return 0;
    });
}
}
