// The kernels of the ops that list the ids of a map, and count them by cell (simt.h).
#pragma once

#include <cstdint>

#include "mix64.h"
#include "simt.h"
#include "storage/cells.h"
#include "storage/id_map.h"

namespace torchrec_dyn {

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

// The slots of a map, as of one array: its slots, then the outgoing slots if it grows. Both are whole lines.
struct AllSlots {
  SlotArray arrays[2];
  int64_t count;

  explicit AllSlots(const IdMapView& map)
      : arrays{map.arrays[0], map.arrays[1]},
        count(map.arrays[0].capacity + (map.is_growing() ? map.arrays[1].capacity : 0)) {}
  TORCHREC_DYN_BOTH const Slot* at(int64_t slot) const {
    const int64_t past = slot - arrays[0].capacity;
    return past < 0 ? arrays[0].slots + slot : arrays[1].slots + past;
  }
};

// Mixed ids spread evenly, so threads meet at one word only where there are few cells: `count` is for these.
struct CountCells {
  AllSlots all;
  int bits;
  int64_t* counts;  // [2^bits], 0 at first

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const Slot slot = *all.at(i);
    if (!slot.is_empty())
      simt::warp_aggregated_increment(counts + cell_of(mix64(static_cast<uint64_t>(slot.id)), bits));
  }
};

// The ids of a map in a range of mixed ids. One thread for each line: its slots are two sectors of memory.
struct IdsInside {
  AllSlots all;
  uint64_t first;
  uint64_t span;    // last - first, unsigned
  int64_t* places;  // [lines + 1]: the ids of each line inside; then the sums of these

  TORCHREC_DYN_BOTH int64_t lines() const { return all.count / kLineSlots; }
  // The mixed id less the first one: it is inside if this is at most `span`.
  TORCHREC_DYN_BOTH uint64_t key(const Slot& slot) const { return mix64(static_cast<uint64_t>(slot.id)) - first; }
  TORCHREC_DYN_BOTH bool has(const Slot& slot) const { return !slot.is_empty() && key(slot) <= span; }
};

// Launched with lines + 1 threads: the sums then end with the number of ids.
struct CountInside {
  IdsInside found;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    int64_t inside = 0;
    if (i < found.lines()) {
      const Slot* line = found.all.at(i * kLineSlots);
      for (int64_t s = 0; s < kLineSlots; ++s) {
        const Slot slot = line[s];  // nvcc loads a copy at once
        inside += found.has(slot);
      }
    }
    found.places[i] = inside;
  }
};

struct ListInside {
  IdsInside found;
  uint64_t* keys;
  int64_t* rows;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    int64_t place = found.places[i];
    const int64_t end = found.places[i + 1];
    if (place == end) return;  // in a narrow range most lines are not read again
    const Slot* line = found.all.at(i * kLineSlots);
    for (int64_t s = 0; s < kLineSlots; ++s) {
      const Slot slot = line[s];
      if (!found.has(slot) || place == end) continue;
      keys[place] = found.key(slot);
      rows[place++] = slot.row();
    }
  }
};

// Turns listed keys into ids, in their order. `ids` and `rows` may be the memory of the keys and rows.
struct UnmixListed {
  simt::Pairs listed;
  uint64_t first;
  uint64_t* ids;
  int64_t* rows;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    ids[i] = unmix64(listed.keys[i] + first);
    rows[i] = listed.values[i];
  }
};

}  // namespace torchrec_dyn
