// The kernels of scores, evictions, lists and marks (simt.h) on the threads of the simt build, where threads meet at
// the same rows. Built with ThreadSanitizer, and with AddressSanitizer and UBSan, by `run`.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "life/lowest_scores_kernels.h"
#include "life/scores_kernels.h"
#include "lookup/listed_rows_kernels.h"
#include "lookup/row_changes_kernels.h"
#include "lookup/table_scores_kernels.h"
#include "philox.h"
#include "sharing.h"
#include "simt_cpu.h"
#include "storage/row_marks_kernels.h"

namespace torchrec_dyn {
namespace {

const simt::Stream kStream{nullptr, nullptr};
constexpr int64_t kBatch = 6000, kRows = 600, kShift = 6;

int64_t error[kErrorWords];  // of all kernels here
const ErrorReport kReport{error, 1};

// Returns true if `words` were reported, and forgets them.
bool reported(const std::vector<int64_t>& words) {
  const bool is_equal = error[0] == 1 && std::equal(words.begin(), words.end(), error + 1);
  std::ranges::fill(error, 0);
  return is_equal;
}

// The words of one table in blocks of 64.
template <typename Word>
struct Memory {
  explicit Memory(Word word) : blocks(kRows / 64 + 1, std::vector<Word>(64, word)) {
    for (std::vector<Word>& block : blocks) pointers.push_back(block.data());
  }
  WordBlocks<Word> words() const { return {pointers.data(), kShift, kRows}; }

  std::vector<std::vector<Word>> blocks;
  std::vector<Word*> pointers;
};

// Every second row is one of four, -1 among them.
std::vector<int64_t> popular_rows() {
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < kBatch; ++i) rows.push_back(random_words(3, i, 0, 0).words[0] % (i % 2 == 0 ? kRows : 4));
  for (int64_t& row : rows) row = row == 3 ? -1 : row;
  return rows;
}

// Two tables, the second without scores. `before`: the count of every row.
void touch_rows(bool has_times, uint64_t before) {
  constexpr uint64_t kStep = 0xFFFFFFFE;
  Memory<uint64_t> scores(uint64_t{7} << 32 | before);
  const std::vector<int64_t> rows = popular_rows();
  const int64_t scored = kBatch - 1000;
  std::vector<int64_t> times;
  std::unordered_map<int64_t, uint64_t> sums;
  for (int64_t i = 0; i < kBatch; ++i) {
    times.push_back(has_times ? 1 + i : 1);
    if (i < scored) sums[rows[static_cast<size_t>(i)]] += static_cast<uint64_t>(times.back());
  }
  const std::vector<TableWords<uint64_t>> tables = {{0, scores.words(), kStep}, {scored, {nullptr, 0, 0}, 9}};
  int64_t bad = 0;
  const TouchedRows batch{rows.data(), has_times ? times.data() : nullptr, kBatch, {tables.data(), 2}, &bad, kReport};
  simt::launch(kStream, kBatch, CheckTouchedRows{batch});
  check(bad == 0, "all rows are inside");
  simt::launch(kStream, kBatch, TouchScores{batch});
  for (int64_t row = 0; row < kRows; ++row)
    check(*scores.words().word(row) == (sums.contains(row) ? kStep << 32 | std::min(kMostCount, before + sums[row])
                                                           : uint64_t{7} << 32 | before),
          "every occurrence of a row is counted once");
  if (!has_times) return;
  times[4000] = 0, times[3000] = -3;
  simt::launch(kStream, kBatch, CheckTouchedRows{batch});
  simt::launch(kStream, kBatch, TouchScores{batch});
  check(reported({-3}), "the first invalid number of times is reported");
}

using Pair = std::pair<uint64_t, int64_t>;  // mixed id, row

// As lookup/lowest_rows_cuda.cpp, for ids in slots in the order of their rows.
std::vector<Pair> find_lowest(const ScoredRows& table, SlotArray array, int64_t most) {
  std::vector<KeyCut> cuts = {{0, most}};
  for (int64_t shift = (kDigits - 1) * kDigitBits; shift >= 0; shift -= kDigitBits) {
    std::vector<int64_t> counts(kDigitCopies * kDigitValues), sums(kDigitValues + 1);
    const KeyCut cut = cuts.back();
    simt::launch(kStream, kRows, CountKeys{table, &cut, shift, counts.data()});
    simt::launch(kStream, kDigitValues + 1, AddCopies{counts.data(), sums.data()});
    simt::exclusive_sum(kStream, sums.data(), kDigitValues + 1);
    simt::launch(kStream, kDigitValues, ChooseDigit{sums.data(), shift, &cut, &cuts.emplace_back()});
  }
  std::vector<int64_t> words(kRows / LowestMarks::kRows + 1), places(2 * kTieBins + 1);
  const LowestMarks marks{words.data(), kRows};
  simt::launch(kStream, kRows, MarkLowest{table, &cuts.back(), marks});
  simt::launch(kStream, array.capacity, CountMarked{array, marks, places.data()});
  simt::exclusive_sum(kStream, places.data(), 2 * kTieBins + 1);
  LowestCounts found{};
  simt::launch(kStream, kTieBins, ChooseTies{places.data(), &cuts.back(), &found});
  const int64_t listed = found.below + found.ties, count = found.below + std::min(found.ties, found.needed);
  std::vector<uint64_t> keys(static_cast<size_t>(listed));
  std::vector<int64_t> values(keys.size()), ties_before(keys.size());
  simt::Pairs list{keys.data(), values.data()};
  simt::launch(kStream, array.capacity, ListLowest{array, marks, found.last, places.data(), listed, list});
  list = simt::sort_pairs(kStream, list, listed);
  simt::launch(kStream, listed, FlagTies{list.values, ties_before.data()});
  simt::exclusive_sum(kStream, ties_before.data(), listed);
  std::vector<int64_t> ids(static_cast<size_t>(count)), rows(ids.size());
  simt::launch(kStream, listed, WriteLowest{list, ties_before.data(), found.needed, count, ids.data(), rows.data()});
  std::vector<Pair> lowest;
  for (size_t i = 0; i < ids.size(); ++i) lowest.emplace_back(mix64(static_cast<uint64_t>(ids[i])), rows[i]);
  return lowest;
}

// Rows share words of marks, keys and bins of mixed ids. Every seventh row is free and has no id.
void evict_rows() {
  Memory<uint64_t> scores(kFreeScore);
  std::vector<Slot> slots;
  for (int64_t row = 0; row < kRows; ++row) {
    const bool is_used = row % 7 != 0;
    slots.push_back(is_used ? Slot{static_cast<int64_t>(unmix64(static_cast<uint64_t>(row * row))), row + 1} : Slot{});
    if (is_used) *scores.words().word(row) = score_of(row % 5, row % 3);
  }
  for (const bool by_count : {false, true}) {
    const ScoredRows table{scores.words(), kRows, by_count, end_of_scores(4)};
    std::vector<std::tuple<uint64_t, uint64_t, int64_t>> all;
    for (int64_t row = 0; row < kRows; ++row)
      if (table.word(row) < table.end)
        all.emplace_back(table.key(table.word(row)), static_cast<uint64_t>(row * row), row);
    std::ranges::sort(all);
    for (const size_t most : {size_t{1}, size_t{200}, all.size(), all.size() + 9}) {
      std::vector<Pair> expected;
      for (size_t i = 0; i < std::min(most, all.size()); ++i)
        expected.emplace_back(std::get<1>(all[i]), std::get<2>(all[i]));
      std::ranges::sort(expected);
      check(find_lowest(table, {slots.data(), kRows}, static_cast<int64_t>(most)) == expected,
            "the lowest rows are those of a plain sort");
    }
  }
}

// Ids that are by mixed id are brought into the order of their last steps.
void order_rows() {
  Memory<uint64_t> scores(kFreeScore);
  std::vector<int64_t> ids, rows, seen(kRows);
  for (int64_t row = 0; row < kRows; ++row) {
    *scores.words().word(row) = score_of(row % 9, row);
    rows.push_back((row * 77 + 5) % kRows);
    ids.push_back(row);
  }
  std::vector<uint64_t> keys(kRows);
  std::vector<int64_t> values(kRows), ids_before(kRows), rows_before(kRows);
  simt::Pairs places{keys.data(), values.data()};
  simt::launch(kStream, kRows, ReadOrder{scores.words(), rows.data(), places});
  places = simt::sort_pairs(kStream, places, kRows, 0, kOrderKeyBits);
  const ListedIds before{ids_before.data(), rows_before.data()};
  simt::launch(kStream, kRows, CopyListed{ids.data(), rows.data(), before});
  simt::launch(kStream, kRows, WriteInOrder{before, places, ids.data(), rows.data(), seen.data()});
  std::vector<Pair> order;
  for (size_t i = 0; i < ids.size(); ++i) {
    check(rows[i] == (ids[i] * 77 + 5) % kRows && seen[i] == rows[i] % 9, "an id keeps its row");
    order.emplace_back(static_cast<uint64_t>(seen[i]), ids[i]);
  }
  check(std::ranges::is_sorted(order), "rows are ordered by last_seen, then as they were");
}

// Lists of popular rows, of which every third was seen since; the second list begins in its middle.
void choose_rows() {
  Memory<uint64_t> scores(kFreeScore);
  for (int64_t row = 0; row < kRows; ++row) *scores.words().word(row) = score_of(row % 3 == 0 ? 8 : 7, 1);
  const std::vector<int64_t> rows = popular_rows();
  std::vector<int64_t> list;
  for (int64_t i = 0; i < kBatch; ++i) list.push_back(-i);
  list.insert(list.end(), rows.begin(), rows.end());
  list.insert(list.end(), kBatch, 7);
  constexpr int64_t kBegin = 4000, kCount = 2 * kBatch - kBegin;
  const std::vector<ListedRows> lists = {{list.data(), kBatch, 0, 0}, {list.data(), kBatch, kBegin, 0}};
  const std::vector<int64_t> begins = {0, kBatch, kCount}, into = {0, 100}, taken = {100, 400};
  const std::vector<TableWords<uint64_t>> tables = {{0, scores.words(), 0}};
  std::vector<int64_t> places(kCount + 1), offsets(3), firsts(2), ids(500), chosen(500);
  const ListedBatch batch{lists.data(), begins.data(), 2, {tables.data(), 1}, places.data()};
  simt::launch(kStream, kCount + 1, FlagUnchanged{batch, kCount});
  simt::exclusive_sum(kStream, places.data(), kCount + 1);
  simt::launch(kStream, 3, ReadChosenOffsets{batch, offsets.data()});
  simt::launch(kStream, kCount, FindFirstChosen{batch, firsts.data()});
  simt::launch(kStream, kCount, ListUnchanged{batch, into.data(), taken.data(), ids.data(), chosen.data()});
  for (size_t l = 0; l < 2; ++l) {
    std::vector<int64_t> expected;
    for (int64_t i = lists[l].begin; i < kBatch; ++i) {
      const int64_t row = rows[static_cast<size_t>(i)];
      if (row >= 0 && row % 3 != 0) expected.push_back(i);
    }
    check(offsets[l + 1] - offsets[l] == static_cast<int64_t>(expected.size()), "every unchanged row is counted");
    check(firsts[l] == expected.front() - kBatch, "the first unchanged row is found");
    for (int64_t i = 0; i < taken[l]; ++i) {
      const auto place = static_cast<size_t>(into[l] + i);
      const int64_t entry = expected[static_cast<size_t>(i)];
      check(ids[place] == -entry && chosen[place] == rows[static_cast<size_t>(entry)], "the first rows are listed");
    }
  }
}

// Scores of tables: written, where rows are popular, read, and forgotten; the second table has none.
void write_table_scores() {
  Memory<uint64_t> scores(~uint64_t{0});
  std::vector<int64_t> rows = popular_rows(), seen, counts;
  for (const int64_t row : rows) {
    seen.push_back(row % 7);
    counts.push_back(row < 0 ? 0 : row);
  }
  const int64_t scored = kBatch - 1000;
  const std::vector<TableWords<uint64_t>> tables = {{0, scores.words(), 0}, {scored, {nullptr, 0, 0}, 0}};
  const ScoreTables both{tables.data(), 2};
  int64_t bad = 0;
  const WrittenRows written{rows.data(), seen.data(), counts.data(), both, &bad, kReport};
  simt::launch(kStream, kBatch, CheckWrittenRows{written});
  simt::launch(kStream, kBatch, WriteTableScores{written});
  std::vector<int64_t> read_seen(kBatch), read_counts(kBatch);
  const ReadTableScores read{rows.data(), both, read_seen.data(), read_counts.data(), kReport};
  simt::launch(kStream, kBatch, read);
  for (size_t i = 0; i < rows.size(); ++i) {
    const bool has_score = static_cast<int64_t>(i) < scored && rows[i] >= 0;
    check(read_seen[i] == (has_score ? seen[i] : -1) && read_counts[i] == (has_score ? counts[i] : 0),
          "scores of tables are read as they were written");
  }
  check(bad == 0 && error[0] == 0, "every row is valid");
  std::vector<int64_t> gone(kRows);  // distinct, as callers remove them
  for (size_t row = 0; row < gone.size(); ++row) gone[row] = static_cast<int64_t>(row);
  simt::launch(kStream, kRows, ForgetScores{{gone.data(), {tables.data(), 1}, kReport}, &bad});
  simt::launch(kStream, kBatch, read);
  check(error[0] == 0 && std::ranges::count(read_seen, -1) == kBatch, "removed rows have no scores");
  counts[3000] = int64_t{1} << 32;
  rows[3000] = 5;
  simt::launch(kStream, kBatch, CheckWrittenRows{written});
  simt::launch(kStream, kBatch, WriteTableScores{written});
  check(bad == -1 && reported({5, kRows}), "a score that is wrong is reported");
  simt::launch(kStream, kBatch, read);
  check(std::ranges::count(read_seen, -1) == kBatch, "no score is written then");
}

// Two tables of the same rows, the second without marks.
void mark_popular_rows() {
  constexpr int32_t kVersion = 5;
  Memory<int32_t> marks(2);
  const std::vector<int64_t> rows = popular_rows();
  const int64_t marked = kBatch - 5000;
  const std::vector<TableWords<int32_t>> tables = {{0, marks.words(), kVersion}, {marked, {nullptr, 0, 0}, 9}};
  int64_t first_bad = 0;
  const MarkTables both{tables.data(), 2};
  simt::launch(kStream, kBatch, CheckMarkedRows{rows.data(), kBatch, both, &first_bad});
  check(first_bad == 0, "all rows are below the capacity");
  const MarkRows mark{rows.data(), kBatch, both, &first_bad, kReport};
  simt::launch(kStream, kBatch, mark);
  check(error[0] == 0, "nothing is wrong");
  std::vector<int32_t> expected(kRows, 2);
  for (int64_t i = 0; i < marked; ++i)
    if (rows[static_cast<size_t>(i)] >= 0) expected[static_cast<size_t>(rows[static_cast<size_t>(i)])] = kVersion;
  for (int64_t row = 0; row < kRows; ++row)
    check(*marks.words().word(row) == expected[static_cast<size_t>(row)], "the rows named are marked, and no other");
  first_bad = -kBatch;
  simt::launch(kStream, kBatch, mark);
  check(reported({kRows, 0}), "the table of the first bad row is reported");
}

}  // namespace
}  // namespace torchrec_dyn

int main() {
  using namespace torchrec_dyn;
  touch_rows(false, 0);
  touch_rows(false, kMostCount - kBatch - 1000);  // room for the threads at first, and for some rows not at the end
  touch_rows(false, kMostCount - 2);
  touch_rows(true, 0);
  touch_rows(true, kMostCount - 100000);
  evict_rows();
  order_rows();
  choose_rows();
  write_table_scores();
  mark_popular_rows();
  std::puts("score_kernels: ok");
}
