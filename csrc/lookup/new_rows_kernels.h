// The kernel that numbers the rows of new ids (simt.h).
#pragma once

#include <cstdint>

#include "both_devices.h"
#include "storage/table_of.h"

namespace torchrec_dyn {

struct NumberNewRows {
  const int64_t* offsets;         // [T + 1] of the new ids
  const int64_t* first_rows;      // [T]
  const int64_t* reused_offsets;  // [T + 1]
  const int64_t* reused;
  int64_t tables;
  int64_t* rows;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const int64_t table = table_of(i, tables, [this](int64_t t) { return offsets[t]; });
    const int64_t place = i - offsets[table], again = reused_offsets[table + 1] - reused_offsets[table];
    rows[i] = place < again ? reused[reused_offsets[table] + place] : first_rows[table] + place - again;
  }
};

}  // namespace torchrec_dyn
