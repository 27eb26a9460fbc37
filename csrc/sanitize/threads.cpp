// The torch-free headers under std::thread, shared the way the ops share them: readers of one map, one
// writer a map, one owner a row. Built with ThreadSanitizer, and with AddressSanitizer and UBSan, by `run`.
// ThreadSanitizer does not see OpenMP's barriers, so the ops themselves cannot be run under it.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <thread>
#include <unordered_map>
#include <vector>

#include "id_map.h"
#include "initial_rows.h"
#include "philox.h"
#include "radix_sort.h"
#include "rounding.h"
#include "row_types.h"
#include "row_update.h"

namespace torchrec_dyn {
namespace {

constexpr int64_t kThreads = 4;

void check(bool holds, const char* rule) {
  if (holds) return;
  std::fprintf(stderr, "threads: expected that %s.\n", rule);
  std::exit(1);
}

template <typename Task>
void on_threads(const Task& task) {
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < kThreads; ++t) threads.emplace_back(task, t);
  for (std::thread& thread : threads) thread.join();
}

// Pseudo-random ids from a small range, so that they repeat, and the ends of int64.
int64_t id_of(uint64_t seed, int64_t i, int64_t distinct) {
  const int64_t id = random_words(seed, i, 0, 0)[0] % distinct;
  if (id == 0) return std::numeric_limits<int64_t>::min();
  return id == 1 ? std::numeric_limits<int64_t>::max() : id - distinct / 2;
}

struct OwnedMap {
  explicit OwnedMap(int64_t capacity) : slots(static_cast<size_t>(capacity), Slot{0, kNoRow}) {}
  IdMapView view() { return {slots.data(), static_cast<int64_t>(slots.size())}; }
  std::vector<Slot> slots;
};

// Each thread owns a map: inserts, erases and grows it, against std::unordered_map.
void write_own_maps() {
  on_threads([](int64_t thread) {
    OwnedMap owned(7);
    std::unordered_map<int64_t, int64_t> oracle;
    int64_t next_row = 0;
    for (int64_t i = 0; i < 40000; ++i) {
      const int64_t id = id_of(static_cast<uint64_t>(thread), i, 3000);
      IdMapView map = owned.view();
      const int64_t row = find_row(map, id, map.home(id));
      const auto known = oracle.find(id);
      check(row == (known == oracle.end() ? kNoRow : known->second), "the map finds what the oracle finds");
      if (i % 3 == 2) {
        check(erase_id(map, id) == row, "erase gives back the row that was found");
        oracle.erase(id);
      } else if (row == kNoRow) {
        if (4 * static_cast<int64_t>(oracle.size() + 1) > 3 * map.capacity) {
          OwnedMap grown(2 * map.capacity + 1);
          for (const Slot& slot : owned.slots)
            if (slot.row != kNoRow) insert_absent(grown.view(), slot.id, slot.row, grown.view().home(slot.id));
          owned.slots.swap(grown.slots);
          map = owned.view();
        }
        check(insert_absent(map, id, next_row, map.home(id)), "an insert below the load limit succeeds");
        oracle[id] = next_row++;
      }
    }
    const IdMapView map = owned.view();
    for (int64_t slot = 0; slot < map.capacity; ++slot)
      if (map.slots[slot].row != kNoRow) check(probe_length(map, slot) <= map.capacity, "a probe ends");
  });
}

// All threads read one map and write their own part of the answer.
void read_one_map() {
  constexpr int64_t kIds = 20000;
  OwnedMap owned(2 * kIds + 1);
  for (int64_t id = 0; id < kIds; ++id) insert_absent(owned.view(), id, id + 7, owned.view().home(id));
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < 4 * kIds + 5; ++i) ids.push_back(random_words(1, i, 0, 0)[0] % (2 * kIds));
  std::vector<int64_t> rows(ids.size());
  std::vector<int64_t> absent(kThreads);
  const auto piece = static_cast<int64_t>(ids.size() / kThreads);
  on_threads([&](int64_t t) {
    const int64_t end = t + 1 == kThreads ? static_cast<int64_t>(ids.size()) : (t + 1) * piece;
    absent[static_cast<size_t>(t)] = find_rows(owned.view(), ids.data(), t * piece, end, rows.data());
  });
  int64_t missing = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    check(rows[i] == (ids[i] < kIds ? ids[i] + 7 : kNoRow), "every id has its row");
    missing += rows[i] == kNoRow;
  }
  for (const int64_t counted : absent) missing -= counted;
  check(missing == 0, "the absent ids are counted once");
}

// A thread updates the rows whose number ends in its part, in the order of the batch.
template <typename T>
void update_own_rows(Optimizer optimizer) {
  constexpr int64_t kRows = 500;
  constexpr int64_t kColumns = 19;
  constexpr int64_t kBatch = 6000;
  const UpdateRule rule{optimizer, WeightDecay::kL2, 0.1f, 1e-6f, 0.9f, 0.99f, 0.01f};
  const InitialRows normal{InitialKind::kNormal, -3.0, 3.0, 0.0, 1.0, 0.001, 0.999};
  const auto train = [&](int64_t parts) {
    std::vector<T> weights(kRows * kColumns);
    std::vector<float> m1(kRows * kColumns, 0.0f), m2(kRows * kColumns, 0.0f);
    const auto run_part = [&](int64_t part) {
      std::vector<float> row(kColumns), grad(kColumns);
      for (int64_t r = part; r < kRows; r += parts) {
        fill_initial_row(normal, 5, r, 2, kColumns, row.data());
        for (int64_t c = 0; c < kColumns; ++c) store_nearest(row[c], &weights[r * kColumns + c]);
      }
      std::vector<uint64_t> words;
      for (int64_t i = 0; i < kBatch; ++i) {
        const uint64_t r = random_words(9, i, 0, 0)[1] % kRows;
        if (static_cast<int64_t>(r) % parts == part) words.push_back(r << 32 | static_cast<uint64_t>(i));
      }
      sort_by_high_word(words);
      check(std::is_sorted(words.begin(), words.end()), "equal rows stay in the order of the batch");
      for (const uint64_t word : words) {
        const auto r = static_cast<int64_t>(word >> 32);
        fill_initial_row(normal, 6, static_cast<uint32_t>(word), 0, kColumns, grad.data());
        T* weight = &weights[r * kColumns];
        for (int64_t c = 0; c < kColumns; ++c) row[c] = to_float(weight[c]);
        const int64_t one = kColumns * r;
        update_row(rule, bias_correction(rule, 3), grad.data(), row.data(), &m1[one], &m2[one], kColumns);
        store_row(7, 3, 1, r, row.data(), kColumns, weight);
      }
    };
    if (parts == 1)
      run_part(0);
    else
      on_threads(run_part);
    std::vector<uint32_t> bits;
    for (const T& weight : weights) bits.push_back(bits_of_float(to_float(weight)));
    return bits;
  };
  check(train(1) == train(kThreads), "the rows are the same bits on any number of threads");
}

}  // namespace
}  // namespace torchrec_dyn

int main() {
  using namespace torchrec_dyn;
  write_own_maps();
  read_one_map();
  for (const Optimizer optimizer : {Optimizer::kSgd, Optimizer::kAdagrad, Optimizer::kRowwiseAdagrad, Optimizer::kAdam,
                                    Optimizer::kPartialRowwiseAdam}) {
    update_own_rows<float>(optimizer);
    update_own_rows<Float16>(optimizer);
    update_own_rows<BFloat16>(optimizer);
  }
  std::puts("threads: ok");
}
