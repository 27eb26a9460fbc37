// The arguments of the ops on marks, checked for every device.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "checks.h"
#include "storage/blocks_arguments.h"
#include "struct_kernel.h"

namespace torchrec_dyn {

// `capacity`: of the table's marks.
inline void check_marked_rows(const char* op, bool are_below, int64_t capacity, int64_t table) {
  TORCHREC_DYN_CHECK(are_below, op, ": expected rows below ", capacity, ", the marks of table ", table,
                     ", got one above.");
}

inline void raise_marked_error(const int64_t* words) { check_marked_rows("mark_rows_", false, words[0], words[1]); }

struct MarkRowsCall {
  static constexpr const char* kOp = "mark_rows_";

  ArgumentReader arguments;

  Tensor rows = arguments.read<Tensor>();
  Tensor table_offsets = arguments.read<Tensor>();
  std::vector<Tensor> marks = arguments.read<std::vector<Tensor>>();
  Tensor layout = arguments.read<Tensor>();
  Tensor versions = arguments.read<Tensor>();

  // Checks all but the rows, and reads the tables with their versions. `blocks`: of the marks.
  std::vector<TableWords<int32_t>> read(BlockList<int32_t>& blocks, const Device& device) const {
    check_tensor(kOp, "rows", rows, ScalarType::Long, device);
    const std::vector<TableLayout> layouts = read_layout(kOp, layout, marks, true);
    const auto count = static_cast<int64_t>(layouts.size());
    check_table_offsets(kOp, table_offsets, count, rows.numel());
    check_numbers(kOp, "versions", versions, ScalarType::Long, count);
    const int64_t* offset = const_data<int64_t>(table_offsets);
    const int64_t* version = const_data<int64_t>(versions);
    std::vector<TableWords<int32_t>> tables;
    for (const TableLayout& table : layouts) {
      TORCHREC_DYN_CHECK(*version >= 0 && *version <= std::numeric_limits<int32_t>::max(), kOp,
                         ": expected versions in [0, 2^31), got ", *version, ".");
      tables.push_back({*offset++, blocks.words(table), *version++});
    }
    SeparateMemory().writes(marks).reads(rows).reads(table_offsets).reads(versions).check(kOp);
    return tables;
  }
};

}  // namespace torchrec_dyn
