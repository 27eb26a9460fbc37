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

TORCHREC_DYN_SIMD uint64_t sum_words(const uint64_t* ids, const char* bytes, int64_t count, int64_t columns,
                                     uint64_t first_column, uint64_t key) noexcept {
  return content_sum_of(ids, BitRows<uint32_t>{bytes, columns}, count, columns, first_column, key);
}

TORCHREC_DYN_SIMD uint64_t sum_halves(const uint64_t* ids, const char* bytes, int64_t count, int64_t columns,
                                      uint64_t first_column, uint64_t key) noexcept {
  return content_sum_of(ids, BitRows<uint16_t>{bytes, columns}, count, columns, first_column, key);
}

Tensor content_sum(const Tensor& ids, const Tensor& values, int64_t first_column, int64_t key) {
  const SummedRows summed = check_summed(ids, values, first_column, DeviceType::CPU);
  const uint64_t* id = const_data<uint64_t>(ids);
  const char* begin_of_values = const_data<char>(values);
  const int64_t row_bytes = summed.bytes * summed.columns;
  std::atomic<uint64_t> total{0};
  for_each_range(summed.rows, kGrainBytes / (row_bytes + 8) + 1, [&](int64_t begin, int64_t end) {
    const auto sum = summed.bytes == 2 ? sum_halves : sum_words;
    total += sum(id + begin, begin_of_values + begin * row_bytes, end - begin, summed.columns, summed.first_column,
                 static_cast<uint64_t>(key));
  });
  Tensor out = new_tensor({}, ScalarType::Long);
  *mutable_data<uint64_t>(out) = total;
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torchrec_dyn, CPU, m) { m.impl(TORCHREC_DYN_KERNEL("content_sum", &content_sum)); }

}  // namespace torchrec_dyn
