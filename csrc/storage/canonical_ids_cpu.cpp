// The ids of one map by their mixed ids: the number of ids in each cell, and the ids in a range, in canonical order.
// And the ids in the order of the slots or of their rows, for passes in any order.
//
// Slots are not ordered by mixed id, so the first two ops read all slots, once, from front to back. A range is then
// sorted in two steps: into buckets by the highest bits in which its mixed ids differ; then each bucket, small enough
// for a core's second-level cache, by so many further bits that few ids share them. Each run of ids that share all
// these bits is sorted by the whole mixed ids, so the order is always exact.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "checks.h"
#include "kernel.h"
#include "parallel.h"
#include "radix_sort.h"
#include "simd.h"
#include "storage/cells.h"
#include "storage/id_map.h"
#include "storage/id_map_arguments.h"

namespace torchrec_dyn {
namespace {

struct MixedRow {
  uint64_t mixed;
  int64_t row;
};

// Slots that are read together: few enough for arrays on the stack.
constexpr int64_t kSlotRun = 4096;

// The cells of `count` slots, up to kSlotRun; for an empty slot, the number after the last cell.
TORCHREC_DYN_SIMD void find_cells(const Slot* slots, int64_t count, int bits, uint32_t* cells) noexcept {
  const uint64_t behind = uint64_t{1} << bits;
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t cell = cell_of(mix64(static_cast<uint64_t>(slots[i].id)), bits);
    cells[i] = static_cast<uint32_t>(slots[i].place != 0 ? cell : behind);
  }
}

// The mixed ids of `count` slots, up to kSlotRun, and a flag for each: 1 if it lies in [first, first + span] and the
// slot is not empty.
TORCHREC_DYN_SIMD void find_inside(const Slot* slots, int64_t count, uint64_t first, uint64_t span, uint64_t* mixed,
                                   uint8_t* inside) noexcept {
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t mixed_id = mix64(static_cast<uint64_t>(slots[i].id));
    mixed[i] = mixed_id;
    inside[i] = (mixed_id - first <= span) & (slots[i].place != 0);
  }
}

// The bucket of a mixed id.
struct Buckets {
  static constexpr uint64_t kBucket = 1 << 12;  // ids of a bucket, about
  static constexpr int kMostBits = 11;          // more buckets would be more pages than a core's TLB covers

  uint64_t low = 0;
  int key_bits = 0;  // bits in which the mixed ids differ
  int bits = 0;      // the highest of these bits, which name the bucket

  Buckets(uint64_t low, uint64_t high, uint64_t ids)
      : low(low),
        key_bits(static_cast<int>(std::bit_width(high - low))),
        bits(std::min({key_bits, kMostBits, static_cast<int>(std::bit_width(ids / kBucket))})) {}

  size_t count() const { return size_t{1} << bits; }
  size_t of(uint64_t mixed) const { return bits == 0 ? 0 : (mixed - low) >> (key_bits - bits); }
};

// Sorts one bucket in place. Requires fewer than 2^32 ids.
void sort_bucket(const Buckets& buckets, MixedRow* ids, size_t count) {
  constexpr uint64_t kLowHalf = 0xFFFFFFFFull;
  const auto by_mixed = [](const MixedRow& a, const MixedRow& b) { return a.mixed < b.mixed; };
  if (count < 64) {
    std::sort(ids, ids + count, by_mixed);
    return;
  }
  const int left = buckets.key_bits - buckets.bits;  // bits in which ids of one bucket may differ
  const int digits = std::min({left, 32, static_cast<int>(std::bit_width(count)) + 9});
  const uint64_t mask = left == 64 ? ~uint64_t{0} : (uint64_t{1} << left) - 1;
  SortableWords words(count + 1);
  for (size_t i = 0; i < count; ++i) {
    const uint64_t key = ((ids[i].mixed - buckets.low) & mask) >> (left - digits);
    words.push_if(true, key << 32 | i);
  }
  words.sort_by_high_word();
  const auto unsorted = std::make_unique_for_overwrite<MixedRow[]>(count);
  std::copy(ids, ids + count, unsorted.get());
  uint64_t key_before = 0;
  size_t run = 0;  // where the ids of this key begin
  for (size_t i = 0; i < count; ++i) {
    const uint64_t word = words.words()[i];
    if (word >> 32 != key_before) {
      if (i - run > 1) std::sort(ids + run, ids + i, by_mixed);
      run = i;
      key_before = word >> 32;
    }
    ids[i] = unsorted[word & kLowHalf];
  }
  if (count - run > 1) std::sort(ids + run, ids + count, by_mixed);
}

Tensor count_cells(std::vector<Tensor> slots, const Tensor& moved, int64_t bits) {
  const IdMapView map = one_map("count_cells", slots, moved);
  check_cell_bits(bits);
  const auto cells = size_t{1} << bits;
  Tensor counts = new_int64(static_cast<int64_t>(cells));
  auto* total = mutable_data<uint64_t>(counts);
  std::fill(total, total + cells, uint64_t{0});
  std::mutex mutex;
  for (int a = 0; a < (map.is_growing() ? 2 : 1); ++a) {
    const SlotArray& array = map.arrays[a];
    for_each_range(array.capacity, 1 << 20, [&](int64_t begin, int64_t end) {
      std::vector<uint64_t> here(cells + 1);  // the last element counts empty slots, which saves a branch
      std::array<uint32_t, kSlotRun> cell_of_slot;
      for (int64_t run = begin; run < end; run += kSlotRun) {
        const int64_t count = std::min(kSlotRun, end - run);
        find_cells(array.slots + run, count, static_cast<int>(bits), cell_of_slot.data());
        for (int64_t i = 0; i < count; ++i) ++here[cell_of_slot[static_cast<size_t>(i)]];
      }
      const std::lock_guard<std::mutex> lock(mutex);
      for (size_t cell = 0; cell < cells; ++cell) total[cell] += here[cell];
    });
  }
  return counts;
}

// The ids of a range, one list for each run of slots; their number, lowest and highest mixed id.
struct Selection {
  std::vector<std::vector<MixedRow>> runs;
  uint64_t ids = 0;
  uint64_t low = ~uint64_t{0};
  uint64_t high = 0;
};

// The ids of one run of slots, collected on the stack so that no more memory than they need is allocated.
std::vector<MixedRow> select_run(const Slot* slots, int64_t count, uint64_t first, uint64_t span) {
  constexpr size_t kEight = 8;  // flags read together: in a narrow range few flags are set
  std::array<uint64_t, kSlotRun> mixed;
  std::array<uint8_t, kSlotRun> inside;
  std::array<MixedRow, kSlotRun> found;
  find_inside(slots, count, first, span, mixed.data(), inside.data());
  std::fill(inside.begin() + count, inside.end(), uint8_t{0});
  size_t kept = 0;
  for (size_t begin = 0; begin < static_cast<size_t>(count); begin += kEight) {
    uint64_t eight;
    std::memcpy(&eight, inside.data() + begin, sizeof eight);
    for (; eight != 0; eight &= eight - 1) {
      const size_t i = begin + static_cast<size_t>(std::countr_zero(eight)) / kEight;
      found[kept++] = {mixed[i], slots[i].row()};
    }
  }
  return {found.begin(), found.begin() + static_cast<int64_t>(kept)};
}

Selection select(const IdMapView& map, uint64_t first, uint64_t span) {
  Selection all;
  std::mutex mutex;
  for (int a = 0; a < (map.is_growing() ? 2 : 1); ++a) {
    const SlotArray& array = map.arrays[a];
    const auto before = static_cast<int64_t>(all.runs.size());
    const int64_t runs = (array.capacity + kSlotRun - 1) / kSlotRun;
    all.runs.resize(static_cast<size_t>(before + runs));
    for_each_range(runs, 16, [&](int64_t begin, int64_t end) {
      Selection here;
      for (int64_t run = begin; run < end; ++run) {
        const int64_t slot = run * kSlotRun;
        auto& found = all.runs[static_cast<size_t>(before + run)];
        found = select_run(array.slots + slot, std::min(kSlotRun, array.capacity - slot), first, span);
        here.ids += found.size();
        for (const MixedRow& id : found) {
          here.low = std::min(here.low, id.mixed);
          here.high = std::max(here.high, id.mixed);
        }
      }
      const std::lock_guard<std::mutex> lock(mutex);
      all.ids += here.ids;
      all.low = std::min(all.low, here.low);
      all.high = std::max(all.high, here.high);
    });
  }
  return all;
}

// The ids of a selection in their buckets, and where each bucket begins. `put_into_buckets` empties the selection.
struct Bucketed {
  std::unique_ptr<MixedRow[]> ids;
  std::vector<size_t> begins;
};

Bucketed put_into_buckets(Selection& selected, const Buckets& buckets) {
  // Stretches of runs; each stretch has its own place in every bucket.
  const auto runs = static_cast<int64_t>(selected.runs.size());
  const int64_t stretches = std::min(runs, thread_count() == 1 ? 1 : 4 * thread_count());
  const auto run_of = [&](int64_t stretch) { return static_cast<size_t>(stretch * runs / stretches); };
  std::vector<std::vector<size_t>> places(static_cast<size_t>(stretches));
  for_each_task(stretches, [&](int64_t stretch) {
    std::vector<size_t>& count = places[static_cast<size_t>(stretch)];
    count.resize(buckets.count());
    for (size_t run = run_of(stretch); run < run_of(stretch + 1); ++run)
      for (const MixedRow& id : selected.runs[run]) ++count[buckets.of(id.mixed)];
  });
  Bucketed sorted{std::make_unique_for_overwrite<MixedRow[]>(selected.ids), {}};
  size_t next = 0;
  for (size_t bucket = 0; bucket < buckets.count(); ++bucket) {
    sorted.begins.push_back(next);
    for (std::vector<size_t>& place : places) next += std::exchange(place[bucket], next);
  }
  sorted.begins.push_back(next);
  for_each_task(stretches, [&](int64_t stretch) {
    std::vector<size_t>& place = places[static_cast<size_t>(stretch)];
    for (size_t run = run_of(stretch); run < run_of(stretch + 1); ++run) {
      for (const MixedRow& id : selected.runs[run]) sorted.ids[place[buckets.of(id.mixed)]++] = id;
      std::vector<MixedRow>().swap(selected.runs[run]);
    }
  });
  return sorted;
}

std::tuple<Tensor, Tensor> ids_between(std::vector<Tensor> slots, const Tensor& moved, int64_t first, int64_t last) {
  const char* op = "ids_between";
  const IdMapView map = one_map(op, slots, moved);
  const auto from = static_cast<uint64_t>(first), to = static_cast<uint64_t>(last);
  if (from > to) return {new_int64(0), new_int64(0)};
  Selection selected = select(map, from, to - from);
  TORCHREC_DYN_CHECK(selected.ids < (uint64_t{1} << 32), op, ": expected fewer than 2^32 ids, got ", selected.ids, ".");
  const auto count = static_cast<int64_t>(selected.ids);
  if (count == 0) return {new_int64(0), new_int64(0)};
  const Buckets buckets(selected.low, selected.high, selected.ids);
  const Bucketed bucketed = put_into_buckets(selected, buckets);
  Tensor ids = new_int64(count), rows = new_int64(count);
  auto* id = mutable_data<uint64_t>(ids);
  auto* row = mutable_data<int64_t>(rows);
  for_each_task(static_cast<int64_t>(buckets.count()), [&](int64_t bucket) {
    const size_t begin = bucketed.begins[static_cast<size_t>(bucket)];
    const size_t end = bucketed.begins[static_cast<size_t>(bucket) + 1];
    sort_bucket(buckets, bucketed.ids.get() + begin, end - begin);
    for (size_t i = begin; i < end; ++i) {
      id[i] = unmix64(bucketed.ids[i].mixed);
      row[i] = bucketed.ids[i].row;
    }
  });
  return {ids, rows};
}

std::tuple<Tensor, Tensor> used_slots(const Tensor& slots) {
  const SlotArray array = array_of("used_slots", "slots", slots);
  int64_t count = 0;
  for (int64_t slot = 0; slot < array.capacity; ++slot) count += !array.slots[slot].is_empty();
  Tensor ids = new_int64(count), rows = new_int64(count);
  auto* id = mutable_data<int64_t>(ids);
  auto* row = mutable_data<int64_t>(rows);
  for (int64_t begin = 0; begin < array.capacity; begin += kSlotRun) {
    // Without a branch: every slot is listed, and an empty slot is overwritten by the next.
    std::array<int64_t, kSlotRun + 1> ids_here, rows_here;
    size_t kept = 0;
    for (const Slot *slot = array.slots + begin, *end = slot + std::min(kSlotRun, array.capacity - begin); slot < end;
         ++slot) {
      ids_here[kept] = slot->id;
      rows_here[kept] = slot->row();
      kept += !slot->is_empty();
    }
    const auto room = static_cast<size_t>(mutable_data<int64_t>(ids) + count - id);
    kept = std::min(kept, room);  // another thread may have inserted ids since they were counted
    id = std::copy_n(ids_here.data(), kept, id);
    row = std::copy_n(rows_here.data(), kept, row);
  }
  TORCHREC_DYN_CHECK(id == mutable_data<int64_t>(ids) + count, "used_slots: expected a map at rest, got ",
                     count - (id - mutable_data<int64_t>(ids)),
                     " ids less than were counted. Do not erase ids meanwhile.");
  return {ids, rows};
}

// Reads all slots, from front to back, and writes each id to the place of its row.
std::tuple<Tensor, Tensor> ids_of_rows(std::vector<Tensor> slots, const Tensor& moved, int64_t first, int64_t last) {
  const char* op = "ids_of_rows";
  const IdMapView map = one_map(op, slots, moved);
  TORCHREC_DYN_CHECK(0 <= first && first <= last, op, ": expected 0 <= first <= last, got ", first, " and ", last, ".");
  const int64_t rows = last - first;
  Tensor ids = new_int64(rows), has_id = new_tensor({rows}, ScalarType::Bool);
  int64_t* id = mutable_data<int64_t>(ids);
  auto* flag = static_cast<uint8_t*>(has_id.mutable_data_ptr());
  std::fill(flag, flag + rows, uint8_t{0});
  for (int a = 0; a < (map.is_growing() ? 2 : 1); ++a) {
    const SlotArray& array = map.arrays[a];
    for_each_range(array.capacity, 1 << 16, [&](int64_t begin, int64_t end) {
      // Without a branch: an id of another row is written to a place of no row, and so is an empty slot: its row is -1.
      int64_t no_id;
      uint8_t no_flag;
      for (const Slot* slot = array.slots + begin; slot < array.slots + end; ++slot) {
        const uint64_t place = static_cast<uint64_t>(slot->row()) - static_cast<uint64_t>(first);
        const bool is_inside = place < static_cast<uint64_t>(rows);
        *(is_inside ? id + place : &no_id) = slot->id;
        *(is_inside ? flag + place : &no_flag) = 1;
      }
    });
  }
  for (int64_t place = 0; place < rows; ++place)
    if (flag[place] == 0) id[place] = 0;
  return {ids, has_id};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torchrec_dyn, CPU, m) {
  m.impl(TORCHREC_DYN_KERNEL("used_slots", &used_slots));
  m.impl(TORCHREC_DYN_KERNEL("ids_of_rows", &ids_of_rows));
  m.impl(TORCHREC_DYN_KERNEL("count_cells", &count_cells));
  m.impl(TORCHREC_DYN_KERNEL("ids_between", &ids_between));
}

}  // namespace torchrec_dyn
