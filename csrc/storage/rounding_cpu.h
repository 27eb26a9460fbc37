// Stochastic rounding of a whole row on the CPU: the draws of storage/rounding.h, eight words at once.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "mix64.h"
#include "simd.h"
#include "storage/rounding.h"
#include "storage/row_types.h"

namespace torchrec_dyn {

static_assert(std::endian::native == std::endian::little, "the low lane of a word comes first in memory");

constexpr int64_t kWordsAtOnce = 8;
constexpr int64_t kDrawsAtOnce = kWordsAtOnce * kDrawsPerWord;

// Eight words in one register of 512 bits, or in several narrower registers, as the level has.
typedef uint64_t Words8 __attribute__((vector_size(8 * kWordsAtOnce)));

// draw_word of words [first_word, first_word + kWordsAtOnce).
TORCHREC_DYN_INLINE void draw_words(uint64_t state, int64_t first_word, Words8& words) {
  words = Words8{1, 2, 3, 4, 5, 6, 7, 8} * kGolden + (state + static_cast<uint64_t>(first_word) * kGolden);
  mix(words);
}

// The draws of columns [first_column, first_column + kDrawsAtOnce), in their order.
TORCHREC_DYN_INLINE void draw_columns(uint64_t state, int64_t first_column, Words8& draws) {
  const int64_t word = first_column / kDrawsPerWord;
  const auto skipped = static_cast<uint64_t>(16 * (first_column % kDrawsPerWord));  // bits of columns before the first
  draw_words(state, word, draws);
  if (skipped == 0) return;
  Words8 next;
  draw_words(state, word + 1, next);
  draws = draws >> skipped | next << (64 - skipped);
}

template <typename T>
TORCHREC_DYN_INLINE void store_at_once(const float* values, const uint16_t (&draws)[kDrawsAtOnce], T* row) {
  for (int64_t i = 0; i < kDrawsAtOnce; ++i) store_stochastic(values[i], draws[i], &row[i]);
}

// Weights from 65504 on are rare: the branch is predicted.
TORCHREC_DYN_INLINE void store_at_once(const float* values, const uint16_t (&draws)[kDrawsAtOnce], Float16* row) {
  int32_t largest = 0;
  for (int64_t i = 0; i < kDrawsAtOnce; ++i)
    largest = greater_of(largest, static_cast<int32_t>(bits_of_float(values[i]) & 0x7FFFFFFFu));
  if (largest < kHalfLargest) {
    for (int64_t i = 0; i < kDrawsAtOnce; ++i) store_stochastic_small(values[i], draws[i], &row[i]);
  } else {
    for (int64_t i = 0; i < kDrawsAtOnce; ++i) store_stochastic(values[i], draws[i], &row[i]);
  }
}

// Writes `values` to columns [first_column, first_column + columns) of the row of `id`, which begin at `row`.
template <typename T>
TORCHREC_DYN_INLINE void store_row(uint64_t key, int64_t step, int64_t first_column, int64_t id, const float* values,
                                   int64_t columns, T* row) {
  const uint64_t state = draw_state(key, step, id);
  Words8 words;
  uint16_t draws[kDrawsAtOnce];
  int64_t c = 0;
  for (; columns - c >= kDrawsAtOnce; c += kDrawsAtOnce) {  // a constant number of columns, so whole vectors
    draw_columns(state, first_column + c, words);
    std::memcpy(draws, &words, sizeof draws);
    store_at_once(values + c, draws, row + c);
  }
  if (c == columns) return;
  draw_columns(state, first_column + c, words);
  std::memcpy(draws, &words, sizeof draws);
  for (int64_t i = 0; c + i < columns; ++i) store_stochastic(values[c + i], draws[i], &row[c + i]);
}

}  // namespace torchrec_dyn
