// The kernels of the update (simt.h) on the threads of the simt build, where threads mark the same bytes, count the
// same senders and report the same wrong ids. Built with ThreadSanitizer, and with AddressSanitizer and UBSan, by
// `run`.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <set>
#include <vector>

#include "lookup/row_update_kernels.h"
#include "philox.h"
#include "sharing.h"
#include "simt_cpu.h"

namespace torchrec_dyn {
namespace {

const simt::Stream kStream{nullptr, nullptr};

// One table of 1024 rows in blocks of 64, a bag for each two ids. Half of the ids have one of three rows.
// `of_last_row`: if it is not 0, so many ids have the last row, and none is absent: the sorted ids end with those of
// this row.
template <typename Key, typename Shape>
void update_rows(int64_t columns, int64_t of_last_row = 0) {
  constexpr int64_t kIds = 6000, kBags = kIds / 2, kRows = 1024, kShift = 6;
  const auto width = static_cast<size_t>(columns);
  std::vector<float> weights(kRows * width), states(kRows), grad(kBags * width), mean_factors(kIds);
  std::vector<float*> blocks, state_blocks;
  for (int64_t b = 0; b < kRows / 64; ++b) {
    blocks.push_back(weights.data() + b * 64 * columns);
    state_blocks.push_back(states.data() + b * 64);
  }
  for (size_t i = 0; i < grad.size(); ++i) grad[i] = static_cast<float>(i % 2039) * 0.37f - 300.0f;
  std::vector<int64_t> offsets, rows, names;
  std::vector<int32_t> senders;
  for (int64_t b = 0; b <= kBags; ++b) offsets.push_back(2 * b);
  for (int64_t i = 0; i < kIds; ++i) {
    const Philox4 random = random_words(6, i, 0, 0);
    const int64_t drawn = of_last_row == 0 ? random.words[0] % (kRows + 1) - int64_t{1} : random.words[0] % (kRows - 1);
    rows.push_back(i >= kIds - of_last_row ? kRows - 1 : i % 2 == 0 ? random.words[0] % 3 : drawn);
    names.push_back(i);
    senders.push_back(static_cast<int32_t>(random.words[1] % 4) - 1);
  }
  std::vector<uint8_t> bits(kRows / 8);
  uint8_t* mark_block = bits.data();
  const RowBlocks<float> row_blocks{blocks.data(), kShift, columns, kRows};
  const RowBlocks<float> states_of_rows{state_blocks.data(), kShift, 1, kRows};
  const MarkBits marks{&mark_block, 7, kRows};
  const TileTable<float> table{{nullptr, nullptr, 0, static_cast<uint32_t>(columns), 0.5f},
                               {nullptr, blocks.data(), kShift, static_cast<uint32_t>(columns)},
                               {nullptr, state_blocks.data(), kShift, 1},
                               {},
                               {1.0f, 1.0f},
                               {9, 0, 1},
                               marks};
  const UpdateRule rule{Optimizer::kRowwiseAdagrad, {0.1f, 1e-8f, 0.0f, 0.0f}};
  const Segment segment{0, 0, kBags, 0, columns};
  const KeyedTable keyed{kRows, columns, 1, 1, OnNonfinite::kWrite, nullptr};
  const uint64_t first_key = 0;
  WrongUpdate wrong{};
  const UpdatedIds ids{{&segment, nullptr, 1, offsets.data(), kBags},
                       &keyed,
                       &first_key,
                       1,
                       kIds,
                       rows.data(),
                       senders.data(),
                       kRows,
                       &wrong};
  std::vector<Key> keys(kIds);
  std::vector<ValueOf<Key>> values(kIds), places(kIds);
  std::vector<uint64_t> sender_keys(kIds);
  std::vector<int64_t> moved(kIds), distinct(kIds);
  constexpr int64_t kLines = (kIds - 1) / kPieceIds;
  std::vector<float> pieces(static_cast<size_t>(kLines) * width);
  const IdTerms<Key> terms{places.data(), mean_factors.data()};
  const SortedGrads<Key, Shape> grads{{ids, keys.data(), values.data()}, terms, grad.data(), pieces.data(), columns};
  int64_t error[kErrorWords] = {};
  const auto run = [&] {
    error[0] = 0;
    const KeyPairs<Key> pairs{keys.data(), values.data()};
    const simt::Pairs by_sender{sender_keys.data(), moved.data()};
    simt::launch(kStream, kIds, KeyIds<Key>{ids, pairs, terms, nullptr, mean_factors.data()});
    simt::sort_pairs(kStream, pairs, kIds);
    simt::launch(kStream, kIds, KeySenders<Key>{grads.sorted, by_sender});
    simt::sort_pairs(kStream, by_sender, kIds);
    simt::launch(kStream, kIds, CountSenders{sender_keys.data(), distinct.data()});
    simt::launch_tiles(kStream, kLines, SumPieces<Key, Shape>{grads});
    simt::launch_tiles(
        kStream, kIds,
        UpdateRows<float, Key, Shape, Visit::kUpdate>{grads, &table, rule, rule_facts(rule.optimizer), true, true,
                                                      names.data(), distinct.data(), nullptr, nullptr});
    simt::launch(kStream, 1, ReportWrongUpdate{ids, "op", {error, 1}});
  };
  run();
  check(wrong.any == 0 && error[0] == 0, "nothing is wrong");
  for (int64_t row = 0; row < kRows; ++row) {
    std::vector<float> total, piece;
    std::set<int32_t> sent;
    int64_t count = 0;
    const auto add_piece = [&] {
      for (size_t c = 0; c < piece.size(); ++c) total[c] = count <= kPieceIds ? piece[c] : total[c] + piece[c];
    };
    for (int64_t i = 0; i < kIds; ++i) {
      if (rows[static_cast<size_t>(i)] != row) continue;
      const float* own = grad.data() + i / 2 * columns;
      if (count > 0 && count % kPieceIds == 0) add_piece();
      if (count == 0) total.resize(width);
      const bool begins = count++ % kPieceIds == 0;
      piece.resize(width);
      for (size_t c = 0; c < width; ++c) piece[c] = begins ? 0.5f * own[c] : piece[c] + 0.5f * own[c];
      sent.insert(senders[static_cast<size_t>(i)]);
    }
    add_piece();
    std::vector<float> expected(width);
    float state = 0.0f;
    float* const own_states[kMostStates] = {&state};
    if (count > 0) {
      for (float& number : total) number *= 0.5f / static_cast<float>(sent.size());
      update_row(rule, table.correction, row_square(rule, total.data(), expected.data(), columns), 1.0f, total.data(),
                 expected.data(), own_states, columns);
    }
    check(std::equal(expected.begin(), expected.end(), row_blocks.row(row)), "a row is updated by its gradients");
    check(*states_of_rows.row(row) == state, "a row has its state");
    check(((*marks.byte(row) & mark_of(row)) != 0) == (count > 0), "updated rows are marked");
  }

  const std::vector<float> before = weights;
  rows[900] = kRows;
  rows[400] = std::numeric_limits<int64_t>::min();
  for (size_t i = 100; i < 1000; i += 3) senders[i] = std::numeric_limits<int32_t>::max();
  run();
  check(kBags - wrong.bags_left == 200 && wrong.senders == 1, "the first bag with a row outside is found");
  check(wrong.lowest_sender == 0 && wrong.highest_sender == int64_t{1} << 31, "the range of the senders is found");
  check(error[0] == 1 && error[2] == static_cast<int64_t>(WrongContents::kRows) && error[3] == kRows, "it is reported");
  for (size_t b = 100; b < 1000; b += 3) offsets[b] = std::numeric_limits<int64_t>::max() - static_cast<int64_t>(b);
  run();
  check(wrong.offsets_left == kBags - 100 && weights == before, "wrong offsets are seen, and nothing is written");
  check(error[2] == static_cast<int64_t>(WrongContents::kOffsets) && error[3] == offsets[100] && error[4] == 202,
        "the first two wrong offsets are reported");
}

}  // namespace
}  // namespace torchrec_dyn

int main() {
  using namespace torchrec_dyn;
  update_rows<uint32_t, Tile16>(8);
  update_rows<uint32_t, Tile64>(64);
  update_rows<uint32_t, Tile256>(192);
  update_rows<uint32_t, WideTile>(132);
  update_rows<uint32_t, AnyTile>(5);
  for (const int64_t ids : {16, 48}) {  // all lanes of a tile read ids in each round: none is left for another
    update_rows<uint32_t, Tile16>(8, ids);
    update_rows<uint32_t, AnyTile>(5, ids);
  }
  update_rows<uint64_t, AnyTile>(80);
  std::puts("update_kernels: ok");
}
