// Brings stored KV into place and verifies it. It reads from the page cache, with all threads of a step at once, or
// receives from a Redis server.
//
// A task is what one checksum covers: one block of one layer. It is read and hashed piece by piece, so that bytes are
// hashed, and the layer is attended to, while they are in the processor's cache. No read waits for a device: what is not
// in memory is left to the caller (RWF_NOWAIT). Receiving waits, until a deadline.

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <omp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

namespace {

constexpr int64_t PIECE = 64 << 10;  // bytes; more would leave the second-level cache before they are hashed
constexpr int GATHERED = 16;         // the most parts of one read
constexpr int SCATTERED = 32;        // the most parts of one receive
constexpr double LOOK_UP = 0.1;      // seconds; after these, waiting returns to the caller for a moment
constexpr int AHEAD = 5;             // so many units are asked for beyond the one that is received

enum State : int32_t { WAITING, READ, ABSENT, WRONG, LATE, AGAIN };

struct Digest { uint64_t low, high; };  // XXH128_hash_t

}  // namespace

extern "C" {

struct Part { int64_t offset, size; char* to; };  // a range of the file, and where its bytes go

struct Task {
    int32_t layer, fd;
    int64_t first, last;   // its parts
    uint64_t low, high;    // the XXH3-128 of its parts, in order
};

struct Unit {  // what is asked for at once, as ranges
    int64_t command, command_end;  // of the commands' bytes
    int64_t reply, reply_end;      // of the replies' sizes
    int64_t part, part_end;        // of the parts, in order of arrival
    int64_t task, task_end;        // of the tasks
};

struct Hash {  // functions of the xxHash library
    void* (*create)();
    int (*reset)(void*);
    int (*update)(void*, const void*, size_t);
    Digest (*digest)(const void*);
    int (*free)(void*);
};

struct Received {  // how far receiving has come
    int64_t unit, asked, sent;       // units received; units asked for; bytes sent of the next unit's command
    int64_t begun, reply;            // whether this unit's replies have begun; the reply that is being received
    int64_t head, body, end;         // received bytes of that reply's parts
    int64_t part, done;              // the part that gets the next byte, and the bytes that it has
};

struct Progress { int32_t begun, wrong; };  // the number of tasks begun; a State, 0 as long as nothing is wrong

struct Job {
    const Part* parts;
    const Task* tasks;
    const Hash* hash;
    int32_t* left;  // for each layer, how many tasks are not done
    Progress* progress;
    int64_t* spent;  // nanoseconds that all threads together have spent
    int64_t* most;   // for each layer, the most bytes that one thread took on before it
    int32_t count;
};

}  // extern "C"

namespace {

int64_t now() {  // nanoseconds
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

int64_t read_now(int fd, const iovec* places, int count, int64_t offset) {
#if defined(__linux__) && defined(RWF_NOWAIT)
    return preadv2(fd, places, count, offset, RWF_NOWAIT);
#else
    return -1;
#endif
}

State verified(const Task& task, const Part* parts, const Hash& hash, void* state) {
    hash.reset(state);
    for (const Part* part = parts + task.first; part < parts + task.last; part++) hash.update(state, part->to, part->size);
    const Digest found = hash.digest(state);
    return found.low == task.low && found.high == task.high ? READ : WRONG;
}

// Reads a task and verifies it. Parts that follow one another in the file are read by one call, wherever their bytes go.
State fetch(const Task& task, const Part* parts, const Hash& hash, void* state) {
    hash.reset(state);
    const Part* end = parts + task.last;
    int64_t done = 0;  // bytes of `part` that have arrived
    for (const Part* part = parts + task.first; part < end;) {
        if (done == part->size) {
            part++, done = 0;
            continue;
        }
        iovec places[GATHERED];
        int count = 0;
        int64_t size = 0, skip = done;
        const int64_t offset = part->offset + done;
        for (const Part* each = part; each < end && count < GATHERED && size < PIECE; each++, skip = 0) {
            if (each->offset + skip != offset + size) break;
            const int64_t left = each->size - skip < PIECE - size ? each->size - skip : PIECE - size;
            places[count++] = {each->to + skip, (size_t)left};
            size += left;
        }
        int64_t got = read_now(task.fd, places, count, offset);
        if (got <= 0) return ABSENT;
        for (int64_t taken; got > 0; got -= taken) {
            taken = part->size - done < got ? part->size - done : got;
#if !defined(UNVERIFIED)  // only benchmarks/verify_cost.py defines it, to measure the cost of verifying
            hash.update(state, part->to + done, taken);
#endif
            done += taken;
            if (done == part->size) part++, done = 0;
        }
    }
#if !defined(UNVERIFIED)
    const Digest found = hash.digest(state);
    if (found.low != task.low || found.high != task.high) return WRONG;
#endif
    return READ;
}

}  // namespace

extern "C" {

// Each thread of a step calls this to read its share of the tasks of all layers up to `layer`. Tasks are in order of layer.
// If none is left, a thread takes one of a later layer, as long as another thread is still busy or has taken on as many
// bytes. So no thread waits for long. When all threads have returned, the tasks are read, or the job says what went wrong.
void keepwarm_take(const Job* job, int32_t layer) {
    const int64_t started = now();
    void* state = nullptr;
    int64_t mine = 0;
    while (!__atomic_load_n(&job->progress->wrong, __ATOMIC_RELAXED)) {
        int32_t task = __atomic_load_n(&job->progress->begun, __ATOMIC_RELAXED);
        if (task >= job->count) break;
        const Task& next = job->tasks[task];
        int64_t size = 0, most = __atomic_load_n(job->most + layer, __ATOMIC_RELAXED);
        for (int64_t part = next.first; part < next.last; part++) size += job->parts[part].size;
        const bool done = __atomic_load_n(job->left + layer, __ATOMIC_RELAXED) == 0;
        if (next.layer > layer && done && mine + size > most) break;
        if (!__atomic_compare_exchange_n(&job->progress->begun, &task, task + 1, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            continue;
        mine += size;
        while (most < mine && !__atomic_compare_exchange_n(job->most + layer, &most, mine, true, __ATOMIC_RELAXED,
                                                           __ATOMIC_RELAXED)) {}
        if (!state) state = job->hash->create();
        State found = ABSENT;
        if (state) found = next.fd < 0 ? verified(next, job->parts, *job->hash, state) : fetch(next, job->parts, *job->hash, state);
        if (found != READ) __atomic_store_n(&job->progress->wrong, found, __ATOMIC_RELAXED);
        __atomic_sub_fetch(job->left + next.layer, 1, __ATOMIC_RELAXED);
    }
    if (state) job->hash->free(state);
    __atomic_add_fetch(job->spent, now() - started, __ATOMIC_RELAXED);
}

// Does the same with threads of its own.
void keepwarm_read(const Job* job, int32_t layer, int32_t threads) {
#pragma omp parallel num_threads(threads)
    keepwarm_take(job, layer);
}
}

namespace {

double left(double deadline) {  // in seconds; the deadline is one of CLOCK_MONOTONIC
    return deadline - now() * 1e-9;
}

struct Line {
    int fd;
    double deadline, look_up;  // seconds of CLOCK_MONOTONIC
};

State wait(const Line& line, short what) {
    if (left(line.deadline) <= 0) return LATE;
    const double seconds = left(line.look_up < line.deadline ? line.look_up : line.deadline);
    pollfd one{line.fd, what, 0};
    return seconds > 0 && poll(&one, 1, (int)(seconds * 1e3) + 1) > 0 ? READ : AGAIN;
}

// Sends the rest of a command. `sent` counts the bytes that are sent.
State ask(const Line& line, const char* command, int64_t size, int64_t& sent) {
    State state = READ;
    while (state == READ && sent < size) {
        const ssize_t more = send(line.fd, command + sent, size - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (more > 0) sent += more;
        else if (errno != EAGAIN && errno != EINTR) return ABSENT;
        else state = wait(line, POLLOUT);
    }
    return state;
}

// Receives the rest of what is expected, and compares. `came` counts the bytes that have come.
State expect(const Line& line, const char* what, int size, int64_t& came) {
    char found[32];
    State state = READ;
    while (state == READ && came < size) {
        const ssize_t got = recv(line.fd, found, size - came, MSG_DONTWAIT);
        if (got > 0) {
            if (memcmp(found, what + came, got)) return ABSENT;
            came += got;
        } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) return ABSENT;
        else state = wait(line, POLLIN);
    }
    return state;
}

State receive(const Line& line, const Unit& unit, const Part* parts, const int32_t* order, const int64_t* sizes,
              Received& so_far) {
    for (; so_far.reply < unit.reply_end; so_far.reply++, so_far.head = so_far.body = so_far.end = 0) {
        char head[32];
        const int64_t size = sizes[so_far.reply];
        State state = expect(line, head, snprintf(head, sizeof head, "$%lld\r\n", (long long)size), so_far.head);
        while (state == READ && so_far.body < size) {
            if (left(line.deadline) <= 0) return LATE;  // after the deadline nothing may be written into memory
            iovec places[SCATTERED];
            int count = 0;
            for (int64_t each = so_far.part, skip = so_far.done, room = size - so_far.body; count < SCATTERED && room > 0;
                 each++, skip = 0) {
                const Part& part = parts[order[each]];
                const int64_t most = part.size - skip < room ? part.size - skip : room;
                places[count++] = {part.to + skip, (size_t)most};
                room -= most;
            }
            msghdr message{};
            message.msg_iov = places;
            message.msg_iovlen = count;
            int64_t got = recvmsg(line.fd, &message, MSG_DONTWAIT);
            if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) return ABSENT;
            if (got < 0) state = wait(line, POLLIN);
            for (int64_t taken; got > 0; got -= taken, so_far.body += taken) {
                const int64_t most = parts[order[so_far.part]].size - so_far.done;
                taken = most < got ? most : got;
                so_far.done += taken;
                if (so_far.done == parts[order[so_far.part]].size) so_far.part++, so_far.done = 0;
            }
        }
        if (state == READ) state = expect(line, "\r\n", 2, so_far.end);
        if (state != READ) return state;
    }
    return READ;
}

State receive_all(const Part* parts, const Task* tasks, const int32_t* order, const Unit* units, int32_t count,
                  const char* commands, const int64_t* sizes, const Line& line, const Hash& hash, Received& so_far) {
    void* state = hash.create();
    State found = state ? READ : ABSENT;
    while (found == READ && so_far.unit < count) {
        const Unit& unit = units[so_far.unit];
        for (; found == READ && so_far.asked < count && so_far.asked <= so_far.unit + AHEAD;) {
            const Unit& next = units[so_far.asked];
            found = ask(line, commands + next.command, next.command_end - next.command, so_far.sent);
            if (found == READ) so_far.asked++, so_far.sent = 0;
        }
        if (found == READ && !so_far.begun)
            so_far.begun = 1, so_far.reply = unit.reply, so_far.part = unit.part, so_far.done = 0;
        if (found == READ) found = receive(line, unit, parts, order, sizes, so_far);
        for (int64_t task = unit.task; found == READ && task < unit.task_end; task++)
            found = verified(tasks[task], parts, hash, state);
        if (found == READ) so_far.unit++, so_far.begun = 0;
    }
    if (state) hash.free(state);
    return found;
}

}  // namespace

extern "C" {

// Asks for units and receives them one after another. The server prepares the next ones while one is received and verified.
// Only as much as fits a processor's cache is asked for at once, so that neither side touches fresh memory for it.
//
// Returns READ; WRONG; ABSENT if the connection ended or a reply is not the expected one; LATE after the deadline; or AGAIN
// if it has waited for LOOK_UP seconds or a signal came. After AGAIN the caller does what there is to do, and calls again
// with the same `so_far`, which is zero at first.
//
// The other threads of the caller's team of `team` threads sleep until it is done. Left alone, they would spin for some
// milliseconds after the caller's last parallel region, on cores that the server may need.
int32_t keepwarm_receive(const Part* parts, const Task* tasks, const int32_t* order, const Unit* units, int32_t count,
                         const char* commands, const int64_t* sizes, int32_t fd, double deadline, const Hash* hash,
                         Received* so_far, int32_t team) {
    State found = ABSENT;
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;  // not C++'s own, which would ask for a recent library
    pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
    bool done = false;
#pragma omp parallel num_threads(team)
    if (omp_get_thread_num() == 0) {
        const Line line{fd, deadline, now() * 1e-9 + LOOK_UP};
        found = receive_all(parts, tasks, order, units, count, commands, sizes, line, *hash, *so_far);
        pthread_mutex_lock(&mutex);
        done = true;
        pthread_cond_broadcast(&changed);
        pthread_mutex_unlock(&mutex);
    } else {
        pthread_mutex_lock(&mutex);
        while (!done) pthread_cond_wait(&changed, &mutex);
        pthread_mutex_unlock(&mutex);
    }
    return found;
}
}
