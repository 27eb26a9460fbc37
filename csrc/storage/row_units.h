// Neighbouring columns of a row as one piece of memory: GPUs read and write 16 bytes at once. And the row and the unit
// of a thread, by a fast division.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simd.h"
#include "storage/row_types.h"

namespace torchrec_dyn {

constexpr int kMostUnitBytes = 16;

// Memory that is read and written at once.
struct alignas(kMostUnitBytes) Unit16 {
  uint64_t words[2];
};

template <int kBytes>
using UnitOf =
    std::conditional_t<kBytes == 16, Unit16,
                       std::conditional_t<kBytes == 8, uint64_t, std::conditional_t<kBytes == 4, uint32_t, uint16_t>>>;

// kColumns columns of a row as they are in memory. Requires an address that is a multiple of their size.
template <typename T, int kColumns>
using ColumnUnit = UnitOf<kColumns* static_cast<int>(sizeof(T))>;

template <typename T, int kColumns>
TORCHREC_DYN_BOTH inline ColumnUnit<T, kColumns> load_unit(const T* from) {
#if defined(__CUDA_ARCH__)
  __builtin_assume(__isGlobal(from));  // else nvcc looks at each address that was read from memory
#endif
  return *reinterpret_cast<const ColumnUnit<T, kColumns>*>(from);
}

template <typename T, int kColumns>
TORCHREC_DYN_BOTH inline void to_floats(const ColumnUnit<T, kColumns>& unit, float (&to)[kColumns]) {
  T numbers[kColumns];
  std::memcpy(numbers, &unit, sizeof unit);
  for (int c = 0; c < kColumns; ++c) to[c] = to_float(numbers[c]);
}

TORCHREC_DYN_BOTH inline uint64_t bits_of(float number) { return bits_of_float(number); }
template <typename T>
TORCHREC_DYN_BOTH inline uint64_t bits_of(T number) {
  return number.bits;
}

// As memory, the first number in the low bits.
template <typename T>
TORCHREC_DYN_BOTH inline uint64_t word_of(const T* numbers, int count) {
  uint64_t word = 0;
  for (int c = 0; c < count; ++c) word |= bits_of(numbers[c]) << (8 * static_cast<int>(sizeof(T)) * c);
  return word;
}

// One store, where nvcc makes one for each word of a struct.
TORCHREC_DYN_BOTH inline void store_unit(const Unit16& unit, void* to) {
#if defined(__CUDA_ARCH__)
  __stwb(static_cast<ulonglong2*>(to), make_ulonglong2(unit.words[0], unit.words[1]));
#else
  *static_cast<Unit16*>(to) = unit;
#endif
}

constexpr int kUnitColumns = 4;

// Writes kUnitColumns numbers. Requires an address that is a multiple of their size.
template <typename T>
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE void store_unit_of(const T* numbers, T* to) {
  if constexpr (sizeof(T) == sizeof(float))
    store_unit(Unit16{{word_of(numbers, 2), word_of(numbers + 2, 2)}}, to);
  else
    *reinterpret_cast<uint64_t*>(to) = word_of(numbers, kUnitColumns);
}

// Rounds kColumns numbers to nearest. `is_whole`: `to` is a multiple of their size, or of 16 bytes.
template <typename T, int kColumns>
TORCHREC_DYN_BOTH inline void store_columns(const float (&from)[kColumns], bool is_whole, T* to) {
  constexpr int kWord = 8 / static_cast<int>(sizeof(T));  // numbers in a word
  T numbers[kColumns];
  for (int c = 0; c < kColumns; ++c) store_nearest(from[c], &numbers[c]);
  if (!is_whole) {
    for (int c = 0; c < kColumns; ++c) to[c] = numbers[c];
  } else if constexpr (kColumns < 2 * kWord) {
    using Unit = ColumnUnit<T, kColumns>;
    *reinterpret_cast<Unit*>(to) = static_cast<Unit>(word_of(numbers, kColumns));
  } else {
    for (int c = 0; c < kColumns; c += 2 * kWord) {
      Unit16 unit;
      for (int w = 0; w < 2; ++w) unit.words[w] = word_of(numbers + c + w * kWord, kWord);
      store_unit(unit, to + c);
    }
  }
}

// The numbers of kColumns columns. `is_whole`: as for store_columns.
template <typename T, int kColumns>
TORCHREC_DYN_BOTH inline void load_columns(const T* from, bool is_whole, float (&to)[kColumns]) {
  constexpr int kOnce = lesser_of(kColumns, kMostUnitBytes / static_cast<int>(sizeof(T)));
  if (!is_whole) {
    for (int c = 0; c < kColumns; ++c) to[c] = to_float(from[c]);
    return;
  }
  for (int c = 0; c < kColumns; c += kOnce) {
    float numbers[kOnce];
    to_floats<T, kOnce>(load_unit<T, kOnce>(from + c), numbers);
    for (int k = 0; k < kOnce; ++k) to[c + k] = numbers[k];
  }
}

// Division by a number that is known before a kernel is launched, of the number of its thread: GPUs have no instruction
// that divides 64-bit integers, and take about a hundred for it.
struct Division {
  int64_t divisor;
  uint64_t factor;  // 2^64 / divisor, rounded down

  struct Parts {
    int64_t quotient;
    int64_t remainder;
  };

  // Requires divisor > 0.
  explicit Division(int64_t by) : divisor(by), factor(~uint64_t{0} / static_cast<uint64_t>(by)) {}

  // Requires number >= 0. `factor` is less than 2 below the fraction, so for numbers below 2^63 the first quotient is
  // right or 1 too small.
  TORCHREC_DYN_BOTH Parts split(int64_t number) const {
    const auto wide = static_cast<unsigned __int128>(static_cast<uint64_t>(number)) * factor;
    const auto quotient = static_cast<int64_t>(static_cast<uint64_t>(wide >> 64));
    const int64_t remainder = number - quotient * divisor;
    return remainder < divisor ? Parts{quotient, remainder} : Parts{quotient + 1, remainder - divisor};
  }
};

}  // namespace torchrec_dyn
