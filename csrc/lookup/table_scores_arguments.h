// The arguments of the ops on scores of prepared tables, checked for every device.
#pragma once

#include <cstdint>
#include <optional>

#include "checks.h"
#include "life/scores.h"
#include "lookup/prepared_tables.h"
#include "struct_kernel.h"

namespace torchrec_dyn {

inline void check_times(int64_t times) {
  TORCHREC_DYN_CHECK(is_times(times), "touch_scores_: expected times in [1, 2^32), got ", times, ".");
}

inline void check_touched_rows(bool are_inside) {
  TORCHREC_DYN_CHECK(are_inside, "touch_scores_: expected rows in [-1, rows of the table's scores), got one outside.");
}

inline void raise_touch_error(const int64_t* words) {
  check_times(words[0]);
  check_touched_rows(false);
}

// Checks tables with scores, and rows of them.
inline void check_table_rows(const char* op, const PreparedTables& tables, const Tensor& rows, const Tensor& offsets) {
  const auto count = static_cast<int64_t>(tables.count());
  check_size(op, "the tables with scores", count, static_cast<int64_t>(tables.scores.size()));
  check_tensor(op, "rows", rows, ScalarType::Long, tables.device);
  check_table_offsets(op, offsets, count, rows.numel());
}

struct TouchCall {
  static constexpr const char* kOp = "touch_scores_";

  ArgumentReader arguments;

  Tensor rows = arguments.read<Tensor>();
  Tensor table_offsets = arguments.read<Tensor>();
  Tensor steps = arguments.read<Tensor>();
  std::optional<Tensor> times = arguments.read<std::optional<Tensor>>();
  Handles::Shared tables = Handles::all().get(kOp, arguments.read<Tensor>());

  void check() const {
    check_table_rows(kOp, *tables, rows, table_offsets);
    check_numbers(kOp, "steps", steps, ScalarType::Long, static_cast<int64_t>(tables->count()));
    for (size_t t = 0; t < tables->count(); ++t) {
      const int64_t step = const_data<int64_t>(steps)[t];
      TORCHREC_DYN_CHECK(step >= 0 && step < static_cast<int64_t>(kFreeLastSeen), kOp,
                         ": expected steps in [0, 2^32 - 1), got ", step, ".");
    }
    check_numbers(kOp, "times", times, ScalarType::Long, rows.numel(), rows.device());
    SeparateMemory().reads(rows, table_offsets, steps, times).check(kOp, &tables->written);
  }
};

struct ReadScoresCall {
  static constexpr const char* kOp = "read_scores";

  ArgumentReader arguments;

  Tensor rows = arguments.read<Tensor>();
  Tensor table_offsets = arguments.read<Tensor>();
  Handles::Shared tables = Handles::all().get(kOp, arguments.read<Tensor>());
};

struct WriteScoresCall {
  static constexpr const char* kOp = "write_scores_";

  ArgumentReader arguments;

  Tensor rows = arguments.read<Tensor>();
  Tensor table_offsets = arguments.read<Tensor>();
  Tensor last_seen = arguments.read<Tensor>();
  Tensor counts = arguments.read<Tensor>();
  Handles::Shared tables = Handles::all().get(kOp, arguments.read<Tensor>());

  void check() const {
    check_table_rows(kOp, *tables, rows, table_offsets);
    for (const Tensor& numbers : {last_seen, counts})
      check_numbers(kOp, "last_seen and counts", numbers, ScalarType::Long, rows.numel(), rows.device());
    SeparateMemory().reads(rows, table_offsets, last_seen, counts).check(kOp, &tables->written);
  }
};

inline void check_scored_row(const char* op, bool is_right, int64_t row, int64_t capacity) {
  TORCHREC_DYN_CHECK(is_right, op, ": expected rows in [-1, ", capacity,
                     ") with last_seen in [-1, 2^32 - 1) and counts in [0, 2^32), got row ", row, ".");
}

inline void raise_read_row_error(const int64_t* words) {
  check_scored_row(ReadScoresCall::kOp, false, words[0], words[1]);
}
inline void raise_written_row_error(const int64_t* words) {
  check_scored_row(WriteScoresCall::kOp, false, words[0], words[1]);
}

}  // namespace torchrec_dyn
