// Rows are stored in blocks of 2^shift rows, so a table grows by appending a block, and no row ever moves. The last
// block of a table may have fewer rows: in an address range it grows in place (docs/dev/decisions/0028).
//
// An op over several tables takes one flat list of blocks and `layout` [T, 4] int64, one line for each table:
//   first block in the list, number of blocks, shift, columns of a row.
// The views below read lists of pointers that storage/blocks_arguments.h makes.
#pragma once

#include <cstdint>

#include "both_devices.h"
#include "storage/table_of.h"

namespace torchrec_dyn {

struct TableLayout {
  int64_t first_block;
  int64_t blocks;
  int64_t shift;
  int64_t columns;
  int64_t missing = 0;  // rows that the last block has less than 2^shift

  TORCHREC_DYN_BOTH int64_t capacity() const { return (blocks << shift) - missing; }
};

// The rows of one table. Without blocks its capacity is 0, and `row` must not be called.
template <typename T>
struct RowBlocks {
  T* const* blocks = nullptr;
  int64_t shift = 0;
  int64_t columns = 0;
  int64_t capacity = 0;

  TORCHREC_DYN_BOTH bool has(int64_t index) const {
    return static_cast<uint64_t>(index) < static_cast<uint64_t>(capacity);
  }
  TORCHREC_DYN_BOTH T* row(int64_t index) const {
    return blocks[index >> shift] + (index & ((int64_t{1} << shift) - 1)) * columns;
  }
};

// The rows of a table of one block, for kernels: no list of blocks stands between them and a row, and its address is
// one multiplication of 32-bit numbers.
template <typename T>
struct OneBlock {
  T* memory = nullptr;
  uint32_t row_bytes = 0;
  uint32_t last_row = 0;

  // Requires a table with blocks.
  TORCHREC_DYN_BOTH bool has(int64_t index) const { return static_cast<uint64_t>(index) <= last_row; }
  TORCHREC_DYN_BOTH T* row(int64_t index) const {
    const uint64_t bytes = wide_product(static_cast<uint32_t>(index), row_bytes);
    return reinterpret_cast<T*>(reinterpret_cast<char*>(memory) + bytes);
  }
};

// The one block of a table; no memory if it has another number of blocks, or its numbers have more than 32 bits.
template <typename T>
OneBlock<T> one_block(const RowBlocks<T>& table, int64_t blocks) {
  constexpr int64_t kMost = (int64_t{1} << 32) - 1;
  const int64_t row_bytes = table.columns * static_cast<int64_t>(sizeof(T));
  if (blocks != 1 || row_bytes > kMost || table.capacity - 1 > kMost) return {};
  return {table.blocks[0], static_cast<uint32_t>(row_bytes), static_cast<uint32_t>(table.capacity - 1)};
}

// One word for each row of one table: scores or marks.
template <typename Word>
struct WordBlocks {
  Word* const* blocks;
  int64_t shift;
  int64_t capacity;

  TORCHREC_DYN_BOTH Word* word(int64_t row) const { return blocks[row >> shift] + (row & ((int64_t{1} << shift) - 1)); }
  TORCHREC_DYN_BOTH bool holds(int64_t row) const {
    return static_cast<uint64_t>(row) < static_cast<uint64_t>(capacity);
  }
};

// The scores or the marks of several tables, as kernels read them.
template <typename Word>
struct TableWords {
  int64_t begin;           // where the rows of the table begin in the batch
  WordBlocks<Word> words;  // capacity 0: the table keeps no words
  int64_t now;             // the step or the version to write
};

template <typename Word>
struct WordTables {
  const TableWords<Word>* tables;
  int64_t count;

  // The table of position `i` of the batch.
  TORCHREC_DYN_BOTH const TableWords<Word>& of(int64_t i) const {
    return tables[table_of(i, count, [this](int64_t table) { return tables[table].begin; })];
  }
};

}  // namespace torchrec_dyn
