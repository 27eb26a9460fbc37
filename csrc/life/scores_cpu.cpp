// The scores of rows on the CPU: written and read by row.
#include <algorithm>
#include <atomic>
#include <bit>
#include <limits>
#include <span>
#include <tuple>
#include <vector>

#include "checks.h"
#include "kernel.h"
#include "life/scores_arguments.h"
#include "parallel.h"
#include "radix_sort.h"
#include "storage/blocks_arguments.h"

namespace torchrec_dyn {
namespace {

constexpr int64_t kGrain = 2048;
constexpr uint64_t kLowHalf = 0xFFFFFFFFull;

// Prefetches the scores of the burst of rows after the one that begins at `i`; rows may lie outside the table.
TORCHREC_DYN_INLINE void prefetch_scores(const ScoreBlocks& scores, const int64_t* rows, int64_t i, int64_t end) {
  for (int64_t next = i + kScoreBurst; next < end && next < i + 2 * kScoreBurst; ++next)
    if (scores.holds(rows[next])) __builtin_prefetch(scores.word(rows[next]), 1, 2);
}

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

// Bits of tie words that an order of up to 2^18 ids is sorted by: two digits of a radix sort, and few of them are
// equal.
constexpr int kFewTieBits = 22;
constexpr size_t kFewIds = size_t{1} << 18;

// Sorts by key and tie word: first by the high bits of the tie words, counted from their least; then each run of equal
// high bits, which is short, by the whole words; then by key, counted from the least key, which keeps the order of
// equal keys.
Tensor oldest_first(const Tensor& ids, const Tensor& last_seen) {
  check_ids_to_order(ids, last_seen, DeviceType::CPU);
  const auto count = static_cast<size_t>(ids.numel());
  const int64_t* id = const_data<int64_t>(ids);
  const int64_t* seen = const_data<int64_t>(last_seen);
  std::vector<uint64_t> ties, places;
  ties.reserve(count);
  places.reserve(count);
  uint64_t least_tie = std::numeric_limits<uint64_t>::max(), most_tie = 0, least_seen = least_tie;
  for (size_t i = 0; i < count; ++i) {
    check_order_key(seen[i]);
    ties.push_back(tie_word(id[i]));
    least_tie = std::min(least_tie, ties.back());
    most_tie = std::max(most_tie, ties.back());
    least_seen = std::min(least_seen, static_cast<uint64_t>(seen[i]));
  }
  const int bits = count <= kFewIds ? kFewTieBits : 32;
  const int less = count == 0 ? 0 : std::max(0, static_cast<int>(std::bit_width(most_tie - least_tie)) - bits);
  SortableWords words(count + 1);
  for (size_t i = 0; i < count; ++i) words.push_if(true, (ties[i] - least_tie) >> less << 32 | i);
  words.sort_by_high_word();
  const std::span<const uint64_t> sorted = words.words();
  for (const uint64_t word : sorted) places.push_back(word & kLowHalf);
  for (size_t begin = 0, end = 0; begin < count; begin = end) {
    for (end = begin + 1; end < count && sorted[end] >> 32 == sorted[begin] >> 32;) ++end;
    if (end - begin == 1) continue;
    std::sort(places.begin() + static_cast<int64_t>(begin), places.begin() + static_cast<int64_t>(end),
              [&](uint64_t a, uint64_t b) { return ties[a] < ties[b]; });
  }
  words.clear();
  for (size_t i = 0; i < count; ++i)
    words.push_if(true, (static_cast<uint64_t>(seen[places[i]]) - least_seen) << 32 | i);
  words.sort_by_high_word();
  Tensor order = new_int64(ids.numel());
  int64_t* out = mutable_data<int64_t>(order);
  for (const uint64_t word : words.words()) *out++ = static_cast<int64_t>(places[word & kLowHalf]);
  return order;
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
  m.impl(TORCHREC_DYN_KERNEL("oldest_first", &oldest_first));
  m.impl(TORCHREC_DYN_KERNEL("read_scores", &read_scores));
}

}  // namespace torchrec_dyn
