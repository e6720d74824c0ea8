// Reads stored KV that lies in the page cache into place, and verifies it, with all the threads of a step at once.
//
// A task is what one checksum covers: one block of one layer. It is read and hashed piece by piece, so that the bytes are
// hashed while they are in the processor's cache; and the layer is attended to while it still is. No read waits for a
// device: what is not in memory is left to the caller (RWF_NOWAIT).

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <omp.h>
#include <sys/uio.h>

namespace {

constexpr int64_t PIECE = 64 << 10;  // bytes; more leave the second-level cache before they are hashed

enum State : int32_t { WAITING, READ, ABSENT, WRONG };

struct Digest { uint64_t low, high; };  // XXH128_hash_t

}  // namespace

extern "C" {

struct Part { int64_t offset, size; char* to; };  // a stretch of the file, and where it goes

struct Task {
    int32_t layer, fd;
    int64_t first, last;   // its parts
    uint64_t low, high;    // XXH3-128 over them, in order
};

struct Hash {  // of the xxHash library
    void* (*create)();
    int (*reset)(void*);
    int (*update)(void*, const void*, size_t);
    Digest (*digest)(const void*);
    int (*free)(void*);
};

}  // extern "C"

namespace {

int64_t read_now(int fd, char* to, int64_t size, int64_t offset) {
#if defined(__linux__) && defined(RWF_NOWAIT)
    iovec place{to, (size_t)size};
    return preadv2(fd, &place, 1, offset, RWF_NOWAIT);
#else
    return -1;
#endif
}

State fetch(const Task& task, const Part* parts, const Hash& hash, void* state) {
    hash.reset(state);
    for (const Part* part = parts + task.first; part < parts + task.last; part++)
        for (int64_t at = 0; at < part->size;) {
            const int64_t left = part->size - at;
            const int64_t got = read_now(task.fd, part->to + at, left < PIECE ? left : PIECE, part->offset + at);
            if (got <= 0) return ABSENT;
#if !defined(UNVERIFIED)  // defined by benchmarks/verify_cost.py alone, to measure what verifying costs
            hash.update(state, part->to + at, got);
#endif
            at += got;
        }
#if !defined(UNVERIFIED)
    const Digest found = hash.digest(state);
    if (found.low != task.low || found.high != task.high) return WRONG;
#endif
    return READ;
}

}  // namespace

extern "C" {

// Reads the tasks of all layers up to `layer` that are not read yet; `next` is the first one that nobody took. Tasks are in
// order of layer. A thread that finds none left while another is still busy takes one of a later layer. Returns READ, or
// ABSENT or WRONG as soon as any task is.
int32_t keepwarm_read(const Part* parts, const Task* tasks, int32_t count, int32_t* next, int32_t layer, int32_t threads,
                      const Hash* hash) {
    int end = *next;
    while (end < count && tasks[end].layer <= layer) end++;
    if (end == *next) return READ;
    std::atomic<int> taken(*next), unread(end - *next), worst(READ);
#pragma omp parallel num_threads(threads)
    {
        void* state = hash->create();
        for (int task = taken; state && worst == READ;) {
            if (task >= count || (task >= end && unread == 0)) break;
            if (!taken.compare_exchange_weak(task, task + 1)) continue;
            const State found = fetch(tasks[task], parts, *hash, state);
            if (found != READ) worst = found;
            if (task < end) unread--;
            task = taken;
        }
        if (state) hash->free(state);
        else worst = ABSENT;
    }
    *next = taken;
    return worst;
}
}
