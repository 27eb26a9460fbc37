// Scores and marks of rows under std::thread, shared as the ops share them: a part owns whole lines of scores, a piece
// owns whole words of bits, and no thread owns the mark of a row.
// Built and run like threads.cpp.
#include "life/scores.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "life/lowest_scores_cpu.h"
#include "philox.h"
#include "sharing.h"
#include "storage/row_marks.h"

namespace torchrec_dyn {
namespace {

// Each thread touches the rows of its part, whole lines of words, and then reads the scores of its own piece.
void touch_and_find_own_rows() {
  constexpr int64_t kRows = 1000;
  constexpr int64_t kBatch = 20000;
  constexpr int64_t kShift = 6;
  constexpr uint64_t kStep = 9;
  struct alignas(64) Block {
    uint64_t words[1 << kShift];
  };
  std::vector<Block> memory(static_cast<size_t>((kRows >> kShift) + 1));
  std::vector<uint64_t*> blocks;
  for (Block& block : memory) {
    std::fill(block.words, block.words + (1 << kShift), kFreeScore);
    blocks.push_back(block.words);
  }
  const ScoreBlocks scores{blocks.data(), kShift, static_cast<int64_t>(blocks.size()) << kShift};
  std::vector<int64_t> rows;
  std::vector<uint64_t> counts(kRows);
  for (int64_t i = 0; i < kBatch; ++i) {
    rows.push_back(random_words(4, i, 0, 0).words[0] % kRows);
    ++counts[static_cast<size_t>(rows.back())];
  }
  on_threads([&](int64_t part) { touch_part<false>(scores, rows.data(), nullptr, kBatch, kStep, part, kThreads); });
  for (int64_t row = 0; row < kRows; ++row)
    check(
        counts[static_cast<size_t>(row)] == 0 || *scores.word(row) == (kStep << 32 | counts[static_cast<size_t>(row)]),
        "every occurrence of a row is counted once");

  const uint64_t end = (kStep + 1) << 32;
  ByteMarks bytes(kRows);
  BitMarks bits(kRows);
  std::vector<KeyRange> ranges(kThreads);
  std::vector<KeyBins> bins(kThreads, KeyBins{0, kBatch, 0});
  on_threads([&](int64_t t) {
    constexpr int64_t kPiece = 256;  // whole words of marks
    const auto piece = static_cast<size_t>(t);
    for_score_stretches(scores, t * kPiece, std::min(kRows, (t + 1) * kPiece),
                        [&](const uint64_t* words, int64_t row, int64_t count) {
                          add_to_range<true>(words, count, end, ranges[piece]);
                          bins[piece].count_keys<true>(words, count, end);
                          bytes.mark<true>(words, row, count, end, 20);
                          bits.mark<true>(words, row, count, end, 20);
                        });
  });
  KeyRange all;
  for (const KeyRange& range : ranges) all.add(range);
  std::vector<uint64_t> totals(KeyBins::kBins);
  for (const KeyBins& piece : bins) piece.add_to(totals);
  uint64_t in_bins = 0;
  for (const uint64_t total : totals) in_bins += total;
  check(all.rows == in_bins && all.low == *std::min_element(counts.begin(), counts.end()) &&
            all.high == *std::max_element(counts.begin(), counts.end()),
        "the pieces count every row once");
  for (int64_t row = 0; row < kRows; ++row) {
    const uint64_t count = counts[static_cast<size_t>(row)];
    check(bytes.is_chosen(row + 1) == (count <= 20) && bits.is_chosen(row + 1) == (count <= 20) &&
              bytes.is_tie(row + 1) == (count == 20) && bits.is_tie(row + 1) == (count == 20),
          "a row is marked by its own count");
  }
  for (const int64_t place : {int64_t{0}, kRows + 1, std::numeric_limits<int64_t>::max(), int64_t{-1}})
    check(!bytes.is_chosen(place) && !bits.is_chosen(place), "nothing outside is marked");
}

// All threads mark the same rows with the same version.
void mark_rows_of_all() {
  constexpr int64_t kRows = 1000;
  constexpr int32_t kVersion = 7;
  std::vector<int32_t> memory(kRows);
  int32_t* block = memory.data();
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < 20000; ++i) rows.push_back(random_words(5, i, 0, 0).words[0] % (2 * kRows) / 2 * 2 - 2);
  for (int64_t& row : rows) row = std::min(row, kRows - 2);
  on_threads(
      [&](int64_t) { mark_rows({&block, 10, kRows}, rows.data(), static_cast<int64_t>(rows.size()), kVersion); });
  for (int64_t row = 0; row < kRows; ++row)
    check(block[row] == (row % 2 == 0 ? kVersion : 0), "every row named is marked, and no other");
}

}  // namespace
}  // namespace torchrec_dyn

int main() {
  torchrec_dyn::touch_and_find_own_rows();
  torchrec_dyn::mark_rows_of_all();
  std::puts("scores: ok");
}
