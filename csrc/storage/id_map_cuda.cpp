// The ops of the id map on a device: id_map_cpu.cpp for CUDA.
#include "device_call.h"
#include "kernel.h"
#include "storage/id_map_kernels.h"

namespace torchrec_dyn {
namespace {

template <typename Body>
Tensor each_id(const char* op, const Tensor& ids) {
  check_tensor(op, "ids", ids, ScalarType::Long, kDevice);
  const DeviceCall call(ids);
  Tensor out = new_device_tensor({ids.numel()});
  simt::each(call.queue(), ids.numel(), Body{const_data<uint64_t>(ids), mutable_data<uint64_t>(out)});
  return out;
}

Tensor mix64_ids(const Tensor& ids) { return each_id<MixIds>("mix64", ids); }

Tensor unmix64_ids(const Tensor& mixed) { return each_id<UnmixIds>("unmix64", mixed); }

}  // namespace

TORCHREC_DYN_DEVICE_KERNELS(m) {
  m.impl(TORCHREC_DYN_KERNEL("mix64", &mix64_ids));
  m.impl(TORCHREC_DYN_KERNEL("unmix64", &unmix64_ids));
}

}  // namespace torchrec_dyn
