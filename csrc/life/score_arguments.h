// How the ops take the scores of one table: a list of blocks, checked and read as words.
#pragma once

#include <cstdint>
#include <vector>

#include "life/scores.h"
#include "storage/blocks.h"

namespace torchrec_dyn {

// Owns the list of pointers that `view` reads.
class ScoreTable {
 public:
  ScoreTable(const char* op, const std::vector<Tensor>& scores, const TableLayout& table) {
    const RowBlocks<int64_t> rows = row_blocks<int64_t>(op, "scores", scores, table, 1);
    // An int64 may be read and written as the unsigned word that it is.
    for (int64_t* block : rows.blocks) words_.push_back(reinterpret_cast<uint64_t*>(block));
    shift_ = table.shift;
  }

  static ScoreTable alone(const char* op, const std::vector<Tensor>& scores, int64_t shift) {
    check_row_shape(op, shift, 1);
    return {op, scores, {0, static_cast<int64_t>(scores.size()), shift, 1}};
  }

  ScoreBlocks view() const { return {words_.data(), shift_, static_cast<int64_t>(words_.size()) << shift_}; }

 private:
  std::vector<uint64_t*> words_;
  int64_t shift_;
};

}  // namespace torchrec_dyn
