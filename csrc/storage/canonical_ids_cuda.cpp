// The ids of one map on a device: canonical_ids_cpu.cpp for CUDA.
#include <bit>
#include <tuple>
#include <vector>

#include "device_call.h"
#include "kernel.h"
#include "storage/canonical_ids_kernels.h"
#include "storage/id_map_arguments.h"

namespace torchrec_dyn {
namespace {

// Lists the ids with first <= mixed id <= first + span, and their rows: in the order of the slots, or in canonical
// order.
std::tuple<Tensor, Tensor> list_inside(DeviceCall& call, const AllSlots& all, uint64_t first, uint64_t span,
                                       bool in_order) {
  const int64_t lines = all.count / kLineSlots;
  const IdsInside found{all, first, span, call.allocate_for<int64_t>(lines + 1)};
  simt::launch(call.stream(), lines + 1, CountInside{found});
  simt::exclusive_sum(call.stream(), found.places, lines + 1);
  const int64_t count = call.read(found.places + lines);  // a wait: the result has this length
  Tensor ids = new_device_tensor({count}), rows = new_device_tensor({count});
  simt::Pairs listed{mutable_data<uint64_t>(ids), mutable_data<int64_t>(rows)};
  simt::launch(call.stream(), lines, ListInside{found, listed.keys, listed.values});
  if (in_order) listed = simt::sort_pairs(call.stream(), listed, count, 0, static_cast<int>(std::bit_width(span)));
  simt::launch(call.stream(), count,
               UnmixListed{listed, first, mutable_data<uint64_t>(ids), mutable_data<int64_t>(rows)});
  return {ids, rows};
}

std::tuple<Tensor, Tensor> used_slots(const Tensor& slots) {
  const AllSlots all(IdMapView(array_of("used_slots", "slots", slots, kDevice), SlotHash{}));
  DeviceCall call(slots);
  return list_inside(call, all, 0, ~uint64_t{0}, false);
}

// All slots must be on the device of the first.
IdMapView one_device_map(const char* op, const std::vector<Tensor>& slots, const Tensor& moved) {
  return one_map(op, slots, moved, slots.empty() ? Device(kDevice) : slots.front().device());
}

std::tuple<Tensor, Tensor> ids_of_rows(std::vector<Tensor> slots, const Tensor& moved, int64_t first, int64_t last) {
  const char* op = "ids_of_rows";
  const IdMapView map = one_device_map(op, slots, moved);
  TORCHREC_DYN_CHECK(0 <= first && first <= last, op, ": expected 0 <= first <= last, got ", first, " and ", last, ".");
  const int64_t rows = last - first;
  DeviceCall call(slots.front());
  Tensor ids = new_device_tensor({rows}), has_id = new_device_tensor({rows}, ScalarType::Bool);
  auto* id = mutable_data<int64_t>(ids);
  auto* flag = static_cast<uint8_t*>(has_id.mutable_data_ptr());
  simt::fill_zero(call.stream(), id, rows * static_cast<int64_t>(sizeof *id));
  simt::fill_zero(call.stream(), flag, rows);
  for (int a = 0; a < (map.is_growing() ? 2 : 1); ++a)
    simt::launch(call.stream(), map.arrays[a].capacity, WriteIdsOfRows{map.arrays[a], first, rows, id, flag});
  return {ids, has_id};
}

Tensor count_cells(std::vector<Tensor> slots, const Tensor& moved, int64_t bits) {
  const AllSlots all(one_device_map("count_cells", slots, moved));
  check_cell_bits(bits);
  const DeviceCall call(slots.front());
  Tensor counts = new_device_tensor({int64_t{1} << bits});
  auto* count = mutable_data<int64_t>(counts);
  simt::fill_zero(call.stream(), count, counts.numel() * static_cast<int64_t>(sizeof(int64_t)));
  simt::launch(call.stream(), all.count, CountCells{all, static_cast<int>(bits), count});
  return counts;
}

std::tuple<Tensor, Tensor> ids_between(std::vector<Tensor> slots, const Tensor& moved, int64_t first, int64_t last) {
  const AllSlots all(one_device_map("ids_between", slots, moved));
  const auto from = static_cast<uint64_t>(first), to = static_cast<uint64_t>(last);
  DeviceCall call(slots.front());
  if (from > to) return {new_device_tensor({0}), new_device_tensor({0})};
  return list_inside(call, all, from, to - from, true);
}

}  // namespace

TORCHREC_DYN_DEVICE_KERNELS(m) {
  m.impl(TORCHREC_DYN_KERNEL("used_slots", &used_slots));
  m.impl(TORCHREC_DYN_KERNEL("ids_of_rows", &ids_of_rows));
  m.impl(TORCHREC_DYN_KERNEL("count_cells", &count_cells));
  m.impl(TORCHREC_DYN_KERNEL("ids_between", &ids_between));
}

}  // namespace torchrec_dyn
