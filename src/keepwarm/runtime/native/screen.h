// The largest logit of a row, where nobody asks for the others: most of the head's weights are then read in part.
//
// A head is packed in two parts: screen_blocks.h and screen_narrow.h say which ones. The first part tells a logit up to an
// error. So first an upper bound of each logit is found from it, and a lower bound of the largest one: the exact logits
// beside the best estimate. Only panels that may hold a logit as large are then multiplied whole, as without all this; the
// others get minus infinity. Which panels these are depends on the number of threads, but the largest logit and its place
// do not.
#pragma once

#include <cmath>
#include <limits>

#include "barrier.h"
#include "model.h"

namespace {

constexpr int SCREENED = 4;  // at most so many rows: together, more of them have most panels multiplied whole

// Finds the logits of rows that may be the largest, for the columns of thread `id` of `of` threads. `found` has room for
// [threads, rows]. A head has:
//   know(row): prepares what `estimate` needs of a row;
//   estimate(column, to, take): calls take(row, column, estimates, upper bounds) for each row and some panels from
//       `column` on, and returns the column behind them;
//   whole_sums(row, column, other, to): sets `to` to the sums of the columns of two panels, with the bits that they always have;
//   ask_for(column): prefetches what that reads;
//   near: logits that are smaller by at most this share may be rounded to an equal number.
template <class Head>
class Screen {
public:
    Screen(const Model& m, Step& s, const Head& head, int rows, float* found) : m(m), s(s), head(head), rows(rows), found(found) {}

    void run(int id, int of, Barrier& barrier) {
        for (int row = id; row < rows; row += of) head.know(row);
        barrier.wait(of);
        const Share share(m.vocab, id, of);
        bound(share, found + id * rows);
        barrier.wait(of);
        int whole = 0;
        for (int row = 0; row < rows; row++) {
            float least = found[row];
            for (int i = 1; i < of; i++) least = std::max(least, found[i * rows + row]);
            // Numbers below the normal ones are rounded more than others.
            whole += choose(id, of, row, least - std::abs(least) * head.near - 1e-30f);
        }
        __atomic_fetch_add(&s.whole, whole, __ATOMIC_RELAXED);
        barrier.wait(of);
    }

private:
    const Model& m;
    Step& s;
    const Head& head;
    int rows;
    float* found;

    float* logits(int row, int column) const { return s.logits + (int64_t)row * m.vocab + column; }

    // Writes upper bounds of the logits, without the factor, and to `least` a lower bound of each row's largest one.
    void bound(const Share& share, float* least) const {
        constexpr float NONE = -std::numeric_limits<float>::infinity();
        Vec best[SCREENED], place[SCREENED] = {};
        for (Vec& each : best) each = splat(NONE);
        const auto take = [&](int row, int c, Vec sums, Vec above) {
            if (const int columns = share.to - c; columns < LANES) {  // the last panel's other columns are no tokens
                float sum[LANES], most[LANES];
                store(sum, sums), store(most, above);
                for (int o = columns; o < LANES; o++) sum[o] = NONE;
                std::memcpy(logits(row, c), most, columns * sizeof(float));
                sums = load(sum);
            } else {
                store(logits(row, c), above);
            }
            const auto more = sums > best[row];
            best[row] = pick(more, sums, best[row]), place[row] = pick(more, splat(c / LANES), place[row]);
        };
        for (int c = share.from; c < share.to;) c = head.estimate(c, share.to, take);
        for (int row = 0; row < rows; row++) least[row] = share.from < share.to ? largest_near(row, best[row], place[row]) : NONE;
    }

    // Returns the largest of the logits of the panel with the best estimate.
    float largest_near(int row, Vec best, Vec place) const {
        float each[LANES], panel[LANES];
        store(each, best), store(panel, place);
        const int column = (int)panel[std::max_element(each, each + LANES) - each] * LANES;
        Vec sums[2];
        head.whole_sums(row, column, column, sums);
        store(each, sums[0]);
        return *std::max_element(each, each + std::min(LANES, m.vocab - column));
    }

    // Sets the logits of each panel that may hold one of at least `least`. Returns how many such panels there are. Frequent
    // tokens often have low numbers. So threads take turns, and none has most of these panels.
    int choose(int id, int of, int row, float least) const {
        constexpr int ASKED = 4;  // panels that memory is asked for before the first two are multiplied
        int asked[ASKED + 1], waiting = 0, whole = 0;
        const auto multiply = [&] {
            const int taken = std::min(waiting, 2);
            Vec sums[2];
            head.whole_sums(row, asked[0], asked[taken - 1], sums);
            for (int i = 0; i < taken; i++)
                put_sums<true>(sums[i], logits(row, asked[i]), nullptr, m.logit, false, std::min(LANES, m.vocab - asked[i]));
            std::copy(asked + taken, asked + waiting, asked), waiting -= taken, whole += taken;
        };
        for (int pair = id * 2 * LANES; pair < m.vocab; pair += of * 2 * LANES)
            for (int c = pair; c < std::min(pair + 2 * LANES, m.vocab); c += LANES) {
                float* const at = logits(row, c);
                const int columns = std::min(LANES, m.vocab - c);
                bool may = false;
                for (int o = 0; o < columns; o++) may |= !(at[o] < least);  // what is no number may be anything
                if (may) {
                    head.ask_for(c), asked[waiting++] = c;
                    if (waiting > ASKED) multiply();
                } else {
                    std::fill(at, at + columns, -std::numeric_limits<float>::infinity());
                }
            }
        while (waiting) multiply();
        return whole;
    }
};

// Whether logits can be ruled out by their sums. A cap's rounding is not known to keep the order.
inline bool in_order(const Model& m, int rows) { return rows && rows <= SCREENED && m.logit > 0 && !m.logit_cap; }

}  // namespace
