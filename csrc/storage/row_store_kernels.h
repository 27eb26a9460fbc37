// The kernels of single rows (simt.h): initial rows, reads and writes by row.
#pragma once

#include <cstdint>

#include "device_errors.h"
#include "simt.h"
#include "slot_hash.h"
#include "storage/blocks.h"
#include "storage/initial_rows.h"
#include "storage/row_types.h"
#include "storage/row_units.h"

namespace torchrec_dyn {

// The rows of a call, that must be in [lowest, end).
struct GivenRows {
  const int64_t* rows;
  int64_t n;
  int64_t lowest;
  int64_t end;
  int64_t* left;      // 0, or n - position of the first row outside
  const char* op;     // in the memory of the host
  ErrorReport error;  // op, row, lowest, end

  // True if a row is outside; thread 0 reports it. For launches after FindRowOutside.
  TORCHREC_DYN_BOTH bool has_outside(int64_t i) const {
    if (*left == 0) return false;
    if (i == 0) error.report(reinterpret_cast<int64_t>(op), rows[n - *left], lowest, end);
    return true;
  }
};

struct FindRowOutside {
  GivenRows given;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const int64_t row = given.rows[i];
    if (row < given.lowest || row >= given.end) simt::atomic_max(given.left, given.n - i);
  }
};

// One thread for the columns of a row that share a block of Philox: four, less at the ends of a column shard.
constexpr int64_t kThreadColumns = kUnitColumns;

template <typename T>
struct InitRows {
  const int64_t* ids;
  GivenRows given;
  RowBlocks<T> table;
  InitialRows initial;
  uint64_t key;
  int64_t first_column;
  Division blocks;  // of Philox in a row
  bool is_whole;    // every thread is four columns, at a multiple of their size: one store

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    if (given.has_outside(i)) return;
    const Division::Parts parts = blocks.split(i);
    const int64_t block = first_column / kThreadColumns + parts.remainder;
    Philox4 random{};
    if (initial.kind != InitialKind::kConstant)
      random = random_words(key, ids[parts.quotient], static_cast<uint32_t>(block), 0);
    T numbers[kThreadColumns];
    for (int c = 0; c < kThreadColumns; ++c) store_nearest(initial_number(initial, random.words[c]), &numbers[c]);
    T* row = table.row(given.rows[parts.quotient]);
    const int64_t begin = block * kThreadColumns - first_column;  // may be less than 0
    if (is_whole) return store_unit_of(numbers, row + begin);
    for (int c = 0; c < kThreadColumns; ++c)
      if (begin + c >= 0 && begin + c < table.columns) row[begin + c] = numbers[c];
  }
};

// Rows are copied in units of 16, 4 or 2 bytes, whatever their type; `columns` of a table counts units here. One
// thread for each unit of the result. All are zeros if a row is outside.
template <typename Unit>
struct GatherRows {
  GivenRows given;
  RowBlocks<Unit> table;
  Division units;  // of a row
  Unit* out;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const Division::Parts parts = units.split(i);
    const int64_t row = given.rows[parts.quotient];
    out[i] = given.has_outside(i) || row < 0 ? Unit{} : table.row(row)[parts.remainder];
  }
};

// The last position of each row of a call, as position + 1 in an open-addressing map; 0: an empty place. A place keeps
// its row once it is claimed, and other threads only raise the position in it. `size` is a multiple of kLineSlots and
// above the number of positions, so every search ends.
struct FindLastPositions {
  SlotHash hash;
  const int64_t* rows;
  int64_t* last;
  int64_t size;
  int64_t* places;  // of each position in `last`

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const int64_t row = rows[i];
    int64_t place = home_slot(hash(row), size);
    while (true) {
      int64_t seen = simt::load(&last[place]);
      if (seen == 0) seen = simt::atomic_cas(&last[place], 0, i + 1);
      if (seen == 0) break;
      if (rows[seen - 1] == row) {
        simt::atomic_max(&last[place], i + 1);
        break;
      }
      place = place + 1 < size ? place + 1 : 0;
    }
    places[i] = place;
  }
};

// One thread for each unit of the values.
template <typename Unit>
struct ScatterRows {
  GivenRows given;
  const int64_t* last;
  const int64_t* places;
  const Unit* values;
  RowBlocks<Unit> table;
  Division units;  // of a row

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    if (given.has_outside(i)) return;
    const Division::Parts parts = units.split(i);
    if (last[places[parts.quotient]] != parts.quotient + 1) return;
    table.row(given.rows[parts.quotient])[parts.remainder] = values[i];
  }
};

}  // namespace torchrec_dyn
