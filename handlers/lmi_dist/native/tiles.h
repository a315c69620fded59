// The tile registers of CPUs with AMX: 8 of them, each with up to 16 rows of 64 bytes.
//
// A product of tiles adds to the sums in (rows, 16 channels) the products of inputs (rows, 16 words) with weights (16 words,
// 16 channels), where a word is 4 bytes or a pair of bfloat16. Tile 0 to 3 are for sums, 4 and 5 for inputs, 6 and 7
// for weights. Sums 2 and 3 and inputs 5 may have another number of rows than the others.
#pragma once

#if defined(__AMX_TILE__)

#include <algorithm>
#include <cstdint>

namespace lmi {

// The rows and the words of a tile, and its bytes in a row.
constexpr int TILE = 16;
constexpr int TILE_ROW_BYTES = 64;

// As the CPU reads it.
struct alignas(64) TileConfig {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t num_rows[16] = {};
};

// The numbers of rows that this thread's tiles have: of the first and of the second inputs. 0: none yet.
struct TileRows {
    int first = 0;
    int second = 0;
};

inline thread_local TileRows tile_rows;

// Gives this thread tiles for 1 to 32 rows of inputs. Their contents are lost where the number of rows changes.
inline void configure_tiles(int num_rows) {
    const int first = std::min(num_rows, TILE);
    const int second = std::max(num_rows - TILE, 1);
    if (tile_rows.first == first && tile_rows.second == second) return;
    tile_rows = {first, second};

    TileConfig config;
    for (const int tile : {0, 1, 2, 3, 4, 5, 6, 7}) {
        const bool is_second = tile == 2 || tile == 3 || tile == 5;
        config.row_bytes[tile] = TILE_ROW_BYTES;
        config.num_rows[tile] = tile >= 6 ? TILE : is_second ? second : first;
    }

    asm volatile("ldtilecfg %0" : : "m"(config));
}

// Gives them back, so that the system need not keep their contents when this thread sleeps.
inline void release_tiles() {
    if (tile_rows.first) asm volatile("tilerelease");
    tile_rows = {};
}

template <int TO>
inline void clear_tile() {
    asm volatile("tilezero %%tmm%c0" : : "i"(TO));
}

template <int TO>
inline void load_tile(const void* at, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(at), "r"(stride), "i"(TO) : "memory");
}

template <int FROM>
inline void store_tile(void* at, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(at), "r"(stride), "i"(FROM) : "memory");
}

// Pairs of bfloat16. Within a tile the products of first and of second inputs of pairs have a float32 sum each.
template <int SUMS, int INPUTS, int WEIGHTS>
inline void add_pair_products() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(INPUTS), "i"(WEIGHTS));
}

// Unsigned inputs and signed weights.
template <int SUMS, int INPUTS, int WEIGHTS>
inline void add_byte_products() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(INPUTS), "i"(WEIGHTS));
}

}  // namespace lmi

#endif
