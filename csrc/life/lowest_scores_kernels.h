// The kernels of lowest_scores (simt.h). They find the rows that lowest_scores_cpu.h finds, without a sort of all rows:
//
//   1. Read the words three times, once for each digit of the key (last_seen or count), from the highest digit on:
//      CountKeys counts the rows of each value of the digit, ChooseDigit takes the value at which the rows asked for
//      end. The three values are the cut. Rows below the cut are chosen, and `needed` of the rows at it (ties).
//   2. Read the words again: MarkLowest marks the rows below the cut and the ties, in two bits a row. Slots are not in
//      the order of rows, so these bits are read at random: for 100M rows they fit a GPU's cache, the words do not.
//   3. Read the slots: CountMarked counts the marked ids by the top bits of their tie words, ChooseTies takes the bin
//      at which enough ties are found. So the host knows the size of the list.
//   4. Read the slots again: ListLowest lists the ids of rows below the cut, and the ties up to that bin.
// The list is sorted by tie word. It has few ties too many, all of them after the last tie that is needed: WriteLowest
// leaves them out.
#pragma once

#include <cstdint>

#include "life/scores.h"
#include "simt.h"
#include "storage/id_map.h"

namespace torchrec_dyn {

// Rows [0, rows) of one table. A row qualifies if its word is below `end`.
struct ScoredRows {
  ScoreBlocks scores;
  int64_t rows;
  bool by_count;
  uint64_t end;

  TORCHREC_DYN_BOTH uint64_t word(int64_t row) const { return *scores.word(row); }
  TORCHREC_DYN_BOTH uint64_t key(uint64_t word) const { return order_key(word, by_count); }
};

constexpr int64_t kDigitBits = 11;
constexpr int64_t kDigits = 3;  // of keys of 32 bits
constexpr int64_t kDigitValues = int64_t{1} << kDigitBits;
// Most rows may have the same value, so each warp counts in one of several copies.
constexpr int64_t kDigitCopies = 32;

struct KeyCut {
  uint64_t key;    // the digits that are known; the others are 0
  int64_t needed;  // the number of chosen rows among the rows with these digits
};

struct CountKeys {
  ScoredRows table;
  const KeyCut* cut;
  int64_t shift;    // of the digit in the key
  int64_t* counts;  // [kDigitCopies, kDigitValues]

  TORCHREC_DYN_BOTH void operator()(int64_t row) const {
    const uint64_t word = table.word(row);
    const uint64_t key = table.key(word);
    if (word >= table.end || (key ^ cut->key) >> (shift + kDigitBits) != 0) return;
    const auto value = static_cast<int64_t>(key >> shift) & (kDigitValues - 1);
    simt::warp_aggregated_increment(counts + row / 32 % kDigitCopies * kDigitValues + value);
  }
};

// Launched with kDigitValues + 1 threads: the sums of the totals then end with the number of rows.
struct AddCopies {
  const int64_t* counts;
  int64_t* totals;

  TORCHREC_DYN_BOTH void operator()(int64_t value) const {
    int64_t total = 0;
    for (int64_t copy = 0; copy < kDigitCopies && value < kDigitValues; ++copy)
      total += counts[copy * kDigitValues + value];
    totals[value] = total;
  }
};

// If fewer rows qualify than are asked for, the last value is taken. No key has it as its highest digit, which has 10
// bits only: all rows are then below the cut.
static_assert(kDigits * kDigitBits > 32);

struct ChooseDigit {
  const int64_t* sums;  // [kDigitValues + 1], of the totals
  int64_t shift;
  const KeyCut* cut;
  KeyCut* next;

  TORCHREC_DYN_BOTH void operator()(int64_t value) const {
    const int64_t before = sums[value];
    const bool is_last = value + 1 == kDigitValues;
    if (before < cut->needed && (cut->needed <= sums[value + 1] || is_last))
      *next = {cut->key | static_cast<uint64_t>(value) << shift, cut->needed - before};
  }
};

enum : uint64_t { kNotChosen = 0, kBelowCut = 1, kTie = 2 };

// Two bits a row.
struct LowestMarks {
  static constexpr int64_t kRows = 32;  // of a word

  int64_t* words;
  int64_t rows;

  // Requires that the row has no mark yet, so that the sum of two marks has the bits of both.
  TORCHREC_DYN_BOTH void set(int64_t row, uint64_t mark) const {
    simt::atomic_add(words + row / kRows, static_cast<int64_t>(mark << row % kRows * 2));
  }
  // `row` may be any number that a damaged map holds, and the -1 of an empty slot.
  TORCHREC_DYN_BOTH uint64_t of(int64_t row) const {
    if (static_cast<uint64_t>(row) >= static_cast<uint64_t>(rows)) return kNotChosen;
    return static_cast<uint64_t>(words[row / kRows]) >> row % kRows * 2 & 3;
  }
};

struct MarkLowest {
  ScoredRows table;
  const KeyCut* cut;
  LowestMarks marks;

  TORCHREC_DYN_BOTH void operator()(int64_t row) const {
    const uint64_t word = table.word(row);
    const uint64_t key = table.key(word);
    if (word < table.end && key <= cut->key) marks.set(row, key < cut->key ? kBelowCut : kTie);
  }
};

// Bins of marked ids by the top bits of their tie words: first the ids below the cut, then the ties.
constexpr int64_t kBinBits = 16;
constexpr int64_t kTieBins = int64_t{1} << kBinBits;

TORCHREC_DYN_BOTH inline int64_t bin_of(uint64_t word, uint64_t mark) {
  return (mark == kTie ? kTieBins : 0) + static_cast<int64_t>(word >> (64 - kBinBits));
}

struct CountMarked {
  SlotArray array;
  LowestMarks marks;
  int64_t* counts;  // [2 * kTieBins]

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const Slot slot = array.slots[i];
    const uint64_t mark = marks.of(slot.row());
    if (mark != kNotChosen) simt::warp_aggregated_increment(counts + bin_of(tie_word(slot.id), mark));
  }
};

// The list in numbers that the host reads.
struct LowestCounts {
  int64_t below;   // ids below the cut
  int64_t ties;    // ids at the cut in the bins up to `last`
  int64_t needed;  // of the ties
  int64_t last;    // bin
};

// Launched with kTieBins threads.
struct ChooseTies {
  const int64_t* sums;  // [2 * kTieBins + 1], of the counts
  const KeyCut* cut;
  LowestCounts* found;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const int64_t below = sums[kTieBins], bin = kTieBins + i;
    const int64_t before = sums[bin] - below, ties = sums[bin + 1] - below;
    const bool is_last = i + 1 == kTieBins;
    if (before < cut->needed && (cut->needed <= ties || is_last)) *found = {below, ties, cut->needed, bin};
  }
};

// Requires a map at rest. If another stream changes it meanwhile, the result is wrong, but nothing else is written.
// The values of the list: row << 1 | whether it is a tie.
struct ListLowest {
  SlotArray array;
  LowestMarks marks;
  int64_t last;     // of LowestCounts
  int64_t* places;  // [2 * kTieBins]: the sums of the counts; then the next free place of each bin
  int64_t size;
  simt::Pairs list;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const Slot slot = array.slots[i];
    const uint64_t mark = marks.of(slot.row());
    if (mark == kNotChosen) return;
    const uint64_t word = tie_word(slot.id);
    const int64_t bin = bin_of(word, mark);
    if (bin > last) return;
    const int64_t place = simt::atomic_add(places + bin, 1);
    if (place >= size) return;
    list.keys[place] = word;
    list.values[place] = slot.row() << 1 | static_cast<int64_t>(mark == kTie);
  }
};

struct FlagTies {
  const int64_t* values;
  int64_t* flags;
  TORCHREC_DYN_BOTH void operator()(int64_t i) const { flags[i] = values[i] & 1; }
};

struct WriteLowest {
  simt::Pairs list;            // by tie word
  const int64_t* ties_before;  // the sums of the flags
  int64_t needed;
  int64_t count;  // of the result
  int64_t* ids;
  int64_t* rows;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const int64_t surplus = ties_before[i] - needed;
    if ((list.values[i] & 1) != 0 && surplus >= 0) return;
    const int64_t place = i - greater_of(surplus, int64_t{0});
    if (place >= count) return;  // as in ListLowest
    ids[place] = id_of_tie_word(list.keys[i]);
    rows[place] = list.values[i] >> 1;
  }
};

}  // namespace torchrec_dyn
