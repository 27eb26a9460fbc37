// The ops of the id map on a device: id_map_cpu.cpp for CUDA.
//
// What a kernel finds wrong is a word that later kernels of the call look at before they write, and report.
#include <algorithm>
#include <tuple>
#include <vector>

#include "device_call.h"
#include "kernel.h"
#include "storage/id_map_arguments.h"
#include "storage/id_map_changes_arguments.h"
#include "storage/id_map_kernels.h"

namespace torchrec_dyn {
namespace {

Tensor mix64_ids(const Tensor& ids) {
  check_tensor("mix64", "ids", ids, ScalarType::Long, kDevice);
  const DeviceCall call(ids);
  Tensor out = new_device_tensor({ids.numel()});
  simt::launch(call.stream(), ids.numel(), MixIds{const_data<uint64_t>(ids), mutable_data<uint64_t>(out)});
  return out;
}

std::tuple<Tensor, Tensor> lookup(const Tensor& ids, const Tensor& table_offsets, std::vector<Tensor> slots,
                                  const Tensor& moved) {
  const int64_t tables = count_maps("lookup", moved);
  check_tensor("lookup", "ids", ids, ScalarType::Long, kDevice);
  check_table_offsets("lookup", table_offsets, tables, ids.numel());
  const std::vector<IdMapView> views = views_of("lookup", slots, moved, ids.device());
  DeviceCall call(ids);
  Tensor rows = new_device_tensor({ids.numel()});
  Tensor absent = new_device_tensor({tables});
  simt::fill_zero(call.stream(), absent.mutable_data_ptr(), tables * static_cast<int64_t>(sizeof(int64_t)));
  if (ids.numel() == 0) return {rows, absent};
  simt::launch(call.stream(), ids.numel(),
               FindRows{const_data<int64_t>(ids), send_maps(call, views, const_data<int64_t>(table_offsets)), nullptr,
                        mutable_data<int64_t>(rows), mutable_data<int64_t>(absent), simt::error_record()});
  return {rows, absent};
}

void insert(const Tensor& new_ids, const Tensor& new_rows, const Tensor& new_offsets, std::vector<Tensor> slots,
            const Tensor& moved) {
  const int64_t tables = count_maps("insert", moved);
  check_tensor("insert", "new_ids", new_ids, ScalarType::Long, kDevice);
  check_tensor("insert", "new_rows", new_rows, ScalarType::Long, new_ids.device());
  check_size("insert", "the number of new_rows", new_ids.numel(), new_rows.numel());
  check_table_offsets("insert", new_offsets, tables, new_ids.numel());
  const std::vector<IdMapView> views = views_of("insert", slots, moved, new_ids.device());
  SeparateMemory().writes(slots).reads(new_ids).reads(new_rows).reads(new_offsets).reads(moved).check("insert");
  const int64_t count = new_ids.numel();
  if (count == 0) return;
  DeviceCall call(new_ids);
  insert_ids(call, send_maps(call, views, const_data<int64_t>(new_offsets)), const_data<int64_t>(new_ids),
             const_data<int64_t>(new_rows), count, check_rows(call, const_data<int64_t>(new_rows), count),
             raise_insert_error);
  call.finish();
}

Tensor erase(const Tensor& ids, std::vector<Tensor> slots, const Tensor& moved) {
  check_tensor("erase", "ids", ids, ScalarType::Long, kDevice);
  const std::vector<IdMapView> maps{one_map("erase", slots, moved, ids.device())};
  SeparateMemory().writes(slots).reads(ids).reads(moved).check("erase");
  DeviceCall call(ids);
  Tensor rows = new_device_tensor({ids.numel()});
  const int64_t begin = 0;
  const LeavingIds leaving = leaving_ids(call, send_maps(call, maps, &begin), const_data<int64_t>(ids), ids.numel());
  erase_ids(call, leaving, mutable_data<int64_t>(rows), nullptr);
  return rows;
}

Tensor empty_slots(const DeviceCall& call, int64_t capacity) {
  Tensor made = new_device_tensor({capacity, 2});
  simt::fill_zero(call.stream(), made.mutable_data_ptr(), capacity * static_cast<int64_t>(sizeof(Slot)));
  return made;
}

Tensor new_slots(const Tensor& slots, int64_t capacity) {
  array_of("new_slots", "slots", slots, kDevice);
  check_capacity("new_slots", capacity);
  return empty_slots(DeviceCall(slots), capacity);
}

std::vector<Tensor> grown_slots(std::vector<Tensor> slots, std::vector<int64_t> capacities, std::vector<int64_t> keys) {
  if (slots.empty()) return {};
  const std::vector<SlotArray> from = arrays_to_grow(slots, capacities, keys, slots.front().device());
  const DeviceCall call(slots.front());
  std::vector<Tensor> grown;
  for (const int64_t capacity : capacities) grown.push_back(empty_slots(call, capacity));
  for (size_t m = 0; m < from.size(); ++m) {
    const SlotArray to{static_cast<Slot*>(grown[m].mutable_data_ptr()), capacities[m]};
    simt::launch(call.stream(), from[m].capacity,
                 CopySlots{from[m], to, SlotHash::of(keys[m]), call.errors(raise_full_map)});
  }
  call.finish();
  return grown;
}

Tensor probe_lengths(const Tensor& slots, int64_t every, int64_t key) {
  const SlotArray array = array_of("probe_lengths", "slots", slots, kDevice);
  TORCHREC_DYN_CHECK(every >= 1, "probe_lengths: expected every >= 1, got ", every, ".");
  const int64_t runs = (array.capacity + kProbeRun - 1) / kProbeRun;
  every = std::min(every, std::max<int64_t>(runs, 1));  // a longer interval reads the first run alone, too
  const DeviceCall call(slots);
  Tensor lengths = new_device_tensor({3});
  auto* length = mutable_data<int64_t>(lengths);
  simt::fill_zero(call.stream(), length, 3 * static_cast<int64_t>(sizeof(int64_t)));
  simt::launch(call.stream(), (runs + every - 1) / every * kProbeThreads,
               SumProbeLengths{array, SlotHash::of(key), every, length});
  return lengths;
}

}  // namespace

TORCHREC_DYN_DEVICE_KERNELS(m) {
  m.impl(TORCHREC_DYN_KERNEL("mix64", &mix64_ids));
  m.impl(TORCHREC_DYN_KERNEL("lookup", &lookup));
  m.impl(TORCHREC_DYN_KERNEL("insert", &insert));
  m.impl(TORCHREC_DYN_KERNEL("erase", &erase));
  m.impl(TORCHREC_DYN_KERNEL("new_slots", &new_slots));
  m.impl(TORCHREC_DYN_KERNEL("grown_slots", &grown_slots));
  m.impl(TORCHREC_DYN_KERNEL("probe_lengths", &probe_lengths));
}

}  // namespace torchrec_dyn
