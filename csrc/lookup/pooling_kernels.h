// The kernels of gather and pool, and of the gradient of the bag weights (simt.h).
//
// Same sums as on the CPU (pooling_cpu.cpp): the terms of a bag in their order, one addition each. Bits differ for
// NaNs alone, of which GPUs have one.
//
// One launch serves all tables: a thread finds its segment by a search among the segments, which a warp makes in step
// and in the L1 cache. A launch for each segment would take some microseconds of the host for each of 26 tables and
// more, and leave the GPU half empty at the end of each.
//
// A kernel checks the offsets and rows that it reads: an extra pass would read them once more. What is wrong counts as
// absent, so no thread leaves the memory of the call. A launch of one thread follows (ReportWrongBags): no thread of
// the first launch knows whether it has found the first error. Its cost is that of the memset of `wrong`, which is sent
// with the segments instead.
#pragma once

#include <cstdint>
#include <type_traits>

#include "bag_lengths_kernels.h"
#include "device_errors.h"
#include "lookup/bags.h"
#include "simt.h"
#include "storage/blocks.h"
#include "storage/id_map.h"
#include "storage/row_units.h"
#include "storage/table_of.h"

namespace torchrec_dyn {

// A segment with bags (bags.h), for kernels.
template <typename T>
struct DeviceSegment {
  RowBlocks<T> table;
  int64_t first_bag;
  int64_t first_thread;
  int64_t out_offset;
  int64_t out_stride;
  Division units;     // of a row
  int unit_shift;     // their number is 2^unit_shift, or -1: a shift is a quarter of the instructions of a division
  int unit_columns;   // of the largest unit of 16, 4 or 2 bytes that divides rows and addresses of blocks
  bool is_whole;      // outputs are at multiples of the size of `unit_columns` numbers, or of 16 bytes
  OneBlock<T> block;  // the table's, or null

  // The bag of a thread, counted in the segment, and its unit of columns.
  TORCHREC_DYN_BOTH Division::Parts split(int64_t thread) const {
    const int64_t left = thread - first_thread;
    if (unit_shift == -1) return units.split(left);
    return {left >> unit_shift, left & ((int64_t{1} << unit_shift) - 1)};
  }
};

// What a kernel finds wrong; 0 at first.
struct WrongBags {
  int64_t offsets_left;  // of wrong_offsets_left
  int64_t bags_left;     // bags from the first bag on that has a row outside its table
};

// The bags of a call, as kernels read them.
template <typename T>
struct DeviceBags {
  const DeviceSegment<T>* segments;  // ordered by first bag and first thread
  int segment_count;                 // > 0
  const int64_t* offsets;            // null for sequences
  int64_t count;
  const int64_t* rows;
  int64_t ids;
  bool mean;
  WrongBags* wrong;

  struct Range {
    int64_t begin;
    int64_t end;
  };

  TORCHREC_DYN_BOTH const DeviceSegment<T>& segment_of_bag(int64_t bag) const {
    return segments[table_of(bag, segment_count, [this](int s) { return segments[s].first_bag; })];
  }
  TORCHREC_DYN_BOTH const DeviceSegment<T>& segment_of_thread(int64_t thread) const {
    return segments[table_of(thread, segment_count, [this](int s) { return segments[s].first_thread; })];
  }

  // The ids of a bag; none if its offsets are wrong.
  TORCHREC_DYN_BOTH Range range(int64_t bag) const {
    if (offsets == nullptr) return {bag, bag + 1};
    const Range bounds{offsets[bag], offsets[bag + 1]};
    if (bounds.begin >= 0 && bounds.begin <= bounds.end && bounds.end <= ids) return bounds;
    for (int64_t i = bag; i < bag + 2; ++i)
      simt::atomic_max(&wrong->offsets_left, wrong_offsets_left(offsets, count, ids, i));
    return {0, 0};
  }
  TORCHREC_DYN_BOTH void note_row_outside(int64_t bag) const { simt::atomic_max(&wrong->bags_left, count - bag); }
};

// The CPU's error: of the offsets, or else of the first bag with a row outside. Runs in one thread.
template <typename T>
struct ReportWrongBags {
  DeviceBags<T> bags;
  const char* op;           // in the memory of the host
  ErrorReport error;        // op, 1, two offsets, the end of their range; or op, 0, capacity of the table
  bool is_checked = false;  // the caller checks the offsets: with wrong ones nothing is reported

  TORCHREC_DYN_BOTH void operator()(int64_t) const {
    // Without bags no thread has read the one offset.
    const int64_t left = bags.count == 0 ? wrong_offsets_left(bags.offsets, 0, bags.ids, 0) : bags.wrong->offsets_left;
    if (left != 0 && is_checked) return;
    if (left != 0)
      return report_wrong_offsets(error, bags.offsets, bags.count, left, bags.ids, reinterpret_cast<int64_t>(op), 1);
    if (bags.wrong->bags_left == 0) return;
    const int64_t bag = bags.count - bags.wrong->bags_left;
    error.report(reinterpret_cast<int64_t>(op), 0, bags.segment_of_bag(bag).table.capacity);
  }
};

// One thread for each unit of columns of a bag. kIsPlain: each table is one block, and bags have no weights. Other
// calls need more registers, so fewer of their threads wait for memory at the same time.
//
// A GPU waits some hundred cycles for a row number, and as long again for the row. So a thread reads kAhead numbers at
// once, then their rows at once. It must not do so under conditions: nvcc sends such loads one after the other.
// Instead of an id behind the end of the bag its last id is read again,
// instead of an absent row the first row of the table, and neither is added.
template <typename T, typename Out, bool kIsPlain>
struct PoolBags {
  using Range = typename DeviceBags<T>::Range;
  using Table = std::conditional_t<kIsPlain, OneBlock<T>, RowBlocks<T>>;
  static constexpr int kAhead = 4;
  // Told so, nvcc leaves the loads together; else it would save registers by adding one row before it loads the next.
  static constexpr int kBlocksAtOnce = kIsPlain && sizeof(T) == 4 ? 5 : 4;

  DeviceBags<T> bags;
  const float* bag_weights;  // or null
  Out* out;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const DeviceSegment<T>& segment = bags.segment_of_thread(i);
    pool_unit(segment, segment.split(i));
  }

  // `parts`: the bag, counted in the segment, and the unit.
  TORCHREC_DYN_BOTH void pool_unit(const DeviceSegment<T>& segment, const Division::Parts& parts) const {
    constexpr int kMost = kMostUnitBytes / static_cast<int>(sizeof(T));
    if (segment.unit_columns == kMost) return pool<kMost>(segment, parts.quotient, parts.remainder);
    if constexpr (sizeof(T) == 2)
      if (segment.unit_columns == 2) return pool<2>(segment, parts.quotient, parts.remainder);
    pool<1>(segment, parts.quotient, parts.remainder);
  }

  template <int kColumns>
  TORCHREC_DYN_BOTH void pool(const DeviceSegment<T>& segment, int64_t place, int64_t unit) const {
    const int64_t bag = segment.first_bag + place;
    const int64_t column = unit * kColumns;
    const Range ids = bags.range(bag);
    float sums[kColumns] = {};
    if constexpr (kIsPlain) {
      OneBlock<T> table = segment.block;
      table.memory += column;
      const int64_t next = add_present_rows(table, ids, sums);
      if (next < ids.end && !add_rows(table, 0, {next, ids.end}, sums)) bags.note_row_outside(bag);
    } else {
      if (!add_rows(segment.table, column, ids, sums)) bags.note_row_outside(bag);
    }
    if (bags.mean && ids.end > ids.begin)
      for (int c = 0; c < kColumns; ++c) sums[c] /= static_cast<float>(ids.end - ids.begin);
    store_columns(sums, segment.is_whole, out + segment.out_offset + place * segment.out_stride + column);
  }

  // Adds the rows of the first ids as long as groups are full and all of their rows present, or the row of the only
  // id. Returns the first id that is left.
  template <int kColumns>
  TORCHREC_DYN_BOTH int64_t add_present_rows(const OneBlock<T>& table, const Range& ids,
                                             float (&sums)[kColumns]) const {
    int64_t next = ids.begin;
    if (ids.end - next == 1) {
      const int64_t row = bags.rows[next];
      if (!table.has(row)) return next;
      add_unit<kColumns>(load_unit<T, kColumns>(table.row(row)), 1.0f, sums);
      return next + 1;
    }
    for (; ids.end - next >= kAhead; next += kAhead) {
      int64_t rows[kAhead];
      for (int a = 0; a < kAhead; ++a) rows[a] = bags.rows[next + a];
      bool are_present = true;
      for (int a = 0; a < kAhead; ++a) are_present &= table.has(rows[a]);
      if (!are_present) break;
      ColumnUnit<T, kColumns> units[kAhead];
      for (int a = 0; a < kAhead; ++a) units[a] = load_unit<T, kColumns>(table.row(rows[a]));
      TORCHREC_DYN_UNROLL
      for (int a = 0; a < kAhead; ++a) add_unit<kColumns>(units[a], 1.0f, sums);
    }
    return next;
  }

  // Adds the rows of some ids. Returns false if a row is outside of the table.
  template <int kColumns>
  TORCHREC_DYN_BOTH bool add_rows(const Table& table, int64_t column, const Range& ids, float (&sums)[kColumns]) const {
    bool are_inside = true;
    for (int64_t next = ids.begin; next < ids.end; next += kAhead) {
      const auto last = static_cast<int>(lesser_of(ids.end - next, int64_t{kAhead})) - 1;
      int64_t rows[kAhead];
      for (int a = 0; a < kAhead; ++a) rows[a] = bags.rows[next + lesser_of(a, last)];
      unsigned used = 0;
      for (int a = 0; a < kAhead; ++a) {
        const bool is_present = table.has(rows[a]);
        are_inside &= is_present || rows[a] == kNoRow;
        used |= static_cast<unsigned>(is_present && a <= last) << a;
        rows[a] = is_present ? rows[a] : 0;
      }
      if (used == 0) continue;  // perhaps there is no first row
      ColumnUnit<T, kColumns> units[kAhead];
      for (int a = 0; a < kAhead; ++a) units[a] = load_unit<T, kColumns>(table.row(rows[a]) + column);
      float weights[kAhead];
      for (int a = 0; a < kAhead; ++a) weights[a] = 1.0f;
      if (!kIsPlain && bag_weights != nullptr)
        for (int a = 0; a < kAhead; ++a) weights[a] = bag_weights[next + lesser_of(a, last)];
      TORCHREC_DYN_UNROLL
      for (int a = 0; a < kAhead; ++a)
        if ((used >> a & 1) != 0) add_unit<kColumns>(units[a], weights[a], sums);
    }
    return are_inside;
  }

  template <int kColumns>
  TORCHREC_DYN_BOTH static void add_unit(const ColumnUnit<T, kColumns>& unit, float weight, float (&sums)[kColumns]) {
    float values[kColumns];
    to_floats<T, kColumns>(unit, values);
    for (int c = 0; c < kColumns; ++c) sums[c] += weight * values[c];
  }
};

// One thread for each id, and for each pair of offsets: as many as the larger of their numbers. An id alone sums over
// its columns, as the CPU does: a sum of doubles depends on the order.
template <typename T>
struct DotRows {
  DeviceBags<T> bags;
  const float* grad;
  float* out;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    if (bags.offsets != nullptr && i < bags.count) bags.range(i);
    if (i >= bags.ids) return;
    out[i] = 0.0f;
    // Right if the offsets ascend; else the result is dropped.
    const int64_t bag =
        bags.offsets == nullptr ? i : table_of(i, bags.count, [this](int64_t b) { return bags.offsets[b]; });
    const typename DeviceBags<T>::Range ids = bags.range(bag);
    if (i < ids.begin || i >= ids.end) return;
    const DeviceSegment<T>& segment = bags.segment_of_bag(bag);
    const int64_t row = bags.rows[i];
    if (!segment.table.has(row)) {
      if (row != kNoRow) bags.note_row_outside(bag);
      return;
    }
    const T* weights = segment.table.row(row);
    const float* bag_grad = grad + segment.out_offset + (bag - segment.first_bag) * segment.out_stride;
    const double sum = dot(segment, weights, bag_grad);
    out[i] = static_cast<float>(bags.mean ? sum / static_cast<double>(ids.end - ids.begin) : sum);
  }

  TORCHREC_DYN_BOTH double dot(const DeviceSegment<T>& segment, const T* row, const float* bag_grad) const {
    constexpr int kMost = kMostUnitBytes / static_cast<int>(sizeof(T));
    if (segment.unit_columns == kMost) return dot_units<kMost>(segment, row, bag_grad);
    return dot_units<1>(segment, row, bag_grad);
  }

  template <int kColumns>
  TORCHREC_DYN_BOTH double dot_units(const DeviceSegment<T>& segment, const T* row, const float* bag_grad) const {
    double sum = 0.0;
    for (int64_t column = 0; column < segment.table.columns; column += kColumns) {
      float numbers[kColumns], factors[kColumns];
      load_columns(row + column, true, numbers);
      load_columns(bag_grad + column, segment.is_whole, factors);
      for (int c = 0; c < kColumns; ++c) sum += static_cast<double>(factors[c]) * numbers[c];
    }
    return sum;
  }
};

}  // namespace torchrec_dyn
