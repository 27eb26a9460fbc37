// The ids of one map by their mixed ids: how many lie in each cell, and which lie in a range, in canonical order.
//
// Slots are in no order of the mixed ids, so both look at all of them, once, from front to back. A range is then sorted
// in two steps: into buckets by the highest bits in which its mixed ids differ, and each bucket, small enough for a
// core's second-level cache, by as many more bits as leave few of them alike. Those are sorted one run at a time, so
// that the order is exact however mixed ids lie.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>
#include <vector>

#include "radix_sort.h"
#include "simd.h"
#include "storage/id_map.h"

namespace torchrec_dyn {

struct MixedRow {
  uint64_t mixed;
  int64_t row;
};

// Slots that are looked at together: few enough for arrays on the stack.
constexpr int64_t kSlotRun = 4096;

// The cell of a mixed id: its top `bits` bits, 0 to 63 of them.
TORCHREC_DYN_INLINE uint64_t cell_of(uint64_t mixed, int bits) { return mixed >> 1 >> (63 - bits); }

// The cells of `count` slots, up to kSlotRun; of an empty slot the one behind the last.
TORCHREC_DYN_INLINE void cells_of_slots(const Slot* slots, int64_t count, int bits, uint32_t* cells) {
  const uint64_t behind = uint64_t{1} << bits;
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t cell = cell_of(mix64(static_cast<uint64_t>(slots[i].id)), bits);
    cells[i] = static_cast<uint32_t>(slots[i].place != 0 ? cell : behind);
  }
}

// The mixed ids of `count` slots, up to kSlotRun, and whether they lie in [first, first + span].
TORCHREC_DYN_INLINE void mix_slots(const Slot* slots, int64_t count, uint64_t first, uint64_t span, uint64_t* mixed,
                                   uint8_t* inside) {
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t mixed_id = mix64(static_cast<uint64_t>(slots[i].id));
    mixed[i] = mixed_id;
    inside[i] = (mixed_id - first <= span) & (slots[i].place != 0);
  }
}

// Into which bucket a mixed id goes.
struct Buckets {
  static constexpr uint64_t kBucket = 1 << 12;  // ids of one, about
  static constexpr int kMostBits = 11;          // more would be written to than a core keeps pages at hand for

  uint64_t low = 0;
  int key_bits = 0;  // in which the mixed ids differ
  int bits = 0;      // of which so many name the bucket

  Buckets(uint64_t low, uint64_t high, uint64_t ids)
      : low(low),
        key_bits(static_cast<int>(std::bit_width(high - low))),
        bits(std::min({key_bits, kMostBits, static_cast<int>(std::bit_width(ids / kBucket))})) {}

  size_t count() const { return size_t{1} << bits; }
  size_t of(uint64_t mixed) const { return bits == 0 ? 0 : (mixed - low) >> (key_bits - bits); }
};

// Sorts one bucket in place. Requires fewer than 2^32 ids.
inline void sort_bucket(const Buckets& buckets, MixedRow* ids, size_t count) {
  constexpr uint64_t kLowHalf = 0xFFFFFFFFull;
  const auto by_mixed = [](const MixedRow& a, const MixedRow& b) { return a.mixed < b.mixed; };
  if (count < 64) {
    std::sort(ids, ids + count, by_mixed);
    return;
  }
  const int left = buckets.key_bits - buckets.bits;  // bits in which ids of one bucket may differ
  const int digits = std::min({left, 32, static_cast<int>(std::bit_width(count)) + 9});
  const uint64_t mask = left == 64 ? ~uint64_t{0} : (uint64_t{1} << left) - 1;
  SortableWords words(count + 1);
  for (size_t i = 0; i < count; ++i) {
    const uint64_t key = ((ids[i].mixed - buckets.low) & mask) >> (left - digits);
    words.push_if(true, key << 32 | i);
  }
  words.sort_by_high_word();
  const auto unsorted = std::make_unique_for_overwrite<MixedRow[]>(count);
  std::copy(ids, ids + count, unsorted.get());
  uint64_t key_before = 0;
  size_t run = 0;  // where those of this key begin
  for (size_t i = 0; i < count; ++i) {
    const uint64_t word = words.words()[i];
    if (word >> 32 != key_before) {
      if (i - run > 1) std::sort(ids + run, ids + i, by_mixed);
      run = i;
      key_before = word >> 32;
    }
    ids[i] = unsorted[word & kLowHalf];
  }
  if (count - run > 1) std::sort(ids + run, ids + count, by_mixed);
}

}  // namespace torchrec_dyn
