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
// bytes follows the groups: each is the byte's number in the panel << 8 | byte.
//
// A head is packed in two parts of six bits for each weight (cells.h). The second parts of all groups lie apart. The first
// ones suffice for most tokens where only the largest logit is asked for (screen.h). A weight that is listed has both bytes
// in the list.
#pragma once

#include <algorithm>
#include <cstring>
#include <exception>
#include <type_traits>
#include <vector>

#include "cells.h"
#include "vectors.h"

extern "C" {

struct WeightPanel {         // 16 outputs of a weight
    const uint8_t* at;       // its groups; or, if there is no list, the bfloat16 themselves
    const uint32_t* others;  // the list, in order of groups; LAST ends it
    uint8_t upper[16];       // by code
    const uint8_t* rest;     // the second part; null if there is one part
    const WeightCells* cells;  // of both parts; null if there is one part
};

}  // extern "C"

struct HeadPanel : WeightPanel {};  // the only ones that may be in two parts: others' loops need not ask

namespace {

constexpr int GROUP_BYTES = 2 * PART_BYTES;  // bytes of a group
constexpr int SOON = 8;  // groups ahead, whose second parts are asked for to be in the first cache
constexpr uint32_t LAST = 0xffffffff;

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
    static constexpr int PARTS = 1;
    uint8_t byte[16], code[256];
    explicit UpperBytes(const uint8_t* given) {
        std::memcpy(byte, given, sizeof byte);
        std::memset(code, NO_CODE, sizeof code);
        for (int i = 15; i >= 0; i--) code[byte[i]] = i;
    }
    bool has(uint16_t weight) const { return code[weight >> 8] != NO_CODE; }
};

template <class Codes>
inline int64_t others_of(const WeightMatrix& m, const Codes& codes, int64_t panel) {
    int64_t count = 0;
    for (int64_t group = 0; group < m.across / PAIRED; group++)
        each_of_group(m, panel, group, [&](int, uint16_t weight) { count += !codes.has(weight); });
    return count;
}

// Returns the bytes of a panel, but for its second part.
template <class Codes>
inline int64_t panel_bytes_of(const WeightMatrix& m, int64_t others) {
    return (m.across / PAIRED * GROUP_BYTES / Codes::PARTS + (others * Codes::PARTS + 1) * 4 + 63) / 64 * 64;
}

inline uint32_t listed(int64_t byte, uint8_t value) { return (uint32_t)byte << 8 | value; }

// Packs a panel to `to`, which holds zeros.
inline WeightPanel pack_panel(const WeightMatrix& m, const UpperBytes& upper, int64_t panel, uint8_t* to) {
    const int64_t groups = m.across / PAIRED;
    uint32_t* const others = (uint32_t*)(to + groups * GROUP_BYTES);
    uint32_t* other = others;
    for (int64_t group = 0; group < groups; group++) {
        uint8_t *const codes = to + group * GROUP_BYTES, *const lower = codes + GROUP / 2;
        each_of_group(m, panel, group, [&](int number, uint16_t weight) {
            const int vector = number / 32, word = number % 32, half = vector / 2;
            const int at = word / 8 * 16 + vector % 2 * 8 + word % 8;  // `unpack` interleaves bytes within 16 of them
            if (upper.has(weight)) codes[at] |= upper.code[weight >> 8] << 4 * half;
            else *other++ = listed((group * GROUP + number) * 2 + 1, weight >> 8);
            lower[half * 64 + at] = (uint8_t)weight;
        });
    }
    *other = LAST;
    WeightPanel made{to, others, {}, nullptr, nullptr};
    std::memcpy(made.upper, upper.byte, sizeof made.upper);
    return made;
}

// Packs the first part of a panel to `to`, and its second part to `rest`. Both hold zeros.
inline WeightPanel pack_panel(const WeightMatrix& m, const CellCodes& codes, int64_t panel, uint8_t* to, uint8_t* rest) {
    const int64_t groups = m.across / PAIRED;
    uint32_t* const others = (uint32_t*)(to + groups * PART_BYTES);
    uint32_t* other = others;
    for (int64_t group = 0; group < groups; group++, to += PART_BYTES)
        each_of_group(m, panel, group, [&](int number, uint16_t weight) {
            const int64_t byte = (group * GROUP + number) * 2;
            if (codes.has(weight)) {
                const uint8_t cell = codes.code[weight];
                put_six(to, number, cell), put_six(rest + group * PART_BYTES, number, weight - codes.cells.first[cell]);
            } else {  // in both parts there are zeros
                *other++ = listed(byte, (uint8_t)weight), *other++ = listed(byte + 1, weight >> 8);
            }
        });
    *other = LAST;
    return {to - groups * PART_BYTES, others, {}, rest, &codes.cells};
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
inline int vector_bytes(const WeightPanel& panel) { return panel.others ? (panel.cells ? PART_BYTES : GROUP_BYTES) / 4 : 64; }

#if defined(__AVX512BW__) || defined(__ARM_NEON)
#if defined(__AVX512BW__)
using Table = __m512i;  // the upper bytes by code, in each quarter
inline Table table_of(const uint8_t* upper) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)upper)); }

// Puts a group's bytes together; the codes are in the lower half of a byte.
inline void put_group(Table upper, __m512i codes, __m512i more_codes, __m512i lower, __m512i more_lower, bf16* to) {
    const __m512i high = _mm512_shuffle_epi8(upper, codes), more_high = _mm512_shuffle_epi8(upper, more_codes);
    _mm512_storeu_si512(to, _mm512_unpacklo_epi8(lower, high));
    _mm512_storeu_si512(to + 32, _mm512_unpackhi_epi8(lower, high));
    _mm512_storeu_si512(to + 64, _mm512_unpacklo_epi8(more_lower, more_high));
    _mm512_storeu_si512(to + 96, _mm512_unpackhi_epi8(more_lower, more_high));
}

// Unpacks a group.
inline void unpack(const uint8_t* from, Table upper, bf16* to) {
    const __m512i codes = _mm512_loadu_si512(from), low = _mm512_set1_epi8(15);
    const __m512i more = _mm512_and_si512(_mm512_srli_epi16(codes, 4), low);
    put_group(upper, _mm512_and_si512(codes, low), more, _mm512_loadu_si512(from + 64), _mm512_loadu_si512(from + 128), to);
}
#else
using Table = uint8x16_t;
inline Table table_of(const uint8_t* upper) { return vld1q_u8(upper); }

inline void put_group(Table upper, uint8x16_t codes, uint8x16_t more_codes, uint8x16_t lower, uint8x16_t more_lower, bf16* to) {
    const uint8x16_t high = vqtbl1q_u8(upper, codes), more_high = vqtbl1q_u8(upper, more_codes);
    uint8_t *const at = (uint8_t*)to, *const more = (uint8_t*)(to + 64);
    vst1q_u8(at, vzip1q_u8(lower, high)), vst1q_u8(at + 64, vzip2q_u8(lower, high));
    vst1q_u8(more, vzip1q_u8(more_lower, more_high)), vst1q_u8(more + 64, vzip2q_u8(more_lower, more_high));
}

inline void unpack(const uint8_t* from, Table upper, bf16* to) {
    for (int at = 0; at < 64; at += 16) {
        const uint8x16_t codes = vld1q_u8(from + at);
        put_group(upper, vandq_u8(codes, vdupq_n_u8(15)), vshrq_n_u8(codes, 4), vld1q_u8(from + 64 + at), vld1q_u8(from + 128 + at),
                  to + at / 2);
    }
}
#endif

// Reads a panel, some groups at a time.
template <class Panel>
class PanelReader {
    const uint32_t* other;
    bf16* const room;
    const int64_t places;
    int64_t place = 0;
    uint32_t limit = 0;  // the first number behind what was read, as in the list
    const Table upper;
    const uint8_t *rest, *next_rest = nullptr;
    const WeightCells* const cells;

public:
    const uint8_t* from;
    const int bytes;  // of 32 weights, a vector

    // Unpacks to `room` for `places` weights, one behind the other. Where it ends, they begin anew.
    PanelReader(const Panel& panel, bf16* room, int64_t places)
        : other(panel.others), room(room), places(places), upper(table_of(panel.upper)), rest(panel.rest),
          cells(panel.cells), from(panel.at), bytes(vector_bytes(panel)) {}

    // Prefetches a panel's second part while this one is read.
    void ask_for_rest(const Panel* next) { next_rest = next ? next->rest : nullptr; }

    // Returns the weights of the next `groups` groups. They must not reach over the end of the room.
    INLINE const bf16* take(int groups) {
        bf16* const to = room + place;
        if (!other) {
            const bf16* const there = (const bf16*)from;
            from += groups * GROUP * 2;
            return there;
        }
        if (std::is_same_v<Panel, HeadPanel> && cells) take_parts(groups, to);
        else for (int i = 0; i < groups; i++, from += GROUP_BYTES) unpack(from, upper, to + i * GROUP);
        const uint32_t begin = limit >> 8;
        for (limit += (uint32_t)groups * GROUP * 2 << 8; *other < limit; other++)
            ((uint8_t*)to)[(*other >> 8) - begin] = (uint8_t)*other;
        place += groups * GROUP;
        if (place == places) place = 0;
        return to;
    }

private:
    INLINE void take_parts(int groups, bf16* to) {
        for (int i = 0; i < groups; i++, from += PART_BYTES) {
            unpack_cells(from, rest, *cells, (uint16_t*)(to + i * GROUP));
            rest += PART_BYTES;
            ask_for_part(rest + SOON * PART_BYTES);
            if (next_rest) ask_for_part(next_rest), next_rest += PART_BYTES;
        }
    }
};
#endif

}  // namespace
