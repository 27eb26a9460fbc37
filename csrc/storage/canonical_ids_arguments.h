// The arguments of the ops that read all ids of one map.
#pragma once

#include <vector>

#include "checks.h"
#include "storage/cells.h"
#include "storage/id_map_arguments.h"

namespace torchrec_dyn {

inline IdMapView one_map(const char* op, const std::vector<Tensor>& slots, const Tensor& moved,
                         const Device& device = DeviceType::CPU) {
  const std::vector<IdMapView> maps = views_of(op, slots, moved, device);
  check_size(op, "the number of maps", 1, static_cast<int64_t>(maps.size()));
  return maps[0];
}

inline void check_cell_bits(int64_t bits) {
  TORCHREC_DYN_CHECK(bits >= 0 && bits <= kMostCellBits, "count_cells: expected bits in [0, ", kMostCellBits, "], got ",
                     bits, ".");
}

}  // namespace torchrec_dyn
