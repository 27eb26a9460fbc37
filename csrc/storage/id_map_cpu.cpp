// The ops of the id map on the CPU. Ids are in table order; table_offsets says where each table begins.
#include <algorithm>
#include <atomic>
#include <tuple>
#include <vector>

#include "checks.h"
#include "huge_pages.h"
#include "kernel.h"
#include "parallel.h"
#include "simd.h"
#include "storage/find_rows_cpu.h"
#include "storage/id_map.h"
#include "storage/id_map_arguments.h"
#include "storage/id_map_changes_cpu.h"
#include "storage/id_map_growth_cpu.h"
#include "zeroed_memory.h"

namespace torchrec_dyn {
namespace {

TORCHREC_DYN_SIMD void mix_range(const uint64_t* in, uint64_t* out, int64_t begin, int64_t end) noexcept {
  for (int64_t i = begin; i < end; ++i) out[i] = mix64(in[i]);
}

Tensor mix64_ids(const Tensor& ids) {
  check_tensor("mix64", "ids", ids, ScalarType::Long);
  Tensor out = new_int64(ids.numel());
  for_each_range(ids.numel(), 1 << 15, [&](int64_t begin, int64_t end) {
    mix_range(const_data<uint64_t>(ids), mutable_data<uint64_t>(out), begin, end);
  });
  return out;
}

std::tuple<Tensor, Tensor> lookup(const Tensor& ids, const Tensor& table_offsets, std::vector<Tensor> slots,
                                  const Tensor& moved) {
  const int64_t tables = count_maps("lookup", moved);
  check_tensor("lookup", "ids", ids, ScalarType::Long);
  check_table_offsets("lookup", table_offsets, tables, ids.numel());
  const std::vector<IdMapView> maps = views_of("lookup", slots, moved);
  Tensor rows = new_int64(ids.numel());
  Tensor absent = new_int64(tables);
  find_rows(maps, const_data<int64_t>(ids), const_data<int64_t>(table_offsets), mutable_data<int64_t>(rows),
            mutable_data<int64_t>(absent));
  return {rows, absent};
}

void insert(const Tensor& new_ids, const Tensor& new_rows, const Tensor& new_offsets, std::vector<Tensor> slots,
            const Tensor& moved) {
  const int64_t tables = count_maps("insert", moved);
  check_tensor("insert", "new_ids", new_ids, ScalarType::Long);
  check_tensor("insert", "new_rows", new_rows, ScalarType::Long);
  check_size("insert", "the number of new_rows", new_ids.numel(), new_rows.numel());
  check_table_offsets("insert", new_offsets, tables, new_ids.numel());
  const std::vector<IdMapView> maps = views_of("insert", slots, moved);
  const int64_t* id = const_data<int64_t>(new_ids);
  const int64_t* row = const_data<int64_t>(new_rows);
  const int64_t* offset = const_data<int64_t>(new_offsets);
  for (int64_t i = 0; i < new_rows.numel(); ++i) check_inserted_row("insert", row[i]);
  SeparateMemory().writes(slots).reads(new_ids).reads(new_rows).reads(new_offsets).reads(moved).check("insert");
  check_inserted("insert", MapChange(maps, id, offset).insert(row));
}

Tensor erase(const Tensor& ids, std::vector<Tensor> slots, const Tensor& moved) {
  check_tensor("erase", "ids", ids, ScalarType::Long);
  const std::vector<IdMapView> maps{one_map("erase", slots, moved)};
  SeparateMemory().writes(slots).reads(ids).reads(moved).check("erase");
  Tensor rows = new_int64(ids.numel());
  const int64_t offset[] = {0, ids.numel()};
  MapChange(maps, const_data<int64_t>(ids), offset).erase(mutable_data<int64_t>(rows));
  return rows;
}

Tensor empty_slots(int64_t capacity) {
  const ZeroedMemory memory = take_zeroed_memory(capacity * static_cast<int64_t>(sizeof(Slot)));
  return tensor_of(memory.begin, {capacity, 2}, {2, 1}, ScalarType::Long, [memory] { free_zeroed_memory(memory); });
}

Tensor new_slots(const Tensor& slots, int64_t capacity) {
  array_of("new_slots", "slots", slots);
  check_capacity("new_slots", capacity);
  return empty_slots(capacity);
}

std::vector<Tensor> grown_slots(std::vector<Tensor> slots, std::vector<int64_t> capacities, std::vector<int64_t> keys) {
  const std::vector<SlotArray> from = arrays_to_grow(slots, capacities, keys, DeviceType::CPU);
  std::vector<Tensor> grown;
  for (const int64_t capacity : capacities) grown.push_back(empty_slots(capacity));
  std::atomic<bool> fits{true};
  for_each_task(static_cast<int64_t>(from.size()), [&](int64_t m) {
    const auto map = static_cast<size_t>(m);
    const SlotArray to{static_cast<Slot*>(grown[map].mutable_data_ptr()), capacities[map]};
    const SlotHash hash = SlotHash::of(keys[map]);
    for (const Slot* slot = from[map].slots; slot != from[map].slots + from[map].capacity; ++slot)
      if (!slot->is_empty() && !insert_absent(to, slot->id, slot->row(), hash(slot->id))) fits = false;
  });
  check_grown(fits);
  return grown;
}

Tensor move_slots(const Tensor& outgoing, const Tensor& slots, int64_t moved, int64_t until, int64_t key) {
  const SlotArray from = array_of("move_slots", "outgoing", outgoing);
  const SlotArray to = array_of("move_slots", "slots", slots);
  check_move(from, to, moved);
  SeparateMemory().writes(outgoing).writes(slots).check("move_slots");
  // Pieces of a fixed size: the new slot of an id does not depend on the number of threads.
  constexpr int64_t kPiece = 1 << 15;
  std::vector<int64_t> bounds{moved};
  while (bounds.back() < std::min(until, from.capacity))
    bounds.push_back(end_of_stretch(from, bounds.back(), std::min(kPiece, until - bounds.back())));
  const int64_t end = bounds.back();
  const SlotHash hash = SlotHash::of(key);
  Tensor moved_now = new_int64(1);
  mutable_data<int64_t>(moved_now)[0] = end;
  std::vector<int64_t> left_over(bounds.size() - 1);  // by pieces: the end of the ids that wait
  for_each_task_apart(static_cast<int64_t>(left_over.size()), [&](int64_t i) {
    const auto piece = static_cast<size_t>(i);
    left_over[piece] = move_stretch(from, to, bounds[piece], bounds[piece + 1], hash);
  });
  const IdMapView map = growing_map(to, from, end, hash);
  bool fits = true;
  for (size_t piece = 0; piece < left_over.size(); ++piece)
    fits &= place_left_over(map, from, bounds[piece], left_over[piece]);
  if (end == from.capacity) {
    fits &= place_left_over(map, from, 0, end_of_wrapped(from));
  } else {
    // All slots before `end` are empty now, but for the ids that wrap around; earlier pages have been given back.
    constexpr int64_t kSlotsAPage = kHugePage / static_cast<int64_t>(sizeof(Slot));
    const int64_t first = std::max(moved / kSlotsAPage * kSlotsAPage, end_of_wrapped(from));
    give_back_zeros(from.slots + first, (end - first) * static_cast<int64_t>(sizeof(Slot)));
  }
  check_moved(fits);
  return moved_now;
}

Tensor probe_lengths(const Tensor& slots, int64_t every, int64_t key) {
  constexpr int64_t kRun = 4096;
  const SlotArray array = array_of("probe_lengths", "slots", slots);
  TORCHREC_DYN_CHECK(every >= 1, "probe_lengths: expected every >= 1, got ", every, ".");
  const SlotHash hash = SlotHash::of(key);
  const int64_t runs = (array.capacity + kRun - 1) / kRun;
  every = std::min(every, std::max<int64_t>(runs, 1));  // a longer interval reads the first run alone, too
  std::atomic<int64_t> ids{0}, sum{0}, longest{0};
  for_each_range((runs + every - 1) / every, 4, [&](int64_t first, int64_t last) {
    int64_t ids_here = 0, sum_here = 0, longest_here = 0;
    for (int64_t run = first * every; run < last * every; run += every) {
      const int64_t end = std::min(array.capacity, (run + 1) * kRun);
      for (int64_t slot = run * kRun; slot < end; ++slot) {
        if (array.slots[slot].is_empty()) continue;
        const int64_t length = probe_length(array, hash, slot);
        ++ids_here;
        sum_here += length;
        longest_here = std::max(longest_here, length);
      }
    }
    ids.fetch_add(ids_here, std::memory_order_relaxed);
    sum.fetch_add(sum_here, std::memory_order_relaxed);
    int64_t seen = longest.load(std::memory_order_relaxed);
    while (seen < longest_here && !longest.compare_exchange_weak(seen, longest_here)) continue;
  });
  Tensor lengths = new_int64(3);
  const int64_t summary[] = {ids, sum, longest};
  std::copy(summary, summary + 3, mutable_data<int64_t>(lengths));
  return lengths;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torchrec_dyn, CPU, m) {
  m.impl(TORCHREC_DYN_KERNEL("mix64", &mix64_ids));
  m.impl(TORCHREC_DYN_KERNEL("lookup", &lookup));
  m.impl(TORCHREC_DYN_KERNEL("insert", &insert));
  m.impl(TORCHREC_DYN_KERNEL("erase", &erase));
  m.impl(TORCHREC_DYN_KERNEL("new_slots", &new_slots));
  m.impl(TORCHREC_DYN_KERNEL("grown_slots", &grown_slots));
  m.impl(TORCHREC_DYN_KERNEL("move_slots", &move_slots));
  m.impl(TORCHREC_DYN_KERNEL("probe_lengths", &probe_lengths));
}

}  // namespace torchrec_dyn
