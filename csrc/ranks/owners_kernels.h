// The kernels of sort_by_owner (simt.h), after ReadLengths. The owners are keys of a stable sort of the positions. The
// number of ids of an owner and bag is counted beside it, so long bags cost no more than short ones.
#pragma once

#include <cstdint>

#include "device_errors.h"
#include "mix64.h"
#include "ranks/owner.h"
#include "simt.h"
#include "storage/table_of.h"

namespace torchrec_dyn {

// Launched with count + 1 threads: the last one checks the sum of the lengths. Requires a bag if there are ids.
template <typename Length>
struct FindOwners {
  const uint64_t* ids;
  int64_t count;
  const int64_t* begins;  // [bags + 1]; the last one is `count`, else the result is dropped
  int64_t bags;
  uint64_t ranks;
  uint64_t ids_per_rank;
  simt::Pairs owners;      // owner and position of each id
  Length* sorted_lengths;  // [ranks * bags], 0 at first
  int64_t* is_wrong;       // 1 if lengths and ids do not fit together

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    if (i == count) {
      if (begins[bags] != count) simt::atomic_max(is_wrong, 1);
      return;
    }
    const uint64_t owner = owner_of(mix64(ids[i]), ranks, ids_per_rank);
    owners.keys[i] = owner;
    owners.values[i] = i;
    const int64_t bag = table_of(i, bags, [this](int64_t b) { return begins[b]; });
    simt::warp_aggregated_increment(sorted_lengths + static_cast<int64_t>(owner) * bags + bag);
  }
};

// Launched with count + 1 threads: the last one reports lengths that do not fit. The ids then are in some order:
// lengths by owner still add up to `count`, since each id was counted once.
template <typename Weight>
struct MoveToOwners {
  int64_t count;
  const int64_t* order;  // positions by owner
  const int64_t* ids;
  const Weight* weights;  // or null
  int64_t* sorted_ids;
  Weight* sorted_weights;
  int64_t* where;           // or null
  const int64_t* is_wrong;  // of FindOwners
  ErrorReport error;        // count

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    if (i == count) {
      if (*is_wrong != 0) error.report(count);
      return;
    }
    const int64_t from = order[i];
    sorted_ids[i] = ids[from];
    if (weights != nullptr) sorted_weights[i] = weights[from];
    if (where != nullptr) where[from] = i;
  }
};

}  // namespace torchrec_dyn
