// The arguments of find_and_pool, checked and read for every device.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "checks.h"
#include "lookup/bags_arguments.h"
#include "lookup/prepared_tables.h"
#include "struct_kernel.h"

namespace torchrec_dyn {

struct FindAndPoolCall {
  ArgumentReader arguments;

  Tensor ids = arguments.read<Tensor>();
  std::optional<Tensor> lengths = arguments.read<std::optional<Tensor>>();
  std::optional<Tensor> offsets = arguments.read<std::optional<Tensor>>();
  std::optional<Tensor> bag_weights = arguments.read<std::optional<Tensor>>();
  Tensor first_bags = arguments.read<Tensor>();
  Tensor first_features = arguments.read<Tensor>();
  std::optional<Tensor> segments = arguments.read<std::optional<Tensor>>();
  Tensor handle = arguments.read<Tensor>();
  bool mean = arguments.read<bool>();
  int64_t pools = arguments.read<int64_t>();
  int64_t collects = arguments.read<int64_t>();
  int64_t output_rows = arguments.read<int64_t>();
  int64_t columns = arguments.read<int64_t>();
  ScalarType dtype = arguments.read<ScalarType>();
};

// Which batches are pooled: none, those without absent ids, or all. A device pools before it knows the ids.
enum class Pools : int64_t { kNothing, kKnown, kAll };

// Whether the distinct absent ids of a batch are listed. A device that expects some lists them before its host waits.
enum class Collects : int64_t { kNever, kIfAbsent, kExpected };

// The result `numbers`, and behind it a word of a device.
struct BatchNumbers {
  BatchNumbers(int64_t* words, int64_t features, int64_t tables)
      : begins(words),
        table_offsets(begins + features + 1),
        absent(table_offsets + tables + 1),
        new_offsets(absent + tables),
        is_wrong(new_offsets + tables + 1) {}

  static int64_t count(int64_t features, int64_t tables) { return features + 3 * tables + 3; }

  int64_t* begins;         // [F + 1] of the ids of each feature
  int64_t* table_offsets;  // [T + 1] of the ids of each table
  int64_t* absent;         // [T]
  int64_t* new_offsets;    // [T + 1] of the new ids of each table
  int64_t* is_wrong;       // the word: 1 if lengths or offsets are wrong, else 0
};

// out, rows, offsets, numbers, new_ids, new_counts, new_index (csrc/library.cpp).
using FindAndPoolResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// The batch of a call of find_and_pool, but the contents of its tensors.
struct FoundBatch {
  Handles::Shared tables;
  int64_t bags;
  int64_t features;
  const int64_t* first_bags;      // [features + 1]
  const int64_t* first_features;  // [T + 1]
  const float* bag_weights;       // or null
  Pools pools;
  Collects collects;
  int64_t output_rows;  // of the output
  int64_t columns;      // of the output; 0: it has one dimension

  int64_t elements() const { return output_rows * (columns > 0 ? columns : 1); }
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

inline FoundBatch read_batch(const char* op, const FindAndPoolCall& call) {
  FoundBatch batch{};
  batch.tables = Handles::all().get(op, call.handle);
  const PreparedTables& tables = *batch.tables;
  const int64_t ids = call.ids.numel();
  check_size(op, "the number of maps", static_cast<int64_t>(tables.count()), static_cast<int64_t>(tables.maps.size()));
  check_tensor(op, "ids", call.ids, ScalarType::Long, tables.device);
  TORCHREC_DYN_CHECK(tables.count() > 0 || ids == 0, op, ": expected no ids without tables, got ", ids, ".");
  check_firsts(op, "first_bags", call.first_bags, -1);
  batch.features = call.first_bags.numel() - 1;
  batch.first_bags = const_data<int64_t>(call.first_bags);
  batch.bags = batch.first_bags[batch.features];
  TORCHREC_DYN_CHECK(batch.bags < int64_t{1} << 48, op, ": expected fewer than 2^48 bags, got ", batch.bags, ".");
  check_firsts(op, "first_features", call.first_features, batch.features);
  check_size(op, "the number of first_features", static_cast<int64_t>(tables.count()) + 1, call.first_features.numel());
  batch.first_features = const_data<int64_t>(call.first_features);
  TORCHREC_DYN_CHECK(call.lengths || call.offsets, op, ": expected lengths or offsets of the bags, got none.");
  check_integers(op, "lengths", call.lengths, batch.bags, tables.device);
  check_integers(op, "offsets", call.offsets, batch.bags + 1, tables.device);
  batch.bag_weights = bag_weight_data(op, call.bag_weights, ids, tables.device);
  check_pooled_type(op, call.dtype);
  TORCHREC_DYN_CHECK(call.pools >= 0 && call.pools <= 2, op, ": expected pools in [0, 2], got ", call.pools, ".");
  batch.pools = static_cast<Pools>(call.pools);
  TORCHREC_DYN_CHECK(call.collects >= 0 && call.collects <= 2, op, ": expected collects in [0, 2], got ", call.collects,
                     ".");
  batch.collects = static_cast<Collects>(call.collects);
  TORCHREC_DYN_CHECK(call.output_rows >= 0 && call.columns >= 0 &&
                         (call.columns == 0 || call.output_rows < (int64_t{1} << 62) / call.columns),
                     op, ": expected output_rows and columns >= 0, of fewer than 2^62 elements, got ", call.output_rows,
                     " and ", call.columns, ".");
  if (batch.pools == Pools::kNothing) return batch;
  batch.output_rows = call.output_rows;
  batch.columns = call.columns;
  if (call.segments.has_value()) return batch;
  for (const TableLayout& table : tables.layout)
    check_size(op, "the columns of each table of sequences", tables.layout.front().columns, table.columns);
  batch.output_rows = ids;
  batch.columns = tables.layout.empty() ? 0 : tables.layout.front().columns;
  return batch;
}

// The segments of sequences: each id is a bag, and table_offsets [T + 1] say where the ids of each table begin.
inline std::vector<Segment> sequence_segments(const PreparedTables& tables, const int64_t* table_offsets) {
  std::vector<Segment> segments;
  for (size_t t = 0; t < tables.count(); ++t) {
    const int64_t begin = table_offsets[t], columns = tables.layout[t].columns;
    segments.push_back({static_cast<int64_t>(t), begin, table_offsets[t + 1] - begin, begin * columns, columns});
  }
  return segments;
}

}  // namespace torchrec_dyn
