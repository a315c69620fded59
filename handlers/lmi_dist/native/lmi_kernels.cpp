// Runs whole steps of a decoder on a CPU. lmi_kernels.h has what it is given, vectors.h functions of vectors, products.h
// products with weights, gguf_blocks.h weights in blocks, four_bits.h floats rounded to such,
// pool.h threads, checks.h what is refused. sampling.h draws tokens from the logits, by
// distribution.h.
//
// Top to bottom: functions of rows, each kind of operation, the phases of a step, the interface.
//
// Bits: whatever rows share a step, whatever piece of a prompt they belong to and whatever thread computes them, a row's
// sums add the same numbers in the same order. Norms add in 16 lanes on every CPU; attention walks whole blocks at
// absolute positions, and a key that is hidden from a query counts exactly 0. What an adapter adds to a row is one sum by
// itself, so rows without an adapter are those of a model that has none.

#include "lmi_kernels.h"

#include "checks.h"
#include "four_bits.h"
#include "gguf_blocks.h"
#include "pool.h"
#include "products.h"
#include "sampling.h"
#include "vectors.h"

#include <atomic>
#include <exception>
#include <vector>

namespace lmi {
namespace {

// ---- Functions of rows -----------------------------------------------------------------------------------------------

float sum_of(const float* x, int width) {
    Sum sum;
    for (int i = 0; i < width; i += LANES)
        for (int j = 0; j < VECS; j++) sum.lanes[j] += load(x + i + j * VL, width - i - j * VL);
    return sum.total();
}

float sum_of_squares(const float* x, int width, float mean) {
    Sum sum;
    for (int i = 0; i < width; i += LANES)
        for (int j = 0; j < VECS; j++) {
            const int at = i + j * VL;
            const int count = width - at;
            const Vec whole = load(x + at, count) - splat(mean);
            const Vec rest = load(reinterpret_cast<const float*>(&whole), count);
            sum.lanes[j] = fma(rest, rest, sum.lanes[j]);
        }

    return sum.total();
}

struct NormWeights {
    // (width). The bias may be null.
    const float *weight, *bias;
    float eps;
    bool is_centred;
};

// out (+)= (x - mean) / deviation * weight + bias. `out` may be `x` if it does not add.
void normalise(const float* x, int width, const NormWeights& norm, bool adds, float* out) {
    const float mean = norm.is_centred ? sum_of(x, width) / width : 0.0f;
    const float factor = 1.0f / std::sqrt(sum_of_squares(x, width, mean) / width + norm.eps);
    for (int i = 0; i < width; i += VL) {
        const int count = width - i;
        const Vec bias = norm.bias ? load(norm.bias + i, count) : Vec{};
        Vec y = fma((load(x + i, count) - splat(mean)) * splat(factor), load(norm.weight + i, count), bias);
        if (adds) y += load(out + i, count);
        store(out + i, y, count);
    }
}

// Rotates channel i with channel num_pairs + i. `rotation` is (2, num_pairs): cosines and sines.
void rotate(float* head, const float* rotation, int num_pairs) {
    for (int i = 0; i < num_pairs; i += VL) {
        const int count = num_pairs - i;
        const Vec cosine = load(rotation + i, count);
        const Vec sine = load(rotation + num_pairs + i, count);
        const Vec low = load(head + i, count);
        const Vec high = load(head + num_pairs + i, count);
        store(head + i, fma(low, cosine, -(high * sine)), count);
        store(head + num_pairs + i, fma(high, cosine, low * sine), count);
    }
}

// ---- A step in progress ----------------------------------------------------------------------------------------------

// The rows of an item, in a phase that goes row by row.
constexpr int ROWS_PER_ITEM = 4;

// Queries of one key head, in order of rows and, in a row, of heads.
struct QueryTile {
    // The chunk's first row of the output.
    int row;
    // The chunk's queries, one for each of its rows and each head of the group.
    int first, end;
};

// Neighbouring rows of chunks with one adapter.
struct AdaptedRows {
    int first, end;
    const Site* sites;
};

struct Run {
    const Model& model;
    const Step& step;
    int num_threads;
    std::vector<int> positions;           // by row
    std::vector<const int32_t*> tables;   // by row
    // Of all rows, and of the wanted ones.
    std::vector<QueryTile> tiles[2];
    std::vector<AdaptedRows> adapted[2];

    int group() const { return model.num_heads / model.num_kv_heads; }
    const Buffer& buffer(int index) const { return model.buffers[index]; }
    float* row(int buffer, int64_t row) const { return model.buffers[buffer].data + row * model.buffers[buffer].width; }
    const std::vector<AdaptedRows>& adapted_rows(int buffer) const { return adapted[model.buffers[buffer].is_wanted]; }
    int num_rows(int buffer) const { return model.buffers[buffer].is_wanted ? step.num_wanted : step.num_rows; }
};

inline char* keys_of(const Model& model, int64_t block, int layer, int head) {
    const int64_t index = (block * model.num_layers + layer) * model.num_kv_heads + head;
    return model.pool + index * head_bytes(model.head_dim, model.kv_format);
}

inline char* values_of(const Model& model, int64_t block, int layer, int head) {
    return keys_of(model, block, layer, head) + key_bytes(model.head_dim, model.kv_format);
}

// ---- Embed, Norm, Gather, Cap: an item is a row ----------------------------------------------------------------------

void embed_row(const Run& run, const Op& op, int row) {
    const int width = run.buffer(op.output).width;
    const int32_t id = run.step.ids[row];
    const int64_t from = int64_t(id) * width;
    float* out = run.row(op.output, row);
    if (op.weight)
        unpack_row(*op.weight, id, out);
    else if (op.table_dtype == LMI_BFLOAT16)
        for (int i = 0; i < width; i++) out[i] = from_bfloat16(static_cast<const uint16_t*>(op.table)[from + i]);
    else
        std::memcpy(out, static_cast<const float*>(op.table) + from, sizeof(float) * width);
    for (int i = 0; i < width; i++) out[i] *= op.scale;

    if (op.positions == nullptr) return;
    const float* position = op.positions + int64_t(run.positions[row]) * width;
    for (int i = 0; i < width; i++) out[i] += position[i];
}

void norm_row(const Run& run, const Op& op, int row) {
    const NormWeights norm{op.norm, op.bias, op.eps, op.is_centred != 0};
    normalise(run.row(op.input, row), run.buffer(op.input).width, norm, op.adds, run.row(op.output, row));
}

void gather_row(const Run& run, const Op& op, int row) {
    const int width = run.buffer(op.input).width;
    std::memcpy(run.row(op.output, row), run.row(op.input, run.step.wanted[row]), sizeof(float) * width);
}

void cap_row(const Run& run, const Op& op, int row) {
    const int width = run.buffer(op.output).width;
    float* out = run.row(op.output, row);
    for (int i = 0; i < width; i += VL)
        store(out + i, splat(op.cap) * tanh(load(out + i, width - i) / splat(op.cap)), width - i);
}

// ---- Shrink: an item is a few neighbouring rows of one adapter -------------------------------------------------------

constexpr int SHRUNK_ROWS = 4 * MR;

void shrink(const Run& run, const Op& op, int item) {
    const AdaptedRows& rows = run.adapted_rows(op.input)[item];
    const Panels& down = rows.sites[op.site - 1].down;
    if (!down.data) return;
    alignas(64) float products[SHRUNK_ROWS * NR];
    const Rows inputs{run.row(op.input, rows.first), run.buffer(op.input).width, nullptr, nullptr};
    for (int panel = 0; panel < num_panels(down.num_out); panel++) {
        product(down, panel, inputs, rows.end - rows.first, products);
        const int column = panel * NR;
        const int width = std::min(NR, down.num_out - column);
        for (int row = rows.first; row < rows.end; row++)
            std::memcpy(run.row(op.output, row) + column, products + (row - rows.first) * NR, sizeof(float) * width);
    }
}

// ---- Linear: an item is a panel and some rows, or a few panels and the only row --------------------------------------

// The most rows of an item.
constexpr int MAX_LINEAR_ROWS = 8 * MR;
// The inputs of an item stay in the second-level cache from panel to panel.
constexpr int64_t INPUT_BYTES = 512 * 1024;

int rows_per_linear(const Run& run, const Op& op) {
    const int num_rows = run.num_rows(op.output);
    const int64_t fitting = INPUT_BYTES / (sizeof(float) * op.weight->num_in) / MR * MR;
    const int64_t most = std::min<int64_t>(std::max<int64_t>(fitting, MR), MAX_LINEAR_ROWS);
    const int num_items = divide_up(num_rows, divide_up(most, ROW_TILE) * ROW_TILE);
    return divide_up(divide_up(num_rows, num_items), ROW_TILE) * ROW_TILE;
}

int num_linear_items(const Run& run, const Op& op) {
    const int num_rows = run.num_rows(op.output);
    if (num_rows == 1) return divide_up(num_panels(op.weight->num_out), PANELS);
    return divide_up(num_rows, rows_per_linear(run, op)) * num_panels(op.weight->num_out);
}

// The linear behind one that has rows in this step. Behind the last comes the first, which the next step begins with.
const Op& linear_behind(const Run& run, const Op& op) {
    const Op* const end = run.model.ops + run.model.num_ops;
    const Op* next = &op;
    do {
        next = next + 1 == end ? run.model.ops : next + 1;
    } while (next->kind != LMI_LINEAR || run.num_rows(next->output) == 0);
    return *next;
}

// What a thread most likely reads behind an item: threads that are as fast as each other take items in turn.
Next read_behind(const Run& run, const Op& op, int item) {
    const Op* next = &op;
    item += run.num_threads;
    for (int num; item >= (num = num_linear_items(run, *next)); item -= num) next = &linear_behind(run, *next);
    const int num_rows = run.num_rows(next->output);
    return next_from(*next->weight, num_rows == 1 ? item * PANELS : item % num_panels(next->weight->num_out));
}

// Writes `num_rows` rows of products, (num_rows, width), to columns of the output. `gates` may be null.
void finish(const Run& run, const Op& op, const float* products, const float* gates, int width, int row, int num_rows,
            int column) {
    const int num_columns = std::min(width, op.weight->num_out - column);
    for (int r = 0; r < num_rows; r++) {
        float* out = run.row(op.output, row + r) + column;
        for (int i = 0; i < num_columns; i += VL) {
            const int count = num_columns - i;
            const int at = column + i;
            Vec y = vec(products + r * width + i);
            Vec gate = splat(1.0f);
            if (op.bias) y += load(op.bias + at, count);
            if (gates) {
                gate = y;
                y = vec(gates + r * width + i);
                if (op.gate_bias) y += load(op.gate_bias + at, count);
            }

            store(out + i, fma(activate(y, op.activation), gate, op.adds ? load(out + i, count) : Vec{}), count);
        }
    }
}

// The input from a row on. Its quantised form is in the scratch memory: the scales of all rows, their integers, then
// their pairs.
Rows input_of(const Run& run, const Op& op, int64_t row) {
    const Precision precision(op);
    const int64_t width = run.buffer(op.input).width;
    const int64_t num_rows = run.num_rows(op.input);
    const char* scales = run.model.scratch + row * precision.scale_bytes(width);
    const char* integers = run.model.scratch + num_rows * precision.scale_bytes(width);
    const char* pairs = integers + num_rows * precision.integer_bytes(width);
    return {run.row(op.input, row), width, integers + row * precision.integer_bytes(width),
            reinterpret_cast<const float*>(scales), pairs + row * precision.pair_bytes(width)};
}

void quantize_row(const Run& run, const Op& op, int row) {
    const Precision precision(op);
    const Rows rows = input_of(run, op, row);
    const int width = run.buffer(op.input).width;
    void* integers = const_cast<void*>(rows.integers);
    float* scales = const_cast<float*>(rows.scales);
    if (precision.reads_16_bits) quantize_to_16_bits(rows.values, width, static_cast<int16_t*>(integers), scales);
    if (precision.reads_bytes) quantize(rows.values, width, static_cast<uint8_t*>(integers), scales);
    if (precision.reads_pairs) round_to_pairs(rows.values, width, const_cast<void*>(rows.pairs));
}

// Adds to products of a panel (end - first, NR) what an adapter's second weight makes of the rows that were shrunk.
void expand(const Run& run, const Op& op, const Panels& up, int panel, int first, int end, float* products) {
    if (!up.data) return;
    alignas(64) float more[MAX_LINEAR_ROWS * NR];
    product(up, panel, {run.row(op.low, first), run.buffer(op.low).width, nullptr, nullptr}, end - first, more);
    for (int i = 0; i < (end - first) * NR; i += VL) vec(products + i) += vec(more + i);
}

// Adds to products of a panel and some rows, (num_rows, NR), those of the rows' adapters. `gates` may be null.
void adapt(const Run& run, const Op& op, int panel, int row, int num_rows, float* products, float* gates) {
    if (!op.site) return;
    for (const AdaptedRows& rows : run.adapted_rows(op.low)) {
        const int first = std::max(rows.first, row);
        const int end = std::min(rows.end, row + num_rows);
        const Site& site = rows.sites[op.site - 1];
        if (first >= end || !site.down.data) continue;
        expand(run, op, site.up, panel, first, end, products + (first - row) * NR);
        if (gates) expand(run, op, site.gate, panel, first, end, gates + (first - row) * NR);
    }
}

void linear_of_one(const Run& run, const Op& op, int item) {
    alignas(64) float products[PANELS * NR], gates[PANELS * NR];
    const int panel = item * PANELS;
    const int count = std::min<int>(PANELS, num_panels(op.weight->num_out) - panel);
    const Rows rows = input_of(run, op, 0);
    const Next next = read_behind(run, op, item);
    product_of_one(*op.weight, panel, count, rows, op.gate ? next_from(*op.gate, panel) : next, products);
    if (op.gate) product_of_one(*op.gate, panel, count, rows, next, gates);
    for (int i = 0; i < count; i++)
        adapt(run, op, panel + i, 0, 1, products + i * NR, op.gate ? gates + i * NR : nullptr);
    finish(run, op, products, op.gate ? gates : nullptr, count * NR, 0, 1, panel * NR);
}

void linear(const Run& run, const Op& op, int item) {
    if (run.num_rows(op.output) == 1) return linear_of_one(run, op, item);
    alignas(64) float products[MAX_LINEAR_ROWS * NR], gates[MAX_LINEAR_ROWS * NR];
    const int panels = num_panels(op.weight->num_out);
    const int most = rows_per_linear(run, op);
    const int panel = item % panels;
    const int row = item / panels * most;
    const int num_rows = std::min(most, run.num_rows(op.output) - row);
    const Rows rows = input_of(run, op, row);
    const Next next = read_behind(run, op, item);
    product(*op.weight, panel, rows, num_rows, op.gate ? next_from(*op.gate, panel) : next, products);
    if (op.gate) product(*op.gate, panel, rows, num_rows, next, gates);
    adapt(run, op, panel, row, num_rows, products, op.gate ? gates : nullptr);
    finish(run, op, products, op.gate ? gates : nullptr, NR, row, num_rows, panel * NR);
}

// ---- Attend: first the keys and values of each row, then queries -----------------------------------------------------

void store_key(const float* key, int head_dim, int slot, float* keys) {
    float* to = keys + int64_t(slot / NR) * head_dim * NR + slot % NR;
    for (int i = 0; i < head_dim; i++) to[i * NR] = key[i];
}

void store_value(const float* value, int head_dim, int slot, float* values) {
    for (int i = 0; i < head_dim; i += NR)
        std::memcpy(values + int64_t(i) * BLOCK + slot * NR, value + i, sizeof(float) * std::min(NR, head_dim - i));
}

// A key (num_pairs) among keys in pairs.
void store_key_pairs(const uint32_t* key, int head_dim, int slot, uint32_t* keys) {
    uint32_t* to = keys + slot / NR * num_pairs(head_dim) * NR + slot % NR;
    for (int i = 0; i < num_pairs(head_dim); i++) to[i * NR] = key[i];
}

// A value (head_dim) among values in pairs of keys. `is_last`: no later value of the sequence is known. The other half
// of its pair is then 0, since a product reads it.
void store_value_pairs(const uint16_t* value, int head_dim, int slot, bool is_last, uint16_t* values) {
    for (int i = 0; i < head_dim; i++) {
        uint16_t* pair = values + 2 * (int64_t(i / NR * (BLOCK / 2) + slot / 2) * NR + i % NR);
        pair[slot % 2] = value[i];
        if (slot % 2 == 0 && is_last) pair[1] = 0;
    }
}

// Normalises and rotates queries and keys of a row where they are, and stores its keys and values.
void store_row(const Run& run, const Op& op, int row) {
    const Model& model = run.model;
    const int head_dim = model.head_dim;
    const int position = run.positions[row];
    const int slot = position % BLOCK;
    const int64_t block = run.tables[row][position / BLOCK];
    float* heads = run.row(op.input, row);
    for (int i = 0; i < model.num_heads + model.num_kv_heads; i++) {
        const NormWeights norm{i < model.num_heads ? op.query_norm : op.key_norm, nullptr, op.eps, false};
        float* head = heads + i * head_dim;
        if (norm.weight) normalise(head, head_dim, norm, false, head);
        if (op.num_pairs) rotate(head, op.rotations + int64_t(position) * 2 * op.num_pairs, op.num_pairs);
    }

    // The tables of a chunk's rows are one.
    const bool is_last = row + 1 == run.step.num_rows || run.tables[row + 1] != run.tables[row];
    const float* key = heads + model.num_heads * head_dim;
    for (int head = 0; head < model.num_kv_heads; head++, key += head_dim) {
        const float* value = key + model.num_kv_heads * head_dim;
        char* keys = keys_of(model, block, op.layer, head);
        char* values = values_of(model, block, op.layer, head);
        if (is_paired(model.kv_format)) {
            uint32_t pairs[MAX_HEAD_DIM / 2];
            round_to_pairs(key, head_dim, pairs);
            store_key_pairs(pairs, head_dim, slot, reinterpret_cast<uint32_t*>(keys));
            uint16_t numbers[MAX_HEAD_DIM];
            round_to_pairs(value, head_dim, numbers);
            store_value_pairs(numbers, head_dim, slot, is_last, reinterpret_cast<uint16_t*>(values));
        } else {
            store_key(key, head_dim, slot, reinterpret_cast<float*>(keys));
            store_value(value, head_dim, slot, reinterpret_cast<float*>(values));
        }
    }
}

// The most queries of a tile.
constexpr int MAX_QUERIES = 48;

int queries_per_tile(int group) { return group > MAX_QUERIES ? MAX_QUERIES : MAX_QUERIES / group * group; }

// A tile of queries on its way through the blocks of its sequence.
struct Attention {
    // `width` is head_dim rounded up to panels.
    int num_queries, head_dim, width;
    // Of keys and values.
    int format;
    const int32_t* table;
    int positions[MAX_QUERIES];
    // Each is (head_dim).
    float* outputs[MAX_QUERIES];
    // The largest score so far.
    float largest[MAX_QUERIES];
    // What was summed up to the last block must be multiplied by these.
    float factors[MAX_QUERIES];
    // The sums of weights so far.
    Sum sums[MAX_QUERIES];
    // The queries as (num_queries, head_dim).
    alignas(64) float rows[MAX_QUERIES * MAX_HEAD_DIM];
    // The weights of the block's keys, e^(score - largest score).
    alignas(64) float weights[MAX_QUERIES * BLOCK];
    // Queries and weights again, where keys and values are in pairs.
    alignas(64) uint32_t row_pairs[MAX_QUERIES * MAX_HEAD_DIM / 2];
    alignas(64) uint32_t weight_pairs[MAX_QUERIES * BLOCK / 2];
    // (panel of keys, num_queries, NR).
    alignas(64) float scores[MAX_QUERIES * BLOCK];
    // The weighted values, (panel of channels, num_queries, NR).
    alignas(64) float totals[MAX_QUERIES * MAX_HEAD_DIM];
};

// Makes weights of the scores of one query with a block's keys. Keys first ... last are visible.
void weigh(Attention& a, const Op& op, int query, int num_keys, int first, int last) {
    float* weights = a.weights + query * BLOCK;
    Ints lane;
    for (int i = 0; i < VL; i++) lane[i] = i;
    Vec most = splat(a.largest[query]);
    for (int k = 0; k < num_keys; k += VL) {
        Vec score = vec(a.scores + (k / NR * a.num_queries + query) * NR + k % NR) * splat(op.scale);
        if (op.cap > 0) score = splat(op.cap) * tanh(score / splat(op.cap));
        const Ints key = lane + k;
        score = (key >= first) & (key <= last) ? score : splat(HIDDEN);
        vec(weights + k) = score;
        most = max(score, most);
    }

    const float largest_now = largest(most);
    Sum sum;
    for (int k = 0; k < num_keys; k += VL) {
        const Vec score = vec(weights + k);
        Vec weight = score == splat(HIDDEN) ? Vec{} : exp(score - splat(largest_now));
        // What is summed is what the values are multiplied by.
        if (is_paired(a.format)) weight = round_to_pairs(weight, a.weight_pairs + (query * BLOCK + k) / 2);
        vec(weights + k) = weight;
        sum.lanes[k / VL % VECS] += weight;
    }

    const Vec factor = exp(splat(a.largest[query]) - splat(largest_now));
    for (int j = 0; j < VECS; j++) a.sums[query].lanes[j] = fma(a.sums[query].lanes[j], factor, sum.lanes[j]);
    a.factors[query] = factor[0];
    a.largest[query] = largest_now;
}

// Adds the values of a block's keys, by weight.
void add_values(Attention& a, const char* values, int num_keys) {
    alignas(64) float sums[MAX_QUERIES * NR];
    const Rows weights{a.weights, BLOCK, nullptr, nullptr, a.weight_pairs};
    for (int channel = 0; channel < a.width; channel += NR, values += panel_bytes(BLOCK, a.format)) {
        product({NR, num_keys, a.format, 0, values}, 0, weights, a.num_queries, sums);
        float* totals = a.totals + channel * a.num_queries;
        for (int query = 0; query < a.num_queries; query++)
            for (int i = query * NR; i < (query + 1) * NR; i += VL)
                vec(totals + i) = fma(vec(totals + i), splat(a.factors[query]), vec(sums + i));
    }
}

void attend_block(Attention& a, const Run& run, const Op& op, int64_t block, int head, int start) {
    const int num_keys = std::min(BLOCK, a.positions[a.num_queries - 1] + 1 - start);
    const Panels keys{BLOCK, a.head_dim, a.format, 0, keys_of(run.model, block, op.layer, head)};
    const Rows rows{a.rows, a.head_dim, nullptr, nullptr, a.row_pairs};
    for (int panel = 0; panel < num_panels(num_keys); panel++)
        product(keys, panel, rows, a.num_queries, a.scores + panel * a.num_queries * NR);
    for (int query = 0; query < a.num_queries; query++) {
        const int position = a.positions[query];
        const int first = op.window ? position - op.window + 1 : 0;
        weigh(a, op, query, num_keys, first - start, position - start);
    }

    add_values(a, values_of(run.model, block, op.layer, head), num_keys);
}

void begin(Attention& a, const Run& run, const Op& op, const QueryTile& tile, int head) {
    const int group = run.group();
    a.num_queries = tile.end - tile.first;
    a.head_dim = run.model.head_dim;
    a.width = padded(a.head_dim);
    a.format = run.model.kv_format;
    for (int query = 0; query < a.num_queries; query++) {
        const int index = tile.first + query;
        const int out = tile.row + index / group;
        const int channel = (head * group + index % group) * a.head_dim;
        const int row = op.is_wanted ? run.step.wanted[out] : out;
        a.table = run.tables[row];
        a.positions[query] = run.positions[row];
        a.outputs[query] = run.row(op.output, out) + channel;
        const float* values = run.row(op.input, row) + channel;
        std::memcpy(a.rows + query * a.head_dim, values, sizeof(float) * a.head_dim);
        if (is_paired(a.format)) round_to_pairs(values, a.head_dim, a.row_pairs + query * num_pairs(a.head_dim));
        a.largest[query] = HIDDEN;
        a.sums[query] = Sum();
    }

    std::memset(a.totals, 0, sizeof(float) * a.width * a.num_queries);
}

void end(Attention& a) {
    for (int query = 0; query < a.num_queries; query++) {
        const Vec factor = splat(1.0f / a.sums[query].total());
        for (int i = 0; i < a.head_dim; i += VL) {
            const float* totals = a.totals + (i / NR * a.num_queries + query) * NR + i % NR;
            store(a.outputs[query] + i, vec(totals) * factor, a.head_dim - i);
        }
    }
}

void attend(const Run& run, const Op& op, int item) {
    const int num_heads = run.model.num_kv_heads;
    const int head = item % num_heads;
    const QueryTile& tile = run.tiles[op.is_wanted][item / num_heads];
    Attention a;
    begin(a, run, op, tile, head);
    const int first = op.window ? std::max(a.positions[0] - op.window + 1, 0) : 0;
    const int last = a.positions[a.num_queries - 1];
    for (int block = first / BLOCK; block <= last / BLOCK; block++)
        attend_block(a, run, op, a.table[block], head, block * BLOCK);
    end(a);
}

// ---- Phases ----------------------------------------------------------------------------------------------------------

typedef void Work(const Run&, const Op&, int index);

// Work that may be done in any order. Threads that are free take the next `grain` indices. A phase ends when all work is
// done, not when all threads arrived: a thread that lost its core holds up only what it has taken.
struct alignas(64) Phase {
    const Op* op;
    Work* work;
    int num, grain;
    std::atomic<int> next{0};
    std::atomic<int> done{0};

    bool is_small() const { return num <= grain; }

    // Takes and does work until none is left. Returns whether this thread did the last of it.
    bool join(const Run& run) {
        int count = 0;
        for (int first; (first = next.fetch_add(grain)) < num;) {
            const int end = std::min(first + grain, num);
            for (int index = first; index < end; index++) work(run, *op, index);
            count += end - first;
        }

        return count && done.fetch_add(count) + count == num;
    }
};

struct Phases {
    std::vector<Phase> phases;
    int count = 0;

    explicit Phases(const Run& run) : phases(2 * run.model.num_ops) {
        for (int i = 0; i < run.model.num_ops; i++) add_op(run, run.model.ops[i]);
    }

    void add_op(const Run& run, const Op& op) {
        const int num_rows = run.num_rows(op.output);
        switch (op.kind) {
            case LMI_EMBED: return add(op, embed_row, num_rows, ROWS_PER_ITEM);
            case LMI_NORM: return add(op, norm_row, num_rows, ROWS_PER_ITEM);
            case LMI_GATHER: return add(op, gather_row, num_rows, ROWS_PER_ITEM);
            case LMI_CAP: return add(op, cap_row, num_rows, 1);
            case LMI_SHRINK: return add(op, shrink, run.adapted_rows(op.output).size(), 1);
            case LMI_LINEAR:
                if (Precision(op).is_quantized()) add(op, quantize_row, num_rows, ROWS_PER_ITEM);
                return add(op, linear, num_rows ? num_linear_items(run, op) : 0, 1);
            case LMI_ATTEND:
                add(op, store_row, run.step.num_rows, ROWS_PER_ITEM);
                add(op, attend, run.tiles[op.is_wanted].size() * run.model.num_kv_heads, 1);
        }
    }

    void add(const Op& op, Work* work, int num, int grain) {
        if (num == 0) return;
        Phase& phase = phases[count++];
        phase.op = &op;
        phase.work = work;
        phase.num = num;
        phase.grain = grain;
    }

    // What each thread of the step does. The thread that ends a phase also does the small phases behind it: to hand
    // them to another thread would take longer.
    void join(const Run& run, Signal& progress) {
        for (int i = 0; i < count; i = progress.wait(i)) {
            if (!phases[i].join(run)) continue;
            int finished = i + 1;
            while (finished < count && phases[finished].is_small()) phases[finished++].join(run);
            progress.set(finished);
        }

#if defined(__AMX_TILE__)
        release_tiles();
#endif
    }
};

void add_tiles(std::vector<QueryTile>& tiles, int row, int num_rows, int group) {
    const int num_queries = num_rows * group;
    const int most = queries_per_tile(group);
    for (int first = 0; first < num_queries; first += most)
        tiles.push_back({row, first, std::min(first + most, num_queries)});
}

// Rows with the adapter of the rows before them join these, up to the number that Shrink takes at a time.
void add_adapted(std::vector<AdaptedRows>& adapted, int row, int num_rows, const Site* sites) {
    for (const int end = row + num_rows; row < end;) {
        const bool joins = !adapted.empty() && adapted.back().end == row && adapted.back().sites == sites &&
                           row - adapted.back().first < SHRUNK_ROWS;
        if (!joins) adapted.push_back({row, row, sites});
        row = adapted.back().end = std::min(end, adapted.back().first + SHRUNK_ROWS);
    }
}

Run begin_run(const Model& model, const Step& step, int num_threads) {
    Run run{model, step, num_threads, {}, {}, {}, {}};
    const int32_t* table = step.blocks;
    for (int chunk = 0, wanted = 0; chunk < step.num_chunks; chunk++) {
        const int row = run.positions.size();
        const int start = step.starts[chunk];
        const int length = step.lengths[chunk];
        const int first = wanted;
        while (wanted < step.num_wanted && step.wanted[wanted] < row + length) wanted++;
        add_tiles(run.tiles[0], row, length, run.group());
        add_tiles(run.tiles[1], first, wanted - first, run.group());
        if (step.num_adapters && step.users[chunk] >= 0) {
            add_adapted(run.adapted[0], row, length, step.adapters[step.users[chunk]]);
            add_adapted(run.adapted[1], first, wanted - first, step.adapters[step.users[chunk]]);
        }

        for (int i = 0; i < length; i++) run.positions.push_back(start + i);
        run.tables.resize(row + length, table);
        table += divide_up(start + length, BLOCK);
    }

    return run;
}

void run_step(const Model& model, const Step& step, int num_threads) {
    const Run run = begin_run(model, step, num_threads);
    Phases phases(run);
    // It counts the phases that are finished.
    Signal progress(0);
    in_parallel(num_threads, [&] { phases.join(run, progress); });
}

}  // namespace

// ---- The interface ---------------------------------------------------------------------------------------------------

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int lmi_abi(void) { return LMI_ABI; }

EXPORT int64_t lmi_packed_bytes(int32_t num_out, int32_t num_in, int32_t format) {
    return packed_bytes(num_out, num_in, format);
}

// `format` is LMI_F32, LMI_BF16, LMI_INT8, or LMI_BITS4 if num_in is whole small groups.
EXPORT void lmi_pack(const void* weight, int32_t dtype, int32_t num_out, int32_t num_in, int32_t format, void* data,
                     int32_t num_threads) {
    if (format == LMI_BITS4)
        pack_to_4_bits({weight, dtype, num_out, num_in}, static_cast<char*>(data), num_threads);
    else
        pack(weight, dtype, num_out, num_in, format, data, num_threads);
}

// The format of blocks of a type, an LmiBlockType, or -1 if it is none, and how many channels a panel has.
EXPORT int32_t lmi_block_format(int32_t type) { return shape_of(type).groups ? shape_of(type).format : -1; }
EXPORT int32_t lmi_panel_width(void) { return NR; }

// `blocks` has the rows of a weight, one behind the other. A row has whole blocks.
EXPORT void lmi_pack_blocks(const void* blocks, int32_t type, int32_t num_out, int32_t num_in, void* data,
                            int32_t num_threads) {
    pack_blocks(static_cast<const uint8_t*>(blocks), type, num_out, num_in, static_cast<char*>(data), num_threads);
}

EXPORT int64_t lmi_block_bytes(int32_t num_layers, int32_t num_kv_heads, int32_t head_dim, int32_t kv_format) {
    return block_bytes(num_layers, num_kv_heads, head_dim, kv_format);
}

// 0 if the model breaks a rule.
EXPORT int64_t lmi_scratch_bytes(const Model* model, int32_t num_rows) {
    return is_model(*model) ? scratch_bytes(*model, num_rows) : 0;
}

// Runs a step. The logits are then in the last buffer. Returns 0, or 1 if the model or the step breaks a rule, which
// lmi_error names until the thread's next call; nothing was done then.
EXPORT int lmi_run(const Model* model, const Step* step, int32_t num_threads) {
    if (!is_model(*model) || !is_step(*model, *step)) return 1;
    try {
        run_step(*model, *step, std::max(num_threads, 1));
    } catch (const std::exception& exception) {
        return !refuse("%s", exception.what());
    }

    return 0;
}

EXPORT int64_t lmi_sampling_bytes(int32_t vocab_size) { return Scratch::num_bytes(std::max(vocab_size, 1)); }

// Samples all rows. Returns 0, or 1 if their parameters break a rule, as lmi_run.
EXPORT int lmi_sample(const Sampling* sampling, int32_t num_threads) {
    if (!is_sampling(*sampling)) return 1;
    try {
        sample(*sampling, std::max(num_threads, 1));
    } catch (const std::exception& exception) {
        return !refuse("%s", exception.what());
    }

    return 0;
}

EXPORT const char* lmi_error(void) { return error; }

}  // namespace lmi
