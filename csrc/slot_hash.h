// The hash that orders the slots of a hash table: keyed, so that who makes ids cannot make ids with neighbouring homes.
//
// The key of a map is a random number that its process has drawn (torchrec_dyn/storage/id_map.py), or the key in the
// manifest of served files. Tables that live for one call have the key of the process. No result depends on a key: not
// the rows of ids, nor an order, nor a file but served slots. See docs/dev/decisions/0034.
#pragma once

#include <cstdint>

#include "mix64.h"
#include "simd.h"

namespace torchrec_dyn {

// mix64 with secret constants, then a third secret factor, since the high bits count: they depend on all bits of the
// id. A public mix after or before a secret word would not do. Ids that differ in the highest bits alone would differ
// by known amounts after the first factor; two more secret factors hide these.
struct SlotHash {
  // Key 0: the public hash, mix64(id) * kGolden, of served files of format 1.
  uint64_t flip = 0;
  uint64_t first = kMixFirst;
  uint64_t second = kMixSecond;
  uint64_t third = kGolden;

  static SlotHash of(int64_t key) {
    const auto word = static_cast<uint64_t>(key);
    if (word == 0) return {};
    const auto draw = [word](uint64_t i) { return mix64(word + i * kGolden); };  // SplitMix64 (mix64.h)
    return {draw(1), draw(2) | 1, draw(3) | 1, draw(4) | 1};
  }

  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE uint64_t operator()(int64_t id) const {
    uint64_t x = static_cast<uint64_t>(id) ^ flip;
    x = (x ^ (x >> 30)) * first;
    x = (x ^ (x >> 27)) * second;
    return (x ^ (x >> 31)) * third;
  }
};

// Slots of a cache line. A home is the first slot of a line, and the line is searched as a whole.
constexpr int64_t kLineSlots = 4;

// The home in an array of `capacity` slots, which are whole lines: the hash scaled to [0, capacity), rounded
// down to its line. Works for any number of lines (no power of two). Monotone in the hash, so an array that
// grows is moved by one walk that reads and writes from front to back.
// Source: Lemire, "Fast random integer generation in an interval", ACM TOMACS 2019.
TORCHREC_DYN_BOTH inline int64_t home_slot(uint64_t hash, int64_t capacity) {
  const auto scaled = (static_cast<unsigned __int128>(hash) * static_cast<uint64_t>(capacity)) >> 64;
  return static_cast<int64_t>(scaled) & ~(kLineSlots - 1);
}

// The least hash whose home is `slot` or later: home_slot(x, capacity) >= slot exactly if x is at least this
// hash. Requires that `slot` is the first slot of a line, 0 <= slot < capacity.
TORCHREC_DYN_BOTH inline uint64_t least_hash(int64_t slot, int64_t capacity) {
  const auto scaled = static_cast<unsigned __int128>(slot) << 64;
  const auto count = static_cast<unsigned __int128>(capacity);
  return static_cast<uint64_t>((scaled + count - 1) / count);
}

}  // namespace torchrec_dyn
