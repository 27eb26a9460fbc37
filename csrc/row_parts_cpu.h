// Parts of the rows of several tables, cut so that the threads share all ids evenly, whatever share of them a table
// has. Parts of a table have no row in common.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <numeric>
#include <tuple>
#include <vector>

namespace torchrec_dyn {

// The rows of a table of which some bits are `part`, a number below `parts`.
struct RowPart {
  int64_t table;
  int64_t ids;  // about as many
  int64_t part;
  int64_t parts;  // of the table; a power of 2
};

// Each part looks at all ids of its table: more parts would cost more than they bring.
constexpr int64_t kMostParts = 64;

// The parts of tables of ids[t] ids. Where the parts of a table are even, each has at most 1 / `least` of all ids, or
// its table has kMostParts. Large parts come first: one that began last would keep the other threads waiting. Parts of
// one power of 2 are in the order of their tables, which lie side by side in the rows of the output.
inline std::vector<RowPart> row_parts(const std::vector<int64_t>& ids, int64_t least) {
  const int64_t all = std::reduce(ids.begin(), ids.end());
  std::vector<RowPart> list;
  list.reserve(ids.size());
  for (size_t t = 0; t < ids.size(); ++t) {
    if (ids[t] == 0) continue;
    int64_t parts = 1;
    while (parts < kMostParts && ids[t] * least > all * parts) parts *= 2;
    for (int64_t part = 0; part < parts; ++part) list.push_back({static_cast<int64_t>(t), ids[t] / parts, part, parts});
  }
  if (least > 1)
    std::ranges::sort(list, {}, [](const RowPart& one) {
      // Libraries differ in the type of a width, which may be unsigned.
      return std::tuple(-static_cast<int>(std::bit_width(static_cast<uint64_t>(one.ids))), one.table, one.part);
    });
  return list;
}

}  // namespace torchrec_dyn
