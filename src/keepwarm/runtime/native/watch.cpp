// Checks for every request whether a loaded model was changed in place (runtime/watch.py). By then the model's objects
// have left the processor's caches. Reading them one after another would wait for memory each time, so known addresses are
// prefetched.

#include <cstdint>

namespace {
constexpr int64_t AHEAD = 16;  // places are prefetched so many places ahead
constexpr int WORDS = 8;       // words that are read at each place
}

extern "C" {

// This is a function of the running interpreter's stable interface. It walks a dict and takes no references.
int PyDict_Next(void* dict, intptr_t* position, void** key, void** value);

// Prefetches the memory at each place.
void keepwarm_ask(const void* const* place, int64_t places) {
    for (int64_t i = 0; i < places; i++) __builtin_prefetch(place[i]);
}

// Returns whether the dicts' values are just these objects, in order. The caller must hold the interpreter's lock.
int keepwarm_holds(void* const* dict, int64_t dicts, void* const* held, int64_t count) {
    int64_t at = 0;
    for (int64_t i = 0; i < dicts; i++) {
        if (i + AHEAD < dicts) __builtin_prefetch(dict[i + AHEAD]);
        intptr_t position = 0;
        for (void *key, *value; PyDict_Next(dict[i], &position, &key, &value);)
            if (at == count || held[at++] != value) return 0;
    }
    return at == count;
}

// Returns a checksum over the 64 bytes at each place. It is FNV-1a by words, with one change: high bits are folded into
// low ones. A product passes a difference in the highest bit on to no other bit, so two such differences would cancel.
uint64_t keepwarm_sampled(const void* const* place, int64_t places) {
    uint64_t sum = 14695981039346656037u;
    for (int64_t i = 0; i < places; i++) {
        if (i + AHEAD < places) __builtin_prefetch(place[i + AHEAD]);
        uint64_t words[WORDS];
        __builtin_memcpy(words, place[i], sizeof words);
        for (uint64_t word : words) {
            sum = (sum ^ word) * 1099511628211u;
            sum ^= sum >> 32;
        }
    }
    return sum;
}
}
