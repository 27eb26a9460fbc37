// The kernels of the id map (simt.h).
//
// An insert claims a slot: the thread whose atomic_cas writes the place of an empty slot owns the slot and then
// writes its id. Turns of that launch read places only, and a place that is not 0 stays so. Ids are distinct and
// absent, so no thread compares ids. Slots depend on the order of the threads; the contents of the map do not.
//
// Ids are removed in four launches, since threads that move slots must not meet threads that search:
//   FindLeaving  finds the slot and the row of each id;
//   MarkLeaving  writes a mark in place of the row: of equal ids, the first one's;
//   FirstOfRun   keeps, of the marks of each run (the slots between two empty slots), the first;
//   CloseGaps    removes the marked ids of each run one by one, by the rule of the CPU. A run has one thread.
#pragma once

#include <cstdint>

#include "device_errors.h"
#include "mix64.h"
#include "simt.h"
#include "storage/id_map.h"
#include "storage/table_of.h"

namespace torchrec_dyn {

struct MixIds {
  const uint64_t* in;
  uint64_t* out;
  TORCHREC_DYN_BOTH void operator()(int64_t i) const { out[i] = mix64(in[i]); }
};

// The map of one table of a call.
struct TableMap {
  IdMapView map;
  int64_t begin;  // where the ids of the table begin
};

struct TableMaps {
  const TableMap* maps;
  int64_t tables;

  TORCHREC_DYN_BOTH int64_t table_of(int64_t i) const {
    return torchrec_dyn::table_of(i, tables, [this](int64_t table) { return maps[table].begin; });
  }
};

struct FindRows {
  const int64_t* ids;
  TableMaps maps;
  const int64_t* table_offsets;  // where the ids of each table begin, not checked; null: as `maps` says
  int64_t* rows;
  int64_t* absent;              // by tables
  const int64_t* error_record;  // of the GPU

  TORCHREC_DYN_BOTH int64_t table_of(int64_t i) const {
    if (table_offsets == nullptr) return maps.table_of(i);
    return torchrec_dyn::table_of(i, maps.tables, [this](int64_t table) { return table_offsets[table]; });
  }

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const int64_t table = table_of(i);
    const IdMapView& map = maps.maps[table].map;
    const int64_t row = find_row(map, ids[i], map.hash(ids[i]));
    rows[i] = row;
    if (row == kNoRow) simt::warp_aggregated_increment(absent + table);
    if (i == 0 && simt::load(error_record) != 0) simt::atomic_add(absent, kErrorMark);
  }
};

// Inserts `id`, which must be absent, in the first empty slot from its home on. Returns false if there is none.
TORCHREC_DYN_BOTH inline bool claim_slot(const SlotArray& array, int64_t id, int64_t place, uint64_t hash) {
  int64_t line = array.home(hash);
  for (int64_t probe = 0; probe < array.capacity; probe += kLineSlots, line = array.next_line(line)) {
    unsigned empty = 0;
    for (int64_t s = 0; s < kLineSlots; ++s)
      empty |= static_cast<unsigned>(simt::load(&array.slots[line + s].place) == 0) << s;
    for (; empty != 0; empty &= empty - 1) {
      Slot& slot = array.slots[line + lowest_bit(empty)];
      if (simt::atomic_cas(&slot.place, 0, place) != 0) continue;  // another thread was faster
      slot.id = id;
      return true;
    }
  }
  return false;
}

// The rows that an insert takes.
struct CheckRows {
  const int64_t* rows;
  int64_t count;
  int64_t* first_bad;  // 0, or the position of the first bad row - count

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    if (rows[i] < 0 || rows[i] == INT64_MAX) simt::atomic_min(first_bad, i - count);
  }
};

struct InsertIds {
  const int64_t* ids;
  const int64_t* rows;
  int64_t count;
  TableMaps maps;
  const int64_t* first_bad;  // of CheckRows
  ErrorReport error;         // the first bad row, or 0 if there is no slot

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    if (*first_bad != 0) {
      if (i == 0) error.report(rows[count + *first_bad]);
      return;
    }
    const IdMapView& map = maps.maps[maps.table_of(i)].map;
    const uint64_t hash = map.hash(ids[i]);
    if (!claim_slot(map.array_of(hash), ids[i], place_of_row(rows[i]), hash)) error.report(0);
  }
};

// Copies the ids of a map to a larger array of empty slots.
struct CopySlots {
  SlotArray from;
  SlotArray to;
  SlotHash hash;
  ErrorReport error;  // no words

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const Slot slot = from.slots[i];
    if (!slot.is_empty() && !claim_slot(to, slot.id, slot.place, hash(slot.id))) error.report();
  }
};

// The place of a slot whose id is removed: kLeaving + the position of the id in the call. No row has such a place.
constexpr int64_t kLeaving = INT64_MIN;
constexpr int64_t kNoSlot = -1;

// The slot of `id`, or kNoSlot. As find_row.
TORCHREC_DYN_BOTH inline int64_t find_slot(const SlotArray& array, int64_t id, uint64_t hash) {
  int64_t line = array.home(hash);
  for (int64_t probe = 0; probe < array.capacity; probe += kLineSlots, line = array.next_line(line)) {
    for (int64_t slot = line; slot < line + kLineSlots; ++slot)
      if (array.slots[slot].id == id && !array.slots[slot].is_empty()) return slot;
    if (empty_in_line(array.slots + line) != 0) return kNoSlot;
  }
  return kNoSlot;
}

// The ids that a call removes from the maps of several tables.
struct LeavingIds {
  const int64_t* ids;
  int64_t count;
  TableMaps maps;
  int64_t* slots;  // of the ids, or kNoSlot

  TORCHREC_DYN_BOTH const IdMapView& map_of(int64_t i) const { return maps.maps[maps.table_of(i)].map; }
  TORCHREC_DYN_BOTH const SlotArray& array_of(int64_t i) const {
    const IdMapView& map = map_of(i);
    return map.array_of(map.hash(ids[i]));
  }
  TORCHREC_DYN_BOTH bool is_leaving(const Slot& slot) const { return slot.place < kLeaving + count; }
};

struct FindLeaving {
  LeavingIds leaving;
  int64_t* rows;
  const int64_t* bad;  // null, or a word: no id is removed if it is not 0

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    if (bad != nullptr && *bad != 0) {
      leaving.slots[i] = kNoSlot;
      rows[i] = kNoRow;
      return;
    }
    const SlotArray array = leaving.array_of(i);
    const int64_t slot = find_slot(array, leaving.ids[i], leaving.map_of(i).hash(leaving.ids[i]));
    leaving.slots[i] = slot;
    rows[i] = slot == kNoSlot ? kNoRow : array.slots[slot].row();
  }
};

struct MarkLeaving {
  LeavingIds leaving;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const int64_t slot = leaving.slots[i];
    if (slot != kNoSlot) simt::atomic_min(&leaving.array_of(i).slots[slot].place, kLeaving + i);
  }
};

struct FirstOfRun {
  LeavingIds leaving;
  int64_t* rows;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const int64_t slot = leaving.slots[i];
    if (slot == kNoSlot) return;
    const SlotArray array = leaving.array_of(i);
    if (array.slots[slot].place != kLeaving + i) {  // an earlier id is equal
      rows[i] = kNoRow;
      leaving.slots[i] = kNoSlot;
    } else if (!is_first(array, slot)) {
      leaving.slots[i] = kNoSlot;
    }
  }

  // True if no marked slot lies before `slot` in its run; in a full map, whose run has no beginning, if no marked slot
  // has a lower number.
  TORCHREC_DYN_BOTH bool is_first(const SlotArray& array, int64_t slot) const {
    bool is_first = true;
    int64_t before = slot;
    for (int64_t probe = 1; probe < array.capacity; ++probe) {
      before = (before == 0 ? array.capacity : before) - 1;
      if (array.slots[before].is_empty()) return is_first;
      if (!leaving.is_leaving(array.slots[before])) continue;
      if (before < slot) return false;
      is_first = false;
    }
    return true;
  }
};

struct CloseGaps {
  LeavingIds leaving;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    int64_t slot = leaving.slots[i];
    if (slot == kNoSlot) return;
    const SlotArray array = leaving.array_of(i);
    // Counted first: gaps that are closed leave empty slots inside the run.
    int64_t left = 0;
    for (int64_t end = slot; left < array.capacity && !array.slots[end].is_empty(); end = array.next(end)) ++left;
    for (; left > 0; --left, slot = array.next(slot))
      while (leaving.is_leaving(array.slots[slot])) close_gap(array, leaving.map_of(i).hash, slot);
  }
};

// Probe lengths are measured in whole runs of slots. A thread reads every kProbeThreads-th slot of one run, so that
// threads side by side read slots side by side.
constexpr int64_t kProbeRun = 4096;
constexpr int64_t kProbeThreads = 32;

struct SumProbeLengths {
  SlotArray array;
  SlotHash hash;
  int64_t every;     // one in `every` runs is read
  int64_t* lengths;  // [3]: number of ids, sum of their probe lengths, the longest

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const int64_t begin = i / kProbeThreads * every * kProbeRun;
    const int64_t end = lesser_of(array.capacity, begin + kProbeRun);
    int64_t ids = 0, sum = 0, longest = 0;
    for (int64_t slot = begin + i % kProbeThreads; slot < end; slot += kProbeThreads) {
      if (array.slots[slot].is_empty()) continue;
      const int64_t length = probe_length(array, hash, slot);
      ++ids;
      sum += length;
      longest = greater_of(longest, length);
    }
    if (ids == 0) return;
    simt::atomic_add(lengths, ids);
    simt::atomic_add(lengths + 1, sum);
    simt::atomic_max(lengths + 2, longest);
  }
};

}  // namespace torchrec_dyn
