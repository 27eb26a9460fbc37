// Reads of rows on the CPU: prefetched, and sixteen elements at a time.
#pragma once

#include <limits>

#include "simd.h"
#include "storage/blocks.h"
#include "storage/row_types.h"

namespace torchrec_dyn {

// Prefetches a row into L2: the core can have far more misses in flight there than in L1 (measured: 22 against 35 ns
// for a random row of 256 bytes, docs/performance.md). Callers prefetch in bursts, some thirty rows before their use.
template <typename T>
TORCHREC_DYN_INLINE void prefetch_row(const T* row, int64_t columns) {
  const auto* byte = reinterpret_cast<const char*>(row);
  const int64_t bytes = columns * static_cast<int64_t>(sizeof(T));
  __builtin_prefetch(byte, 0, 2);
  if (bytes > 64) {
    __builtin_prefetch(byte + 64, 0, 2);
    if (bytes > 128) {
      __builtin_prefetch(byte + 128, 0, 2);
      if (bytes > 192) __builtin_prefetch(byte + 192, 0, 2);
    }
  }
  // Eight lines suffice: the hardware's own prefetcher follows a longer row.
  for (int64_t offset = 256; offset < bytes && offset < 512; offset += 64) __builtin_prefetch(byte + offset, 0, 2);
}

template <typename T>
TORCHREC_DYN_INLINE void prefetch_row(const RowBlocks<T>& table, int64_t index) {
  prefetch_row(table.row(index), table.columns);
}

typedef int16_t Shorts16 __attribute__((vector_size(32)));
typedef int32_t Words16 __attribute__((vector_size(64)));

// load_row: sixteen elements of any row type as floats. It uses vectors only: with an array, the compiler stores
// narrower vectors than it then loads, and the loads wait for the stores.
template <typename To, typename From>
TORCHREC_DYN_INLINE void copy_bits(const From& from, To& to) {
  static_assert(sizeof from == sizeof to);
  std::memcpy(&to, &from, sizeof to);
}

TORCHREC_DYN_INLINE void load_row(const float* row, Floats16& lanes) { load(row, lanes); }

TORCHREC_DYN_INLINE void load_row(const BFloat16* row, Floats16& lanes) {
  Shorts16 shorts;
  std::memcpy(&shorts, row, sizeof shorts);
  copy_bits(__builtin_convertvector(shorts, Words16) << 16, lanes);
}

// As to_float in storage/row_types.h; the smaller number is chosen by the sign of the difference, since some levels
// have no comparison of such vectors.
TORCHREC_DYN_INLINE void load_row(const Float16* row, Floats16& lanes) {
  Shorts16 shorts;
  std::memcpy(&shorts, row, sizeof shorts);
  const Words16 extended = __builtin_convertvector(shorts, Words16);
  Floats16 raised;
  copy_bits(((extended << 13) & 0x0FFFE000) | 0x70000000, raised);
  Words16 normal;
  Words16 subnormal;
  const Floats16 as_normal = raised * 0x1p-112f;
  const Floats16 as_subnormal = raised * 0x1p-111f - 0x1p-14f;
  copy_bits(as_normal, normal);
  copy_bits(as_subnormal, subnormal);
  const Words16 is_subnormal = (subnormal - normal) >> 31;
  const Words16 magnitude = normal ^ ((normal ^ subnormal) & is_subnormal);
  copy_bits((extended & std::numeric_limits<int32_t>::min()) | magnitude, lanes);
}

}  // namespace torchrec_dyn
