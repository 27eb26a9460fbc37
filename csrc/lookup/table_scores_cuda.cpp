// The scores of rows of prepared tables on a device: table_scores_cpu.cpp for CUDA.
#include <tuple>

#include "device_call.h"
#include "lookup/sent_scores_arguments.h"
#include "lookup/table_scores_arguments.h"
#include "lookup/table_scores_kernels.h"

namespace torchrec_dyn {
namespace {

void touch_scores_(const TouchCall& given) {
  given.check();
  const int64_t n = given.rows.numel();
  if (n == 0) return;
  DeviceCall call(given.rows);
  const ScoreTables tables =
      send_scores(call, *given.tables, const_data<int64_t>(given.table_offsets), const_data<int64_t>(given.steps));
  const TouchedRows batch{const_data<int64_t>(given.rows), const_data<int64_t>(given.times), n, tables,
                          call.zeros<int64_t>(1),          call.errors(raise_touch_error)};
  simt::launch(call.stream(), n, CheckTouchedRows{batch});
  simt::launch(call.stream(), n, TouchScores{batch});
  call.finish();
}

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

TORCHREC_DYN_DEVICE_KERNELS(m) {
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("touch_scores_", &touch_scores_));
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("read_scores", &read_scores));
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("write_scores_", &write_scores_));
}

}  // namespace torchrec_dyn
