// The threads of a step wait for each other.
#pragma once

#include <omp.h>
#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <thread>

namespace {

// OpenMP's barrier would be too slow: its library puts threads to sleep as soon as it knows more of them than there are
// processors. That happens in a process whose requests come from two threads in turn. Waking the threads ten times a layer
// would cost as much as half a decoding step.
//
// A thread that waits long yields, since another one may need its processor to arrive. After a pause, Linux often starts a
// step's second thread where the first one runs, and leaves both there for 10 ms or more. So a thread that waits moves to
// another processor if another one of the step runs where it does. It does not sleep: Linux might wake it there.
class Barrier {
public:
    void wait(int threads) {
        if (threads == 1) return;
        const int now = round.load(std::memory_order_acquire);
        come();
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
            arrived.store(0, std::memory_order_relaxed);
            round.store(now + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round.load(std::memory_order_acquire) == now; spins++) {
            if (spins >= SPINS) give_way(threads);
#if defined(__x86_64__)
            else __builtin_ia32_pause();
#endif
        }
    }

private:
    static constexpr int SPINS = 4096;
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<int> round{0};

#if defined(__linux__)
    static constexpr int WATCHED = 64;     // threads; the others never move
    std::atomic<int> place[WATCHED] = {};  // the processor of each thread when it came, plus one

    void come() {
        if (const int id = omp_get_thread_num(); id < WATCHED) place[id].store(sched_getcpu() + 1, std::memory_order_relaxed);
    }

    void give_way(int threads) {
        const int id = omp_get_thread_num(), here = sched_getcpu();
        for (int i = 0; i < std::min(threads, WATCHED); i++)
            if (i != id && id < WATCHED && place[i].load(std::memory_order_relaxed) == here + 1) {
                leave(here, threads);
                come();
                break;
            }
        std::this_thread::yield();
    }

    // Moves this thread to another of the processors that it may use. Afterwards it may use the same ones as before.
    static void leave(int here, int threads) {
        cpu_set_t may, others;
        if (sched_getaffinity(0, sizeof may, &may) || CPU_COUNT(&may) < threads || !CPU_ISSET(here, &may)) return;
        others = may;
        CPU_CLR(here, &others);
        if (sched_setaffinity(0, sizeof others, &others) || !sched_setaffinity(0, sizeof may, &may)) return;
        for (int i = 0; i < CPU_SETSIZE; i++) CPU_SET(i, &may);  // the ones it could use were changed meanwhile
        sched_setaffinity(0, sizeof may, &may);
    }
#else
    void come() {}
    void give_way(int) { std::this_thread::yield(); }
#endif
};

}  // namespace
