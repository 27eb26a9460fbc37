// The scores of prepared tables on a device.
#pragma once

#include <cstdint>
#include <vector>

#include "device_call.h"
#include "life/scores_kernels.h"
#include "lookup/prepared_tables.h"
#include "lookup/table_scores_arguments.h"

namespace torchrec_dyn {

// offsets [T]: where the rows of each table begin; now [T], or null: the step of each table. Both on the host.
inline ScoreTables send_scores(DeviceCall& call, const PreparedTables& tables, const int64_t* offsets,
                               const int64_t* now) {
  uint64_t* const* pointers = call.copy_of(tables.score_blocks);
  std::vector<TableWords<uint64_t>> words;
  for (size_t t = 0; t < tables.count(); ++t) {
    ScoreBlocks own = tables.scores[t];
    own.blocks = pointers + (own.blocks - tables.score_blocks.data());
    words.push_back({offsets[t], own, now == nullptr ? 0 : now[t]});
  }
  return {call.copy_of(words), static_cast<int64_t>(words.size())};
}

// As those of table_scores_arguments.h, on a device: table_scores_cuda.cpp.
Write prepare(DeviceCall& call, const TouchedBatch& batch, const PreparedTables& tables);
LastWrite hide_scores(DeviceCall& call, const KeptRows& kept, const PreparedTables& tables);

template <typename Part>
void write_part_on_device(const CallOf<Part>& given) {
  given.check();
  if (given.part.like().numel() == 0) return;
  DeviceCall call(given.part.like());
  prepare(call, given.part, *given.tables)();
  call.finish();
}

}  // namespace torchrec_dyn
