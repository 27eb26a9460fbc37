// Reads of rows on the CPU: prefetched, and sixteen elements at a time.
#pragma once

#include <limits>

#include "floats16_cpu.h"
#include "simd.h"
#include "storage/blocks.h"
#include "storage/row_types.h"

namespace torchrec_dyn {

// Prefetches a row into L2: the core can have far more misses in flight there than in L1 (measured: 22 against 35 ns
// for a random row of 256 bytes, docs/dev/performance.md). Callers prefetch in bursts, some thirty rows before their
// use.
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

// load_row: sixteen elements of any row type as floats. It uses vectors only: with an array, the compiler stores
// narrower vectors than it then loads, and the loads wait for the stores.
template <typename To, typename From>
TORCHREC_DYN_INLINE void copy_bits(const From& from, To& to) {
  static_assert(sizeof from == sizeof to);
  std::memcpy(&to, &from, sizeof to);
}

template <int64_t kBytes>
TORCHREC_DYN_INLINE void load_row(const float* row, Floats16<kBytes>& lanes) {
  lanes.load(row);
}

// Sign-extends numbers of 16 bits to the words of a register.
template <int64_t kBytes, typename Words>
TORCHREC_DYN_INLINE void extend_halves(const void* halves, Words& words) {
  typedef int16_t Shorts __attribute__((vector_size(kBytes / 2)));
  Shorts shorts;
  std::memcpy(&shorts, halves, sizeof shorts);
  words = __builtin_convertvector(shorts, Words);
}

template <int64_t kBytes>
TORCHREC_DYN_INLINE void load_row(const BFloat16* row, Floats16<kBytes>& lanes) {
  typedef int32_t Words __attribute__((vector_size(kBytes)));
  for (auto& floats : lanes.registers) {
    Words words;
    extend_halves<kBytes>(row, words);
    words <<= 16;
    copy_bits(words, floats);
    row += lanes.kFloats;
  }
}

// As to_float in storage/row_types.h; the smaller number is chosen by the sign of the difference, since some levels
// have no comparison of such vectors.
template <int64_t kBytes>
TORCHREC_DYN_INLINE void load_row(const Float16* row, Floats16<kBytes>& lanes) {
  typedef int32_t Words __attribute__((vector_size(kBytes)));
  using Floats = typename Floats16<kBytes>::Register;
  for (auto& floats : lanes.registers) {
    Words extended;
    extend_halves<kBytes>(row, extended);
    const Words exponent_raised = ((extended << 13) & 0x0FFFE000) | 0x70000000;
    Floats raised;
    copy_bits(exponent_raised, raised);
    Words normal;
    Words subnormal;
    const Floats as_normal = raised * 0x1p-112f;
    const Floats as_subnormal = raised * 0x1p-111f - 0x1p-14f;
    copy_bits(as_normal, normal);
    copy_bits(as_subnormal, subnormal);
    const Words is_subnormal = (subnormal - normal) >> 31;
    const Words magnitude = normal ^ ((normal ^ subnormal) & is_subnormal);
    const Words bits = (extended & std::numeric_limits<int32_t>::min()) | magnitude;
    copy_bits(bits, floats);
    row += lanes.kFloats;
  }
}

}  // namespace torchrec_dyn
