// What a watch over a loaded model looks at for every request (runtime/watch.py). By then it has left the processor's
// caches, and places asked for one by one take their time one by one: those that are known are asked for ahead.

#include <cstdint>

namespace {
constexpr int64_t AHEAD = 16;  // places
constexpr int WORDS = 8;       // of a spot
}

extern "C" {

// The running interpreter's own, of its stable interface: it walks a dict and takes no references.
int PyDict_Next(void* dict, intptr_t* position, void** key, void** value);

// Asks for what lies at so many places.
void keepwarm_ask(const void* const* place, int64_t places) {
    for (int64_t i = 0; i < places; i++) __builtin_prefetch(place[i]);
}

// Whether dicts hold just these objects as their values, in order. To be called with the interpreter's lock.
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

// A checksum over the 64 bytes at each place: FNV-1a, word by word, where high bits come down again. A product hands a
// difference in the highest bit on alone, so that two of them would cancel.
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
