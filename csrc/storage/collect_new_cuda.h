// The search for the distinct absent ids of a batch on a device, in two parts: the host reads their number in between.
#pragma once

#include <cstdint>

#include "device_call.h"
#include "process_hash.h"
#include "storage/collect_new_kernels.h"

namespace torchrec_dyn {

// The distinct absent ids of a batch [M], their occurrences [M], and the place of each id of the batch among them.
struct CollectedIds {
  Tensor ids, counts, index;
};

class NewIdsSearch {
 public:
  // Begins the search: writes where the new ids of each table begin to `ends` [tables + 1], on the device.
  NewIdsSearch(DeviceCall& call, const FoundIds& batch, int64_t* ends) : index_(new_device_tensor({batch.count})) {
    const int64_t count = batch.count;
    auto* words = call.zeros<int64_t>(3 * count);
    found_ = {batch,
              process_hash(),
              words,
              mutable_data<int64_t>(index_),
              words + 2 * count,
              call.allocate_for<int64_t>(count + 1)};
    simt::launch(call.stream(), count, ClaimWords{found_});
    simt::launch(call.stream(), count + 1, CountFirsts{found_});
    simt::exclusive_sum(call.stream(), found_.places, count + 1);
    simt::launch(call.stream(), batch.tables + 1, ReadOffsets{found_, ends});
  }

  // Ends the search; `new_ids` is the last number of `ends`.
  CollectedIds list(const DeviceCall& call, int64_t new_ids) const {
    Tensor ids = new_device_tensor({new_ids}), counts = new_device_tensor({new_ids});
    simt::launch(call.stream(), found_.count,
                 ListNew{found_, mutable_data<int64_t>(ids), mutable_data<int64_t>(counts)});
    return {ids, counts, index_};
  }

 private:
  Tensor index_;
  NewIds found_{};
};

}  // namespace torchrec_dyn
