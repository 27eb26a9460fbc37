// The op grow_block, for the CPU and for devices: blocks in address ranges, and which tensors use a range.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "checks.h"
#include "storage/address_range.h"

namespace torchrec_dyn {

// The ranges in use, by their address. A range lives as long as a tensor over it.
class GrowingBlocks {
  struct Use {
    std::unique_ptr<AddressRange> range;
    int64_t tensors;
  };

 public:
  // Makes the first `bytes` bytes of the range that begins at `begin` usable. Returns false if no range begins there,
  // or if its addresses do not suffice. For each true, call give_back once.
  bool extend(void* begin, int64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto place = used_.find(begin);
    if (place == used_.end() || place->second.range->bytes() < bytes) return false;
    place->second.range->commit(bytes);
    ++place->second.tensors;
    return true;
  }

  // Returns the begin of a new range, with its first `bytes` bytes usable. Call give_back once.
  void* add(std::unique_ptr<AddressRange> range, int64_t bytes) {
    range->commit(bytes);
    void* begin = range->begin();
    const std::lock_guard<std::mutex> lock(mutex_);
    used_.emplace(begin, Use{std::move(range), 1});
    return begin;
  }

  void give_back(void* begin) {
    decltype(used_)::node_type leaving;  // its memory is released without the lock
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto place = used_.find(begin);
    if (--place->second.tensors == 0) leaving = used_.extract(place);
  }

  // Never destroyed: tensors may outlive the library's other statics.
  static GrowingBlocks& shared() {
    static auto* blocks = new GrowingBlocks;
    return *blocks;
  }

 private:
  std::mutex mutex_;
  std::map<void*, Use> used_;
};

using ReserveAddresses = std::unique_ptr<AddressRange> (*)(int64_t bytes, int32_t device);

inline Tensor grow_block_in_range(const Tensor& block, int64_t rows, int64_t limit, const Device& device,
                                  ReserveAddresses reserve) {
  constexpr const char* op = "grow_block";
  constexpr int64_t kMostBytes = int64_t{1} << 47;  // the addresses of a process
  STD_TORCH_CHECK(block.dim() == 2 && block.size(1) > 0, op, ": expected a block of shape [R, D] with D > 0, got ",
                  block.dim(), " dimensions and ", block.numel(), " elements.");
  STD_TORCH_CHECK(block.is_contiguous(), op, ": expected a contiguous block, got strides. Call .contiguous() first.");
  check_memory(op, "block", block);
  const int64_t held = block.size(0), columns = block.size(1), size = static_cast<int64_t>(block.element_size());
  const int64_t least = std::max<int64_t>(held, 1);
  STD_TORCH_CHECK(rows >= least && rows <= limit, op, ": expected rows in [", least, ", ", limit, "], got ", rows, ".");
  STD_TORCH_CHECK(limit <= kMostBytes / size / columns, op, ": expected a limit of at most 2^47 bytes, got ", limit,
                  " rows of ", columns, " columns.");
  const int64_t bytes = rows * columns * size;
  void* begin = held > 0 ? block.mutable_data_ptr() : nullptr;
  const bool in_place = begin != nullptr && GrowingBlocks::shared().extend(begin, bytes);
  if (!in_place) begin = GrowingBlocks::shared().add(reserve(limit * columns * size, device.index()), bytes);
  Tensor grown = tensor_of(
      begin, {rows, columns}, {columns, 1}, block.scalar_type(), [begin] { GrowingBlocks::shared().give_back(begin); },
      device);
  if (!in_place && held > 0) {
    Tensor first = torch::stable::narrow(grown, 0, 0, held);
    torch::stable::copy_(first, block);
  }
  return grown;
}

}  // namespace torchrec_dyn
