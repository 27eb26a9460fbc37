// The scores of rows of prepared tables on a device: table_scores_cpu.cpp for CUDA.
#include <tuple>

#include "device_call.h"
#include "lookup/sent_scores_arguments.h"
#include "lookup/table_scores_kernels.h"

namespace torchrec_dyn {
namespace {

std::tuple<Tensor, Tensor> read_scores(const ReadScoresCall& given) {
  check_table_rows(given.kOp, *given.tables, given.rows, given.table_offsets);
  const int64_t n = given.rows.numel();
  DeviceCall call(given.rows);
  Tensor last_seen = new_device_tensor({n}), counts = new_device_tensor({n});
  if (n == 0) return {last_seen, counts};
  simt::launch(call.stream(), n,
               ReadTableScores{const_data<int64_t>(given.rows),
                               send_scores(call, *given.tables, const_data<int64_t>(given.table_offsets), nullptr),
                               mutable_data<int64_t>(last_seen), mutable_data<int64_t>(counts),
                               call.errors(raise_read_row_error)});
  call.finish();
  return {last_seen, counts};
}

void write_scores_(const WriteScoresCall& given) {
  given.check();
  const int64_t n = given.rows.numel();
  if (n == 0) return;
  DeviceCall call(given.rows);
  const ScoreTables tables = send_scores(call, *given.tables, const_data<int64_t>(given.table_offsets), nullptr);
  const WrittenRows written{
      const_data<int64_t>(given.rows), const_data<int64_t>(given.last_seen), const_data<int64_t>(given.counts), tables,
      call.zeros<int64_t>(1),          call.errors(raise_written_row_error)};
  simt::launch(call.stream(), n, CheckWrittenRows{written});
  simt::launch(call.stream(), n, WriteTableScores{written});
  call.finish();
}

}  // namespace

Write prepare(DeviceCall& call, const TouchedBatch& given, const PreparedTables& tables) {
  const TouchedRows batch{
      const_data<int64_t>(given.rows),
      const_data<int64_t>(given.times),
      given.rows.numel(),
      send_scores(call, tables, const_data<int64_t>(given.table_offsets), const_data<int64_t>(given.steps)),
      call.zeros<int64_t>(1),
      call.errors(raise_touch_error)};
  return [&call, batch] {
    simt::launch(call.stream(), batch.count, CheckTouchedRows{batch});
    simt::launch(call.stream(), batch.count, TouchScores{batch});
  };
}

LastWrite hide_scores(DeviceCall& call, const KeptRows& kept, const PreparedTables& tables) {
  const int64_t n = kept.rows ? kept.rows->numel() : 0;
  if (n == 0) return nullptr;
  const std::vector<int64_t> never(tables.count(), static_cast<int64_t>(kFreeLastSeen));
  const ScoreTables scores = send_scores(call, tables, const_data<int64_t>(*kept.offsets), never.data());
  auto *seen = call.allocate_for<int64_t>(n), *counts = call.allocate_for<int64_t>(n);
  const TouchedRows batch{const_data<int64_t>(*kept.rows), nullptr, n, scores, call.zeros<int64_t>(1),
                          call.errors(raise_touch_error)};
  const WrittenRows before{batch.rows, seen, counts, scores, batch.bad, call.errors(raise_written_row_error)};
  simt::launch(call.stream(), n, ReadTableScores{batch.rows, scores, seen, counts, call.errors(raise_touch_error)});
  LastWrite restored = last_write([&call, n, before] { simt::launch(call.stream(), n, WriteTableScores{before}); });
  simt::launch(call.stream(), n, CheckTouchedRows{batch});
  simt::launch(call.stream(), n, TouchScores{batch});
  return restored;
}

TORCHREC_DYN_DEVICE_KERNELS(m) {
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("touch_scores_", &write_part_on_device<TouchedBatch>));
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("read_scores", &read_scores));
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("write_scores_", &write_scores_));
}

}  // namespace torchrec_dyn
