// Sorts a batch by the owners of its ids on a device: owners_cpu.cpp for CUDA.
#include <bit>
#include <limits>
#include <optional>
#include <tuple>

#include "bag_lengths_kernels.h"
#include "device_call.h"
#include "kernel.h"
#include "ranks/owners_arguments.h"
#include "ranks/owners_kernels.h"

namespace torchrec_dyn {
namespace {

// Calls body(Weight{}) with a word as wide as a weight.
template <typename Body>
void dispatch_weight(ScalarType type, const Body& body) {
  if (type == ScalarType::Float) return body(uint32_t{});
  if (type == ScalarType::Double) return body(uint64_t{});
  body(uint16_t{});
}

// Writes the number of ids by owner and bag to `sorted_lengths`, and returns the positions of the ids by owner.
template <typename Length>
const int64_t* sort_positions(DeviceCall& call, const Tensor& ids, const Tensor& lengths, int64_t ranks,
                              const Tensor& sorted_lengths, int64_t* is_wrong) {
  const int64_t count = ids.numel(), bags = lengths.numel();
  auto* begins = call.allocate_for<int64_t>(bags + 1);
  auto* sorted_length = mutable_data<Length>(sorted_lengths);
  simt::fill_zero(call.stream(), sorted_length, sorted_lengths.numel() * static_cast<int64_t>(sizeof(Length)));
  const Integers given{const_data<Length>(lengths), sizeof(Length) == sizeof(int32_t)};
  simt::launch(call.stream(), bags + 1, ReadLengths{given, bags, count, begins, is_wrong});
  simt::exclusive_sum(call.stream(), begins, bags + 1);
  const simt::Pairs owners{call.allocate_for<uint64_t>(count), call.allocate_for<int64_t>(count)};
  const auto owner_count = static_cast<uint64_t>(ranks);
  simt::launch(call.stream(), count + 1,
               FindOwners<Length>{const_data<uint64_t>(ids), count, begins, bags, owner_count,
                                  std::numeric_limits<uint64_t>::max() / owner_count, owners, sorted_length, is_wrong});
  return simt::sort_pairs(call.stream(), owners, count, 0, static_cast<int>(std::bit_width(owner_count - 1))).values;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sort_by_owner(const Tensor& ids, const Tensor& lengths,
                                                         std::optional<Tensor> weights, int64_t ranks, bool positions) {
  const ScalarType type = check_sorted_batch(ids, lengths, weights, ranks, kDevice);
  const int64_t count = ids.numel(), bags = lengths.numel();
  check_lengths_fit(bags > 0 || count == 0, count);
  DeviceCall call(ids);
  Tensor sorted_lengths = new_device_tensor({ranks * bags}, lengths.scalar_type());
  Tensor sorted_ids = new_device_tensor({count});
  Tensor sorted_weights = new_device_tensor({weights ? count : 0}, type);
  Tensor places = new_device_tensor({positions ? count : 0});
  auto* is_wrong = call.zeros<int64_t>(1);
  const bool is_int = lengths.scalar_type() == ScalarType::Int;
  const auto sort = is_int ? sort_positions<int32_t> : sort_positions<int64_t>;
  const int64_t* order = sort(call, ids, lengths, ranks, sorted_lengths, is_wrong);
  dispatch_weight(type, [&](auto zero) {
    using Weight = decltype(zero);
    const Weight* weight = weights ? const_data<Weight>(*weights) : nullptr;
    int64_t* where = positions ? mutable_data<int64_t>(places) : nullptr;
    simt::launch(
        call.stream(), count + 1,
        MoveToOwners<Weight>{count, order, const_data<int64_t>(ids), weight, mutable_data<int64_t>(sorted_ids),
                             mutable_data<Weight>(sorted_weights), where, is_wrong, call.errors(raise_lengths_error)});
  });
  call.finish();
  return {sorted_ids, sorted_lengths, sorted_weights, places};
}

}  // namespace

TORCHREC_DYN_DEVICE_KERNELS(m) { m.impl(TORCHREC_DYN_KERNEL("sort_by_owner", &sort_by_owner)); }

}  // namespace torchrec_dyn
