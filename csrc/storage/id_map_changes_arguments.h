// Insertions into maps and removals from them on a device: id_map_changes_cpu.h for CUDA.
#pragma once

#include <cstdint>
#include <vector>

#include "device_call.h"
#include "storage/id_map_arguments.h"
#include "storage/id_map_kernels.h"

namespace torchrec_dyn {

// The maps on the device. offsets [tables]: where the ids of each table begin, on the host.
inline TableMaps send_maps(DeviceCall& call, const std::vector<IdMapView>& views, const int64_t* offsets) {
  std::vector<TableMap> maps;
  maps.reserve(views.size());
  for (size_t t = 0; t < views.size(); ++t) maps.push_back({views[t], offsets[t]});
  return {call.copy_of(maps), static_cast<int64_t>(maps.size())};
}

// Returns a word that is not 0 if some row is none: kernels after it then change nothing.
inline const int64_t* check_rows(DeviceCall& call, const int64_t* rows, int64_t count) {
  auto* first_bad = call.zeros<int64_t>(1);
  simt::launch(call.stream(), count, CheckRows{rows, count, first_bad});
  return first_bad;
}

// Inserts ids, which must be absent, with their rows, unless `first_bad` of check_rows is set. `raise` raises the error
// of a row, or of a full map.
inline void insert_ids(DeviceCall& call, const TableMaps& maps, const int64_t* ids, const int64_t* rows, int64_t count,
                       const int64_t* first_bad, RaiseError raise) {
  simt::launch(call.stream(), count, InsertIds{ids, rows, count, maps, first_bad, call.errors(raise)});
}

inline LeavingIds leaving_ids(DeviceCall& call, const TableMaps& maps, const int64_t* ids, int64_t count) {
  return {ids, count, maps, call.allocate_for<int64_t>(count)};
}

// Removes ids, unless the word `bad` is set (null: none), and writes the rows that they had, kNoRow for an absent id.
inline void erase_ids(DeviceCall& call, const LeavingIds& leaving, int64_t* rows, const int64_t* bad) {
  simt::launch(call.stream(), leaving.count, FindLeaving{leaving, rows, bad});
  simt::launch(call.stream(), leaving.count, MarkLeaving{leaving});
  simt::launch(call.stream(), leaving.count, FirstOfRun{leaving, rows});
  simt::launch(call.stream(), leaving.count, CloseGaps{leaving});
}

}  // namespace torchrec_dyn
