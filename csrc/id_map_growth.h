// How a map grows: its slots move from the outgoing array to a larger one, a stretch at a time.
//
// home_slot is monotone in the spread hash, so a stretch of outgoing slots holds a range of spread hashes and
// moves to a stretch of new slots: both walks go from front to back. `moved` says how far the walk is; the
// frontier of the map is the least spread hash whose outgoing home is `moved` (id_map.h).
//
// Invariant: every id in the outgoing array has its home at `moved` or later. It holds where a stretch ends
// behind an empty slot: no id with a home before that slot sits after it. An id whose run wraps around the end
// of the array may sit in front of its home; where a stretch finds such an id, it puts it back.
#pragma once

#include <cstdint>
#include <vector>

#include "id_map.h"

namespace torchrec_dyn {

// Where a stretch of at least `count` slots from `moved` on may end.
inline int64_t end_of_stretch(const SlotArray& outgoing, int64_t moved, int64_t count) {
  if (count >= outgoing.capacity - moved) return outgoing.capacity;
  int64_t end = moved + count;
  while (end < outgoing.capacity && !outgoing.slots[end - 1].is_empty()) ++end;
  return end;
}

// What a piece of a stretch could not place by itself.
struct LeftOver {
  std::vector<Slot> overflow;  // for the new array, behind the piece's own stretch of it
  std::vector<Slot> wrapped;   // for the outgoing array, homes at the end of it
};

// The slot of `slots` at which the homes of outgoing slots [outgoing_slot, ..) begin.
inline int64_t matching_slot(const SlotArray& outgoing, const SlotArray& slots, int64_t outgoing_slot) {
  if (outgoing_slot == outgoing.capacity) return slots.capacity;
  return slots.home(least_spread_hash(outgoing_slot, outgoing.capacity));
}

// Empties outgoing slots [begin, end) into `slots`. Both ends are the array's own or lie behind an empty slot.
// Reads and writes no new slot outside the matching stretch, so that pieces may run on several threads.
inline void move_piece(const SlotArray& outgoing, const SlotArray& slots, int64_t begin, int64_t end, LeftOver& left) {
  const int64_t limit = matching_slot(outgoing, slots, end);
  for (int64_t from = begin; from < end; ++from) {
    const Slot moved = outgoing.slots[from];
    if (moved.is_empty()) continue;
    outgoing.slots[from] = Slot{};
    const uint64_t spread = spread_hash(moved.id);
    if (outgoing.home(spread) >= end) {
      left.wrapped.push_back(moved);
      continue;
    }
    int64_t to = slots.home(spread);
    while (to < limit && !slots.slots[to].is_empty()) ++to;
    if (to < limit)
      slots.slots[to] = moved;
    else
      left.overflow.push_back(moved);
  }
}

// Places what the pieces left over; false if the new array is full.
inline bool place_left_over(const SlotArray& outgoing, const SlotArray& slots, const LeftOver& left) {
  bool fits = true;
  for (const Slot& slot : left.overflow) fits &= insert_absent(slots, slot.id, slot.row(), spread_hash(slot.id));
  for (const Slot& slot : left.wrapped) fits &= insert_absent(outgoing, slot.id, slot.row(), spread_hash(slot.id));
  return fits;
}

// The last step of growth: ids of the run around the end of the array that sit in front of its first empty slot.
inline bool move_wrapped(const SlotArray& outgoing, const SlotArray& slots) {
  bool fits = true;
  for (int64_t from = 0; from < outgoing.capacity && !outgoing.slots[from].is_empty(); ++from) {
    const Slot moved = outgoing.slots[from];
    outgoing.slots[from] = Slot{};
    fits &= insert_absent(slots, moved.id, moved.row(), spread_hash(moved.id));
  }
  return fits;
}

}  // namespace torchrec_dyn
