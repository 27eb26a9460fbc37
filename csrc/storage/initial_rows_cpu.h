// Initial rows on the CPU: the numbers of storage/initial_rows.h, many at a time.
#pragma once

#include <algorithm>
#include <cstdint>

#include "storage/initial_rows.h"
#include "storage/row_types.h"

namespace torchrec_dyn {

TORCHREC_DYN_INLINE void fill_uniform(const InitialRows& initial, const uint32_t* words, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = uniform_of(initial, words[i]);
}

// Turns probabilities of the tails into quantiles, in place.
template <int kAtOnce>
TORCHREC_DYN_INLINE void tail_quantiles(double* numbers) {
  double roots[kAtOnce], quantiles[kAtOnce];
  for (int i = 0; i < kAtOnce; ++i) {
    roots[i] = tail_root(numbers[i]);
    quantiles[i] = middle_quantile(numbers[i], roots[i]);
  }
  for (int i = 0; i < kAtOnce; ++i)  // never, unless the distribution is truncated
    if (roots[i] > kMostMiddle) quantiles[i] = far_quantile(numbers[i], roots[i]);
  for (int i = 0; i < kAtOnce; ++i) numbers[i] = quantiles[i];
}

// The central formula is computed for all draws; then the tail formulas replace the draws in the tails, one in seven,
// which are collected first, so that these formulas vectorise too.
TORCHREC_DYN_INLINE void fill_normal(const InitialRows& initial, const uint32_t* words, int64_t n, float* out) {
  constexpr int kAtOnce = 4;  // more would be computed in vain for short rows
  double quantile[kMostRandomWords];
  double probability[kMostRandomWords];
  double depth[kMostRandomWords];
  double tails[kMostRandomWords + kAtOnce];
  int32_t places[kMostRandomWords];
  for (int64_t i = 0; i < n; ++i) {
    probability[i] = probability_of(initial, words[i]);
    quantile[i] = central_quantile(probability[i]);
    depth[i] = depth_in_centre(probability[i]);
  }
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    places[count] = static_cast<int32_t>(i);
    count += static_cast<int64_t>(std::bit_cast<uint64_t>(depth[i]) >> 63);  // the sign: a branch would be a guess
  }
  for (int64_t i = 0; i < count; ++i) tails[i] = probability[places[i]];
  for (int64_t i = 0; i < kAtOnce; ++i) tails[count + i] = 0.25;  // any number: fills the last vector
  for (int64_t i = 0; i < count; i += kAtOnce) tail_quantiles<kAtOnce>(tails + i);
  for (int64_t i = 0; i < count; ++i) quantile[places[i]] = tails[i];
  for (int64_t i = 0; i < n; ++i) out[i] = normal_of(initial, quantile[i]);
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

// Writes the initial row of `id`, rounded to nearest.
template <typename T>
void store_initial_row(const InitialRows& initial, uint64_t key, int64_t id, int64_t first_column, int64_t columns,
                       T* out) {
  constexpr int64_t kAtOnce = 1024;  // a multiple of kMostRandomWords
  float values[kAtOnce];
  for (int64_t done = 0; done < columns; done += kAtOnce, out += kAtOnce) {
    const int64_t count = std::min(kAtOnce, columns - done);
    fill_initial_row(initial, key, id, first_column + done, count, values);
    for (int64_t c = 0; c < count; ++c) store_nearest(values[c], &out[c]);
  }
}

}  // namespace torchrec_dyn
