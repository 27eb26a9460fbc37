// The arguments of add_rows_, remove_rows_ and commit_step_, checked for every device.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "checks.h"
#include "lookup/fill_new.h"
#include "lookup/prepared_tables.h"
#include "lookup/table_scores_arguments.h"
#include "storage/id_map_arguments.h"
#include "struct_kernel.h"

namespace torchrec_dyn {

// Prepared tables without rows, the counters of waiting ids, have maps and scores only.
inline bool has_rows(const PreparedTables& tables) {
  for (const TableLayout& table : tables.layout)
    if (table.blocks > 0) return true;
  return false;
}

// The number of rows that a table has room for; beside tables with rows, a table without blocks has none.
inline int64_t capacity_of(const PreparedTables& tables, size_t t) {
  const int64_t rows = tables.layout[t].capacity();
  const int64_t scores = t < tables.scores.size() ? tables.scores[t].capacity : 0;
  if (scores == 0) return rows;
  return rows == 0 && !has_rows(tables) ? scores : lesser_of(rows, scores);
}

inline bool has_scores(const PreparedTables& tables, size_t t) {
  return t < tables.scores.size() && tables.scores[t].capacity > 0;
}

inline void check_maps(const char* op, const PreparedTables& tables) {
  check_size(op, "the number of maps", static_cast<int64_t>(tables.count()), static_cast<int64_t>(tables.maps.size()));
}

// The ids of a call that get rows; their ids and the reused rows are on the device.
struct AddedRows {
  static constexpr const char* kOp = "add_rows_";

  AddedRows(const char* op, ArgumentReader& arguments) : op(op), arguments(arguments) {}

  const char* op;
  ArgumentReader& arguments;

  Tensor new_rows = arguments.read<Tensor>();
  Tensor new_ids = arguments.read<Tensor>();
  std::vector<int64_t> offsets = arguments.read<std::vector<int64_t>>();
  std::vector<int64_t> first_rows = arguments.read<std::vector<int64_t>>();
  Tensor reused = arguments.read<Tensor>();
  std::vector<int64_t> reused_offsets = arguments.read<std::vector<int64_t>>();
  std::vector<int64_t> steps = arguments.read<std::vector<int64_t>>();
  std::optional<Tensor> counts = arguments.read<std::optional<Tensor>>();
  std::optional<Tensor> rows = arguments.read<std::optional<Tensor>>();
  std::optional<Tensor> new_index = arguments.read<std::optional<Tensor>>();
  std::optional<Tensor> places = arguments.read<std::optional<Tensor>>();
  std::optional<Tensor> initial_places = arguments.read<std::optional<Tensor>>();

  const Tensor& like() const { return new_ids; }
  const int64_t* first_counts() const { return const_data<int64_t>(counts); }
  // Where the initial rows of the new ids are written.
  const int64_t* initial_rows() const { return const_data<int64_t>(initial_places ? *initial_places : new_rows); }
  int64_t count(size_t t) const { return offsets[t + 1] - offsets[t]; }
  int64_t count_again(size_t t) const { return reused_offsets[t + 1] - reused_offsets[t]; }

  FillNew fill_new(const int64_t* new_row) const {
    return {const_data<int64_t>(*new_index), const_data<int64_t>(places), new_row, new_ids.numel(),
            mutable_data<int64_t>(*rows)};
  }

  void check(const PreparedTables& tables, SeparateMemory& memory) const {
    const auto size = static_cast<int64_t>(tables.count());
    check_maps(op, tables);
    if (has_rows(tables))
      check_size(op, "the number of initial rows", size, static_cast<int64_t>(tables.initial.size()));
    check_tensor(op, "new_ids", new_ids, ScalarType::Long, tables.device);
    check_numbers(op, "new_rows", new_rows, ScalarType::Long, new_ids.numel(), tables.device);
    check_tensor(op, "reused", reused, ScalarType::Long, tables.device);
    check_table_offsets(op, offsets, size, new_ids.numel());
    check_table_offsets(op, reused_offsets, size, reused.numel());
    for (const std::vector<int64_t>* numbers : {&first_rows, &steps})
      check_size(op, "the number of first_rows and steps", size, static_cast<int64_t>(numbers->size()));
    check_numbers(op, "counts", counts, ScalarType::Long, new_ids.numel(), tables.device);
    for (const auto& [name, numbers] : {std::pair{"places", places}, std::pair{"initial_places", initial_places}})
      check_numbers(op, name, numbers, ScalarType::Long, new_ids.numel(), tables.device);
    TORCHREC_DYN_CHECK(rows.has_value() == new_index.has_value(), op,
                       ": expected both rows and new_index, or neither, got one of them.");
    if (rows) {
      check_tensor(op, "rows", *rows, ScalarType::Long, tables.device);
      check_numbers(op, "new_index", new_index, ScalarType::Long, rows->numel(), tables.device);
    }
    for (size_t t = 0; t < tables.count(); ++t) {
      const int64_t fresh = count(t) - count_again(t), first = first_rows[t];
      const int64_t capacity = capacity_of(tables, t);
      TORCHREC_DYN_CHECK(fresh >= 0 && first >= 0 && (fresh == 0 || first <= capacity - fresh), op,
                         ": expected room for the new rows of each table, got ", fresh, " rows from ", first, " on of ",
                         capacity, ". Reserve them first.");
      TORCHREC_DYN_CHECK(is_last_seen(steps[t]) && steps[t] >= 0, op, ": expected steps in [0, 2^32 - 1), got ",
                         steps[t], ".");
    }
    if (rows) memory.writes(*rows);
    memory.writes(new_rows).reads(new_ids, reused, counts, new_index, places, initial_places);
  }
};

inline void check_new_row(const char* op, bool is_inside, int64_t row, int64_t capacity) {
  TORCHREC_DYN_CHECK(is_inside, op, ": expected rows in [0, ", capacity, "), got ", row, ".");
}

// The errors of kernels; those of commit_step_ have the name of the op that does the same alone.
inline void raise_new_row_error(const int64_t* words) { check_new_row("add_rows_", false, words[0], words[1]); }

// The error of an id that was not inserted.
inline void raise_added_id_error(const int64_t* words) {
  check_inserted_row("add_rows_", words[0]);
  check_inserted("add_rows_", false);
}

// The ids of a call that lose their rows.
struct RemovedRows {
  static constexpr const char* kOp = "remove_rows_";

  RemovedRows(const char* op, ArgumentReader& arguments) : op(op), arguments(arguments) {}

  const char* op;
  ArgumentReader& arguments;

  Tensor ids = arguments.read<Tensor>();
  Tensor rows = arguments.read<Tensor>();
  std::vector<int64_t> offsets = arguments.read<std::vector<int64_t>>();

  const Tensor& like() const { return ids; }

  void check(const PreparedTables& tables, SeparateMemory& memory) const {
    check_maps(op, tables);
    check_tensor(op, "ids", ids, ScalarType::Long, tables.device);
    check_numbers(op, "rows", rows, ScalarType::Long, ids.numel(), tables.device);
    check_table_offsets(op, offsets, static_cast<int64_t>(tables.count()), ids.numel());
    memory.reads(ids, rows);
  }
};

// What a step does to tables, or to the counters of their waiting ids.
struct StepOfRows {
  explicit StepOfRows(ArgumentReader& arguments) : arguments(arguments) {}

  ArgumentReader& arguments;

  RemovedRows removed{"commit_step_", arguments};
  TouchedBatch seen{"commit_step_", arguments};
  AddedRows added{"commit_step_", arguments};

  void check(const PreparedTables& tables, SeparateMemory& memory) const {
    removed.check(tables, memory);
    seen.check(tables, memory, added.rows);
    added.check(tables, memory);
  }
};

struct CommitStepCall {
  static constexpr const char* kOp = "commit_step_";

  ArgumentReader arguments;

  StepOfRows rows{arguments};
  Handles::Shared tables = Handles::all().get(kOp, arguments.read<Tensor>());
  StepOfRows waiting{arguments};
  Tensor handle = arguments.read<Tensor>();
  Handles::Shared counters = handle.numel() == 0 ? nullptr : Handles::all().get(kOp, handle);

  void check() const {
    SeparateMemory memory;
    rows.check(*tables, memory);
    if (counters) waiting.check(*counters, memory);
    memory.check(kOp, &tables->written);
    if (counters) memory.check(kOp, &counters->written);
  }
};

inline void raise_removed_row_error(const int64_t* words) { check_new_row("remove_rows_", false, words[0], words[1]); }

}  // namespace torchrec_dyn
