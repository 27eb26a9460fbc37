// Orders listed ids by last_seen, then by mixed id, unsigned, on the CPU.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "life/scores.h"
#include "radix_sort.h"
#include "storage/id_map.h"

namespace torchrec_dyn {

// Bits of tie words that an order of up to 2^18 ids is sorted by: two digits of a radix sort, and few of them are
// equal.
constexpr int kFewTieBits = 22;
constexpr size_t kFewIds = size_t{1} << 18;

// Sorts by key and tie word: first by the high bits of the tie words, counted from their least; then each run of equal
// high bits, which is short, by the whole words; then by key, counted from the least key, which keeps the order of
// equal keys. Requires fewer than 2^32 slots.
// Returns their order. seen: the last_seen of each.
inline std::vector<uint64_t> oldest_first(const std::vector<Slot>& slots, const std::vector<uint64_t>& seen) {
  constexpr uint64_t kLowHalf = 0xFFFFFFFFull;
  const size_t count = slots.size();
  std::vector<uint64_t> ties, places;
  ties.reserve(count);
  places.reserve(count);
  uint64_t least_tie = std::numeric_limits<uint64_t>::max(), most_tie = 0, least_seen = least_tie;
  for (size_t i = 0; i < count; ++i) {
    ties.push_back(tie_word(slots[i].id));
    least_tie = std::min(least_tie, ties.back());
    most_tie = std::max(most_tie, ties.back());
    least_seen = std::min(least_seen, seen[i]);
  }
  const int bits = count <= kFewIds ? kFewTieBits : 32;
  const int less = count == 0 ? 0 : std::max(0, static_cast<int>(std::bit_width(most_tie - least_tie)) - bits);
  SortableWords words(count + 1);
  for (size_t i = 0; i < count; ++i) words.push_if(true, (ties[i] - least_tie) >> less << 32 | i);
  words.sort_by_high_word();
  const std::span<const uint64_t> sorted = words.words();
  for (const uint64_t word : sorted) places.push_back(word & kLowHalf);
  for (size_t begin = 0, end = 0; begin < count; begin = end) {
    for (end = begin + 1; end < count && sorted[end] >> 32 == sorted[begin] >> 32;) ++end;
    if (end - begin == 1) continue;
    std::sort(places.begin() + static_cast<int64_t>(begin), places.begin() + static_cast<int64_t>(end),
              [&](uint64_t a, uint64_t b) { return ties[a] < ties[b]; });
  }
  words.clear();
  for (size_t i = 0; i < count; ++i) words.push_if(true, (seen[places[i]] - least_seen) << 32 | i);
  words.sort_by_high_word();
  std::vector<uint64_t> order;
  order.reserve(count);
  for (const uint64_t word : words.words()) order.push_back(places[word & kLowHalf]);
  return order;
}

}  // namespace torchrec_dyn
