// The scores of rows on the CPU: written and read by row.
#include <atomic>
#include <tuple>
#include <vector>

#include "checks.h"
#include "kernel.h"
#include "life/scores_arguments.h"
#include "parallel.h"
#include "storage/blocks_arguments.h"

namespace torchrec_dyn {
namespace {

constexpr int64_t kGrain = 2048;

void write_scores_(const Tensor& rows, const Tensor& last_seen, const Tensor& counts, std::vector<Tensor> scores,
                   int64_t shift) {
  const char* op = "write_scores_";
  check_tensor(op, "rows", rows, ScalarType::Long);
  check_tensor(op, "last_seen", last_seen, ScalarType::Long);
  check_tensor(op, "counts", counts, ScalarType::Long);
  check_size(op, "the number of last_seen", rows.numel(), last_seen.numel());
  check_size(op, "the number of counts", rows.numel(), counts.numel());
  BlockList<uint64_t> blocks(op, "scores", scores);
  const ScoreBlocks words = blocks.words(layout_of_one(op, scores, shift, 1));
  const int64_t* row = const_data<int64_t>(rows);
  const int64_t* seen = const_data<int64_t>(last_seen);
  const int64_t* count = const_data<int64_t>(counts);
  for (int64_t i = 0; i < rows.numel(); ++i) check_written_score(words.capacity, row[i], seen[i], count[i]);
  SeparateMemory().writes(scores).reads(rows).reads(last_seen).reads(counts).check(op);
  // In order and on one thread: if a row is given twice, its last score stays.
  for (int64_t i = 0; i < rows.numel(); ++i) {
    if (i % kScoreBurst == 0) prefetch_scores(words, row, i, rows.numel());
    *words.word(row[i]) = score_of(seen[i], count[i]);
  }
}

std::tuple<Tensor, Tensor> read_scores(const Tensor& rows, std::vector<Tensor> scores, int64_t shift) {
  const char* op = "read_scores";
  check_tensor(op, "rows", rows, ScalarType::Long);
  BlockList<uint64_t> blocks(op, "scores", scores);
  const ScoreBlocks words = blocks.words(layout_of_one(op, scores, shift, 1));
  Tensor last_seen = new_int64(rows.numel());
  Tensor counts = new_int64(rows.numel());
  const int64_t* row = const_data<int64_t>(rows);
  int64_t* seen = mutable_data<int64_t>(last_seen);
  int64_t* count = mutable_data<int64_t>(counts);
  std::atomic<bool> outside{false};
  for_each_range(rows.numel(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if ((i - begin) % kScoreBurst == 0) prefetch_scores(words, row, i, end);
      const bool holds = words.holds(row[i]);
      if (!holds && row[i] != -1) outside = true;
      const uint64_t score = holds ? *words.word(row[i]) : kFreeScore;
      seen[i] = is_free(score) ? -1 : static_cast<int64_t>(last_seen_of(score));
      count[i] = is_free(score) ? 0 : static_cast<int64_t>(count_of(score));
    }
  });
  check_read_rows(!outside, words.capacity);
  return {last_seen, counts};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torchrec_dyn, CPU, m) {
  m.impl(TORCHREC_DYN_KERNEL("write_scores_", &write_scores_));
  m.impl(TORCHREC_DYN_KERNEL("read_scores", &read_scores));
}

}  // namespace torchrec_dyn
