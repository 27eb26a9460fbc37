// The kernels of the update of rows (simt.h, simt_tiles.h): the ids of a batch are sorted by row, and a tile updates
// each row. Same bits as on the CPU (row_update_cpu.cpp), by the order of sums of row_update.h. Bits differ for NaNs
// alone, of which GPUs have one.
//
//   KeyIds       the key of each id, and the gradient that it has (update_keys_kernels.h)
//   sort_pairs   by key. The ids of a row then are side by side, in the order of the batch
//   SumPieces    the sum of each piece but the first of its row: so the ids of a popular row are shared by many tiles
//   UpdateRows   for each row the sum of its first piece, plus the sums of the others; then its update. Before it, to
//                measure the rows, where the rule has a ratio; and as a trial, where a table refuses updates that are
//                not finite
//
// Most rows have one id in a batch: the gradient of its bag then goes to registers, not through memory of the call.
//
// Memory is read in few rounds, since a GPU waits some hundred cycles for each: keys and errors, by which a block lists
// its rows; then, of a row, key and value; then the table; then row, state and gradient together. A loop over gradients
// has four to sixteen loads of 16 bytes in flight.
#pragma once

#include <cstdint>
#include <cstring>

#include "lookup/row_update.h"
#include "lookup/tile_columns.h"
#include "lookup/update_keys_kernels.h"
#include "simt_tiles.h"
#include "storage/blocks.h"
#include "storage/rounding.h"
#include "storage/row_types.h"

namespace torchrec_dyn {

// Terms of a sum, one a lane.
template <typename Shape, typename Key>
struct Terms {
  simt::PerLane<ValueOf<Key>, Shape::kLanes> places;
  simt::PerLane<float, Shape::kLanes> factors;
  int count;  // of the first lanes
};

// Adds kCount terms, the first of them of lane `term`: factor * the numbers at `place` of the memory. All are read
// before the first is added.
template <int kCount, typename Shape, typename Key>
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE void add_some(const float* memory, const Terms<Shape, Key>& terms, int term,
                                                    const Slice<Shape>& slice, TileColumns<Shape>& sums) {
  const float* rows[kCount];
  float factors[kCount];
  for (int a = 0; a < kCount; ++a) {
    rows[a] = memory + simt::shuffle(terms.places, term + a);
    factors[a] = simt::shuffle(terms.factors, term + a);
  }
  simt::each_lane<Shape::kLanes>([&](int lane) {
    LaneColumns<Shape> read[kCount];
    for (int a = 0; a < kCount; ++a) load_lane(rows[a], slice, lane, read[a].numbers);
    for (int a = 0; a < kCount; ++a)
      for (int c = 0; c < Shape::kLaneColumns; ++c) sums[lane].numbers[c] += factors[a] * read[a].numbers[c];
  });
}

// kAhead: 2 or 4 terms that are read before the first is added.
template <int kAhead, typename Shape, typename Key>
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE void add_terms(const float* memory, const Terms<Shape, Key>& terms,
                                                     const Slice<Shape>& slice, TileColumns<Shape>& sums) {
  int term = 0;
#if defined(__CUDACC__)
#pragma unroll 1  // two rounds side by side would need twice the registers
#endif
  for (; term + kAhead <= terms.count; term += kAhead) add_some<kAhead>(memory, terms, term, slice, sums);
  if (kAhead > 2 && (terms.count & 2) != 0) {
    add_some<2>(memory, terms, term, slice, sums);
    term += 2;
  }
  if ((terms.count & 1) != 0) add_some<1>(memory, terms, term, slice, sums);
}

// The gradients of the sorted ids, in pieces. The sums of all pieces but the first of a row are in memory: a piece that
// begins at place k has line k / kPieceIds - 1. No two do: of two such pieces in kPieceIds places, the later would be
// the first of its row.
template <typename Key, typename Shape>
struct SortedGrads {
  static constexpr int kLanes = Shape::kLanes;
  using Columns = TileColumns<Shape>;

  SortedIds<Key> sorted;
  IdTerms<Key> terms;
  const float* grad;
  float* pieces;          // [lines, piece_columns]
  int64_t piece_columns;  // of the widest table, as a multiple of four

  TORCHREC_DYN_BOTH int64_t place_of_piece(int64_t k) const { return (k / kPieceIds - 1) * piece_columns; }

  // The table of a key: the last that begins at the key or before. The first round reads no memory that depends on the
  // key where the tables are no more than the lanes.
  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE int table_of_key(Key key) const {
    const uint64_t* const first_keys = sorted.ids.first_keys;
    int table = 0, end = static_cast<int>(sorted.ids.table_count);
    while (end - table > kLanes) {
      const int middle = table + (end - table) / 2;
      if (static_cast<Key>(first_keys[middle]) <= key)
        table = middle;
      else
        end = middle;
    }
    simt::PerLane<bool, kLanes> begin_before;
    simt::each_lane<kLanes>([&](int lane) {
      const int own = lesser_of(table + lane, end - 1);
      begin_before[lane] = (static_cast<Key>(first_keys[own]) <= key) & (table + lane < end);
    });
    return table + simt::ballot_count(begin_before) - 1;
  }

  // The terms of the ids of a row at `first` and behind; `key`: of the row.
  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE Terms<Shape, Key> terms_at(int64_t first, Key key) const {
    Terms<Shape, Key> read;
    simt::PerLane<bool, kLanes> are_given;
    simt::each_lane<kLanes>([&](int lane) {
      // Places behind the first; -1: the row has ended where all places end.
      const int64_t past = sorted.ids.count - 1 - first;
      const auto own = static_cast<int>(lesser_of(int64_t{lane}, past));
      are_given[lane] = (sorted.keys[first + own] == key) & (lane <= past);
      read.places[lane] = sorted.values[first + own];
      read.factors[lane] = 1.0f;
      if (!are_given[lane]) return;
      if (terms.factors != nullptr) read.factors[lane] = terms.factors[read.places[lane]];
      if (terms.places != nullptr) read.places[lane] = terms.places[read.places[lane]];
    });
    read.count = simt::ballot_count(are_given);
    return read;
  }

  // The sums of the pieces of a row that begin at `first` and behind.
  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE Terms<Shape, Key> pieces_at(int64_t first, Key key) const {
    Terms<Shape, Key> read;
    simt::PerLane<bool, kLanes> are_given;
    simt::each_lane<kLanes>([&](int lane) {
      const int64_t place = first + lane * kPieceIds;
      are_given[lane] = place < sorted.ids.count && sorted.keys[place] == key;
      read.places[lane] = static_cast<ValueOf<Key>>(are_given[lane] ? place_of_piece(place) : 0);
      read.factors[lane] = 1.0f;
    });
    read.count = simt::ballot_count(are_given);
    return read;
  }

  // Sums a piece of the row that has place k, from there on. Returns whether the piece is full, so that others may
  // follow.
  template <int kAhead>
  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE bool sum_piece(int64_t k, Key key, const Slice<Shape>& slice,
                                                       Columns& sums) const {
    static_assert(kPieceIds % kLanes == 0);
    simt::each_lane<kLanes>([&](int lane) {
      for (float& sum : sums[lane].numbers) sum = -0.0f;  // any x is -0 + x, also -0
    });
    for (int64_t first = k; first < k + kPieceIds; first += kLanes) {
      const Terms<Shape, Key> read = terms_at(first, key);
      add_terms<kAhead>(grad, read, slice, sums);
      if (read.count < kLanes) return false;
    }
    return true;
  }

  // The term of one id alone: no lane waits for another.
  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE void sum_one(ValueOf<Key> value, const Slice<Shape>& slice,
                                                     Columns& sums) const {
    const float* const row = grad + (terms.places == nullptr ? value : terms.places[value]);
    const float factor = terms.factors == nullptr ? 1.0f : terms.factors[value];
    simt::each_lane<kLanes>([&](int lane) {
      load_lane(row, slice, lane, sums[lane].numbers);
      for (float& sum : sums[lane].numbers) sum *= factor;  // -0 + x is x
    });
  }

  // As sum_piece, for all pieces of the row that begins at place k.
  template <int kAhead>
  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE void sum_row(int64_t k, Key key, const Slice<Shape>& slice,
                                                     Columns& sums) const {
    if (!sum_piece<kAhead>(k, key, slice, sums)) return;
    for (int64_t first = k + kPieceIds;; first += kLanes * kPieceIds) {
      const Terms<Shape, Key> more = pieces_at(first, key);
      add_terms<kAhead>(pieces, more, slice, sums);
      if (more.count < kLanes) return;
    }
  }
};

// An item is a line of the sums of pieces: of the piece that begins in its kPieceIds places, if there is one.
template <typename Key, typename Shape>
struct SumPieces {
  static constexpr int kLanes = Shape::kLanes, kBlocksAtOnce = Shape::kUnits > 2 ? 4 : 7;

  SortedGrads<Key, Shape> grads;

  TORCHREC_DYN_BOTH void operator()(int64_t line) const {
    const SortedIds<Key>& sorted = grads.sorted;
    const UpdatedIds& ids = sorted.ids;
    const int64_t from = (line + 1) * kPieceIds;
    const Key key = sorted.keys[from];
    if (ids.wrong->any != 0 || key == static_cast<Key>(ids.absent) || sorted.begins_row(from)) return;
    const int64_t past = (from - sorted.begin_of(from)) % kPieceIds;
    const int64_t begin = past == 0 ? from : from + kPieceIds - past;
    if (begin >= ids.count || sorted.keys[begin] != key) return;
    float* const piece = grads.pieces + grads.place_of_piece(begin);
    Slice<Shape> slice{0, static_cast<uint32_t>(ids.tables[grads.table_of_key(key)].columns)};
    for (; slice.first < slice.columns; slice.first += Shape::kColumns) {
      TileColumns<Shape> sums;
      grads.template sum_piece<4>(begin, key, slice, sums);
      simt::each_lane<kLanes>([&](int lane) { store_lane(sums[lane].numbers, slice, lane, piece); });
    }
  }
};

// The rows of a table, or one of their states.
template <typename T>
struct TileRows {
  T* only;           // null: rows are in several blocks
  T* const* blocks;  // null: there is no such state
  uint32_t shift;
  uint32_t columns;

  TORCHREC_DYN_BOTH T* row(uint32_t index) const {
    if (only != nullptr) return only + wide_product(index, columns);
    return blocks[index >> shift] + wide_product(index & ((1u << shift) - 1), columns);
  }
};

// What a tile must know of a table before it can read a row; read at once.
template <typename T>
struct TableHead {
  T* weights;        // of the first row; null: rows are in several blocks
  float* row_state;  // of the first row, if the rule has a row-wise state; null: states are in several blocks
  uint64_t first_key;
  uint32_t columns;
  float grad_scale;
};

// A table of an update (UpdatedTable) as tiles read it.
template <typename T>
struct alignas(Unit16) TileTable {
  TableHead<T> head;
  TileRows<T> weights;
  TileRows<float> row_state;  // the state of one column
  TileRows<float> states[kMostStates];
  BiasCorrection correction;
  Stream stream;
  MarkBits marks;

  // Two loads. The fields alone would be read where they are used, one after the other.
  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE static TableHead<T> head_of(const TileTable* table) {
    static_assert(sizeof(TableHead<T>) == 2 * sizeof(Unit16));
    const auto* from = reinterpret_cast<const Unit16*>(table);
    const Unit16 units[2] = {from[0], from[1]};
    TableHead<T> head;
    std::memcpy(&head, units, sizeof head);
    return head;
  }
};

// A row of a table: its weights, and its row-wise state, if the rule has one.
template <typename T>
struct UpdatedRow {
  const TileTable<T>& table;
  uint32_t number;
  T* weights;
  float* state;
};

// What tiles do with rows: they update them by a common rule, or by any rule; they look whether an update would be
// finite, and write the divisors of all rows; or they find the ratios of all rows. Only updates write rows. The kernels
// of common rules have no code for others: with it nvcc would not keep the reads of a row together.
enum class Visit { kUpdate, kUpdateByAny, kTry, kMeasure };

// What a tile finds out of a row.
template <typename Shape, Visit kVisit>
struct Verdict {};

// The sums that decide the ratio.
template <typename Shape>
struct Verdict<Shape, Visit::kMeasure> {
  SumOfSquares<Shape> measured, weights;
};

// Whether a lane has a number that is not finite.
template <typename Shape>
struct Verdict<Shape, Visit::kTry> {
  simt::PerLane<bool, Shape::kLanes> is_wrong;

  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE Verdict() {
    simt::each_lane<Shape::kLanes>([&](int lane) { is_wrong[lane] = false; });
  }
  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE void look(int lane, float number) {
    is_wrong[lane] = is_wrong[lane] | !is_finite(number);
  }
  // Looks at the columns that the row has.
  template <typename T>
  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE void look(int lane, const T (&numbers)[Shape::kLaneColumns],
                                                  const Slice<Shape>& slice) {
    for (int u = 0; u < Shape::kUnits; ++u)
      for (int c = 0; c < kUnitColumns; ++c)
        if (c < slice.left(lane, u)) look(lane, to_float(numbers[u * kUnitColumns + c]));
  }
};

#if defined(__CUDA_ARCH__)
constexpr int kComputeCapability = __CUDA_ARCH__ / 10;
#else
constexpr int kComputeCapability = 0;
#endif

// The most blocks of UpdateRows for which nvcc 13.0 spills no register.
template <typename T, typename Shape>
constexpr int blocks_of_update() {
  const int most = Shape::kUnits > 2 ? 4 : Shape::kHasSlices ? 5 : 6;
  return most - (sizeof(T) == 2 || kComputeCapability >= 100);
}

// An item is a place of the sorted ids where a row begins.
template <typename T, typename Key, typename Shape, Visit kVisit>
struct UpdateRows {
  static constexpr int kLanes = Shape::kLanes, kBlocksAtOnce = blocks_of_update<T, Shape>();
  static constexpr int kAhead = Shape::kUnits > 1 ? 2 : 4;  // more would cost registers, hence rows at once
  static constexpr int kStates = kVisit == Visit::kUpdate ? kMostCommonStates : kMostStates;
  using Columns = TileColumns<Shape>;
  using Looked = Verdict<Shape, kVisit>;

  SortedGrads<Key, Shape> grads;
  const TileTable<T>* tables;
  UpdateRule rule;
  RuleFacts facts;     // of the rule
  bool is_rowwise;     // one of its states is kRow
  bool has_marks;      // a table keeps marks
  const int64_t* ids;  // for the draws of rounding; the values of keys are positions then
  // By the place where a row begins the divisor of its sum: its distinct senders. 0: the row stays as it was.
  const int64_t* divisors;  // null: 1 for all rows
  int64_t* tried;           // divisors that a trial writes
  float* ratios;            // by the same places; null: 1 for all rows. Measuring writes them

  TORCHREC_DYN_BOTH bool is_item(int64_t k) const {
    const UpdatedIds& batch = grads.sorted.ids;
    const Key* const at = grads.sorted.keys + k;
    const int64_t any = batch.wrong->any;
    const Key key = at[0], before = at[k > 0 ? -1 : 0];
    return (any == 0) & (key != static_cast<Key>(batch.absent)) & ((k == 0) | (before != key));
  }

  TORCHREC_DYN_BOTH void operator()(int64_t k) const {
    const UpdatedIds& batch = grads.sorted.ids;
    const int64_t past = batch.count - 1 - k;  // places behind this
    const Key* const at = grads.sorted.keys + k;
    const Key key = at[0], next = at[past > 0 ? 1 : 0];
    const ValueOf<Key> value = grads.sorted.values[k];
    const int t = grads.table_of_key(key);
    const bool is_alone = (next != key) | (past == 0);
    const TileTable<T>& table = tables[t];
    const TableHead<T> head = TileTable<T>::head_of(&table);
    const auto number = static_cast<uint32_t>(key - static_cast<Key>(head.first_key));
    UpdatedRow<T> row{table, number, nullptr, nullptr};
    if (head.weights != nullptr && head.row_state != nullptr) {
      row.weights = head.weights + wide_product(number, head.columns);
      row.state = head.row_state + number;
    } else {
      row.weights = table.weights.row(number);
      if (is_rowwise) row.state = table.row_state.row(number);
    }
    if constexpr (kVisit == Visit::kTry)
      if (batch.tables[t].nonfinite == nullptr) return write_tried(k, false);
    float scale = head.grad_scale;
    if (divisors != nullptr) {
      if (kVisit != Visit::kTry && divisors[k] == 0) return;
      scale /= static_cast<float>(divisors[k]);
    }
    const Slice<Shape> slice{0, head.columns};
    const RowIds own{k, key, value, is_alone};
    Looked looked;
    if (!Shape::kHasSlices || slice.columns <= Shape::kColumns)
      update_at_once(row, own, slice, scale, looked);
    else if constexpr (Shape::kHasSlices)
      update_by_slices(row, own, slice, scale, looked);
    if constexpr (kVisit == Visit::kTry)
      judge(batch.tables[t], k, looked);
    else if constexpr (kVisit == Visit::kMeasure)
      write_ratio(k, looked);
    else if (has_marks)
      mark(table, number);
  }

  // The ids of a row.
  struct RowIds {
    int64_t k;  // place of the first
    Key key;
    ValueOf<Key> value;  // of the first
    bool is_alone;       // there is one
  };

  // The weights and the state are read before the gradients, whose places take longer to know.
  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE void update_at_once(const UpdatedRow<T>& row, const RowIds& own,
                                                            const Slice<Shape>& slice, float scale,
                                                            Looked& looked) const {
    Columns weights, sums;
    simt::each_lane<kLanes>([&](int lane) { load_lane(row.weights, slice, lane, weights[lane].numbers); });
    const float state = is_rowwise ? *row.state : 0.0f;
    sum(own, scale, slice, sums);
    float square = 0.0f;
    if (is_rowwise) {
      SumOfSquares<Shape> squares;
      add_squares(sums, weights, slice, squares);
      square = squares.total() / static_cast<float>(slice.columns);
    }
    update(row, own, slice, sums, weights, square, state, looked);
  }

  // The gradients of a slice are summed twice where the first sum is needed for the square alone.
  TORCHREC_DYN_BOTH void update_by_slices(const UpdatedRow<T>& row, const RowIds& own, Slice<Shape> slice, float scale,
                                          Looked& looked) const {
    const float state = is_rowwise ? *row.state : 0.0f;
    float square = 0.0f;
    SumOfSquares<Shape> squares;
    for (int pass = is_rowwise ? 0 : 1; pass < 2; ++pass) {
      for (slice.first = 0; slice.first < slice.columns; slice.first += Shape::kColumns) {
        Columns weights, sums;
        simt::each_lane<kLanes>([&](int lane) { load_lane(row.weights, slice, lane, weights[lane].numbers); });
        sum(own, scale, slice, sums);
        if (pass == 0)
          add_squares(sums, weights, slice, squares);
        else
          update(row, own, slice, sums, weights, square, state, looked);
      }
      if (pass == 0) square = squares.total() / static_cast<float>(slice.columns);
    }
  }

  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE void sum(const RowIds& own, float scale, const Slice<Shape>& slice,
                                                 Columns& sums) const {
    if (own.is_alone)
      grads.sum_one(own.value, slice, sums);
    else
      grads.template sum_row<kAhead>(own.k, own.key, slice, sums);
    simt::each_lane<kLanes>([&](int lane) {
      for (float& number : sums[lane].numbers) number *= scale;
    });
  }

  // As mean_square, before its last sum.
  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE void add_squares(const Columns& sums, const Columns& weights,
                                                         const Slice<Shape>& slice,
                                                         SumOfSquares<Shape>& squares) const {
    if (!rule.square_reads_weights()) return squares.add(sums, slice);
    Columns values;
    simt::each_lane<kLanes>([&](int lane) {
      for (int c = 0; c < Shape::kLaneColumns; ++c)
        values[lane].numbers[c] = sums[lane].numbers[c] + rule.square_decay() * weights[lane].numbers[c];
    });
    squares.add(values, slice);
  }

  // Each lane updates its columns as if they were a row: update_row treats each column alone. `state`: of the row,
  // before the update.
  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE void update(const UpdatedRow<T>& row, const RowIds& own,
                                                    const Slice<Shape>& slice, const Columns& sums,
                                                    const Columns& weights, float square, float state,
                                                    Looked& looked) const {
    Columns states[kStates];
    simt::each_lane<kLanes>([&](int lane) {
      for (int s = 0; s < kStates; ++s) {
        states[s][lane].numbers[0] = state;
        if (facts.states[s] == StateWidth::kColumns)
          load_lane(row.table.states[s].row(row.number), slice, lane, states[s][lane].numbers);
      }
    });
    if constexpr (kVisit == Visit::kMeasure) {
      Columns measured;
      simt::each_lane<kLanes>([&](int lane) {
        const LaneStates own = states_of(states, lane);
        measure_columns(rule, row.table.correction, square, sums[lane].numbers, weights[lane].numbers, own.places,
                        measured[lane].numbers, Shape::kLaneColumns);
      });
      looked.measured.add(measured, slice);
      looked.weights.add(weights, slice);
      return;
    }
    simt::sync_lanes<kLanes>();  // lanes without columns have read those of others, and all lanes the state of the row
    simt::each_lane<kLanes>([&](int lane) {
      LaneColumns<Shape> updated = weights[lane];
      if constexpr (kVisit == Visit::kUpdate)
        update_common_row(rule, row.table.correction, square, sums[lane].numbers, updated.numbers,
                          states[0][lane].numbers, states[1][lane].numbers, Shape::kLaneColumns);
      else
        update_row(rule, row.table.correction, square, ratios == nullptr ? 1.0f : ratios[own.k], sums[lane].numbers,
                   updated.numbers, states_of(states, lane).places, Shape::kLaneColumns);
      with_stored(row, own, updated.numbers, slice, lane, [&](const auto& numbers) {
        if constexpr (kVisit == Visit::kTry)
          looked.look(lane, numbers, slice);
        else
          store_lane(numbers, slice, lane, row.weights);
      });
      for (int s = 0; s < kStates; ++s) {
        const auto& numbers = states[s][lane].numbers;
        if constexpr (kVisit == Visit::kTry) {
          if (facts.states[s] == StateWidth::kRow) looked.look(lane, numbers[0]);
          if (facts.states[s] == StateWidth::kColumns) looked.look(lane, numbers, slice);
        } else {
          if (facts.states[s] == StateWidth::kRow && lane == 0 && slice.first == 0) *row.state = numbers[0];
          if (facts.states[s] == StateWidth::kColumns)
            store_lane(numbers, slice, lane, row.table.states[s].row(row.number));
        }
      }
    });
  }

  // Where the states of a lane's columns are.
  struct LaneStates {
    float* places[kStates];
  };
  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE static LaneStates states_of(Columns (&states)[kStates], int lane) {
    LaneStates of_lane;
    for (int s = 0; s < kStates; ++s) of_lane.places[s] = states[s][lane].numbers;
    return of_lane;
  }

  // Calls use(numbers) with the weights of a lane as the row stores them.
  template <typename Use>
  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE void with_stored(const UpdatedRow<T>& row, const RowIds& own,
                                                         const float (&from)[Shape::kLaneColumns],
                                                         const Slice<Shape>& slice, int lane, const Use& use) const {
    if constexpr (sizeof(T) == sizeof(float)) {
      use(from);
    } else {
      T numbers[Shape::kLaneColumns];
      round(row, own, from, slice, lane, numbers);
      use(numbers);
    }
  }

  // A word has the draws of four columns.
  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE void round(const UpdatedRow<T>& row, const RowIds& own,
                                                   const float (&from)[Shape::kLaneColumns], const Slice<Shape>& slice,
                                                   int lane, T (&numbers)[Shape::kLaneColumns]) const {
    const Stream& stream = row.table.stream;
    const uint64_t draws = draw_state(stream.rounding_key, stream.step, ids[own.value]);
    for (int u = 0; u < Shape::kUnits; ++u) {
      const int64_t first = stream.first_column + slice.column(lane, u);
      uint64_t word = draw_word(draws, first / kDrawsPerWord);
      for (int c = 0; c < kUnitColumns; ++c) {
        const int64_t past = (first + c) % kDrawsPerWord;
        if (c > 0 && past == 0) word = draw_word(draws, (first + c) / kDrawsPerWord);
        store_stochastic(from[u * kUnitColumns + c], static_cast<uint16_t>(word >> (16 * past)),
                         &numbers[u * kUnitColumns + c]);
      }
    }
  }

  // The end of the trial of a row.
  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE void judge(const KeyedTable& table, int64_t k, const Looked& looked) const {
    const bool is_refused = simt::ballot_count(looked.is_wrong) > 0;
    write_tried(k, is_refused);
    simt::each_lane<kLanes>([&](int lane) {
      if (lane != 0 || !is_refused) return;
      simt::atomic_add(table.nonfinite, 1);
      if (table.on_nonfinite == OnNonfinite::kError) simt::atomic_add(&grads.sorted.ids.wrong->nonfinite, 1);
    });
  }

  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE void write_ratio(int64_t k, Looked& looked) const {
    const float measured = looked.measured.total(), weights = looked.weights.total();
    simt::each_lane<kLanes>([&](int lane) {
      if (lane == 0) ratios[k] = ratio_of(rule, measured, weights);
    });
  }

  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE void write_tried(int64_t k, bool is_refused) const {
    const int64_t divisor = divisors == nullptr ? 1 : divisors[k];
    simt::each_lane<kLanes>([&](int lane) {
      if (lane == 0) tried[k] = is_refused ? 0 : divisor;
    });
  }

  TORCHREC_DYN_BOTH static void mark(const TileTable<T>& table, uint32_t row) {
    if (table.marks.capacity == 0) return;
    uint8_t* const byte = table.marks.byte(row);
    simt::each_lane<kLanes>([&](int lane) {
      if (lane == 0 && (simt::load(byte) & mark_of(row)) == 0) simt::atomic_or(byte, mark_of(row));
    });
  }
};

}  // namespace torchrec_dyn
