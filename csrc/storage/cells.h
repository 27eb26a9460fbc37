// Cells: the 2^bits equal ranges of mixed ids in which the ids of a map are counted.
#pragma once

#include <cstdint>

#include "simd.h"

namespace torchrec_dyn {

constexpr int64_t kMostCellBits = 16;

// The cell of a mixed id: its top `bits` bits; `bits` is 0 to 63.
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE uint64_t cell_of(uint64_t mixed, int bits) { return mixed >> 1 >> (63 - bits); }

}  // namespace torchrec_dyn
