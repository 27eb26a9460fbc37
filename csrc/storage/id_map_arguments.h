// Id maps as arguments of an op: tensors of slots, checked, and read as the views of storage/id_map.h.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "checks.h"
#include "storage/cells.h"
#include "storage/id_map.h"

namespace torchrec_dyn {

inline SlotArray array_of(const char* op, const char* name, const Tensor& slots,
                          const Device& device = DeviceType::CPU) {
  check_tensor(op, name, slots, ScalarType::Long, device);
  TORCHREC_DYN_CHECK(slots.dim() == 2 && slots.size(1) == 2, op, ": expected ", name, " of shape [C, 2], got ",
                     slots.dim(), " dimensions.");
  TORCHREC_DYN_CHECK(slots.size(0) % kLineSlots == 0, op, ": expected ", name, " of shape [C, 2] with C a multiple of ",
                     kLineSlots, ", got C = ", slots.size(0), ". Make them with new_slots.");
  TORCHREC_DYN_CHECK(device.is_cpu() || reinterpret_cast<uintptr_t>(slots.const_data_ptr()) % sizeof(Slot) == 0, op,
                     ": expected ", name, " at a multiple of ", sizeof(Slot),
                     " bytes, got an address 8 bytes past it. ", "Call .clone() first.");
  return {static_cast<Slot*>(slots.mutable_data_ptr()), slots.size(0)};
}

inline int64_t count_maps(const char* op, const Tensor& moved) {
  check_tensor(op, "moved", moved, ScalarType::Long);
  TORCHREC_DYN_CHECK(moved.dim() == 1 || (moved.dim() == 2 && moved.size(1) == 2), op,
                     ": expected moved of shape [T, 2] or [T], got ", moved.dim(), " dimensions.");
  return moved.size(0);
}

// The maps of T tables. `slots` lists the array of each table, then, in the same order, the outgoing arrays of the maps
// that grow: their `moved` is not -1. `moved` [T, 2], on the CPU for every device, also has the key of each map; [T] of
// an older exported program means key 0.
inline std::vector<IdMapView> views_of(const char* op, const std::vector<Tensor>& slots, const Tensor& moved,
                                       const Device& device = DeviceType::CPU) {
  const auto tables = static_cast<size_t>(count_maps(op, moved));
  const bool has_keys = moved.dim() == 2;
  const int64_t* words = const_data<int64_t>(moved);
  const auto moved_of = [&](size_t t) { return words[has_keys ? 2 * t : t]; };
  size_t growing = 0;
  for (size_t t = 0; t < tables; ++t) growing += moved_of(t) != -1;
  check_size(op, "the number of slots", static_cast<int64_t>(tables + growing), static_cast<int64_t>(slots.size()));
  std::vector<IdMapView> views;
  views.reserve(tables);
  size_t outgoing = tables;
  for (size_t t = 0; t < tables; ++t) {
    const SlotArray array = array_of(op, "slots", slots[t], device);
    const SlotHash hash = SlotHash::of(has_keys ? words[2 * t + 1] : 0);
    const int64_t done = moved_of(t);
    if (done == -1) {
      views.emplace_back(array, hash);
      continue;
    }
    const SlotArray old = array_of(op, "slots", slots[outgoing++], device);
    TORCHREC_DYN_CHECK(done >= 0 && done < old.capacity && done % kLineSlots == 0, op, ": expected moved in [0, ",
                       old.capacity, "), a multiple of ", kLineSlots, ", or -1, got ", done, ".");
    views.emplace_back(array, old, done, hash);
  }
  return views;
}

// The only map of a call.
inline IdMapView one_map(const char* op, const std::vector<Tensor>& slots, const Tensor& moved,
                         const Device& device = DeviceType::CPU) {
  const std::vector<IdMapView> maps = views_of(op, slots, moved, device);
  check_size(op, "the number of maps", 1, static_cast<int64_t>(maps.size()));
  return maps[0];
}

constexpr bool is_row_to_insert(int64_t row) { return row >= 0 && row < std::numeric_limits<int64_t>::max(); }

inline void check_inserted_row(const char* op, int64_t row) {
  TORCHREC_DYN_CHECK(is_row_to_insert(row), op, ": expected rows in [0, 2^63 - 1), got ", row, ".");
}

inline void check_inserted(const char* op, bool has_slots) {
  TORCHREC_DYN_CHECK(has_slots, op, ": expected an empty slot for every new id, got a full map. Grow it first.");
}

inline void raise_insert_error(const int64_t* words) {
  check_inserted_row("insert", words[0]);
  check_inserted("insert", false);
}

inline void check_capacity(const char* op, int64_t capacity) {
  TORCHREC_DYN_CHECK(capacity >= kLineSlots && capacity < (int64_t{1} << 48) && capacity % kLineSlots == 0, op,
                     ": expected a capacity in [", kLineSlots, ", 2^48), a multiple of ", kLineSlots, ", got ",
                     capacity, ".");
}

// The arrays of a call of grown_slots.
inline std::vector<SlotArray> arrays_to_grow(const std::vector<Tensor>& slots, const std::vector<int64_t>& capacities,
                                             const std::vector<int64_t>& keys, const Device& device) {
  const char* op = "grown_slots";
  check_size(op, "the number of capacities", static_cast<int64_t>(slots.size()),
             static_cast<int64_t>(capacities.size()));
  check_size(op, "the number of keys", static_cast<int64_t>(slots.size()), static_cast<int64_t>(keys.size()));
  for (const int64_t capacity : capacities) check_capacity(op, capacity);
  std::vector<SlotArray> arrays;
  for (const Tensor& array : slots) arrays.push_back(array_of(op, "slots", array, device));
  return arrays;
}

inline void check_grown(bool fits) {
  TORCHREC_DYN_CHECK(fits, "grown_slots: expected an empty slot for every id, got a capacity that is too small.");
}

inline void check_move(const SlotArray& from, const SlotArray& to, int64_t moved) {
  TORCHREC_DYN_CHECK(moved >= 0 && moved <= from.capacity && moved % kLineSlots == 0,
                     "move_slots: expected moved in [0, ", from.capacity, "], a multiple of ", kLineSlots, ", got ",
                     moved, ".");
  TORCHREC_DYN_CHECK(from.capacity <= to.capacity, "move_slots: expected slots for ", from.capacity,
                     " outgoing ones, got ", to.capacity, ".");
}

inline void check_moved(bool fits) {
  TORCHREC_DYN_CHECK(fits, "move_slots: expected an empty slot for every id, got a full map.");
}

inline void raise_full_map(const int64_t*) { check_grown(false); }

inline void check_cell_bits(int64_t bits) {
  TORCHREC_DYN_CHECK(bits >= 0 && bits <= kMostCellBits, "count_cells: expected bits in [0, ", kMostCellBits, "], got ",
                     bits, ".");
}

}  // namespace torchrec_dyn
