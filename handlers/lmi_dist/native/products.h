// Products of rows with constant weights, out = x W^T, in float32, in pairs of bfloat16, in 8-bit integers, or of weights
// in blocks of 4 or 8 bits with inputs of 16.
//
// A weight W (num_out, num_in) is packed once into panels of NR output channels with the input channel outermost, so a
// product reads its weight once, front to back. M rows times one panel keeps M x NR sums in registers.
//
// Bits: a float sum adds its inputs in order by fused multiply-add, in runs of RUN inputs whose sums are added in
// order. A sum of integers is exact within a group of inputs, and groups are added in order. So the bits of a row depend on
// that row only, whatever rows, panels, threads or widths of vectors do the work. Widths of vectors and the number of
// rows in a tile are the only things that differ between CPUs, but for one: with MULTIPLIES_PAIRS weights in BF16 are
// multiplied by inputs that are rounded to bfloat16, elsewhere by the inputs as they are. Vectors and tiles of AMX add
// up such products in different orders.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "lmi_kernels.h"
#include "pool.h"
#include "tiles.h"

namespace lmi {

#if defined(__AVX512F__)
// Of 32 registers 24 are for sums, 2 for weights, 1 for inputs.
constexpr int VL = 16;
constexpr int MR = 12;
#elif defined(__AVX2__)
// There are 16 registers.
constexpr int VL = 8;
constexpr int MR = 6;
#else
// There are 32 registers.
constexpr int VL = 4;
constexpr int MR = 12;
#endif
// Whether the CPU multiplies pairs of bfloat16, and adds them to a float.
#if defined(__AVX512BF16__)
constexpr bool MULTIPLIES_PAIRS = true;
#else
constexpr bool MULTIPLIES_PAIRS = false;
#endif
// Items of many rows have a multiple of so many: the rows of the CPU's tiles.
#if defined(__AMX_TILE__)
constexpr int ROW_TILE = TILE;
#else
constexpr int ROW_TILE = 1;
#endif
// The output channels of a panel.
constexpr int NR = 2 * VL;
// The panels that one row takes at a time: two sums of one panel would wait for each other.
constexpr int PANELS = 3;
// The inputs of a run, whose weights stay in the first-level cache from tile to tile.
constexpr int RUN = 192;
// The pairs of inputs in a run of pairs.
constexpr int PAIR_RUN = 96;
// The inputs that share a scale in INT8.
constexpr int GROUP = 64;
// The groups of a run in INT8.
constexpr int GROUPS = 8;
// The inputs of a small group. They share a scale in rows of 16-bit integers, and scales in the formats that read these.
constexpr int SMALL_GROUP = 32;
// The inputs of a run in these formats.
constexpr int SMALL_RUN = 256;
// How many steps ahead weights are prefetched, where tiles do not share the prefetch.
constexpr int PREFETCH = 64;

struct Rows {
    // (rows, stride): read by F32 and BF16.
    const float* values;
    int64_t stride;
    // As `quantize` writes them, read by INT8: bytes (rows, groups, GROUP), and (rows, groups). As `quantize_to_16_bits`
    // writes them, read by the formats of 4 and 8 bits: int16 (rows, num_in), and (rows, small groups, 2).
    const void* integers;
    const float* scales;
    // As `round_to_pairs` writes them, read by BF16 where the CPU multiplies pairs: words (rows, num_pairs(stride)).
    const void* pairs = nullptr;
};

// ---- Vectors --------------------------------------------------------------------------------------------------------

typedef float Vec __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef int16_t Shorts __attribute__((vector_size(4 * VL), aligned(4), may_alias));

inline Vec& vec(float* at) { return *reinterpret_cast<Vec*>(at); }
inline Vec vec(const void* at) { return *static_cast<const Vec*>(at); }
inline Ints ints(const void* at) { return *static_cast<const Ints*>(at); }
inline Vec splat(float x) { return x - Vec{}; }
inline Ints splat(int32_t x) { return x - Ints{}; }

template <class To, class From>
inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

// The bfloat16 in the upper half of each word.
inline Vec upper_half(Ints words) { return bits_as<Vec>(words & splat(int32_t(0xffff0000))); }

// ---- Sizes ----------------------------------------------------------------------------------------------------------

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t num_panels(int64_t num_out) { return divide_up(num_out, NR); }
inline int64_t num_groups(int64_t num_in) { return divide_up(num_in, GROUP); }
inline int64_t num_pairs(int64_t num_in) { return divide_up(num_in, 2); }

// A group of an INT8 panel: (GROUP / 4, NR, 4) weights, then a word per channel with its scale (as bfloat16) in the
// upper half and the sum of its weights in the lower half.
constexpr int64_t GROUP_BYTES = GROUP * NR + 4 * NR;

// Whether weights of a format multiply rows of 16-bit integers.
constexpr bool is_small(int format) { return format >= LMI_BITS4; }
// Whether weights of a format multiply rows of pairs.
constexpr bool is_paired(int format) { return MULTIPLIES_PAIRS && format == LMI_BF16; }
constexpr bool has_zero(int format) { return format == LMI_BITS4_ZERO || format == LMI_BITS8_ZERO; }
constexpr int bits_of(int format) { return format == LMI_BITS4 || format == LMI_BITS4_ZERO ? 4 : 8; }

// A small group of a panel: (SMALL_GROUP * bits / 32, NR) words of weights, then 4 bytes for each channel. With zero
// points they are a word: the scale, a float32 without its lowest 8 bits, and in these the zero point. Else they are for
// each vector of channels two float16 of each, (2, VL): the scale and the minimum, or in BITS8_HALVES the scales of the
// first and the last 16 inputs.
constexpr int64_t small_group_weight_bytes(int format) { return SMALL_GROUP * NR * bits_of(format) / 8; }
constexpr int64_t small_group_bytes(int format) { return small_group_weight_bytes(format) + 4 * NR; }

// Input i of a word lies here. Two neighbours, 16 bits apart, are in one place of the lower and the upper half.
constexpr int shift_of(int format, int i) { return i / 2 * bits_of(format) + i % 2 * 16; }

inline int64_t panel_bytes(int64_t num_in, int format) {
    if (is_small(format)) return num_in / SMALL_GROUP * small_group_bytes(format);
    if (format == LMI_INT8) return num_groups(num_in) * GROUP_BYTES;
    if (is_paired(format)) return num_pairs(num_in) * NR * 4;
    return num_in * NR * (format == LMI_F32 ? 4 : 2);
}

inline int64_t packed_bytes(int64_t num_out, int64_t num_in, int format) {
    return num_panels(num_out) * panel_bytes(num_in, format);
}

// A panel of a weight, which may have parts in several formats: the part that has it, and its number there.
struct Place {
    const Panels* panels;
    int64_t panel;
};

inline Place place_of(const Panels& panels, int64_t panel) {
    const Panels* part = &panels;
    for (; part->rest && panel >= part->num_own; part = part->rest) panel -= part->num_own;
    return {part, panel};
}

inline const char* panel_of(const Panels& panels, int64_t panel) {
    const Place place = place_of(panels, panel);
    const Panels& part = *place.panels;
    return static_cast<const char*>(part.data) + place.panel * panel_bytes(part.num_in, part.format);
}

// Where weights lie that are read next: the first of a few panels, and how far the others are behind it.
struct Next {
    const char* at;
    int64_t apart;
};

// The weights that a tile prefetches while it computes: `pace` bytes more with each of its steps, from `end` on those of
// `next`. The hardware's own prefetcher stops at the end of a page.
struct Ahead {
    const char* at;
    int pace;
    // How far the panels are behind each other.
    int64_t apart = 0;
    const char* end = nullptr;
    Next next = {};

    // Without `TURNS` there is no end.
    template <bool TURNS>
    void advance() {
        at += pace;
        if (!TURNS || at != end) return;
        at = next.at;
        apart = next.apart;
        end = nullptr;
    }
};

#define UNROLLED _Pragma("GCC unroll 16")

// Brings weights near, into the first-level cache, or only into the second, which waits for more of them at a time and
// leaves the first to what is read now. Near is better where products take longer than memory: with many rows.
template <int BYTES, bool IS_NEAR>
inline void prefetch(const char* at) {
    UNROLLED for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(at + i, 0, IS_NEAR ? 3 : 2);
}

// ---- Tiles in float32 -----------------------------------------------------------------------------------------------

// (num_in, NR) floats.
struct Float32Weights {
    // Bytes per input.
    static constexpr int STEP = 4 * NR;
    static void load(const char* at, Vec& low, Vec& high) {
        low = vec(at);
        high = vec(at + 4 * VL);
    }
};

// (num_in, VL) words: channel i in the lower half, channel VL + i in the upper half.
struct BFloat16Weights {
    static constexpr int STEP = 2 * NR;
    static void load(const char* at, Vec& low, Vec& high) {
        low = bits_as<Vec>(ints(at) << 16);
        high = upper_half(ints(at));
    }
};

template <class Weights>
struct FloatTile {
    static constexpr int ROWS = MR;
    // The rows of a tile from which on weights are brought near.
    static constexpr int NEAR_ROWS = 9;
    static constexpr int STEP = Weights::STEP;
    static constexpr int RUN_BYTES = RUN * STEP;
    // Whether tiles share the prefetch of the next run.
    static constexpr bool SHARES = true;
    static int64_t num_runs(int64_t num_in) { return divide_up(num_in, RUN); }

    // One run of inputs of M rows and P panels. `out` is (M, P * NR): the first run writes it, the others add to it.
    template <int M, int P>
    static void add_run(const Panels& panels, const char* panel, const Rows& rows, int64_t row, int run, Ahead ahead,
                        float* out) {
        constexpr bool IS_NEAR = M >= NEAR_ROWS;
        constexpr bool TURNS = M == 1 || !SHARES;
        const int first = run * RUN;
        const int last = std::min(first + RUN, panels.num_in);
        const int64_t bytes = panel_bytes(panels.num_in, panels.format);
        const int64_t stride = rows.stride;
        const float* x = rows.values + row * stride;
        Vec sums[M][2 * P];
        UNROLLED for (int m = 0; m < M; m++)
            UNROLLED for (int j = 0; j < 2 * P; j++) sums[m][j] = Vec{};
        for (int k = first; k < last; k++) {
            Vec weights[2 * P];
            UNROLLED for (int p = 0; p < P; p++) {
                Weights::load(panel + p * bytes + int64_t(k) * STEP, weights[2 * p], weights[2 * p + 1]);
                prefetch<STEP, IS_NEAR>(ahead.at + p * ahead.apart);
            }

            ahead.advance<TURNS>();
            UNROLLED for (int m = 0; m < M; m++) {
                const Vec input = splat(x[m * stride + k]);
                UNROLLED for (int j = 0; j < 2 * P; j++) sums[m][j] += input * weights[j];
            }
        }

        UNROLLED for (int m = 0; m < M; m++)
            UNROLLED for (int j = 0; j < 2 * P; j++) {
                Vec& total = vec(out + (m * P * 2 + j) * VL);
                total = run ? total + sums[m][j] : sums[m][j];
            }
    }
};

// ---- Tiles in pairs of bfloat16 -------------------------------------------------------------------------------------

#if defined(__AVX512BF16__) && !defined(__AMX_TILE__)
// (num_pairs, NR) words: the first input of a pair in the lower half.
struct PairTile {
    static constexpr int ROWS = MR;
    static constexpr int NEAR_ROWS = 9;
    static constexpr int STEP = 4 * NR;
    static constexpr int RUN_BYTES = PAIR_RUN * STEP;
    static constexpr bool SHARES = true;
    static int64_t num_runs(int64_t num_in) { return divide_up(num_pairs(num_in), PAIR_RUN); }

    // One run of pairs of M rows and P panels. `out` is (M, P * NR): the first run writes it, the others add to it.
    template <int M, int P>
    static void add_run(const Panels& panels, const char* panel, const Rows& rows, int64_t row, int run, Ahead ahead,
                        float* out) {
        constexpr bool IS_NEAR = M >= NEAR_ROWS;
        constexpr bool TURNS = M == 1 || !SHARES;
        const int first = run * PAIR_RUN;
        const int last = std::min<int>(first + PAIR_RUN, num_pairs(panels.num_in));
        const int64_t bytes = panel_bytes(panels.num_in, panels.format);
        const int64_t stride = num_pairs(rows.stride) * 4;
        const char* x = static_cast<const char*>(rows.pairs) + row * stride;
        Vec sums[M][2 * P];
        UNROLLED for (int m = 0; m < M; m++)
            UNROLLED for (int j = 0; j < 2 * P; j++) sums[m][j] = Vec{};
        for (int k = first; k < last; k++) {
            Ints weights[2 * P];
            UNROLLED for (int p = 0; p < P; p++) {
                const char* here = panel + p * bytes + int64_t(k) * STEP;
                weights[2 * p] = ints(here);
                weights[2 * p + 1] = ints(here + 4 * VL);
                prefetch<STEP, IS_NEAR>(ahead.at + p * ahead.apart);
            }

            ahead.advance<TURNS>();
            UNROLLED for (int m = 0; m < M; m++) {
                int32_t two;
                std::memcpy(&two, x + m * stride + k * 4, 4);
                UNROLLED for (int j = 0; j < 2 * P; j++) sums[m][j] = dot(sums[m][j], splat(two), weights[j]);
            }
        }

        UNROLLED for (int m = 0; m < M; m++)
            UNROLLED for (int j = 0; j < 2 * P; j++) {
                Vec& total = vec(out + (m * P * 2 + j) * VL);
                total = run ? total + sums[m][j] : sums[m][j];
            }
    }

    // Adds to each channel's sum the products of 2 inputs and 2 weights.
    static inline Vec dot(Vec sums, Ints inputs, Ints weights) {
        return _mm512_dpbf16_ps(sums, bits_as<__m512bh>(inputs), bits_as<__m512bh>(weights));
    }
};
#endif

// ---- Tiles in 8-bit integers ----------------------------------------------------------------------------------------

// dot(sums, inputs, weights) adds to each channel's sum the products of 4 inputs, each EXCESS too large, and 4 weights.
// `inputs` makes them of a row's bytes. Every kind gives the same integers, without the excess.

#if defined(__x86_64__)
// It is in assembly, for a function that is compiled for VNNI can only be inlined into such functions.
struct VnniDot {
    static constexpr int EXCESS = 128;
    static inline Ints inputs(Ints bytes) { return bytes; }

    static inline Ints dot(Ints sums, Ints inputs, Ints weights) {
#if defined(__AVX512F__)
        asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(inputs), "v"(weights));
#else
        asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(inputs), "x"(weights));
#endif
        return sums;
    }

    static bool is_supported() { return __builtin_cpu_supports(VL == 16 ? "avx512vnni" : "avxvnni"); }
};
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
// The sizes of weights, unsigned, by the inputs with the weights' signs: two products fit in 16 bits.
struct PlainDot {
    static constexpr int EXCESS = 0;

    static inline Ints inputs(Ints bytes) {
        // Else each word is changed before it is broadcast, which takes longer.
        asm("" : "+x"(bytes));
        return bytes ^ splat(int32_t(0x80808080));
    }

    static inline Ints dot(Ints sums, Ints inputs, Ints weights) {
        const __m256i x = bits_as<__m256i>(inputs);
        const __m256i w = bits_as<__m256i>(weights);
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
        return sums + bits_as<Ints>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
};
#else
struct PlainDot {
    static constexpr int EXCESS = 128;
    static inline Ints inputs(Ints bytes) { return bytes; }

    static inline Ints dot(Ints sums, Ints inputs, Ints weights) {
        const Shorts weight = bits_as<Shorts>(weights);
        return sums + pairs(even(inputs), weight << 8 >> 8) + pairs(even(inputs >> 8), weight >> 8);
    }

    // Bytes 0 and 2 of each word.
    static inline Shorts even(Ints words) { return bits_as<Shorts>(words & splat(0x00ff00ff)); }

    // The sums of neighbouring products, each of which fits in 16 bits.
    static inline Ints pairs(Shorts a, Shorts b) {
#if defined(__AVX512F__)
        Ints sums;
        asm("vpmaddwd %2, %1, %0" : "=v"(sums) : "v"(a), "v"(b));
        return sums;
#else
        const Ints products = bits_as<Ints>(a * b);
        return (products << 16 >> 16) + (products >> 16);
#endif
    }
};
#endif

template <class Dot>
struct Int8Tile {
    // Registers hold the integers of a group and the totals.
    static constexpr int ROWS = MR / 2;
    // Never: its runs fill the first-level cache.
    static constexpr int NEAR_ROWS = ROWS + 1;
    static constexpr int STEP = 4 * NR;
    static constexpr int RUN_BYTES = GROUPS * GROUP_BYTES;
    // Its tiles are too short.
    static constexpr bool SHARES = false;
    static int64_t num_runs(int64_t num_in) { return divide_up(num_groups(num_in), GROUPS); }

    // One run of groups of M rows and P panels. `out` is (M, P * NR): the first run writes it, the others add to it.
    template <int M, int P>
    static void add_run(const Panels& panels, const char* panel, const Rows& rows, int64_t row, int run, Ahead ahead,
                        float* out) {
        constexpr bool IS_NEAR = M >= NEAR_ROWS;
        constexpr bool TURNS = M == 1 || !SHARES;
        const int64_t groups = num_groups(panels.num_in);
        const int64_t bytes = groups * GROUP_BYTES;
        const int first = run * GROUPS;
        const int last = std::min<int64_t>(first + GROUPS, groups);
        const uint8_t* x = static_cast<const uint8_t*>(rows.integers) + row * groups * GROUP;
        const float* scales = rows.scales + row * groups;
        Vec totals[M][2 * P];
        UNROLLED for (int m = 0; m < M; m++)
            UNROLLED for (int j = 0; j < 2 * P; j++) totals[m][j] = run ? vec(out + (m * P * 2 + j) * VL) : Vec{};
        for (int g = first; g < last; g++) {
            const char* at = panel + g * GROUP_BYTES;
            Ints sums[M][2 * P];
            UNROLLED for (int j = 0; j < 2 * P; j++) {
                const Ints start = (ints(word_of(at, bytes, j)) << 16 >> 16) * -Dot::EXCESS;
                UNROLLED for (int m = 0; m < M; m++) sums[m][j] = start;
            }

            for (int k = 0; k < GROUP; k += 4) {
                Ints weights[2 * P];
                UNROLLED for (int p = 0; p < P; p++) {
                    const char* here = at + p * bytes + k * NR;
                    weights[2 * p] = ints(here);
                    weights[2 * p + 1] = ints(here + 4 * VL);
                    prefetch<STEP, IS_NEAR>(ahead.at + p * ahead.apart);
                }

                ahead.advance<TURNS>();
                UNROLLED for (int m = 0; m < M; m++) {
                    int32_t four;
                    std::memcpy(&four, x + (m * groups + g) * GROUP + k, 4);
                    const Ints inputs = Dot::inputs(splat(four));
                    UNROLLED for (int j = 0; j < 2 * P; j++) sums[m][j] = Dot::dot(sums[m][j], inputs, weights[j]);
                }
            }

            UNROLLED for (int p = 0; p < P; p++) prefetch<STEP, IS_NEAR>(ahead.at + p * ahead.apart);
            ahead.advance<TURNS>();
            UNROLLED for (int j = 0; j < 2 * P; j++) {
                const Vec scale = upper_half(ints(word_of(at, bytes, j)));
                UNROLLED for (int m = 0; m < M; m++)
                    totals[m][j] += __builtin_convertvector(sums[m][j], Vec) * splat(scales[m * groups + g]) * scale;
            }
        }

        UNROLLED for (int m = 0; m < M; m++)
            UNROLLED for (int j = 0; j < 2 * P; j++) vec(out + (m * P * 2 + j) * VL) = totals[m][j];
    }

    // The words of vector j of a group's channels.
    static const char* word_of(const char* group, int64_t bytes, int j) {
        return group + j / 2 * bytes + GROUP * NR + j % 2 * 4 * VL;
    }
};

// ---- Tiles of 4 and 8 bits by 16 bits -------------------------------------------------------------------------------

// dot(sums, inputs, weights) adds to each channel's sum the products of 2 inputs and 2 weights of 16 bits. A small
// group's sum fits in 32 bits, so every kind gives the same integers.

#if defined(__x86_64__)
struct VnniPairs {
    static inline Ints dot(Ints sums, Ints inputs, Ints weights) {
#if defined(__AVX512F__)
        asm("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(inputs), "v"(weights));
#else
        asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sums) : "x"(inputs), "x"(weights));
#endif
        return sums;
    }
};
#endif

struct PlainPairs {
    static inline Ints dot(Ints sums, Ints inputs, Ints weights) {
#if defined(__AVX512F__)
        return sums + bits_as<Ints>(_mm512_madd_epi16(bits_as<__m512i>(inputs), bits_as<__m512i>(weights)));
#elif defined(__AVX2__)
        return sums + bits_as<Ints>(_mm256_madd_epi16(bits_as<__m256i>(inputs), bits_as<__m256i>(weights)));
#else
        return sums + (inputs << 16 >> 16) * (weights << 16 >> 16) + (inputs >> 16) * (weights >> 16);
#endif
    }
};

inline float from_float16(uint16_t bits) {
    const uint32_t sign = uint32_t(bits & 0x8000) << 16;
    const uint32_t rest = uint32_t(bits & 0x7fff) << 13;
    const float size = rest >= 0x0f800000 ? bits_as<float>(rest | 0x7f800000) : bits_as<float>(rest) * 0x1p112f;
    return bits_as<float>(bits_as<uint32_t>(size) | sign);
}

// VL numbers in float16.
inline Vec from_halves(const char* at) {
#if defined(__AVX512F__)
    // With a mask, for g++ warns of what the plain form leaves undefined.
    return bits_as<Vec>(_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))));
#elif defined(__AVX2__)
    return bits_as<Vec>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
#elif defined(__aarch64__)
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(at))));
#else
    Vec numbers;
    for (int i = 0; i < VL; i++) {
        uint16_t half;
        std::memcpy(&half, at + 2 * i, 2);
        numbers[i] = from_float16(half);
    }

    return numbers;
#endif
}

// The scale of each channel in a word, and the zero point below it as a minimum: that times the scale, negative, which
// float32 holds exactly.
constexpr int ZERO_BITS = 8;
constexpr int32_t ZERO_MASK = (1 << ZERO_BITS) - 1;
inline Vec scale_of_words(Ints words) { return bits_as<Vec>(words & splat(~ZERO_MASK)); }
inline Vec minimum_of_words(Ints words) {
    const Ints zero = words << (32 - ZERO_BITS) >> (32 - ZERO_BITS);
    return -(__builtin_convertvector(zero, Vec) * scale_of_words(words));
}

// What stands behind the weights of a group, for a vector of channels.
struct Halves {
    static inline Vec scale(const char* at, int sum) { return from_halves(at + sum * 2 * VL); }
    static inline Vec minimum(const char* at) { return from_halves(at + 2 * VL); }
};

struct WordsWithZero {
    static inline Vec scale(const char* at, int) { return scale_of_words(ints(at)); }
    static inline Vec minimum(const char* at) { return minimum_of_words(ints(at)); }
};

// Words hold weights from 0 to 15.
template <class Scales = Halves>
struct FourBits : Scales {
    static constexpr int FORMAT = std::is_same<Scales, Halves>::value ? LMI_BITS4 : LMI_BITS4_ZERO;
    // The sums of a group: each has a scale of its own.
    static constexpr int NUM_SUMS = 1;
    static inline Ints pair(Ints words, int i) { return words >> 4 * i & splat(0x000f000f); }
};

// Words hold weights from -128 to 127.
template <class Scales = Halves>
struct EightBits : Scales {
    static constexpr int FORMAT = std::is_same<Scales, Halves>::value ? LMI_BITS8 : LMI_BITS8_ZERO;
    static constexpr int NUM_SUMS = 1;

    static inline Ints pair(Ints words, int i) {
        const Shorts bytes = bits_as<Shorts>(words);
        return bits_as<Ints>(i ? bytes >> 8 : bytes << 8 >> 8);
    }
};

struct EightBitsInHalves : EightBits<> {
    static constexpr int FORMAT = LMI_BITS8_HALVES;
    static constexpr int NUM_SUMS = 2;
};

template <class Weights, class Dot>
struct SmallTile {
    // Registers hold the integers of a group and the totals.
    static constexpr int ROWS = MR / 2;
    static constexpr int NEAR_ROWS = 2;
    static constexpr int STEP = 4 * NR;
    static constexpr int FORMAT = Weights::FORMAT;
    static constexpr int GROUPS_OF_RUN = SMALL_RUN / SMALL_GROUP;
    static constexpr int GROUP_BYTES = small_group_bytes(FORMAT);
    static constexpr int RUN_BYTES = GROUPS_OF_RUN * GROUP_BYTES;
    // The pairs of inputs in a word, and the words of a sum.
    static constexpr int PAIRS = 16 / bits_of(FORMAT);
    static constexpr int WORDS = SMALL_GROUP / 2 / PAIRS / Weights::NUM_SUMS;
    static constexpr bool SHARES = true;
    static int64_t num_runs(int64_t num_in) { return divide_up(num_in, SMALL_RUN); }

    // One run of groups of M rows and P panels. `out` is (M, P * NR): the first run writes it, the others add to it.
    template <int M, int P>
    static void add_run(const Panels& panels, const char* panel, const Rows& rows, int64_t row, int run, Ahead ahead,
                        float* out) {
        constexpr bool IS_NEAR = M >= NEAR_ROWS;
        constexpr bool TURNS = M == 1 || !SHARES;
        const int64_t groups = panels.num_in / SMALL_GROUP;
        const int64_t bytes = groups * GROUP_BYTES;
        const int first = run * GROUPS_OF_RUN;
        const int last = std::min<int64_t>(first + GROUPS_OF_RUN, groups);
        const int16_t* x = static_cast<const int16_t*>(rows.integers) + row * panels.num_in;
        const float* scales = rows.scales + row * groups * 2;
        Vec totals[M][2 * P];
        UNROLLED for (int m = 0; m < M; m++)
            UNROLLED for (int j = 0; j < 2 * P; j++) totals[m][j] = run ? vec(out + (m * P * 2 + j) * VL) : Vec{};
        for (int g = first; g < last; g++) {
            const char* at = panel + g * GROUP_BYTES;
            const int16_t* inputs = x + g * SMALL_GROUP;
            UNROLLED for (int half = 0; half < Weights::NUM_SUMS; half++) {
                Ints sums[M][2 * P] = {};
                for (int word = 0; word < WORDS; word++, at += STEP, inputs += 2 * PAIRS, ahead.advance<TURNS>()) {
                    Ints words[2 * P];
                    UNROLLED for (int p = 0; p < P; p++) {
                        words[2 * p] = ints(at + p * bytes);
                        words[2 * p + 1] = ints(at + p * bytes + 4 * VL);
                        prefetch<STEP, IS_NEAR>(ahead.at + p * ahead.apart);
                    }

                    UNROLLED for (int i = 0; i < PAIRS; i++) add_pairs<M, P>(words, i, inputs, panels.num_in, sums);
                }

                const float* scale = scales + 2 * g;
                UNROLLED for (int j = 0; j < 2 * P; j++) {
                    // Behind the weights of the group.
                    const char* end = panel + j / 2 * bytes + (g + 1) * GROUP_BYTES - (2 - j % 2) * 4 * VL;
                    const Vec factor = Weights::scale(end, half);
                    const Vec minimum = Weights::NUM_SUMS == 1 ? Weights::minimum(end) : Vec{};
                    UNROLLED for (int m = 0; m < M; m++) {
                        const float* of_row = scale + m * groups * 2;
                        if (Weights::NUM_SUMS == 1) totals[m][j] += minimum * splat(of_row[1]);
                        totals[m][j] += __builtin_convertvector(sums[m][j], Vec) * factor * splat(of_row[0]);
                    }
                }
            }

            UNROLLED for (int p = 0; p < P; p++) prefetch<STEP, IS_NEAR>(ahead.at + p * ahead.apart);
            ahead.advance<TURNS>();
        }

        UNROLLED for (int m = 0; m < M; m++)
            UNROLLED for (int j = 0; j < 2 * P; j++) vec(out + (m * P * 2 + j) * VL) = totals[m][j];
    }

    // Adds the products of pair i of each word and of each row.
    template <int M, int P>
    static inline void add_pairs(const Ints* words, int i, const int16_t* inputs, int64_t stride, Ints (*sums)[2 * P]) {
        Ints weights[2 * P];
        UNROLLED for (int j = 0; j < 2 * P; j++) weights[j] = Weights::pair(words[j], i);
        UNROLLED for (int m = 0; m < M; m++) {
            int32_t two;
            std::memcpy(&two, inputs + m * stride + 2 * i, 4);
            UNROLLED for (int j = 0; j < 2 * P; j++) sums[m][j] = Dot::dot(sums[m][j], splat(two), weights[j]);
        }
    }
};

// ---- Products -------------------------------------------------------------------------------------------------------

typedef void AddRun(const Panels&, const char* panel, const Rows&, int64_t row, int run, Ahead, float* out);

// By number of rows, from 1 on.
template <class Tile, int... M>
constexpr std::array<AddRun*, sizeof...(M)> by_rows(std::integer_sequence<int, M...>) {
    return {Tile::template add_run<M + 1, 1>...};
}

// What a tile reads itself, PREFETCH steps later, and behind its panels the next ones.
template <class Tile>
Ahead own_weights(const char* panel, int64_t bytes, int run, Next next) {
    const int64_t own = run * Tile::RUN_BYTES + PREFETCH * Tile::STEP;
    if (own < bytes) return {panel + own, Tile::STEP, bytes, panel + bytes, next};
    return {next.at + (own - bytes), Tile::STEP, next.apart};
}

// Rows are cut evenly into tiles of at most ROWS. Tiles are innermost, so a run's weights are read once from memory: its
// tiles share the prefetch of the next run, so that memory works as long as they compute.
template <class Tile>
void product_by(const Panels& panels, int panel, const Rows& rows, int num_rows, Next next, float* out) {
    static constexpr auto add_run = by_rows<Tile>(std::make_integer_sequence<int, Tile::ROWS>());
    const char* data = panel_of(panels, panel);
    const int64_t bytes = panel_bytes(panels.num_in, panels.format);
    const int num_tiles = divide_up(num_rows, Tile::ROWS);
    const int num_runs = Tile::num_runs(panels.num_in);
    for (int run = 0; run < num_runs; run++) {
        const char* next_run = run + 1 < num_runs ? data + (run + 1) * Tile::RUN_BYTES : next.at;
        for (int tile = 0; tile < num_tiles; tile++) {
            const int row = num_rows * tile / num_tiles;
            const int end = num_rows * (tile + 1) / num_tiles;
            const Ahead share{next_run + Tile::RUN_BYTES / num_tiles * tile, Tile::STEP / num_tiles};
            const Ahead ahead = Tile::SHARES ? share : own_weights<Tile>(data, bytes, run, next);
            add_run[end - row - 1](panels, data, rows, row, run, ahead, out + row * NR);
        }
    }
}

template <class Tile>
void product_of_one_by(const Panels& panels, int panel, int count, const Rows& row, Next next, float* out) {
    static constexpr std::array<AddRun*, PANELS> add_run = {
        Tile::template add_run<1, 1>, Tile::template add_run<1, 2>, Tile::template add_run<1, 3>};
    const char* data = panel_of(panels, panel);
    const int64_t bytes = panel_bytes(panels.num_in, panels.format);
    for (int run = 0; run < Tile::num_runs(panels.num_in); run++)
        add_run[count - 1](panels, data, row, 0, run, own_weights<Tile>(data, bytes, run, next), out);
}

struct Multiply {
    void (*rows)(const Panels&, int panel, const Rows&, int num_rows, Next, float* out);
    void (*one)(const Panels&, int panel, int count, const Rows&, Next, float* out);
};

template <class Tile>
constexpr Multiply by = {product_by<Tile>, product_of_one_by<Tile>};

#if defined(__AMX_TILE__)
// ---- Products by the CPU's tiles -------------------------------------------------------------------------------------

// Of pairs of bfloat16, in panels of (num_pairs, NR) words, with any number of rows: what tiles add up has other bits
// than the sums of vectors.
struct PairTiles {
    static constexpr int STEP = 4 * NR;
    static constexpr int MAX_ROWS = 2 * TILE;

    static void rows(const Panels& panels, int panel, const Rows& rows, int num_rows, Next next, float* out) {
        const char* data = panel_of(panels, panel);
        const int64_t stride = num_pairs(rows.stride) * 4;
        const char* x = static_cast<const char*>(rows.pairs);
        const int pairs = num_pairs(panels.num_in);
        for (int row = 0; row < num_rows; row += MAX_ROWS) {
            const int count = std::min(num_rows - row, MAX_ROWS);
            multiply(data, pairs, x + row * stride, stride, count, row ? nullptr : next.at, out + row * NR);
        }
    }

    static void one(const Panels& panels, int panel, int count, const Rows& row, Next next, float* out) {
        const char* data = panel_of(panels, panel);
        const int64_t bytes = panel_bytes(panels.num_in, panels.format);
        const char* x = static_cast<const char*>(row.pairs);
        const int pairs = num_pairs(panels.num_in);
        for (int i = 0; i < count; i++)
            multiply(data + i * bytes, pairs, x, pairs * 4, 1, next.at + i * next.apart, out + i * NR);
    }

    // `out` (num_rows, NR), of 1 to MAX_ROWS rows. `next` may be null.
    static void multiply(const char* panel, int pairs, const char* x, int64_t stride, int num_rows, const char* next,
                         float* out) {
        configure_tiles(num_rows);
        if (num_rows > TILE)
            multiply_by<true>(panel, pairs, x, stride, num_rows, next, out);
        else
            multiply_by<false>(panel, pairs, x, stride, num_rows, next, out);
    }

    template <bool HAS_SECOND>
    static void multiply_by(const char* panel, int pairs, const char* x, int64_t stride, int num_rows,
                            const char* next, float* out) {
        clear_tile<0>();
        clear_tile<1>();
        if (HAS_SECOND) {
            clear_tile<2>();
            clear_tile<3>();
        }

        const int whole = pairs / TILE * TILE;
        for (int k = 0; k < whole; k += TILE) {
            add_step<HAS_SECOND>(panel + k * STEP, x + k * 4, stride);
            if (next) prefetch<TILE * STEP, false>(next + k * STEP);
        }

        if (whole < pairs) {
            // Behind the last pair come zeros, whatever lies there in memory.
            alignas(64) char weights[TILE * STEP] = {};
            alignas(64) char inputs[MAX_ROWS * TILE_ROW_BYTES] = {};
            std::memcpy(weights, panel + whole * STEP, (pairs - whole) * STEP);
            for (int row = 0; row < num_rows; row++)
                std::memcpy(inputs + row * TILE_ROW_BYTES, x + row * stride + whole * 4, (pairs - whole) * 4);

            add_step<HAS_SECOND>(weights, inputs, TILE_ROW_BYTES);
        }

        store_tile<0>(out, 4 * NR);
        store_tile<1>(out + VL, 4 * NR);
        if (HAS_SECOND) {
            store_tile<2>(out + TILE * NR, 4 * NR);
            store_tile<3>(out + TILE * NR + VL, 4 * NR);
        }
    }

    // The products of TILE pairs.
    template <bool HAS_SECOND>
    static void add_step(const char* weights, const char* x, int64_t stride) {
        load_tile<4>(x, stride);
        load_tile<6>(weights, STEP);
        load_tile<7>(weights + 4 * VL, STEP);
        add_pair_products<0, 4, 6>();
        add_pair_products<1, 4, 7>();
        if (HAS_SECOND) {
            load_tile<5>(x + TILE * stride, stride);
            add_pair_products<2, 5, 6>();
            add_pair_products<3, 5, 7>();
        }
    }
};

// Of INT8: whole tiles of rows. The others are left to vectors, which have the same integers and so the same bits. The
// formats of 4 and 8 bits by 16 have no tiles: their groups are so small that to scale the sums takes most of the time.
struct Int8Tiles {
    static void rows(const Panels& panels, int panel, const Rows& rows, int num_rows, Next next, float* out) {
        const int whole = num_rows / TILE * TILE;
        if (whole) configure_tiles(2 * TILE);
        const char* data = panel_of(panels, panel);
        for (int row = 0; row < whole; row += TILE)
            for (int j = 0; j < 2; j++) multiply(panels, data, rows, row, j, out + row * NR + j * VL);

        if (whole == num_rows) return;
        const int64_t groups = num_groups(panels.num_in);
        Rows rest = rows;
        rest.integers = static_cast<const uint8_t*>(rows.integers) + whole * groups * GROUP;
        rest.scales = rows.scales + whole * groups;
        product_by<Int8Tile<VnniDot>>(panels, panel, rest, num_rows - whole, next, out + whole * NR);
    }

    // TILE rows times the channels of one vector.
    static void multiply(const Panels& panels, const char* panel, const Rows& rows, int row, int j, float* out) {
        const int64_t groups = num_groups(panels.num_in);
        const uint8_t* x = static_cast<const uint8_t*>(rows.integers) + row * groups * GROUP;
        const float* scales = rows.scales + row * groups;
        // Tiles fill one while vectors read the other.
        alignas(64) int32_t sums[2][TILE * VL];
        Vec totals[TILE] = {};
        for (int g = 0; g < groups; g++) {
            const char* group = panel + g * GROUP_BYTES;
            clear_tile<0>();
            load_tile<4>(x + g * GROUP, groups * GROUP);
            load_tile<6>(group + j * 4 * VL, 4 * NR);
            add_byte_products<0, 4, 6>();
            store_tile<0>(sums[g % 2], 4 * VL);

            const Ints word = ints(group + GROUP * NR + j * 4 * VL);
            const Ints start = (word << 16 >> 16) * -VnniDot::EXCESS;
            const Vec scale = upper_half(word);
            UNROLLED for (int m = 0; m < TILE; m++) {
                const Ints sum = ints(sums[g % 2] + m * VL) + start;
                totals[m] += __builtin_convertvector(sum, Vec) * splat(scales[m * groups + g]) * scale;
            }
        }

        UNROLLED for (int m = 0; m < TILE; m++) vec(out + m * NR) = totals[m];
    }
};

constexpr Multiply by_pair_tiles = {PairTiles::rows, PairTiles::one};
constexpr Multiply by_int8_tiles = {Int8Tiles::rows, product_of_one_by<Int8Tile<VnniDot>>};
#endif

// ---- Products of each format ----------------------------------------------------------------------------------------

inline const Multiply& int8_multiply() {
#if defined(__AMX_TILE__)
    return by_int8_tiles;
#endif
#if defined(__x86_64__)
    static const bool has_vnni = VnniDot::is_supported();
    if (has_vnni) return by<Int8Tile<VnniDot>>;
#endif
    return by<Int8Tile<PlainDot>>;
}

template <class Dot>
const Multiply& small_multiply_by(int format) {
    switch (format) {
        case LMI_BITS4: return by<SmallTile<FourBits<>, Dot>>;
        case LMI_BITS4_ZERO: return by<SmallTile<FourBits<WordsWithZero>, Dot>>;
        case LMI_BITS8: return by<SmallTile<EightBits<>, Dot>>;
        case LMI_BITS8_ZERO: return by<SmallTile<EightBits<WordsWithZero>, Dot>>;
        default: return by<SmallTile<EightBitsInHalves, Dot>>;
    }
}

inline const Multiply& small_multiply(int format) {
#if defined(__x86_64__)
    static const bool has_vnni = VnniDot::is_supported();
    if (has_vnni) return small_multiply_by<VnniPairs>(format);
#endif
    return small_multiply_by<PlainPairs>(format);
}

inline const Multiply& multiply(int format) {
    if (is_small(format)) return small_multiply(format);
    if (format == LMI_INT8) return int8_multiply();
#if defined(__AMX_TILE__)
    if (format == LMI_BF16) return by_pair_tiles;
#elif defined(__AVX512BF16__)
    if (format == LMI_BF16) return by<PairTile>;
#endif
    return format == LMI_F32 ? by<FloatTile<Float32Weights>> : by<FloatTile<BFloat16Weights>>;
}

// A panel of a weight as what is read next, and the panels behind it.
inline Next next_from(const Panels& panels, int64_t panel) {
    const Panels& part = *place_of(panels, panel).panels;
    return {panel_of(panels, panel), panel_bytes(part.num_in, part.format)};
}

// `out` (num_rows, NR) = rows times one panel. `next` is what this thread most likely reads next.
inline void product(const Panels& panels, int panel, const Rows& rows, int num_rows, Next next, float* out) {
    const Place place = place_of(panels, panel);
    multiply(place.panels->format).rows(*place.panels, place.panel, rows, num_rows, next, out);
}

inline void product(const Panels& panels, int panel, const Rows& rows, int num_rows, float* out) {
    product(panels, panel, rows, num_rows, next_from(panels, panel + 1), out);
}

// `out` (count * NR) = one row times 1 to PANELS neighbouring panels, with the bits of `product`.
inline void product_of_one(const Panels& panels, int panel, int count, const Rows& row, Next next, float* out) {
    while (count > 0) {
        const Place place = place_of(panels, panel);
        const Panels& part = *place.panels;
        const int some = part.rest ? std::min<int>(count, part.num_own - place.panel) : count;
        multiply(part.format).one(part, place.panel, some, row, next, out);
        panel += some;
        count -= some;
        out += some * NR;
    }
}

// ---- Quantised rows -------------------------------------------------------------------------------------------------

// The largest of COUNT sizes. As integers, the bits of NaN are above those of infinity, and these above all others.
template <int COUNT>
inline float largest_of(const float* x) {
    int32_t largest = 0;
    for (int k = 0; k < COUNT; k++) largest = std::max(largest, bits_as<int32_t>(x[k]) & 0x7fffffff);
    return bits_as<float>(largest);
}

// The nearest integer of a size below 2^21, in the lowest bits, as two's complement.
inline uint32_t rounded(float x) { return bits_as<uint32_t>(x + 0x1.8p23f); }

// A group of inputs -> bytes = 128 + x / scale. Infinity and NaN become the scale, and so make the row's results.
inline float quantize_group(const float* x, uint8_t* bytes) {
    const float largest = largest_of<GROUP>(x);
    const float inverse = largest > 0 ? 127 / largest : 0;
    for (int k = 0; k < GROUP; k++) bytes[k] = 128 + rounded(x[k] * inverse);
    return largest * (1.0f / 127);
}

// One row, for INT8: `bytes` (groups, GROUP) and `scales` (groups). Inputs behind the last are zero.
inline void quantize(const float* x, int num_in, uint8_t* bytes, float* scales) {
    for (int k = 0; k < num_in; k += GROUP) {
        float rest[GROUP] = {};
        if (num_in - k < GROUP) std::copy(x + k, x + num_in, rest);
        *scales++ = quantize_group(num_in - k < GROUP ? rest : x + k, bytes + k);
    }
}

// One row, for the formats of 4 and 8 bits: `integers` (num_in) = x / scale, and of each small group the scale, and that
// times the sum of its integers. Infinity and NaN become the scale, as above.
inline void quantize_to_16_bits(const float* x, int num_in, int16_t* integers, float* scales) {
    for (int k = 0; k < num_in; k += SMALL_GROUP, x += SMALL_GROUP, integers += SMALL_GROUP, scales += 2) {
        const float largest = largest_of<SMALL_GROUP>(x);
        const float inverse = largest > 0 ? 32767 / largest : 0;
        for (int i = 0; i < SMALL_GROUP; i++) integers[i] = rounded(x[i] * inverse);
        int32_t sum = 0;
        for (int i = 0; i < SMALL_GROUP; i++) sum += integers[i];
        scales[0] = largest * (1.0f / 32767);
        scales[1] = scales[0] * sum;
    }
}

// ---- Numbers of 16 bits ---------------------------------------------------------------------------------------------

inline float from_bfloat16(uint16_t bits) { return bits_as<float>(uint32_t(bits) << 16); }

// To nearest, ties to even. Rounding could carry NaN to infinity, so NaN only gets quiet.
inline uint16_t to_bfloat16(float x) {
    const uint32_t bits = bits_as<uint32_t>(x);
    if (x != x) return bits >> 16 | 0x40;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// VL / 2 words, rounded to nearest, ties to even. Returns what the numbers are then. A size below 2^-126 may become 0, as
// it counts in all products of pairs.
inline Vec round_to_pairs(Vec x, void* pairs) {
#if defined(__AVX512BF16__)
    const __m256i numbers = bits_as<__m256i>(_mm512_cvtneps_pbh(bits_as<__m512>(x)));
    _mm256_storeu_si256(static_cast<__m256i*>(pairs), numbers);
    return bits_as<Vec>(_mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, numbers), 16));
#else
    uint16_t numbers[VL];
    for (int i = 0; i < VL; i++) {
        numbers[i] = to_bfloat16(x[i]);
        x[i] = from_bfloat16(numbers[i]);
    }

    std::memcpy(pairs, numbers, sizeof(numbers));
    return x;
#endif
}

// One row, for BF16 where the CPU multiplies pairs: words (num_pairs).
inline void round_to_pairs(const float* x, int num_in, void* pairs) {
    uint16_t* to = static_cast<uint16_t*>(pairs);
    int k = 0;
    for (; k + VL <= num_in; k += VL) round_to_pairs(vec(x + k), to + k);
    for (; k < num_in; k++) to[k] = to_bfloat16(x[k]);
    if (num_in % 2) to[num_in] = 0;
}

// ---- Packing --------------------------------------------------------------------------------------------------------

// The weight as the checkpoint has it.
struct Source {
    const void* data;  // (num_out, num_in)
    int dtype, num_out, num_in;

    float at(int64_t out, int64_t in) const {
        if (out >= num_out || in >= num_in) return 0;
        const int64_t i = out * num_in + in;
        if (dtype == LMI_FLOAT32) return static_cast<const float*>(data)[i];
        const uint16_t bits = static_cast<const uint16_t*>(data)[i];
        return dtype == LMI_BFLOAT16 ? from_bfloat16(bits) : from_float16(bits);
    }
};

inline void pack_float32(const Source& source, int64_t panel, float* to) {
    for (int64_t k = 0; k < source.num_in; k++)
        for (int i = 0; i < NR; i++) *to++ = source.at(panel * NR + i, k);
}

inline void pack_bfloat16(const Source& source, int64_t panel, uint32_t* to) {
    for (int64_t k = 0; k < source.num_in; k++)
        for (int i = 0; i < VL; i++) {
            const uint32_t low = to_bfloat16(source.at(panel * NR + i, k));
            *to++ = low | uint32_t(to_bfloat16(source.at(panel * NR + VL + i, k))) << 16;
        }
}

// The inputs of a pair are neighbours.
inline void pack_pairs(const Source& source, int64_t panel, uint32_t* to) {
    for (int64_t k = 0; k < source.num_in; k += 2)
        for (int i = 0; i < NR; i++) {
            const uint32_t first = to_bfloat16(source.at(panel * NR + i, k));
            *to++ = first | uint32_t(to_bfloat16(source.at(panel * NR + i, k + 1))) << 16;
        }
}

// The scale of a channel in a group is rounded up to bfloat16, so that its largest weight stays within 127.
inline uint16_t scale_of(float largest) {
    if (largest != largest) return 0x7fc0;
    return (bits_as<uint32_t>(largest / 127) + 0xffff) >> 16;
}

// A group of a channel: writes its weights, and returns its word.
inline uint32_t pack_group(const Source& source, int64_t channel, int64_t k, int8_t* to) {
    float weights[GROUP];
    for (int i = 0; i < GROUP; i++) weights[i] = source.at(channel, k + i);
    const float largest = largest_of<GROUP>(weights);
    const uint16_t scale = scale_of(largest);
    const float inverse = largest > 0 ? 1 / from_bfloat16(scale) : 0;
    int32_t sum = 0;
    for (int i = 0; i < GROUP; i++) {
        const int8_t weight = rounded(weights[i] * inverse);
        to[i / 4 * 4 * NR + i % 4] = weight;
        sum += weight;
    }

    return uint32_t(scale) << 16 | uint16_t(sum);
}

inline void pack_int8(const Source& source, int64_t panel, char* to) {
    for (int64_t k = 0; k < source.num_in; k += GROUP, to += GROUP_BYTES)
        for (int i = 0; i < NR; i++) {
            const uint32_t word = pack_group(source, panel * NR + i, k, reinterpret_cast<int8_t*>(to) + 4 * i);
            std::memcpy(to + GROUP * NR + 4 * i, &word, 4);
        }
}

inline void pack_panel(const Source& source, int64_t panel, int format, char* to) {
    if (format == LMI_F32) pack_float32(source, panel, reinterpret_cast<float*>(to));
    if (is_paired(format)) return pack_pairs(source, panel, reinterpret_cast<uint32_t*>(to));
    if (format == LMI_BF16) pack_bfloat16(source, panel, reinterpret_cast<uint32_t*>(to));
    if (format == LMI_INT8) pack_int8(source, panel, to);
}

inline void pack(const void* weight, int dtype, int num_out, int num_in, int format, void* data, int num_threads) {
    const Source source{weight, dtype, num_out, num_in};
    std::atomic<int64_t> next{0};
    in_parallel(num_threads, [&] {
        for (int64_t panel; (panel = next++) < num_panels(num_out);)
            pack_panel(source, panel, format, static_cast<char*>(data) + panel * panel_bytes(num_in, format));
    });
}

}  // namespace lmi
