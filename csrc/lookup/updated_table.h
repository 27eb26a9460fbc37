// A table of an update: the blocks of its rows, states and marks, and the numbers that all its rows share.
#pragma once

#include <cstdint>

#include "lookup/row_update.h"
#include "storage/blocks.h"
#include "storage/row_marks.h"

namespace torchrec_dyn {

// The arguments of stochastic rounding and bias correction: one line of `streams` [T, 3] int64.
struct Stream {
  uint64_t rounding_key;
  int64_t first_column;
  int64_t step;
};

template <typename T>
struct UpdatedTable {
  RowBlocks<T> weights;
  RowBlocks<float> states[kMostStates];  // without blocks: the rule has no such state
  MarkBits marks;                        // without blocks: the table keeps no marks
  Stream stream;
  BiasCorrection correction;
  float grad_scale;  // factor of a row's gradient sum
};

}  // namespace torchrec_dyn
