// The arguments of find_and_pool and of pool_prepared_, checked for every device.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "checks.h"
#include "lookup/bags_arguments.h"
#include "lookup/prepared_tables.h"

namespace torchrec_dyn {

// A written output, and the new ids, or null.
inline const int64_t* check_pooled_into(const char* op, const PreparedTables& tables, const Tensor& out,
                                        const std::optional<Tensor>& new_index, const Tensor& rows,
                                        const std::optional<Tensor>& initial_ids, const std::optional<Tensor>& offsets,
                                        const std::optional<Tensor>& bag_weights) {
  check_pooled_type(op, out.scalar_type());
  check_tensor(op, "out", out, out.scalar_type(), tables.device);
  SeparateMemory memory;
  memory.writes(out)
      .reads(rows)
      .reads(offsets)
      .reads(bag_weights)
      .reads(new_index)
      .reads(initial_ids)
      .check(op, &tables.written);
  if (!new_index.has_value()) return nullptr;
  check_tensor(op, "new_index", *new_index, ScalarType::Long, tables.device);
  check_size(op, "the number of new_index", rows.numel(), new_index->numel());
  return const_data<int64_t>(*new_index);
}

// The ids of rows [N] whose initial rows are shown where they have no row, or null.
inline const int64_t* initial_id_data(const char* op, const PreparedTables& tables,
                                      const std::optional<Tensor>& initial_ids, int64_t ids) {
  if (!initial_ids.has_value()) return nullptr;
  check_tensor(op, "initial_ids", *initial_ids, ScalarType::Long, tables.device);
  check_size(op, "the number of initial_ids", ids, initial_ids->numel());
  return tables.initial.empty() ? nullptr : const_data<int64_t>(*initial_ids);
}

// Which batches are pooled: none, those without absent ids, or all. A device pools before it knows the ids.
enum class Pools : int64_t { kNothing, kKnown, kAll };

// The batch of a call of find_and_pool, but the contents of its tensors.
struct FoundBatch {
  Handles::Shared tables;
  int64_t bags;
  int64_t features;
  const int64_t* first_bags;      // [features + 1]
  const int64_t* first_features;  // [T + 1]
  const float* bag_weights;       // or null
  Pools pools;
  int64_t elements;  // of the output
};

inline void check_firsts(const char* op, const char* name, const Tensor& firsts, int64_t end) {
  check_tensor(op, name, firsts, ScalarType::Long);
  const int64_t* first = const_data<int64_t>(firsts);
  const int64_t count = firsts.numel();
  bool ascends = count > 0 && first[0] == 0 && (end < 0 || first[count - 1] == end);
  for (int64_t i = 1; i < count; ++i) ascends &= first[i - 1] <= first[i];
  TORCHREC_DYN_CHECK(ascends, op, ": expected ", name, " that ascend from 0 to the number of parts, got others.");
}

inline void check_integers(const char* op, const char* name, const std::optional<Tensor>& numbers, int64_t count,
                           const Device& device) {
  if (!numbers.has_value()) return;
  const bool is_short = numbers->scalar_type() == ScalarType::Int;
  check_tensor(op, name, *numbers, is_short ? ScalarType::Int : ScalarType::Long, device);
  check_size(op, (std::string("the number of ") + name).c_str(), count, numbers->numel());
}

inline FoundBatch read_batch(const char* op, const Tensor& ids, const std::optional<Tensor>& lengths,
                             const std::optional<Tensor>& offsets, const std::optional<Tensor>& bag_weights,
                             const Tensor& first_bags, const Tensor& first_features,
                             const std::optional<Tensor>& segments, const Tensor& handle, int64_t pools,
                             int64_t elements, ScalarType dtype) {
  FoundBatch batch{};
  batch.tables = Handles::all().get(op, handle);
  const PreparedTables& tables = *batch.tables;
  check_size(op, "the number of maps", static_cast<int64_t>(tables.count()), static_cast<int64_t>(tables.maps.size()));
  check_tensor(op, "ids", ids, ScalarType::Long, tables.device);
  TORCHREC_DYN_CHECK(tables.count() > 0 || ids.numel() == 0, op, ": expected no ids without tables, got ", ids.numel(),
                     ".");
  check_firsts(op, "first_bags", first_bags, -1);
  batch.features = first_bags.numel() - 1;
  batch.first_bags = const_data<int64_t>(first_bags);
  batch.bags = batch.first_bags[batch.features];
  TORCHREC_DYN_CHECK(batch.bags < int64_t{1} << 48, op, ": expected fewer than 2^48 bags, got ", batch.bags, ".");
  check_firsts(op, "first_features", first_features, batch.features);
  check_size(op, "the number of first_features", static_cast<int64_t>(tables.count()) + 1, first_features.numel());
  batch.first_features = const_data<int64_t>(first_features);
  TORCHREC_DYN_CHECK(lengths || offsets, op, ": expected lengths or offsets of the bags, got none.");
  check_integers(op, "lengths", lengths, batch.bags, tables.device);
  check_integers(op, "offsets", offsets, batch.bags + 1, tables.device);
  batch.bag_weights = bag_weight_data(op, bag_weights, ids.numel(), tables.device);
  check_pooled_type(op, dtype);
  TORCHREC_DYN_CHECK(pools >= 0 && pools <= 2, op, ": expected pools in [0, 2], got ", pools, ".");
  batch.pools = static_cast<Pools>(pools);
  batch.elements = batch.pools == Pools::kNothing ? 0 : elements;
  TORCHREC_DYN_CHECK(elements >= 0, op, ": expected elements >= 0, got ", elements, ".");
  if (segments.has_value() || batch.pools == Pools::kNothing) return batch;
  for (const TableLayout& table : tables.layout)
    check_size(op, "the columns of each table of sequences", tables.layout.front().columns, table.columns);
  batch.elements = tables.layout.empty() ? 0 : ids.numel() * tables.layout.front().columns;
  return batch;
}

// The segments of sequences: each id is a bag, and table_offsets [T + 1] say where the ids of each table begin.
inline std::vector<Segment> sequence_segments(const PreparedTables& tables, const std::vector<int64_t>& table_offsets) {
  std::vector<Segment> segments;
  for (size_t t = 0; t < tables.count(); ++t) {
    const int64_t begin = table_offsets[t], columns = tables.layout[t].columns;
    segments.push_back({static_cast<int64_t>(t), begin, table_offsets[t + 1] - begin, begin * columns, columns});
  }
  return segments;
}

// Where the ids of each table begin, and the end of the last, of `begins`, which are those of each feature.
inline std::vector<int64_t> table_offsets_of(const FoundBatch& batch, const int64_t* begins) {
  std::vector<int64_t> offsets;
  for (size_t t = 0; t <= batch.tables->count(); ++t) offsets.push_back(begins[batch.first_features[t]]);
  return offsets;
}

}  // namespace torchrec_dyn
