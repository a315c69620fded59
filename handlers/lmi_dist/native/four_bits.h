// Weights of floats rounded to 4 bits: whole numbers with a scale and a minimum of 32 inputs.
//
// Of each small group a few ranges of numbers are tried, and of each the scale and the minimum that fit best by least
// squares, in float16. The one that leaves the smallest squares of errors is taken. Each lane of a vector is a channel,
// and every sum has one order, so each CPU gives the same numbers.
#pragma once

#include "gguf_blocks.h"
#include "vectors.h"

namespace lmi {

// How many ranges of numbers are tried for a small group: from a step wider than that of its weights to one narrower,
// where the largest and the smallest weight are cut.
constexpr int NUM_RANGES = 9;

// A small group of VL channels: each lane is a channel.
struct GroupOfFloats {
    Vec weights[SMALL_GROUP];

    Vec smallest() const {
        Vec least = weights[0];
        for (const Vec& weight : weights) least = min(weight, least);
        return least;
    }

    Vec largest() const {
        Vec most = weights[0];
        for (const Vec& weight : weights) most = max(weight, most);
        return most;
    }
};

// Whole numbers from 0 to 15, with a scale and a minimum that float16 holds, and how far off they are, squared.
struct FourBitFit {
    Vec scale, minimum, error;
};

inline Vec rounded_to_float16(Vec x) {
    for (int i = 0; i < VL; i++) x[i] = from_float16(to_float16(x[i]));
    return x;
}

inline Vec four_bits_of(Vec weight, Vec inverse, Vec minimum) {
    const Vec magic = splat(0x1.8p23f);
    const Vec number = fma(weight - minimum, inverse, magic) - magic;
    return min(max(number, Vec{}), splat(15.0f));
}

inline Vec inverse_of(Vec scale) { return scale > Vec{} ? splat(1.0f) / scale : Vec{}; }

inline FourBitFit fit_of(const GroupOfFloats& group, Vec scale, Vec minimum) {
    FourBitFit fit{rounded_to_float16(scale), rounded_to_float16(minimum), Vec{}};
    const Vec inverse = inverse_of(fit.scale);
    for (const Vec& weight : group.weights) {
        const Vec number = four_bits_of(weight, inverse, fit.minimum);
        const Vec distance = weight - fma(number, fit.scale, fit.minimum);
        fit.error = fma(distance, distance, fit.error);
    }

    return fit;
}

// The scale and the minimum that fit best to the whole numbers which a range gives, by least squares.
inline FourBitFit fit_in_range(const GroupOfFloats& group, Vec scale, Vec minimum) {
    const Vec inverse = inverse_of(scale);
    Vec numbers = {}, squares = {}, products = {}, sum = {};
    for (const Vec& weight : group.weights) {
        const Vec number = four_bits_of(weight, inverse, minimum);
        numbers += number;
        squares = fma(number, number, squares);
        products = fma(number, weight - minimum, products);
        sum += weight - minimum;
    }

    const Vec count = splat(float(SMALL_GROUP));
    const Vec spread = fma(numbers, -numbers, count * squares);
    const Vec slope = fma(count, products, -(numbers * sum));
    const Vec best = spread > Vec{} ? slope / spread : Vec{};
    return fit_of(group, best, minimum + fma(-best, numbers, sum) / count);
}

// The best of a few fits. Infinity and NaN make the scale NaN.
inline FourBitFit best_fit(const GroupOfFloats& group) {
    const Vec minimum = group.smallest();
    const Vec range = group.largest() - minimum;
    FourBitFit best = fit_of(group, range / splat(15.0f), minimum);
    for (int i = 0; i < NUM_RANGES; i++) {
        const FourBitFit fit = fit_in_range(group, range / splat(14.0f + 0.25f * i), minimum);
        const Ints is_better = fit.error < best.error;
        best.scale = is_better ? fit.scale : best.scale;
        best.minimum = is_better ? fit.minimum : best.minimum;
        best.error = is_better ? fit.error : best.error;
    }

    for (const Vec& weight : group.weights) best.scale += weight - weight;
    return best;
}

inline void pack_panel_to_4_bits(const Source& source, int64_t panel, char* to) {
    for (int k = 0; k < source.num_in; k += SMALL_GROUP, to += small_group_bytes(LMI_BITS4))
        for (int first = 0; first < NR; first += VL) {
            GroupOfFloats floats;
            for (int i = 0; i < SMALL_GROUP; i++)
                for (int lane = 0; lane < VL; lane++)
                    floats.weights[i][lane] = source.at(panel * NR + first + lane, k + i);
            const FourBitFit fit = best_fit(floats);
            const Vec inverse = inverse_of(fit.scale);
            SmallGroup groups[VL];
            for (int i = 0; i < SMALL_GROUP; i++) {
                const Vec number = four_bits_of(floats.weights[i], inverse, fit.minimum);
                for (int lane = 0; lane < VL; lane++) groups[lane].weights[i] = int(number[lane]) & 15;
            }

            for (int lane = 0; lane < VL; lane++) {
                groups[lane].scale = fit.scale[lane];
                groups[lane].minimum = fit.minimum[lane];
                write_group(groups[lane], LMI_BITS4, first + lane, to);
            }
        }
}

// Packs a weight of floats, whose rows are whole small groups, into the format of 4 bits with minima.
inline void pack_to_4_bits(const Source& source, char* data, int num_threads) {
    std::atomic<int64_t> next{0};
    in_parallel(num_threads, [&] {
        for (int64_t panel; (panel = next++) < num_panels(source.num_out);)
            pack_panel_to_4_bits(source, panel, data + panel * panel_bytes(source.num_in, LMI_BITS4));
    });
}

}  // namespace lmi
