// The arguments of init_new_rows_, checked for every device.
#pragma once

#include <cstdint>

#include "checks.h"
#include "lookup/prepared_tables.h"

namespace torchrec_dyn {

// The new ids of a call, on the host; the ids and the reused rows are on the device.
struct NewIdsOfTables {
  Handles::Shared tables;
  const int64_t* offsets;         // [T + 1]
  const int64_t* first_rows;      // [T]
  const int64_t* reused_offsets;  // [T + 1]

  int64_t count(size_t t) const { return offsets[t + 1] - offsets[t]; }
};

inline NewIdsOfTables read_new_ids(const Tensor& new_rows, const Tensor& new_ids, const Tensor& new_offsets,
                                   const Tensor& first_rows, const Tensor& reused, const Tensor& reused_offsets,
                                   const Tensor& handle) {
  const char* op = "init_new_rows_";
  NewIdsOfTables read{};
  read.tables = Handles::all().get(op, handle);
  const PreparedTables& tables = *read.tables;
  const auto count = static_cast<int64_t>(tables.count());
  check_size(op, "the number of initial rows", count, static_cast<int64_t>(tables.initial.size()));
  check_tensor(op, "new_ids", new_ids, ScalarType::Long, tables.device);
  check_tensor(op, "new_rows", new_rows, ScalarType::Long, tables.device);
  check_size(op, "the number of new_rows", new_ids.numel(), new_rows.numel());
  check_tensor(op, "reused", reused, ScalarType::Long, tables.device);
  check_table_offsets(op, new_offsets, count, new_ids.numel());
  check_table_offsets(op, reused_offsets, count, reused.numel());
  check_tensor(op, "first_rows", first_rows, ScalarType::Long);
  check_size(op, "the number of first_rows", count, first_rows.numel());
  read.offsets = const_data<int64_t>(new_offsets);
  read.first_rows = const_data<int64_t>(first_rows);
  read.reused_offsets = const_data<int64_t>(reused_offsets);
  for (size_t t = 0; t < tables.count(); ++t) {
    const int64_t fresh = read.count(t) - (read.reused_offsets[t + 1] - read.reused_offsets[t]);
    const int64_t capacity = tables.layout[t].capacity(), first = read.first_rows[t];
    TORCHREC_DYN_CHECK(fresh >= 0 && first >= 0 && (fresh == 0 || first <= capacity - fresh), op,
                       ": expected room for the new rows of each table, got ", fresh, " rows from ", first, " on of ",
                       capacity, ". Reserve them first.");
  }
  SeparateMemory().writes(new_rows).reads(new_ids).reads(reused).check(op, &tables.written);
  return read;
}

}  // namespace torchrec_dyn
