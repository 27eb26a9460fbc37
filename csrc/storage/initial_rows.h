// The numbers of a fresh row. Each number is a pure function of (key, id, column); the key is made of the seed and the
// table's name. Columns are numbered over the whole table, so a column shard draws exactly its part of the row.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "philox.h"

namespace torchrec_dyn {

// kNormal covers the truncated case: its probabilities are cut to [low_probability, high_probability].
enum class InitialKind : int64_t { kConstant = 0, kUniform = 1, kNormal = 2 };

struct InitialRows {
  InitialKind kind;
  double low;   // kConstant: the value; kUniform, kNormal: lower bound of the result
  double high;  // kUniform, kNormal: upper bound of the result
  double mean;  // this and the three below: kNormal only
  double deviation;
  double low_probability;
  double high_probability;
};

// A ratio of two polynomials of degree 7 in r.
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE double ratio(double r, const double (&a)[8], const double (&b)[7]) {
  double numerator = a[7];
  for (int i = 6; i >= 0; --i) numerator = numerator * r + a[i];
  double denominator = b[6];
  for (int i = 5; i >= 0; --i) denominator = denominator * r + b[i];
  return numerator / (denominator * r + 1.0);
}

// The quantile function of the standard normal distribution, relative error about 1e-16. `q` is the probability less
// one half. central_quantile is valid for |q| <= kCentre; it has no branches, so that it vectorises.
// Source: Wichura, "Algorithm AS 241: the percentage points of the normal distribution", Applied Statistics
// 37 (1988), routine PPND16.
constexpr double kCentre = 0.425;

TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE double central_quantile(double q) {
  constexpr double kA[8] = {3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3,
                            1.3731693765509461125e4, 4.5921953931549871457e4, 6.7265770927008700853e4,
                            3.3430575583588128105e4, 2.5090809287301226727e3};
  constexpr double kB[7] = {4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
                            2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4,
                            5.2264952788528545610e3};
  return q * ratio(0.180625 - q * q, kA, kB);
}

TORCHREC_DYN_BOTH inline double tail_quantile(double p) {
  static constexpr double kMiddleA[8] = {1.42343711074968357734e0,  4.63033784615654529590e0, 5.76949722146069140550e0,
                                         3.64784832476320460504e0,  1.27045825245236838258e0, 2.41780725177450611770e-1,
                                         2.27238449892691845833e-2, 7.74545014278341407640e-4};
  static constexpr double kMiddleB[7] = {
      2.05319162663775882187e0,  1.67638483018380384940e0,  6.89767334985100004550e-1, 1.48103976427480074590e-1,
      1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9};
  static constexpr double kTailA[8] = {6.65790464350110377720e0,  5.46378491116411436990e0,  1.78482653991729133580e0,
                                       2.96560571828504891230e-1, 2.65321895265761230930e-2, 1.24266094738807843860e-3,
                                       2.71155556874348757815e-5, 2.01033439929228813265e-7};
  static constexpr double kTailB[7] = {5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
                                       7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7,
                                       2.04426310338993978564e-15};
  const double r = std::sqrt(-std::log(p < 0.5 ? p : 1.0 - p));
  const double tail = r <= 5.0 ? ratio(r - 1.6, kMiddleA, kMiddleB) : ratio(r - 5.0, kTailA, kTailB);
  return p < 0.5 ? -tail : tail;
}

// The middle of the cell [word, word + 1), exactly. Converts from a signed integer, since below AVX-512 there is no
// conversion of vectors of unsigned integers.
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE double middle_of(uint32_t word) {
  return static_cast<double>(static_cast<int32_t>(word ^ 0x80000000u)) + (0x1p31 + 0.5);
}

// Converts `word` to a probability strictly inside (0, 1).
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE double unit_of(uint32_t word) { return middle_of(word) * 0x1p-32; }

TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE void fill_uniform(const InitialRows& initial, const uint32_t* words, int64_t n,
                                                        float* out) {
  const double low = initial.low;
  // The width of a cell: the factor 2^-32 is exact, unless the product is far too small for a float.
  const double width = (initial.high - initial.low) * 0x1p-32;
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(low + middle_of(words[i]) * width);
}

// The central formula is computed for all draws; then the tail formula replaces the draws in the tails, one in seven.
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE void fill_normal(const InitialRows& initial, const uint32_t* words, int64_t n,
                                                       float* out) {
  double quantile[kMostRandomWords];
  double probability[kMostRandomWords];
  const double low = initial.low_probability;
  const double width = initial.high_probability - initial.low_probability;
  for (int64_t i = 0; i < n; ++i) {
    probability[i] = low + unit_of(words[i]) * width;
    quantile[i] = central_quantile(probability[i] - 0.5);
  }
  for (int64_t i = 0; i < n; ++i)
    if (!(std::fabs(probability[i] - 0.5) <= kCentre)) quantile[i] = tail_quantile(probability[i]);
  for (int64_t i = 0; i < n; ++i) {
    const double value = initial.mean + initial.deviation * quantile[i];
    out[i] = static_cast<float>(greater_of(lesser_of(value, initial.high), initial.low));
  }
}

// Writes columns [first_column, first_column + columns) of the initial row of `id`. A block of Philox is four columns.
// Requires first_column >= 0.
[[maybe_unused]] TORCHREC_DYN_SIMD static void fill_initial_row(const InitialRows& initial, uint64_t key, int64_t id,
                                                                int64_t first_column, int64_t columns,
                                                                float* out) noexcept {
  switch (initial.kind) {
    case InitialKind::kConstant:
      std::fill(out, out + columns, static_cast<float>(initial.low));
      return;
    case InitialKind::kUniform:
      for_random_columns(
          key, id, 0, first_column, columns,
          [&](const uint32_t* words, int64_t place, int64_t begin, int64_t end)
              __attribute__((always_inline)) { fill_uniform(initial, words + place, end - begin, out + begin); });
      return;
    case InitialKind::kNormal:
      for_random_columns(
          key, id, 0, first_column, columns,
          [&](const uint32_t* words, int64_t place, int64_t begin, int64_t end)
              __attribute__((always_inline)) { fill_normal(initial, words + place, end - begin, out + begin); });
      return;
  }
}

}  // namespace torchrec_dyn
