// The marks of rows on a device: row_marks_cpu.cpp for CUDA.
#include <algorithm>
#include <limits>
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

Tensor changed_rows(std::vector<Tensor> marks, int64_t shift, int64_t rows, int64_t since) {
  const char* op = "changed_rows";
  BlockList<int32_t> blocks(op, "marks", marks, marks.empty() ? Device(kDevice) : marks.front().device());
  const MarkBlocks words = blocks.words(layout_of_one(op, marks, shift, 1));
  check_listed_rows(rows, words.capacity);
  if (marks.empty()) return new_device_tensor({0});
  DeviceCall call(marks.front());
  if (rows == 0 || since > std::numeric_limits<int32_t>::max()) return new_device_tensor({0});
  const auto least = static_cast<int32_t>(std::max<int64_t>(since, std::numeric_limits<int32_t>::min()));
  const int64_t piece = std::min(kMarkTurn, int64_t{1} << shift);
  const int64_t pieces = (rows + piece - 1) / piece;
  const MarkedRows found{
      send_words(call, blocks, words),       rows, piece, pieces, call.allocate_for<uint32_t>(pieces),
      call.allocate_for<int64_t>(pieces + 1)};
  simt::launch(call.stream(), pieces + 1, FlagMarked{found, least});
  simt::exclusive_sum(call.stream(), found.places, pieces + 1);
  Tensor listed = new_device_tensor({call.read(found.places + pieces)});  // a wait: the result has this length
  simt::launch(call.stream(), pieces, ListMarked{found, mutable_data<int64_t>(listed)});
  return listed;
}

}  // namespace

TORCHREC_DYN_DEVICE_KERNELS(m) {
  m.impl(TORCHREC_DYN_KERNEL("mark_rows_", &mark_rows_));
  m.impl(TORCHREC_DYN_KERNEL("changed_rows", &changed_rows));
}

}  // namespace torchrec_dyn
