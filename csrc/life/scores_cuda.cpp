// The scores of rows on a device: scores_cpu.cpp for CUDA.
//
// What a kernel finds wrong is a word that later kernels of the call look at before they write, and report.
#include <tuple>
#include <vector>

#include "device_call.h"
#include "kernel.h"
#include "life/scores_arguments.h"
#include "life/scores_kernels.h"
#include "storage/table_words_arguments.h"

namespace torchrec_dyn {
namespace {

void write_scores_(const Tensor& rows, const Tensor& last_seen, const Tensor& counts, std::vector<Tensor> scores,
                   int64_t shift) {
  const char* op = "write_scores_";
  check_tensor(op, "rows", rows, ScalarType::Long, kDevice);
  check_tensor(op, "last_seen", last_seen, ScalarType::Long, rows.device());
  check_tensor(op, "counts", counts, ScalarType::Long, rows.device());
  const int64_t n = rows.numel();
  check_size(op, "the number of last_seen", n, last_seen.numel());
  check_size(op, "the number of counts", n, counts.numel());
  TORCHREC_DYN_CHECK(n < (int64_t{1} << 32), op, ": expected fewer than 2^32 rows, got ", n, ".");
  BlockList<uint64_t> blocks(op, "scores", scores, rows.device());
  const ScoreBlocks words = blocks.words(layout_of_one(op, scores, shift, 1));
  SeparateMemory().writes(scores).reads(rows).reads(last_seen).reads(counts).check(op);
  if (n == 0) return;
  DeviceCall call(rows);
  const WrittenScores written{
      const_data<int64_t>(rows),       const_data<int64_t>(last_seen), const_data<int64_t>(counts),     n,
      send_words(call, blocks, words), call.zeros<int64_t>(1),         call.errors(raise_written_error)};
  simt::launch(call.stream(), n, CheckWrittenScores{written});
  simt::launch(call.stream(), n, FreeScores{written});
  simt::launch(call.stream(), n, ClaimScores{written});
  simt::launch(call.stream(), n, WriteScores{written});
  call.finish();
}

std::tuple<Tensor, Tensor> read_scores(const Tensor& rows, std::vector<Tensor> scores, int64_t shift) {
  const char* op = "read_scores";
  check_tensor(op, "rows", rows, ScalarType::Long, kDevice);
  BlockList<uint64_t> blocks(op, "scores", scores, rows.device());
  const ScoreBlocks words = blocks.words(layout_of_one(op, scores, shift, 1));
  const int64_t n = rows.numel();
  DeviceCall call(rows);
  Tensor last_seen = new_device_tensor({n}), counts = new_device_tensor({n});
  if (n == 0) return {last_seen, counts};
  simt::launch(call.stream(), n,
               ReadScores{const_data<int64_t>(rows), send_words(call, blocks, words), mutable_data<int64_t>(last_seen),
                          mutable_data<int64_t>(counts), call.errors(raise_read_error)});
  call.finish();
  return {last_seen, counts};
}

}  // namespace

TORCHREC_DYN_DEVICE_KERNELS(m) {
  m.impl(TORCHREC_DYN_KERNEL("write_scores_", &write_scores_));
  m.impl(TORCHREC_DYN_KERNEL("read_scores", &read_scores));
}

}  // namespace torchrec_dyn
