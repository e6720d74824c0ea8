// Packs bfloat16 weights in 12 bits (twelve.h), beside the steps.

#include <omp.h>

#include "twelve.h"

namespace {

constexpr int PIECE = 1 << 16;  // weights that are counted by one thread in turn

}  // namespace

extern "C" {

// Chooses the sixteen upper bytes. Sets ends[i] to the number of bytes of panels [0, i], without second parts. Returns how many weights have
// another upper byte.
int64_t keepwarm_twelve_plan(const WeightMatrix* m, uint8_t* upper, int64_t* ends, int threads) {
    const int64_t weights = m->rows * m->columns, panels = (m->rows + LANES - 1) / LANES;
    int64_t seen[256] = {}, others = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : seen)
    for (int64_t piece = 0; piece < (weights + PIECE - 1) / PIECE; piece++)
        for (int64_t i = piece * PIECE; i < std::min(weights, (piece + 1) * PIECE); i++) seen[m->at[i] >> 8]++;
    seen[0] += panels * LANES * m->across - weights;
    for (int i = 0; i < 16; i++) {
        upper[i] = std::max_element(seen, seen + 256) - seen;
        seen[upper[i]] = -1;
    }
    const UpperBytes chosen(upper);
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : others)
    for (int64_t i = 0; i < panels; i++) {
        const int64_t count = others_of(*m, chosen, i);
        ends[i] = panel_bytes_of(*m, count), others += count;
    }
    for (int64_t i = 1; i < panels; i++) ends[i] += ends[i - 1];
    return others;
}

// Packs all panels to `to`, which holds zeros, by the plan. Sets `panels`. Of a matrix in two parts, the second one is packed
// to `rest`, which holds zeros, too; and errors[row] is set as `bound_errors` does.
void keepwarm_twelve_pack(const WeightMatrix* m, const uint8_t* upper, const int64_t* ends, uint8_t* to, uint8_t* rest,
                          float* errors, WeightPanel* panels, int threads) {
    const UpperBytes chosen(upper);
    const int64_t each = m->across / PAIRED * REST_BYTES;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < (m->rows + LANES - 1) / LANES; i++) {
        panels[i] = pack_twelve(*m, chosen, i, to + (i ? ends[i - 1] : 0), m->in_parts ? rest + i * each : nullptr);
        if (m->in_parts) bound_errors(*m, i, errors + i * LANES);
    }
}
}
