// The kernels of marks (simt.h): written by row, and read by version.
#pragma once

#include <cstdint>

#include "bits.h"
#include "device_errors.h"
#include "simt.h"
#include "storage/row_marks.h"
#include "storage/table_words.h"

namespace torchrec_dyn {

using MarkTables = WordTables<int32_t>;

struct CheckMarkedRows {
  const int64_t* rows;
  int64_t count;
  MarkTables tables;
  int64_t* first_bad;  // 0, or the position of the first row that is too high - count

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const int64_t row = rows[i];
    if (row < 0) return;
    const int64_t capacity = tables.of(i).words.capacity;
    if (capacity > 0 && row >= capacity) simt::atomic_min(first_bad, i - count);
  }
};

// As mark_rows: a mark is written only if it differs, so popular rows cost reads.
struct MarkRows {
  const int64_t* rows;
  int64_t count;
  MarkTables tables;
  const int64_t* first_bad;  // of CheckMarkedRows
  ErrorReport error;         // capacity, table

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    if (*first_bad != 0) {
      if (i == 0) report();
      return;
    }
    const int64_t row = rows[i];
    if (row < 0) return;
    const TableWords<int32_t>& table = tables.of(i);
    if (table.words.capacity == 0) return;
    const auto version = static_cast<int32_t>(table.now);
    int32_t* mark = table.words.word(row);
    if (simt::load(mark) != version) simt::store(mark, version);
  }

  TORCHREC_DYN_BOTH void report() const {
    const TableWords<int32_t>& table = tables.of(count + *first_bad);
    error.report(table.words.capacity, &table - tables.tables);
  }
};

// The marks that a thread reads are the bits of a word: the list is written from these words, so each mark is read
// once.
constexpr int64_t kMarkTurn = 32;

// The rows of one table by pieces of up to kMarkTurn rows. Each piece lies in one block.
struct MarkedRows {
  MarkBlocks marks;
  int64_t rows;
  int64_t piece;
  int64_t pieces;
  uint32_t* bits;   // [pieces]: bit k is the k-th row of the piece
  int64_t* places;  // [pieces + 1]: rows to list in each piece; then the sums of these
};

// Launched with pieces + 1 threads: the sums then end with the number of rows to list.
struct FlagMarked {
  MarkedRows found;
  int32_t since;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    uint32_t bits = 0;
    if (i < found.pieces) {
      const int64_t row = i * found.piece;
      const int64_t count = lesser_of(found.piece, found.rows - row);
      const int32_t* marks = found.marks.word(row);
      for (int64_t k = 0; k < count; ++k) bits |= static_cast<uint32_t>(simt::load(marks + k) >= since) << k;
      found.bits[i] = bits;
    }
    found.places[i] = count_bits(bits);
  }
};

struct ListMarked {
  MarkedRows found;
  int64_t* list;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    int64_t place = found.places[i];
    for (uint32_t bits = found.bits[i]; bits != 0; bits &= bits - 1) list[place++] = i * found.piece + lowest_bit(bits);
  }
};

}  // namespace torchrec_dyn
