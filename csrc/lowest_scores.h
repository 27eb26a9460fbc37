// Finds the rows with the lowest scores, exactly, by passes over memory from front to back.
//
//   1. The words: the range of the keys (last_seen or count) of the rows that qualify, then histograms of it until
//      one key is left, the cut: so many rows lie below it, and of those at it (ties) so many more are needed.
//   2. The words again: two bits a row, below the cut or at it, and at it.
//   3. The slots: what they hold of the rows marked, the ids at the cut only up to a bound of their mixed ids.
// The bound comes from a sample of the ids at the cut, since mixed ids are uniform over all ids but not over those of
// one owner (mix64.h). It is generous; should it ever be short, the slots are walked once more without one. So memory
// is two bits a row and little more than the result, and the result depends on neither bound nor threads.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "id_map.h"
#include "scores.h"
#include "simd.h"

namespace torchrec_dyn {

template <bool kByCount>
constexpr uint64_t key_of(uint64_t score) {
  return kByCount ? count_of(score) : last_seen_of(score);
}

// Calls visit(words, first row, number) for the stretches of rows [begin, end) that lie in one block.
template <typename Visit>
void for_score_stretches(const ScoreBlocks& scores, int64_t begin, int64_t end, const Visit& visit) {
  while (begin < end) {
    const int64_t stop = std::min(end, ((begin >> scores.shift) + 1) << scores.shift);
    visit(static_cast<const uint64_t*>(scores.word(begin)), begin, stop - begin);
    begin = stop;
  }
}

// The rows that qualify: how many, and their lowest and highest key.
struct KeyRange {
  uint64_t rows = 0;
  uint64_t low = std::numeric_limits<uint64_t>::max();
  uint64_t high = 0;

  void add(const KeyRange& other) {
    rows += other.rows;
    low = std::min(low, other.low);
    high = std::max(high, other.high);
  }
};

// A row qualifies if its word is below `end`: words are ordered by last_seen.
template <bool kByCount>
TORCHREC_DYN_INLINE void add_to_range(const uint64_t* words, int64_t count, uint64_t end, KeyRange& range) {
  KeyRange here;
  for (int64_t i = 0; i < count; ++i) {
    const bool qualifies = words[i] < end;
    const uint64_t key = key_of<kByCount>(words[i]);
    const uint64_t low = qualifies ? key : std::numeric_limits<uint64_t>::max();
    const uint64_t high = qualifies ? key : 0;
    here.rows += qualifies;
    here.low = low < here.low ? low : here.low;
    here.high = high > here.high ? high : here.high;
  }
  range.add(here);
}

// Rows by key: bin b counts the keys [low + (b << shift), low + (b + 1 << shift)), the last bin all from there to high.
// Keys outside [low, high] are counted apart.
struct KeyBins {
  static constexpr uint64_t kBins = 2048;
  static constexpr int kCopies = 4;  // of equal keys in a row, each waits for the count of the one before

  uint64_t low = 0;
  uint64_t high = 0;
  int shift = 0;
  std::vector<uint32_t> counts = std::vector<uint32_t>(kCopies * (kBins + 1));  // of fewer than 2^32 rows

  template <bool kByCount>
  TORCHREC_DYN_INLINE void count_keys(const uint64_t* words, int64_t count, uint64_t end) {
    const uint64_t low_key = low, span = high - low;
    const int by = shift;
    uint32_t* bins = counts.data();
    for (int64_t i = 0; i < count; ++i) {
      const uint64_t above = key_of<kByCount>(words[i]) - low_key;
      const uint64_t bin = std::min(above >> by, kBins - 1);
      ++bins[static_cast<uint64_t>(i % kCopies) * (kBins + 1) + ((words[i] < end) & (above <= span) ? bin : kBins)];
    }
  }

  void add_to(std::vector<uint64_t>& totals) const {
    for (uint64_t copy = 0; copy < kCopies; ++copy)
      for (uint64_t bin = 0; bin < kBins; ++bin) totals[bin] += counts[copy * (kBins + 1) + bin];
  }
};

// The key at which the lowest rows are cut off: all rows below it are taken, and `needed` of the `ties` at it.
struct Cut {
  uint64_t key;
  uint64_t needed;
  uint64_t ties;
};

// Finds the cut for the `most` lowest of the rows in `range`, fewer than there are. count(low, high, shift) is a
// histogram of [low, high]. First the lowest keys one by one, since the cut is mostly among them; then by digits.
template <typename Count>
Cut find_cut(const KeyRange& range, uint64_t most, const Count& count) {
  constexpr uint64_t kLast = KeyBins::kBins - 1;
  uint64_t low = range.low, high = range.high, needed = most;
  for (int shift = 0;;) {
    const std::vector<uint64_t> bins = count(low, high, shift);
    uint64_t bin = 0;
    while (bin < kLast && bins[bin] < needed) needed -= bins[bin++];
    const bool is_rest = bin == kLast && (high - low) >> shift > kLast;
    low += bin << shift;
    if (!is_rest && shift == 0) return {low, needed, bins[bin]};
    if (!is_rest) high = std::min(high, low + (uint64_t{1} << shift) - 1);
    shift = std::max(0, static_cast<int>(std::bit_width(high - low)) - static_cast<int>(std::bit_width(kLast)));
  }
}

// One bit a row for rows [0, rows), and a bit behind them that is never set: of slots that hold no such row.
class RowMarks {
 public:
  explicit RowMarks(int64_t rows) : rows_(static_cast<uint64_t>(rows)), bits_(static_cast<size_t>(rows / 64 + 1)) {}

  bool has_place(int64_t place) const { return has(std::min(static_cast<uint64_t>(place - 1), rows_)); }
  uint64_t* word(int64_t row) { return &bits_[static_cast<size_t>(row / 64)]; }

 private:
  bool has(uint64_t row) const { return bits_[static_cast<size_t>(row / 64)] >> (row % 64) & 1; }

  uint64_t rows_;
  std::vector<uint64_t> bits_;
};

// Marks rows [row, row + count), at most 64 that share a word of bits.
template <bool kByCount>
TORCHREC_DYN_INLINE void mark_rows(const uint64_t* words, int64_t row, int64_t count, uint64_t end, uint64_t cut,
                                   uint64_t* chosen, uint64_t* ties) {
  uint64_t is_chosen = 0, is_tie = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t key = key_of<kByCount>(words[i]);
    const bool qualifies = words[i] < end;
    is_chosen |= static_cast<uint64_t>(qualifies & (key <= cut)) << i;
    is_tie |= static_cast<uint64_t>(qualifies & (key == cut)) << i;
  }
  *chosen |= is_chosen << (row % 64);
  *ties |= is_tie << (row % 64);
}

// What a piece of the slots holds of the marked rows, in the order of the slots.
struct MarkedSlots {
  std::vector<Slot> slots;
  std::vector<uint64_t> mixed;  // of the ties among them
};

// Slots that a flagging function looks at together.
constexpr int64_t kFlags = 512;

// Flags the slots whose row is marked. No branch: which rows are marked cannot be predicted.
TORCHREC_DYN_INLINE void flag_marked(const Slot* slots, int64_t count, const RowMarks& marks, uint8_t* flags) {
  for (int64_t i = 0; i < count; ++i) flags[i] = marks.has_place(slots[i].place);
}

// Flags the slots with a mixed id up to `bound`: less work than a look at the marks, which are seldom in cache.
TORCHREC_DYN_INLINE void flag_low_mixed(const Slot* slots, int64_t count, uint64_t bound, uint8_t* flags) {
  for (int64_t i = 0; i < count; ++i)
    flags[i] = (mix64(static_cast<uint64_t>(slots[i].id)) <= bound) & (slots[i].place != 0);
}

// Adds the slots [begin, end) whose row is marked; of ties those with a mixed id up to `bound`. flag(slots, count,
// flags) flags at least all of them.
template <typename Flag>
void collect_marked(const SlotArray& array, int64_t begin, int64_t end, const RowMarks& chosen, const RowMarks& ties,
                    uint64_t bound, const Flag& flag, MarkedSlots& found) {
  const auto add = [&](const Slot& slot) {
    if (!chosen.has_place(slot.place)) return;
    if (ties.has_place(slot.place)) {
      const uint64_t mixed = mix64(static_cast<uint64_t>(slot.id));
      if (mixed > bound) return;
      found.mixed.push_back(mixed);
    }
    found.slots.push_back(slot);
  };
  constexpr int64_t kEight = 8;
  uint8_t flags[kFlags];
  for (; begin < end; begin += kFlags) {
    const int64_t count = std::min(kFlags, end - begin);
    flag(array.slots + begin, count, flags);
    std::fill(flags + count, flags + kFlags, uint8_t{0});
    for (int64_t i = 0; i < count; i += kEight) {
      uint64_t eight;
      std::memcpy(&eight, flags + i, sizeof eight);
      for (; eight != 0; eight &= eight - 1) add(array.slots[begin + i + std::countr_zero(eight) / kEight]);
    }
  }
}

// A mixed id below which `needed` of the `ties` very probably lie, and not many more. Where there are few, all do.
inline uint64_t bound_of_ties(const IdMapView& map, const RowMarks& ties, uint64_t needed, uint64_t count) {
  constexpr uint64_t kFew = 1 << 16;
  constexpr uint64_t kSample = 1 << 12;
  constexpr int64_t kRun = 64;  // neighbours are a sample too: slots are ordered by other bits than mixed ids
  constexpr uint64_t kNoBound = std::numeric_limits<uint64_t>::max();
  if (needed >= count || count <= kFew) return kNoBound;
  const auto step = std::max(kRun, static_cast<int64_t>(count / kSample) * kRun);
  std::vector<uint64_t> sample;
  for (int a = 0; a < (map.is_growing() ? 2 : 1); ++a)
    for (int64_t run = 0; run < map.arrays[a].capacity; run += step)
      for (int64_t s = run; s < std::min(run + kRun, map.arrays[a].capacity); ++s)
        if (ties.has_place(map.arrays[a].slots[s].place))
          sample.push_back(mix64(static_cast<uint64_t>(map.arrays[a].slots[s].id)));
  const double expected = static_cast<double>(sample.size()) * static_cast<double>(needed) / static_cast<double>(count);
  const auto rank = static_cast<size_t>(expected + 8.0 * std::sqrt(expected) + 16.0);
  if (rank >= sample.size()) return kNoBound;
  std::nth_element(sample.begin(), sample.begin() + static_cast<int64_t>(rank), sample.end());
  return sample[rank];
}

}  // namespace torchrec_dyn
