// The ids and rows with the lowest scores of one map, on the CPU.
#include "life/lowest_scores_cpu.h"

#include <algorithm>
#include <mutex>
#include <tuple>
#include <vector>

#include "checks.h"
#include "kernel.h"
#include "life/scores_arguments.h"
#include "parallel.h"
#include "storage/blocks_arguments.h"
#include "storage/id_map_arguments.h"

namespace torchrec_dyn {
namespace {

// Rows and slots of a piece: fewer than 2^32, so that bins do not overflow, and a multiple of the bits of a word.
constexpr int64_t kRowPiece = 1 << 18;
constexpr int64_t kSlotPiece = 1 << 16;

template <typename Task>
void for_each_piece(int64_t size, int64_t piece, const Task& task) {
  for_each_task((size + piece - 1) / piece, [&](int64_t i) { task(i * piece, std::min(size, (i + 1) * piece)); });
}

struct Question {
  ScoreBlocks scores;
  int64_t rows;
  bool by_count;
  uint64_t end;  // words below it qualify
};

TORCHREC_DYN_SIMD void add_range(const uint64_t* words, int64_t count, bool by_count, uint64_t end,
                                 KeyRange& range) noexcept {
  if (by_count)
    add_to_range<true>(words, count, end, range);
  else
    add_to_range<false>(words, count, end, range);
}

TORCHREC_DYN_SIMD void mark_bytes(const uint64_t* words, int64_t row, int64_t count, bool by_count, uint64_t end,
                                  uint64_t cut, ByteMarks& marks) noexcept {
  if (by_count)
    marks.mark<true>(words, row, count, end, cut);
  else
    marks.mark<false>(words, row, count, end, cut);
}

TORCHREC_DYN_SIMD void mark_bits(const uint64_t* words, int64_t row, int64_t count, bool by_count, uint64_t end,
                                 uint64_t cut, BitMarks& marks) noexcept {
  if (by_count)
    marks.mark<true>(words, row, count, end, cut);
  else
    marks.mark<false>(words, row, count, end, cut);
}

KeyRange range_of_keys(const Question& asked) {
  KeyRange range;
  std::mutex mutex;
  for_each_piece(asked.rows, kRowPiece, [&](int64_t begin, int64_t end) {
    KeyRange here;
    for_score_stretches(asked.scores, begin, end, [&](const uint64_t* words, int64_t, int64_t count) {
      add_range(words, count, asked.by_count, asked.end, here);
    });
    const std::lock_guard<std::mutex> lock(mutex);
    range.add(here);
  });
  return range;
}

std::vector<uint64_t> histogram(const Question& asked, uint64_t low, uint64_t high, int shift) {
  std::vector<uint64_t> totals(KeyBins::kBins);
  std::mutex mutex;
  for_each_piece(asked.rows, kRowPiece, [&](int64_t begin, int64_t end) {
    KeyBins bins{low, high, shift};
    for_score_stretches(asked.scores, begin, end, [&](const uint64_t* words, int64_t, int64_t count) {
      if (asked.by_count)
        bins.count_keys<true>(words, count, asked.end);
      else
        bins.count_keys<false>(words, count, asked.end);
    });
    const std::lock_guard<std::mutex> lock(mutex);
    bins.add_to(totals);
  });
  return totals;
}

TORCHREC_DYN_SIMD void flag_low(const Slot* slots, int64_t count, uint64_t bound, uint8_t* flags) noexcept {
  flag_low_ties(slots, count, bound, flags);
}

// The marked slots of both arrays, piece by piece.
template <typename Marks>
std::vector<MarkedSlots> collect(const IdMapView& map, const Marks& marks, uint64_t bound, bool only_ties) {
  std::vector<MarkedSlots> found;
  for (int a = 0; a < (map.is_growing() ? 2 : 1); ++a) {
    const SlotArray& array = map.arrays[a];
    const size_t first = found.size();
    found.resize(first + static_cast<size_t>((array.capacity + kSlotPiece - 1) / kSlotPiece));
    for_each_piece(array.capacity, kSlotPiece, [&](int64_t begin, int64_t end) {
      MarkedSlots& piece = found[first + static_cast<size_t>(begin / kSlotPiece)];
      if (only_ties && bound < kNoBound)
        collect_low_ties(array, begin, end, marks, bound, flag_low, piece);
      else
        collect_chosen(array, begin, end, marks, bound, piece);
    });
  }
  return found;
}

std::vector<uint64_t> tie_words(const std::vector<MarkedSlots>& found) {
  std::vector<uint64_t> words;
  for (const MarkedSlots& piece : found) words.insert(words.end(), piece.tie_words.begin(), piece.tie_words.end());
  return words;
}

template <typename Marks>
std::tuple<Tensor, Tensor> ids_and_rows(const std::vector<MarkedSlots>& found, const Marks& marks, uint64_t last_tie) {
  std::vector<Slot> kept;
  for (const MarkedSlots& piece : found)
    for (const Slot& slot : piece.slots)
      if (!marks.is_tie(slot.place) || tie_word(slot.id) <= last_tie) kept.push_back(slot);
  const auto count = static_cast<int64_t>(kept.size());
  std::tuple<Tensor, Tensor> result{new_int64(count), new_int64(count)};
  int64_t* id = mutable_data<int64_t>(std::get<0>(result));
  int64_t* row = mutable_data<int64_t>(std::get<1>(result));
  for (const Slot& slot : kept) {
    *id++ = slot.id;
    *row++ = slot.row();
  }
  return result;
}

// The ids and rows up to the cut; of the ties at the cut, the rows with the lowest tie words.
template <typename Marks, typename Mark>
std::tuple<Tensor, Tensor> rows_up_to(const IdMapView& map, const Question& asked, const Cut& cut, bool only_ties,
                                      const Mark& mark) {
  Marks marks(asked.rows);
  for_each_piece(asked.rows, kRowPiece, [&](int64_t begin, int64_t end) {
    for_score_stretches(asked.scores, begin, end, [&](const uint64_t* words, int64_t row, int64_t count) {
      mark(words, row, count, asked.by_count, asked.end, cut.key, marks);
    });
  });
  const bool all = cut.needed == cut.ties;
  std::vector<MarkedSlots> found =
      collect(map, marks, all ? kNoBound : bound_of_ties(map, marks, cut.needed, cut.ties), only_ties);
  if (all) return ids_and_rows(found, marks, kNoBound);
  std::vector<uint64_t> ties = tie_words(found);
  if (ties.size() < cut.needed) {
    found = collect(map, marks, kNoBound, only_ties);
    ties = tie_words(found);
  }
  uint64_t last_tie = kNoBound;
  if (ties.size() > cut.needed) {
    const auto last = ties.begin() + static_cast<int64_t>(cut.needed) - 1;
    std::nth_element(ties.begin(), last, ties.end());
    last_tie = *last;
  }
  return ids_and_rows(found, marks, last_tie);
}

std::tuple<Tensor, Tensor> find_lowest(const IdMapView& map, const Question& asked, uint64_t most) {
  const KeyRange range = range_of_keys(asked);
  if (range.rows == 0 || most == 0) return {new_int64(0), new_int64(0)};
  Cut cut{range.high, 0, 0};
  if (most < range.rows)
    cut = find_cut(range, most,
                   [&](uint64_t low, uint64_t high, int shift) { return histogram(asked, low, high, shift); });
  const bool only_ties = cut.needed == most;
  return asked.rows <= ByteMarks::kMostRows ? rows_up_to<ByteMarks>(map, asked, cut, only_ties, mark_bytes)
                                            : rows_up_to<BitMarks>(map, asked, cut, only_ties, mark_bits);
}

std::tuple<Tensor, Tensor> lowest_scores(std::vector<Tensor> slots, const Tensor& moved, std::vector<Tensor> scores,
                                         int64_t shift, int64_t rows, bool by_count, int64_t before, int64_t most) {
  const char* op = "lowest_scores";
  const IdMapView map = one_map(op, slots, moved);
  BlockList<uint64_t> blocks(op, "scores", scores);
  const ScoreBlocks words = blocks.words(layout_of_one(op, scores, shift, 1));
  check_lowest(words.capacity, rows, most);
  return find_lowest(map, {words, rows, by_count, end_of_scores(before)}, static_cast<uint64_t>(most));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torchrec_dyn, CPU, m) { m.impl(TORCHREC_DYN_KERNEL("lowest_scores", &lowest_scores)); }

}  // namespace torchrec_dyn
