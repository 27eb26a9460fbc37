// The segments of each table, in the order of the bags. They are listed once for a call: of 1,000 tables that each
// looked at all segments, the backward took a third longer.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "lookup/bags.h"

namespace torchrec_dyn {

class TableSegments {
 public:
  TableSegments(const Bags& bags, size_t tables)
      : bags_(bags), first_(tables, -1), next_(static_cast<size_t>(bags.segment_count)) {
    for (int64_t s = bags.segment_count; s-- > 0;)
      next_[static_cast<size_t>(s)] = std::exchange(first_[static_cast<size_t>(bags.segments[s].table)], s);
  }

  // Calls body(begin, end) for the ids of each segment of a table.
  template <typename Body>
  void visit(size_t table, const Body& body) const {
    for (int64_t s = first_[table]; s >= 0; s = next_[static_cast<size_t>(s)]) {
      const Segment& segment = bags_.segments[s];
      if (segment.bags > 0) body(bags_.begin(segment.first_bag), bags_.end(segment.first_bag + segment.bags - 1));
    }
  }

  // Returns the number of ids of each table.
  std::vector<int64_t> ids() const {
    std::vector<int64_t> ids(first_.size());
    for (size_t t = 0; t < ids.size(); ++t) visit(t, [&](int64_t begin, int64_t end) { ids[t] += end - begin; });
    return ids;
  }

 private:
  const Bags& bags_;
  std::vector<int64_t> first_;  // of each table; -1: none
  std::vector<int64_t> next_;   // of the same table; -1: none
};

}  // namespace torchrec_dyn
