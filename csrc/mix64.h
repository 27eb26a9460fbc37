// The mixer of the project: a bijection of 64-bit words.
//
// It is public: anyone can make ids with chosen mixed ids. Two things are derived from mix64(id):
//   owner rank   the high bits: a rank owns a contiguous range of mixed ids (torchrec_dyn/ranks/routing.py);
//   saved order  the mixed id itself, compared unsigned.
// Hash tables have homes by a secret hash (slot_hash.h). Changing a constant here changes where saved ids belong:
// tests/ops/test_hash_golden.py pins the values.
//
// Source: the output function of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number
// generators", OOPSLA 2014) with Stafford's variant 13 constants, without the additive constant.
#pragma once

#include <cstdint>

#include "simd.h"

namespace torchrec_dyn {

constexpr uint64_t kMixFirst = 0xBF58476D1CE4E5B9ull;
constexpr uint64_t kMixSecond = 0x94D049BB133111EBull;

// Mixes one word, or every word of a vector, in place.
template <typename Words>
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE constexpr void mix(Words& x) {
  x = (x ^ (x >> 30)) * kMixFirst;
  x = (x ^ (x >> 27)) * kMixSecond;
  x = x ^ (x >> 31);
}

TORCHREC_DYN_BOTH constexpr uint64_t mix64(uint64_t x) {
  mix(x);
  return x;
}

// The factors are the inverses of those of mix64 modulo 2^64; a shift s is undone by the shifts s and 2s.
TORCHREC_DYN_BOTH constexpr uint64_t unmix64(uint64_t x) {
  x = (x ^ (x >> 31) ^ (x >> 62)) * 0x319642B2D24D8EC3ull;
  x = (x ^ (x >> 27) ^ (x >> 54)) * 0x96DE1B173F119089ull;
  return x ^ (x >> 30) ^ (x >> 60);
}

static_assert(unmix64(mix64(0x0123456789ABCDEFull)) == 0x0123456789ABCDEFull);

// 2^64 / golden ratio, made odd: the increment of SplitMix64 from word to word.
// Source: Knuth, TAOCP vol. 3, section 6.4 (Fibonacci hashing).
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;

}  // namespace torchrec_dyn
