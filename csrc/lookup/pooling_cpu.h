// Gather and pool on the CPU, for several ops.
#pragma once

#include <cstdint>

#include "checks.h"
#include "lookup/bags_arguments.h"
#include "lookup/prepared_tables.h"

namespace torchrec_dyn {

// Pools bags that are checked into `out`. Checks the rows, of which -1 is zeros, or with initial_ids what the table has
// for it; bag_weights and initial_ids may be null.
void pool(const char* op, const PreparedTables& tables, const BagLists& lists, const int64_t* rows,
          const float* bag_weights, const int64_t* initial_ids, bool mean, const Tensor& out);

}  // namespace torchrec_dyn
