// The scores of rows of prepared tables on the CPU: touched, read and written, of all tables in one call.
#include <algorithm>
#include <atomic>
#include <tuple>
#include <utility>
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

// Calls visit(i, row, words) for each row of a table with scores, on all threads.
template <typename Visit>
void for_scored_rows(const Tensor& rows, const Tensor& table_offsets, const std::vector<ScoreBlocks>& scores,
                     const Visit& visit) {
  const int64_t* const row = const_data<int64_t>(rows);
  const int64_t* const offsets = const_data<int64_t>(table_offsets);
  const auto tables = static_cast<int64_t>(scores.size());
  for_each_range(rows.numel(), kGrain, [&](int64_t begin, int64_t end) {
    int64_t t = std::upper_bound(offsets, offsets + tables + 1, begin) - offsets - 1;
    for (int64_t first = begin; first < end; first = std::min(end, offsets[++t])) {
      const ScoreBlocks& words = scores[static_cast<size_t>(t)];
      const int64_t last = std::min(end, offsets[t + 1]);
      for (int64_t i = first; i < last && words.capacity > 0; ++i) {
        if ((i - first) % kScoreBurst == 0) prefetch_scores(words, row, i, last);
        visit(i, row[i], words);
      }
    }
  });
}

// Raises the error of a row, if one was found wrong.
template <typename Call>
void check_scored_rows(const Call& call, int64_t wrong) {
  if (wrong < 0) return;
  const int64_t* const offsets = const_data<int64_t>(call.table_offsets);
  const auto t = std::upper_bound(offsets, offsets + call.tables->count() + 1, wrong) - offsets - 1;
  check_scored_row(call.kOp, false, const_data<int64_t>(call.rows)[wrong],
                   call.tables->scores[static_cast<size_t>(t)].capacity);
}

std::tuple<Tensor, Tensor> read_scores(const ReadScoresCall& call) {
  check_table_rows(call.kOp, *call.tables, call.rows, call.table_offsets);
  const int64_t n = call.rows.numel();
  Tensor last_seen = new_int64(n), counts = new_int64(n);
  auto* const seen = mutable_data<int64_t>(last_seen);
  auto* const count = mutable_data<int64_t>(counts);
  std::fill(seen, seen + n, int64_t{-1});
  std::fill(count, count + n, int64_t{0});
  std::atomic<int64_t> wrong{-1};
  for_scored_rows(call.rows, call.table_offsets, call.tables->scores,
                  [&](int64_t i, int64_t row, const ScoreBlocks& words) {
                    if (row == -1) return;
                    if (!words.holds(row)) {
                      wrong = i;
                      return;
                    }
                    const uint64_t word = *words.word(row);
                    if (is_free(word)) return;
                    seen[i] = static_cast<int64_t>(last_seen_of(word));
                    count[i] = static_cast<int64_t>(count_of(word));
                  });
  check_scored_rows(call, wrong);
  return {last_seen, counts};
}

void write_scores_(const WriteScoresCall& call) {
  call.check();
  const int64_t* const seen = const_data<int64_t>(call.last_seen);
  const int64_t* const count = const_data<int64_t>(call.counts);
  std::atomic<int64_t> wrong{-1};
  for_scored_rows(call.rows, call.table_offsets, call.tables->scores,
                  [&](int64_t i, int64_t row, const ScoreBlocks& words) {
                    if (row != -1 && !(words.holds(row) && is_last_seen(seen[i]) && is_count(count[i]))) wrong = i;
                  });
  check_scored_rows(call, wrong);
  for_scored_rows(
      call.rows, call.table_offsets, call.tables->scores, [&](int64_t i, int64_t row, const ScoreBlocks& words) {
        if (row == -1) return;  // equal rows have equal scores, but may be on two threads
        std::atomic_ref<uint64_t>(*words.word(row)).store(score_of(seen[i], count[i]), std::memory_order_relaxed);
      });
}

}  // namespace

Write prepare(const TouchedBatch& batch, const PreparedTables& tables) {
  const std::vector<ScoreBlocks>& words = tables.scores;
  const int64_t* row = const_data<int64_t>(batch.rows);
  const int64_t* offset = const_data<int64_t>(batch.table_offsets);
  const int64_t* step = const_data<int64_t>(batch.steps);
  const int64_t* often = const_data<int64_t>(batch.times);
  for (int64_t i = 0; often && i < batch.rows.numel(); ++i) check_times(often[i]);
  std::vector<int64_t> touched_rows(words.size());  // rows of each table with scores
  for (size_t t = 0; t < words.size(); ++t) {
    if (words[t].capacity == 0) continue;
    touched_rows[t] = offset[t + 1] - offset[t];
    check_touched_rows(all_inside(row + offset[t], touched_rows[t], words[t].capacity));
  }
  const int64_t threads = batch.rows.numel() < kGrain ? 1 : thread_count();
  return [=, &words, parts = row_parts(touched_rows, threads)] {
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
  };
}

// On one thread: others would begin later than this one ends.
LastWrite hide_scores(const KeptRows& kept, const PreparedTables& tables, const std::vector<int64_t>& asked) {
  if (!kept.rows) return nullptr;
  const int64_t* const row = const_data<int64_t>(*kept.rows);
  const int64_t* const offset = const_data<int64_t>(*kept.offsets);
  const auto words_of = [&](int64_t t) -> const ScoreBlocks& { return tables.scores[static_cast<size_t>(t)]; };
  size_t count = 0;
  for (const int64_t t : asked) {
    check_touched_rows(all_inside(row + offset[t], offset[t + 1] - offset[t], words_of(t).capacity));
    count += static_cast<size_t>(offset[t + 1] - offset[t]);
  }
  std::vector<std::pair<uint64_t*, uint64_t>> before;
  before.reserve(count);
  for (const int64_t t : asked)
    for (int64_t i = offset[t]; i < offset[t + 1]; ++i) {
      if ((i - offset[t]) % kScoreBurst == 0) prefetch_scores(words_of(t), row, i, offset[t + 1]);
      if (row[i] == kNoRow) continue;
      uint64_t* const word = words_of(t).word(row[i]);
      before.emplace_back(word, std::exchange(*word, kFreeScore));
    }
  return last_write([before = std::move(before)] {
    for (auto one = before.rbegin(); one != before.rend(); ++one) *one->first = one->second;
  });
}

STABLE_TORCH_LIBRARY_IMPL(torchrec_dyn, CPU, m) {
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("touch_scores_", &write_part<TouchedBatch>));
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("read_scores", &read_scores));
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("write_scores_", &write_scores_));
}

}  // namespace torchrec_dyn
