// Bags as arguments of an op: segments and offsets, checked, and read as the view of lookup/bags.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "checks.h"
#include "lookup/bags.h"
#include "parallel.h"
#include "storage/blocks_arguments.h"

namespace torchrec_dyn {

// Owns the lists that `view` reads.
struct BagLists {
  std::vector<Segment> segments;
  std::vector<int64_t> first;
  const int64_t* offsets = nullptr;
  int64_t count = 0;

  Bags view() const { return {segments.data(), first.data(), static_cast<int64_t>(segments.size()), offsets, count}; }
};

// Checks that every bag is in one segment. `segments` are ordered by first bag.
inline void check_bags_tile(const char* op, const std::vector<Segment>& segments, int64_t bags) {
  int64_t next = 0;
  for (const Segment& segment : segments) {
    if (segment.bags == 0) continue;
    TORCHREC_DYN_CHECK(segment.first_bag == next, op, ": expected every bag in one segment, got bag ",
                       std::min(segment.first_bag, next), segment.first_bag < next ? " in two." : " in none.");
    next += segment.bags;
  }
  TORCHREC_DYN_CHECK(next == bags, op, ": expected every bag in one segment, got bag ", next, " in none.");
}

// Checks that the outputs of the segments fill [0, elements), each element once. Outputs lie one after the other,
// either those of one segment, or rows of several segments side by side: these have one stride, the width of their row,
// and the same number of bags.
inline void check_outputs_tile(const char* op, std::vector<Segment> segments, const std::vector<TableLayout>& tables,
                               int64_t elements) {
  std::erase_if(segments, [](const Segment& segment) { return segment.bags == 0; });
  std::ranges::sort(segments, {}, &Segment::out_offset);
  int64_t end = 0;  // the outputs so far fill [0, end)
  for (auto segment = segments.begin(); segment != segments.end();) {
    const int64_t bags = segment->bags;
    const int64_t width = bags == 1 ? tables[static_cast<size_t>(segment->table)].columns : segment->out_stride;
    int64_t place = end;
    while (place < end + width) {
      const bool fits = segment != segments.end() && segment->out_offset == place && segment->bags == bags &&
                        (bags == 1 || segment->out_stride == width);
      TORCHREC_DYN_CHECK(fits, op, ": expected segments whose outputs fill rows of ", width,
                         " elements side by side, got a gap or an overlap at element ", place, ".");
      place += tables[static_cast<size_t>(segment++->table)].columns;
    }
    TORCHREC_DYN_CHECK(place == end + width, op, ": expected segments whose outputs fill rows of ", width,
                       " elements side by side, got ", place - end, ".");
    end += bags * width;
  }
  check_size(op, "the elements that the segments cover", elements, end);
}

// Checks offsets [bags + 1], given in memory of the host.
inline void check_offsets(const char* op, const int64_t* offsets, int64_t bags, int64_t ids) {
  TORCHREC_DYN_CHECK(offsets[0] >= 0 && offsets[bags] <= ids, op, ": expected offsets inside the ids [0, ", ids,
                     "], got ", offsets[0], " to ", offsets[bags], ". Do lengths and values agree?");
  bool ascends = true;
  for (int64_t b = 0; b < bags; ++b) ascends &= offsets[b] <= offsets[b + 1];
  for (int64_t b = 0; b < bags && !ascends; ++b)
    TORCHREC_DYN_CHECK(offsets[b] <= offsets[b + 1], op, ": expected ascending offsets, got ", offsets[b], " before ",
                       offsets[b + 1], ". Are there negative lengths?");
}

// Adds segments that are right, in the order of their bags.
inline void add_segments(BagLists& bags, std::vector<Segment> segments) {
  bags.segments = std::move(segments);
  bags.first.push_back(0);
  for (const Segment& segment : bags.segments) bags.first.push_back(bags.first.back() + segment.bags);
}

// Reads the segments of `bags.count` bags. Checks them against an output of `elements` elements: they hold every bag
// and fill every element, once.
inline void read_segments(const char* op, BagLists& bags, const Tensor& segments,
                          const std::vector<TableLayout>& tables, int64_t elements) {
  check_tensor(op, "segments", segments, ScalarType::Long);
  TORCHREC_DYN_CHECK(segments.dim() == 2 && segments.size(1) == 5, op, ": expected segments of shape [S, 5], got ",
                     segments.dim(), " dimensions.");
  std::vector<Segment> read;
  const int64_t* line = const_data<int64_t>(segments);
  for (int64_t s = 0; s < segments.size(0); ++s, line += 5) {
    const Segment segment{line[0], line[1], line[2], line[3], line[4]};
    TORCHREC_DYN_CHECK(segment.table >= 0 && segment.table < static_cast<int64_t>(tables.size()), op,
                       ": expected a segment of a table in [0, ", tables.size(), "), got ", segment.table, ".");
    TORCHREC_DYN_CHECK(segment.first_bag >= 0 && segment.bags >= 0 && segment.bags <= bags.count - segment.first_bag,
                       op, ": expected a segment inside ", bags.count, " bags, got ", segment.bags, " from ",
                       segment.first_bag, ".");
    const int64_t columns = tables[static_cast<size_t>(segment.table)].columns;
    const __int128 last = static_cast<__int128>(segment.bags - 1) * segment.out_stride + segment.out_offset + columns;
    TORCHREC_DYN_CHECK(
        segment.bags == 0 || (segment.out_offset >= 0 && segment.out_stride >= columns && last <= elements), op,
        ": expected a segment's output inside ", elements, " elements, got offset ", segment.out_offset, " and stride ",
        segment.out_stride, ".");
    read.push_back(segment);
  }
  // Sorted in the order of the bags, whatever the order of the outputs: a walk over the segments of a table then meets
  // its ids in the order of the batch, and the backward sums in this order.
  std::ranges::sort(read, {}, &Segment::first_bag);
  check_bags_tile(op, read, bags.count);
  check_outputs_tile(op, read, tables, elements);
  add_segments(bags, std::move(read));
}

// True if the numbers are 0, 1, 2, ...
inline bool counts_up(const int64_t* numbers, int64_t size) {
  int64_t difference = 0;  // of bits: every level of x86-64 has vectors for them, and no branch ends the loop
  for (int64_t i = 0; i < size; ++i) difference |= numbers[i] ^ i;
  return difference == 0;
}

// Reads the description of the bags of `ids` ids, and checks all of it, but offsets only if the host reads them. In
// all, this takes time for each segment and each offset, not for each id.
inline BagLists read_bags(const char* op, const std::optional<Tensor>& offsets, const Tensor& segments,
                          const std::vector<TableLayout>& tables, int64_t ids, int64_t elements, const Device& device,
                          bool reads_offsets) {
  BagLists bags;
  bags.count = ids;
  if (offsets) {
    check_tensor(op, "offsets", *offsets, ScalarType::Long, device);
    TORCHREC_DYN_CHECK(offsets->numel() >= 1, op, ": expected at least one offset, got none.");
    bags.offsets = const_data<int64_t>(*offsets);
    bags.count = offsets->numel() - 1;
  }
  if (bags.offsets != nullptr && reads_offsets) {
    // Bags of one id each are a sequence: the loops over them read no offsets.
    if (bags.count == ids && counts_up(bags.offsets, ids + 1))
      bags.offsets = nullptr;
    else
      check_offsets(op, bags.offsets, bags.count, ids);
  }
  read_segments(op, bags, segments, tables, elements);
  return bags;
}

inline const float* bag_weight_data(const char* op, const std::optional<Tensor>& bag_weights, int64_t ids,
                                    const Device& device) {
  check_numbers(op, "bag_weights", bag_weights, ScalarType::Float, ids, device);
  return const_data<float>(bag_weights);
}

inline void check_rows_inside(const char* op, bool inside, int64_t capacity) {
  TORCHREC_DYN_CHECK(inside, op, ": expected rows in [-1, ", capacity, "), got one outside.");
}

// The error of ReportWrongBags.
inline void raise_wrong_bags(const int64_t* words) {
  const auto* op = reinterpret_cast<const char*>(words[0]);
  if (words[1] != 0) check_offsets(op, words + 2, 1, words[4]);
  check_rows_inside(op, false, words[2]);
}

inline void check_pooled_type(const char* op, ScalarType dtype) {
  TORCHREC_DYN_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16, op,
                     ": expected an output of dtype float32, float16 or bfloat16, got ", dtype_name(dtype), ".");
}

// Checks that every row is absent (-1) or inside its table: the hot loops do not check it.
inline void check_rows_of_bags(const char* op, const Bags& bags, const std::vector<TableLayout>& tables,
                               const int64_t* rows) {
  for_each_range(bags.total(), 256, [&](int64_t begin, int64_t end) {
    for_bags(bags, begin, end, [&](const Segment& segment, int64_t first, int64_t last) {
      const int64_t capacity = tables[static_cast<size_t>(segment.table)].capacity();
      const int64_t until = bags.end(last - 1);
      uint64_t signs = 0;  // without comparisons, for which not every level of x86-64 has vectors
      for (int64_t i = bags.begin(first); i < until; ++i) {
        const auto row = static_cast<uint64_t>(rows[i]);
        signs |= (row + 1) | (static_cast<uint64_t>(capacity) - 1 - row);
      }
      check_rows_inside(op, signs >> 63 == 0, capacity);
    });
  });
}

}  // namespace torchrec_dyn
