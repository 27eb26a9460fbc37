// The senders of a batch as an argument of an op: checked, and read as the view of lookup/senders.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "checks.h"
#include "lookup/senders.h"

namespace torchrec_dyn {

inline const int32_t* sender_data(const char* op, const std::optional<Tensor>& senders, int64_t ids,
                                  const Device& device = DeviceType::CPU) {
  if (!senders.has_value()) return nullptr;
  check_tensor(op, "senders", *senders, ScalarType::Int, device);
  check_size(op, "the number of senders", ids, senders->numel());
  return const_data<int32_t>(*senders);
}

// `lowest` and `highest`: of all senders and -1.
inline void check_sender_range(const char* op, int64_t lowest, int64_t highest) {
  TORCHREC_DYN_CHECK(lowest == -1 && highest < kMostSenders, op, ": expected senders in [-1, ", kMostSenders, "), got ",
                     lowest, " to ", highest, ".");
}

// Checks senders, given in memory of the host. Returns the highest; -1 if there is none.
inline int32_t check_senders(const char* op, const int32_t* sender, int64_t ids) {
  int32_t lowest = -1;
  int32_t highest = -1;
  for (int64_t i = 0; i < ids; ++i) {
    lowest = std::min(lowest, sender[i]);
    highest = std::max(highest, sender[i]);
  }
  check_sender_range(op, lowest, highest);
  return highest;
}

inline Senders read_senders(const char* op, const std::optional<Tensor>& senders, int64_t ids) {
  const int32_t* sender = sender_data(op, senders, ids);
  return sender == nullptr ? Senders{} : Senders{sender, check_senders(op, sender, ids) + 1};
}

}  // namespace torchrec_dyn
