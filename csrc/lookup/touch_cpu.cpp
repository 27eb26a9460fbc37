// The scores of the rows of a batch, touched on the CPU: all prepared tables in one call.
#include <vector>

#include "lookup/touch_arguments.h"
#include "parallel.h"
#include "row_parts_cpu.h"
#include "simd.h"

namespace torchrec_dyn {
namespace {

constexpr int64_t kGrain = 2048;

// True if all rows are in [-1, capacity).
TORCHREC_DYN_SIMD bool all_inside(const int64_t* rows, int64_t count, int64_t capacity) noexcept {
  int64_t least = 0, most = -1;
  for (int64_t i = 0; i < count; ++i) {
    least = rows[i] < least ? rows[i] : least;
    most = rows[i] > most ? rows[i] : most;
  }
  return least >= -1 && most < capacity;
}

void touch_scores_(const TouchCall& call) {
  call.check();
  const std::vector<ScoreBlocks>& words = call.tables->scores;
  const int64_t* row = const_data<int64_t>(call.rows);
  const int64_t* offset = const_data<int64_t>(call.table_offsets);
  const int64_t* step = const_data<int64_t>(call.steps);
  const int64_t* often = call.times ? const_data<int64_t>(*call.times) : nullptr;
  for (int64_t i = 0; often && i < call.rows.numel(); ++i) check_times(often[i]);
  std::vector<int64_t> touched_rows(words.size());  // rows of each table with scores
  for (size_t t = 0; t < words.size(); ++t) {
    if (words[t].capacity == 0) continue;
    touched_rows[t] = offset[t + 1] - offset[t];
    // All rows are checked before the first row is touched: an error changes nothing.
    check_touched_rows(all_inside(row + offset[t], touched_rows[t], words[t].capacity));
  }
  const std::vector<RowPart> parts = row_parts(touched_rows, call.rows.numel() < kGrain ? 1 : thread_count());
  for_each_task(static_cast<int64_t>(parts.size()), [&](int64_t task) {
    const auto [t, ids, part, parts_of_table] = parts[static_cast<size_t>(task)];
    const ScoreBlocks view = words[static_cast<size_t>(t)];
    const int64_t table_rows = offset[t + 1] - offset[t];
    const auto now = static_cast<uint64_t>(step[t]);
    if (often)
      touch_part<true>(view, row + offset[t], often + offset[t], table_rows, now, part, parts_of_table);
    else
      touch_part<false>(view, row + offset[t], nullptr, table_rows, now, part, parts_of_table);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torchrec_dyn, CPU, m) {
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("touch_scores_", &touch_scores_));
}

}  // namespace torchrec_dyn
