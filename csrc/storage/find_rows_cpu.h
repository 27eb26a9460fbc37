// The rows of the ids of several tables on the CPU, on all threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "parallel.h"
#include "storage/id_map.h"

namespace torchrec_dyn {

// offsets [T + 1]: where the ids of each table begin. Writes the row of each id, kNoRow for an absent one, and the
// number of absent ids of each table.
inline void find_rows(const std::vector<IdMapView>& maps, const int64_t* ids, const int64_t* offsets, int64_t* rows,
                      int64_t* absent) {
  constexpr int64_t kGrain = 2048;
  const auto tables = static_cast<int64_t>(maps.size());
  std::vector<std::atomic<int64_t>> absent_of(maps.size());
  for_each_range(offsets[tables], kGrain, [&](int64_t begin, int64_t end) {
    int64_t table = std::upper_bound(offsets, offsets + tables + 1, begin) - offsets - 1;
    for (int64_t first = begin; first < end; ++table) {
      const int64_t last = std::min(end, offsets[table + 1]);
      const int64_t missing = find_rows(maps[static_cast<size_t>(table)], ids, first, last, rows);
      absent_of[static_cast<size_t>(table)].fetch_add(missing, std::memory_order_relaxed);
      first = last;
    }
  });
  std::copy(absent_of.begin(), absent_of.end(), absent);
}

}  // namespace torchrec_dyn
