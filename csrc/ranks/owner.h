// The owner of an id among the ranks that share the rows of a table: each owns one range of the mixed ids.
//
// With S ranks and B = (2^64 - 1) / S, rounded down, the owner is mixed / B, but for the last mixed ids, from B * S on
// (at most S ids), mixed % S. torchrec_dyn/ranks/routing.py has the reasons.
#pragma once

#include <cstdint>

#include "simd.h"

namespace torchrec_dyn {

// 1 <= ranks <= 2^20. No division: it takes as long as all the rest.
//
// B * S is at most S less than 2^64, so mixed * S / 2^64 is less than S / B < 1 below mixed / B. Rounded down, it is
// the quotient or one less. The last mixed ids have the quotient S; of these B * S + d has the owner d < S.
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE uint64_t owner_of(uint64_t mixed, uint64_t ranks, uint64_t ids_per_rank) {
  const uint64_t low = ((mixed & 0xFFFFFFFFu) * ranks) >> 32;
  const uint64_t guess = ((mixed >> 32) * ranks + low) >> 32;
  const uint64_t rest = mixed - guess * ids_per_rank;
  const uint64_t owner = guess + (rest >= ids_per_rank);
  return owner == ranks ? rest - ids_per_rank : owner;
}

}  // namespace torchrec_dyn
