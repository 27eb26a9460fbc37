// The bodies of the update (simt.h, simt_tiles.h): the ids of a batch are sorted by row, and a tile updates each row.
//
// Same bits as on the CPU (row_update_cpu.cpp), by the order of sums of row_update.h. A lane has every 16th column of
// a row, which are the columns of one of the CPU's partial sums of squares. Bits differ for NaNs alone, of which GPUs
// have one.
//
//   KeyIds       the key of each id: the number of its row, counted over all tables; checks offsets, rows, senders
//   sort_pairs   by key. The ids of a row then are side by side, in the order of the batch
//   SumPieces    the sum of each piece but the first of its row: so the ids of a popular row are shared by many tiles
//   UpdateRows   for each row the sum of its first piece, plus the sums of the others; then its update
//
// Most rows have one id in a batch: the gradient of its bag then goes to registers, not through memory of the call. No
// body writes to the tables if anything is wrong; the host reads `wrong` at the end of the call.
#pragma once

#include <cstdint>

#include "lookup/bags.h"
#include "lookup/row_update.h"
#include "lookup/senders.h"
#include "lookup/updated_table.h"
#include "simt_tiles.h"
#include "storage/blocks.h"
#include "storage/rounding.h"
#include "storage/row_types.h"
#include "storage/table_of.h"

namespace torchrec_dyn {

using simt::kTileLanes;

// What a body finds wrong; 0 at first.
struct WrongUpdate {
  int64_t any;          // 1: one of the following
  int64_t offsets;      // 1: some are
  int64_t bags_left;    // bags from the first bag on that has a row outside its table
  int64_t senders;      // 1: some are
  int64_t tables_left;  // tables from the first on that has rows in the batch, but no valid step
};

// The keys of a table: first_key + row.
struct KeyedTable {
  uint64_t first_key;
  int64_t capacity;  // rows of the batch are below
  int64_t columns;
  int64_t may_have_rows;  // 0 or 1
};

// The ids of a call.
struct UpdatedIds {
  Bags bags;  // segments with bags only; without `first`
  const KeyedTable* tables;
  int64_t table_count;
  int64_t count;
  const int64_t* rows;
  const int32_t* senders;    // or null
  const float* bag_weights;  // or null
  bool mean;
  uint64_t absent;  // the key of ids that update no row: above all others
  WrongUpdate* wrong;

  TORCHREC_DYN_BOTH const Segment& segment_of(int64_t bag) const {
    return bags.segments[table_of(bag, bags.segment_count, [this](int64_t s) { return bags.segments[s].first_bag; })];
  }
  TORCHREC_DYN_BOTH int64_t table_of_key(uint64_t key) const {
    return table_of(static_cast<int64_t>(key), table_count,
                    [this](int64_t t) { return static_cast<int64_t>(tables[t].first_key); });
  }
  TORCHREC_DYN_BOTH void note(int64_t* what, int64_t number) const {
    simt::raise(what, number);
    simt::raise(&wrong->any, 1);
  }
};

// An id as the value of its key: the position and the bag, both below 2^32.
TORCHREC_DYN_BOTH inline int64_t value_of(int64_t bag, int64_t position) {
  return static_cast<int64_t>(static_cast<uint64_t>(bag) << 32 | static_cast<uint64_t>(position));
}
TORCHREC_DYN_BOTH inline int64_t bag_of(int64_t value) {
  return static_cast<int64_t>(static_cast<uint64_t>(value) >> 32);
}
TORCHREC_DYN_BOTH inline int64_t position_of(int64_t value) { return value & 0xFFFFFFFF; }

// A sender as a number from 0 on; if it is not valid, above kMostSenders.
TORCHREC_DYN_BOTH inline uint32_t sender_number(int32_t sender) { return static_cast<uint32_t>(sender) + 1; }

// A turn is an id, and an offset: as many turns as the larger of their numbers.
struct KeyIds {
  UpdatedIds ids;
  uint64_t* keys;
  int64_t* values;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const Bags& bags = ids.bags;
    if (bags.offsets != nullptr && i <= bags.count) {
      const int64_t offset = bags.offsets[i];
      if (offset < 0 || offset > ids.count || (i > 0 && offset < bags.offsets[i - 1])) ids.note(&ids.wrong->offsets, 1);
    }
    if (i >= ids.count) return;
    keys[i] = ids.absent;
    values[i] = i;
    if (ids.senders != nullptr && sender_number(ids.senders[i]) > static_cast<uint32_t>(kMostSenders))
      ids.note(&ids.wrong->senders, 1);
    if (bags.count == 0) return;
    // Right if the offsets ascend; else nothing is written.
    const int64_t bag =
        bags.offsets == nullptr ? i : table_of(i, bags.count, [&](int64_t b) { return bags.offsets[b]; });
    if (i < bags.begin(bag) || i >= bags.end(bag)) return;
    const int64_t t = ids.segment_of(bag).table;
    const KeyedTable& table = ids.tables[t];
    const int64_t row = ids.rows[i];
    if (row == -1) return;
    if (static_cast<uint64_t>(row) >= static_cast<uint64_t>(table.capacity))
      return ids.note(&ids.wrong->bags_left, bags.count - bag);
    if (table.may_have_rows == 0) return ids.note(&ids.wrong->tables_left, ids.table_count - t);
    keys[i] = table.first_key + static_cast<uint64_t>(row);
    values[i] = value_of(bag, i);
  }
};

// The ids sorted by key.
struct SortedIds {
  UpdatedIds ids;
  const uint64_t* keys;
  const int64_t* values;

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

// Distinct senders of each row, by a second sort of the sorted ids: by row, then by sender.
constexpr int kSenderBits = 21;
static_assert(kMostSenders < int64_t{1} << kSenderBits);

struct KeySenders {
  SortedIds sorted;
  uint64_t* keys;

  TORCHREC_DYN_BOTH void operator()(int64_t k) const {
    const uint32_t sender = sender_number(sorted.ids.senders[position_of(sorted.values[k])]);
    keys[k] = static_cast<uint64_t>(sorted.begin_of(k)) << kSenderBits | (sender & ((1u << kSenderBits) - 1));
  }
};

struct CountSenders {
  const uint64_t* keys;
  int64_t* distinct;  // where a row begins its number, else 0

  TORCHREC_DYN_BOTH void operator()(int64_t k) const {
    if (k == 0 || keys[k - 1] != keys[k]) simt::count(&distinct[keys[k] >> kSenderBits]);
  }
};

// A tile has a slice of columns in registers.
constexpr int kLaneColumns = 4;
constexpr uint32_t kSliceColumns = kTileLanes * kLaneColumns;

struct LaneColumns {
  float numbers[kLaneColumns];
};
using SliceSums = simt::PerLane<LaneColumns>;

struct Slice {
  uint32_t first;
  uint32_t columns;  // of the row: below 2^31

  // Lane l has columns first + l, first + l + 16, ...: as many as this.
  TORCHREC_DYN_BOTH int count(int lane) const {
    const int left = static_cast<int>(lesser_of(columns - first, kSliceColumns)) - lane;
    return (left + kTileLanes - 1) / kTileLanes;
  }
  // The first column of a lane; the next is kTileLanes columns further.
  template <typename T>
  TORCHREC_DYN_BOTH T* of_lane(T* row, int lane) const {
    return row + first + lane;
  }
};

// Terms of a sum, one a lane: factor * the row of numbers at `place`.
struct Terms {
  const float* memory;
  simt::PerLane<bool> are_given;  // those before the first that is not
  simt::PerLane<int64_t> places;
  simt::PerLane<float> factors;
};

// Adds the terms in the order of the lanes. Returns how many there were.
TORCHREC_DYN_BOTH inline int add_terms(const Terms& terms, const Slice& slice, SliceSums& sums) {
  constexpr int kAhead = 4;  // terms that are read before the first is added
  const int count = simt::count_lanes(terms.are_given);
  for (int term = 0; term < count; term += kAhead) {
    const float* rows[kAhead];
    float factors[kAhead];
    for (int a = 0; a < kAhead; ++a) {
      rows[a] = terms.memory + simt::from_lane(terms.places, term + a);
      factors[a] = simt::from_lane(terms.factors, term + a);
    }
    simt::each_lane([&](int lane) {
      const int columns = slice.count(lane);
      LaneColumns read[kAhead] = {};
      for (int a = 0; a < kAhead; ++a) {
        const float* row = slice.of_lane(rows[a], lane);
        for (int c = 0; c < kLaneColumns; ++c)
          if (term + a < count && c < columns) read[a].numbers[c] = row[c * kTileLanes];
      }
      for (int a = 0; a < kAhead; ++a)
        for (int c = 0; c < kLaneColumns; ++c)
          if (term + a < count && c < columns) sums[lane].numbers[c] += factors[a] * read[a].numbers[c];
    });
  }
  return count;
}

// The gradients of the sorted ids, in pieces. The sums of all pieces but the first of a row are in memory: a piece that
// begins at place k has line k / kPieceIds - 1. No two do: of two such pieces in kPieceIds places, the later would be
// the first of its row.
struct SortedGrads {
  SortedIds sorted;
  const float* grad;
  float* pieces;          // [lines, piece_columns]
  int64_t piece_columns;  // of the widest table

  TORCHREC_DYN_BOTH int64_t place_of_piece(int64_t k) const { return (k / kPieceIds - 1) * piece_columns; }

  // Sums the gradients of the row that has place k, from there on: of one piece, or of all.
  TORCHREC_DYN_BOTH void sum(int64_t k, bool one_piece, const Slice& slice, SliceSums& sums) const {
    static_assert(kPieceIds % kTileLanes == 0);
    simt::each_lane([&](int lane) {
      for (int c = 0; c < kLaneColumns; ++c) sums[lane].numbers[c] = -0.0f;  // any x is -0 + x, also -0
    });
    const uint64_t key = sorted.keys[k];
    Terms terms;
    int step = 1;
    for (int64_t first = k;;) {  // ids of the first piece, then sums of pieces
      terms.memory = step == 1 ? grad : pieces;
      simt::each_lane([&](int lane) {
        const int64_t place = first + lane * step;
        terms.are_given[lane] = place < sorted.ids.count && sorted.keys[place] == key;
        terms.places[lane] = terms.are_given[lane] && step > 1 ? place_of_piece(place) : 0;
        terms.factors[lane] = 1.0f;
        if (terms.are_given[lane] && step == 1) term_of(sorted.values[place], terms.places[lane], terms.factors[lane]);
      });
      if (add_terms(terms, slice, sums) < kTileLanes) return;
      first += kTileLanes * step;
      if (first == k + kPieceIds) {
        if (one_piece) return;
        step = static_cast<int>(kPieceIds);
      }
    }
  }

  // The gradient of an id.
  TORCHREC_DYN_BOTH void term_of(int64_t value, int64_t& place, float& factor) const {
    const UpdatedIds& ids = sorted.ids;
    const int64_t bag = bag_of(value);
    const Segment& segment = ids.segment_of(bag);
    place = segment.out_offset + (bag - segment.first_bag) * segment.out_stride;
    if (ids.bag_weights != nullptr) factor = ids.bag_weights[position_of(value)];
    if (ids.mean) factor *= 1.0f / static_cast<float>(ids.bags.end(bag) - ids.bags.begin(bag));
  }
};

// An item is a line of the sums of pieces: of the piece that begins in its kPieceIds places, if there is one.
struct SumPieces {
  SortedGrads grads;

  TORCHREC_DYN_BOTH void operator()(int64_t line) const {
    const SortedIds& sorted = grads.sorted;
    const UpdatedIds& ids = sorted.ids;
    const int64_t from = (line + 1) * kPieceIds;
    const uint64_t key = sorted.keys[from];
    if (ids.wrong->any != 0 || key == ids.absent || sorted.begins_row(from)) return;
    const int64_t past = (from - sorted.begin_of(from)) % kPieceIds;
    const int64_t begin = past == 0 ? from : from + kPieceIds - past;
    if (begin >= ids.count || sorted.keys[begin] != key) return;
    Slice slice{0, static_cast<uint32_t>(ids.tables[ids.table_of_key(key)].columns)};
    for (; slice.first < slice.columns; slice.first += kSliceColumns) {
      SliceSums sums;
      grads.sum(begin, true, slice, sums);
      simt::each_lane([&](int lane) {
        const int columns = slice.count(lane);
        float* to = slice.of_lane(grads.pieces + grads.place_of_piece(begin), lane);
        for (int c = 0; c < kLaneColumns; ++c)
          if (c < columns) to[c * kTileLanes] = sums[lane].numbers[c];
      });
    }
  }
};

// Where a row is, and the start of its draws.
template <typename T>
struct UpdatedRow {
  T* weights;
  float* momentum1;  // null: the rule has no such state
  float* momentum2;
  uint64_t draws;
};

// An item is a place of the sorted ids: the tile of the first place of a row updates the row.
template <typename T>
struct UpdateRows {
  SortedGrads grads;
  const UpdatedTable<T>* tables;
  UpdateRule rule;
  StateWidths widths;       // of the rule
  const int64_t* ids;       // for the draws of rounding
  const int64_t* distinct;  // senders; or null

  TORCHREC_DYN_BOTH void operator()(int64_t k) const {
    const SortedIds& sorted = grads.sorted;
    const uint64_t key = sorted.keys[k];
    if (sorted.ids.wrong->any != 0 || key == sorted.ids.absent || !sorted.begins_row(k)) return;
    const int64_t t = sorted.ids.table_of_key(key);
    const UpdatedTable<T>& table = tables[t];
    const auto number = static_cast<int64_t>(key - sorted.ids.tables[t].first_key);
    const UpdatedRow<T> row = row_of(table, number, ids[position_of(sorted.values[k])]);
    const float scale = distinct == nullptr ? table.grad_scale : table.grad_scale / static_cast<float>(distinct[k]);
    const bool is_rowwise = widths.momentum1 == StateWidth::kRow || widths.momentum2 == StateWidth::kRow;
    float state = 0.0f;  // read before the barrier of sum_of_lanes
    if (is_rowwise) state = widths.momentum1 == StateWidth::kRow ? *row.momentum1 : *row.momentum2;
    float square = 0.0f;
    SliceSums sums;
    for (int pass = is_rowwise ? 0 : 1; pass < 2; ++pass) {  // the first pass for the square alone
      simt::PerLane<float> squares;
      simt::each_lane([&](int lane) { squares[lane] = 0.0f; });
      Slice slice{0, static_cast<uint32_t>(table.weights.columns)};
      for (; slice.first < slice.columns; slice.first += kSliceColumns) {
        const bool is_kept = is_rowwise && pass == 1 && slice.columns <= kSliceColumns;  // from the first pass
        if (!is_kept) sum(k, scale, slice, sums);
        if (pass == 0)
          add_squares(row, slice, sums, squares);
        else
          update(table, row, slice, sums, square, state);
      }
      if (pass == 0) square = simt::sum_of_lanes(squares) / static_cast<float>(slice.columns);
    }
    mark(table.marks, number);
  }

  TORCHREC_DYN_BOTH void sum(int64_t k, float scale, const Slice& slice, SliceSums& sums) const {
    grads.sum(k, false, slice, sums);
    simt::each_lane([&](int lane) {
      for (int c = 0; c < kLaneColumns; ++c) sums[lane].numbers[c] *= scale;
    });
  }

  TORCHREC_DYN_BOTH UpdatedRow<T> row_of(const UpdatedTable<T>& table, int64_t row, int64_t id) const {
    return {table.weights.row(row), widths.momentum1 == StateWidth::kNone ? nullptr : table.momentum1.row(row),
            widths.momentum2 == StateWidth::kNone ? nullptr : table.momentum2.row(row),
            draw_state(table.stream.rounding_key, table.stream.step, id)};
  }

  // As mean_square, before its last sum.
  TORCHREC_DYN_BOTH void add_squares(const UpdatedRow<T>& row, const Slice& slice, const SliceSums& sums,
                                     simt::PerLane<float>& squares) const {
    simt::each_lane([&](int lane) {
      const int columns = slice.count(lane);
      const T* weights = slice.of_lane(row.weights, lane);
      for (int c = 0; c < kLaneColumns; ++c) {
        if (c >= columns) continue;
        float value = sums[lane].numbers[c];
        if (rule.square_reads_weights()) value = value + rule.weight_decay * to_float(weights[c * kTileLanes]);
        squares[lane] += value * value;
      }
    });
  }

  // Each lane updates its columns as if they were a row: update_row treats each column alone. `state`: of the row,
  // before the update.
  TORCHREC_DYN_BOTH void update(const UpdatedTable<T>& table, const UpdatedRow<T>& row, const Slice& slice,
                                const SliceSums& sums, float square, float state) const {
    simt::each_lane([&](int lane) {
      const int columns = slice.count(lane);
      T* const own = slice.of_lane(row.weights, lane);
      LaneColumns weights = {}, momentum1 = {}, momentum2 = {};  // lanes have numbers beyond the row, too
      for (int c = 0; c < kLaneColumns; ++c)
        if (c < columns) weights.numbers[c] = to_float(own[c * kTileLanes]);
      load_state(widths.momentum1, row.momentum1, state, lane, slice, momentum1);
      load_state(widths.momentum2, row.momentum2, state, lane, slice, momentum2);
      update_row(rule, table.correction, square, sums[lane].numbers, weights.numbers, momentum1.numbers,
                 momentum2.numbers, kLaneColumns);
      for (int c = 0; c < kLaneColumns; ++c)
        if (c < columns)
          store_weight(weights.numbers[c], row.draws, table.stream.first_column + slice.first + lane + c * kTileLanes,
                       &own[c * kTileLanes]);
      store_state(widths.momentum1, momentum1, lane, slice, row.momentum1);
      store_state(widths.momentum2, momentum2, lane, slice, row.momentum2);
    });
  }

  TORCHREC_DYN_BOTH static void load_state(StateWidth width, const float* memory, float state, int lane,
                                           const Slice& slice, LaneColumns& to) {
    if (width == StateWidth::kRow) to.numbers[0] = state;
    if (width != StateWidth::kColumns) return;
    for (int c = 0; c < kLaneColumns; ++c)
      if (c < slice.count(lane)) to.numbers[c] = slice.of_lane(memory, lane)[c * kTileLanes];
  }

  TORCHREC_DYN_BOTH static void store_state(StateWidth width, const LaneColumns& from, int lane, const Slice& slice,
                                            float* memory) {
    if (width == StateWidth::kRow && lane == 0 && slice.first == 0) *memory = from.numbers[0];
    if (width != StateWidth::kColumns) return;
    for (int c = 0; c < kLaneColumns; ++c)
      if (c < slice.count(lane)) slice.of_lane(memory, lane)[c * kTileLanes] = from.numbers[c];
  }

  // `column`: of the table.
  TORCHREC_DYN_BOTH static void store_weight(float weight, uint64_t draws, int64_t column, T* to) {
    if constexpr (sizeof(T) == sizeof(float)) {
      *to = weight;
    } else {
      const uint64_t word = draw_word(draws, column / kDrawsPerWord);
      store_stochastic(weight, static_cast<uint16_t>(word >> (16 * (column % kDrawsPerWord))), to);
    }
  }

  TORCHREC_DYN_BOTH static void mark(const MarkBits& marks, int64_t row) {
    if (marks.capacity == 0) return;
    uint8_t* const byte = marks.byte(row);
    simt::each_lane([&](int lane) {
      if (lane == 0 && (simt::load(byte) & mark_of(row)) == 0) simt::set_bits(byte, mark_of(row));
    });
  }
};

}  // namespace torchrec_dyn
