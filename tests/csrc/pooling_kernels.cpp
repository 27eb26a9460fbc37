// The kernels of gather and pool (simt.h) on the threads of the simt build, where threads read the same rows and report
// the same wrong bags. Built with ThreadSanitizer, and with AddressSanitizer and UBSan, by `run`.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <vector>

#include "lookup/pool_into_kernels.h"
#include "lookup/pooling_kernels.h"
#include "philox.h"
#include "sharing.h"
#include "simt_cpu.h"

namespace torchrec_dyn {
namespace {

const simt::Stream kStream{nullptr, nullptr};

// One table of rows in blocks of 2^kShift, bags of 0 to 6 ids, one output for each bag. kIsPlain: it is one block.
template <typename T, bool kIsPlain>
void pool_bags(int columns, int unit_columns) {
  constexpr int64_t kBags = 1500, kRows = 300, kShift = kIsPlain ? 9 : 6, kBlocks = (kRows >> kShift) + 1;
  const auto width = static_cast<size_t>(columns);
  std::vector<Unit16> memory((kBlocks << kShift) * width * sizeof(T) / sizeof(Unit16) + 1);
  auto* numbers = reinterpret_cast<T*>(memory.data());
  std::vector<T*> blocks;
  for (int64_t b = 0; b < kBlocks; ++b) blocks.push_back(numbers + (b << kShift) * columns);
  for (int64_t i = 0; i < kRows * columns; ++i) store_nearest(static_cast<float>(i % 2039), &numbers[i]);
  std::vector<int64_t> offsets{0}, rows;
  for (int64_t b = 0; b < kBags; ++b) offsets.push_back(offsets.back() + random_words(4, b, 0, 0).words[0] % 7);
  const int64_t ids = offsets.back();
  for (int64_t i = 0; i < ids; ++i) rows.push_back(random_words(5, i, 0, 0).words[0] % (kRows + 1) - 1);

  const RowBlocks<T> table{blocks.data(), kShift, columns, kRows};
  const int units = columns / unit_columns;
  const DeviceSegment<T> segment{
      table, 0, 0, 0, columns, Division(units), units == 1 ? 0 : -1, unit_columns, true, one_block(table, kBlocks)};
  WrongBags wrong{};
  int64_t error[kErrorWords] = {};
  const DeviceBags<T> bags{&segment, 1, offsets.data(), kBags, rows.data(), ids, false, &wrong};
  std::vector<Unit16> outputs(kBags * width * sizeof(float) / sizeof(Unit16) + 1);
  auto* out = reinterpret_cast<float*>(outputs.data());
  const int64_t threads = kBags * segment.units.divisor;
  simt::launch(kStream, threads, PoolBags<T, float, kIsPlain>{bags, nullptr, out});
  check(wrong.offsets_left == 0 && wrong.bags_left == 0, "nothing is wrong");
  std::vector<float> products(static_cast<size_t>(ids));
  simt::launch(kStream, std::max(ids, kBags), DotRows<T>{bags, out, products.data()});
  for (int64_t bag = 0; bag < kBags; ++bag) {
    std::vector<float> sums(width);
    for (int64_t i = offsets[static_cast<size_t>(bag)]; i < offsets[static_cast<size_t>(bag) + 1]; ++i) {
      double product = 0.0;
      if (const int64_t row = rows[static_cast<size_t>(i)]; row >= 0)
        for (size_t c = 0; c < width; ++c) {
          const float number = to_float(segment.table.row(row)[c]);
          sums[c] += number;
          product += static_cast<double>(out[static_cast<size_t>(bag) * width + c]) * number;
        }
      check(products[static_cast<size_t>(i)] == static_cast<float>(product), "a product is that of its row and bag");
    }
    check(std::equal(sums.begin(), sums.end(), out + static_cast<size_t>(bag) * width),
          "a bag has the sum of its rows");
  }

  std::vector<int64_t> fresh(static_cast<size_t>(ids), -1);
  for (size_t i = 3; i < fresh.size(); i += 17) fresh[i] = static_cast<int64_t>(i);
  const std::vector<float> before(out, out + kBags * columns);
  std::fill(out, out + kBags * columns, -1.0f);
  simt::launch(kStream, threads, PoolNewBags<T, float>{{bags, nullptr, out}, fresh.data()});
  for (int64_t bag = 0; bag < kBags; ++bag) {
    const auto first = fresh.begin() + offsets[static_cast<size_t>(bag)];
    const auto last = fresh.begin() + offsets[static_cast<size_t>(bag) + 1];
    const bool is_new = std::any_of(first, last, [](int64_t at) { return at >= 0; });
    for (int64_t at = bag * columns; at < (bag + 1) * columns; ++at)
      check(out[at] == (is_new ? before[static_cast<size_t>(at)] : -1.0f), "bags of new ids alone are pooled again");
  }

  const ReportWrongBags<T> report{bags, "", {error, 1}};
  simt::launch(kStream, 1, report);
  check(error[0] == 0, "nothing is reported");
  rows[static_cast<size_t>(offsets[900])] = kRows;
  rows[static_cast<size_t>(offsets[1200])] = std::numeric_limits<int64_t>::min();
  simt::launch(kStream, threads, PoolBags<T, float, kIsPlain>{bags, nullptr, out});
  const auto first = std::upper_bound(offsets.begin(), offsets.end(), offsets[900]) - offsets.begin() - 1;
  check(wrong.offsets_left == 0 && kBags - wrong.bags_left == first, "the first bag with a row outside is found");
  simt::launch(kStream, 1, report);
  check(error[0] == 1 && error[2] == 0 && error[3] == kRows, "the capacity of its table is reported");
  error[0] = 0;
  for (size_t b = 100; b < 1000; b += 3) offsets[b] = std::numeric_limits<int64_t>::max() - static_cast<int64_t>(b);
  simt::launch(kStream, threads, PoolBags<T, float, kIsPlain>{bags, nullptr, out});
  simt::launch(kStream, std::max(ids, kBags), DotRows<T>{bags, out, products.data()});
  check(kBags - wrong.offsets_left == 100, "the first descent is found");
  simt::launch(kStream, 1, report);
  check(error[0] == 1 && error[2] == 1 && error[3] == offsets[100] && error[4] == offsets[101],
        "the first descent is reported");
  error[0] = 0;
  simt::launch(kStream, 1, ReportWrongBags<T>{bags, "", {error, 1}, true});
  check(error[0] == 0, "offsets that the caller checks are not reported");
}

}  // namespace
}  // namespace torchrec_dyn

int main() {
  using namespace torchrec_dyn;
  pool_bags<float, false>(12, 4);
  pool_bags<float, true>(12, 4);
  pool_bags<float, true>(5, 1);
  pool_bags<Float16, false>(16, 8);
  pool_bags<BFloat16, true>(16, 8);
  pool_bags<BFloat16, false>(6, 2);
  std::puts("pooling_kernels: ok");
}
