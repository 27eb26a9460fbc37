// The arguments of content_sum.
#pragma once

#include <cstdint>

#include "checks.h"

namespace torchrec_dyn {

// Rows as the formula of storage/content_sum.h takes them.
struct SummedRows {
  int64_t rows;
  int64_t columns;  // an int64 column is two columns of the sum
  int64_t bytes;    // of a column: 2 or 4
  uint64_t first_column;
};

inline SummedRows check_summed(const Tensor& ids, const Tensor& values, int64_t first_column, const Device& device) {
  const char* op = "content_sum";
  check_tensor(op, "ids", ids, ScalarType::Long, device);
  const ScalarType type = values.scalar_type();
  TORCHREC_DYN_CHECK(
      type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16 || type == ScalarType::Long,
      op, ": expected values of dtype float32, float16, bfloat16 or int64, got ", dtype_name(type), ".");
  check_tensor(op, "values", values, type, ids.device());
  TORCHREC_DYN_CHECK(values.dim() == 2, op, ": expected values of shape [M, D], got ", values.dim(), " dimensions.");
  check_size(op, "the number of rows of values", ids.numel(), values.size(0));
  TORCHREC_DYN_CHECK(first_column >= 0 && first_column < (int64_t{1} << 31), op,
                     ": expected first_column in [0, 2^31), got ", first_column, ".");
  const auto bytes = static_cast<int64_t>(values.element_size()), halves = int64_t{bytes == 8 ? 2 : 1};
  return {ids.numel(), halves * values.size(1), bytes / halves, static_cast<uint64_t>(halves * first_column)};
}

}  // namespace torchrec_dyn
