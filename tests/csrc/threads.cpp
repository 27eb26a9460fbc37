// The torch-free headers under std::thread, shared as the ops share them: several readers of one map, one writer of
// each map or part of a map, one owner of each row. Built with ThreadSanitizer, and with AddressSanitizer and UBSan, by
// `run`. ThreadSanitizer does not see OpenMP's barriers, so the ops themselves cannot be run under it.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lookup/row_update.h"
#include "philox.h"
#include "radix_sort.h"
#include "sharing.h"
#include "storage/id_map.h"
#include "storage/id_map_growth_cpu.h"
#include "storage/initial_rows_cpu.h"
#include "storage/parts_cpu.h"
#include "storage/rounding_cpu.h"

namespace torchrec_dyn {
namespace {

const SlotHash kHash;  // the public one: some ids are made for chosen homes

// Pseudo-random ids from a small range, so that they repeat, and the ends of int64.
int64_t id_of(uint64_t seed, int64_t i, int64_t distinct) {
  const int64_t id = random_words(seed, i, 0, 0).words[0] % distinct;
  if (id == 0) return std::numeric_limits<int64_t>::min();
  return id == 1 ? std::numeric_limits<int64_t>::max() : id - distinct / 2;
}

struct OwnedMap {
  explicit OwnedMap(int64_t capacity) : slots(static_cast<size_t>(capacity)) {}
  SlotArray array() { return {slots.data(), static_cast<int64_t>(slots.size())}; }
  std::vector<Slot> slots;
};

// Each thread owns a map: it inserts, erases and grows bit by bit, and compares the map with std::unordered_map.
void write_own_maps() {
  on_threads([](int64_t thread) {
    OwnedMap owned(8), outgoing(0);
    int64_t moved = 0;
    std::unordered_map<int64_t, int64_t> oracle;
    int64_t next_row = 0;
    const auto move_on = [&](int64_t count) {
      const int64_t end = end_of_stretch(outgoing.array(), moved, count);
      const int64_t begin = std::exchange(moved, end);
      const int64_t left_over = move_stretch(outgoing.array(), owned.array(), begin, end, kHash);
      const IdMapView map = growing_map(owned.array(), outgoing.array(), end, kHash);
      check(place_left_over(map, outgoing.array(), begin, left_over), "every id finds a slot");
      if (end == outgoing.array().capacity)
        check(place_left_over(map, outgoing.array(), 0, end_of_wrapped(outgoing.array())), "every id finds a slot");
    };
    for (int64_t i = 0; i < 40000; ++i) {
      const int64_t id = id_of(static_cast<uint64_t>(thread), i, 3000);
      if (moved < outgoing.array().capacity && i % 2 == 0) move_on(1 + i % 5);
      const int64_t row = find_row(growing_map(owned.array(), outgoing.array(), moved, kHash), id, kHash(id));
      const auto known = oracle.find(id);
      check(row == (known == oracle.end() ? kNoRow : known->second), "the map finds what the oracle finds");
      if (i % 3 == 2) {
        check(erase_id(growing_map(owned.array(), outgoing.array(), moved, kHash), id, kHash(id)) == row,
              "erase gives back the row that was found");
        oracle.erase(id);
      } else if (row == kNoRow) {
        const auto ids = static_cast<int64_t>(oracle.size()) + 1;
        if (moved < outgoing.array().capacity && 8 * ids > 7 * outgoing.array().capacity)
          move_on(outgoing.array().capacity);
        if (moved >= outgoing.array().capacity && 4 * ids > 3 * owned.array().capacity) {
          outgoing = owned;
          owned = OwnedMap(2 * owned.array().capacity + kLineSlots);
          moved = 0;
          move_on(1);
        }
        const IdMapView map = growing_map(owned.array(), outgoing.array(), moved, kHash);
        check(insert_absent(map, id, next_row, kHash(id)), "an insert below the load limit succeeds");
        oracle[id] = next_row++;
      }
    }
  });
}

// Each thread moves a piece of one map into a larger map.
void move_one_map() {
  constexpr int64_t kIds = 9000;
  OwnedMap outgoing(4 * kIds / 3), owned(2 * kIds);
  for (int64_t id = 0; id < kIds; ++id) insert_absent(outgoing.array(), id, id + 7, kHash(id));
  std::vector<int64_t> bounds{0};
  for (int64_t t = 1; t <= kThreads; ++t) {
    const int64_t share = t * outgoing.array().capacity / kThreads;
    bounds.push_back(end_of_stretch(outgoing.array(), bounds.back(), share - bounds.back()));
  }
  std::vector<int64_t> left_over(kThreads);
  on_threads([&](int64_t t) {
    const auto piece = static_cast<size_t>(t);
    left_over[piece] = move_stretch(outgoing.array(), owned.array(), bounds[piece], bounds[piece + 1], kHash);
  });
  const IdMapView map(owned.array(), kHash);
  for (size_t piece = 0; piece < left_over.size(); ++piece)
    check(place_left_over(map, outgoing.array(), bounds[piece], left_over[piece]), "every id finds a slot");
  for (int64_t i = 0; i < kIds; ++i) check(find_row(map, i, kHash(i)) == i + 7, "every id keeps its row");
}

// The id with this hash.
int64_t id_of_hash(uint64_t hash) {
  uint64_t inverse = kGolden;  // of an odd factor, modulo 2^3; each step doubles the bits
  for (int step = 0; step < 5; ++step) inverse *= 2 - kGolden * inverse;
  return static_cast<int64_t>(unmix64(hash * inverse));
}

// All threads insert into one map and erase from it, in parts: the slots are those of one thread. Clusters of ids at
// the ends of parts overflow into the next part, or around the end of the array; some ids are erased twice.
void write_parts_of_one_map() {
  constexpr int64_t kIds = 12000, kClusters = 16, kCluster = 300;
  std::vector<int64_t> ids, rows;
  for (int64_t i = 0; i < kIds; ++i) ids.push_back(static_cast<int64_t>(mix64(static_cast<uint64_t>(i))));
  for (uint64_t c = 1; c <= kClusters; ++c)
    for (uint64_t i = 1; i <= kCluster; ++i) ids.push_back(id_of_hash((c << 60) - i * i));
  for (size_t i = 0; i < ids.size(); ++i) std::swap(ids[i], ids[mix64(i) % ids.size()]);
  rows.resize(ids.size());
  std::iota(rows.begin(), rows.end(), int64_t{0});
  std::vector<int64_t> erased(ids.begin(), ids.begin() + kIds);
  erased.insert(erased.end(), ids.begin(), ids.begin() + kIds / 4);
  const auto on_one = [](int64_t tasks, const auto& task) {
    for (int64_t i = 0; i < tasks; ++i) task(i);
  };
  const auto on_all = [](int64_t tasks, const auto& task) {
    std::atomic<int64_t> next{0};
    on_threads([&](int64_t) {
      for (int64_t i = next++; i < tasks; i = next++) task(i);
    });
  };
  const auto run = [&](bool grows, const auto& for_each_task) {
    OwnedMap owned(24000), outgoing(20000);
    const std::vector<IdMapView> maps{grows ? growing_map(owned.array(), outgoing.array(), 9000, kHash)
                                            : IdMapView(owned.array(), kHash)};
    size_t left_over = 0;
    const auto write = [&](const std::vector<int64_t>& some, const auto& in_part, const auto& alone) {
      const auto count = static_cast<int64_t>(some.size());
      const int64_t offsets[] = {0, count};
      const auto hashes = hashes_of(maps, some.data(), offsets, for_each_task);
      Parts parts(offsets, part_bits_of(offsets, maps), hashes.get(), for_each_task);
      check(parts.all().size() == 16, "the ids are cut into sixteen parts");
      parts.visit_homes(
          maps, hashes.get(),
          [&](int64_t i, const IdMapView&, const SlotArray& array, int64_t limit) {
            return in_part(static_cast<size_t>(i), array, limit, hashes[static_cast<size_t>(i)]);
          },
          [&](int64_t i, const IdMapView& map) {
            ++left_over;
            alone(static_cast<size_t>(i), map, hashes[static_cast<size_t>(i)]);
          },
          for_each_task);
    };
    write(
        ids,
        [&](size_t i, const SlotArray& array, int64_t limit, uint64_t hash) {
          return insert_before(array, limit, ids[i], rows[i], hash);
        },
        [&](size_t i, const IdMapView& map, uint64_t hash) {
          check(insert_absent(map, ids[i], rows[i], hash), "every id finds a slot");
        });
    check(left_over > 0, "some ids are left over by their part");
    for (size_t i = 0; i < ids.size(); ++i)
      check(find_row(maps[0], ids[i], kHash(ids[i])) == rows[i], "every id has its row");
    std::vector<int64_t> held(erased.size());
    left_over = 0;
    write(
        erased,
        [&](size_t i, const SlotArray& array, int64_t limit, uint64_t hash) {
          return erase_before(array, kHash, limit, erased[i], hash, held[i]);
        },
        [&](size_t i, const IdMapView& map, uint64_t hash) { held[i] = erase_id(map, erased[i], hash); });
    check(left_over > 0, "some ids are left over by their part");
    for (size_t i = 0; i < held.size(); ++i)
      check(held[i] == (i < kIds ? rows[i] : kNoRow), "erase gives back the row, once");
    for (size_t i = 0; i < ids.size(); ++i)
      check(find_row(maps[0], ids[i], kHash(ids[i])) == (i < kIds ? kNoRow : rows[i]), "the other ids stay");
    std::vector<std::pair<int64_t, int64_t>> slots;
    for (const SlotArray& array : {owned.array(), outgoing.array()})
      for (int64_t i = 0; i < array.capacity; ++i) slots.emplace_back(array.slots[i].id, array.slots[i].place);
    return slots;
  };
  for (const bool grows : {false, true})
    check(run(grows, on_one) == run(grows, on_all), "the slots are the same on any number of threads");
}

// All threads read one map, and each writes its own part of the result.
void read_one_map() {
  constexpr int64_t kIds = 20000;
  OwnedMap owned(2 * kIds + kLineSlots);
  for (int64_t id = 0; id < kIds; ++id) insert_absent(owned.array(), id, id + 7, kHash(id));
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < 4 * kIds + 5; ++i) ids.push_back(random_words(1, i, 0, 0).words[0] % (2 * kIds));
  std::vector<int64_t> rows(ids.size());
  std::vector<int64_t> absent(kThreads);
  const auto piece = static_cast<int64_t>(ids.size() / kThreads);
  on_threads([&](int64_t t) {
    const int64_t end = t + 1 == kThreads ? static_cast<int64_t>(ids.size()) : (t + 1) * piece;
    absent[static_cast<size_t>(t)] =
        find_rows(IdMapView(owned.array(), kHash), ids.data(), t * piece, end, rows.data());
  });
  int64_t missing = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    check(rows[i] == (ids[i] < kIds ? ids[i] + 7 : kNoRow), "every id has its row");
    missing += rows[i] == kNoRow;
  }
  for (const int64_t counted : absent) missing -= counted;
  check(missing == 0, "the absent ids are counted once");
}

// Each thread updates the rows of its part, in the order of the batch.
template <typename T>
void update_own_rows(Optimizer optimizer) {
  constexpr int64_t kRows = 500;
  constexpr int64_t kColumns = 19;
  constexpr int64_t kBatch = 6000;
  const UpdateRule rule = optimizer == Optimizer::kRowwiseAdagrad
                              ? UpdateRule{optimizer, {0.1f, 1e-6f, 0.01f, 1.0f}}
                              : UpdateRule{optimizer, {0.1f, 1e-6f, 0.9f, 0.99f, 0.01f}};
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
      SortableWords words(kBatch + 1);
      for (int64_t i = 0; i < kBatch; ++i) {
        const uint64_t r = random_words(9, i, 0, 0).words[1] % kRows;
        words.push_if(static_cast<int64_t>(r) % parts == part, r << 32 | static_cast<uint64_t>(i));
      }
      words.sort_by_high_word();
      check(std::ranges::is_sorted(words.words()), "equal rows stay in the order of the batch");
      for (const uint64_t word : words.words()) {
        const auto r = static_cast<int64_t>(word >> 32);
        fill_initial_row(normal, 6, static_cast<uint32_t>(word), 0, kColumns, grad.data());
        T* weight = &weights[r * kColumns];
        for (int64_t c = 0; c < kColumns; ++c) row[c] = to_float(weight[c]);
        const int64_t one = kColumns * r;
        const float square = row_square(rule, grad.data(), row.data(), kColumns);
        float* const states[kMostStates] = {&m1[one], &m2[one]};
        update_row(rule, bias_correction(rule, 3), square, 1.0f, grad.data(), row.data(), states, kColumns);
        if constexpr (sizeof(T) != sizeof(float)) store_row(7, 3, 1, r, row.data(), kColumns, weight);
        if constexpr (sizeof(T) == sizeof(float)) std::copy(row.begin(), row.end(), weight);
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
  move_one_map();
  write_parts_of_one_map();
  read_one_map();
  for (const Optimizer optimizer : {Optimizer::kSgd, Optimizer::kAdagrad, Optimizer::kRowwiseAdagrad, Optimizer::kAdam,
                                    Optimizer::kPartialRowwiseAdam}) {
    update_own_rows<float>(optimizer);
    update_own_rows<Float16>(optimizer);
    update_own_rows<BFloat16>(optimizer);
  }
  std::puts("threads: ok");
}
