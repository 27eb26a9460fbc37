// Insertions into maps and removals from them on the CPU, on all threads.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "parallel.h"
#include "storage/id_map.h"
#include "storage/parts_cpu.h"

namespace torchrec_dyn {

// The ids of several tables whose maps change; offsets [T + 1] says where the ids of each table begin. All memory is
// taken when it is made.
class MapChange {
 public:
  MapChange(const std::vector<IdMapView>& maps, const int64_t* ids, const int64_t* offsets)
      : maps_(maps),
        ids_(ids),
        hashes_(hashes_of(maps, ids, offsets, kOnAllThreads)),
        parts_(offsets, part_bits_of(offsets, maps), hashes_.get(), kOnAllThreads) {}

  // Inserts the ids, which must be absent, with their rows. Returns false if a map has no slot for one.
  bool insert(const int64_t* rows) {
    bool fits = true;
    parts_.visit_homes(
        maps_, hashes_.get(),
        [&](int64_t i, const IdMapView&, const SlotArray& array, int64_t limit) {
          return insert_before(array, limit, ids_[i], rows[i], hash(i));
        },
        [&](int64_t i, const IdMapView& map) { fits &= insert_absent(map, ids_[i], rows[i], hash(i)); }, kOnAllThreads);
    return fits;
  }

  // Removes the ids and writes the rows that they had, kNoRow for an absent id.
  void erase(int64_t* rows) {
    parts_.visit_homes(
        maps_, hashes_.get(),
        [&](int64_t i, const IdMapView& map, const SlotArray& array, int64_t limit) {
          return erase_before(array, map.hash, limit, ids_[i], hash(i), rows[i]);
        },
        [&](int64_t i, const IdMapView& map) { rows[i] = erase_id(map, ids_[i], hash(i)); }, kOnAllThreads);
  }

 private:
  static constexpr auto kOnAllThreads = [](int64_t tasks, const auto& task) { for_each_task(tasks, task); };

  uint64_t hash(int64_t i) const { return hashes_[static_cast<size_t>(i)]; }

  const std::vector<IdMapView>& maps_;
  const int64_t* ids_;
  std::unique_ptr<uint64_t[]> hashes_;
  Parts parts_;
};

}  // namespace torchrec_dyn
