// Division by a number that is known before a kernel is launched, of the number of its thread: GPUs have no instruction
// that divides 64-bit integers, and take about a hundred for it.
#pragma once

#include <cstdint>

#include "both_devices.h"

namespace torchrec_dyn {

struct Division {
  int64_t divisor;
  uint64_t factor;  // 2^64 / divisor, rounded down

  struct Parts {
    int64_t quotient;
    int64_t remainder;
  };

  // Requires divisor > 0.
  explicit Division(int64_t by) : divisor(by), factor(~uint64_t{0} / static_cast<uint64_t>(by)) {}

  // Requires number >= 0. `factor` is less than 2 below the fraction, so for numbers below 2^63 the first quotient is
  // right or 1 too small.
  TORCHREC_DYN_BOTH Parts split(int64_t number) const {
    const auto wide = static_cast<unsigned __int128>(static_cast<uint64_t>(number)) * factor;
    const auto quotient = static_cast<int64_t>(static_cast<uint64_t>(wide >> 64));
    const int64_t remainder = number - quotient * divisor;
    return remainder < divisor ? Parts{quotient, remainder} : Parts{quotient + 1, remainder - divisor};
  }
};

}  // namespace torchrec_dyn
