// Checks of the arguments of the ops on marks, for every device.
#pragma once

#include <cstdint>
#include <limits>

#include "checks.h"

namespace torchrec_dyn {

inline void check_version(int64_t version) {
  TORCHREC_DYN_CHECK(version >= 0 && version <= std::numeric_limits<int32_t>::max(),
                     "mark_rows_: expected versions in [0, 2^31), got ", version, ".");
}

// `capacity`: of the table's marks.
inline void check_marked_rows(const char* op, bool are_below, int64_t capacity, int64_t table) {
  TORCHREC_DYN_CHECK(are_below, op, ": expected rows below ", capacity, ", the marks of table ", table,
                     ", got one above.");
}

inline void raise_marked_error(const int64_t* words) { check_marked_rows("mark_rows_", false, words[0], words[1]); }

}  // namespace torchrec_dyn
