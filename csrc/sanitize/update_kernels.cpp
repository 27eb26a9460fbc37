// The bodies of the update (simt.h) on the threads of the simt build, where turns mark the same bytes, count the same
// senders and report the same wrong ids. Built with ThreadSanitizer, and with AddressSanitizer and UBSan, by `run`.
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

const simt::Queue kQueue{nullptr, nullptr};

// One table of 1024 rows in blocks of 64, a bag for each two ids. Half of the ids have one of three rows.
void update_rows(int64_t columns) {
  constexpr int64_t kIds = 6000, kBags = kIds / 2, kRows = 1024, kShift = 6;
  const auto width = static_cast<size_t>(columns);
  std::vector<float> weights(kRows * width), states(kRows), grad(kBags * width);
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
    rows.push_back(i % 2 == 0 ? random.words[0] % 3 : random.words[0] % (kRows + 1) - 1);
    names.push_back(i);
    senders.push_back(static_cast<int32_t>(random.words[1] % 4) - 1);
  }
  std::vector<uint8_t> bits(kRows / 8);
  uint8_t* mark_block = bits.data();
  const UpdatedTable<float> table{{blocks.data(), kShift, columns, kRows},
                                  {state_blocks.data(), kShift, 1, kRows},
                                  {},
                                  {&mark_block, 7, kRows},
                                  {9, 0, 1},
                                  {1.0f, 1.0f},
                                  0.5f};
  const UpdateRule rule{Optimizer::kRowwiseAdagrad, WeightDecay::kNone, 0.1f, 1e-8f, 0.9f, 0.999f, 0.0f};
  const Segment segment{0, 0, kBags, 0, columns};
  const KeyedTable keyed{0, kRows, columns, 1};
  WrongUpdate wrong{};
  const UpdatedIds ids{{&segment, nullptr, 1, offsets.data(), kBags},
                       &keyed,
                       1,
                       kIds,
                       rows.data(),
                       senders.data(),
                       nullptr,
                       true,
                       kRows,
                       &wrong};
  std::vector<uint64_t> keys(kIds), sender_keys(kIds);
  std::vector<int64_t> values(kIds), unused(kIds), distinct(kIds);
  constexpr int64_t kLines = (kIds - 1) / kPieceIds;
  std::vector<float> pieces(static_cast<size_t>(kLines) * width);
  const SortedGrads grads{{ids, keys.data(), values.data()}, grad.data(), pieces.data(), columns};
  const auto run = [&] {
    simt::each(kQueue, kIds, KeyIds{ids, keys.data(), values.data()});
    simt::sort_pairs(kQueue, {keys.data(), values.data()}, kIds);
    simt::each(kQueue, kIds, KeySenders{grads.sorted, sender_keys.data()});
    simt::sort_pairs(kQueue, {sender_keys.data(), unused.data()}, kIds);
    simt::each(kQueue, kIds, CountSenders{sender_keys.data(), distinct.data()});
    simt::tiles(kQueue, kLines, SumPieces{grads});
    simt::tiles(kQueue, kIds,
                UpdateRows<float>{grads, &table, rule, state_widths(rule.optimizer), names.data(), distinct.data()});
  };
  run();
  check(wrong.any == 0, "nothing is wrong");
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
    if (count > 0) {
      for (float& number : total) number *= 0.5f / static_cast<float>(sent.size());
      update_row(rule, table.correction, row_square(rule, total.data(), expected.data(), columns), total.data(),
                 expected.data(), &state, nullptr, columns);
    }
    check(std::equal(expected.begin(), expected.end(), table.weights.row(row)), "a row is updated by its gradients");
    check(*table.momentum1.row(row) == state, "a row has its state");
    check(((*table.marks.byte(row) & mark_of(row)) != 0) == (count > 0), "updated rows are marked");
  }

  const std::vector<float> before = weights;
  rows[900] = kRows;
  rows[400] = std::numeric_limits<int64_t>::min();
  for (size_t i = 100; i < 1000; i += 3) senders[i] = std::numeric_limits<int32_t>::max();
  run();
  check(kBags - wrong.bags_left == 200 && wrong.senders == 1, "the first bag with a row outside is found");
  for (size_t b = 100; b < 1000; b += 3) offsets[b] = std::numeric_limits<int64_t>::max() - static_cast<int64_t>(b);
  run();
  check(wrong.offsets == 1 && weights == before, "wrong offsets are seen, and nothing is written");
}

}  // namespace
}  // namespace torchrec_dyn

int main() {
  using namespace torchrec_dyn;
  update_rows(5);
  update_rows(80);
  std::puts("update_kernels: ok");
}
