// The random bits with which an update, computed in float32, is rounded into a row of a shorter type.
//
// The draw of a column is a pure function of (key, id, column, step), with columns numbered over the whole table.
// The draws of a row are SplitMix64's sequence from the row's own start, four draws in a word: column c reads bits
// [16 (c % 4), 16 (c % 4) + 16) of word c / 4 (docs/dev/decisions/0011-rounding-draws-by-splitmix.md).
//
// Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
#pragma once

#include <cstdint>

#include "both_devices.h"
#include "mix64.h"
#include "simd.h"

namespace torchrec_dyn {

constexpr int64_t kDrawsPerWord = 4;

// The start of the words of a row. For one step it is a bijection of the id; for one id, a bijection of the step.
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE uint64_t draw_state(uint64_t key, int64_t step, int64_t id) {
  return mix64(mix64(key + static_cast<uint64_t>(step) * kGolden) ^ mix64(static_cast<uint64_t>(id)));
}

TORCHREC_DYN_BOTH inline uint64_t draw_word(uint64_t state, int64_t word) {
  return mix64(state + static_cast<uint64_t>(word + 1) * kGolden);
}

}  // namespace torchrec_dyn
