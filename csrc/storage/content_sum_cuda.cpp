// The content sum on a device: content_sum_cpu.cpp for CUDA.
#include <algorithm>
#include <cstdint>

#include "device_call.h"
#include "kernel.h"
#include "storage/content_sum_arguments.h"
#include "storage/content_sum_kernels.h"

namespace torchrec_dyn {
namespace {

// Calls body(Unit{}, Bits{}) with the largest unit in which the rows can be read.
template <typename Body>
void dispatch_summed(const SummedRows& summed, const void* memory, const Body& body) {
  const auto bits = reinterpret_cast<uintptr_t>(memory) | static_cast<uintptr_t>(summed.bytes * summed.columns);
  if (summed.bytes == 4) return bits % 16 == 0 ? body(Unit16{}, uint32_t{}) : body(uint32_t{}, uint32_t{});
  if (bits % 16 == 0) return body(Unit16{}, uint16_t{});
  return bits % 4 == 0 ? body(uint32_t{}, uint16_t{}) : body(uint16_t{}, uint16_t{});
}

Tensor content_sum(const Tensor& ids, const Tensor& values, int64_t first_column, int64_t key) {
  const SummedRows summed = check_summed(ids, values, first_column, kDevice);
  DeviceCall call(ids);
  Tensor out = new_device_tensor({});
  auto* total = mutable_data<int64_t>(out);
  simt::fill_zero(call.stream(), total, sizeof *total);
  if (values.numel() == 0) return out;
  auto* partial = call.zeros<int64_t>(kPartialSums);
  const void* memory = values.const_data_ptr();
  dispatch_summed(summed, memory, [&](auto unit, auto bits) {
    using Unit = decltype(unit);
    using Bits = decltype(bits);
    const Division units(summed.columns * summed.bytes / static_cast<int64_t>(sizeof(Unit)));
    const int64_t groups = std::clamp<int64_t>(kMostSumTurns / units.divisor, 1, summed.rows);
    simt::launch(call.stream(), groups * units.divisor,
                 SumUnits<Unit, Bits>{const_data<uint64_t>(ids), static_cast<const Unit*>(memory), summed.rows, groups,
                                      units, summed.first_column, static_cast<uint64_t>(key), partial});
  });
  simt::launch(call.stream(), kPartialSums, AddPartialSums{partial, total});
  return out;
}

}  // namespace

TORCHREC_DYN_DEVICE_KERNELS(m) { m.impl(TORCHREC_DYN_KERNEL("content_sum", &content_sum)); }

}  // namespace torchrec_dyn
