// The rank that sent each id of a batch: a row's gradient may be the mean over the ranks that sent its id.
#pragma once

#include <cstdint>

#include "both_devices.h"

namespace torchrec_dyn {

struct Senders {
  const int32_t* of_id = nullptr;  // [N] -1 where it is not needed; null if no table divides by its senders
  int32_t ranks = 0;               // larger than every sender
};

// On a CPU every task keeps one number for each sender.
constexpr int32_t kMostSenders = 1 << 20;

// Counts the distinct senders of each row, one row after another; -1 counts as a sender.
class SenderCount {
 public:
  // last_row: [ranks + 1] zeros, written: the last row in which each sender, from -1 on, occurred.
  TORCHREC_DYN_BOTH SenderCount(const Senders& senders, uint32_t* last_row) : senders_(senders), last_row_(last_row) {}

  TORCHREC_DYN_BOTH void next_row() {
    ++row_;
    distinct_ = 0;
  }

  TORCHREC_DYN_BOTH void add(uint32_t position) {
    uint32_t& last = last_row_[senders_.of_id[position] + 1];
    distinct_ += last != row_;
    last = row_;
  }

  TORCHREC_DYN_BOTH uint32_t distinct() const { return distinct_; }

 private:
  const Senders& senders_;
  uint32_t* last_row_;
  uint32_t row_ = 0;
  uint32_t distinct_ = 0;
};

}  // namespace torchrec_dyn
