// The id map: id -> row, by open addressing with linear probing over one plain array.
//
// Layout
//   slots [C, 2] int64, one slot = {id, row}, 16 bytes, so a slot never straddles a cache line and the id
//   and its row cost one miss. Emptiness is row == kNoRow: the id field of an empty slot is never asked,
//   so no id is reserved. The caller keeps at least one slot empty (the Python side grows at 3/4 load).
//
// Rules
//   find    start at home_slot(id); stop at the id or at the first empty slot.
//   insert  the id is known to be absent: take the first empty slot from home on.
//   erase   empty the slot, then close the gap by moving back every later slot of the run whose home is
//           not inside the gap (backward shift). There are no tombstones, so probes do not grow with age.
//   rehash  walk the old map from front to back into the new one. home_slot is monotone in the hash, so
//           both walks are sequential in memory.
// Every loop is bounded by the capacity: a full or damaged map ends in kNoRow or false, never in a hang.
//
// Source: Knuth, TAOCP vol. 3, section 6.4, algorithms L (find, insert) and R (erase).
#pragma once

#include <cstdint>

#include "mix64.h"

namespace torchrec_dyn {

constexpr int64_t kNoRow = -1;

struct Slot {
  int64_t id;
  int64_t row;
};
static_assert(sizeof(Slot) == 16);

struct IdMapView {
  Slot* slots;
  int64_t capacity;

  int64_t home(int64_t id) const { return home_slot(id, capacity); }
  int64_t next(int64_t slot) const { return slot + 1 == capacity ? 0 : slot + 1; }
};

inline void prefetch_slot(const IdMapView& map, int64_t slot) { __builtin_prefetch(&map.slots[slot], 0, 3); }

// The row of `id`, or kNoRow. `slot` is home(id), which the caller has computed to prefetch it.
inline int64_t find_row(const IdMapView& map, int64_t id, int64_t slot) {
  for (int64_t probe = 0; probe < map.capacity; ++probe) {
    const Slot& candidate = map.slots[slot];
    if (candidate.row == kNoRow) return kNoRow;
    if (candidate.id == id) return candidate.row;
    slot = map.next(slot);
  }
  return kNoRow;
}

// Requires that `id` is absent. False if there is no empty slot.
inline bool insert_absent(const IdMapView& map, int64_t id, int64_t row, int64_t slot) {
  for (int64_t probe = 0; probe < map.capacity; ++probe) {
    if (map.slots[slot].row == kNoRow) {
      map.slots[slot] = Slot{id, row};
      return true;
    }
    slot = map.next(slot);
  }
  return false;
}

// True if the circular walk from `from` (excluded) to `to` (included) passes `slot`.
inline bool lies_after(int64_t from, int64_t slot, int64_t to) {
  return from <= to ? (from < slot && slot <= to) : (from < slot || slot <= to);
}

// Removes `id` and returns the row it held, or kNoRow.
inline int64_t erase_id(const IdMapView& map, int64_t id) {
  int64_t hole = map.home(id);
  int64_t probe = 0;
  for (; probe < map.capacity; ++probe, hole = map.next(hole)) {
    if (map.slots[hole].row == kNoRow) return kNoRow;
    if (map.slots[hole].id == id) break;
  }
  if (probe == map.capacity) return kNoRow;
  const int64_t row = map.slots[hole].row;
  int64_t slot = map.next(hole);
  for (probe = 0; probe < map.capacity && map.slots[slot].row != kNoRow; ++probe, slot = map.next(slot)) {
    if (lies_after(hole, map.home(map.slots[slot].id), slot)) continue;
    map.slots[hole] = map.slots[slot];
    hole = slot;
  }
  map.slots[hole].row = kNoRow;
  return row;
}

// The number of slots looked at to find the id that sits in `slot`.
inline int64_t probe_length(const IdMapView& map, int64_t slot) {
  const int64_t distance = slot - map.home(map.slots[slot].id);
  return 1 + (distance < 0 ? distance + map.capacity : distance);
}

// Resolves ids[begin, end) against one map into rows[begin, end) and returns how many were absent.
// Two groups are in flight: the homes of the next group are prefetched before this one is resolved.
inline int64_t find_rows(const IdMapView& map, const int64_t* ids, int64_t begin, int64_t end, int64_t* rows) {
  constexpr int64_t kGroup = 16;
  if (map.capacity == 0) {
    for (int64_t i = begin; i < end; ++i) rows[i] = kNoRow;
    return end - begin;
  }
  int64_t homes[2][kGroup];
  const auto prefetch_group = [&](int64_t first, int64_t* home) {
    const int64_t last = first + kGroup < end ? first + kGroup : end;
    for (int64_t i = first; i < last; ++i) {
      home[i - first] = map.home(ids[i]);
      prefetch_slot(map, home[i - first]);
    }
  };
  prefetch_group(begin, homes[0]);
  int64_t absent = 0;
  int turn = 0;
  for (int64_t first = begin; first < end; first += kGroup, turn ^= 1) {
    prefetch_group(first + kGroup, homes[turn ^ 1]);
    const int64_t last = first + kGroup < end ? first + kGroup : end;
    for (int64_t i = first; i < last; ++i) {
      rows[i] = find_row(map, ids[i], homes[turn][i - first]);
      absent += rows[i] == kNoRow;
    }
  }
  return absent;
}

}  // namespace torchrec_dyn
