// What a model and a step must keep to. No number in them can make a kernel read or write outside its memory.
#pragma once

#include <cstdarg>
#include <cstdio>

#include "lmi_kernels.h"
#include "products.h"

namespace lmi {

inline thread_local char error[256];

// Always false. The text is what lmi_error says.
[[gnu::format(printf, 1, 2)]] inline bool refuse(const char* format, ...) {
    va_list values;
    va_start(values, format);
    std::vsnprintf(error, sizeof(error), format, values);
    va_end(values);
    return false;
}

inline bool is_between(const char* name, long long value, long long least, long long most) {
    if (value >= least && value <= most) return true;
    return refuse("%s must be from %lld to %lld, given %lld", name, least, most, value);
}

inline bool is_equal(const char* name, long long value, const char* other, long long expected) {
    return value == expected || refuse("%s must be %s, %lld, given %lld", name, other, expected, value);
}

inline bool is_there(const char* name, const void* pointer) { return pointer || refuse("%s is missing", name); }

// ---- Operations ------------------------------------------------------------------------------------------------------

inline bool is_panels(const Panels* panels, int num_in, int num_out) {
    return is_there("weight", panels) && is_there("data of a weight", panels->data) &&
           is_between("format of a weight", panels->format, LMI_F32, LMI_BITS8_ZERO) &&
           is_equal("num_in of a weight", panels->num_in, "the width of the input", num_in) &&
           is_equal("num_out of a weight", panels->num_out, "the width of the output", num_out) &&
           (!is_small(panels->format) ||
            is_equal("num_in modulo the inputs of a group", num_in % SMALL_GROUP, "nothing", 0));
}

// A weight in parts: each part counts its own channels and those of the parts behind it.
inline bool are_parts(const Panels* panels, int num_in, int num_out) {
    for (; is_panels(panels, num_in, num_out); panels = panels->rest) {
        if (!panels->rest) return true;
        if (!is_between("panels of a part", panels->num_own, 1, num_panels(num_out) - 1)) return false;
        num_out -= panels->num_own * NR;
    }

    return false;
}

// The rows of a weight can be read only in these formats.
inline bool is_table(const Panels* panels, int width, int vocab_size) {
    return is_panels(panels, width, vocab_size) &&
           is_between("format of Embed's weight", panels->format, LMI_BITS4, LMI_BITS8_ZERO) &&
           (!panels->rest || refuse("Embed's weight must have one part"));
}

// How the inputs of an operation are read beside floats: in bytes or in 16 bits, and in pairs.
struct Precision {
    bool reads_bytes = false;
    bool reads_16_bits = false;
    bool reads_pairs = false;

    explicit Precision(const Op& op) {
        for (const Panels* first : {op.weight, op.gate})
            for (const Panels* part = first; part; part = part->rest) {
                reads_bytes |= part->format == LMI_INT8;
                reads_16_bits |= is_small(part->format);
                reads_pairs |= is_paired(part->format);
            }
    }

    bool is_quantized() const { return reads_bytes || reads_16_bits || reads_pairs; }

    // Of a row: the scales of its groups, its integers, and its pairs.
    int64_t scale_bytes(int64_t width) const {
        if (reads_16_bits) return width / SMALL_GROUP * 2 * sizeof(float);
        return reads_bytes ? num_groups(width) * sizeof(float) : 0;
    }

    int64_t integer_bytes(int64_t width) const {
        if (reads_16_bits) return width * sizeof(int16_t);
        return reads_bytes ? num_groups(width) * GROUP : 0;
    }

    int64_t pair_bytes(int64_t width) const { return reads_pairs ? num_pairs(width) * 4 : 0; }

    int64_t row_bytes(int64_t width) const { return scale_bytes(width) + integer_bytes(width) + pair_bytes(width); }
};

inline bool is_one_precision(const Op& op) {
    const Precision precision(op);
    return !(precision.reads_bytes && precision.reads_16_bits) ||
           refuse("a linear has weights in INT8 or in blocks, not in both");
}

inline bool is_adapted(const Model& model, const Op& op, const Buffer& output) {
    return is_between("site", op.site, 0, model.num_sites) &&
           (!op.site || (is_between("low", op.low, 0, model.num_buffers - 1) &&
                         is_equal("is_wanted of low", model.buffers[op.low].is_wanted, "that of Linear's output",
                                  output.is_wanted)));
}

inline bool is_op(const Model& model, const Op& op) {
    if (!is_between("kind", op.kind, LMI_EMBED, LMI_SHRINK)) return false;
    if (!is_between("input", op.input, 0, model.num_buffers - 1)) return false;
    if (!is_between("output", op.output, 0, model.num_buffers - 1)) return false;
    const Buffer& input = model.buffers[op.input];
    const Buffer& output = model.buffers[op.output];
    const int64_t heads = int64_t(model.num_heads) * model.head_dim;
    const int64_t kv_heads = int64_t(model.num_kv_heads) * model.head_dim;
    const bool is_in_place = op.input == op.output;
    switch (op.kind) {
        case LMI_EMBED:
            return (op.weight ? is_table(op.weight, output.width, model.vocab_size) : is_there("table", op.table)) &&
                   is_between("table_dtype", op.table_dtype, LMI_FLOAT32, LMI_BFLOAT16) &&
                   is_equal("is_wanted of Embed's output", output.is_wanted, "no", 0);
        case LMI_NORM:
            return is_there("weight of Norm", op.norm) &&
                   is_equal("width of Norm's output", output.width, "that of its input", input.width) &&
                   is_equal("is_wanted of Norm's output", output.is_wanted, "that of its input", input.is_wanted) &&
                   (!is_in_place || is_equal("adds of a Norm in place", op.adds, "no", 0));
        case LMI_CAP: return is_in_place || refuse("Cap must have one buffer");
    }

    if (is_in_place) return refuse("Linear, Attend, Gather and Shrink must have two buffers");
    switch (op.kind) {
        case LMI_LINEAR:
            return is_adapted(model, op, output) && is_between("activation", op.activation, LMI_NONE, LMI_GELU_TANH) &&
                   are_parts(op.weight, input.width, output.width) &&
                   (!op.gate || are_parts(op.gate, input.width, output.width)) && is_one_precision(op) &&
                   is_equal("is_wanted of Linear's output", output.is_wanted, "that of its input", input.is_wanted);
        case LMI_SHRINK:
            return is_between("site of Shrink", op.site, 1, model.num_sites) &&
                   is_equal("is_wanted of Shrink's output", output.is_wanted, "that of its input", input.is_wanted);
        case LMI_ATTEND:
            return is_between("layer", op.layer, 0, model.num_layers - 1) &&
                   is_between("window", op.window, 0, INT32_MAX) &&
                   is_between("num_pairs", op.num_pairs, 0, model.head_dim / 2) &&
                   (!op.num_pairs || is_there("rotations", op.rotations)) &&
                   is_between("is_wanted of Attend", op.is_wanted, 0, 1) &&
                   is_equal("is_wanted of Attend's output", output.is_wanted, "that of Attend", op.is_wanted) &&
                   is_equal("is_wanted of Attend's input", input.is_wanted, "no", 0) &&
                   is_equal("width of Attend's input", input.width, "all heads", heads + 2 * kv_heads) &&
                   is_equal("width of Attend's output", output.width, "the heads of queries", heads);
        default:
            return is_equal("width of Gather's output", output.width, "that of its input", input.width) &&
                   is_equal("is_wanted of Gather's input", input.is_wanted, "no", 0) &&
                   is_equal("is_wanted of Gather's output", output.is_wanted, "yes", 1);
    }
}

// ---- Models ----------------------------------------------------------------------------------------------------------

inline int padded(int head_dim) { return num_panels(head_dim) * NR; }

// Of one head in a block: keys as panels (head_dim, NR keys), then values as panels (BLOCK keys, NR channels), so that
// scores and sums of values are products with panels.
inline int64_t key_bytes(int head_dim, int kv_format) { return packed_bytes(BLOCK, head_dim, kv_format); }
inline int64_t value_bytes(int head_dim, int kv_format) { return packed_bytes(head_dim, BLOCK, kv_format); }

inline int64_t head_bytes(int head_dim, int kv_format) {
    return key_bytes(head_dim, kv_format) + value_bytes(head_dim, kv_format);
}

inline int64_t block_bytes(int num_layers, int num_kv_heads, int head_dim, int kv_format) {
    return num_layers * num_kv_heads * head_bytes(head_dim, kv_format);
}

inline bool is_shape(const Model& model) {
    return is_between("num_ops", model.num_ops, 1, INT32_MAX) &&
           is_between("num_buffers", model.num_buffers, 1, INT32_MAX) &&
           is_between("num_layers", model.num_layers, 1, 65536) &&
           is_between("num_heads", model.num_heads, 1, 65536) &&
           is_between("num_kv_heads", model.num_kv_heads, 1, model.num_heads) &&
           is_equal("num_heads modulo num_kv_heads", model.num_heads % model.num_kv_heads, "nothing", 0) &&
           is_between("head_dim", model.head_dim, 1, MAX_HEAD_DIM) &&
           is_between("vocab_size", model.vocab_size, 1, INT32_MAX) &&
           is_between("max_length", model.max_length, 1, INT32_MAX - BLOCK) &&
           is_between("num_sites", model.num_sites, 0, INT32_MAX) &&
           is_between("kv_format", model.kv_format, LMI_F32, MULTIPLIES_PAIRS ? LMI_BF16 : LMI_F32);
}

// Each site's Shrink has the input of its Linear and writes what that reads, so that ranks fit there too.
inline bool is_pair(const Model& model, const Op& shrink) {
    const Op* op = &shrink + 1;
    if (op == model.ops + model.num_ops || op->kind != LMI_LINEAR) return refuse("Shrink must stand before a Linear");
    return is_equal("site of a Linear behind Shrink", op->site, "that of Shrink", shrink.site) &&
           is_equal("input of a Linear behind Shrink", op->input, "that of Shrink", shrink.input) &&
           is_equal("low of a Linear behind Shrink", op->low, "the output of Shrink", shrink.output);
}

inline bool are_pairs(const Model& model) {
    for (const Op* op = model.ops; op < model.ops + model.num_ops; op++) {
        if (op->kind == LMI_SHRINK && !is_pair(model, *op)) return false;
        const bool is_shrunk = op > model.ops && op[-1].kind == LMI_SHRINK;
        if (op->kind == LMI_LINEAR && op->site && !is_shrunk) return refuse("a Linear with a site must follow its Shrink");
    }

    return true;
}

inline bool is_model(const Model& model) {
    if (!is_there("ops", model.ops) || !is_there("buffers", model.buffers)) return false;
    if (!is_there("pool", model.pool) || !is_shape(model)) return false;
    const int64_t each = block_bytes(model.num_layers, model.num_kv_heads, model.head_dim, model.kv_format);
    if (!is_between("num_blocks", model.num_blocks, 1, model.pool_bytes / each)) return false;
    for (const Buffer* buffer = model.buffers; buffer < model.buffers + model.num_buffers; buffer++)
        if (!is_between("width of a buffer", buffer->width, 1, INT32_MAX) ||
            !is_between("is_wanted of a buffer", buffer->is_wanted, 0, 1))
            return false;
    for (const Op* op = model.ops; op < model.ops + model.num_ops; op++)
        if (!is_op(model, *op)) return false;
    if (model.num_sites && !are_pairs(model)) return false;
    // The last buffer is that of logits, or of hidden states.
    const Buffer& last = model.buffers[model.num_buffers - 1];
    const int output = model.ops[model.num_ops - 1].output;
    return is_equal("is_wanted of the last buffer", last.is_wanted, "yes", 1) &&
           is_equal("the output of the last operation", output, "the last buffer", model.num_buffers - 1);
}

// Of the largest quantised input.
inline int64_t scratch_bytes(const Model& model, int64_t num_rows) {
    int64_t most = 0;
    for (const Op* op = model.ops; op < model.ops + model.num_ops; op++)
        if (op->kind == LMI_LINEAR)
            most = std::max(most, Precision(*op).row_bytes(model.buffers[op->input].width));
    return most * num_rows;
}

// ---- Adapters --------------------------------------------------------------------------------------------------------

inline bool is_low_rank(const char* name, const Panels& panels, int num_in, int num_out) {
    return is_equal("format of a weight of an adapter", panels.format, "float32", LMI_F32) &&
           is_equal("num_in of a weight of an adapter", panels.num_in, name, num_in) &&
           is_equal("num_out of a weight of an adapter", panels.num_out, name, num_out);
}

// What an adapter has for a linear. Its rank fits into a row of the buffer between the two weights.
inline bool is_site(const Model& model, const Op& op, const Site& site) {
    if (!site.down.data) return true;
    const Buffer& input = model.buffers[op.input];
    const Buffer& output = model.buffers[op.output];
    const int rank = site.down.num_out;
    return is_between("rank of an adapter", rank, 1, model.buffers[op.low].width) &&
           is_low_rank("that of the linear's input", site.down, input.width, rank) &&
           (!site.up.data || is_low_rank("that of the linear's output", site.up, rank, output.width)) &&
           (!site.gate.data || (is_there("gate of an adapted linear", op.gate) &&
                                is_low_rank("that of the linear's output", site.gate, rank, output.width)));
}

inline bool are_adapters(const Model& model, const Step& step) {
    if (!step.num_adapters) return true;
    if (!is_between("num_adapters", step.num_adapters, 0, step.num_chunks)) return false;
    if (!is_there("users", step.users) || !is_there("adapters", step.adapters)) return false;
    for (int i = 0; i < step.num_chunks; i++)
        if (!is_between("the adapter of a chunk", step.users[i], -1, step.num_adapters - 1)) return false;
    for (int i = 0; i < step.num_adapters; i++) {
        if (!is_there("an adapter", step.adapters[i])) return false;
        for (const Op* op = model.ops; op < model.ops + model.num_ops; op++)
            if (op->kind == LMI_LINEAR && op->site && !is_site(model, *op, step.adapters[i][op->site - 1])) return false;
    }

    return true;
}

// ---- Steps -----------------------------------------------------------------------------------------------------------

inline bool are_chunks(const Model& model, const Step& step) {
    int64_t num_rows = 0;
    int64_t num_blocks = 0;
    for (int i = 0; i < step.num_chunks; i++) {
        const int64_t start = step.starts[i];
        const int64_t length = step.lengths[i];
        if (!is_between("length of a chunk", length, 1, step.num_rows - num_rows)) return false;
        if (!is_between("start of a chunk", start, 0, model.max_length - length)) return false;
        num_rows += length;
        num_blocks += divide_up(start + length, BLOCK);
    }

    if (!is_equal("num_rows", step.num_rows, "the tokens of the chunks", num_rows)) return false;
    if (!is_equal("the number of blocks", step.num_blocks, "what the chunks need", num_blocks)) return false;
    for (int i = 0; i < step.num_blocks; i++)
        if (!is_between("a block of a table", step.blocks[i], 0, model.num_blocks - 1)) return false;
    return true;
}

inline bool are_rows(const Model& model, const Step& step) {
    for (int i = 0; i < step.num_rows; i++)
        if (!is_between("a token id", step.ids[i], 0, model.vocab_size - 1)) return false;
    for (int i = 0, least = 0; i < step.num_wanted; least = step.wanted[i++] + 1)
        if (!is_between("a wanted row", step.wanted[i], least, step.num_rows - 1)) return false;
    return true;
}

inline bool is_room(const Model& model, const Step& step) {
    const int64_t scratch = scratch_bytes(model, step.num_rows);
    if (!is_between("the scratch memory of a step", scratch, 0, model.scratch_bytes)) return false;
    for (const Buffer* buffer = model.buffers; buffer < model.buffers + model.num_buffers; buffer++) {
        const int num_rows = buffer->is_wanted ? step.num_wanted : step.num_rows;
        if (!is_there("data of a buffer", buffer->data)) return false;
        if (!is_between("rows of a step", num_rows, 0, buffer->num_rows)) return false;
    }

    return true;
}

// `model` must be sound.
inline bool is_step(const Model& model, const Step& step) {
    return is_between("num_rows", step.num_rows, 1, INT32_MAX) &&
           is_between("num_chunks", step.num_chunks, 1, step.num_rows) &&
           is_between("num_wanted", step.num_wanted, 0, step.num_rows) && is_there("ids", step.ids) &&
           is_there("starts", step.starts) && is_there("lengths", step.lengths) && is_there("blocks", step.blocks) &&
           (!step.num_wanted || is_there("wanted", step.wanted)) && are_chunks(model, step) && are_rows(model, step) &&
           are_adapters(model, step) && is_room(model, step);
}

}  // namespace lmi
