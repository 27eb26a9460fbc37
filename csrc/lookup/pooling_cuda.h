// Gather and pool on a device, for several ops.
#pragma once

#include "checks.h"
#include "device_call.h"
#include "lookup/pooling_arguments.h"

namespace torchrec_dyn {

// Pools all bags into `out`, or with `new_index` or initial ids those of new ids and of initial rows.
void pool(DeviceCall& call, const PooledBags& given, const Tensor& out);

}  // namespace torchrec_dyn
