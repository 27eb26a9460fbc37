// The bodies of the ops that list the ids of a map (simt.h).
#pragma once

#include <cstdint>

#include "simt.h"
#include "storage/id_map.h"

namespace torchrec_dyn {

// Has capacity + 1 turns: the sums of the flags then end with the number of ids.
struct FlagUsed {
  SlotArray array;
  int64_t* places;
  TORCHREC_DYN_BOTH void operator()(int64_t i) const { places[i] = i < array.capacity && !array.slots[i].is_empty(); }
};

struct ListUsed {
  SlotArray array;
  const int64_t* places;  // the sums of the flags
  int64_t* ids;
  int64_t* rows;
  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const Slot slot = array.slots[i];
    if (places[i] == places[i + 1]) return;
    ids[places[i]] = slot.id;
    rows[places[i]] = slot.row();
  }
};

// Writes each id to the place of its row. A damaged map may have two ids of one row: either of them is written.
struct WriteIdsOfRows {
  SlotArray array;
  int64_t first;  // row
  int64_t rows;   // number of them
  int64_t* ids;
  uint8_t* has_id;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const Slot slot = array.slots[i];
    const uint64_t place = static_cast<uint64_t>(slot.row()) - static_cast<uint64_t>(first);
    if (place >= static_cast<uint64_t>(rows)) return;  // another row, or the -1 of an empty slot
    simt::store(ids + place, slot.id);
    simt::store(has_id + place, uint8_t{1});
  }
};

}  // namespace torchrec_dyn
