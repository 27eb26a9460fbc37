// grow_block on the CPU.
#include "kernel.h"
#include "storage/address_range_cpu.h"
#include "storage/growing_block_arguments.h"

namespace torchrec_dyn {
namespace {

Tensor grow_block(const Tensor& block, int64_t rows, int64_t limit, bool on_host) {
  return grow_block_in_range(block, rows, limit, on_host, DeviceType::CPU, &reserve_cpu_addresses);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torchrec_dyn, CPU, m) { m.impl(TORCHREC_DYN_KERNEL("grow_block", &grow_block)); }

}  // namespace torchrec_dyn
