// The rows of the new ids of a batch, written where these ids are.
#pragma once

#include <cstdint>

#include "both_devices.h"

namespace torchrec_dyn {

struct FillNew {
  const int64_t* new_index;  // of each id of the batch: -1, or its place among the distinct absent ids
  const int64_t* places;     // [count], ascending: which of those get rows; null: the first `count`
  const int64_t* new_rows;   // [count]
  int64_t count;
  int64_t* rows;  // of the batch; ids that get no row keep theirs

  // The position of the new id whose place is `place`. Another position, or `count`, if it gets no row.
  TORCHREC_DYN_BOTH int64_t position_of(int64_t place) const {
    if (places == nullptr) return place;
    int64_t position = 0;
    for (int64_t size = count; size > 0;) {
      const int64_t half = size / 2;
      const bool is_after = places[position + half] < place;
      position += is_after ? half + 1 : 0;
      size = is_after ? size - half - 1 : half;
    }
    return position;
  }

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const int64_t place = new_index[i];
    if (place < 0) return;
    const int64_t position = position_of(place);
    if (position < count && (places == nullptr || places[position] == place)) rows[i] = new_rows[position];
  }
};

}  // namespace torchrec_dyn
