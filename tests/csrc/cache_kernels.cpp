// The kernels of rows in host memory and their frames (simt.h) on the threads of the simt build, where threads meet at
// the same rows, ages and counts. Built with ThreadSanitizer, and with AddressSanitizer and UBSan, by `run`. With the
// latter also on caches with any numbers, where threads may write the same row, and nothing outside.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <set>
#include <vector>

#include "lookup/row_cache_kernels.h"
#include "philox.h"
#include "sharing.h"
#include "simt_cpu.h"

namespace torchrec_dyn {
namespace {

const simt::Stream kStream{nullptr, nullptr};
constexpr int64_t kShift = 6;

uint32_t drawn(int64_t i, int64_t of) { return random_words(7, i, static_cast<uint32_t>(of), 0).words[0]; }

// Rows of a table, and one state of two bytes a row: the blocks of the host, then those of the frames.
struct Rows {
  Rows(int64_t rows, int64_t bytes) : row_bytes(bytes), blocks(static_cast<size_t>(rows + 63) / 64) {
    for (std::vector<char>& block : blocks) block.resize(static_cast<size_t>(bytes << kShift));
    for (std::vector<char>& block : blocks) pointers.push_back(block.data());
  }
  Rows(Rows&&) = default;  // a copy would have the pointers of another one
  ByteRows bytes() const { return {pointers.data(), kShift, row_bytes, row_bytes % 16 == 0}; }

  int64_t row_bytes;
  std::vector<std::vector<char>> blocks;
  std::vector<char*> pointers;
};

struct Table {
  Table(int64_t rows, int64_t frames)
      : places(static_cast<size_t>(rows)),
        owners(static_cast<size_t>(frames)),
        counts(kCacheCounts),
        used(static_cast<size_t>(frames)),
        free(static_cast<size_t>(frames)),
        base((rows + 63) / 64 * 64),
        weights(base + frames, 32),
        state(base + frames, 6) {}

  RowCache cache(int64_t call) {
    return {places.data(),
            static_cast<int64_t>(places.size()),
            owners.data(),
            used.data(),
            free.data(),
            counts.data(),
            static_cast<int64_t>(owners.size()),
            base,
            static_cast<uint32_t>(call),
            0,
            0,
            0,
            nullptr,
            0,
            2};
  }
  template <typename Word>
  static Word any(int64_t i, int64_t of, int64_t near) {
    const uint32_t word = drawn(i, of);
    constexpr Word kEnds[] = {std::numeric_limits<Word>::min(), std::numeric_limits<Word>::max(), -1, -2, 0};
    return word % 4 == 0 ? kEnds[word / 4 % 5] : static_cast<Word>(word / 4 % static_cast<uint32_t>(near + 2));
  }
  void spoil(int64_t seed) {
    const auto frames = static_cast<int64_t>(owners.size()), rows = static_cast<int64_t>(places.size());
    int64_t i = seed << 32;
    for (int32_t& place : places) place = any<int32_t>(i++, 1, frames);
    for (int64_t& owner : owners) owner = any<int64_t>(i++, 2, rows);
    for (int32_t& call : used) call = any<int32_t>(i++, 3, 9);
    for (int32_t& frame : free) frame = any<int32_t>(i++, 4, frames);
    for (int64_t& count : counts) count = any<int64_t>(i++, 5, frames);
  }

  std::vector<int32_t> places;
  std::vector<int64_t> owners, counts;
  std::vector<int32_t> used, free;
  int64_t base;
  Rows weights, state;
};

// As cache_rows_ launches them (lookup/row_cache_cuda.cpp).
void cache_rows(std::vector<Table>& tables, const std::vector<int64_t>& rows, const std::vector<int64_t>& begins,
                int64_t call) {
  const auto n = static_cast<int64_t>(rows.size()), count = static_cast<int64_t>(tables.size());
  std::vector<CachePlan> plans(tables.size());
  std::vector<RowCache> caches;
  std::vector<ByteRows> stores;
  int64_t frames = 0;
  for (size_t t = 0; t < tables.size(); ++t) {
    RowCache cache = tables[t].cache(call);
    cache.begin = begins[t], cache.end = begins[t + 1], cache.first_frame = frames, cache.plan = &plans[t];
    cache.first_store = static_cast<int64_t>(stores.size());
    stores.push_back(tables[t].weights.bytes());
    stores.push_back(tables[t].state.bytes());
    frames += cache.frames;
    caches.push_back(cache);
  }
  const RowCaches all{caches.data(), count};
  const CachedStores copied{stores.data()};
  std::vector<int64_t> missing(rows.size()), assigned(rows.size()), places(rows.size());
  std::vector<int64_t> counts(static_cast<size_t>(count * kAgeCopies * kAges)),
      sums(static_cast<size_t>(count * kAges + 1)), ties(static_cast<size_t>(count * kTies + 1));
  simt::launch(kStream, n, FindMissing{all, rows.data(), missing.data()});
  simt::launch(kStream, count, PlanEvictions{all});
  simt::launch(kStream, frames, CountAges{all, counts.data()});
  simt::launch(kStream, count * kAges + 1, AddAges{counts.data(), sums.data(), count});
  simt::exclusive_sum(kStream, sums.data(), count * kAges + 1);
  simt::launch(kStream, count * kAges, ChooseAges{all, sums.data()});
  simt::launch(kStream, frames, CountTies{all, ties.data()});
  simt::exclusive_sum(kStream, ties.data(), count * kTies + 1);
  simt::launch(kStream, count * kTies, ChooseRows{all, ties.data()});
  simt::launch_tiles(kStream, frames, WriteBackRows{all, copied});
  simt::launch(kStream, frames, FreeFrames{all});
  simt::launch(kStream, n, AssignFrames{all, missing.data(), assigned.data()});
  simt::launch_tiles(kStream, n, LoadRows{all, copied, missing.data(), assigned.data()});
  simt::launch(kStream, count, FinishPlans{all, true});
  simt::launch(kStream, n, WritePlaces{all, rows.data(), places.data()});
  for (size_t i = 0; i < rows.size(); ++i)
    check(places[i] == rows[i] || (places[i] >= 0 && places[i] < tables[0].base + tables[1].base + frames),
          "a place is a row or a frame");
}

std::vector<int64_t> batch_of(int64_t step, int64_t rows, int64_t most) {
  std::vector<int64_t> batch;
  for (int64_t i = 0; i < rows; ++i)
    batch.push_back(static_cast<int64_t>(drawn(step << 32 | i, 0) % static_cast<uint32_t>(i % 3 == 0 ? 7 : most)) - 1);
  return batch;
}

// Rows are repeated, and more frames are wanted than there are.
void run_histories() {
  std::vector<Table> tables;
  tables.emplace_back(1500, 400);
  tables.emplace_back(300, 300);
  for (int64_t row = 0; row < 1500; ++row)
    *reinterpret_cast<int16_t*>(tables[0].state.bytes().row(row)) = static_cast<int16_t>(row);
  for (int64_t step = 1; step < 20; ++step) {
    const int64_t first = step % 5 == 0 ? 3000 : 300;
    std::vector<int64_t> rows = batch_of(step, first, 1500), others = batch_of(step, 200, 300);
    rows.insert(rows.end(), others.begin(), others.end());
    cache_rows(tables, rows, {0, first, static_cast<int64_t>(rows.size())}, step);
    const Table& table = tables[0];
    std::set<int32_t> in_use;
    for (size_t row = 0; row < table.places.size(); ++row) {
      const int32_t frame = table.places[row] - 1;
      if (frame < 0) continue;
      check(in_use.insert(frame).second, "a frame has one row");
      check(table.owners[static_cast<size_t>(frame)] == static_cast<int64_t>(row), "a frame knows its row");
      check(*reinterpret_cast<int16_t*>(table.state.bytes().row(table.base + frame)) == static_cast<int16_t>(row),
            "a frame has the numbers of its row");
    }
    check(static_cast<int64_t>(in_use.size()) == table.counts[kUsedFrames] - table.counts[kFreeFrames],
          "other frames are free");
    check(table.counts[kLoadedRows] - table.counts[kWrittenRows] == static_cast<int64_t>(in_use.size()),
          "every copy is counted");
  }
  check(tables[0].counts[kWrittenRows] > 100, "rows have left");
}

#if !defined(__SANITIZE_THREAD__)
void run_on_any_numbers() {
  for (int64_t seed = 0; seed < 200; ++seed) {
    const int64_t some[] = {0, 1, 5, 70, 200};
    std::vector<Table> tables;
    tables.emplace_back(some[seed % 5], some[seed / 5 % 5]);
    tables.emplace_back(some[seed / 25 % 5], some[seed % 4]);
    for (Table& table : tables) table.spoil(seed);
    std::vector<int64_t> rows;
    for (int64_t i = 0; i < 80; ++i) rows.push_back(Table::any<int64_t>(seed << 32 | i, 9, 70));
    for (int64_t call : {int64_t{3}, int64_t{4}, (int64_t{1} << 32) - 1, int64_t{0}})
      cache_rows(tables, rows, {0, seed % 80, 80}, call);
  }
}
#endif

}  // namespace
}  // namespace torchrec_dyn

int main() {
  using namespace torchrec_dyn;
  run_histories();
#if !defined(__SANITIZE_THREAD__)
  run_on_any_numbers();
#endif
  std::puts("cache_kernels: ok");
}
