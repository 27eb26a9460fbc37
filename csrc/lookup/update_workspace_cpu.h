// The memory in which the workers of an update on the CPU work. It is kept from call to call.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "lookup/row_runs_cpu.h"
#include "lookup/row_update.h"
#include "simd.h"

namespace torchrec_dyn {

// The rank that sent each id of a batch: a row's gradient may be the mean over the ranks that sent its id.
struct Senders {
  const int32_t* of_id = nullptr;  // [N] -1 where it is not needed; null if no table divides by its senders
  int32_t ranks = 0;               // larger than every sender
};

// Counts the distinct senders of each row, one row after another; -1 counts as a sender.
class SenderCount {
 public:
  // last_row: [ranks + 1] zeros, written: the last row in which each sender, from -1 on, occurred.
  SenderCount(const Senders& senders, uint32_t* last_row) : senders_(senders), last_row_(last_row) {}

  void next_row() {
    ++row_;
    distinct_ = 0;
  }

  void add(uint32_t position) {
    uint32_t& last = last_row_[senders_.of_id[position] + 1];
    distinct_ += last != row_;
    last = row_;
  }

  uint32_t distinct() const { return distinct_; }

 private:
  const Senders& senders_;
  uint32_t* last_row_;
  uint32_t row_ = 0;
  uint32_t distinct_ = 0;
};

// The floats of one cache line, aligned so that a vector of 512 bits never lies on two lines.
struct alignas(64) Line {
  float floats[kLanes];
};

// The most that one part of a call needs.
struct PartSize {
  size_t ids = 0;      // of one table
  size_t columns = 0;  // of a row
};

inline size_t lines_of(size_t columns) { return (columns + kLanes - 1) / kLanes; }

// The memory in which a worker updates one part after another. All of it is allocated before the first row is written:
// if memory is missing, no row has changed. What no part uses is not written either, so the system commits no page.
struct Workspace {
  Workspace(const PartSize& most, bool is_float, size_t senders)
      : rows(most.ids),
        sum(std::make_unique_for_overwrite<float[]>(most.columns)),
        lines(std::make_unique_for_overwrite<Line[]>(is_float ? 0 : lines_of(most.columns))),
        copy(std::make_unique_for_overwrite<Line[]>((1 + kMostStates) * lines_of(most.columns))),
        measured(std::make_unique_for_overwrite<float[]>(most.columns)),
        last_row(std::make_unique_for_overwrite<uint32_t[]>(senders)),
        senders(senders) {}

  RowRuns rows;
  std::unique_ptr<float[]> sum;   // the gradient of a row
  std::unique_ptr<Line[]> lines;  // a row shorter than float32
  std::unique_ptr<Line[]> copy;   // of a row and its states
  std::unique_ptr<float[]> measured;
  std::unique_ptr<uint32_t[]> last_row;
  size_t senders;
};

// The workspaces of this thread's calls, one for each worker. They are kept from call to call: memory that went back to
// the system would be committed again page by page, which took up to a quarter of a small update.
class Workspaces {
 public:
  // Returns at least `workers` workspaces. `is_float` is the same in all calls.
  std::vector<Workspace>& of(int64_t workers, const PartSize& most, bool is_float, size_t senders) {
    const bool fits = workers <= static_cast<int64_t>(list_.size()) && most.ids <= most_.ids &&
                      most.columns <= most_.columns && senders == senders_;
    if (fits) return list_;
    const PartSize both = {std::max(most.ids, most_.ids), std::max(most.columns, most_.columns)};
    release();  // if memory is missing, the next call asks only for what it needs
    list_.reserve(static_cast<size_t>(workers));
    for (int64_t worker = 0; worker < workers; ++worker) list_.emplace_back(both, is_float, senders);
    most_ = both;
    senders_ = senders;
    return list_;
  }

  // Keeps no more than a batch of ordinary size needs.
  void release_large() {
    constexpr size_t kKeptBytes = size_t{16} << 20;
    const size_t bytes = RowRuns::bytes(most_.ids) + most_.columns * (4 + kMostStates) * sizeof(float);
    if (list_.size() * bytes > kKeptBytes) release();
  }

 private:
  void release() {
    list_.clear();
    most_ = {};
  }

  PartSize most_;
  size_t senders_ = 0;
  std::vector<Workspace> list_;
};

}  // namespace torchrec_dyn
