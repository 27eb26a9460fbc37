// The senders of a batch as an argument of an op: checked, and read as the view of lookup/senders.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "checks.h"
#include "lookup/senders.h"

namespace torchrec_dyn {

inline Senders read_senders(const char* op, const std::optional<Tensor>& senders, int64_t ids) {
  if (!senders.has_value()) return {};
  check_tensor(op, "senders", *senders, ScalarType::Int);
  check_size(op, "the number of senders", ids, senders->numel());
  const auto* sender = const_data<int32_t>(*senders);
  int32_t lowest = -1;
  int32_t highest = -1;
  for (int64_t i = 0; i < ids; ++i) {
    lowest = std::min(lowest, sender[i]);
    highest = std::max(highest, sender[i]);
  }
  constexpr int32_t kMost = 1 << 20;  // every task keeps one number for each sender
  STD_TORCH_CHECK(lowest == -1 && highest < kMost, op, ": expected senders in [-1, ", kMost, "), got ", lowest, " to ",
                  highest, ".");
  return {sender, highest + 1};
}

}  // namespace torchrec_dyn
