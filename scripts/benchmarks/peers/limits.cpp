// What this machine's cores and memory allow, as one line of JSON: how fast they read, in GB/s, and by kind of number how
// many products with their additions they do, in GFLOP/s, as two of each. Kinds that the CPU lacks are left out.
//
//     limits NUM_THREADS
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

#include <sys/mman.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int NUM_ROUNDS = 60;
// Over the last-level cache of most machines.
constexpr size_t BYTES_OF_THREAD = size_t(96) << 20;
// Of a huge page, in which engines keep weights.
constexpr size_t PAGE = size_t(2) << 20;
// So many sums hide the latency of each.
constexpr int NUM_SUMS = 16;
constexpr int64_t NUM_STEPS = 400'000;

double seconds_of(int num_threads, const std::function<void(int)>& work) {
    const auto began = std::chrono::steady_clock::now();
    std::vector<std::thread> threads;
    for (int i = 0; i < num_threads; i++) threads.emplace_back(work, i);
    for (std::thread& thread : threads) thread.join();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

// The shortest of all rounds, each of a few milliseconds: others may use the machine.
double shortest(int num_threads, const std::function<void(int)>& work) {
    double least = seconds_of(num_threads, work);
    for (int round = 1; round < NUM_ROUNDS; round++) least = std::min(least, seconds_of(num_threads, work));
    return least;
}

typedef uint64_t Words __attribute__((vector_size(64)));

double read_gb_per_s(int num_threads) {
    const size_t num_words = BYTES_OF_THREAD / sizeof(Words);
    std::vector<Words*> blocks(num_threads);
    seconds_of(num_threads, [&](int thread) {
        blocks[thread] = static_cast<Words*>(std::aligned_alloc(PAGE, BYTES_OF_THREAD));
        madvise(blocks[thread], BYTES_OF_THREAD, MADV_HUGEPAGE);
        for (size_t i = 0; i < num_words; i++) blocks[thread][i] = Words{i};
    });
    const double seconds = shortest(num_threads, [&](int thread) {
        Words sums[4] = {};
        for (size_t i = 0; i < num_words; i += 4)
            for (int j = 0; j < 4; j++) sums[j] += blocks[thread][i + j];
        const Words sum = sums[0] + sums[1] + sums[2] + sums[3];
        asm volatile("" : : "m"(sum));
    });
    for (Words* block : blocks) std::free(block);
    return num_threads * BYTES_OF_THREAD / seconds / 1e9;
}

// `Step` adds products to a sum.
template <class Step>
void print_gflops(const char* name, int num_threads, Step) {
    const double seconds = shortest(num_threads, [](int) {
        typename Step::Sum sums[NUM_SUMS] = {};
        const typename Step::Sum zero = {};
        for (int64_t step = 0; step < NUM_STEPS; step++)
#pragma GCC unroll 16
            for (auto& sum : sums) Step::add(sum, zero);
        for (auto& sum : sums) asm volatile("" : : "x"(sum));
    });
    std::printf(", \"%s\": %.1f", name, 2.0 * Step::NUM_PRODUCTS * NUM_SUMS * NUM_STEPS * num_threads / seconds / 1e9);
}

// In assembly, so that no compiler takes anything out of the loop.
#if defined(__AVX512F__)
struct Float32 {
    typedef __m512 Sum;
    static constexpr int NUM_PRODUCTS = 16;
    static void add(Sum& sum, Sum x) { asm volatile("vfmadd231ps %1, %1, %0" : "+v"(sum) : "v"(x)); }
};
#endif
#if defined(__AVX512BF16__)
struct BFloat16 {
    typedef __m512 Sum;
    static constexpr int NUM_PRODUCTS = 32;
    static void add(Sum& sum, Sum x) { asm volatile("vdpbf16ps %1, %1, %0" : "+v"(sum) : "v"(x)); }
};
#endif
#if defined(__AVX512VNNI__)
struct Int16 {
    typedef __m512i Sum;
    static constexpr int NUM_PRODUCTS = 32;
    static void add(Sum& sum, Sum x) { asm volatile("vpdpwssd %1, %1, %0" : "+v"(sum) : "v"(x)); }
};
struct Int8 {
    typedef __m512i Sum;
    static constexpr int NUM_PRODUCTS = 64;
    static void add(Sum& sum, Sum x) { asm volatile("vpdpbusd %1, %1, %0" : "+v"(sum) : "v"(x)); }
};
#endif

}  // namespace

int main(int, char** arguments) {
    const int num_threads = std::atoi(arguments[1]);
    std::printf("{\"read\": %.1f", read_gb_per_s(num_threads));
#if defined(__AVX512F__)
    print_gflops("float32", num_threads, Float32());
#endif
#if defined(__AVX512BF16__)
    print_gflops("bfloat16", num_threads, BFloat16());
#endif
#if defined(__AVX512VNNI__)
    print_gflops("int16", num_threads, Int16());
    print_gflops("int8", num_threads, Int8());
#endif
    std::printf("}\n");
}
