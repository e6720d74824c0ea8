// bfloat16 weights in 12 bits, without loss: how they are packed, and how products read them.
//
// The weights of a matrix differ little in size. So sixteen of their upper bytes (the sign and seven bits of the exponent)
// make up all but a few in ten thousand. A code of four bits stands for each of these. What has another upper byte is
// listed. Lower bytes are kept as they are. DFloat11 (arXiv:2504.11651) finds the same, and takes codes of varying length,
// which are shorter by a bit and slower to read.
//
// A step of few rows takes as long as reading the weights. It reads a quarter less this way, and computes the same bits.
//
// A panel of 16 outputs has its weights as [columns / 2][16][2]. Columns are padded with zeros. A group of 128 weights is
// 64 bytes with two codes each, then 128 lower bytes, in the order in which `unpack` needs them. The list of other upper
// bytes follows the groups: each is the weight's number in the panel << 8 | byte.
#pragma once

#include <algorithm>
#include <cstring>
#include <exception>
#include <vector>

#include "vectors.h"

extern "C" {

struct WeightPanel {         // 16 outputs of a weight
    const uint8_t* at;       // its groups; or, if there is no list, the bfloat16 themselves
    const uint32_t* others;  // the list, in order of groups; LAST ends it
    uint8_t upper[16];       // by code
};

struct WeightMatrix {        // bfloat16 [rows][columns], to be packed in panels of `across` columns
    const uint16_t* at;
    int64_t rows, columns, across;
};

}  // extern "C"

namespace {

constexpr int GROUP = 128, PAIRED = 8;           // weights of a group; their columns
constexpr int GROUP_BYTES = GROUP / 2 + GROUP, PACKED = GROUP_BYTES / 4;  // bytes of a group, and of 32 weights
constexpr uint32_t LAST = 0xffffffff;
constexpr uint8_t NO_CODE = 255;

// ---- packing ----

// Gives each weight of a group to `take(its number in the group, weight)`, in any order. Padding is zero.
template <class Take>
inline void each_of_group(const WeightMatrix& m, int64_t panel, int64_t group, Take take) {
    for (int r = 0; r < LANES; r++) {
        const int64_t row = panel * LANES + r, first = group * PAIRED;
        const uint16_t* from = m.at + row * m.columns + first;
        for (int c = 0; c < PAIRED; c++)
            take(c / 2 * 2 * LANES + r * 2 + c % 2, row < m.rows && first + c < m.columns ? from[c] : (uint16_t)0);
    }
}

// The sixteen upper bytes that stand for themselves, and each byte's code.
struct UpperBytes {
    uint8_t byte[16], code[256];
    explicit UpperBytes(const uint8_t* given) {
        std::memcpy(byte, given, sizeof byte);
        std::memset(code, NO_CODE, sizeof code);
        for (int i = 15; i >= 0; i--) code[byte[i]] = i;
    }
};

inline int64_t others_of(const WeightMatrix& m, const UpperBytes& upper, int64_t panel) {
    int64_t count = 0;
    for (int64_t group = 0; group < m.across / PAIRED; group++)
        each_of_group(m, panel, group, [&](int, uint16_t weight) { count += upper.code[weight >> 8] == NO_CODE; });
    return count;
}

inline int64_t panel_bytes_of(const WeightMatrix& m, int64_t others) {
    return (m.across / PAIRED * GROUP_BYTES + (others + 1) * 4 + 63) / 64 * 64;
}

// Packs a panel to `to`, which holds zeros.
inline WeightPanel pack_twelve(const WeightMatrix& m, const UpperBytes& upper, int64_t panel, uint8_t* to) {
    const int64_t groups = m.across / PAIRED;
    uint32_t* const others = (uint32_t*)(to + groups * GROUP_BYTES);
    uint32_t* other = others;
    for (int64_t group = 0; group < groups; group++) {
        uint8_t *const codes = to + group * GROUP_BYTES, *const lower = codes + GROUP / 2;
        each_of_group(m, panel, group, [&](int number, uint16_t weight) {
            const int vector = number / 32, word = number % 32, half = vector / 2;
            const int at = word / 8 * 16 + vector % 2 * 8 + word % 8;  // `unpack` interleaves bytes within 16 of them
            const uint8_t code = upper.code[weight >> 8];
            lower[half * 64 + at] = (uint8_t)weight;
            if (code != NO_CODE) codes[at] |= code << 4 * half;
            else *other++ = (uint32_t)(group * GROUP + number) << 8 | weight >> 8;
        });
    }
    *other = LAST;
    WeightPanel made{to, others, {}};
    std::memcpy(made.upper, upper.byte, sizeof made.upper);
    return made;
}

// ---- reading ----

// Returns this thread's own room for `size` floats, which it keeps: whole lines of the cache. Returns null if there is no
// memory.
inline float* thread_room(int64_t size) noexcept {
    struct alignas(64) Line { float at[LANES]; };
    static thread_local std::vector<Line> room;
    try {
        const size_t lines = (size + LANES - 1) / LANES;
        if (room.size() < lines) room.resize(lines);
        return room.data()->at;
    } catch (const std::exception&) {
        return nullptr;
    }
}

// Returns the bytes of 32 weights, a vector, in a panel.
inline int vector_bytes(const WeightPanel& panel) { return panel.others ? PACKED : 64; }

#if defined(__AVX512BW__) || defined(__ARM_NEON)
#if defined(__AVX512BW__)
using Table = __m512i;  // the upper bytes by code, in each quarter
inline Table table_of(const uint8_t* upper) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)upper)); }

// Unpacks a group.
inline void unpack(const uint8_t* from, Table upper, bf16* to) {
    const __m512i codes = _mm512_loadu_si512(from), low = _mm512_set1_epi8(15);
    const __m512i lower[2] = {_mm512_loadu_si512(from + 64), _mm512_loadu_si512(from + 128)};
    const __m512i high[2] = {_mm512_shuffle_epi8(upper, _mm512_and_si512(codes, low)),
                             _mm512_shuffle_epi8(upper, _mm512_and_si512(_mm512_srli_epi16(codes, 4), low))};
    for (int half = 0; half < 2; half++) {
        _mm512_storeu_si512(to + half * 64, _mm512_unpacklo_epi8(lower[half], high[half]));
        _mm512_storeu_si512(to + half * 64 + 32, _mm512_unpackhi_epi8(lower[half], high[half]));
    }
}
#else
using Table = uint8x16_t;
inline Table table_of(const uint8_t* upper) { return vld1q_u8(upper); }

inline void unpack(const uint8_t* from, Table upper, bf16* to) {
    for (int quarter = 0; quarter < 4; quarter++) {
        const uint8x16_t codes = vld1q_u8(from + quarter * 16);
        const uint8x16_t high[2] = {vqtbl1q_u8(upper, vandq_u8(codes, vdupq_n_u8(15))), vqtbl1q_u8(upper, vshrq_n_u8(codes, 4))};
        for (int half = 0; half < 2; half++) {
            const uint8x16_t lower = vld1q_u8(from + 64 + half * 64 + quarter * 16);
            uint8_t* const at = (uint8_t*)(to + half * 64 + quarter * 8);
            vst1q_u8(at, vzip1q_u8(lower, high[half])), vst1q_u8(at + 64, vzip2q_u8(lower, high[half]));
        }
    }
}
#endif

// Reads a panel, some groups at a time.
class PanelReader {
    const uint32_t* other;
    bf16* const room;
    const int64_t places;
    int64_t place = 0;
    uint32_t limit = 0;  // the first number behind what was read, as in the list
    const Table upper;

public:
    const uint8_t* from;

    // Unpacks to `room` for `places` weights, one behind the other. Where it ends, they begin anew.
    PanelReader(const WeightPanel& panel, bf16* room, int64_t places)
        : other(panel.others), room(room), places(places), upper(table_of(panel.upper)), from(panel.at) {}

    // Returns the weights of the next `groups` groups. They must not reach over the end of the room.
    const bf16* take(int groups) {
        bf16* const to = room + place;
        if (!other) {
            const bf16* const there = (const bf16*)from;
            from += groups * GROUP * 2;
            return there;
        }
        for (int i = 0; i < groups; i++, from += GROUP_BYTES) unpack(from, upper, to + i * GROUP);
        const uint32_t begin = limit >> 8;
        for (limit += (uint32_t)groups * GROUP << 8; *other < limit; other++)
            ((uint8_t*)(to + ((*other >> 8) - begin)))[1] = (uint8_t)*other;
        place += groups * GROUP;
        if (place == places) place = 0;
        return to;
    }
};
#endif

}  // namespace
