// The kernels of the update that name and sort the ids of a batch (simt.h): the key of an id is the number of its row,
// counted over all tables. No later kernel writes to the tables if anything is wrong: ReportWrongUpdate then reports
// the CPU's error.
//
// Keys, values and places of gradients are words of 32 bits while the rows of all tables, the numbers of the gradient
// and those of the sums of pieces are each fewer than 2^32, else of 64 bits: a sort reads and writes each word once for
// every 8 bits of a key.
#pragma once

#include <cstdint>
#include <type_traits>

#include "bag_lengths_kernels.h"
#include "device_errors.h"
#include "lookup/bags.h"
#include "lookup/row_update.h"
#include "simt.h"
#include "storage/table_of.h"

namespace torchrec_dyn {

// What a kernel finds wrong; 0 at first.
struct WrongUpdate {
  int64_t any;           // 1: one of the following
  int64_t offsets_left;  // of WrongOffsets
  int64_t bags_left;     // bags from the first bag on that has a row outside its table
  int64_t senders;       // 1: some are
  int64_t tables_left;   // tables from the first on that has rows in the batch, but no valid step
  int64_t nonfinite;     // rows that would not be finite, of tables under OnNonfinite::kError
  // Of all senders and -1, plus 1. KeySenders finds them, if KeyIds has seen that some are wrong.
  int64_t lowest_sender;
  int64_t highest_sender;
};

// What the ids of a table must be.
struct KeyedTable {
  int64_t capacity;  // rows of the batch are below
  int64_t columns;
  int64_t step;
  int64_t may_have_rows;  // 0 or 1
  OnNonfinite on_nonfinite;
  int64_t* nonfinite;  // counts its rows that would not be finite; null: kWrite
};

// The ids of a call.
struct UpdatedIds {
  Bags bags;  // segments with bags only; without `first`
  const KeyedTable* tables;
  const uint64_t* first_keys;  // of the tables
  int64_t table_count;
  int64_t count;
  const int64_t* rows;
  const int32_t* senders;  // or null
  uint64_t absent;         // the key of ids that update no row: above all others
  WrongUpdate* wrong;

  TORCHREC_DYN_BOTH const Segment& segment_of(int64_t bag) const {
    return bags.segments[table_of(bag, bags.segment_count, [this](int64_t s) { return bags.segments[s].first_bag; })];
  }
  TORCHREC_DYN_BOTH void note(int64_t* what, int64_t number) const {
    simt::atomic_max(what, number);
    simt::atomic_max(&wrong->any, 1);
  }
};

// The value of a key, and the place of a gradient.
template <typename Key>
using ValueOf = std::conditional_t<sizeof(Key) == sizeof(uint32_t), uint32_t, int64_t>;
template <typename Key>
using KeyPairs = simt::PairsOf<Key, ValueOf<Key>>;

// The term of an id in the sum of its row: a factor times the gradient of its bag.
template <typename Key>
struct IdTerms {
  ValueOf<Key>* places;  // [N] the first element of the gradient; null: the values of the keys are the places
  const float* factors;  // [N] null: 1
};

// A sender as a number from 0 on; if it is not valid, above kMostSenders.
TORCHREC_DYN_BOTH inline uint32_t sender_number(int32_t sender) { return static_cast<uint32_t>(sender) + 1; }

// One thread for each id, and for each offset: as many as the larger of their numbers.
template <typename Key>
struct KeyIds {
  UpdatedIds ids;
  KeyPairs<Key> pairs;
  IdTerms<Key> terms;
  const float* bag_weights;  // or null
  float* mean_factors;       // as factors of the terms; null: they are the bag weights

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const Bags& bags = ids.bags;
    if (bags.offsets != nullptr && i <= bags.count)
      if (const int64_t left = wrong_offsets_left(bags.offsets, bags.count, ids.count, i); left != 0)
        ids.note(&ids.wrong->offsets_left, left);
    if (i >= ids.count) return;
    if (ids.senders != nullptr && sender_number(ids.senders[i]) > static_cast<uint32_t>(kMostSenders))
      ids.note(&ids.wrong->senders, 1);
    ValueOf<Key> place = 0;
    pairs.keys[i] = key_of(i, place);
    pairs.values[i] = terms.places == nullptr ? place : static_cast<ValueOf<Key>>(i);
    if (terms.places != nullptr) terms.places[i] = place;
  }

  // Writes the place and the factor of an id that updates a row.
  TORCHREC_DYN_BOTH Key key_of(int64_t i, ValueOf<Key>& place) const {
    const Bags& bags = ids.bags;
    const auto absent = static_cast<Key>(ids.absent);
    if (bags.count == 0) return absent;
    // Right if the offsets ascend; else nothing is written.
    const int64_t bag =
        bags.offsets == nullptr ? i : table_of(i, bags.count, [&](int64_t b) { return bags.offsets[b]; });
    if (i < bags.begin(bag) || i >= bags.end(bag)) return absent;
    const Segment& segment = ids.segment_of(bag);
    const KeyedTable& table = ids.tables[segment.table];
    const int64_t row = ids.rows[i];
    if (row == -1) return absent;
    if (static_cast<uint64_t>(row) >= static_cast<uint64_t>(table.capacity)) {
      ids.note(&ids.wrong->bags_left, bags.count - bag);
      return absent;
    }
    if (table.may_have_rows == 0) {
      ids.note(&ids.wrong->tables_left, ids.table_count - segment.table);
      return absent;
    }
    place = static_cast<ValueOf<Key>>(segment.out_offset + (bag - segment.first_bag) * segment.out_stride);
    if (mean_factors != nullptr) {
      const float weight = bag_weights == nullptr ? 1.0f : bag_weights[i];
      mean_factors[i] = weight * (1.0f / static_cast<float>(bags.end(bag) - bags.begin(bag)));
    }
    return static_cast<Key>(ids.first_keys[segment.table] + static_cast<uint64_t>(row));
  }
};

// The CPU's error: of the offsets, else of the rows, the senders or the steps. Runs in one thread.
struct ReportWrongUpdate {
  UpdatedIds ids;
  const char* op;     // in the memory of the host
  ErrorReport error;  // op, WrongContents and its numbers

  TORCHREC_DYN_BOTH void operator()(int64_t) const {
    const WrongUpdate& wrong = *ids.wrong;
    const Bags& bags = ids.bags;
    const auto name = reinterpret_cast<int64_t>(op);
    if (wrong.offsets_left != 0)
      return report_wrong_offsets(error, bags.offsets, bags.count, wrong.offsets_left, ids.count, name,
                                  WrongContents::kOffsets);
    if (wrong.bags_left != 0) {
      const KeyedTable& table = ids.tables[ids.segment_of(bags.count - wrong.bags_left).table];
      return error.report(name, WrongContents::kRows, table.capacity);
    }
    if (wrong.senders != 0)
      return error.report(name, WrongContents::kSenders, wrong.lowest_sender - 1, wrong.highest_sender - 1);
    if (wrong.tables_left != 0)
      return error.report(name, WrongContents::kStep, ids.tables[ids.table_count - wrong.tables_left].step);
    if (wrong.nonfinite != 0) error.report(name, WrongContents::kNonfinite, wrong.nonfinite);
  }
};

// No row is updated if one of an error's table would not be finite. Runs in one thread, after all rows were tried.
struct RefuseNonfinite {
  WrongUpdate* wrong;

  TORCHREC_DYN_BOTH void operator()(int64_t) const {
    if (wrong->nonfinite != 0) wrong->any = 1;
  }
};

// The ids sorted by key.
template <typename Key>
struct SortedIds {
  UpdatedIds ids;
  const Key* keys;
  const ValueOf<Key>* values;

  TORCHREC_DYN_BOTH bool begins_row(int64_t k) const { return k == 0 || keys[k - 1] != keys[k]; }

  // The first place with the key of place k.
  TORCHREC_DYN_BOTH int64_t begin_of(int64_t k) const {
    if (begins_row(k)) return k;
    int64_t before = -1, begin = k;  // the key of `before` is lower
    while (begin - before > 1) {
      const int64_t middle = before + (begin - before) / 2;
      if (keys[middle] < keys[k])
        before = middle;
      else
        begin = middle;
    }
    return begin;
  }
};

// Distinct senders of each row, by a second sort of the sorted ids: by row, then by sender. Values are positions here.
constexpr int kSenderBits = 21;
static_assert(kMostSenders < int64_t{1} << kSenderBits);

template <typename Key>
struct KeySenders {
  SortedIds<Key> sorted;
  simt::Pairs pairs;  // nobody looks at the values, but the sort moves them

  TORCHREC_DYN_BOTH void operator()(int64_t k) const {
    const UpdatedIds& ids = sorted.ids;
    const int32_t sender = ids.senders[sorted.values[k]];
    if (ids.wrong->senders != 0) {
      simt::atomic_max(&ids.wrong->highest_sender, int64_t{sender} + 1);
      simt::atomic_min(&ids.wrong->lowest_sender, int64_t{sender} + 1);
    }
    pairs.keys[k] =
        static_cast<uint64_t>(sorted.begin_of(k)) << kSenderBits | (sender_number(sender) & ((1u << kSenderBits) - 1));
    pairs.values[k] = k;
  }
};

struct CountSenders {
  const uint64_t* keys;
  int64_t* distinct;  // where a row begins its number, else 0

  TORCHREC_DYN_BOTH void operator()(int64_t k) const {
    if (k == 0 || keys[k - 1] != keys[k]) simt::warp_aggregated_increment(&distinct[keys[k] >> kSenderBits]);
  }
};

}  // namespace torchrec_dyn
