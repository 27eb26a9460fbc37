// The scores or the marks of several tables, as kernels read them (simt.h).
#pragma once

#include <cstdint>

#include "storage/blocks.h"
#include "storage/table_of.h"

namespace torchrec_dyn {

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
