// The distinct absent ids of a lookup on a device: collect_new_cpu.cpp for CUDA.
#include <algorithm>
#include <tuple>
#include <vector>

#include "device_call.h"
#include "kernel.h"
#include "process_hash.h"
#include "storage/collect_new_kernels.h"

namespace torchrec_dyn {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> collect_new(const Tensor& ids, const Tensor& rows,
                                                       const Tensor& table_offsets) {
  constexpr auto kWord = static_cast<int64_t>(sizeof(int64_t));
  const int64_t tables = table_offsets.numel() - 1;
  TORCHREC_DYN_CHECK(tables >= 0, "collect_new: expected table_offsets [T + 1], got none.");
  check_tensor("collect_new", "ids", ids, ScalarType::Long, kDevice);
  check_tensor("collect_new", "rows", rows, ScalarType::Long, ids.device());
  check_size("collect_new", "the number of rows", ids.numel(), rows.numel());
  check_table_offsets("collect_new", table_offsets, tables, ids.numel());
  const int64_t count = ids.numel();
  const int64_t* offsets = const_data<int64_t>(table_offsets);
  DeviceCall call(ids);
  Tensor new_index = new_device_tensor({count});
  Tensor new_offsets = new_int64(tables + 1);  // as table_offsets, for `insert`
  auto* new_offset = mutable_data<int64_t>(new_offsets);
  if (count == 0) {
    std::fill(new_offset, new_offset + tables + 1, int64_t{0});
    return {new_device_tensor({0}), new_device_tensor({0}), new_offsets, new_index};
  }
  auto* words = call.zeros<int64_t>(3 * count);
  const NewIds found{process_hash(),
                     const_data<int64_t>(ids),
                     const_data<int64_t>(rows),
                     call.copy_of(std::vector<int64_t>(offsets, offsets + tables + 1)),
                     tables,
                     count,
                     words,
                     mutable_data<int64_t>(new_index),
                     words + 2 * count,
                     call.allocate_for<int64_t>(count + 1)};
  auto* ends = call.allocate_for<int64_t>(tables + 1);
  simt::launch(call.stream(), count, ClaimWords{found});
  simt::launch(call.stream(), count + 1, CountFirsts{found});
  simt::exclusive_sum(call.stream(), found.places, count + 1);
  simt::launch(call.stream(), tables + 1, ReadOffsets{found, ends});
  simt::copy_to_host(call.stream(), new_offset, ends, (tables + 1) * kWord);  // the one wait of the call
  Tensor new_ids = new_device_tensor({new_offset[tables]});
  Tensor new_counts = new_device_tensor({new_offset[tables]});
  simt::launch(call.stream(), count, ListNew{found, mutable_data<int64_t>(new_ids), mutable_data<int64_t>(new_counts)});
  return {new_ids, new_counts, new_offsets, new_index};
}

}  // namespace

TORCHREC_DYN_DEVICE_KERNELS(m) { m.impl(TORCHREC_DYN_KERNEL("collect_new", &collect_new)); }

}  // namespace torchrec_dyn
