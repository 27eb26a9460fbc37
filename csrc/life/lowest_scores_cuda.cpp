// The ids and rows with the lowest scores of one map, on a device: lowest_scores_cpu.cpp for CUDA.
#include <algorithm>
#include <tuple>
#include <vector>

#include "device_call.h"
#include "kernel.h"
#include "life/lowest_scores_kernels.h"
#include "life/scores_arguments.h"
#include "storage/id_map_arguments.h"
#include "storage/table_words_arguments.h"

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

std::tuple<Tensor, Tensor> find_lowest(DeviceCall& call, const IdMapView& map, const ScoredRows& table, int64_t most) {
  const simt::Stream& stream = call.stream();
  const KeyCut* cut = find_cut(call, table, most);
  const LowestMarks marks = mark_lowest(call, table, cut);
  const int arrays = map.is_growing() ? 2 : 1;
  auto* places = call.zeros<int64_t>(2 * kTieBins + 1);
  for (int a = 0; a < arrays; ++a)
    simt::launch(stream, map.arrays[a].capacity, CountMarked{map.arrays[a], marks, places});
  simt::exclusive_sum(stream, places, 2 * kTieBins + 1);
  auto* counts = call.allocate_for<LowestCounts>(1);
  simt::launch(stream, kTieBins, ChooseTies{places, cut, counts});
  LowestCounts found;
  simt::copy_to_host(stream, &found, counts, sizeof found);  // a wait: the result has a length
  const int64_t listed = found.below + found.ties;
  simt::Pairs list{call.allocate_for<uint64_t>(listed), call.allocate_for<int64_t>(listed)};
  for (int a = 0; a < arrays; ++a)
    simt::launch(stream, map.arrays[a].capacity, ListLowest{map.arrays[a], marks, found.last, places, listed, list});
  list = simt::sort_pairs(stream, list, listed);
  auto* ties_before = call.allocate_for<int64_t>(listed);
  simt::launch(stream, listed, FlagTies{list.values, ties_before});
  simt::exclusive_sum(stream, ties_before, listed);
  const int64_t count = found.below + std::min(found.ties, found.needed);
  Tensor ids = new_device_tensor({count}), rows = new_device_tensor({count});
  simt::launch(
      stream, listed,
      WriteLowest{list, ties_before, found.needed, count, mutable_data<int64_t>(ids), mutable_data<int64_t>(rows)});
  return {ids, rows};
}

std::tuple<Tensor, Tensor> lowest_scores(std::vector<Tensor> slots, const Tensor& moved, std::vector<Tensor> scores,
                                         int64_t shift, int64_t rows, bool by_count, int64_t before, int64_t most) {
  const char* op = "lowest_scores";
  const Device device = slots.empty() ? Device(kDevice) : slots.front().device();
  const IdMapView map = one_map(op, slots, moved, device);
  BlockList<uint64_t> blocks(op, "scores", scores, device);
  const ScoreBlocks words = blocks.words(layout_of_one(op, scores, shift, 1));
  check_lowest(words.capacity, rows, most);
  DeviceCall call(slots.front());
  if (rows == 0 || most == 0) return {new_device_tensor({0}), new_device_tensor({0})};
  return find_lowest(call, map, {send_words(call, blocks, words), rows, by_count, end_of_scores(before)}, most);
}

}  // namespace

TORCHREC_DYN_DEVICE_KERNELS(m) { m.impl(TORCHREC_DYN_KERNEL("lowest_scores", &lowest_scores)); }

}  // namespace torchrec_dyn
