// The body of admission by chance (simt.h).
#pragma once

#include <cstdint>

#include "life/admission.h"
#include "simt.h"

namespace torchrec_dyn {

struct AdmitByChance {
  const int64_t* ids;
  const int64_t* counts;
  int64_t n;
  uint64_t key;
  int64_t step;
  double probability;
  bool* admitted;
  int64_t* first_bad;  // 0, or the position of the first count that is none - n

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    if (!is_occurrences(counts[i])) simt::lower(first_bad, i - n);
    admitted[i] = admits(admission_draw(key, step, ids[i]), probability, static_cast<uint64_t>(counts[i]));
  }
};

}  // namespace torchrec_dyn
