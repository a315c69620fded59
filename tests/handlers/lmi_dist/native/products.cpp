// The products by themselves, for tests: each is called with all panels of a weight.
#include "products.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

// With `is_plain` the 8-bit products of CPUs without instructions for them.
static const lmi::Multiply& multiply(int format, int is_plain) {
    return format == lmi::LMI_INT8 && is_plain ? lmi::by<lmi::Int8Tile<lmi::PlainDot>> : lmi::multiply(format);
}

EXPORT int panel_width() { return lmi::NR; }

// How pairs are multiplied: 0: not at all, 1: by vectors, 2: by tiles.
EXPORT int way_of_pairs() { return lmi::MULTIPLIES_PAIRS ? lmi::ROW_TILE > 1 ? 2 : 1 : 0; }

EXPORT int64_t packed_bytes(int num_out, int num_in, int format) { return lmi::packed_bytes(num_out, num_in, format); }

EXPORT void pack(const void* weight, int dtype, int num_out, int num_in, int format, void* data) {
    lmi::pack(weight, dtype, num_out, num_in, format, data, 2);
}

EXPORT void quantize(const float* x, int num_in, uint8_t* bytes, float* scales) {
    lmi::quantize(x, num_in, bytes, scales);
}

EXPORT void round_to_pairs(const float* x, int num_in, void* pairs) { lmi::round_to_pairs(x, num_in, pairs); }

// `out` is (num_panels, num_rows, NR).
EXPORT void product(const lmi::Panels* panels, const lmi::Rows* rows, int num_rows, int is_plain, float* out) {
    const lmi::Multiply& by = multiply(panels->format, is_plain);
    for (int panel = 0; panel < lmi::num_panels(panels->num_out); panel++)
        by.rows(*panels, panel, *rows, num_rows, lmi::next_from(*panels, panel + 1),
                out + int64_t(panel) * num_rows * lmi::NR);
}

// `out` is (num_panels, NR). `count` panels at a time.
EXPORT void product_of_one(const lmi::Panels* panels, const lmi::Rows* row, int count, int is_plain, float* out) {
    const int num_panels = lmi::num_panels(panels->num_out);
    for (int panel = 0; panel < num_panels; panel += count) {
        const int some = std::min(count, num_panels - panel);
        const lmi::Next next = lmi::next_from(*panels, panel + some);
        multiply(panels->format, is_plain).one(*panels, panel, some, *row, next, out + panel * lmi::NR);
    }
}
