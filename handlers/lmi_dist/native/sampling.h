// Sampling: draws a token from a row of logits, or tells log-probs or a search's candidates, by the row's parameters.
//
// A row's bits depend on its logits and its parameters alone. Logits are never written: rules change a copy of the row.
#pragma once

#include <atomic>
#include <optional>
#include <vector>

#include "checks.h"
#include "distribution.h"
#include "lmi_kernels.h"
#include "pool.h"

namespace lmi {

// ---- What is refused -------------------------------------------------------------------------------------------------

// A NaN is not within.
inline bool is_within(const char* name, float value, float least, float most) {
    return (value >= least && value <= most) || refuse("%s must be from %g to %g, given %g", name, least, most, value);
}

inline bool are_tokens(const char* name, const int32_t* ids, int num, int vocab_size) {
    if (num && !is_there(name, ids)) return false;
    for (int i = 0; i < num; i++)
        if (!is_between(name, ids[i], 0, vocab_size - 1)) return false;
    return true;
}

inline bool is_valid(const Sampling& sampling, const RowParams& params) {
    return (params.temperature == 0 || is_within("temperature", params.temperature, 1e-5f, 1e5f)) &&
           is_within("top_p", params.top_p, 0, 1) && is_within("min_p", params.min_p, 0, 1) &&
           is_within("typical_p", params.typical_p, 0, 1) &&
           is_within("repetition penalty", params.repetition, FLT_MIN, FLT_MAX) &&
           is_within("presence penalty", params.presence, -FLT_MAX, FLT_MAX) &&
           is_within("frequency penalty", params.frequency, -FLT_MAX, FLT_MAX) &&
           is_between("top_k", params.top_k, 0, INT32_MAX) &&
           is_between("row", params.row, 0, sampling.num_logits - 1) &&
           is_between("changed", params.changed, -1, sampling.num_changed - 1) &&
           is_between("mask", params.mask, -1, sampling.num_masks - 1) &&
           is_between("position", params.position, 0, INT32_MAX) &&
           is_between("token_id", params.token_id, -1, sampling.vocab_size - 1) &&
           is_between("num_top", params.num_top, 0, sampling.vocab_size) &&
           is_between("num_candidates", params.num_candidates, 0, sampling.vocab_size) &&
           is_between("num_biased", params.num_biased, 0, sampling.num_biased) &&
           is_between("num_seen", params.num_seen, 0, sampling.num_seen) &&
           is_between("num_banned", params.num_banned, 0, sampling.num_banned);
}

inline bool are_valid(const Sampling& sampling) {
    int64_t num_biased = 0;
    int64_t num_seen = 0;
    int64_t num_banned = 0;
    int64_t num_best = 0;
    for (const RowParams* params = sampling.params; params < sampling.params + sampling.num_params; params++) {
        if (!is_valid(sampling, *params)) return false;
        num_biased += params->num_biased;
        num_seen += params->num_seen;
        num_banned += params->num_banned;
        num_best += int64_t(params->num_top) + params->num_candidates;
    }

    return is_equal("num_biased", sampling.num_biased, "that of the rows", num_biased) &&
           is_equal("num_seen", sampling.num_seen, "that of the rows", num_seen) &&
           is_equal("num_banned", sampling.num_banned, "that of the rows", num_banned) &&
           is_equal("num_best", sampling.num_best, "that of the rows", num_best);
}

inline bool is_sampling(const Sampling& sampling) {
    return is_between("vocab_size", sampling.vocab_size, 1, INT32_MAX - SPAN) &&
           is_between("num_params", sampling.num_params, 1, INT32_MAX) && is_there("params", sampling.params) &&
           is_there("choices", sampling.choices) && is_there("logits", sampling.logits) && are_valid(sampling) &&
           (!sampling.num_changed || is_there("changed", sampling.changed)) &&
           (!sampling.num_masks || is_there("masks", sampling.masks)) &&
           (!sampling.num_best || is_there("best", sampling.best)) &&
           (!sampling.num_biased || is_there("biases", sampling.biases)) &&
           (!sampling.num_seen || is_there("counts", sampling.counts)) &&
           are_tokens("a biased token", sampling.biased_ids, sampling.num_biased, sampling.vocab_size) &&
           are_tokens("a token that was seen", sampling.seen_ids, sampling.num_seen, sampling.vocab_size) &&
           are_tokens("a banned token", sampling.banned_ids, sampling.num_banned, sampling.vocab_size) &&
           is_there("scratch", sampling.scratch) &&
           is_equal("scratch modulo 8", reinterpret_cast<uintptr_t>(sampling.scratch) % 8, "nothing", 0) &&
           is_between("scratch_bytes", sampling.scratch_bytes, Scratch::num_bytes(sampling.vocab_size), INT64_MAX);
}

// ---- Rules -----------------------------------------------------------------------------------------------------------

// Where the part of a row begins in each list.
struct Lists {
    int64_t biased, seen, banned, best;
};

inline bool has_rules(const RowParams& params) {
    return params.num_biased || params.num_seen || params.num_banned || params.mask >= 0;
}

// `mask` has a bit for each number; there are whole spans of them.
inline void apply_mask(const int32_t* mask, int num_words, float* x) {
    Ints bit;
    for (int i = 0; i < VL; i++) bit[i] = 1 << i;
    for (int word = 0; word < num_words; word++, x += 32) {
        if (mask[word] == -1) continue;
        for (int i = 0; i < 32; i += VL)
            vec(x + i) = (splat(int32_t(uint32_t(mask[word]) >> i)) & bit) != 0 ? vec(x + i) : splat(-INFINITY);
    }
}

// First bias, then penalties, then bans, then the mask.
inline void apply_rules(const Sampling& sampling, const RowParams& params, const Lists& lists, float* x) {
    for (int64_t i = lists.biased; i < lists.biased + params.num_biased; i++)
        x[sampling.biased_ids[i]] += sampling.biases[i];
    for (int64_t i = lists.seen; i < lists.seen + params.num_seen; i++) {
        float& own = x[sampling.seen_ids[i]];
        const float count = sampling.counts[i];
        const float less = std::fma(params.frequency, count, count > 0 ? params.presence : 0.0f);
        own = own > 0 ? own / params.repetition - less : std::fma(own, params.repetition, -less);
    }

    for (int64_t i = lists.banned; i < lists.banned + params.num_banned; i++) x[sampling.banned_ids[i]] = -INFINITY;
    const int64_t num_words = divide_up(sampling.vocab_size, 32);
    if (params.mask >= 0) apply_mask(sampling.masks + params.mask * num_words, num_words, x);
}

// ---- Rows ------------------------------------------------------------------------------------------------------------

// One number of 24 bits in [0, 1) for each seed and position: splitmix64 (Steele, Lea, Flood 2014).
inline float uniform(uint64_t seed, uint64_t position) {
    constexpr uint64_t golden = 0x9E3779B97F4A7C15;
    const auto mix = [](uint64_t x) {
        x += golden;
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
        return x ^ (x >> 31);
    };
    return (mix(mix(seed) + position * golden) >> 40) * 0x1p-24f;
}

inline int32_t draw_token(const Row& row, const RowParams& params, const Peak& peak, Scratch& scratch) {
    if (params.temperature == 0) return peak.token;
    const float factor = 1 / params.temperature;
    find_weights(row, peak.value, factor, scratch);
    const double all = scratch.total();
    if (params.top_k > 0 && params.top_k < row.num_tokens) keep_top_k(params.top_k, scratch);
    if (params.top_p < 1) keep_top_p(params.top_p, row.num_tokens, scratch);
    // The largest weight is 1.
    if (params.min_p > 0) drop_below(std::max(params.min_p, FLT_MIN), scratch);
    if (params.typical_p < 1) keep_typical(row, peak.value, factor, params.typical_p, scratch);
    return draw(scratch, all, uniform(params.seed, params.position));
}

// Makes log-probs of logits.
struct LogSoftmax {
    float largest, log_sum;

    LogSoftmax(const Row& logits, const Peak& peak, Scratch& scratch) : largest(peak.value) {
        find_weights(logits, largest, 1, scratch);
        log_sum = std::log(scratch.total());
    }

    float operator()(float logit) const { return logit - largest - log_sum; }

    // `to` has room for whole spans.
    Row write(const Row& logits, float* to) const {
        for (int i = 0; i < logits.num_tokens; i += VL) {
            const int count = logits.num_tokens - i;
            store(to + i, load(logits.data + i, count) - splat(largest) - splat(log_sum), count);
        }

        return {to, logits.num_tokens};
    }
};

// What happens to one row. Each step says what became of it.
struct RowSampler {
    const Sampling& sampling;
    const RowParams& params;
    const Lists& lists;
    Scratch& scratch;
    // The model's row, and what functions of the user made of it.
    Row logits, source;
    Choice& choice;
    // The peak of the logits, once it was found.
    std::optional<Peak> logits_peak = {};

    int32_t sample() {
        if (params.token_id < 0 && !params.num_candidates)
            if (const int32_t status = draw()) return status;
        if (!params.wants_log_prob && !params.num_top && !params.num_candidates) return LMI_CHOSEN;
        const Peak peak = logits_peak ? *logits_peak : peak_of(logits, scratch);
        if (!peak.is_finite()) return LMI_NO_NUMBERS;
        const LogSoftmax log_prob(logits, peak, scratch);
        if (choice.token_id >= 0) choice.log_prob = log_prob(logits.data[choice.token_id]);
        if (params.token_id < 0 && !std::isfinite(choice.log_prob)) return LMI_NO_NUMBERS;
        if (params.num_top) tell_best(log_prob.write(logits, scratch.numbers), params.num_top, log_prob, lists.best);
        return params.num_candidates ? tell_candidates(log_prob) : LMI_CHOSEN;
    }

    int32_t draw() {
        Row row = source;
        if (has_rules(params)) {
            std::memcpy(scratch.numbers, row.data, sizeof(float) * row.num_tokens);
            apply_rules(sampling, params, lists, scratch.numbers);
            row.data = scratch.numbers;
        }

        const Peak peak = peak_of(row, scratch);
        if (row.data == logits.data) logits_peak = peak;
        if (peak.is_number && peak.value == -INFINITY) return LMI_ALL_BANNED;
        if (!peak.is_finite()) return LMI_NO_NUMBERS;
        choice.token_id = draw_token(row, params, peak, scratch);
        return LMI_CHOSEN;
    }

    int32_t tell_candidates(const LogSoftmax& log_prob) {
        const Row scores = log_prob.write(source, scratch.numbers);
        apply_rules(sampling, params, lists, scratch.numbers);
        return tell_best(scores, params.num_candidates, log_prob, lists.best + params.num_top);
    }

    int32_t tell_best(const Row& scores, int num, const LogSoftmax& log_prob, int64_t first) {
        const Peak peak = peak_of(scores, scratch);
        if (!peak.is_number || peak.value == INFINITY) return LMI_NO_NUMBERS;
        find_best(scores, num, scratch);
        for (int i = 0; i < num; i++) {
            const int32_t token_id = scratch.items[i].key;
            sampling.best[first + i] = {token_id, scratch.items[i].amount, log_prob(logits.data[token_id])};
        }

        return LMI_CHOSEN;
    }
};

inline std::vector<Lists> lists_of(const Sampling& sampling) {
    std::vector<Lists> lists(sampling.num_params);
    for (int i = 1; i < sampling.num_params; i++) {
        const RowParams& before = sampling.params[i - 1];
        lists[i] = {lists[i - 1].biased + before.num_biased, lists[i - 1].seen + before.num_seen,
                    lists[i - 1].banned + before.num_banned,
                    lists[i - 1].best + before.num_top + before.num_candidates};
    }

    return lists;
}

// Fewer tokens are not worth waking a thread.
constexpr int64_t TOKENS_PER_THREAD = 1 << 17;

inline void sample(const Sampling& sampling, int64_t num_threads) {
    const std::vector<Lists> lists = lists_of(sampling);
    const int64_t vocab_size = sampling.vocab_size;
    const int64_t num_bytes = Scratch::num_bytes(vocab_size);
    num_threads = std::min(num_threads, sampling.scratch_bytes / num_bytes);
    num_threads = std::min(num_threads, 1 + sampling.num_params * vocab_size / TOKENS_PER_THREAD);
    std::atomic<int64_t> next_thread{0};
    std::atomic<int64_t> next_row{0};
    in_parallel(num_threads, [&] {
        Scratch scratch(sampling.scratch + next_thread.fetch_add(1) * num_bytes, vocab_size);
        for (int64_t i; (i = next_row.fetch_add(1)) < sampling.num_params;) {
            const RowParams& params = sampling.params[i];
            const float* logits = sampling.logits + params.row * vocab_size;
            const float* source = params.changed < 0 ? logits : sampling.changed + params.changed * vocab_size;
            Choice& choice = sampling.choices[i];
            choice = {LMI_CHOSEN, params.token_id, 0};
            const Row row{logits, sampling.vocab_size};
            const Row changed{source, sampling.vocab_size};
            choice.status = RowSampler{sampling, params, lists[i], scratch, row, changed, choice}.sample();
        }
    });
}

}  // namespace lmi
