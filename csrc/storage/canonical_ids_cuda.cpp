// The ids of one map on a device: of canonical_ids_cpu.cpp, the list in the order of the slots.
#include <tuple>

#include "device_call.h"
#include "kernel.h"
#include "storage/canonical_ids_kernels.h"
#include "storage/id_map_arguments.h"

namespace torchrec_dyn {
namespace {

std::tuple<Tensor, Tensor> used_slots(const Tensor& slots) {
  const SlotArray array = array_of("used_slots", "slots", slots, kDevice);
  DeviceCall call(slots);
  auto* places = call.take_for<int64_t>(array.capacity + 1);
  simt::each(call.queue(), array.capacity + 1, FlagUsed{array, places});
  simt::exclusive_sum(call.queue(), places, array.capacity + 1);
  const int64_t count = call.read(places + array.capacity);  // a wait: the result has this length
  Tensor ids = new_device_tensor({count}), rows = new_device_tensor({count});
  simt::each(call.queue(), array.capacity,
             ListUsed{array, places, mutable_data<int64_t>(ids), mutable_data<int64_t>(rows)});
  return {ids, rows};
}

}  // namespace

TORCHREC_DYN_DEVICE_KERNELS(m) { m.impl(TORCHREC_DYN_KERNEL("used_slots", &used_slots)); }

}  // namespace torchrec_dyn
