// The error of offsets, as a kernel reports it (device_errors.h).
#pragma once

#include <cstdint>

#include "device_errors.h"

namespace torchrec_dyn {

// For each of the bags + 1 offsets, of one thread each: 0 if offset `i` is right, as far as it and the one before show.
// Else how many bags there are from the wrong pair on; one more than all bags if the range of the offsets is wrong. The
// largest number of all threads names what check_offsets finds.
TORCHREC_DYN_BOTH inline int64_t wrong_offsets_left(const int64_t* offsets, int64_t bags, int64_t ids, int64_t i) {
  const int64_t offset = offsets[i];
  if ((i == 0 && offset < 0) || (i == bags && offset > ids)) return bags + 1;
  return i > 0 && offset < offsets[i - 1] ? bags - (i - 1) : 0;
}

// Reports `words`, then two offsets and the end of their range. `left`: the largest number of wrong_offsets_left.
template <typename... Words>
TORCHREC_DYN_BOTH inline void report_wrong_offsets(const ErrorReport& error, const int64_t* offsets, int64_t bags,
                                                   int64_t left, int64_t ids, Words... words) {
  if (left > bags) return error.report(words..., offsets[0], offsets[bags], ids);
  error.report(words..., offsets[bags - left], offsets[bags - left + 1], INT64_MAX);
}

}  // namespace torchrec_dyn
