// Growth of a map: its slots move from the outgoing array to a larger array, one stretch at a time.
//
// home_slot is monotone in the spread hash, so a stretch of outgoing slots holds a range of spread hashes and
// moves to a stretch of new slots: both walks go from front to back. `moved` is the end of the slots moved so far; the
// frontier of the map is the least spread hash whose outgoing home is `moved` (storage/id_map.h).
//
// Invariant: every id in the outgoing array has its home at `moved` or later. It holds because a stretch ends after an
// empty slot: no id with a home before this slot lies after it. The rest of the slot's line is then empty too, because
// homes are first slots of lines: so stretches end with whole lines. An id whose run wraps around the end of the array
// lies before its home: a stretch that meets such an id leaves it over, and the id is inserted again.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "storage/id_map.h"

namespace torchrec_dyn {

// The map after `moved` outgoing slots have moved; after all of them, the new array alone.
inline IdMapView growing_map(const SlotArray& slots, const SlotArray& outgoing, int64_t moved) {
  return moved < outgoing.capacity ? IdMapView(slots, outgoing, moved) : IdMapView(slots);
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
// there, and ids that wrap around the end of the outgoing array (their home is later), are added to `left_over`.
inline void move_stretch(const SlotArray& outgoing, const SlotArray& slots, int64_t begin, int64_t end,
                         std::vector<Slot>& left_over) {
  const bool is_last = end == outgoing.capacity;
  const int64_t limit = is_last ? slots.capacity : slots.home(least_spread_hash(end, outgoing.capacity));
  for (int64_t from = begin; from < end; ++from) {
    const Slot moved = outgoing.slots[from];
    if (moved.is_empty()) continue;
    int64_t to = slots.home(spread_hash(moved.id));
    while (to < limit && !slots.slots[to].is_empty()) ++to;
    if (to < limit)
      slots.slots[to] = moved;
    else
      left_over.push_back(moved);
  }
  std::fill(outgoing.slots + begin, outgoing.slots + end, Slot{});
}

// Moves the ids that lie before their homes to `left_over`: the run that wraps around the end of the array, up to the
// array's first empty slot.
inline void take_wrapped(const SlotArray& outgoing, std::vector<Slot>& left_over) {
  for (int64_t from = 0; from < outgoing.capacity && !outgoing.slots[from].is_empty(); ++from) {
    left_over.push_back(outgoing.slots[from]);
    outgoing.slots[from] = Slot{};
  }
}

// Inserts the ids left over into the map, as it is after the move. Returns false if the map is full.
inline bool place_left_over(const IdMapView& map, const std::vector<Slot>& left_over) {
  bool fits = true;
  for (const Slot& slot : left_over) fits &= insert_absent(map, slot.id, slot.row(), spread_hash(slot.id));
  return fits;
}

// The first of the empty outgoing slots before a stretch's end, which can be given back: the begin of the page that
// holds `moved`, since the slots from there to `moved` are empty already; but `moved` if a run that wraps around
// reaches the begin of the page.
inline int64_t first_empty_page(const SlotArray& outgoing, int64_t moved, int64_t slots_a_page) {
  const int64_t page = moved / slots_a_page * slots_a_page;
  return page < moved && outgoing.slots[page].is_empty() ? page : moved;
}

}  // namespace torchrec_dyn
