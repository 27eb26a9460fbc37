// The ids and rows with the lowest scores of prepared tables, on the CPU; and those of lists of them.
#include "life/lowest_scores_cpu.h"

#include <algorithm>
#include <mutex>
#include <tuple>
#include <vector>

#include "life/oldest_first_cpu.h"
#include "lookup/lowest_rows_arguments.h"
#include "parallel.h"

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
std::vector<Slot> chosen_slots(const std::vector<MarkedSlots>& found, const Marks& marks, uint64_t last_tie) {
  std::vector<Slot> kept;
  for (const MarkedSlots& piece : found)
    for (const Slot& slot : piece.slots)
      if (!marks.is_tie(slot.place) || tie_word(slot.id) <= last_tie) kept.push_back(slot);
  return kept;
}

// The ids and rows up to the cut; of the ties at the cut, the rows with the lowest tie words.
template <typename Marks, typename Mark>
std::vector<Slot> rows_up_to(const IdMapView& map, const Question& asked, const Cut& cut, bool only_ties,
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
  if (all) return chosen_slots(found, marks, kNoBound);
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
  return chosen_slots(found, marks, last_tie);
}

std::vector<Slot> find_lowest(const IdMapView& map, const Question& asked, uint64_t most) {
  const KeyRange range = range_of_keys(asked);
  if (range.rows == 0 || most == 0) return {};
  Cut cut{range.high, 0, 0};
  if (most < range.rows)
    cut = find_cut(range, most,
                   [&](uint64_t low, uint64_t high, int shift) { return histogram(asked, low, high, shift); });
  const bool only_ties = cut.needed == most;
  return asked.rows <= ByteMarks::kMostRows ? rows_up_to<ByteMarks>(map, asked, cut, only_ties, mark_bytes)
                                            : rows_up_to<BitMarks>(map, asked, cut, only_ties, mark_bits);
}

// The words of a table with order keys in place of counts.
std::vector<uint64_t> decayed_words(const ScoreBlocks& scores, int64_t rows, const int64_t* begins) {
  std::vector<uint64_t> words(static_cast<size_t>(rows));
  for_each_piece(rows, kRowPiece, [&](int64_t begin, int64_t end) {
    for_score_stretches(scores, begin, end, [&](const uint64_t* word, int64_t row, int64_t count) {
      for (int64_t i = 0; i < count; ++i) words[static_cast<size_t>(row + i)] = with_decayed_key(word[i], begins);
    });
  });
  return words;
}

std::vector<Slot> answer(const PreparedTables& tables, const LowestQuestion& asked, const int64_t* begins) {
  const auto t = static_cast<size_t>(asked.table);
  const auto find = [&](const ScoreBlocks& words) {
    return find_lowest(tables.maps[t], {words, asked.rows, asked.by_count != 0, end_of_scores(asked.before)},
                       static_cast<uint64_t>(asked.most));
  };
  if (begins == nullptr) return find(tables.scores[t]);
  std::vector<uint64_t> words = decayed_words(tables.scores[t], asked.rows, begins);
  constexpr int64_t kOneBlock = 62;  // bits of a row in it
  uint64_t* const block = words.data();
  return find({&block, kOneBlock, asked.rows});
}

// The last_seen of the rows of slots.
std::vector<uint64_t> last_seen_of_slots(const std::vector<Slot>& slots, const ScoreBlocks& words) {
  constexpr int64_t kGrain = 2048;
  std::vector<uint64_t> seen(slots.size());
  for_each_range(static_cast<int64_t>(slots.size()), kGrain, [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      if (i + kScoreBurst < slots.size()) __builtin_prefetch(words.word(slots[i + kScoreBurst].row()), 0, 2);
      seen[i] = last_seen_of(*words.word(slots[i].row()));
    }
  });
  return seen;
}

template <typename Asked>
std::vector<int64_t> tables_of(const std::vector<Asked>& asked) {
  std::vector<int64_t> tables;
  for (const Asked& one : asked) tables.push_back(one.table);
  return tables;
}

LowestRows lowest_rows(const LowestRowsCall& call) {
  const std::vector<LowestQuestion> questions = call.read();
  const LastWrite hidden = hide_scores(call.kept, *call.tables, tables_of(questions));
  Tensor offsets = new_int64(static_cast<int64_t>(questions.size()) + 1);
  auto* const offset = mutable_data<int64_t>(offsets);
  offset[0] = 0;
  std::vector<std::vector<Slot>> found;
  for (size_t q = 0; q < questions.size(); ++q) {
    found.push_back(answer(*call.tables, questions[q], call.begins(q)));
    TORCHREC_DYN_CHECK(!call.in_order || found[q].size() < (size_t{1} << 32), LowestRowsCall::kOp,
                       ": expected fewer than 2^32 ids in order, got ", found[q].size(), ".");
    offset[q + 1] = offset[q] + static_cast<int64_t>(found[q].size());
  }
  const int64_t count = offset[questions.size()];
  Tensor ids = new_int64(count), rows = new_int64(count), last_seen = new_int64(call.in_order ? count : 0);
  auto *id = mutable_data<int64_t>(ids), *row = mutable_data<int64_t>(rows), *seen = mutable_data<int64_t>(last_seen);
  for (size_t q = 0; q < questions.size(); ++q) {
    const ScoreBlocks& words = call.tables->scores[static_cast<size_t>(questions[q].table)];
    if (!call.in_order) {
      for (const Slot& slot : found[q]) {
        *id++ = slot.id;
        *row++ = slot.row();
      }
      continue;
    }
    const std::vector<uint64_t> scored = last_seen_of_slots(found[q], words);
    for (const uint64_t place : oldest_first(found[q], scored)) {
      *seen++ = static_cast<int64_t>(scored[place]);
      *id++ = found[q][place].id;
      *row++ = found[q][place].row();
    }
  }
  return {ids, rows, last_seen, offsets};
}

ChosenRows choose_listed(const ChooseListedCall& call) {
  const std::vector<ListedSpan> spans = call.read();
  const LastWrite hidden = hide_scores(call.kept, *call.tables, tables_of(spans));
  const auto lists = static_cast<int64_t>(spans.size());
  Tensor offsets = new_int64(lists + 1), firsts = new_int64(lists);
  std::vector<std::vector<int64_t>> chosen(spans.size());  // places in the list
  for_each_task(lists, [&](int64_t l) {
    const ListedSpan& span = spans[static_cast<size_t>(l)];
    const ScoreBlocks& words = call.tables->scores[static_cast<size_t>(span.table)];
    const int64_t size = call.listed[static_cast<size_t>(l)].size(1);
    const int64_t* const row = const_data<int64_t>(call.listed[static_cast<size_t>(l)]) + size;
    const int64_t* const seen = row + size;
    std::vector<int64_t>& places = chosen[static_cast<size_t>(l)];
    for (int64_t i = span.begin; i < span.end && static_cast<int64_t>(places.size()) < span.most; ++i) {
      if ((i - span.begin) % kScoreBurst == 0) prefetch_scores(words, row, i, span.end);
      if (is_unchanged(words, row[i], seen[i])) places.push_back(i);
    }
  });
  auto* const offset = mutable_data<int64_t>(offsets);
  auto* const first = mutable_data<int64_t>(firsts);
  offset[0] = 0;
  for (size_t l = 0; l < spans.size(); ++l) {
    offset[l + 1] = offset[l] + static_cast<int64_t>(chosen[l].size());
    first[l] = chosen[l].empty() ? spans[l].end : chosen[l].front();
  }
  Tensor ids = new_int64(offset[lists]), rows = new_int64(offset[lists]);
  auto *id = mutable_data<int64_t>(ids), *own = mutable_data<int64_t>(rows);
  for (size_t l = 0; l < spans.size(); ++l) {
    const int64_t* const list = const_data<int64_t>(call.listed[l]);
    for (const int64_t place : chosen[l]) {
      *id++ = list[place];
      *own++ = list[call.listed[l].size(1) + place];
    }
  }
  return {ids, rows, offsets, firsts};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torchrec_dyn, CPU, m) {
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("lowest_rows", &lowest_rows));
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("choose_listed", &choose_listed));
}

}  // namespace torchrec_dyn
