// grow_block on a device: growing_block_cpu.cpp for CUDA.
#include <algorithm>

#include "device_call.h"
#include "kernel.h"
#include "storage/growing_block_arguments.h"
#if defined(TORCHREC_DYN_SIMT) && !defined(TORCHREC_DYN_PTX)
#include "storage/address_range_cpu.h"
#endif

namespace torchrec_dyn {
namespace {

#if defined(TORCHREC_DYN_SIMT) && !defined(TORCHREC_DYN_PTX)
constexpr ReserveAddresses kReserve = &reserve_cpu_addresses;
#else
constexpr ReserveAddresses kReserve = [](int64_t bytes, int32_t device, bool on_host) {
  // Tensors of the ptx build are on the CPU, number -1, and its GPU is number 0.
  const auto reserve = on_host ? &reserve_host_memory : &reserve_cuda_addresses;
  return reserve(bytes, std::max(device, 0), &find_current_stream);
};
#endif

Tensor grow_block(const Tensor& block, int64_t rows, int64_t limit, bool on_host) {
  const ChosenDevice chosen(block);  // raise_lost_device asks the current one
  return grow_block_in_range(block, rows, limit, on_host, block.device(), kReserve, &simt::raise_lost_device);
}

}  // namespace

TORCHREC_DYN_DEVICE_KERNELS(m) { m.impl(TORCHREC_DYN_KERNEL("grow_block", &grow_block)); }

}  // namespace torchrec_dyn
