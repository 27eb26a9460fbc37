// Gather and pool on the CPU, for several ops.
#pragma once

#include "checks.h"
#include "lookup/pooling_arguments.h"

namespace torchrec_dyn {

// Checks the rows, and pools all bags into `out`. Row -1 is zeros, or with initial_ids what the table has for the id.
void pool(const PooledBags& bags, const Tensor& out);

}  // namespace torchrec_dyn
