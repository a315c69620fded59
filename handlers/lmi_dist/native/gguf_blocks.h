// Weights in the blocks of GGUF and in two types of our own, packed as they are into the formats of 4 and 8 bits, and
// rows of such weights.
//
// A type's weights are whole numbers with a scale for each 16 or 32 of them and, in some types, a minimum. Numbers are
// kept exactly. Scales and minima are kept in float16: as a block has them, or, in types with two levels of scales, as
// the nearest ones to the products of both. Our own types have a zero point, which is kept exactly too, and a scale in
// float32, of which the first 15 bits of the fraction stay: enough for every float16 and bfloat16.
#pragma once

#include <cstdint>
#include <cstring>

#include "products.h"

namespace lmi {

// Two levels of scales are those of 8 small groups.
constexpr int SUPER_GROUPS = 8;

struct BlockShape {
    // How many small groups of a row a block has.
    int groups;
    int bytes;
    int format;
};

// The shape of a type that is none has no groups.
inline BlockShape shape_of(int type) {
    switch (type) {
        case LMI_Q4_0: return {1, 18, LMI_BITS4};
        case LMI_Q4_1: return {1, 20, LMI_BITS4};
        case LMI_Q5_0: return {1, 22, LMI_BITS8};
        case LMI_Q5_1: return {1, 24, LMI_BITS8};
        case LMI_Q8_0: return {1, 34, LMI_BITS8};
        case LMI_IQ4_NL: return {1, 18, LMI_BITS8};
        case LMI_Q4_K: return {SUPER_GROUPS, 144, LMI_BITS4};
        case LMI_Q5_K: return {SUPER_GROUPS, 176, LMI_BITS8};
        case LMI_Q6_K: return {SUPER_GROUPS, 210, LMI_BITS8_HALVES};
        case LMI_ZERO4: return {1, 21, LMI_BITS4_ZERO};
        case LMI_ZERO8: return {1, 37, LMI_BITS8_ZERO};
        default: return {0, 0, 0};
    }
}

// A small group of a row: weights (SMALL_GROUP) times a scale, and a minimum that is added. In BITS8_HALVES `minimum` is
// the scale of the last 16.
struct SmallGroup {
    int weights[SMALL_GROUP];
    float scale;
    float minimum = 0;
    // It is subtracted from each weight.
    int zero_point = 0;
};

// ---- Blocks ----------------------------------------------------------------------------------------------------------

inline float half_at(const uint8_t* at) {
    uint16_t bits;
    std::memcpy(&bits, at, 2);
    return from_float16(bits);
}

inline float float_at(const uint8_t* at) {
    float x;
    std::memcpy(&x, at, 4);
    return x;
}

// Four bits of each weight: the lower ones of 16 bytes, then the upper ones.
inline void read_nibbles(const uint8_t* at, SmallGroup& group) {
    for (int i = 0; i < 16; i++) {
        group.weights[i] = at[i] & 15;
        group.weights[16 + i] = at[i] >> 4;
    }
}

// The fifth bit of each weight.
inline void add_fifth_bits(const uint8_t* at, SmallGroup& group) {
    uint32_t bits;
    std::memcpy(&bits, at, 4);
    for (int i = 0; i < SMALL_GROUP; i++) group.weights[i] |= (bits >> i & 1) << 4;
}

inline void subtract(int number, SmallGroup& group) {
    for (int& weight : group.weights) weight -= number;
}

// The scale and the minimum of group `index`, each of 6 bits, by the block's own. Those of the last four groups have
// their two upper bits above those of the first four.
inline void read_scales(const uint8_t* block, int index, SmallGroup& group) {
    const uint8_t* packed = block + 4;
    int scale = packed[index] & 63;
    int minimum = packed[4 + index] & 63;
    if (index >= 4) {
        scale = (packed[4 + index] & 15) | packed[index - 4] >> 6 << 4;
        minimum = packed[4 + index] >> 4 | packed[index] >> 6 << 4;
    }

    group.scale = half_at(block) * scale;
    group.minimum = -(half_at(block + 2) * minimum);
}

// Two neighbouring groups share 32 bytes, of which the first has the lower bits.
inline void read_shared_nibbles(const uint8_t* at, int index, SmallGroup& group) {
    const uint8_t* bytes = at + index / 2 * SMALL_GROUP;
    for (int i = 0; i < SMALL_GROUP; i++) group.weights[i] = bytes[i] >> index % 2 * 4 & 15;
}

inline void read_q5_k(const uint8_t* block, int index, SmallGroup& group) {
    const uint8_t* fifth_bits = block + 16;
    read_scales(block, index, group);
    read_shared_nibbles(fifth_bits + SMALL_GROUP, index, group);
    for (int i = 0; i < SMALL_GROUP; i++) group.weights[i] |= (fifth_bits[i] >> index & 1) << 4;
}

// Half a block has 64 bytes with the lower four bits of its four groups, and 32 with the upper two.
inline void read_q6_k(const uint8_t* block, int index, SmallGroup& group) {
    const int quarter = index % 4;
    const uint8_t* lower = block + index / 4 * 64 + quarter % 2 * SMALL_GROUP;
    const uint8_t* upper = block + 128 + index / 4 * SMALL_GROUP;
    for (int i = 0; i < SMALL_GROUP; i++) {
        const int lower_bits = lower[i] >> quarter / 2 * 4 & 15;
        const int upper_bits = upper[i] >> quarter * 2 & 3;
        group.weights[i] = (lower_bits | upper_bits << 4) - 32;
    }

    const int8_t* scales = reinterpret_cast<const int8_t*>(block + 192);
    group.scale = half_at(block + 208) * scales[2 * index];
    group.minimum = half_at(block + 208) * scales[2 * index + 1];
}

inline void read_iq4_nl(const uint8_t* block, SmallGroup& group) {
    static constexpr int values[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    group.scale = half_at(block);
    read_nibbles(block + 2, group);
    for (int& weight : group.weights) weight = values[weight];
}

// Group `index` of a block.
inline SmallGroup read_group(int type, const uint8_t* block, int index) {
    SmallGroup group;
    group.scale = half_at(block);
    switch (type) {
        case LMI_Q4_0:
            read_nibbles(block + 2, group);
            group.minimum = -8 * group.scale;
            break;
        case LMI_Q4_1:
            read_nibbles(block + 4, group);
            group.minimum = half_at(block + 2);
            break;
        case LMI_Q5_0:
            read_nibbles(block + 6, group);
            add_fifth_bits(block + 2, group);
            subtract(16, group);
            break;
        case LMI_Q5_1:
            read_nibbles(block + 8, group);
            add_fifth_bits(block + 4, group);
            group.minimum = half_at(block + 2);
            break;
        case LMI_Q8_0:
            for (int i = 0; i < SMALL_GROUP; i++) group.weights[i] = int8_t(block[2 + i]);
            break;
        case LMI_Q4_K:
            read_scales(block, index, group);
            read_shared_nibbles(block + 16, index, group);
            break;
        case LMI_Q5_K: read_q5_k(block, index, group); break;
        case LMI_Q6_K: read_q6_k(block, index, group); break;
        case LMI_ZERO4:
            group.scale = float_at(block);
            group.zero_point = block[4];
            read_nibbles(block + 5, group);
            break;
        case LMI_ZERO8:
            group.scale = float_at(block);
            group.zero_point = int8_t(block[4]);
            for (int i = 0; i < SMALL_GROUP; i++) group.weights[i] = int8_t(block[5 + i]);
            break;
        default: read_iq4_nl(block, group);
    }

    return group;
}

// ---- Packing ---------------------------------------------------------------------------------------------------------

// To nearest, ties to even; what is too large becomes infinity.
inline uint16_t to_float16(float x) {
    const uint32_t bits = bits_as<uint32_t>(x);
    const uint32_t sign = bits >> 16 & 0x8000;
    const uint32_t size = bits & 0x7fffffff;
    if (size > 0x7f800000) return sign | 0x7e00;
    if (size >= 0x477ff000) return sign | 0x7c00;
    // Below 2^-14 a number is a multiple of 2^-24, which is that of the last bit of 0.5.
    if (size < 0x38800000) return sign | (bits_as<uint32_t>(bits_as<float>(size) + 0.5f) - bits_as<uint32_t>(0.5f));
    return sign | (size - (112 << 23) + 0xfff + (size >> 13 & 1)) >> 13;
}

// Where the two float16 of a lane lie behind the weights of its group.
constexpr int halves_at(int lane) { return lane / VL * 4 * VL + lane % VL * 2; }

// A scale, to nearest, ties to even, and a zero point. What is too large becomes infinity.
inline uint32_t word_of(float scale, int zero_point) {
    uint32_t bits = bits_as<uint32_t>(scale);
    if (scale != scale)
        bits |= 0x00400000;
    else
        bits += ZERO_MASK / 2 + (bits >> ZERO_BITS & 1);
    return (bits & ~ZERO_MASK) | (zero_point & ZERO_MASK);
}

// Writes a group of a panel's channel `lane`.
inline void write_group(const SmallGroup& group, int format, int lane, char* to) {
    const int per_word = SMALL_GROUP / bits_of(format);
    const uint32_t mask = (1u << bits_of(format)) - 1;
    for (int i = 0; i < SMALL_GROUP; i += per_word) {
        uint32_t word = 0;
        for (int j = 0; j < per_word; j++) word |= (group.weights[i + j] & mask) << shift_of(format, j);
        std::memcpy(to + (i / per_word * NR + lane) * 4, &word, 4);
    }

    char* end = to + small_group_weight_bytes(format);
    if (has_zero(format)) {
        const uint32_t word = word_of(group.scale, group.zero_point);
        std::memcpy(end + lane * 4, &word, 4);
        return;
    }

    char* halves = end + halves_at(lane);
    const uint16_t scale = to_float16(group.scale);
    const uint16_t minimum = to_float16(group.minimum);
    std::memcpy(halves, &scale, 2);
    std::memcpy(halves + 2 * VL, &minimum, 2);
}

// Packs blocks (num_out, blocks of a row). Channels behind the last are zero.
inline void pack_blocks(const uint8_t* blocks, int type, int num_out, int num_in, char* data, int num_threads) {
    const BlockShape shape = shape_of(type);
    const int64_t group_bytes = small_group_bytes(shape.format);
    const int64_t row_bytes = int64_t(num_in) / SMALL_GROUP / shape.groups * shape.bytes;
    std::atomic<int64_t> next{0};
    in_parallel(num_threads, [&] {
        for (int64_t panel; (panel = next++) < num_panels(num_out);) {
            char* to = data + panel * panel_bytes(num_in, shape.format);
            std::memset(to, 0, panel_bytes(num_in, shape.format));
            const int num_lanes = std::min<int64_t>(NR, num_out - panel * NR);
            for (int lane = 0; lane < num_lanes; lane++) {
                const uint8_t* row = blocks + (panel * NR + lane) * row_bytes;
                for (int g = 0; g < num_in / SMALL_GROUP; g++) {
                    const SmallGroup group = read_group(type, row + g / shape.groups * shape.bytes, g % shape.groups);
                    write_group(group, shape.format, lane, to + g * group_bytes);
                }
            }
        }
    });
}

// ---- Rows of packed weights ------------------------------------------------------------------------------------------

// The scale of a group of channel `lane` and what is added, or in BITS8_HALVES both scales. `end` lies behind the
// weights of the group.
inline std::pair<float, float> factors_of(const char* end, int format, int lane) {
    if (has_zero(format)) {
        uint32_t word;
        std::memcpy(&word, end + lane * 4, 4);
        const float scale = bits_as<float>(word & ~ZERO_MASK);
        return {scale, -(scale * int8_t(word))};
    }

    const uint8_t* halves = reinterpret_cast<const uint8_t*>(end + halves_at(lane));
    return {half_at(halves), half_at(halves + 2 * VL)};
}

// Row `channel` of a weight (num_out, num_in) in a format of 4 or 8 bits, in float32.
inline void unpack_row(const Panels& panels, int64_t channel, float* out) {
    const int format = panels.format;
    const int per_word = SMALL_GROUP / bits_of(format);
    const int lane = channel % NR;
    const char* group = panel_of(panels, channel / NR);
    for (int k = 0; k < panels.num_in; k += SMALL_GROUP, group += small_group_bytes(format)) {
        const auto [scale, minimum] = factors_of(group + small_group_weight_bytes(format), format, lane);
        for (int i = 0; i < SMALL_GROUP; i++) {
            uint32_t word;
            std::memcpy(&word, group + (i / per_word * NR + lane) * 4, 4);
            const uint32_t bits = word >> shift_of(format, i % per_word);
            if (bits_of(format) == 4)
                out[k + i] = scale * (bits & 15) + minimum;
            else if (format != LMI_BITS8_HALVES)
                out[k + i] = scale * int8_t(bits) + minimum;
            else
                out[k + i] = (i < SMALL_GROUP / 2 ? scale : minimum) * int8_t(bits);
        }
    }
}

}  // namespace lmi
