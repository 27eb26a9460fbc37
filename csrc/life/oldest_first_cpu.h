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

struct ScoredSlot {
  Slot slot;
  uint64_t last_seen;
};

// Bits of tie words that an order of up to 2^18 ids is sorted by: two digits of a radix sort, and few of them are
// equal.
constexpr int kFewTieBits = 22;
constexpr size_t kFewIds = size_t{1} << 18;

// Sorts by key and tie word: first by the high bits of the tie words, counted from their least; then each run of equal
// high bits, which is short, by the whole words; then by key, counted from the least key, which keeps the order of
// equal keys. Requires fewer than 2^32 slots.
inline std::vector<ScoredSlot> oldest_first(const std::vector<Slot>& slots, const ScoreBlocks& scores) {
  constexpr uint64_t kLowHalf = 0xFFFFFFFFull;
  const size_t count = slots.size();
  std::vector<uint64_t> ties, places;
  std::vector<ScoredSlot> scored, ordered;
  for (auto* list : {&ties, &places}) list->reserve(count);
  for (auto* list : {&scored, &ordered}) list->reserve(count);
  uint64_t least_tie = std::numeric_limits<uint64_t>::max(), most_tie = 0, least_seen = least_tie;
  for (const Slot& slot : slots) {
    scored.push_back({slot, last_seen_of(*scores.word(slot.row()))});
    ties.push_back(tie_word(slot.id));
    least_tie = std::min(least_tie, ties.back());
    most_tie = std::max(most_tie, ties.back());
    least_seen = std::min(least_seen, scored.back().last_seen);
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
  for (size_t i = 0; i < count; ++i) words.push_if(true, (scored[places[i]].last_seen - least_seen) << 32 | i);
  words.sort_by_high_word();
  for (const uint64_t word : words.words()) ordered.push_back(scored[places[word & kLowHalf]]);
  return ordered;
}

}  // namespace torchrec_dyn
