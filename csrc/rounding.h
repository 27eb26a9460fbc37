// Stochastic rounding of a whole row: what an update computed in float32 goes into a short row.
//
// The draw of a column is a pure function of (key, id, column, step), with columns numbered over the whole table:
// block column / 8 of Philox, whose four words hold two draws of 16 bits each, the even column's in the low half.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "philox.h"
#include "row_types.h"
#include "simd.h"

namespace torchrec_dyn {

static_assert(std::endian::native == std::endian::little, "the low half of a word comes first in memory");

TORCHREC_DYN_INLINE uint32_t draw_of(const uint32_t* words, int64_t place) {
  uint16_t draw;
  std::memcpy(&draw, reinterpret_cast<const char*>(words) + 2 * place, sizeof draw);
  return draw;
}

// Writes `values` to columns [first_column, first_column + columns) of the row of `id`, which begin at `row`.
template <typename T>
TORCHREC_DYN_INLINE void store_row(uint64_t key, int64_t step, int64_t first_column, int64_t id, const float* values,
                                   int64_t columns, T* row) {
  const auto round = [&](const uint32_t* words, int64_t place, int64_t begin, int64_t end)
                         __attribute__((always_inline)) {
                           for (int64_t c = begin; c < end; ++c)
                             store_stochastic(values[c], draw_of(words, place + c - begin), &row[c]);
                         };
  for_random_columns<8>(key, id, static_cast<uint32_t>(step), first_column, columns, round);
}

}  // namespace torchrec_dyn
