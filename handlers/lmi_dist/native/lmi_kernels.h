// What library.py gives to the functions at the end of lmi_kernels.cpp. A change here or there is a change of LMI_ABI.
//
// A model is a list of operations over numbered buffers, as operations.py describes them. A step runs all of them over
// the tokens of its chunks. A chunk is consecutive tokens of one sequence; the keys and values of its earlier tokens are
// in the blocks of its table already: position p lies in block table[p / 64]. A chunk may use an adapter, which has two
// small weights, one behind the other, for some of the sites of the model: those linears that it changes.
#pragma once

#include <cstdint>

#define LMI_ABI 7

namespace lmi {

constexpr int BLOCK = 64;  // tokens
constexpr int MAX_HEAD_DIM = 512;

enum LmiKind : int32_t { LMI_EMBED, LMI_NORM, LMI_LINEAR, LMI_ATTEND, LMI_GATHER, LMI_CAP, LMI_SHRINK };
enum LmiActivation : int32_t { LMI_NONE, LMI_SILU, LMI_RELU, LMI_GELU, LMI_GELU_TANH };
enum LmiDtype : int32_t { LMI_FLOAT32, LMI_BFLOAT16, LMI_FLOAT16 };
// The formats of packed weights. The last five are those of lmi_pack_blocks: 4 or 8 bits with a scale and a minimum of
// 32 inputs, 8 bits with a scale of 16, and 4 or 8 bits with a scale and a zero point of 32.
enum LmiFormat : int32_t {
    LMI_F32,
    LMI_BF16,
    LMI_INT8,
    LMI_BITS4,
    LMI_BITS8,
    LMI_BITS8_HALVES,
    LMI_BITS4_ZERO,
    LMI_BITS8_ZERO
};
// The types of blocks in a GGUF file, by its numbers. The last two are in none: those of other quantised weights.
enum LmiBlockType : int32_t {
    LMI_Q4_0 = 2,
    LMI_Q4_1 = 3,
    LMI_Q5_0 = 6,
    LMI_Q5_1 = 7,
    LMI_Q8_0 = 8,
    LMI_Q4_K = 12,
    LMI_Q5_K = 13,
    LMI_Q6_K = 14,
    LMI_IQ4_NL = 20,
    LMI_ZERO4 = 1000,
    LMI_ZERO8 = 1001
};

// A weight (num_out, num_in) that lmi_pack or lmi_pack_blocks has packed.
struct Panels {
    // Of all parts.
    int32_t num_out, num_in;
    // Of the first part: the format, and how many panels it has if `rest` is not null.
    int32_t format, num_own;
    const void* data;  // 64-byte aligned
    // The output channels behind those of the first part, in another format.
    const Panels* rest = nullptr;
};

struct Op {
    // An LmiKind and two buffers. Embed has no input, Cap has one buffer as both.
    int32_t kind, input, output;
    int32_t adds;                 // Norm, Linear: the result is added to the output
    int32_t is_centred;           // Norm
    int32_t activation;           // Linear: an LmiActivation
    int32_t layer;                // Attend
    int32_t window;               // Attend: 0 is none
    int32_t num_pairs;            // Attend: channels that rotate with another
    int32_t is_wanted;            // Attend
    int32_t table_dtype;          // Embed: LMI_FLOAT32 or LMI_BFLOAT16
    int32_t site;                 // Shrink, Linear: from 1 on; 0 is none
    int32_t low;                  // Linear with a site: the buffer that its Shrink wrote
    float eps;                    // Norm, Attend
    float scale;                  // Embed, Attend
    float cap;                    // Cap, Attend: 0 is none
    const Panels *weight, *gate;  // Linear. Embed has a weight (vocab_size, width) where it has no table
    const float *bias, *gate_bias;   // Linear (num_out); Norm has a bias (width)
    const void* table;               // Embed (vocab_size, width)
    const float* positions;          // Embed (max_length, width)
    const float* norm;               // Norm (width)
    const float* rotations;          // Attend (max_length, 2, num_pairs)
    const float *query_norm, *key_norm;  // Attend (head_dim)
};

struct Buffer {
    float* data;  // (num_rows, width), 64-byte aligned
    int32_t width, num_rows, is_wanted, reserved;
};

// What an adapter has for a linear. `data` is null where it has nothing.
struct Site {
    Panels down;  // (rank, num_in)
    // (num_out, rank): for the linear's weight and for its gate.
    Panels up, gate;
};

struct Model {
    const Op* ops;
    const Buffer* buffers;
    char* pool;     // (num_blocks, lmi_block_bytes), 64-byte aligned
    char* scratch;  // at least lmi_scratch_bytes, 64-byte aligned
    int64_t pool_bytes, scratch_bytes;
    int32_t num_ops, num_buffers, num_blocks, num_layers, num_heads, num_kv_heads, head_dim, vocab_size, max_length;
    int32_t num_sites;
    // Of keys and values: LMI_F32, or LMI_BF16 in a library that multiplies pairs.
    int32_t kv_format;
};

struct Step {
    const int32_t* ids;      // (num_rows): the tokens of the chunks, in order
    const int32_t* starts;   // (num_chunks): the position of a chunk's first token
    const int32_t* lengths;  // (num_chunks): its tokens
    // (num_blocks): the tables of the chunks, in order, each up to the chunk's last token.
    const int32_t* blocks;
    const int32_t* wanted;   // (num_wanted): rows, ascending
    // (num_chunks): the adapter of each chunk, -1 for none. It is not read without adapters.
    const int32_t* users;
    const Site* const* adapters;  // (num_adapters, num_sites)
    int32_t num_rows, num_chunks, num_blocks, num_wanted, num_adapters, reserved;
};

// What is wanted of a row of the logits: a token, the log-prob of one, or candidates of a beam search.
struct RowParams {
    uint64_t seed;
    float temperature;                      // 0: the best token
    float top_p, min_p, typical_p;          // 1, 0 and 1 are none
    float repetition, presence, frequency;  // penalties: 1, 0 and 0 are none
    int32_t top_k;                          // 0 is none
    int32_t row;                            // of the logits
    // The row that takes its place, but not for log-probs. -1 is none.
    int32_t changed;
    int32_t mask;                           // -1 is none
    int32_t position;                       // of the token in its output
    // The token whose log-prob is wanted. -1: one is drawn.
    int32_t token_id;
    int32_t wants_log_prob;
    int32_t num_top;         // of the best tokens by log-prob
    // If it is over 0, this many of the best tokens by score are told, and none is drawn.
    int32_t num_candidates;
    // How many ids of the lists belong to it: those behind the ids of the rows before.
    int32_t num_biased, num_seen, num_banned;
    int32_t reserved;
};

enum LmiStatus : int32_t { LMI_CHOSEN, LMI_NO_NUMBERS, LMI_ALL_BANNED };

struct Choice {
    int32_t status;  // an LmiStatus
    int32_t token_id;
    float log_prob;  // by the logits, before any rule
};

// The score is the log-prob after all rules. That of a token by log-prob is its log-prob.
struct Best {
    int32_t token_id;
    float score, log_prob;
};

struct Sampling {
    const float* logits;        // (num_logits, vocab_size)
    const float* changed;       // (num_changed, vocab_size)
    // (num_masks, vocab_size / 32, rounded up): a bit for each token that may come.
    const int32_t* masks;
    const RowParams* params;    // (num_params)
    const int32_t* biased_ids;  // (num_biased)
    const float* biases;        // (num_biased)
    const int32_t* seen_ids;    // (num_seen): what penalties count
    const float* counts;        // (num_seen): how often each was generated
    const int32_t* banned_ids;  // (num_banned)
    Choice* choices;            // (num_params)
    // (num_best): of each row the best by log-prob, then the candidates.
    Best* best;
    char* scratch;              // lmi_sampling_bytes for each thread, 8-byte aligned
    int64_t scratch_bytes;
    int32_t num_logits, num_changed, num_masks, vocab_size, num_params, num_biased, num_seen, num_banned, num_best;
    int32_t reserved;
};

}  // namespace lmi
