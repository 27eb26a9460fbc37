// The kernels of the content sum (simt.h). Sums modulo 2^64 may be added in any order.
#pragma once

#include <cstdint>
#include <cstring>

#include "simt.h"
#include "storage/content_sum.h"
#include "storage/row_units.h"

namespace torchrec_dyn {

// Turns of one launch, if there are not more units in a row: as many as run at once on a large GPU.
constexpr int64_t kMostSumTurns = int64_t{1} << 18;
// The words that threads add to: one word alone would get all their additions one after the other. An odd number, so
// that threads of several threads of the simt build meet at a word.
constexpr int64_t kPartialSums = 1023;

// A thread sums one unit of columns of the rows of its group: every `groups`-th row. So it needs the keys of few
// columns, and neighbouring threads read neighbouring memory.
template <typename Unit, typename Bits>
struct SumUnits {
  const uint64_t* ids;
  const Unit* values;
  int64_t rows;
  int64_t groups;
  Division units;  // of a row
  uint64_t first_column;
  uint64_t key;
  int64_t* partial;  // [kPartialSums], 0 at first

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    constexpr int kNumbers = static_cast<int>(sizeof(Unit) / sizeof(Bits));
    const Division::Parts parts = units.split(i);  // group and unit
    const uint64_t column = first_column + static_cast<uint64_t>(parts.remainder * kNumbers);
    uint32_t keys[kNumbers];
    for (int k = 0; k < kNumbers; ++k) keys[k] = column_key(column + static_cast<uint64_t>(k), key);
    uint64_t sum = 0;
    for (int64_t row = parts.quotient; row < rows; row += groups) {
      const Unit unit = values[row * units.divisor + parts.remainder];
      Bits numbers[kNumbers];
      std::memcpy(numbers, &unit, sizeof unit);
      uint64_t of_unit = 0;
      for (int k = 0; k < kNumbers; ++k) of_unit += static_cast<uint64_t>(numbers[k]) * keys[k];
      sum += row_key(ids[row], key) * of_unit;
    }
    simt::atomic_add(partial + i % kPartialSums, static_cast<int64_t>(sum));
  }
};

struct AddPartialSums {
  const int64_t* partial;
  int64_t* total;  // 0 at first
  TORCHREC_DYN_BOTH void operator()(int64_t i) const { simt::atomic_add(total, partial[i]); }
};

}  // namespace torchrec_dyn
