// Functions of vectors of floats, lane by lane, and sums whose order is the same on every CPU.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cfloat>
#include <cstdint>
#include <cstring>

#include "products.h"

namespace lmi {

// The lanes of a sum, on every CPU.
constexpr int LANES = 16;
constexpr int VECS = LANES / VL;
// The score of a key that a query does not see.
constexpr float HIDDEN = -FLT_MAX;

// The first `count` floats of a vector; the others are 0.
inline Vec load(const float* at, int count) {
    if (count >= VL) return vec(at);
    Vec x = {};
    if (count > 0) std::memcpy(&x, at, sizeof(float) * count);
    return x;
}

inline void store(float* at, Vec x, int count) {
    if (count >= VL)
        vec(at) = x;
    else
        std::memcpy(at, &x, sizeof(float) * count);
}

inline Vec min(Vec a, Vec b) { return a < b ? a : b; }
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }

// a * b + c, rounded once. It is written out wherever it is meant: whether a compiler joins a product and a sum by
// itself depends on what stands around them.
inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return vfmaq_f32(c, a, b);
#endif
}

// A polynomial, the highest coefficient first.
inline Vec from(Vec x, const float* coefficients, int count) {
    Vec sum = splat(coefficients[0]);
    for (int i = 1; i < count; i++) sum = fma(sum, x, splat(coefficients[i]));
    return sum;
}

// e^x for x from -87 to 88; at other x that of the nearest of them. x = n log 2 + rest.
inline Vec exp(Vec x) {
    static constexpr float terms[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                      4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    // 1.5 * 2^23: the sum's lowest bits are the nearest integer.
    const Vec magic = splat(12582912.0f);
    x = min(max(x, splat(-87.0f)), splat(88.0f));
    const Vec shifted = fma(x, splat(1.44269504f), magic);
    const Vec n = shifted - magic;
    const Vec rest = fma(n, splat(-1.42860677e-6f), fma(n, splat(-0.693145752f), x));
    const Vec fraction = fma(from(rest, terms, 6) * rest, rest, rest) + splat(1.0f);
    const Ints power = (bits_as<Ints>(shifted) << 23) + 0x3f800000;  // 2^n
    return fraction * bits_as<Vec>(power);
}

inline Vec magnitude(Vec x) { return bits_as<Vec>(bits_as<Ints>(x) & 0x7fffffff); }

inline Vec with_sign(Vec x, Vec sign) { return bits_as<Vec>(bits_as<Ints>(x) | (bits_as<Ints>(sign) & INT32_MIN)); }

// Near 0 a polynomial, which keeps small numbers exact; else 1 - 2 / (e^2x + 1).
inline Vec tanh(Vec x) {
    static constexpr float terms[] = {-5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f,
                                      -3.33332819422e-1f};
    const Vec a = magnitude(x);
    const Vec square = x * x;
    const Vec small = fma(from(square, terms, 5) * square, x, x);
    const Vec large = splat(1.0f) - splat(2.0f) / (exp(a + a) + splat(1.0f));
    return a < splat(0.625f) ? small : with_sign(large, x);
}

inline Vec erf(Vec x) {
    // A polynomial of x^2: erf(x) / x.
    static constexpr float near[] = {7.882497114e-5f, -8.018854994e-4f, 5.189311943e-3f, -2.685432880e-2f,
                                     1.128359746e-1f, -3.761262690e-1f, 1.128379166e+0f};
    // A polynomial of x: -log(1 - erf(x)).
    static constexpr float far[] = {-1.614061636e-6f, 4.559062311e-5f, -5.927695436e-4f,
                                    4.740222370e-3f,  -2.636471745e-2f, 1.099782453e-1f,
                                    6.319370935e-1f,  1.130166676e+0f,  -3.032129968e-4f};
    const Vec a = min(magnitude(x), splat(4.0f));
    const Vec large = splat(1.0f) - exp(-from(a, far, 9));
    return a < splat(1.0f) ? from(x * x, near, 7) * x : with_sign(large, x);
}

inline Vec activate(Vec x, int32_t activation) {
    switch (activation) {
        case LMI_SILU: return x / (splat(1.0f) + exp(-x));
        case LMI_RELU: return max(x, Vec{});
        case LMI_GELU: return splat(0.5f) * x * (splat(1.0f) + erf(x * splat(0.707106781f)));
        case LMI_GELU_TANH: {
            const Vec inner = splat(0.797884561f) * fma(splat(0.044715f) * x * x, x, x);
            return splat(0.5f) * x * (splat(1.0f) + tanh(inner));
        }
        default: return x;
    }
}

// A sum in 16 lanes: lane i adds the terms i, i + 16, i + 32 ...
struct Sum {
    Vec lanes[VECS] = {};

    float total() const {
        float x[LANES];
        std::memcpy(x, lanes, sizeof(x));
        for (int half = LANES / 2; half; half /= 2)
            for (int i = 0; i < half; i++) x[i] += x[i + half];
        return x[0];
    }
};

inline float largest(Vec x) {
    float lanes[VL];
    std::memcpy(lanes, &x, sizeof(lanes));
    for (int half = VL / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    return lanes[0];
}

// A bit for each lane that a comparison has found.
inline uint32_t lanes_of(Ints found) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask(bits_as<__m512i>(found));
#elif defined(__AVX2__)
    return _mm256_movemask_ps(bits_as<__m256>(found));
#else
    return vaddvq_u32(vandq_u32(bits_as<uint32x4_t>(found), uint32x4_t{1, 2, 4, 8}));
#endif
}

}  // namespace lmi
