// The arguments of sort_by_owner.
#pragma once

#include <cstdint>
#include <optional>

#include "checks.h"

namespace torchrec_dyn {

constexpr int64_t kMostRanks = 1 << 20;

// Returns the dtype of the weights, float32 without weights. Does not read the lengths.
inline ScalarType check_sorted_batch(const Tensor& ids, const Tensor& lengths, const std::optional<Tensor>& weights,
                                     int64_t ranks, const Device& device) {
  const char* op = "sort_by_owner";
  check_tensor(op, "ids", ids, ScalarType::Long, device);
  const bool is_int = lengths.scalar_type() == ScalarType::Int;
  check_tensor(op, "lengths", lengths, is_int ? ScalarType::Int : ScalarType::Long, ids.device());
  ScalarType type = ScalarType::Float;
  if (weights) {
    const ScalarType got = weights->scalar_type();
    if (got == ScalarType::Double || got == ScalarType::Half || got == ScalarType::BFloat16) type = got;
    check_numbers(op, "weights", weights, type, ids.numel(), ids.device());
  }
  TORCHREC_DYN_CHECK(ranks >= 1 && ranks <= kMostRanks, op, ": expected ranks in [1, ", kMostRanks, "], got ", ranks,
                     ".");
  return type;
}

inline void check_lengths_fit(bool fits, int64_t ids) {
  TORCHREC_DYN_CHECK(fits, "sort_by_owner: expected lengths of at least 0 that add up to the ", ids,
                     " ids, got others. Lengths and ids are of two batches.");
}

inline void raise_lengths_error(const int64_t* words) { check_lengths_fit(false, words[0]); }

}  // namespace torchrec_dyn
