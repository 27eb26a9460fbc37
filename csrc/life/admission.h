// Admission by chance. The draw of an id at a step is a pure function of (key, id, step), so that every column shard
// and every run decides the same. The chance is computed by multiplications only, so that every machine decides the
// same.
#pragma once

#include <cstdint>

#include "both_devices.h"
#include "storage/rounding.h"

namespace torchrec_dyn {

constexpr uint64_t kMostOccurrences = uint64_t{1} << 32;
TORCHREC_DYN_BOTH constexpr bool is_occurrences(int64_t count) {
  return static_cast<uint64_t>(count) <= kMostOccurrences;
}

// A number in [0, 1), a multiple of 2^-53. It is made of the word before the words that stochastic rounding draws for
// the same key, step and id, so the two share no bits even if their keys are equal.
TORCHREC_DYN_BOTH inline double admission_draw(uint64_t key, int64_t step, int64_t id) {
  return static_cast<double>(draw_word(draw_state(key, step, id), -1) >> 11) * 0x1p-53;
}

// refusal^count by squaring: pow may differ in its last bit from one machine to the next.
TORCHREC_DYN_BOTH inline double chance_of_refusal(double refusal, uint64_t count) {
  double chance = 1.0;
  for (; count > 0; count >>= 1, refusal *= refusal)
    if (count & 1) chance *= refusal;
  return chance;
}

// True if at least one of `count` independent chances of `probability` each succeeds.
TORCHREC_DYN_BOTH inline bool admits(double draw, double probability, uint64_t count) {
  return draw < 1.0 - chance_of_refusal(1.0 - probability, count);
}

}  // namespace torchrec_dyn
