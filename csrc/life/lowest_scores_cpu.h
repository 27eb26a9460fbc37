// Finds the rows with the lowest scores, exactly, by passes over memory from front to back.
//
//   1. Read the words: the range of the keys (last_seen or count) of the rows that qualify, then histograms of it until
//      one key is left, the cut, with the number of rows at it (ties) and how many of the ties are needed.
//   2. Read the words again: mark each row below or at the cut, and separately the rows at the cut.
//   3. Read the slots: collect the ids of marked rows; of the ties, only ids with a tie word up to a bound.
// The bound comes from a sample of the ids at the cut, since mixed ids are uniform over all ids but not over the ids of
// one owner (mix64.h). It is generous; if it is too low, the slots are read once more without a bound. So the memory
// needed is the marks, one byte or two bits a row, and little more than the result. The result does not depend on the
// bound or on threads.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "life/scores.h"
#include "simd.h"
#include "storage/id_map.h"

namespace torchrec_dyn {

constexpr uint64_t kNoBound = std::numeric_limits<uint64_t>::max();  // of tie words

// Calls visit(words, first row, number) for each stretch of rows in [begin, end) that lies in one block.
template <typename Visit>
void for_score_stretches(const ScoreBlocks& scores, int64_t begin, int64_t end, const Visit& visit) {
  while (begin < end) {
    const int64_t stop = std::min(end, ((begin >> scores.shift) + 1) << scores.shift);
    visit(static_cast<const uint64_t*>(scores.word(begin)), begin, stop - begin);
    begin = stop;
  }
}

// The rows that qualify: their number, and their lowest and highest key.
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
    const uint64_t key = order_key(words[i], kByCount);
    const uint64_t low = qualifies ? key : std::numeric_limits<uint64_t>::max();
    const uint64_t high = qualifies ? key : 0;
    here.rows += qualifies;
    here.low = low < here.low ? low : here.low;
    here.high = high > here.high ? high : here.high;
  }
  range.add(here);
}

// Number of rows by key: bin b counts the keys [low + (b << shift), low + (b + 1 << shift)), the last bin all keys from
// its begin to high. Keys outside [low, high] are counted separately.
struct KeyBins {
  static constexpr uint64_t kBins = 2048;
  static constexpr int kCopies = 4;  // with one copy, of equal keys each would wait for the count of the key before

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
      const uint64_t above = order_key(words[i], kByCount) - low_key;
      const uint64_t bin = std::min(above >> by, kBins - 1);
      ++bins[static_cast<uint64_t>(i % kCopies) * (kBins + 1) + ((words[i] < end) & (above <= span) ? bin : kBins)];
    }
  }

  void add_to(std::vector<uint64_t>& totals) const {
    for (uint64_t copy = 0; copy < kCopies; ++copy)
      for (uint64_t bin = 0; bin < kBins; ++bin) totals[bin] += counts[copy * (kBins + 1) + bin];
  }
};

// The key that ends the lowest rows: all rows below it are taken, and `needed` of the `ties` at it.
struct Cut {
  uint64_t key;
  uint64_t needed;
  uint64_t ties;
};

// Finds the cut for the `most` lowest rows in `range`, which has more rows than that. count(low, high, shift) returns a
// histogram of [low, high]. The first histogram has the lowest keys one by one, since the cut is usually among them;
// later histograms go by digits.
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

// Marks of chosen rows and of ties among them, by place (row + 1), so that empty slots have a mark too. This mark is
// never set, and neither is the mark of a row outside [0, rows). One byte a row is read faster than two bits while all
// bytes stay in a core's second-level cache, and slower beyond (walks over 1.8 and 18 million slots: 1.3 and 43 ms with
// bytes, 2.9 and 17 ms with bits).
class ByteMarks {
 public:
  static constexpr int64_t kMostRows = 1 << 20;

  explicit ByteMarks(int64_t rows) : outside_(static_cast<uint64_t>(rows) + 1), marks_(static_cast<size_t>(rows) + 2) {}

  bool is_chosen(int64_t place) const { return mark_of(place) != 0; }
  bool is_tie(int64_t place) const { return mark_of(place) == kTie; }

  // Marks the rows in [row, row + count) that qualify and have a key up to `cut`.
  template <bool kByCount>
  TORCHREC_DYN_INLINE void mark(const uint64_t* words, int64_t row, int64_t count, uint64_t end, uint64_t cut) {
    uint8_t* marks = marks_.data() + row + 1;
    for (int64_t i = 0; i < count; ++i) {
      const uint64_t key = order_key(words[i], kByCount);
      marks[i] = static_cast<uint8_t>((words[i] < end) * ((key <= cut) + (key == cut)));
    }
  }

 private:
  static constexpr uint8_t kTie = 2;

  uint8_t mark_of(int64_t place) const {
    return marks_[static_cast<size_t>(std::min(static_cast<uint64_t>(place), outside_))];
  }

  uint64_t outside_;
  std::vector<uint8_t> marks_;
};

class BitMarks {
 public:
  explicit BitMarks(int64_t rows)
      : outside_(static_cast<uint64_t>(rows) + kFront + 1),
        chosen_(static_cast<size_t>(rows / kWord) + 2),
        ties_(static_cast<size_t>(rows / kWord) + 2) {}

  bool is_chosen(int64_t place) const { return has(chosen_, place); }
  bool is_tie(int64_t place) const { return has(ties_, place); }

  // As ByteMarks; `row` is a multiple of 64, or all rows lie in one word of bits.
  template <bool kByCount>
  TORCHREC_DYN_INLINE void mark(const uint64_t* words, int64_t row, int64_t count, uint64_t end, uint64_t cut) {
    for (int64_t begin = 0; begin < count; begin += kWord) {
      uint64_t is_chosen = 0, is_tie = 0;
      for (int64_t i = 0; i < std::min<int64_t>(kWord, count - begin); ++i) {
        const uint64_t key = order_key(words[begin + i], kByCount);
        const bool qualifies = words[begin + i] < end;
        is_chosen |= static_cast<uint64_t>(qualifies & (key <= cut)) << i;
        is_tie |= static_cast<uint64_t>(qualifies & (key == cut)) << i;
      }
      const auto word = static_cast<size_t>((row + begin) / kWord + 1);
      chosen_[word] |= is_chosen << (row % kWord);
      ties_[word] |= is_tie << (row % kWord);
    }
  }

 private:
  static constexpr int64_t kWord = 64;
  static constexpr uint64_t kFront = 63;  // row 0 has the first bit of word 1, place 0 the last bit of word 0

  bool has(const std::vector<uint64_t>& bits, int64_t place) const {
    const uint64_t bit = std::min(static_cast<uint64_t>(place) + kFront, outside_);
    return bits[static_cast<size_t>(bit / kWord)] >> (bit % kWord) & 1;
  }

  uint64_t outside_;
  std::vector<uint64_t> chosen_;
  std::vector<uint64_t> ties_;
};

// The slots of marked rows in a piece of a map, in their order.
struct MarkedSlots {
  std::vector<Slot> slots;
  std::vector<uint64_t> tie_words;  // of the ties among them

  // Adds a slot; adds a tie only if its tie word is up to `bound`.
  void add(const Slot& slot, bool is_tie, uint64_t bound) {
    if (is_tie) {
      const uint64_t word = tie_word(slot.id);
      if (word > bound) return;
      tie_words.push_back(word);
    }
    slots.push_back(slot);
  }
};

// Adds the slots of [begin, end), whole lines, whose row is chosen; of the ties, only slots with a tie word up to
// `bound`.
template <typename Marks>
void collect_chosen(const SlotArray& array, int64_t begin, int64_t end, const Marks& marks, uint64_t bound,
                    MarkedSlots& found) {
  // One branch for each line: few lines hold a chosen row.
  for (const Slot* line = array.slots + begin; line < array.slots + end; line += kLineSlots) {
    bool any = false;
    for (int64_t s = 0; s < kLineSlots; ++s) any |= marks.is_chosen(line[s].place);
    if (!any) continue;
    for (int64_t s = 0; s < kLineSlots; ++s)
      if (marks.is_chosen(line[s].place)) found.add(line[s], marks.is_tie(line[s].place), bound);
  }
}

// Slots that are flagged together.
constexpr int64_t kFlags = 512;

// Flags the slots with a tie word up to `bound`: less work than reading the marks, half of which may be set.
TORCHREC_DYN_INLINE void flag_low_ties(const Slot* slots, int64_t count, uint64_t bound, uint8_t* flags) {
  for (int64_t i = 0; i < count; ++i) flags[i] = (tie_word(slots[i].id) <= bound) & (slots[i].place != 0);
}

// As collect_chosen, for the case that all chosen rows are ties and most of these are beyond the bound.
// flag(slots, count, bound, flags) is flag_low_ties.
template <typename Marks, typename Flag>
void collect_low_ties(const SlotArray& array, int64_t begin, int64_t end, const Marks& marks, uint64_t bound,
                      const Flag& flag, MarkedSlots& found) {
  constexpr int64_t kEight = 8;
  uint8_t flags[kFlags];
  for (; begin < end; begin += kFlags) {
    const int64_t count = std::min(kFlags, end - begin);
    flag(array.slots + begin, count, bound, flags);
    std::fill(flags + count, flags + kFlags, uint8_t{0});
    for (int64_t i = 0; i < count; i += kEight) {
      uint64_t eight;
      std::memcpy(&eight, flags + i, sizeof eight);
      for (; eight != 0; eight &= eight - 1) {
        const Slot& slot = array.slots[begin + i + std::countr_zero(eight) / kEight];
        if (marks.is_tie(slot.place)) found.add(slot, true, bound);
      }
    }
  }
}

// A bound of tie words up to which very probably at least `needed` of the `count` ties lie, and not many more. Of few
// ties, all lie up to it.
template <typename Marks>
uint64_t bound_of_ties(const IdMapView& map, const Marks& marks, uint64_t needed, uint64_t count) {
  constexpr uint64_t kFew = 1 << 16;
  constexpr uint64_t kSample = 1 << 12;
  constexpr int64_t kRun = 64;  // neighbours are a sample too: slots are ordered by other bits than tie words
  if (needed >= count || count <= kFew) return kNoBound;
  const auto step = std::max(kRun, static_cast<int64_t>(count / kSample) * kRun);
  std::vector<uint64_t> sample;
  for (int a = 0; a < (map.is_growing() ? 2 : 1); ++a)
    for (int64_t run = 0; run < map.arrays[a].capacity; run += step)
      for (int64_t s = run; s < std::min(run + kRun, map.arrays[a].capacity); ++s)
        if (marks.is_tie(map.arrays[a].slots[s].place)) sample.push_back(tie_word(map.arrays[a].slots[s].id));
  const double expected = static_cast<double>(sample.size()) * static_cast<double>(needed) / static_cast<double>(count);
  const auto rank = static_cast<size_t>(expected + 8.0 * std::sqrt(expected) + 16.0);
  if (rank >= sample.size()) return kNoBound;
  std::nth_element(sample.begin(), sample.begin() + static_cast<int64_t>(rank), sample.end());
  return sample[rank];
}

}  // namespace torchrec_dyn
