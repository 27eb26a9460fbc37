// The kernel of pool_into_ for the bags of new ids (simt.h): a batch was pooled before its new ids had rows.
#pragma once

#include <cstdint>

#include "lookup/pooling_kernels.h"

namespace torchrec_dyn {

// The threads of PoolBags; one pools its unit if an id of its bag is new. The threads of a bag read the same words,
// in step: few ids are new in most steps, and then this is the cost of the launch.
template <typename T, typename Out>
struct PoolNewBags {
  PoolBags<T, Out, false> all;
  const int64_t* new_index;  // -1 for an id that is not new

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const DeviceBags<T>& bags = all.bags;
    const DeviceSegment<T>& segment = bags.segment_of_thread(i);
    const Division::Parts parts = segment.split(i);
    const typename DeviceBags<T>::Range ids = bags.range(segment.first_bag + parts.quotient);
    int64_t id = ids.begin;
    while (id < ids.end && new_index[id] < 0) ++id;
    if (id < ids.end) all.pool_unit(segment, parts);
  }
};

}  // namespace torchrec_dyn
