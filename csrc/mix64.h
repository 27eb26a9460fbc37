// The mixer of the project: a bijection of 64-bit words.
//
// Three things are derived from mix64(id), and they must not share bits:
//   owner rank   the high bits: a rank owns a contiguous range of mixed ids (torchrec_dyn/ranks/routing.py);
//   home slot    the high bits of mix64(id) * kSlotSpread, which depend on all bits of the mixed id,
//                so that the ids of one owner still spread over its whole map;
//   saved order  the mixed id itself, compared unsigned.
// Changing a constant here changes where saved ids belong: tests/ops/test_hash_golden.py pins the values.
//
// Source: the output function of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number
// generators", OOPSLA 2014) with Stafford's variant 13 constants, without the additive constant.
#pragma once

#include <cstdint>

#include "simd.h"

namespace torchrec_dyn {

// Mixes one word, or every word of a vector, in place.
template <typename Words>
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE constexpr void mix(Words& x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
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
constexpr uint64_t kSlotSpread = kGolden;

// The word that orders the slots of every map.
TORCHREC_DYN_BOTH inline uint64_t spread_hash(int64_t id) { return mix64(static_cast<uint64_t>(id)) * kSlotSpread; }

// Slots of a cache line. A home is the first slot of a line, and the line is searched as a whole.
constexpr int64_t kLineSlots = 4;

// The home in an array of `capacity` slots, which are whole lines: the spread hash scaled to [0, capacity), rounded
// down to its line. Works for any number of lines (no power of two). Monotone in the spread hash, so an array that
// grows is moved by one walk that reads and writes from front to back.
// Source: Lemire, "Fast random integer generation in an interval", ACM TOMACS 2019.
TORCHREC_DYN_BOTH inline int64_t home_slot(uint64_t spread, int64_t capacity) {
  const auto scaled = (static_cast<unsigned __int128>(spread) * static_cast<uint64_t>(capacity)) >> 64;
  return static_cast<int64_t>(scaled) & ~(kLineSlots - 1);
}

// The least spread hash whose home is `slot` or later: home_slot(x, capacity) >= slot exactly if x is at least this
// hash. Requires that `slot` is the first slot of a line, 0 <= slot < capacity.
TORCHREC_DYN_BOTH inline uint64_t least_spread_hash(int64_t slot, int64_t capacity) {
  const auto scaled = static_cast<unsigned __int128>(slot) << 64;
  const auto count = static_cast<unsigned __int128>(capacity);
  return static_cast<uint64_t>((scaled + count - 1) / count);
}

}  // namespace torchrec_dyn
