// Gather and pool on the CPU, for several ops.
#pragma once

#include <cstdint>

#include "checks.h"
#include "lookup/bags_arguments.h"
#include "lookup/prepared_tables.h"

namespace torchrec_dyn {

// Pools bags that are checked into `out`. Checks the rows, of which -1 is zeros; bag_weights may be null.
void pool(const char* op, const PreparedTables& tables, const BagLists& lists, const int64_t* rows,
          const float* bag_weights, bool mean, const Tensor& out);

}  // namespace torchrec_dyn
