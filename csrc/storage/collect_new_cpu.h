// The search for the distinct absent ids of a batch on the CPU.
#pragma once

#include <cstdint>
#include <vector>

#include "checks.h"

namespace torchrec_dyn {

// The distinct absent ids of a batch, as the op collect_new returns them.
struct CollectedIds {
  Tensor ids, counts, index;
  std::vector<int64_t> offsets;  // [tables + 1]
};

// ids and rows [N] of a batch; table_offsets [tables + 1]: where the ids of each table begin; frozen: null, or
// [tables], 1 for a table whose ids are not listed.
CollectedIds collect_new(const int64_t* ids, const int64_t* rows, const int64_t* table_offsets, int64_t tables,
                         const int64_t* frozen);

}  // namespace torchrec_dyn
