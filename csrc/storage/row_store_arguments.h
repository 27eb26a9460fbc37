// Checks of the arguments of the ops on single rows, for every device.
#pragma once

#include <cstdint>
#include <vector>

#include "storage/blocks_arguments.h"
#include "storage/initial_rows.h"

namespace torchrec_dyn {

// `own`: the six parameters of the table.
inline InitialRows initial_rows_of(const char* op, int64_t first_column, int64_t kind, const double* own) {
  TORCHREC_DYN_CHECK(first_column >= 0 && first_column < (int64_t{1} << 31), op,
                     ": expected first_column in [0, 2^31), got ", first_column, ".");
  TORCHREC_DYN_CHECK(kind >= 0 && kind <= 2, op, ": expected kind in [0, 2], got ", kind, ".");
  const InitialRows initial = {static_cast<InitialKind>(kind), own[0], own[1], own[2], own[3], own[4], own[5]};
  TORCHREC_DYN_CHECK(initial.kind != InitialKind::kNormal ||
                         (initial.low_probability >= 0.0 && initial.low_probability <= initial.high_probability &&
                          initial.high_probability <= 1.0),
                     op, ": expected probabilities 0 <= low <= high <= 1, got ", initial.low_probability, " and ",
                     initial.high_probability, ".");
  return initial;
}

inline void check_gathered_type(const std::vector<Tensor>& blocks, ScalarType dtype) {
  if (!blocks.empty())
    TORCHREC_DYN_CHECK(blocks.front().scalar_type() == dtype, "gather_rows: expected blocks of dtype ",
                       dtype_name(dtype), ", got ", dtype_name(blocks.front().scalar_type()), ".");
}

inline void check_scattered_size(const Tensor& rows, const Tensor& values, int64_t shift, int64_t columns) {
  check_row_shape("scatter_rows_", shift, columns);
  const bool has_values = values.numel() % columns == 0 && values.numel() / columns == rows.numel();
  TORCHREC_DYN_CHECK(has_values, "scatter_rows_: expected the elements of values = ", rows.numel(), " * ", columns,
                     ", got ", values.numel(), ".");
}

inline void check_row(const char* op, int64_t row, int64_t lowest, int64_t capacity) {
  TORCHREC_DYN_CHECK(row >= lowest && row < capacity, op, ": expected rows in [", lowest, ", ", capacity, "), got ",
                     row, ".");
}

inline void raise_row_error(const int64_t* words) {
  check_row(reinterpret_cast<const char*>(words[0]), words[1], words[2], words[3]);
}

}  // namespace torchrec_dyn
