// The arguments of touch_scores_, checked for every device.
#pragma once

#include <cstdint>
#include <optional>

#include "checks.h"
#include "life/scores.h"
#include "lookup/prepared_tables.h"
#include "struct_kernel.h"

namespace torchrec_dyn {

inline void check_step(int64_t step) {
  TORCHREC_DYN_CHECK(step >= 0 && step < static_cast<int64_t>(kFreeLastSeen),
                     "touch_scores_: expected steps in [0, 2^32 - 1), got ", step, ".");
}

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

struct TouchCall {
  static constexpr const char* kOp = "touch_scores_";

  ArgumentReader arguments;

  Tensor rows = arguments.read<Tensor>();
  Tensor table_offsets = arguments.read<Tensor>();
  Tensor steps = arguments.read<Tensor>();
  std::optional<Tensor> times = arguments.read<std::optional<Tensor>>();
  Handles::Shared tables = Handles::all().get(kOp, arguments.read<Tensor>());

  void check() const {
    const auto count = static_cast<int64_t>(tables->count());
    check_size(kOp, "the tables with scores", count, static_cast<int64_t>(tables->scores.size()));
    check_tensor(kOp, "rows", rows, ScalarType::Long, tables->device);
    check_table_offsets(kOp, table_offsets, count, rows.numel());
    check_tensor(kOp, "steps", steps, ScalarType::Long);
    check_size(kOp, "the number of steps", count, steps.numel());
    for (int64_t t = 0; t < count; ++t) check_step(const_data<int64_t>(steps)[t]);
    if (times) {
      check_tensor(kOp, "times", *times, ScalarType::Long, rows.device());
      check_size(kOp, "the number of times", rows.numel(), times->numel());
    }
    SeparateMemory().reads(rows).reads(table_offsets).reads(steps).reads(times).check(kOp, &tables->written);
  }
};

}  // namespace torchrec_dyn
