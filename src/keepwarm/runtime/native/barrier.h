// The threads of a step wait for each other.
#pragma once

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <thread>
#endif

#include <atomic>
#include <climits>

namespace {

// OpenMP's barrier would be too slow: its library puts threads to sleep as soon as it knows more of them than there are
// processors. That happens in a process whose requests come from two threads in turn. Waking the threads ten times a layer
// would cost as much as half a decoding step.
//
// A thread that waits long sleeps, since another one may need its processor to arrive. After a pause, Linux often starts a
// step's second thread where the first one runs, and leaves both there for 10 ms or more. So the thread that waits moves to
// another processor if the one that came last before runs on the same one.
class Barrier {
public:
    void wait(int threads) {
        if (threads == 1) return;
        const int now = round.load(std::memory_order_acquire);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
            arrived.store(0, std::memory_order_relaxed);
            end(now);
            return;
        }
        for (int spins = 0; round.load(std::memory_order_acquire) == now; spins++) {
            if (spins >= SPINS) sleep(now, threads);
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
    std::atomic<int> sleeping{0};
    std::atomic<int> processor{-1};             // where the last thread of the round before ran
    std::atomic<const void*> last{nullptr};     // that thread

    static const void* self() {
        static thread_local char here;
        return &here;
    }

    void end(int now) {
        processor.store(sched_getcpu(), std::memory_order_relaxed), last.store(self(), std::memory_order_relaxed);
        round.store(now + 1);  // in one order with `sleeping`: a thread that sleeps from now on sees the new round
        if (sleeping.load()) syscall(SYS_futex, &round, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }

    void sleep(int now, int threads) {
        const int here = sched_getcpu();
        if (here == processor.load(std::memory_order_relaxed) && last.load(std::memory_order_relaxed) != self()) leave(here, threads);
        sleeping.fetch_add(1);
        syscall(SYS_futex, &round, FUTEX_WAIT_PRIVATE, now, nullptr, nullptr, 0);  // returns at once if the round has ended
        sleeping.fetch_sub(1);
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
    void end(int now) { round.store(now + 1, std::memory_order_release); }
    void sleep(int, int) { std::this_thread::yield(); }
#endif
};

}  // namespace
