// How threads divide the columns of a product, or anything else that has columns.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "registers.h"

namespace {

constexpr int PAIR = 2 * LANES;  // columns of a pair of panels: a thread computes whole ones

// The columns of n that thread `id` of `of` threads computes.
struct Share {
    int from, to;
    Share(int n, int id, int of) {
        const int64_t pairs = (n + PAIR - 1) / PAIR;
        from = pairs * id / of * PAIR, to = std::min<int64_t>(pairs * (id + 1) / of * PAIR, n);
    }
};

// What is taken of each thread's share. A thread takes its own pairs from the first one on. When none is left, it takes the
// last ones of others: a processor may be slower than another one, or busy with other work. Columns have the same bits
// whoever computes them.
class Turns {
public:
    static constexpr int MOST = 64;            // threads; if there are more, each computes its share
    static constexpr int LONGEST = 1 << 15;  // pairs of a share, of all blocks

    // Takes a pair of a share of `pairs`. Returns its number, or -1 if none is left; the very last one is left to its owner,
    // whose cache has it in part. Products are numbered from 1 on, and all threads must have ended the one before.
    int take(int whose, int pairs, uint32_t product, bool from_end) {
        std::atomic<uint64_t>& taken = own[whose].taken;
        for (uint64_t seen = taken.load(std::memory_order_relaxed);;) {
            const uint64_t now = seen >> 32 == product ? seen : (uint64_t)product << 32;
            const int first = now & 0xffff, last = now >> 16 & 0xffff;
            if (first + last + from_end >= pairs) return -1;
            if (taken.compare_exchange_weak(seen, now + (from_end ? 0x10000 : 1), std::memory_order_relaxed))
                return from_end ? pairs - 1 - last : first;
        }
    }

private:
    struct alignas(64) Own { std::atomic<uint64_t> taken{0}; };  // the product's number, and how many of both ends
    Own own[MOST];
};

// One thread's view of the turns of a step's products.
struct Turn {
    Turns& all;
    uint32_t product = 0;
};

// What one thread computes of a product: pairs of panels of its share, or whatever it takes in turn, with a block of rows.
// A share's blocks follow one another.
class Assigned {
public:
    Assigned(int n, int blocks, int id, int of, Turn* turn) : n(n), blocks(blocks), id(id), of(of), turn(turn) {
        enter(id);
        if (turn) turn->product++;
        if (of > Turns::MOST || (int64_t)blocks * ((n + PAIR - 1) / PAIR) > Turns::LONGEST) this->turn = nullptr;
    }

    // Sets the number of a block, and the first column of a pair. Returns false if nothing is left.
    bool next(int& block, int& c) {
        int unit = turn ? take() : own < pairs * blocks ? own++ : -1;
        if (unit < 0) return false;
        block = unit / pairs, c = first + unit % pairs * PAIR;
        return true;
    }

private:
    const int n, blocks, id, of;
    Turn* turn;
    int whose, first, pairs, own = 0;

    void enter(int thread) {
        const Share share(n, thread, of);
        whose = thread, first = share.from, pairs = (share.to - share.from + PAIR - 1) / PAIR;
    }
    int take() {
        for (;; enter((whose + 1) % of)) {
            const int unit = turn->all.take(whose, pairs * blocks, turn->product, whose != id);
            if (unit >= 0 || (whose + 1) % of == id) return unit;
        }
    }
};

}  // namespace
