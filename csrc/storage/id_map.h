// The id map: id -> row, by open addressing with linear probing over a plain array of slots.
//
// Layout
//   slots [C, 2] int64, one slot = {id, row + 1}, 16 bytes, four slots a cache line, C whole lines. The home of an
//   id is a line: nine ids in ten cost one cache miss, and no branch depends on the slot of an id inside its line. A
//   slot with 0 in its second field is empty. So memory fresh from the system is an empty map (zeroed_memory.h), and no
//   id is reserved, since the id field of an empty slot does not matter. The caller keeps at least one slot empty (the
//   Python side grows at 5/8 load).
//
// Rules
//   find    start at the home line; stop at the id or after the first line with an empty slot.
//   insert  the id is known to be absent: take the first empty slot from home on.
//   erase   empty the slot, then close the gap by moving back every later slot of the run whose home is
//           not inside the gap (backward shift). There are no tombstones, so probes do not grow with age.
//   grow    a map that grows has two arrays and one frontier, a hash. An id whose hash is below the
//           frontier is in the new array, any other id in the outgoing array: so an id has one home, and a lookup
//           is one probe. storage/id_map_growth_cpu.h moves the frontier.
// Every loop is bounded by the capacity: with a full or damaged map a loop ends with kNoRow or false, it never hangs.
//
// Source: Knuth, TAOCP vol. 3, section 6.4, algorithms L (find, insert) and R (erase).
#pragma once

#include <cstdint>

#include "simd.h"
#include "slot_hash.h"

namespace torchrec_dyn {

constexpr int64_t kNoRow = -1;

// Both are defined for every number that a damaged map may hold.
TORCHREC_DYN_BOTH constexpr int64_t row_of_place(int64_t place) {
  return static_cast<int64_t>(static_cast<uint64_t>(place) - 1);
}
TORCHREC_DYN_BOTH constexpr int64_t place_of_row(int64_t row) {
  return static_cast<int64_t>(static_cast<uint64_t>(row) + 1);
}

#if defined(__CUDACC__)
struct alignas(16) Slot {  // loads of 16 bytes; CPU kernels take slots at any multiple of 8
#else
struct Slot {
#endif
  int64_t id;
  int64_t place;  // row + 1; 0 in an empty slot

  TORCHREC_DYN_BOTH bool is_empty() const { return place == 0; }
  TORCHREC_DYN_BOTH int64_t row() const { return row_of_place(place); }
};
static_assert(sizeof(Slot) == 16);

struct SlotArray {
  Slot* slots = nullptr;
  int64_t capacity = 0;

  TORCHREC_DYN_BOTH int64_t home(uint64_t hash) const { return home_slot(hash, capacity); }
  TORCHREC_DYN_BOTH int64_t next(int64_t slot) const { return slot + 1 == capacity ? 0 : slot + 1; }
  TORCHREC_DYN_BOTH int64_t next_line(int64_t slot) const {
    return slot + kLineSlots == capacity ? 0 : slot + kLineSlots;
  }
};

struct IdMapView {
  // [0] the slots of the map, [1] the outgoing slots. The same array twice while the map does not grow.
  SlotArray arrays[2];
  SlotHash hash;
  uint64_t frontier = 0;

  explicit IdMapView(SlotArray whole, SlotHash hash) : arrays{whole, whole}, hash(hash) {}
  // A map that grows: `moved` outgoing slots have been moved.
  IdMapView(SlotArray slots, SlotArray outgoing, int64_t moved, SlotHash hash)
      : arrays{slots, outgoing}, hash(hash), frontier(least_hash(moved, outgoing.capacity)) {}

  TORCHREC_DYN_BOTH bool is_growing() const { return arrays[0].slots != arrays[1].slots; }
  // No branch: the choice cannot be predicted.
  TORCHREC_DYN_BOTH const SlotArray& array_of(uint64_t hash) const { return arrays[hash >= frontier]; }
};

TORCHREC_DYN_BOTH inline const SlotArray& array_of(const SlotArray& array, uint64_t) { return array; }
TORCHREC_DYN_BOTH inline const SlotArray& array_of(const IdMapView& map, uint64_t hash) { return map.array_of(hash); }

template <typename Map>
TORCHREC_DYN_INLINE const Slot* home_line(const Map& map, uint64_t hash) {
  const SlotArray& array = array_of(map, hash);
  return array.slots + array.home(hash);
}

// Prefetches the cache line where find_row will begin. Into L2: the few miss buffers of L1 would limit the number of
// lines on their way. Inlined by force: the compiler takes a function that only prefetches for a function without
// effect.
TORCHREC_DYN_INLINE void prefetch_home(const IdMapView& map, uint64_t hash) {
  __builtin_prefetch(home_line(map, hash), 0, 2);
}

template <typename Map>
TORCHREC_DYN_INLINE void prefetch_next_line(const Map& map, uint64_t hash) {
  const SlotArray& array = array_of(map, hash);
  __builtin_prefetch(array.slots + array.next_line(array.home(hash)), 0, 2);
}

// The row + 1 of `id` if it is in the line, else 0. No branch: the slot of an id inside its line cannot be predicted.
// At most one slot holds the id and is not empty, so the places of all matching slots are ORed.
TORCHREC_DYN_BOTH inline int64_t place_in_line(const Slot* line, int64_t id) {
  int64_t place = 0;
  for (int64_t s = 0; s < kLineSlots; ++s) {
    const Slot slot = line[s];  // nvcc loads a copy at once
    place |= slot.place & -static_cast<int64_t>(slot.id == id);
  }
  return place;
}

// The row of `id`, or kNoRow. `hash` is the hash of the id, which callers compute earlier to prefetch the home.
TORCHREC_DYN_BOTH inline int64_t find_row(const SlotArray& array, int64_t id, uint64_t hash) {
  int64_t slot = array.home(hash);
  for (int64_t probe = 0; probe < array.capacity; probe += kLineSlots) {
    const int64_t place = place_in_line(array.slots + slot, id);
    if (place != 0) return row_of_place(place);
    for (int64_t s = 0; s < kLineSlots; ++s)
      if (array.slots[slot + s].is_empty()) return kNoRow;
    slot = array.next_line(slot);
  }
  return kNoRow;
}

TORCHREC_DYN_BOTH inline int64_t find_row(const IdMapView& map, int64_t id, uint64_t hash) {
  return find_row(map.array_of(hash), id, hash);
}

// The bits of the empty slots of a line, without a branch.
TORCHREC_DYN_BOTH inline unsigned empty_in_line(const Slot* line) {
  unsigned empty = 0;
  for (int64_t s = 0; s < kLineSlots; ++s) empty |= static_cast<unsigned>(line[s].is_empty()) << s;
  return empty;
}

// Inserts `id`, which must be absent, in the first empty slot from its home on and before `limit`, which is the first
// slot of a line. Returns false if there is none.
inline bool insert_before(const SlotArray& array, int64_t limit, int64_t id, int64_t row, uint64_t hash) {
  for (int64_t slot = array.home(hash); slot < limit; slot += kLineSlots) {
    const unsigned empty = empty_in_line(array.slots + slot);
    if (empty == 0) continue;
    array.slots[slot + lowest_bit(empty)] = Slot{id, place_of_row(row)};
    return true;
  }
  return false;
}

// Inserts `id`, which must be absent. Returns false if there is no empty slot.
inline bool insert_absent(const SlotArray& array, int64_t id, int64_t row, uint64_t hash) {
  return insert_before(array, array.capacity, id, row, hash) ||
         insert_before(array, array.home(hash), id, row, 0);  // wraps around the end: 0 has the first home
}

inline bool insert_absent(const IdMapView& map, int64_t id, int64_t row, uint64_t hash) {
  return insert_absent(map.array_of(hash), id, row, hash);
}

// True if the circular walk from `from` (excluded) to `to` (included) passes `slot`.
TORCHREC_DYN_BOTH inline bool lies_after(int64_t from, int64_t slot, int64_t to) {
  return from <= to ? (from < slot && slot <= to) : (from < slot || slot <= to);
}

// True if `slot`, after a hole in its run, holds an id that must not move back to the hole. The homes of ids are first
// slots of lines, so a later id in the hole's line may always move. (In a full map the run comes round to the earlier.)
TORCHREC_DYN_BOTH inline bool must_stay(const SlotArray& array, const SlotHash& hash, int64_t hole, int64_t slot) {
  const bool follows_in_line = slot / kLineSlots == hole / kLineSlots && slot > hole;
  return !follows_in_line && lies_after(hole, array.home(hash(array.slots[slot].id)), slot);
}

// Removes the id in slot `hole`, and closes the gap: later ids of the run move back.
TORCHREC_DYN_BOTH inline void close_gap(const SlotArray& array, const SlotHash& hash, int64_t hole) {
  int64_t slot = array.next(hole);
  for (int64_t probe = 0; probe < array.capacity && !array.slots[slot].is_empty(); ++probe, slot = array.next(slot)) {
    if (must_stay(array, hash, hole, slot)) continue;
    array.slots[hole] = array.slots[slot];
    hole = slot;
  }
  array.slots[hole] = Slot{};
}

// Removes `id` and returns the row it held, or kNoRow. `its_hash` is the hash of the id.
inline int64_t erase_id(const IdMapView& map, int64_t id, uint64_t its_hash) {
  const SlotArray& array = map.array_of(its_hash);
  int64_t hole = array.home(its_hash);
  int64_t probe = 0;
  for (; probe < array.capacity; ++probe, hole = array.next(hole)) {
    if (array.slots[hole].is_empty()) return kNoRow;
    if (array.slots[hole].id == id) break;
  }
  if (probe == array.capacity) return kNoRow;
  const int64_t row = array.slots[hole].row();
  close_gap(array, map.hash, hole);
  return row;
}

// As erase_id, if neither the search nor the run of the id reaches `limit`, the first slot of a line; else returns
// false and changes nothing.
inline bool erase_before(const SlotArray& array, const SlotHash& hash, int64_t limit, int64_t id, uint64_t its_hash,
                         int64_t& row) {
  for (int64_t line = array.home(its_hash); line < limit; line += kLineSlots) {
    const unsigned empty = empty_in_line(array.slots + line);
    unsigned holds = 0;
    for (int64_t s = 0; s < kLineSlots; ++s) holds |= static_cast<unsigned>(array.slots[line + s].id == id) << s;
    holds &= ~empty;
    if (holds == 0) {
      if (empty == 0) continue;
      row = kNoRow;
      return true;
    }
    int64_t hole = line + lowest_bit(holds);
    row = array.slots[hole].row();
    // The first empty slot after the hole in its line (a damaged map may have one before it, too), or the line's end.
    int64_t end = hole + lowest_bit((empty | 1u << kLineSlots) >> (hole - line));
    if (empty == 0) {  // the run may go on in the next line
      while (end < limit && !array.slots[end].is_empty()) ++end;
      if (end >= limit) return false;
    }
    for (int64_t slot = hole + 1; slot < end; ++slot) {
      if (must_stay(array, hash, hole, slot)) continue;
      array.slots[hole] = array.slots[slot];
      hole = slot;
    }
    array.slots[hole] = Slot{};
    return true;
  }
  return false;
}

// The probe length of the id in `slot`: the slots from its home to it, both counted.
TORCHREC_DYN_BOTH inline int64_t probe_length(const SlotArray& array, const SlotHash& hash, int64_t slot) {
  const int64_t distance = slot - array.home(hash(array.slots[slot].id));
  return 1 + (distance < 0 ? distance + array.capacity : distance);
}

// Finds the rows of up to kChunk ids in one map, or in one array of it, and returns the number of absent ids.
//
// Home lines are prefetched into L2 a burst ahead, in tight loops: a line is usually on a new page too, and the fewer
// instructions between two new pages, the more page walks overlap. The hash alone fits between them without delay. From
// L2 they are prefetched into L1 a few ids ahead: else each of the eight loads of a line is tried again until the line
// is there. Every id is then searched in its home line, without a branch. Ids that are not there (about one in ten, and
// absent ids) are searched again at the end, when their next lines have been prefetched. Waiting for these lines one by
// one took as long as all the rest.
constexpr int64_t kChunk = 512;

template <typename Map>
int64_t find_chunk(const Map& map, const SlotHash& hash, const int64_t* ids, int64_t count, int64_t* rows) {
  constexpr int64_t kBurst = 64;
  constexpr int64_t kNear = 8;
  const Slot* homes[kChunk + kNear];
  int64_t pending[kChunk];
  int64_t waiting = 0;
  const auto ask_for_homes = [&](int64_t begin, int64_t end) __attribute__((always_inline)) {
    for (int64_t i = begin; i < end && i < count; ++i) {
      homes[i] = home_line(map, hash(ids[i]));
      __builtin_prefetch(homes[i], 0, 2);
    }
  };
  ask_for_homes(0, kBurst);
  for (int64_t i = count; i < count + kNear; ++i) homes[i] = homes[0];
  for (int64_t i = 0; i < count; ++i) {
    if (i % kBurst == 0) ask_for_homes(i + kBurst, i + 2 * kBurst);
    __builtin_prefetch(homes[i + kNear], 0, 3);
    const int64_t place = place_in_line(homes[i], ids[i]);
    rows[i] = row_of_place(place);
    pending[waiting] = i;
    waiting += place == 0;
  }
  // An empty slot in the home line ends the search: only the other ids wait for their next lines.
  const int64_t searched = waiting;
  waiting = 0;
  for (int64_t p = 0; p < searched; ++p) {
    const int64_t i = pending[p];
    pending[waiting] = i;
    waiting += empty_in_line(homes[i]) == 0;
  }
  int64_t absent = searched - waiting;
  for (int64_t p = 0; p < waiting; ++p) prefetch_next_line(map, hash(ids[pending[p]]));
  for (int64_t p = 0; p < waiting; ++p) {
    const int64_t i = pending[p];
    rows[i] = find_row(map, ids[i], hash(ids[i]));
    absent += rows[i] == kNoRow;
  }
  return absent;
}

template <typename Map>
int64_t find_rows_in(const Map map, const SlotHash hash, const int64_t* ids, int64_t begin, int64_t end,
                     int64_t* rows) {
  int64_t absent = 0;
  for (int64_t i = begin; i < end; i += kChunk)
    absent += find_chunk(map, hash, ids + i, end - i < kChunk ? end - i : kChunk, rows + i);
  return absent;
}

// For a map that does not grow, the loop does not choose between arrays.
inline int64_t find_rows(const IdMapView& map, const int64_t* ids, int64_t begin, int64_t end, int64_t* rows) {
  if (map.arrays[0].capacity == 0) {
    for (int64_t i = begin; i < end; ++i) rows[i] = kNoRow;
    return end - begin;
  }
  return map.is_growing() ? find_rows_in(map, map.hash, ids, begin, end, rows)
                          : find_rows_in(map.arrays[0], map.hash, ids, begin, end, rows);
}

}  // namespace torchrec_dyn
