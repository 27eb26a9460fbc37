// The marks of rows on the CPU: written by row, and read by version.
#include "storage/row_marks.h"

#include <algorithm>
#include <atomic>
#include <limits>
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

TORCHREC_DYN_SIMD int64_t count_changed(const int32_t* words, int64_t count, int32_t since) noexcept {
  return count_marked(words, count, since);
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

Tensor changed_rows(std::vector<Tensor> marks, int64_t shift, int64_t rows, int64_t since) {
  const char* op = "changed_rows";
  BlockList<int32_t> blocks(op, "marks", marks);
  const MarkBlocks table = blocks.words(layout_of_one(op, marks, shift, 1));
  check_listed_rows(rows, table.capacity);
  if (since > std::numeric_limits<int32_t>::max()) return new_int64(0);
  const auto least = static_cast<int32_t>(std::max<int64_t>(since, std::numeric_limits<int32_t>::min()));
  // Each piece lies in one block. First the number of rows to list in each piece, then the begin of each piece's list,
  // then the rows.
  const int64_t piece = std::min(int64_t{1} << 16, int64_t{1} << shift);
  const int64_t pieces = (rows + piece - 1) / piece;
  std::vector<int64_t> places(static_cast<size_t>(pieces) + 1);
  const auto end_of = [&](int64_t i) { return std::min(rows, (i + 1) * piece); };
  const auto for_each_piece = [&](const auto& task) {
    for_each_range(pieces, std::max<int64_t>(1, (1 << 16) / piece), [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) task(i);
    });
  };
  for_each_piece([&](int64_t i) {
    places[static_cast<size_t>(i) + 1] = count_changed(table.word(i * piece), end_of(i) - i * piece, least);
  });
  for (size_t i = 1; i < places.size(); ++i) places[i] += places[i - 1];
  Tensor listed = new_int64(places.back());
  int64_t* list = mutable_data<int64_t>(listed);
  std::atomic<bool> fell{false};
  for_each_piece([&](int64_t i) {
    int64_t* next = list + places[static_cast<size_t>(i)];
    int64_t* const end = list + places[static_cast<size_t>(i) + 1];
    for (int64_t run = i * piece; run < end_of(i) && next < end; run += kMarkRun)
      next = list_marked(table.word(run), run, std::min(kMarkRun, end_of(i) - run), least, end - next, next);
    if (next != end) fell = true;
  });
  STD_TORCH_CHECK(!fell, op,
                  ": expected marks that only rise, got a mark that another thread lowered during the call. ",
                  "Do not reset marks that are being read.");
  return listed;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torchrec_dyn, CPU, m) {
  m.impl(TORCHREC_DYN_KERNEL("mark_rows_", &mark_rows_));
  m.impl(TORCHREC_DYN_KERNEL("changed_rows", &changed_rows));
}

}  // namespace torchrec_dyn
