// The marks of rows on a device: row_marks_cpu.cpp for CUDA.
#include <vector>

#include "device_call.h"
#include "storage/row_marks_arguments.h"
#include "storage/row_marks_kernels.h"

namespace torchrec_dyn {
namespace {

void mark_rows_(const MarkRowsCall& given) {
  BlockList<int32_t> blocks(given.kOp, "marks", given.marks, given.rows.device());
  std::vector<TableWords<int32_t>> tables = given.read(blocks, kDevice);
  const int64_t n = given.rows.numel();
  if (n == 0) return;
  DeviceCall call(given.rows);
  int32_t* const* pointers = call.copy_of(blocks.pointers());
  for (TableWords<int32_t>& table : tables)
    table.words.blocks = pointers + (table.words.blocks - blocks.pointers().data());
  const MarkTables marks{call.copy_of(tables), static_cast<int64_t>(tables.size())};
  const int64_t* row = const_data<int64_t>(given.rows);
  auto* first_bad = call.zeros<int64_t>(1);
  simt::launch(call.stream(), n, CheckMarkedRows{row, n, marks, first_bad});
  simt::launch(call.stream(), n, MarkRows{row, n, marks, first_bad, call.errors(raise_marked_error)});
  call.finish();
}

}  // namespace

TORCHREC_DYN_DEVICE_KERNELS(m) { m.impl(TORCHREC_DYN_STRUCT_KERNEL("mark_rows_", &mark_rows_)); }

}  // namespace torchrec_dyn
