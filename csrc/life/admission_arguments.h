// Checks of the arguments of admission by chance, for every device.
#pragma once

#include <cstdint>

#include "checks.h"
#include "life/admission.h"

namespace torchrec_dyn {

inline void check_admission(const Tensor& ids, const Tensor& counts, double probability, const Device& device) {
  const char* op = "admit_by_chance";
  check_tensor(op, "ids", ids, ScalarType::Long, device);
  check_tensor(op, "counts", counts, ScalarType::Long, ids.device());
  check_size(op, "the number of counts", ids.numel(), counts.numel());
  STD_TORCH_CHECK(probability >= 0.0 && probability <= 1.0, op, ": expected probability in [0, 1], got ", probability,
                  ".");
}

inline void check_occurrences(int64_t count) {
  STD_TORCH_CHECK(is_occurrences(count), "admit_by_chance: expected counts in [0, 2^32], got ", count, ".");
}

inline void raise_occurrences_error(const int64_t* words) { check_occurrences(words[0]); }

}  // namespace torchrec_dyn
