// The marks of rows on a device: row_marks_cpu.cpp for CUDA.
#include <vector>

#include "device_call.h"
#include "kernel.h"
#include "storage/row_marks_arguments.h"
#include "storage/row_marks_kernels.h"
#include "storage/table_words_arguments.h"

namespace torchrec_dyn {
namespace {

void mark_rows_(const Tensor& rows, const Tensor& table_offsets, std::vector<Tensor> marks, const Tensor& layout,
                const Tensor& versions) {
  const char* op = "mark_rows_";
  const auto layouts = read_word_layout(op, rows, table_offsets, marks, layout, "versions", versions, kDevice);
  const auto count = static_cast<int64_t>(layouts.size());
  const int64_t* row = const_data<int64_t>(rows);
  const int64_t* offset = const_data<int64_t>(table_offsets);
  const int64_t* version = const_data<int64_t>(versions);
  for (int64_t t = 0; t < count; ++t) check_version(version[t]);
  BlockList<int32_t> blocks(op, "marks", marks, rows.device());
  const auto words = read_word_tables(blocks, layouts, offset, version);
  SeparateMemory().writes(marks).reads(rows).reads(table_offsets).reads(versions).check(op);
  if (rows.numel() == 0) return;
  DeviceCall call(rows);
  const MarkTables tables = send_word_tables(call, blocks, words);
  auto* first_bad = call.zeros<int64_t>(1);
  simt::launch(call.stream(), rows.numel(), CheckMarkedRows{row, rows.numel(), tables, first_bad});
  simt::launch(call.stream(), rows.numel(),
               MarkRows{row, rows.numel(), tables, first_bad, call.errors(raise_marked_error)});
  call.finish();
}

}  // namespace

TORCHREC_DYN_DEVICE_KERNELS(m) { m.impl(TORCHREC_DYN_KERNEL("mark_rows_", &mark_rows_)); }

}  // namespace torchrec_dyn
