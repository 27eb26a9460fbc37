// The kernels that read the lengths or the offsets of bags, and the error of offsets (simt.h, device_errors.h).
#pragma once

#include <cstdint>

#include "device_errors.h"
#include "simt.h"

namespace torchrec_dyn {

// Numbers of int32 or int64, as the caller has them.
struct Integers {
  const void* memory;  // null: none are given
  bool are_short;

  TORCHREC_DYN_BOTH int64_t operator[](int64_t i) const {
    return are_short ? static_cast<const int32_t*>(memory)[i] : static_cast<const int64_t*>(memory)[i];
  }
};

// One thread for each bag, and one more: writes the numbers of which the offsets are the sums. A wrong length counts
// as 0, so the offsets ascend.
struct ReadLengths {
  Integers lengths;
  int64_t bags;
  int64_t ids;
  int64_t* offsets;  // [bags + 1]
  int64_t* is_wrong;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const int64_t length = i < bags ? lengths[i] : 0;
    const bool is_right = length >= 0 && length <= ids;
    offsets[i] = is_right ? length : 0;
    if (!is_right) simt::atomic_max(is_wrong, 1);
  }
};

// One thread for each offset: copies them, and looks whether they ascend, by the lengths if these are given, too.
struct CopyOffsets {
  Integers given;
  Integers lengths;
  int64_t* offsets;
  int64_t* is_wrong;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const int64_t offset = given[i];
    offsets[i] = offset;
    if (i == 0) return;
    const int64_t before = given[i - 1];
    const auto length = static_cast<uint64_t>(offset) - static_cast<uint64_t>(before);
    const bool is_right =
        before <= offset && (lengths.memory == nullptr || static_cast<uint64_t>(lengths[i - 1]) == length);
    if (!is_right) simt::atomic_max(is_wrong, 1);
  }
};

// One thread for each feature and each table, and one more: writes where their ids begin. Thread 0 looks whether the
// offsets go from 0 to the number of ids.
struct ReadBegins {
  const int64_t* offsets;
  const int64_t* first_bags;      // [features + 1]
  const int64_t* first_features;  // [tables + 1]
  int64_t features;
  int64_t tables;
  int64_t bags;
  int64_t ids;
  int64_t* begins;         // [features + 1]
  int64_t* table_offsets;  // [tables + 1]
  int64_t* is_wrong;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    if (i <= features) begins[i] = offsets[first_bags[i]];
    if (i <= tables) table_offsets[i] = offsets[first_bags[first_features[i]]];
    if (i == 0 && (offsets[0] != 0 || offsets[bags] != ids)) simt::atomic_max(is_wrong, 1);
  }
};

// For each of the bags + 1 offsets, of one thread each: 0 if offset `i` is right, as far as it and the one before show.
// Else how many bags there are from the wrong pair on; one more than all bags if the range of the offsets is wrong. The
// largest number of all threads names what check_offsets finds.
TORCHREC_DYN_BOTH inline int64_t wrong_offsets_left(const int64_t* offsets, int64_t bags, int64_t ids, int64_t i) {
  const int64_t offset = offsets[i];
  if ((i == 0 && offset < 0) || (i == bags && offset > ids)) return bags + 1;
  return i > 0 && offset < offsets[i - 1] ? bags - (i - 1) : 0;
}

// Reports `words`, then two offsets and the end of their range. `left`: the largest number of wrong_offsets_left.
template <typename... Words>
TORCHREC_DYN_BOTH inline void report_wrong_offsets(const ErrorReport& error, const int64_t* offsets, int64_t bags,
                                                   int64_t left, int64_t ids, Words... words) {
  if (left > bags) return error.report(words..., offsets[0], offsets[bags], ids);
  error.report(words..., offsets[bags - left], offsets[bags - left + 1], INT64_MAX);
}

}  // namespace torchrec_dyn
