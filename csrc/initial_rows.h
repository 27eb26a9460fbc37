// What a fresh row holds: each value is a pure function of (key, id, column), where the key stands for the
// seed and the table's name. Columns are numbered over the whole table, so a column shard draws exactly its
// part of the row.
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
  double mean;  // kNormal only, as the three below
  double deviation;
  double low_probability;
  double high_probability;
};

// The quantile function of the standard normal distribution, relative error about 1e-16.
// Source: Wichura, "Algorithm AS 241: the percentage points of the normal distribution", Applied Statistics
// 37 (1988), routine PPND16.
inline double normal_quantile(double p) {
  const auto ratio = [](double r, const double (&a)[8], const double (&b)[7]) {
    double numerator = a[7];
    for (int i = 6; i >= 0; --i) numerator = numerator * r + a[i];
    double denominator = b[6];
    for (int i = 5; i >= 0; --i) denominator = denominator * r + b[i];
    return numerator / (denominator * r + 1.0);
  };
  static constexpr double kCentreA[8] = {3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3,
                                         1.3731693765509461125e4, 4.5921953931549871457e4, 6.7265770927008700853e4,
                                         3.3430575583588128105e4, 2.5090809287301226727e3};
  static constexpr double kCentreB[7] = {4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
                                         2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4,
                                         5.2264952788528545610e3};
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
  const double q = p - 0.5;
  if (std::fabs(q) <= 0.425) return q * ratio(0.180625 - q * q, kCentreA, kCentreB);
  const double r = std::sqrt(-std::log(q < 0.0 ? p : 1.0 - p));
  const double tail = r <= 5.0 ? ratio(r - 1.6, kMiddleA, kMiddleB) : ratio(r - 5.0, kTailA, kTailB);
  return q < 0.0 ? -tail : tail;
}

// `word` becomes a probability strictly inside (0, 1): the middle of its 2^-32 wide cell.
inline float initial_value(const InitialRows& initial, uint32_t word) {
  const double unit = (static_cast<double>(word) + 0.5) * 0x1p-32;
  switch (initial.kind) {
    case InitialKind::kConstant:
      return static_cast<float>(initial.low);
    case InitialKind::kUniform:
      return static_cast<float>(initial.low + unit * (initial.high - initial.low));
    case InitialKind::kNormal: {
      const double probability = initial.low_probability + unit * (initial.high_probability - initial.low_probability);
      const double value = initial.mean + initial.deviation * normal_quantile(probability);
      return static_cast<float>(std::clamp(value, initial.low, initial.high));
    }
  }
  return 0.0f;
}

// Writes columns [first_column, first_column + columns) of the initial row of `id`.
inline void fill_initial_row(const InitialRows& initial, uint64_t key, int64_t id, int64_t first_column,
                             int64_t columns, float* out) {
  if (initial.kind == InitialKind::kConstant) {
    std::fill(out, out + columns, static_cast<float>(initial.low));
    return;
  }
  Philox4 words{};
  int64_t block = -1;
  for (int64_t i = 0; i < columns; ++i) {
    const int64_t column = first_column + i;
    if (column / 4 != block) {
      block = column / 4;
      words = random_words(key, id, static_cast<uint32_t>(block), 0);
    }
    out[i] = initial_value(initial, words[static_cast<size_t>(column % 4)]);
  }
}

}  // namespace torchrec_dyn
