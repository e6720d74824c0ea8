// Products with weights in blocks of 2 to 8 bits (blocks.h). The weights are never widened to floats.
//
// The other operand is rounded to 8 bits, in blocks of 32 columns with their own scale. The sum within a block adds
// integers, so it is exact in any order. The sums of a row's blocks are added as floats, one after another. So a row's
// bits depend on that row alone.
#pragma once

#include "bytes.h"
#include "model.h"

namespace {

// 32 columns of a row, rounded to 8 bits, with their scale and sums. All of it fits into one cache line.
struct alignas(64) Rounded {
    int8_t x[COLUMNS];
    float scale, total;              // `total` is the scale times the sum of x
    int32_t less_8, less_16, less_128;  // minus the sum of x times what Q4_0, Q5_0 and Q8_0 subtract from each code
    int32_t less_32[2];              // the same for Q6_K, for each half
};

inline int32_t add_up(const int8_t* x, int n) {
    int32_t total = 0;
    for (int i = 0; i < n; i++) total += x[i];
    return total;
}

inline void round_block(Vec first, Vec second, Rounded& to) {
    const Vec sizes = max(as_floats(as_ints(first) & 0x7fffffff), as_floats(as_ints(second) & 0x7fffffff));
#if defined(__AVX512F__)
    const float most = _mm512_reduce_max_ps((__m512)sizes);
#else
    float most = 0, size[LANES];
    store(size, sizes);
    for (int i = 0; i < LANES; i++) most = size[i] > most ? size[i] : most;
#endif
    const float by = most > 1e-30f ? 127.f / most : 0.f;
#if defined(__AVX512F__)
    const __m512i a = (__m512i)rounded(first * splat(by)), b = (__m512i)rounded(second * splat(by));
    _mm_store_si128((__m128i*)to.x, _mm512_cvtepi32_epi8(a)), _mm_store_si128((__m128i*)(to.x + LANES), _mm512_cvtepi32_epi8(b));
    const int32_t left = _mm512_reduce_add_epi32(a), right = _mm512_reduce_add_epi32(b);
#else
    int32_t value[COLUMNS];
    to_memory(value, rounded(first * splat(by))), to_memory(value + LANES, rounded(second * splat(by)));
    for (int i = 0; i < COLUMNS; i++) to.x[i] = (int8_t)value[i];
    const int32_t left = add_up(to.x, LANES), right = add_up(to.x + LANES, LANES);
#endif
    to.scale = by ? most / 127.f : 0.f;
    to.total = to.scale * (left + right);
    to.less_8 = -8 * (left + right), to.less_16 = -16 * (left + right), to.less_128 = -128 * (left + right);
    to.less_32[0] = -32 * left, to.less_32[1] = -32 * right;
}

// Rounded rows [rows, width], stored as [rows / 12][width / 32][12]. So a product reads at fixed distances.
struct QuantRows {
    static constexpr int BLOCK = 12;  // rows whose sums are computed at once
    static constexpr int TOGETHER = BLOCK;
    static constexpr int UNIT = COLUMNS;
    static constexpr int KEPT = 0;    // nothing of a weight is kept for more rows
    template <class> using Weight = QuantPanel;
    template <class> using HeadWeight = QuantPanel;
    Rounded* p = nullptr;
    int64_t blocks = 0;
    QuantRows() = default;
    QuantRows(int width, int, float* p) : p((Rounded*)p), blocks(blocks_of(width)) {}
    QuantRows of(int width, int rows) const { return {width, rows, (float*)p}; }
    static int64_t size(int64_t rows, int width) { return (rows + BLOCK - 1) / BLOCK * BLOCK * blocks_of(width) * (sizeof(Rounded) / 4); }
    void clear(int) const {}
    int64_t row_bytes() const { return blocks * sizeof(Rounded); }
    int64_t panel() const { return 1; }
    Rounded* row(int row) const { return p + row / BLOCK * BLOCK * blocks + row % BLOCK; }  // its next block: + BLOCK
    void put(int row, int column, Vec v) const {
        Rounded& to = this->row(row)[column / COLUMNS * BLOCK];
        if (column % COLUMNS == 0) return store((float*)&to, v);  // the first half is kept there until the second comes
        round_block(load((const float*)&to), v, to);
    }
    Vec get(int row, int column) const {
        const Rounded& from = this->row(row)[column / COLUMNS * BLOCK];
        return signed_floats((const uint8_t*)from.x + column % COLUMNS) * splat(from.scale);
    }
};

static_assert(sizeof(Rounded) == 64, "a block of activations is one line");

constexpr int64_t LATER = 8 << 10;  // weights are prefetched so many bytes ahead, into the second-level cache

template <int SIZE>
inline void ask_for(const uint8_t* p) {
    for (int at = 0; at < SIZE; at += 64) __builtin_prefetch(p + at, 0, 2);
}

template <int KIND> constexpr bool IS_FLOAT = shape_of(KIND).bits >= 16;

// Returns 16 floats of a kind.
template <int KIND>
inline Vec floats_at(const uint8_t* p) {
    if constexpr (KIND == F32) return load((const float*)p);
    else if constexpr (KIND == F16) return halves(p);
    else return load((const bf16*)p);
}

// Returns the scales that `pack_int4_scales` packed.
inline Vec long_scales(const uint8_t* p) {
    return as_floats(to_words(of_memory<VecH>((const uint16_t*)p)) << 16 | of_bytes<VecU>(p + sizeof(VecH)) << 8);
}

enum Reading { IN_ORDER, ALONE, UPPER };  // panels one after another; one panel; the upper 4 bits of panels in two parts

// Walks a panel block by block. After a call of `next`, `code` and `scale` are those of the block it was called for.
template <int KIND, Reading HOW = IN_ORDER>
struct Format {
    static constexpr Shape SHAPE = shape_of(KIND);
    static constexpr bool SPLIT = SHAPE.split();  // the halves of a block have different scales
    const uint8_t *codes, *scales, *apart;
    Bytes code[8];
    Vec scale, other, least, other_least, factor, least_factor;  // `other...` are of the second half
    explicit Format(const QuantPanel& panel) : codes(panel.at), scales(panel.at), apart(panel.at + (int64_t)panel.apart * 64) {}

    void next(int64_t b) {
        const bool begins = b % SHAPE.group() == 0;
        if (begins) later<SHAPE.heads()>(codes), scales = codes, codes += SHAPE.heads();
        later<SHAPE.codes - SHAPE.apart>(codes);
        unpack();
        codes += SHAPE.codes - SHAPE.apart, apart += SHAPE.apart;
        if constexpr (SHAPE.each) {
            if (begins) scale = long_scales(scales), least = scale * small_floats(scales + 48);
            return;
        }
        if constexpr (SHAPE.book == FP4) {
            scale = as_floats(of_bytes<VecU>(scales) << 23);
            scales += SHAPE.scales;
            return;
        }
        if (!SHAPE.shared || begins) {
            factor = halves(scales);
            if (SHAPE.least) least_factor = halves(scales + 32);
            scales += SHAPE.shared;
        }
        if constexpr (SPLIT && SHAPE.least) {
            const VecI first = of_bytes<VecI>(scales), second = of_bytes<VecI>(scales + LANES);
            scale = factor * to_floats(first & 15), least = least_factor * to_floats(first >> 4);
            other = factor * to_floats(second & 15), other_least = least_factor * to_floats(second >> 4);
        } else if constexpr (SPLIT) scale = factor * signed_floats(scales), other = factor * signed_floats(scales + LANES);
        else if constexpr (SHAPE.shared && !SHAPE.least) scale = factor * signed_floats(scales);
        else if constexpr (SHAPE.shared) scale = factor * small_floats(scales), least = least_factor * small_floats(scales + LANES);
        else scale = factor, least = least_factor;
        scales += SHAPE.scales;
    }

    static int32_t start(const Rounded& x, int half) {
        if (KIND == Q6_K || KIND == Q6_PARTS) return x.less_32[half];
        if (KIND == Q3_K) return x.less_32[half] >> 3;
        if (half || (EIGHT_ARE_SIGNED && SHAPE.wide() == 8)) return 0;
        return SHAPE.less == 8 ? x.less_8 : SHAPE.less == 16 ? x.less_16 : SHAPE.less == 128 ? x.less_128 : 0;
    }

private:
    template <int SIZE> static void later(const uint8_t* p) {
        if constexpr (HOW != ALONE) ask_for<SIZE>(p + LATER);
    }
    void join() {  // the rest of the codes to their upper 4 bits
        later<SHAPE.apart>(apart);
        for (int i = 0; i < 4 && SHAPE.bits == 8; i++) {
            const Bytes v = bytes_at(apart + i * 64);
            code[i] = joined<0xf0>(low_bits(v), raised<4>(code[i]));
            code[4 + i] = joined<0xf0>(low_bits(raised<-4>(v)), raised<4>(code[4 + i]));
        }
        for (int h = 0; h < 2 && SHAPE.bits == 6; h++) {
            const Bytes v = bytes_at(apart + h * 64);
            Bytes* const to = code + 4 * h;
            to[0] = joined<3>(raised<2>(to[0]), v), to[1] = joined<3>(raised<2>(to[1]), raised<-2>(v));
            to[2] = joined<3>(raised<2>(to[2]), raised<-4>(v)), to[3] = joined<3>(raised<2>(to[3]), raised<-6>(v));
        }
    }
    void unpack() {
        if constexpr (SHAPE.apart) {
            for (int i = 0; i < 4; i++) {
                const Bytes v = bytes_at(codes + i * 64);
                code[i] = low_bits(v), code[4 + i] = low_bits(raised<-4>(v));
            }
            if constexpr (HOW != UPPER) join();
            return;
        }
        if constexpr (SHAPE.bits == 8) {
            for (int i = 0; i < 8; i++) code[i] = bytes_at(codes + i * 64);
            return;
        }
        if constexpr (SHAPE.bits < 4) {
            for (int h = 0; h < 2; h++) {
                const Bytes v = bytes_at(codes + h * 64);
                Bytes* const to = code + 4 * h;
                to[0] = joined<3>(Bytes{}, v), to[1] = joined<3>(Bytes{}, raised<-2>(v));
                to[2] = joined<3>(Bytes{}, raised<-4>(v)), to[3] = joined<3>(Bytes{}, raised<-6>(v));
            }
            if constexpr (SHAPE.bits == 3) {
                const Bytes v = bytes_at(codes + 128);
                code[0] = joined<4>(code[0], raised<2>(v)), code[1] = joined<4>(code[1], raised<1>(v));
                code[2] = joined<4>(code[2], v), code[3] = joined<4>(code[3], raised<-1>(v));
                code[4] = joined<4>(code[4], raised<-2>(v)), code[5] = joined<4>(code[5], raised<-3>(v));
                code[6] = joined<4>(code[6], raised<-4>(v)), code[7] = joined<4>(code[7], raised<-5>(v));
            }
            return;
        }
        for (int i = 0; i < 4; i++) {
            const Bytes v = bytes_at(codes + i * 64);
            code[i] = low_bits(v), code[4 + i] = low_bits(raised<-4>(v));
        }
        if constexpr (SHAPE.book != NONE)
            for (int i = 0; i < 8; i++) code[i] = looked_up(BOOKS[SHAPE.book], code[i]);
        if constexpr (SHAPE.bits == 5) {
            const Bytes v = bytes_at(codes + 256);
            code[0] = joined<16>(code[0], raised<4>(v)), code[1] = joined<16>(code[1], raised<3>(v));
            code[2] = joined<16>(code[2], raised<2>(v)), code[3] = joined<16>(code[3], raised<1>(v));
            code[4] = joined<16>(code[4], v), code[5] = joined<16>(code[5], raised<-1>(v));
            code[6] = joined<16>(code[6], raised<-2>(v)), code[7] = joined<16>(code[7], raised<-3>(v));
        }
        if constexpr (SHAPE.bits == 6)
            for (int h = 0; h < 2; h++) {
                const Bytes v = bytes_at(codes + 256 + h * 64);
                Bytes* const to = code + 4 * h;
                to[0] = joined<48>(to[0], raised<4>(v)), to[1] = joined<48>(to[1], raised<2>(v));
                to[2] = joined<48>(to[2], v), to[3] = joined<48>(to[3], raised<-2>(v));
            }
    }
};

// Computes the sums of MB rows with a panel's 16 columns of floats. Each is made of two sums, of the even and of the odd
// columns, in one order for any MB.
template <int KIND, int MB>
__attribute__((noinline)) void float_sums(const Rounded* x, int64_t blocks, const uint8_t* panel, Vec* to) {
    Vec even[MB] = {}, odd[MB] = {};
    for (int64_t b = 0; b < blocks; b++, x += QuantRows::BLOCK, panel += shape_of(KIND).codes) {
        ask_for<shape_of(KIND).codes>(panel + LATER);
        alignas(64) float value[MB][COLUMNS];
        for (int m = 0; m < MB; m++)
            for (int h = 0; h < COLUMNS; h += LANES)
                store(value[m] + h, signed_floats((const uint8_t*)x[m].x + h) * splat(x[m].scale));
        for (int c = 0; c < COLUMNS; c += 2) {
            constexpr int BYTES = shape_of(KIND).bits / 8 * LANES;
            const Vec first = floats_at<KIND>(panel + c * BYTES), second = floats_at<KIND>(panel + (c + 1) * BYTES);
#pragma GCC unroll 12
            for (int m = 0; m < MB; m++) {
                even[m] = fma(first, splat(value[m][c]), even[m]);
                odd[m] = fma(second, splat(value[m][c + 1]), odd[m]);
            }
        }
    }
    for (int m = 0; m < MB; m++) to[m] = even[m] + odd[m];
}

// Adds a block's products to the sums of R rows. With APART, its halves are added up side by side.
template <int KIND, bool APART, int R, Reading HOW>
INLINE void add_block(const Format<KIND, HOW>& f, const Rounded* x, Vec* sums) {
    constexpr Shape SHAPE = shape_of(KIND);
    constexpr bool SPLIT = Format<KIND, HOW>::SPLIT;
    Sums first[R], second[R];
#pragma GCC unroll 4
    for (int m = 0; m < R; m++) first[m] = sums_from(f.start(x[m], 0)), second[m] = sums_from(f.start(x[m], 1));
    add_products<SHAPE.wide(), APART ? 4 : 8>(first, f.code, x->x, sizeof(Rounded));
    if constexpr (APART) add_products<SHAPE.wide(), 4>(second, f.code + 4, x->x + LANES, sizeof(Rounded));
#pragma GCC unroll 4
    for (int m = 0; m < R; m++) {
        Vec value;
        if constexpr (SPLIT) value = fused(floats(second[m]), f.other, floats(first[m]) * f.scale);
        else value = floats(APART ? both(first[m], second[m]) : first[m]) * f.scale;
        sums[m] = fma(value, splat(x[m].scale), sums[m]);
        if constexpr (SPLIT && SHAPE.least) {
            const float by = x[m].scale / -32;  // exact
            sums[m] = fma(-f.least, splat(x[m].less_32[0] * by), sums[m]);
            sums[m] = fma(-f.other_least, splat(x[m].less_32[1] * by), sums[m]);
        } else if constexpr (SHAPE.least) {
            sums[m] = fma(-f.least, splat(x[m].total), sums[m]);
        }
    }
}

// Computes the sums of MB rows with a panel's 16 columns.
template <int KIND, int MB, Reading HOW = IN_ORDER>
__attribute__((noinline)) void panel_sums(const Rounded* x, int64_t blocks, const QuantPanel& panel, Vec* to) {
    constexpr int R = MB < STRIP ? MB : STRIP;
    constexpr bool APART = Format<KIND>::SPLIT || (STRIP == 1 && MB < 4);  // few rows: short chains are faster
    Format<KIND, HOW> f(panel);
    Vec sums[MB] = {};
    for (int64_t b = 0; b < blocks; b++, x += QuantRows::BLOCK) {
        f.next(b);
        if constexpr (STRIP == 1) {
#pragma GCC unroll 12
            for (int m = 0; m < MB; m++) add_block<KIND, APART, 1>(f, x + m, sums + m);  // without unrolling, sums would be kept in memory
        } else {
#pragma GCC unroll 1
            for (int m = 0; m < MB; m += R) add_block<KIND, APART, R>(f, x + m, sums + m);
        }
    }
    for (int m = 0; m < MB; m++) to[m] = sums[m];
}

template <int KIND>
inline int panel_sums(const QuantRows& x, int row, int rows, const QuantPanel& panel, Vec* to) {
    const Rounded* from = x.row(row);
    auto some = [&](auto count) {
        if constexpr (IS_FLOAT<KIND>) float_sums<KIND, count>(from, x.blocks, panel.at, to);
        else panel_sums<KIND, count>(from, x.blocks, panel, to);
        return (int)count;
    };
    if (rows >= 12) return some(Count<12>{});
    if (rows >= 8) return some(Count<8>{});
    if (rows >= 4) return some(Count<4>{});
    if (rows == 3) return some(Count<3>{});
    return rows == 2 ? some(Count<2>{}) : some(Count<1>{});
}

// Calls `work` with the kind as a constant.
template <class Work>
inline auto with_kind(int kind, Work work) {
    switch (kind) {
        case Q4_0: return work(Count<Q4_0>{});
        case Q4_1: return work(Count<Q4_1>{});
        case Q5_0: return work(Count<Q5_0>{});
        case Q5_1: return work(Count<Q5_1>{});
        case Q8_0: return work(Count<Q8_0>{});
        case Q8_PARTS: return work(Count<Q8_PARTS>{});
        case Q6_PARTS: return work(Count<Q6_PARTS>{});
        case Q2_K: return work(Count<Q2_K>{});
        case Q3_K: return work(Count<Q3_K>{});
        case Q4_K: return work(Count<Q4_K>{});
        case Q5_K: return work(Count<Q5_K>{});
        case IQ4_NL: return work(Count<IQ4_NL>{});
        case IQ4_XS: return work(Count<IQ4_XS>{});
        case MXFP4: return work(Count<MXFP4>{});
        case F32: return work(Count<F32>{});
        case F16: return work(Count<F16>{});
        case BF16: return work(Count<BF16>{});
        case INT4_32: return work(Count<INT4_32>{});
        case INT4_64: return work(Count<INT4_64>{});
        case INT4_128: return work(Count<INT4_128>{});
        default: return work(Count<Q6_K>{});
    }
}

// Gives the sums of rows [from, to) with two panels to `take(row, left 16, right 16)`.
template <class Take>
void product(const QuantRows& x, int from, int to, const Panels<QuantPanel>& w, Take take) {
    w.ask_for_places();
    Vec left[QuantRows::BLOCK], right[QuantRows::BLOCK];
    auto sums = [&](const QuantPanel& panel, int row, Vec* into) {
        return with_kind(panel.kind, [&](auto kind) { return panel_sums<kind>(x, row, to - row, panel, into); });
    };
    for (int row = from; row < to;) {
        const int rows = sums(*w.left, row, left);
        if (w.right != w.left) sums(*w.right, row, right);
        for (int m = 0; m < rows; m++) take(row + m, left[m], right[m]);
        row += rows;
    }
}

// Writes row `o` of a panel of outputs, [width], times a factor.
template <int KIND>
inline void look_up(const QuantPanel& panel, int o, int width, float factor, float* to) {
    if constexpr (IS_FLOAT<KIND>) {
        for (int c = 0; c < width; c++) to[c] = number_at(KIND, panel.at, c * LANES + o) * factor;
    } else {
        Format<KIND> f(panel);
        for (int64_t b = 0; b < blocks_of(width); b++) {
            f.next(b);
            alignas(64) uint8_t code[8][64];
            float of[4][LANES];
            std::memcpy(code, f.code, sizeof code);
            store(of[0], f.scale), store(of[1], f.other), store(of[2], f.least), store(of[3], f.other_least);
            for (int c = 0; c < COLUMNS; c++) {
                const bool second = f.SPLIT && c >= LANES;
                const float value = of[second][o] * (code[c / 4][o * 4 + c % 4] - f.SHAPE.less);
                to[b * COLUMNS + c] = (f.SHAPE.least ? value - of[2 + second][o] : value) * factor;
            }
        }
    }
}

// Writes a token's embedding, [width], times a factor.
inline void look_up(const QuantPanel* table, int token, int width, float factor, float* to) {
    const QuantPanel& panel = table[token / LANES];
    with_kind(panel.kind, [&](auto kind) { return look_up<kind>(panel, token % LANES, width, factor, to), 0; });
}

}  // namespace
