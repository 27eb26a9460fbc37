// The scores of rows of prepared tables on the CPU: touched, read and written, of all tables in one call.
#include <algorithm>
#include <tuple>
#include <vector>

#include "lookup/table_scores_arguments.h"
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

// Calls visit(i, word) for each row that has a word, and checks all rows first.
template <typename IsRight, typename Visit>
void for_scored_rows(const TableScoresCall& call, const IsRight& is_right, const Visit& visit) {
  const int64_t* const row = call.row();
  const auto for_tables = [&](const auto& body) {
    for (size_t t = 0; t < call.tables->count(); ++t)
      if (call.tables->scores[t].capacity > 0) body(call.tables->scores[t], call.offsets()[t], call.offsets()[t + 1]);
  };
  for_tables([&](const ScoreBlocks& words, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      check_scored_row(call.op, row[i] == -1 || (words.holds(row[i]) && is_right(i)), row[i], words.capacity);
  });
  for_tables([&](const ScoreBlocks& words, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if ((i - begin) % kScoreBurst == 0) prefetch_scores(words, row, i, end);
      if (is_scored(words, row[i])) visit(i, words.word(row[i]));
    }
  });
}

std::tuple<Tensor, Tensor> read_scores_prepared(const ReadScoresCall& call) {
  call.of.check();
  const int64_t n = call.rows.numel();
  Tensor last_seen = new_int64(n), counts = new_int64(n);
  auto* const seen = mutable_data<int64_t>(last_seen);
  auto* const count = mutable_data<int64_t>(counts);
  std::fill(seen, seen + n, int64_t{-1});
  std::fill(count, count + n, int64_t{0});
  for_scored_rows(
      call.of, [](int64_t) { return true; },
      [&](int64_t i, const uint64_t* word) {
        if (is_free(*word)) return;
        seen[i] = static_cast<int64_t>(last_seen_of(*word));
        count[i] = static_cast<int64_t>(count_of(*word));
      });
  return {last_seen, counts};
}

void write_scores_prepared_(const WriteScoresCall& call) {
  call.check();
  const int64_t* const seen = const_data<int64_t>(call.last_seen);
  const int64_t* const count = const_data<int64_t>(call.counts);
  for_scored_rows(
      call.of, [&](int64_t i) { return is_last_seen(seen[i]) && is_count(count[i]); },
      [&](int64_t i, uint64_t* word) { *word = score_of(seen[i], count[i]); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torchrec_dyn, CPU, m) {
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("touch_scores_", &touch_scores_));
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("read_scores_prepared", &read_scores_prepared));
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("write_scores_prepared_", &write_scores_prepared_));
}

}  // namespace torchrec_dyn
