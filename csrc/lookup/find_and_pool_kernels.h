// The kernels of find_and_pool that read lengths and offsets (simt.h).
#pragma once

#include <cstdint>

#include "both_devices.h"
#include "simt.h"

namespace torchrec_dyn {

// One thread for each bag, and one more: writes the numbers of which the offsets are the sums. A wrong length counts
// as 0, so the offsets ascend.
template <typename Length>
struct ReadBagLengths {
  const Length* lengths;
  int64_t bags;
  int64_t ids;
  int64_t* offsets;
  int64_t* is_wrong;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const int64_t length = i < bags ? lengths[i] : 0;
    const bool is_right = length >= 0 && length <= ids;
    offsets[i] = is_right ? length : 0;
    if (!is_right) simt::atomic_max(is_wrong, 1);
  }
};

// One thread for each offset: copies them, and looks whether they ascend.
template <typename Offset>
struct CopyOffsets {
  const Offset* given;
  int64_t bags;
  int64_t* offsets;
  int64_t* is_wrong;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    offsets[i] = given[i];
    if (i > 0 && given[i - 1] > given[i]) simt::atomic_max(is_wrong, 1);
  }
};

// One thread for each offset: looks whether others that were given are the same.
template <typename Offset>
struct CompareOffsets {
  const Offset* given;
  const int64_t* offsets;
  int64_t* is_wrong;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    if (given[i] != offsets[i]) simt::atomic_max(is_wrong, 1);
  }
};

// One thread for each feature, and one more: writes where its ids begin. Thread 0 looks whether the offsets go from 0
// to the number of ids.
struct ReadBegins {
  const int64_t* offsets;
  const int64_t* first_bags;
  int64_t bags;
  int64_t ids;
  int64_t* begins;
  int64_t* is_wrong;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    begins[i] = offsets[first_bags[i]];
    if (i == 0 && (offsets[0] != 0 || offsets[bags] != ids)) simt::atomic_max(is_wrong, 1);
  }
};

}  // namespace torchrec_dyn
