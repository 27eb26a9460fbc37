// The content sum: one word that changes if a number of the rows changes. The order of the rows does not matter.
//
//   sum over rows of row_key(id) * (sum over columns of bits * column_key(column))   modulo 2^64
//
// `bits` is the bit pattern of a number of 16 or 32 bits, zero-extended; an int64 column c is two columns, 2c its low
// half and 2c + 1 its high half, as its bytes lie in memory. For any cut of a table into rows and columns, the sums of
// the parts add up to the sum of the table, so it does not depend on the plan. The factors are odd: no bit that changes
// is lost.
//
// Source: multilinear hashing, Lemire and Kaser, "Strongly universal string hashing is fast", The Computer Journal
// 2014; here with keys made by mix64.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "mix64.h"
#include "simd.h"

namespace torchrec_dyn {

static_assert(std::endian::native == std::endian::little, "an int64 is read as two halves, the low one first");

TORCHREC_DYN_BOTH constexpr uint64_t row_key(uint64_t id, uint64_t key) { return mix64(id ^ key) | 1; }

// 32 bits, so that a product with 32 bits is one instruction for a whole vector of them.
TORCHREC_DYN_BOTH constexpr uint32_t column_key(uint64_t column, uint64_t key) {
  return static_cast<uint32_t>(mix64(key + column + 1) >> 32) | 1;
}

// The columns whose keys, and the rows whose sums, are kept at once: both stay in a core's first-level cache.
constexpr int64_t kKeptColumns = 2048;
constexpr int64_t kKeptRows = 256;

// Rows of numbers as they lie in memory, `stride` numbers from one row to the next row.
template <typename Bits>
struct BitRows {
  const char* bytes;
  int64_t stride;

  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE uint64_t at(int64_t row, int64_t column) const {
    Bits bits;
    std::memcpy(&bits, bytes + (row * stride + column) * static_cast<int64_t>(sizeof bits), sizeof bits);
    return bits;
  }
};

// Bytes by which rows are prefetched: the processor itself does not prefetch beyond a page.
constexpr int64_t kSumAhead = 4096;

// If the number of columns is a small constant, the compiler vectorises the loop over the rows.
template <typename Bits>
TORCHREC_DYN_INLINE void add_rows(const BitRows<Bits> rows, int64_t count, int64_t columns, const uint32_t* keys,
                                  uint64_t* sums) {
  constexpr int64_t size = sizeof(Bits), kLine = 64 / size;
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t c = 0; c + kLine <= columns; c += kLine)
      __builtin_prefetch(rows.bytes + (r * rows.stride + c) * size + kSumAhead, 0, 2);
    uint64_t sum = 0;
    for (int64_t c = 0; c < columns; ++c) sum += rows.at(r, c) * keys[c];
    sums[r] = sum;
  }
}

// The content sum of rows [0, count) and columns [0, columns); column 0 is column `first_column` of the table.
template <typename Bits>
TORCHREC_DYN_INLINE uint64_t content_sum_of(const uint64_t* ids, const BitRows<Bits> all, int64_t count,
                                            int64_t columns, uint64_t first_column, uint64_t key) {
  uint32_t keys[kKeptColumns];
  uint64_t sums[kKeptRows];
  uint64_t total = 0;
  for (int64_t column = 0; column < columns; column += kKeptColumns) {
    const int64_t width = std::min(kKeptColumns, columns - column);
    for (int64_t c = 0; c < width; ++c) keys[c] = column_key(first_column + static_cast<uint64_t>(column + c), key);
    for (int64_t row = 0; row < count; row += kKeptRows) {
      const int64_t rows = std::min(kKeptRows, count - row);
      const BitRows<Bits> some{all.bytes + (row * all.stride + column) * static_cast<int64_t>(sizeof(Bits)),
                               all.stride};
      if (all.stride == 1)
        add_rows(BitRows<Bits>{some.bytes, 1}, rows, 1, keys, sums);
      else if (all.stride == 2)
        add_rows(BitRows<Bits>{some.bytes, 2}, rows, 2, keys, sums);
      else
        add_rows(some, rows, width, keys, sums);
      for (int64_t r = 0; r < rows; ++r) total += row_key(ids[row + r], key) * sums[r];
    }
  }
  return total;
}

}  // namespace torchrec_dyn
