// The error of offsets, as a kernel reports it (device_errors.h).
#pragma once

#include <cstdint>

#include "device_errors.h"

namespace torchrec_dyn {

// Reports `words`, then two offsets and the end of their range: those that check_offsets finds wrong. Reports nothing
// if all are right. For one turn, after an error was found: it reads the offsets one by one.
template <typename... Words>
TORCHREC_DYN_BOTH inline void report_wrong_offsets(const ErrorReport& error, const int64_t* offsets, int64_t bags,
                                                   int64_t ids, Words... words) {
  const int64_t first = offsets[0], last = offsets[bags];
  if (first < 0 || last > ids) return error.report(words..., first, last, ids);
  for (int64_t b = 0; b < bags; ++b)
    if (offsets[b] > offsets[b + 1]) return error.report(words..., offsets[b], offsets[b + 1], INT64_MAX);
}

}  // namespace torchrec_dyn
