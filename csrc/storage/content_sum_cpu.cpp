// The content sum on the CPU, as fast as memory is read.
#include "storage/content_sum.h"

#include <atomic>

#include "checks.h"
#include "kernel.h"
#include "parallel.h"
#include "storage/content_sum_arguments.h"

namespace torchrec_dyn {
namespace {

constexpr int64_t kGrainBytes = 1 << 18;

// `bytes`: of `count` of the rows.
TORCHREC_DYN_SIMD uint64_t sum_rows(const SummedRows& all, const uint64_t* ids, const char* bytes, int64_t count,
                                    uint64_t key) noexcept {
  const int64_t columns = all.columns;
  return all.bytes == 2 ? content_sum_of(ids, BitRows<uint16_t>{bytes, columns}, count, columns, all.first_column, key)
                        : content_sum_of(ids, BitRows<uint32_t>{bytes, columns}, count, columns, all.first_column, key);
}

Tensor content_sum(const Tensor& ids, const Tensor& values, int64_t first_column, int64_t key) {
  const SummedRows summed = check_summed(ids, values, first_column, DeviceType::CPU);
  const uint64_t* id = const_data<uint64_t>(ids);
  const char* begin_of_values = const_data<char>(values);
  const int64_t row_bytes = summed.bytes * summed.columns;
  std::atomic<uint64_t> total{0};
  for_each_range(summed.rows, kGrainBytes / (row_bytes + 8) + 1, [&](int64_t begin, int64_t end) {
    total += sum_rows(summed, id + begin, begin_of_values + begin * row_bytes, end - begin, static_cast<uint64_t>(key));
  });
  Tensor out = new_tensor({}, ScalarType::Long);
  *mutable_data<uint64_t>(out) = total;
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torchrec_dyn, CPU, m) { m.impl(TORCHREC_DYN_KERNEL("content_sum", &content_sum)); }

}  // namespace torchrec_dyn
