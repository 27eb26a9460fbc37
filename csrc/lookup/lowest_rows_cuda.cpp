// The ids and rows with the lowest scores of prepared tables, on a device: lowest_rows_cpu.cpp for CUDA.
#include <algorithm>
#include <tuple>
#include <vector>

#include "device_call.h"
#include "life/lowest_scores_kernels.h"
#include "lookup/listed_rows_kernels.h"
#include "lookup/lowest_rows_arguments.h"
#include "lookup/sent_scores_arguments.h"

namespace torchrec_dyn {
namespace {

// The key at which the `most` lowest rows end.
const KeyCut* find_cut(DeviceCall& call, const ScoredRows& table, int64_t most) {
  constexpr int64_t kCounts = kDigitCopies * kDigitValues;
  const simt::Stream& stream = call.stream();
  auto* cut = call.allocate_for<KeyCut>(kDigits + 1);
  auto* counts = call.zeros<int64_t>(kDigits * kCounts);
  auto* sums = call.allocate_for<int64_t>(kDigitValues + 1);
  const KeyCut all{0, most};
  simt::copy_to_device(stream, cut, &all, sizeof all);
  for (int64_t shift = (kDigits - 1) * kDigitBits; shift >= 0; shift -= kDigitBits, ++cut, counts += kCounts) {
    simt::launch(stream, table.rows, CountKeys{table, cut, shift, counts});
    simt::launch(stream, kDigitValues + 1, AddCopies{counts, sums});
    simt::exclusive_sum(stream, sums, kDigitValues + 1);
    simt::launch(stream, kDigitValues, ChooseDigit{sums, shift, cut, cut + 1});
  }
  return cut;
}

LowestMarks mark_lowest(DeviceCall& call, const ScoredRows& table, const KeyCut* cut) {
  const int64_t words = (table.rows + LowestMarks::kRows - 1) / LowestMarks::kRows;
  const LowestMarks marks{call.zeros<int64_t>(words), table.rows};
  simt::launch(call.stream(), table.rows, MarkLowest{table, cut, marks});
  return marks;
}

// A question that the kernels of a call answer.
struct Search {
  IdMapView map;
  ScoreBlocks words;  // on the device
  LowestMarks marks;
  int64_t* places;  // of bins of ties: storage of ListLowest

  int arrays() const { return map.is_growing() ? 2 : 1; }
};

// The words of a table with order keys in place of counts.
ScoreBlocks decayed_words(DeviceCall& call, const ScoreBlocks& words, int64_t rows, const int64_t* begins) {
  constexpr int64_t kOneBlock = 62;  // bits of a row in it
  auto* const keyed = call.allocate_for<uint64_t>(rows);
  const int64_t* const sent = call.copy_of(std::vector<int64_t>(begins, begins + kMostHalvings));
  simt::launch(call.stream(), rows, KeyDecayed{words, sent, keyed});
  return {call.copy_of(std::vector<uint64_t*>{keyed}), kOneBlock, rows};
}

// Begins the search for the lowest rows; the numbers of its list are written to `counts`.
Search begin_search(DeviceCall& call, const IdMapView& map, const ScoredRows& table, int64_t most,
                    LowestCounts* counts) {
  const simt::Stream& stream = call.stream();
  const KeyCut* cut = find_cut(call, table, most);
  const Search search{map, table.scores, mark_lowest(call, table, cut), call.zeros<int64_t>(2 * kTieBins + 1)};
  for (int a = 0; a < search.arrays(); ++a)
    simt::launch(stream, map.arrays[a].capacity, CountMarked{map.arrays[a], search.marks, search.places});
  simt::exclusive_sum(stream, search.places, 2 * kTieBins + 1);
  simt::launch(stream, kTieBins, ChooseTies{search.places, cut, counts});
  return search;
}

// Writes the ids and rows of a search whose numbers are known.
void end_search(DeviceCall& call, const Search& search, const LowestCounts& found, int64_t count, int64_t* ids,
                int64_t* rows) {
  const simt::Stream& stream = call.stream();
  const int64_t listed = found.below + found.ties;
  simt::Pairs list{call.allocate_for<uint64_t>(listed), call.allocate_for<int64_t>(listed)};
  for (int a = 0; a < search.arrays(); ++a)
    simt::launch(stream, search.map.arrays[a].capacity,
                 ListLowest{search.map.arrays[a], search.marks, found.last, search.places, listed, list});
  list = simt::sort_pairs(stream, list, listed);
  auto* ties_before = call.allocate_for<int64_t>(listed);
  simt::launch(stream, listed, FlagTies{list.values, ties_before});
  simt::exclusive_sum(stream, ties_before, listed);
  simt::launch(stream, listed, WriteLowest{list, ties_before, found.needed, count, ids, rows});
}

// Sorts ids and rows, which are by tie word, by last_seen; writes last_seen.
void sort_by_last_seen(DeviceCall& call, const ScoreBlocks& words, int64_t count, int64_t* ids, int64_t* rows,
                       int64_t* last_seen) {
  const simt::Stream& stream = call.stream();
  simt::Pairs places{call.allocate_for<uint64_t>(count), call.allocate_for<int64_t>(count)};
  simt::launch(stream, count, ReadOrder{words, rows, places});
  places = simt::sort_pairs(stream, places, count, 0, kOrderKeyBits);
  const ListedIds given{call.allocate_for<int64_t>(count), call.allocate_for<int64_t>(count)};
  simt::launch(stream, count, CopyListed{ids, rows, given});
  simt::launch(stream, count, WriteInOrder{given, places, ids, rows, last_seen});
}

LowestRows lowest_rows(const LowestRowsCall& given) {
  const std::vector<LowestQuestion> questions = given.read();
  const PreparedTables& tables = *given.tables;
  const auto asked = static_cast<int64_t>(questions.size());
  Tensor offsets = new_int64(asked + 1);
  auto* const offset = mutable_data<int64_t>(offsets);
  std::fill(offset, offset + asked + 1, int64_t{0});
  DeviceCall call(given.like);
  if (asked == 0) return {new_device_tensor({0}), new_device_tensor({0}), new_device_tensor({0}), offsets};
  const LastWrite hidden = hide_scores(call, given.kept, tables);
  uint64_t* const* pointers = call.copy_of(tables.score_blocks);
  auto* const counts = call.zeros<LowestCounts>(asked);
  std::vector<Search> searches;
  for (size_t q = 0; q < questions.size(); ++q) {
    const LowestQuestion& question = questions[q];
    const auto t = static_cast<size_t>(question.table);
    if (question.rows == 0 || question.most == 0) {
      searches.push_back({tables.maps[t], {}, {}, nullptr});
      continue;
    }
    ScoreBlocks words = tables.scores[t];
    words.blocks = pointers + (words.blocks - tables.score_blocks.data());
    if (given.begins(q) != nullptr) words = decayed_words(call, words, question.rows, given.begins(q));
    const ScoredRows table{words, question.rows, question.by_count != 0, end_of_scores(question.before)};
    searches.push_back(begin_search(call, tables.maps[t], table, question.most, counts + q));
  }
  std::vector<LowestCounts> found(questions.size());
  simt::copy_to_host(call.stream(), found.data(), counts, asked * static_cast<int64_t>(sizeof(LowestCounts)));
  for (size_t q = 0; q < questions.size(); ++q)
    offset[q + 1] = offset[q] + found[q].below + std::min(found[q].ties, found[q].needed);
  const int64_t count = offset[asked];
  Tensor ids = new_device_tensor({count}), rows = new_device_tensor({count});
  Tensor last_seen = new_device_tensor({given.in_order ? count : 0});
  for (size_t q = 0; q < questions.size(); ++q) {
    const int64_t own = offset[q + 1] - offset[q];
    if (own == 0) continue;
    auto *id = mutable_data<int64_t>(ids) + offset[q], *row = mutable_data<int64_t>(rows) + offset[q];
    end_search(call, searches[q], found[q], own, id, row);
    if (given.in_order)
      sort_by_last_seen(call, searches[q].words, own, id, row, mutable_data<int64_t>(last_seen) + offset[q]);
  }
  return {ids, rows, last_seen, offsets};
}

ChosenRows choose_listed(const ChooseListedCall& given) {
  const std::vector<ListedSpan> spans = given.read();
  const PreparedTables& tables = *given.tables;
  const auto lists = static_cast<int64_t>(spans.size());
  Tensor offsets = new_int64(lists + 1), firsts = new_int64(lists);
  auto* const offset = mutable_data<int64_t>(offsets);
  auto* const first = mutable_data<int64_t>(firsts);
  std::vector<ListedRows> read;
  std::vector<int64_t> begins{0};
  for (size_t l = 0; l < spans.size(); ++l) {
    const ListedSpan& span = spans[l];
    read.push_back({const_data<int64_t>(given.listed[l]), given.listed[l].size(1), span.begin, span.table});
    begins.push_back(begins.back() + span.end - span.begin);
    first[l] = span.end;
    offset[l] = 0;
  }
  offset[lists] = 0;
  const int64_t n = begins.back();
  const auto none = [&] { return new_tensor({0}, ScalarType::Long, tables.device); };
  if (n == 0) return {none(), none(), offsets, firsts};
  DeviceCall call(given.listed.front());
  const LastWrite hidden = hide_scores(call, given.kept, tables);
  const std::vector<int64_t> nothing(tables.count());
  const ListedBatch batch{call.copy_of(read), call.copy_of(begins), lists,
                          send_scores(call, tables, nothing.data(), nullptr), call.allocate_for<int64_t>(n + 1)};
  simt::launch(call.stream(), n + 1, FlagUnchanged{batch, n});
  simt::exclusive_sum(call.stream(), batch.places, n + 1);
  auto* const words = call.zeros<int64_t>(2 * lists + 1);  // where the chosen rows of each list begin; the first ones
  simt::launch(call.stream(), lists + 1, ReadChosenOffsets{batch, words});
  simt::launch(call.stream(), n, FindFirstChosen{batch, words + lists + 1});
  std::vector<int64_t> host(static_cast<size_t>(2 * lists + 1));
  simt::copy_to_host(call.stream(), host.data(), words, static_cast<int64_t>(host.size() * sizeof(int64_t)));
  std::vector<int64_t> taken;
  for (size_t l = 0; l < spans.size(); ++l) {
    taken.push_back(std::min(host[l + 1] - host[l], spans[l].most));
    offset[l + 1] = offset[l] + taken.back();
    if (taken.back() > 0) first[l] = spans[l].end + host[static_cast<size_t>(lists) + 1 + l];
  }
  Tensor ids = new_device_tensor({offset[lists]}), rows = new_device_tensor({offset[lists]});
  const std::vector<int64_t> into(offset, offset + lists);
  simt::launch(call.stream(), n,
               ListUnchanged{batch, call.copy_of(into), call.copy_of(taken), mutable_data<int64_t>(ids),
                             mutable_data<int64_t>(rows)});
  return {ids, rows, offsets, firsts};
}

}  // namespace

TORCHREC_DYN_DEVICE_KERNELS(m) {
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("lowest_rows", &lowest_rows));
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("choose_listed", &choose_listed));
}

}  // namespace torchrec_dyn
