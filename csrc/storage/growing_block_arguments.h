// The op grow_block, for the CPU and for devices: blocks in address ranges.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "checks.h"
#include "storage/address_range.h"

namespace torchrec_dyn {

using ReserveAddresses = std::unique_ptr<AddressRange> (*)(int64_t bytes, int32_t device, bool on_host);

inline Tensor grow_block_in_range(const Tensor& block, int64_t rows, int64_t limit, bool on_host, const Device& device,
                                  ReserveAddresses reserve, RaiseLost raise_lost = nullptr) {
  constexpr const char* op = "grow_block";
  constexpr int64_t kMostBytes = int64_t{1} << 47;  // the addresses of a process
  TORCHREC_DYN_CHECK(block.dim() == 2 && block.size(1) > 0, op, ": expected a block of shape [R, D] with D > 0, got ",
                     block.dim(), " dimensions and ", block.numel(), " elements.");
  TORCHREC_DYN_CHECK(block.is_contiguous(), op,
                     ": expected a contiguous block, got strides. Call .contiguous() first.");
  check_memory(op, "block", block);
  const int64_t held = block.size(0), columns = block.size(1), size = static_cast<int64_t>(block.element_size());
  const int64_t least = std::max<int64_t>(held, 1);
  TORCHREC_DYN_CHECK(rows >= least && rows <= limit, op, ": expected rows in [", least, ", ", limit, "], got ", rows,
                     ".");
  TORCHREC_DYN_CHECK(limit <= kMostBytes / size / columns, op, ": expected a limit of at most 2^47 bytes, got ", limit,
                     " rows of ", columns, " columns.");
  const int64_t bytes = rows * columns * size;
  GrowingBlocks::shared().free_left();
  void* begin = held > 0 ? block.mutable_data_ptr() : nullptr;
  const bool in_place = begin != nullptr && GrowingBlocks::shared().extend(begin, bytes);
  if (!in_place) begin = GrowingBlocks::shared().add(reserve(limit * columns * size, device.index(), on_host), bytes);
  Tensor grown = tensor_of(
      begin, {rows, columns}, {columns, 1}, block.scalar_type(), [begin] { GrowingBlocks::shared().give_back(begin); },
      device, raise_lost);
  if (!in_place && held > 0) {
    Tensor first = torch::stable::narrow(grown, 0, 0, held);
    torch::stable::copy_(first, block);
  }
  return grown;
}

}  // namespace torchrec_dyn
