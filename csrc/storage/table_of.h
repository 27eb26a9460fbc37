// The table of an id of a batch in table order.
#pragma once

#include <cstdint>

#include "both_devices.h"

namespace torchrec_dyn {

// The table of id `i`, out of `tables`: the last table whose ids begin at `i` or before. begin(t) is where the ids of
// table t begin, begin(0) = 0; so a table without ids is never the result.
template <typename Table, typename Begin>
TORCHREC_DYN_BOTH inline Table table_of(int64_t i, Table tables, const Begin& begin) {
  Table table = 0, end = tables;
  while (end - table > 1) {
    const Table middle = table + (end - table) / 2;
    if (begin(middle) <= i)
      table = middle;
    else
      end = middle;
  }
  return table;
}

}  // namespace torchrec_dyn
