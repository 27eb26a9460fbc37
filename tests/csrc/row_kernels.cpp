// The kernels of single rows (simt.h) on the threads of the simt build, where threads meet at the same rows. Built with
// ThreadSanitizer, and with AddressSanitizer and UBSan, by `run`.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <unordered_map>
#include <vector>

#include "philox.h"
#include "sharing.h"
#include "simt_cpu.h"
#include "storage/row_store_kernels.h"

namespace torchrec_dyn {
namespace {

const simt::Stream kStream{nullptr, nullptr};
constexpr int64_t kIds = 6000;

// Rows in blocks of 64: written at once, some of them often, and read back. Of equal rows the last one's values stay.
template <typename T>
void write_rows(int64_t columns) {
  constexpr int64_t kRows = 1000, kShift = 6;
  std::vector<std::vector<T>> memory(kRows / 64 + 1, std::vector<T>(static_cast<size_t>(columns) << kShift));
  std::vector<T*> blocks;
  for (std::vector<T>& block : memory) blocks.push_back(block.data());
  const RowBlocks<T> table{blocks.data(), kShift, columns, kRows};
  const Division units(columns);
  std::vector<int64_t> rows, ids;
  for (int64_t i = 0; i < kIds; ++i) ids.push_back(static_cast<int64_t>(mix64(static_cast<uint64_t>(i))));
  for (int64_t i = 0; i < kIds; ++i) rows.push_back(random_words(3, i, 0, 0).words[0] % (i % 2 == 0 ? kRows : 10));
  int64_t left = 0, error[kErrorWords] = {};
  const GivenRows given{rows.data(), kIds, 0, kRows, &left, "", {error, 1}};
  simt::launch(kStream, kIds, FindRowOutside{given});
  check(left == 0, "every row is inside");

  const InitialRows normal{InitialKind::kNormal, -3.0, 3.0, 0.0, 1.0, 0.001, 0.999};
  std::vector<int64_t> all(kRows);
  std::iota(all.begin(), all.end(), int64_t{0});
  const Division threads((columns + kThreadColumns - 1) / kThreadColumns);
  simt::launch(kStream, kRows * threads.divisor,
               InitRows<T>{ids.data(),
                           {all.data(), kRows, 0, kRows, &left, "", {error, 1}},
                           table,
                           normal,
                           5,
                           0,
                           threads,
                           columns % kThreadColumns == 0});
  for (int64_t row = 0; row < kRows; ++row)
    for (int64_t c = 0; c < columns; ++c) {
      T expected{};
      const Philox4 random =
          random_words(5, ids[static_cast<size_t>(row)], static_cast<uint32_t>(c / kThreadColumns), 0);
      store_nearest(initial_number(normal, random.words[c % kThreadColumns]), &expected);
      check(to_float(table.row(row)[c]) == to_float(expected), "every number of a row is its initial one");
    }

  std::vector<T> values(static_cast<size_t>(kIds * columns)), out(values.size());
  for (size_t i = 0; i < values.size(); ++i) store_nearest(static_cast<float>(i % 2039), &values[i]);
  std::vector<int64_t> last(2 * kIds), places(kIds);
  simt::launch(kStream, kIds, FindLastPositions{SlotHash::of(3), rows.data(), last.data(), 2 * kIds, places.data()});
  simt::launch(kStream, kIds * columns, ScatterRows<T>{given, last.data(), places.data(), values.data(), table, units});
  simt::launch(kStream, kIds * columns, GatherRows<T>{given, table, units, out.data()});
  std::unordered_map<int64_t, int64_t> last_of;
  for (int64_t i = 0; i < kIds; ++i) last_of[rows[static_cast<size_t>(i)]] = i;
  for (int64_t i = 0; i < kIds; ++i)
    for (int64_t c = 0; c < columns; ++c)
      check(to_float(out[static_cast<size_t>(i * columns + c)]) ==
                to_float(values[static_cast<size_t>(last_of[rows[static_cast<size_t>(i)]] * columns + c)]),
            "of equal rows the last values stay");

  const auto outside = std::ranges::find_if(rows, [](int64_t row) { return row >= 10; });
  const GivenRows wrong{rows.data(), kIds, 0, 10, &left, "", {error, 1}};
  check(error[0] == 0, "nothing is wrong");
  simt::launch(kStream, kIds, FindRowOutside{wrong});
  check(left == rows.end() - outside, "the first row outside is found");
  simt::launch(kStream, kIds * columns, GatherRows<T>{wrong, table, units, out.data()});
  check(error[0] == 1 && error[2] == *outside, "it is reported");
  check(std::ranges::all_of(out, [](T number) { return to_float(number) == 0.0f; }), "no row is read then");
}

}  // namespace
}  // namespace torchrec_dyn

int main() {
  using namespace torchrec_dyn;
  write_rows<float>(5);
  write_rows<Float16>(8);
  std::puts("row_kernels: ok");
}
