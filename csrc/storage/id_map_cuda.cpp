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
                        nullptr, mutable_data<int64_t>(rows), mutable_data<int64_t>(absent), simt::error_record()});
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

void fill_new_(const Tensor& rows, const Tensor& new_index, const Tensor& new_rows) {
  check_tensor("fill_new_", "rows", rows, ScalarType::Long, kDevice);
  check_tensor("fill_new_", "new_index", new_index, ScalarType::Long, rows.device());
  check_tensor("fill_new_", "new_rows", new_rows, ScalarType::Long, rows.device());
  check_size("fill_new_", "the number of new_index", rows.numel(), new_index.numel());
  SeparateMemory().writes(rows).reads(new_index).reads(new_rows).check("fill_new_");
  if (rows.numel() == 0) return;
  DeviceCall call(rows);
  const CheckNewIndex check{const_data<int64_t>(new_index), new_rows.numel(), call.zeros<int64_t>(1)};
  simt::launch(call.stream(), rows.numel(), check);
  simt::launch(
      call.stream(), rows.numel(),
      FillNew{check, const_data<int64_t>(new_rows), mutable_data<int64_t>(rows), call.errors(raise_new_index_error)});
  call.finish();
}

Tensor erase(const Tensor& ids, std::vector<Tensor> slots, const Tensor& moved) {
  check_tensor("erase", "ids", ids, ScalarType::Long, kDevice);
  const std::vector<IdMapView> maps{one_map("erase", slots, moved, ids.device())};
  SeparateMemory().writes(slots).reads(ids).reads(moved).check("erase");
  DeviceCall call(ids);
  Tensor rows = new_device_tensor({ids.numel()});
  const int64_t begin = 0;
  erase_ids(call, send_maps(call, maps, &begin), const_data<int64_t>(ids), ids.numel(), mutable_data<int64_t>(rows),
            nullptr);
  return rows;
}

Tensor new_slots(const Tensor& slots, int64_t capacity) {
  array_of("new_slots", "slots", slots, kDevice);
  check_new_capacity(capacity);
  const DeviceCall call(slots);
  Tensor made = new_device_tensor({capacity, 2});
  simt::fill_zero(call.stream(), made.mutable_data_ptr(), capacity * static_cast<int64_t>(sizeof(Slot)));
  return made;
}

// Moves all slots at once, wherever `until` is: the map never has two arrays after a call.
Tensor move_slots(const Tensor& outgoing, const Tensor& slots, int64_t moved, int64_t until, int64_t key) {
  const SlotArray from = array_of("move_slots", "outgoing", outgoing, kDevice);
  const SlotArray to = array_of("move_slots", "slots", slots, outgoing.device());
  check_move(from, to, moved);
  SeparateMemory().writes(outgoing).writes(slots).check("move_slots");
  Tensor moved_now = new_int64(1);  // `moved` of other ops is on the CPU, too
  int64_t& end = mutable_data<int64_t>(moved_now)[0] = moved;
  if (std::min(until, from.capacity) <= moved) return moved_now;
  DeviceCall call(slots);
  auto* left_out = call.zeros<int64_t>(1);
  // Slots before `moved` are empty, or hold ids that wrap around the end.
  simt::launch(call.stream(), from.capacity, MoveSlots{from, to, SlotHash::of(key), left_out});
  simt::launch(call.stream(), from.capacity, EmptyMoved{from, left_out, call.errors(raise_full_map)});
  call.finish();
  end = from.capacity;
  return moved_now;
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
  m.impl(TORCHREC_DYN_KERNEL("fill_new_", &fill_new_));
  m.impl(TORCHREC_DYN_KERNEL("erase", &erase));
  m.impl(TORCHREC_DYN_KERNEL("new_slots", &new_slots));
  m.impl(TORCHREC_DYN_KERNEL("move_slots", &move_slots));
  m.impl(TORCHREC_DYN_KERNEL("probe_lengths", &probe_lengths));
}

}  // namespace torchrec_dyn
