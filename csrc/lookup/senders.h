// Which rank sent each id of a batch: a row's gradient may be the mean over those that sent its id.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "checks.h"

namespace torchrec_dyn {

struct Senders {
  const int32_t* of_id = nullptr;  // [N] -1 where it does not matter; null where nobody asks
  int32_t ranks = 0;               // above every sender
};

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
  constexpr int32_t kMost = 1 << 20;  // every task keeps a number for each
  STD_TORCH_CHECK(lowest == -1 && highest < kMost, op, ": expected senders in [-1, ", kMost, "), got ", lowest, " to ",
                  highest, ".");
  return {sender, highest + 1};
}

// Counts the distinct senders of the ids of one row after another; -1 counts as one.
class SenderCount {
 public:
  explicit SenderCount(const Senders& senders)
      : senders_(senders), last_row_(senders.of_id ? static_cast<size_t>(senders.ranks) + 1 : 0) {}

  void next_row() {
    ++row_;
    distinct_ = 0;
  }

  void add(uint32_t position) {
    uint32_t& last = last_row_[static_cast<size_t>(senders_.of_id[position] + 1)];
    distinct_ += last != row_;
    last = row_;
  }

  uint32_t distinct() const { return distinct_; }

 private:
  const Senders& senders_;
  std::vector<uint32_t> last_row_;  // [1 + ranks] the last row that a sender, from -1 on, was met in
  uint32_t row_ = 0;
  uint32_t distinct_ = 0;
};

}  // namespace torchrec_dyn
