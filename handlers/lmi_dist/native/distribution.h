// One row of logits: its largest number, the weights of its tokens, which of them filters leave, and the best of them.
//
// A row is read in spans of tokens. Weights are added up in 16 lanes within a span, and spans in order in double
// precision, so that a sum has the same bits on every CPU, in every batch and for any number of threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>

#include "vectors.h"

namespace lmi {

// The tokens of a span.
constexpr int SPAN = 256;

inline int num_spans(int num_tokens) { return divide_up(num_tokens, SPAN); }

struct Item {
    uint32_t key;
    float amount;
};

// Sums by the value of ten bits. Neighbours go to different sums, which do not wait for each other.
struct Bins {
    static constexpr int BITS = 10;
    static constexpr int TURNS = 4;
    double sums[1 << BITS][TURNS];

    // From the highest bin on: the last one before which less than `limit` is taken, or the first. Adds what lies
    // before it to `taken`.
    uint32_t last(double limit, double& taken) const {
        double before = taken;
        int last = -1;
        for (int bin = (1 << BITS) - 1; bin >= 0 && (last < 0 || before < limit); bin--) {
            const double sum = sums[bin][0] + sums[bin][1] + sums[bin][2] + sums[bin][3];
            if (sum == 0) continue;
            last = bin;
            taken = before;
            before += sum;
        }

        return std::max(last, 0);
    }
};

// What a thread needs for a row.
struct Scratch {
    int num_spans;
    Bins* bins;
    Item* items;               // (num_spans, SPAN)
    float *numbers, *weights;  // (num_spans, SPAN)
    // Of the weights of each span, (num_spans): their sum and the largest.
    float *sums, *tops;
    float* ranked;             // (num_spans)

    static int64_t num_bytes(int64_t num_tokens) {
        const int64_t spans = lmi::num_spans(num_tokens);
        const int64_t bytes = sizeof(Bins) + spans * (SPAN * (sizeof(Item) + 2 * sizeof(float)) + 3 * sizeof(float));
        return divide_up(bytes, 64) * 64;
    }

    Scratch(char* memory, int num_tokens) : num_spans(lmi::num_spans(num_tokens)) {
        bins = reinterpret_cast<Bins*>(memory);
        items = reinterpret_cast<Item*>(bins + 1);
        numbers = reinterpret_cast<float*>(items + num_spans * int64_t(SPAN));
        weights = numbers + num_spans * int64_t(SPAN);
        sums = weights + num_spans * int64_t(SPAN);
        tops = sums + num_spans;
        ranked = tops + num_spans;
    }

    double total() const {
        double total = 0;
        for (int span = 0; span < num_spans; span++) total += sums[span];
        return total;
    }
};

struct Row {
    const float* data;
    int num_tokens;

    // The numbers of a span. Those of the last one are filled up with -inf, in `spare`, (SPAN).
    const float* span(int index, float* spare) const {
        const int64_t first = int64_t(index) * SPAN;
        if (num_tokens - first >= SPAN) return data + first;
        std::fill_n(spare, SPAN, -INFINITY);
        std::memcpy(spare, data + first, sizeof(float) * (num_tokens - first));
        return spare;
    }
};

struct Peak {
    float value;
    // The first token that has it.
    int32_t token;
    // Whether no number of the row is a NaN.
    bool is_number;

    bool is_finite() const { return is_number && std::isfinite(value); }
};

// The largest number of a row, and that of each span, as `tops`.
inline Peak peak_of(const Row& row, Scratch& scratch) {
    alignas(64) float spare[SPAN];
    Ints odd = {};
    int best = 0;
    for (int span = 0; span < scratch.num_spans; span++) {
        const float* x = row.span(span, spare);
        Vec most[4];
        for (Vec& one : most) one = splat(-INFINITY);
        for (int i = 0; i < SPAN; i += 4 * VL)
            for (int j = 0; j < 4; j++) {
                const Vec own = vec(x + i + j * VL);
                // A NaN is no more than anything.
                most[j] = max(own, most[j]);
                odd |= own != own;
            }

        scratch.tops[span] = largest(max(max(most[0], most[1]), max(most[2], most[3])));
        if (scratch.tops[span] > scratch.tops[best]) best = span;
    }

    Peak peak{scratch.tops[best], best * SPAN, true};
    for (int i = 0; i < VL; i++) peak.is_number &= odd[i] == 0;
    while (peak.token < row.num_tokens - 1 && row.data[peak.token] != peak.value) peak.token++;
    return peak;
}

// ---- Weights ---------------------------------------------------------------------------------------------------------

// A smaller power of e is 0.
constexpr float LEAST_POWER = -87.0f;

// The weight of each token: e to the power of (its logit - the largest) * factor.
inline void find_weights(const Row& row, float largest_logit, float factor, Scratch& scratch) {
    alignas(64) float spare[SPAN];
    for (int span = 0; span < scratch.num_spans; span++) {
        const float* x = row.span(span, spare);
        float* weights = scratch.weights + int64_t(span) * SPAN;
        Sum sum;
        Vec most = {};
        for (int i = 0; i < SPAN; i += VL) {
            const Vec power = (vec(x + i) - splat(largest_logit)) * splat(factor);
            const Vec weight = power >= splat(LEAST_POWER) ? exp(power) : Vec{};
            vec(weights + i) = weight;
            sum.lanes[i / VL % VECS] += weight;
            most = max(weight, most);
        }

        scratch.sums[span] = sum.total();
        scratch.tops[span] = largest(most);
    }
}

// Leaves the tokens of at least this weight. Spans without any keep their weights, but have a sum of 0.
inline void drop_below(float least, Scratch& scratch) {
    least = std::max(least, FLT_MIN);
    for (int span = 0; span < scratch.num_spans; span++) {
        float* weights = scratch.weights + int64_t(span) * SPAN;
        Sum sum;
        if (scratch.tops[span] < least)
            scratch.tops[span] = 0;
        else
            for (int i = 0; i < SPAN; i += VL) {
                const Vec weight = vec(weights + i) >= splat(least) ? vec(weights + i) : Vec{};
                vec(weights + i) = weight;
                sum.lanes[i / VL % VECS] += weight;
            }

        scratch.sums[span] = sum.total();
    }
}

constexpr int NUM_STEPS = 3;

// What the tokens of at least each of these weights, which ascend, weigh together.
inline void weigh_from(const float* least, const Scratch& scratch, double* sums) {
    double lanes[NUM_STEPS][LANES] = {};
    for (int span = 0; span < scratch.num_spans; span++) {
        if (scratch.tops[span] < least[0]) continue;
        const float* weights = scratch.weights + int64_t(span) * SPAN;
        Sum own[NUM_STEPS];
        for (int i = 0; i < SPAN; i += VL)
            for (int step = 0; step < NUM_STEPS; step++)
                own[step].lanes[i / VL % VECS] += vec(weights + i) >= splat(least[step]) ? vec(weights + i) : Vec{};
        for (int step = 0; step < NUM_STEPS; step++) {
            float terms[LANES];
            std::memcpy(terms, own[step].lanes, sizeof(terms));
            for (int i = 0; i < LANES; i++) lanes[step][i] += terms[i];
        }
    }

    for (int step = 0; step < NUM_STEPS; step++) {
        sums[step] = 0;
        for (const double lane : lanes[step]) sums[step] += lane;
    }
}

// Makes items of the tokens of weights from `least`, which is over 0, to below `end`. Returns how many.
inline int collect(float least, float end, Scratch& scratch) {
    int num_items = 0;
    for (int span = 0; span < scratch.num_spans; span++) {
        if (scratch.tops[span] < least) continue;
        const float* weights = scratch.weights + int64_t(span) * SPAN;
        for (int i = 0; i < SPAN; i += VL) {
            const Vec own = vec(weights + i);
            for (uint32_t left = lanes_of((own >= splat(least)) & (own < splat(end))); left; left &= left - 1) {
                const float weight = weights[i + __builtin_ctz(left)];
                scratch.items[num_items++] = {bits_as<uint32_t>(weight), weight};
            }
        }
    }

    return num_items;
}

// ---- Filters ---------------------------------------------------------------------------------------------------------

// Takes items in descending order of their keys, below 2^30, while less than `limit` is taken, and at least one. `taken`
// is what was taken before. Returns the key of the last.
inline uint32_t last_key(int num_items, double limit, double taken, Scratch& scratch) {
    Bins& bins = *scratch.bins;
    Item* items = scratch.items;
    uint32_t last = 0;
    for (int shift = 2 * Bins::BITS; shift >= 0; shift -= Bins::BITS) {
        std::memset(&bins, 0, sizeof(bins));
        for (int i = 0; i < num_items; i++)
            bins.sums[items[i].key >> shift & ((1 << Bins::BITS) - 1)][i % Bins::TURNS] += items[i].amount;
        last = last << Bins::BITS | bins.last(limit, taken);
        const Item* end = std::remove_if(items, items + num_items, [&](Item one) { return one.key >> shift != last; });
        num_items = end - items;
    }

    return last;
}

// The largest number that at least `num` spans reach.
inline float reached_by(int num, Scratch& scratch) {
    if (num > scratch.num_spans) return -INFINITY;
    std::copy_n(scratch.tops, scratch.num_spans, scratch.ranked);
    std::nth_element(scratch.ranked, scratch.ranked + num - 1, scratch.ranked + scratch.num_spans, std::greater<float>());
    return scratch.ranked[num - 1];
}

inline void keep_top_k(int top_k, Scratch& scratch) {
    const int num_items = collect(std::max(reached_by(top_k, scratch), FLT_MIN), INFINITY, scratch);
    for (int i = 0; i < num_items; i++) scratch.items[i].amount = 1;
    drop_below(bits_as<float>(last_key(num_items, top_k, 0, scratch)), scratch);
}

inline void keep_top_p(float top_p, int num_tokens, Scratch& scratch) {
    const double total = scratch.total();
    const double limit = total * top_p;
    // The least weight that stays is from `low` to below `high`: what is below this `low` is less, all together, than
    // what may be left out. `taken` is what weighs at least `high`.
    float low = std::max(float((total - limit) / num_tokens * 0.999), FLT_MIN);
    float high = 1.0f + FLT_EPSILON;
    double taken = 0;
    for (int round = 0; round < 3; round++) {
        const uint32_t from = bits_as<uint32_t>(low);
        const uint32_t range = bits_as<uint32_t>(high) - from;
        float steps[NUM_STEPS];
        double sums[NUM_STEPS];
        for (uint32_t i = 0; i < NUM_STEPS; i++) steps[i] = bits_as<float>(from + range / (NUM_STEPS + 1) * (i + 1));
        weigh_from(steps, scratch, sums);
        int step = 0;
        while (step < NUM_STEPS && sums[step] >= limit) low = steps[step++];
        if (step < NUM_STEPS) {
            high = steps[step];
            taken = sums[step];
        }
    }

    const int num_items = collect(low, high, scratch);
    drop_below(bits_as<float>(last_key(num_items, limit, taken, scratch)), scratch);
}

// Keeps the tokens whose surprise is nearest to its mean, the entropy. The surprise of a token is a constant less its
// power, so distances are those of powers. Source: locally typical sampling (Meister et al. 2022).
inline void keep_typical(const Row& row, float largest_logit, float factor, float typical_p, Scratch& scratch) {
    const double total = scratch.total();
    const auto each = [&](const auto& visit) {
        for (int token = 0; token < row.num_tokens; token++)
            if (scratch.tops[token / SPAN] > 0 && scratch.weights[token] > 0) visit(token, scratch.weights[token]);
    };
    double sum = 0;
    each([&](int token, float& weight) { sum += double(weight) * ((row.data[token] - largest_logit) * factor); });
    const float mean = sum / total;
    const auto key_of = [&](int token) {
        const float distance = std::fabs(std::fma(row.data[token] - largest_logit, -factor, mean));
        return bits_as<uint32_t>(128.0f) - bits_as<uint32_t>(std::max(distance, 1e-6f));
    };
    int num_items = 0;
    each([&](int token, float& weight) { scratch.items[num_items++] = {key_of(token), weight}; });
    const uint32_t last = last_key(num_items, total * typical_p, 0, scratch);
    each([&](int token, float& weight) { weight = key_of(token) < last ? 0 : weight; });
    drop_below(FLT_MIN, scratch);
}

// ---- Tokens ----------------------------------------------------------------------------------------------------------

// The first token up to which the weights, as shares of `all`, are more than `uniform` of those that are left. Shares
// are rounded to float32, of which `uniform` has the bits.
inline int draw(const Scratch& scratch, double all, float uniform) {
    const double factor = 1 / all;
    const float target = uniform * float(scratch.total() * factor);
    double sum = 0;
    int span = 0;
    int drawn = 0;
    while (float((sum + scratch.sums[span]) * factor) <= target && span + 1 < scratch.num_spans)
        sum += scratch.sums[span++];
    for (int token = span * SPAN; token < (span + 1) * SPAN; token++) {
        if (scratch.weights[token] == 0) continue;
        sum += scratch.weights[token];
        drawn = token;
        if (float(sum * factor) > target) break;
    }

    return drawn;
}

// The `num` largest numbers of a row, (token, number) in `items`, the largest first and of equal ones the first token.
inline void find_best(const Row& row, int num, Scratch& scratch) {
    const float least = reached_by(num, scratch);
    Item* items = scratch.items;
    Item* end = items;
    for (int span = 0; span < scratch.num_spans; span++) {
        if (scratch.tops[span] < least) continue;
        for (int token = span * SPAN; token < std::min((span + 1) * SPAN, row.num_tokens); token++)
            if (row.data[token] >= least) *end++ = {uint32_t(token), row.data[token]};
    }

    std::partial_sort(items, items + num, end, [](const Item& a, const Item& b) {
        return a.amount != b.amount ? a.amount > b.amount : a.key < b.key;
    });
}

}  // namespace lmi
