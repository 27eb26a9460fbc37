// The kernels of admission by chance (simt.h).
#pragma once

#include <cstdint>

#include "device_errors.h"
#include "life/admission.h"
#include "simt.h"

namespace torchrec_dyn {

struct CheckOccurrences {
  const int64_t* counts;
  int64_t n;
  int64_t* first_bad;  // 0, or the position of the first invalid count - n

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    if (!is_occurrences(counts[i])) simt::atomic_min(first_bad, i - n);
  }
};

// Admits no id if a count is invalid.
struct AdmitByChance {
  const int64_t* ids;
  const int64_t* counts;
  int64_t n;
  uint64_t key;
  int64_t step;
  double probability;
  bool* admitted;
  const int64_t* first_bad;  // of CheckOccurrences
  ErrorReport error;         // the first invalid count

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    if (i == 0 && *first_bad != 0) error.report(counts[n + *first_bad]);
    admitted[i] =
        *first_bad == 0 && admits(admission_draw(key, step, ids[i]), probability, static_cast<uint64_t>(counts[i]));
  }
};

}  // namespace torchrec_dyn
