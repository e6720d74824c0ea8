// Packs bfloat16 weights in 12 bits (twelve.h), beside the steps.

#include <omp.h>

#include "guarded.h"
#include "twelve.h"

namespace {

constexpr int PIECE = 1 << 16;   // weights that are counted by one thread in turn
constexpr int VALUES = 1 << 16;  // of bfloat16

// Calls `each(thread, weight)` for all weights, in any order.
template <class Each>
void each_weight(const WeightMatrix& m, int threads, Each each) {
    const int64_t weights = m.rows * m.columns;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t piece = 0; piece < (weights + PIECE - 1) / PIECE; piece++)
        for (int64_t i = piece * PIECE; i < std::min(weights, (piece + 1) * PIECE); i++) each(omp_get_thread_num(), m.at[i]);
}

int64_t padding(const WeightMatrix& m) { return (m.rows + LANES - 1) / LANES * LANES * m.across - m.rows * m.columns; }

// Sets ends[i] to the number of bytes of panels [0, i], without second parts. Returns how many weights have no code.
template <class Codes>
int64_t lay_out(const WeightMatrix& m, const Codes& codes, int64_t* ends, int threads) {
    const int64_t panels = (m.rows + LANES - 1) / LANES;
    int64_t others = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : others)
    for (int64_t i = 0; i < panels; i++) {
        const int64_t count = others_of(m, codes, i);
        ends[i] = panel_bytes_of<Codes>(m, count), others += count;
    }
    for (int64_t i = 1; i < panels; i++) ends[i] += ends[i - 1];
    return others;
}

}  // namespace

extern "C" {

// Chooses the sixteen upper bytes. See `lay_out` for the rest.
int64_t keepwarm_twelve_plan(const WeightMatrix* m, uint8_t* upper, int64_t* ends, int threads) {
    constexpr int MOST = 64;  // threads; more would not count faster
    threads = std::min(threads, MOST);
    int64_t counts[MOST][256] = {}, *const seen = counts[0];
    each_weight(*m, threads, [&](int thread, uint16_t weight) { counts[thread][weight >> 8]++; });
    for (int thread = 1; thread < threads; thread++)
        for (int i = 0; i < 256; i++) seen[i] += counts[thread][i];
    seen[0] += padding(*m);
    for (int i = 0; i < 16; i++) {
        upper[i] = std::max_element(seen, seen + 256) - seen;
        seen[upper[i]] = -1;
    }
    return lay_out(*m, UpperBytes(upper), ends, threads);
}

// Packs all panels to `to`, which holds zeros, by the plan. Sets `panels`.
void keepwarm_twelve_pack(const WeightMatrix* m, const uint8_t* upper, const int64_t* ends, uint8_t* to, WeightPanel* panels,
                          int threads) {
    const UpperBytes codes(upper);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < (m->rows + LANES - 1) / LANES; i++) panels[i] = pack_panel(*m, codes, i, to + (i ? ends[i - 1] : 0));
}

// Chooses the cells of a matrix in two parts. See `lay_out` for the rest; NO_MEMORY is returned where there is none.
int64_t keepwarm_cells_plan(const WeightMatrix* m, WeightCells* cells, int64_t* ends, int threads) {
    int64_t others = 0;
    const int failed = guarded([&] {
        std::vector<int64_t> seen((int64_t)threads * VALUES);
        each_weight(*m, threads, [&](int thread, uint16_t weight) { seen[(int64_t)thread * VALUES + weight]++; });
        for (int64_t i = VALUES; i < (int64_t)seen.size(); i++) seen[i % VALUES] += seen[i];
        seen[0] += padding(*m);
        choose(seen.data(), *cells);
        others = lay_out(*m, CellCodes(*cells), ends, threads);
        return 0;
    });
    return failed ? failed : others;
}

// Packs all panels to `to` and `rest`, which hold zeros, by the plan. Sets `panels`, and errors[row] as `bound_errors` does.
// The panels refer to the cells.
void keepwarm_cells_pack(const WeightMatrix* m, const WeightCells* cells, const int64_t* ends, uint8_t* to, uint8_t* rest,
                         float* errors, WeightPanel* panels, int threads) {
    const CellCodes codes(*cells);
    const int64_t each = m->across / PAIRED * PART_BYTES;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < (m->rows + LANES - 1) / LANES; i++) {
        panels[i] = pack_panel(*m, codes, i, to + (i ? ends[i - 1] : 0), rest + i * each);
        bound_errors(*m, codes, i, errors + i * LANES);
    }
}
}
