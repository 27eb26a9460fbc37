// The arguments of the ops on scores of prepared tables, checked for every device.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "checks.h"
#include "life/scores.h"
#include "lookup/prepared_tables.h"
#include "struct_kernel.h"

namespace torchrec_dyn {

// What a call writes: made when all its arguments are checked and all its memory is taken.
using Write = std::function<void()>;

// A write at the end of its life, also after an error.
using LastWrite = std::shared_ptr<void>;

inline LastWrite last_write(Write write) {
  return {nullptr, [write = std::move(write)](void*) {
            try {
              write();
            } catch (...) {  // a lost device: the next call says so
            }
          }};
}

// The call of an op that reads its arguments, those of one part of commit_step_, and prepared tables.
template <typename Part>
struct CallOf {
  ArgumentReader arguments;

  Part part{Part::kOp, arguments};
  Handles::Shared tables = Handles::all().get(Part::kOp, arguments.read<Tensor>());

  void check() const {
    SeparateMemory memory;
    part.check(*tables, memory);
    memory.check(Part::kOp, &tables->written);
  }
};

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

// The rows of a batch, and the steps in which they are seen.
struct TouchedBatch {
  static constexpr const char* kOp = "touch_scores_";

  TouchedBatch(const char* op, ArgumentReader& arguments) : op(op), arguments(arguments) {}

  const char* op;
  ArgumentReader& arguments;

  Tensor rows = arguments.read<Tensor>();
  Tensor table_offsets = arguments.read<Tensor>();
  Tensor steps = arguments.read<Tensor>();
  std::optional<Tensor> times = arguments.read<std::optional<Tensor>>();

  const Tensor& like() const { return rows; }

  // `filled`: rows that the call writes afterwards, which may be the same.
  void check(const PreparedTables& tables, SeparateMemory& memory, const std::optional<Tensor>& filled = {}) const {
    check_table_rows(op, tables, rows, table_offsets);
    check_numbers(op, "steps", steps, ScalarType::Long, static_cast<int64_t>(tables.count()));
    for (size_t t = 0; t < tables.count(); ++t) {
      const int64_t step = const_data<int64_t>(steps)[t];
      TORCHREC_DYN_CHECK(step >= 0 && step < static_cast<int64_t>(kFreeLastSeen), op,
                         ": expected steps in [0, 2^32 - 1), got ", step, ".");
    }
    check_numbers(op, "times", times, ScalarType::Long, rows.numel(), rows.device());
    memory.reads(table_offsets, steps, times);
    if (!filled || filled->const_data_ptr() != rows.const_data_ptr()) memory.reads(rows);
  }
};

// Rows of a batch that are not chosen, whatever their scores; none if both are left out.
struct KeptRows {
  ArgumentReader& arguments;

  std::optional<Tensor> rows = arguments.read<std::optional<Tensor>>();
  std::optional<Tensor> offsets = arguments.read<std::optional<Tensor>>();

  void check(const char* op, const PreparedTables& tables) const {
    TORCHREC_DYN_CHECK(rows.has_value() == offsets.has_value(), op,
                       ": expected both kept and kept_offsets, or neither, got one of them.");
    if (rows) check_table_rows(op, tables, *rows, *offsets);
    if (rows) SeparateMemory().reads(rows, offsets).check(op, &tables.written);
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

// On the CPU: table_scores_cpu.cpp. Prepares touch_scores_.
Write prepare(const TouchedBatch& batch, const PreparedTables& tables);
// Gives kept rows of the tables `asked` the scores of free rows, which no search chooses, until the result is dropped.
LastWrite hide_scores(const KeptRows& kept, const PreparedTables& tables, const std::vector<int64_t>& asked);

template <typename Part>
void write_part(const CallOf<Part>& call) {
  call.check();
  prepare(call.part, *call.tables)();
}

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
