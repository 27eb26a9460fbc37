// Gather and pool on a device, for several ops.
#pragma once

#include <cstdint>

#include "checks.h"
#include "device_call.h"
#include "lookup/bags_arguments.h"
#include "lookup/prepared_tables.h"

namespace torchrec_dyn {

// The checked arguments of a call, on the host.
struct BagArguments {
  const char* op;
  const PreparedTables& tables;
  const Tensor& rows;
  BagLists lists;
  bool mean;
  bool is_checked = false;               // the caller checks the offsets
  const int64_t* initial_ids = nullptr;  // whose initial rows are shown, or null
};

// Pools all bags into `out`, or with `new_index` or initial ids those of new ids and of initial rows; bag_weights may
// be null.
void pool(DeviceCall& call, const BagArguments& given, const float* bag_weights, const int64_t* new_index,
          const Tensor& out);

}  // namespace torchrec_dyn
