// Groups the ids of a batch by row: a run is a row and the positions of its ids. Runs are in the order in which their
// rows first occur, positions in the order of the batch. So the gradients of a row are added in the order of the batch
// on any number of threads, and most rows, which occur once, are updated while the gradient of their bag is in cache.
//
// A hash table with chains finds the last id that has the row of the next id. Whether a row is new cannot be predicted,
// so no branch depends on it. A counting sort then places the positions by run.
// Which rows meet in a batch is in the hands of those who make ids. The secret factor of the hash is enough for chains:
// any two rows have the same slot with a probability of at most 2 / slots.
// Sources: search in chained lists, Knuth, TAOCP vol. 3, section 6.4, algorithm C; multiply-shift, Dietzfelbinger,
// Hagerup, Katajainen, Penttonen, "A reliable randomized algorithm for the closest-pair problem", J. Algorithms 1997.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "process_hash.h"
#include "simd.h"

namespace torchrec_dyn {

// The ids of a row are at positions [begin(), end) of the list of positions.
struct Run {
  uint32_t row;
  uint32_t end;

  uint32_t begin() const { return this[-1].end; }  // there is a run before the first
};

class RowRuns {
 public:
  // Requires room for `most` ids. The memory is not initialised: the system commits no page that no batch needs.
  explicit RowRuns(size_t most)
      : ids_(std::make_unique_for_overwrite<Id[]>(most + 2)),
        run_of_(std::make_unique_for_overwrite<uint32_t[]>(most + 1)),
        positions_(std::make_unique_for_overwrite<uint32_t[]>(most)),
        runs_(std::make_unique_for_overwrite<Run[]>(most + 2)),
        last_(std::make_unique_for_overwrite<uint32_t[]>(slots_for(most))),
        before_(std::make_unique_for_overwrite<uint32_t[]>(most + 1)) {}

  // The bytes of the memory for `most` ids.
  static size_t bytes(size_t most) {
    return most * (sizeof(Id) + sizeof(Run) + 3 * sizeof(uint32_t)) + slots_for(most) * sizeof(uint32_t);
  }

  void clear() { size_ = 0; }
  size_t size() const { return size_; }

  // Adds an id only if `wanted`, without a branch. Requires room for it in both cases, and 0 <= row < 2^32.
  void add_if(bool wanted, int64_t row, uint32_t position) {
    ids_[size_ + 1] = {static_cast<uint32_t>(row), position};
    size_ += wanted;
  }

  // Groups the ids added since `clear`. Calls visit(position) for each id: what it asks of memory comes while the table
  // is searched, which waits for no memory.
  template <typename Visit>
  TORCHREC_DYN_INLINE void group(const Visit& visit) {
    const size_t slots = slots_for(size_);
    const int shift = 64 - std::countr_zero(slots);
    const uint64_t factor = process_hash().third;
    Id* const ids = ids_.get();
    uint32_t* const last = last_.get();
    uint32_t* const before = before_.get();
    uint32_t* const run_of = run_of_.get();
    Run* const runs = runs_.get();
    const auto size = static_cast<uint32_t>(size_);
    std::fill(last, last + slots, 0u);  // no id
    run_of[0] = 0;
    uint32_t count = 0;
    for (uint32_t i = 1; i <= size; ++i) {
      const uint32_t row = ids[i].row;
      visit(ids[i].position);
      uint32_t same = std::exchange(last[row * factor >> shift], i);
      before[i] = same;
      ids[0].row = row;                                  // ends the search
      while (ids[same].row != row) same = before[same];  // rare
      runs[count + 1].row = row;
      count += same == 0;
      run_of[i] = run_of[same] + (same == 0 ? count : 0);
    }
    for (uint32_t run = 0; run <= count; ++run) runs[run].end = 0;
    for (uint32_t i = 1; i <= size; ++i) ++runs[run_of[i]].end;
    uint32_t begin = 0;
    for (uint32_t run = 1; run <= count; ++run) begin += std::exchange(runs[run].end, begin);
    for (uint32_t i = 1; i <= size; ++i) positions_[runs[run_of[i]].end++] = ids[i].position;
    run_count_ = count;
  }

  std::span<const Run> runs() const { return {runs_.get() + 1, run_count_}; }
  const uint32_t* positions() const { return positions_.get(); }

 private:
  struct Id {
    uint32_t row;
    uint32_t position;
  };

  static size_t slots_for(size_t ids) { return std::bit_ceil(2 * ids + 2); }

  // Ids and runs are counted from 1; 0 is none.
  std::unique_ptr<Id[]> ids_;
  std::unique_ptr<uint32_t[]> run_of_;
  std::unique_ptr<uint32_t[]> positions_;  // by run
  std::unique_ptr<Run[]> runs_;
  std::unique_ptr<uint32_t[]> last_;    // the last id of each slot
  std::unique_ptr<uint32_t[]> before_;  // the id before in the same slot
  size_t size_ = 0;
  size_t run_count_ = 0;
};

}  // namespace torchrec_dyn
