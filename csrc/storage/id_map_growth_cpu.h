// Growth of a map: its slots move from the outgoing array to a larger array, one stretch at a time.
//
// home_slot is monotone in the hash, so a stretch of outgoing slots holds a range of hashes and
// moves to a stretch of new slots: both walks go from front to back. `moved` is the end of the slots moved so far; the
// frontier of the map is the least hash whose outgoing home is `moved` (storage/id_map.h).
//
// Invariant: every id in the outgoing array has its home at `moved` or later. It holds because a stretch ends after an
// empty slot: no id with a home before this slot lies after it. The rest of the slot's line is then empty too, because
// homes are first slots of lines: so stretches end with whole lines. An id whose run wraps around the end of the array
// lies before its home: a stretch that meets such an id leaves it over, and the id is inserted again.
//
// Growth allocates nothing: ids left over wait in the first outgoing slots of their stretch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "storage/id_map.h"

namespace torchrec_dyn {

// The map after `moved` outgoing slots have moved; after all of them, the new array alone.
inline IdMapView growing_map(const SlotArray& slots, const SlotArray& outgoing, int64_t moved, SlotHash hash) {
  return moved < outgoing.capacity ? IdMapView(slots, outgoing, moved, hash) : IdMapView(slots, hash);
}

// The end of a stretch of at least `count` slots from `moved` on.
inline int64_t end_of_stretch(const SlotArray& outgoing, int64_t moved, int64_t count) {
  if (count >= outgoing.capacity - moved) return outgoing.capacity;
  int64_t end = moved + count;
  while (end < outgoing.capacity && !outgoing.slots[end - 1].is_empty()) ++end;
  return (end + kLineSlots - 1) / kLineSlots * kLineSlots;
}

// Moves outgoing slots [begin, end) into `slots`. `begin` and `end` are bounds of the array or of stretches.
// Writes no new slot outside the matching stretch, so that each thread can move a piece of its own. Ids without a place
// there, and ids that wrap around the end of the outgoing array (their home is later), are left over: they are in the
// outgoing slots from `begin` on to the result.
inline int64_t move_stretch(const SlotArray& outgoing, const SlotArray& slots, int64_t begin, int64_t end,
                            const SlotHash hash) {
  constexpr int64_t kRun = 256;
  Slot kept[kRun + 1];  // which slots are empty cannot be predicted: without a branch, one more is written but not kept
  int64_t left_over = begin;
  const bool is_last = end == outgoing.capacity;
  const int64_t limit = is_last ? slots.capacity : slots.home(least_hash(end, outgoing.capacity));
  for (int64_t run = begin; run < end; run += kRun) {
    int64_t count = 0;
    for (int64_t from = run; from < std::min(run + kRun, end); ++from) {
      kept[count] = outgoing.slots[from];
      count += !outgoing.slots[from].is_empty();
    }
    for (int64_t i = 0; i < count; ++i)
      if (!insert_before(slots, limit, kept[i].id, kept[i].row(), hash(kept[i].id)))
        outgoing.slots[left_over++] = kept[i];
  }
  std::fill(outgoing.slots + left_over, outgoing.slots + end, Slot{});
  return left_over;
}

// Inserts the ids in outgoing slots [begin, end) into the map, as it is after the move, and empties these slots one by
// one. An id that wraps around the end of the outgoing array again finds a slot before the ids that still wait. Returns
// false if the map is full.
inline bool place_left_over(const IdMapView& map, const SlotArray& outgoing, int64_t begin, int64_t end) {
  bool fits = true;
  for (int64_t from = begin; from < end; ++from) {
    const Slot slot = outgoing.slots[from];
    outgoing.slots[from] = Slot{};
    fits &= insert_absent(map, slot.id, slot.row(), map.hash(slot.id));
  }
  return fits;
}

// The end of the ids that lie before their homes, at the front of the array: the run that wraps around its end.
inline int64_t end_of_wrapped(const SlotArray& outgoing) {
  int64_t end = 0;
  while (end < outgoing.capacity && !outgoing.slots[end].is_empty()) ++end;
  return end;
}

}  // namespace torchrec_dyn
