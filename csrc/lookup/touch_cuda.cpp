// The scores of the rows of a batch, touched on a device: touch_cpu.cpp for CUDA.
#include <vector>

#include "device_call.h"
#include "life/scores_kernels.h"
#include "lookup/touch_arguments.h"

namespace torchrec_dyn {
namespace {

void touch_scores_(const TouchCall& given) {
  given.check();
  const int64_t n = given.rows.numel();
  if (n == 0) return;
  DeviceCall call(given.rows);
  const PreparedTables& tables = *given.tables;
  uint64_t* const* pointers = call.copy_of(tables.score_blocks);
  std::vector<TableWords<uint64_t>> words;
  for (size_t t = 0; t < tables.count(); ++t) {
    ScoreBlocks own = tables.scores[t];
    own.blocks = pointers + (own.blocks - tables.score_blocks.data());
    words.push_back({const_data<int64_t>(given.table_offsets)[t], own, const_data<int64_t>(given.steps)[t]});
  }
  const int64_t* often = given.times ? const_data<int64_t>(*given.times) : nullptr;
  const TouchedRows batch{const_data<int64_t>(given.rows),
                          often,
                          n,
                          {call.copy_of(words), static_cast<int64_t>(words.size())},
                          call.zeros<int64_t>(1),
                          call.errors(raise_touch_error)};
  simt::launch(call.stream(), n, CheckTouchedRows{batch});
  simt::launch(call.stream(), n, TouchScores{batch});
  call.finish();
}

}  // namespace

TORCHREC_DYN_DEVICE_KERNELS(m) { m.impl(TORCHREC_DYN_STRUCT_KERNEL("touch_scores_", &touch_scores_)); }

}  // namespace torchrec_dyn
