// The marks of rows on the CPU.
#include "storage/row_marks.h"

#include <algorithm>
#include <vector>

#include "checks.h"
#include "kernel.h"
#include "parallel.h"
#include "storage/blocks_arguments.h"
#include "storage/row_marks_arguments.h"

namespace torchrec_dyn {
namespace {

constexpr int64_t kGrain = 4096;

TORCHREC_DYN_SIMD bool are_below(const int64_t* rows, int64_t count, int64_t capacity) noexcept {
  return all_below(rows, count, capacity);
}

void mark_rows_(const Tensor& rows, const Tensor& table_offsets, std::vector<Tensor> marks, const Tensor& layout,
                const Tensor& versions) {
  const char* op = "mark_rows_";
  const auto tables = read_word_layout(op, rows, table_offsets, marks, layout, "versions", versions);
  const auto count = static_cast<int64_t>(tables.size());
  const int64_t* row = const_data<int64_t>(rows);
  const int64_t* offset = const_data<int64_t>(table_offsets);
  const int64_t* version = const_data<int64_t>(versions);
  BlockList<int32_t> blocks(op, "marks", marks);
  std::vector<MarkBlocks> words;
  for (int64_t t = 0; t < count; ++t) {
    check_version(version[t]);
    words.push_back(blocks.words(tables[static_cast<size_t>(t)]));
    const int64_t capacity = words.back().capacity;
    // All rows are checked before the first row is marked: an error changes nothing.
    check_marked_rows(capacity == 0 || are_below(row + offset[t], offset[t + 1] - offset[t], capacity), capacity, t);
  }
  SeparateMemory().writes(marks).reads(rows).reads(table_offsets).reads(versions).check(op);
  for_each_range(rows.numel(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t t = std::upper_bound(offset, offset + count + 1, begin) - offset - 1; begin < end; ++t) {
      const int64_t stop = std::min(end, offset[t + 1]);
      const MarkBlocks table = words[static_cast<size_t>(t)];
      if (table.capacity > 0) mark_rows(table, row + begin, stop - begin, static_cast<int32_t>(version[t]));
      begin = stop;
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torchrec_dyn, CPU, m) { m.impl(TORCHREC_DYN_KERNEL("mark_rows_", &mark_rows_)); }

}  // namespace torchrec_dyn
