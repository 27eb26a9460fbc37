// The numbers of a fresh row. Each number is a pure function of (key, id, column); the key is made of the seed and the
// table's name. Columns are numbered over the whole table, so a column shard draws exactly its part of the row.
//
// Everything here is IEEE arithmetic without calls of a library (a square root is exact everywhere), so every CPU and
// GPU gives the same bits. Functions without branches vectorise (storage/initial_rows_cpu.h).
#pragma once

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
  double low_probability;  // 0 <= low_probability <= high_probability <= 1
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

// The natural logarithm of x in [0, 1], with an error below one unit in the last place. 0 counts as 2^-1077, a quarter
// of the least number above 0.
// Source: the method and the constants of e_log.c in fdlibm (Sun Microsystems, 1993): x = 2^k (1 + f) with 1 + f
// between sqrt(1/2) and sqrt(2), and s = f / (2 + f).
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE double log_of_unit(double x) {
  constexpr uint64_t kOne = 0x3FF0000000000000ull;       // bits of 1.0
  constexpr uint64_t kRootHalf = 0x3FE6A09E00000000ull;  // of a number just below sqrt(1/2)
  constexpr uint64_t kFraction = 0x000FFFFFFFFFFFFFull;
  constexpr uint64_t kDoubleOfInteger = 0x4330000000000000ull;  // bits of 2^52: an integer below 2^52 is added as bits
  constexpr double kHighLn2 = 6.93147180369123816490e-01;       // its product with k is exact
  constexpr double kLowLn2 = 1.90821492927058770002e-10;
  const uint64_t bits = same_bits<uint64_t>(x * 0x1p54) + (kOne - kRootHalf);  // 2^54 x is not subnormal
  const double k = same_bits<double>((bits >> 52) | kDoubleOfInteger) - (0x1p52 + 1023 + 54);
  const double f = same_bits<double>((bits & kFraction) + kRootHalf) - 1.0;
  const double half_square = 0.5 * f * f;
  const double s = f / (2.0 + f);
  const double z = s * s;
  const double w = z * z;
  const double even = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
  const double odd =
      z * (6.666666666666735130e-01 +
           w * (2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
  return s * (half_square + (odd + even)) + k * kLowLn2 - half_square + f + k * kHighLn2;
}

// The quantile function of the standard normal distribution, relative error about 1e-16, for a probability p inside
// (0, 1), in three parts: the centre, where |p - 1/2| <= kCentre, and the middle and far parts of the tails.
// Source: Wichura, "Algorithm AS 241: the percentage points of the normal distribution", Applied Statistics
// 37 (1988), routine PPND16.
constexpr double kCentre = 0.425;
constexpr double kMostMiddle = 5.0;  // tail_root(p) is at most this in the middle part

// Negative in the tails.
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE double depth_in_centre(double p) { return kCentre - std::fabs(p - 0.5); }

TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE double central_quantile(double p) {
  constexpr double kA[8] = {3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3,
                            1.3731693765509461125e4, 4.5921953931549871457e4, 6.7265770927008700853e4,
                            3.3430575583588128105e4, 2.5090809287301226727e3};
  constexpr double kB[7] = {4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
                            2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4,
                            5.2264952788528545610e3};
  const double q = p - 0.5;
  return q * ratio(0.180625 - q * q, kA, kB);
}

TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE double tail_root(double p) {
  return std::sqrt(-log_of_unit(lesser_of(p, 1.0 - p)));
}

// The two parts of a tail. `root`: tail_root(p).
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE double middle_quantile(double p, double root) {
  constexpr double kA[8] = {1.42343711074968357734e0,  4.63033784615654529590e0, 5.76949722146069140550e0,
                            3.64784832476320460504e0,  1.27045825245236838258e0, 2.41780725177450611770e-1,
                            2.27238449892691845833e-2, 7.74545014278341407640e-4};
  constexpr double kB[7] = {2.05319162663775882187e0,  1.67638483018380384940e0,  6.89767334985100004550e-1,
                            1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4,
                            1.05075007164441684324e-9};
  const double quantile = ratio(root - 1.6, kA, kB);
  return p < 0.5 ? -quantile : quantile;
}

TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE double far_quantile(double p, double root) {
  constexpr double kA[8] = {6.65790464350110377720e0,  5.46378491116411436990e0,  1.78482653991729133580e0,
                            2.96560571828504891230e-1, 2.65321895265761230930e-2, 1.24266094738807843860e-3,
                            2.71155556874348757815e-5, 2.01033439929228813265e-7};
  constexpr double kB[7] = {5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
                            7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7,
                            2.04426310338993978564e-15};
  const double quantile = ratio(root - 5.0, kA, kB);
  return p < 0.5 ? -quantile : quantile;
}

// The middle of the cell [word, word + 1), exactly. Converts from a signed integer, since below AVX-512 there is no
// conversion of vectors of unsigned integers.
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE double middle_of(uint32_t word) {
  return static_cast<double>(static_cast<int32_t>(word ^ 0x80000000u)) + (0x1p31 + 0.5);
}

// Converts `word` to a probability strictly inside (0, 1).
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE double unit_of(uint32_t word) { return middle_of(word) * 0x1p-32; }

// A number of kind kUniform; then the steps to a number of kind kNormal.
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE float uniform_of(const InitialRows& initial, uint32_t word) {
  // The width of a cell: the factor 2^-32 is exact, unless the product is far too small for a float.
  const double width = (initial.high - initial.low) * 0x1p-32;
  return static_cast<float>(initial.low + middle_of(word) * width);
}

TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE double probability_of(const InitialRows& initial, uint32_t word) {
  return initial.low_probability + unit_of(word) * (initial.high_probability - initial.low_probability);
}

TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE float normal_of(const InitialRows& initial, double quantile) {
  const double value = initial.mean + initial.deviation * quantile;
  return static_cast<float>(greater_of(lesser_of(value, initial.high), initial.low));
}

// One number of any kind.
TORCHREC_DYN_BOTH inline float initial_number(const InitialRows& initial, uint32_t word) {
  if (initial.kind == InitialKind::kConstant) return static_cast<float>(initial.low);
  if (initial.kind == InitialKind::kUniform) return uniform_of(initial, word);
  const double p = probability_of(initial, word);
  if (depth_in_centre(p) >= 0.0) return normal_of(initial, central_quantile(p));
  const double root = tail_root(p);
  return normal_of(initial, root <= kMostMiddle ? middle_quantile(p, root) : far_quantile(p, root));
}

// The initial rows of a table, or of the column shard of it that begins at first_column.
struct InitialTable {
  InitialRows rows;
  uint64_t key;
  int64_t first_column;
  bool is_shown;  // ids without a row read as their initial rows, else as zeros
};

// The number of one column of the shard. A block of Philox is four columns of the table.
TORCHREC_DYN_BOTH inline float initial_number(const InitialTable& table, int64_t id, int64_t column) {
  const int64_t place = table.first_column + column, part = place % 4;
  if (table.rows.kind == InitialKind::kConstant) return initial_number(table.rows, 0);
  const Philox4 random = random_words(table.key, id, static_cast<uint32_t>(place / 4), 0);
  // Not words[part]: on a GPU the words would stand in memory.
  const uint32_t low = part == 0 ? random.words[0] : random.words[1];
  const uint32_t high = part == 2 ? random.words[2] : random.words[3];
  return initial_number(table.rows, part < 2 ? low : high);
}

}  // namespace torchrec_dyn
