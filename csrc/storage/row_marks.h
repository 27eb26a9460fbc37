// Marks of rows: one 32-bit word for each row, the version with which the row was last marked.
//
// The update marks the present version by one bit for each row instead: the bits of a table fit a core's cache.
#pragma once

#include <atomic>
#include <cstdint>

#include "simd.h"
#include "storage/blocks.h"

namespace torchrec_dyn {

using MarkBlocks = WordBlocks<int32_t>;

// Writes `version` for the rows, all below the capacity; negative rows are skipped. Several threads may mark the same
// row, so words are written as atomics, and only if they differ: popular rows then stay in the caches of all cores.
// `marks` is passed by value: the fields of a reference would be read again for every row.
inline void mark_rows(MarkBlocks marks, const int64_t* rows, int64_t count, int32_t version) {
  for (int64_t i = 0; i < count; ++i) {
    if (rows[i] < 0) continue;
    const std::atomic_ref<int32_t> mark(*marks.word(rows[i]));
    if (mark.load(std::memory_order_relaxed) != version) mark.store(version, std::memory_order_relaxed);
  }
}

// The bits of the rows of one table, in blocks of 8 * 2^byte_shift rows. The 64 stripes of a block hold the rows with
// the same low 6 bits. So threads that share the rows of a table by these bits write different bytes, mostly on
// different cache lines. In its stripe, row r of a block is bit r >> 6.
constexpr int64_t kLeastMarkShift = 6;  // a stripe has whole bytes

struct MarkBits {
  uint8_t* const* blocks = nullptr;
  int64_t byte_shift = kLeastMarkShift;
  int64_t capacity = 0;  // rows

  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE uint8_t* byte(int64_t row) const {
    const int64_t place = row & ((int64_t{8} << byte_shift) - 1);
    return blocks[row >> (byte_shift + 3)] + ((row & 63) << (byte_shift - kLeastMarkShift)) + (place >> 9);
  }
};

TORCHREC_DYN_INLINE MarkBits bits_of(const WordBlocks<uint8_t>& bytes) {
  return {bytes.blocks, bytes.shift, 8 * bytes.capacity};
}

// The bit of a row in its byte.
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE uint8_t mark_of(int64_t row) {
  return static_cast<uint8_t>(1u << ((row >> 6) & 7));
}

// Sets the bit of a row. No other thread writes this byte; one may read it. A branch on whether the bit is set already
// would be mispredicted.
TORCHREC_DYN_INLINE void mark_bit(uint8_t* byte, int64_t row) {
  const std::atomic_ref<uint8_t> bits(*byte);
  bits.store(bits.load(std::memory_order_relaxed) | mark_of(row), std::memory_order_relaxed);
}

}  // namespace torchrec_dyn
