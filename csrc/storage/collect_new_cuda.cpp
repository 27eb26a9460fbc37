// The distinct absent ids of a lookup on a device: collect_new_cpu.cpp for CUDA.
#include "storage/collect_new_cuda.h"

#include <algorithm>
#include <tuple>
#include <vector>

#include "kernel.h"

namespace torchrec_dyn {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> collect_new(const Tensor& ids, const Tensor& rows,
                                                       const Tensor& table_offsets) {
  const int64_t tables = table_offsets.numel() - 1;
  TORCHREC_DYN_CHECK(tables >= 0, "collect_new: expected table_offsets [T + 1], got none.");
  check_tensor("collect_new", "ids", ids, ScalarType::Long, kDevice);
  check_numbers("collect_new", "rows", rows, ScalarType::Long, ids.numel(), ids.device());
  check_table_offsets("collect_new", table_offsets, tables, ids.numel());
  const int64_t count = ids.numel();
  const int64_t* offsets = const_data<int64_t>(table_offsets);
  Tensor new_offsets = new_int64(tables + 1);  // as table_offsets, for `insert`
  auto* new_offset = mutable_data<int64_t>(new_offsets);
  std::fill(new_offset, new_offset + tables + 1, int64_t{0});
  DeviceCall call(ids);
  if (count == 0) return {new_device_tensor({0}), new_device_tensor({0}), new_offsets, new_device_tensor({0})};
  auto* ends = call.allocate_for<int64_t>(tables + 1);
  const int64_t* const device_offsets = call.copy_of(std::vector<int64_t>(offsets, offsets + tables + 1));
  const NewIdsSearch search(
      call, {const_data<int64_t>(ids), const_data<int64_t>(rows), device_offsets, nullptr, nullptr, tables, count},
      ends);
  constexpr auto kWord = static_cast<int64_t>(sizeof(int64_t));
  simt::copy_to_host(call.stream(), new_offset, ends, (tables + 1) * kWord);  // the one wait of the call
  const CollectedIds found = search.list(call, new_offset[tables]);
  return {found.ids, found.counts, new_offsets, found.index};
}

}  // namespace

TORCHREC_DYN_DEVICE_KERNELS(m) { m.impl(TORCHREC_DYN_KERNEL("collect_new", &collect_new)); }

}  // namespace torchrec_dyn
