// The arguments of gather_pool, pool_prepared_ and weights_grad_prepared, checked and read for every device.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "checks.h"
#include "lookup/bags_arguments.h"
#include "lookup/prepared_tables.h"
#include "struct_kernel.h"

namespace torchrec_dyn {

// The bags of a call. Contents on a device are not checked.
struct PooledBags {
  const char* op;
  const PreparedTables& tables;
  const Tensor& rows;
  bool mean;
  BagLists lists = {};
  const float* bag_weights = nullptr;    // or null
  const int64_t* new_index = nullptr;    // null: all bags are pooled, and on the CPU anyway
  const int64_t* initial_ids = nullptr;  // whose initial rows are shown, or null
  bool is_checked = false;               // the caller of a device's op has checked the offsets

  // Checks the rows and reads their bags, of `elements` numbers in all.
  void read_bags_of(const std::optional<Tensor>& offsets, const Tensor& segments, int64_t elements,
                    bool reads_offsets) {
    check_tensor(op, "rows", rows, ScalarType::Long, tables.device);
    lists = read_bags(op, offsets, segments, tables.layout, rows.numel(), elements, tables.device, reads_offsets);
  }
  // `ids`: of the rows; initial rows are shown where an id has none.
  void read_initial_ids(const std::optional<Tensor>& ids) {
    check_numbers(op, "initial_ids", ids, ScalarType::Long, rows.numel(), tables.device);
    if (!tables.initial.empty()) initial_ids = const_data<int64_t>(ids);
  }
};

struct GatherPoolCall {
  ArgumentReader arguments;

  Tensor rows = arguments.read<Tensor>();
  std::optional<Tensor> offsets = arguments.read<std::optional<Tensor>>();
  std::optional<Tensor> bag_weights = arguments.read<std::optional<Tensor>>();
  std::vector<Tensor> weights = arguments.read<std::vector<Tensor>>();
  Tensor layout = arguments.read<Tensor>();
  Tensor segments = arguments.read<Tensor>();
  bool mean = arguments.read<bool>();
  int64_t elements = arguments.read<int64_t>();
  ScalarType dtype = arguments.read<ScalarType>();

  PreparedTables tables(const Device& device) const {
    check_tensor("gather_pool", "rows", rows, ScalarType::Long, device);
    TORCHREC_DYN_CHECK(elements >= 0, "gather_pool: expected elements >= 0, got ", elements, ".");
    return rows_of("gather_pool", weights, layout, rows.device());
  }

  PooledBags bags(const PreparedTables& prepared, bool reads_offsets) const {
    PooledBags given{"gather_pool", prepared, rows, mean};
    given.read_bags_of(offsets, segments, elements, reads_offsets);
    given.bag_weights = bag_weight_data(given.op, bag_weights, rows.numel(), prepared.device);
    check_pooled_type(given.op, dtype);
    return given;
  }
};

struct PoolPreparedCall {
  static constexpr const char* kOp = "pool_prepared_";

  ArgumentReader arguments;

  Tensor out = arguments.read<Tensor>();
  std::optional<Tensor> new_index = arguments.read<std::optional<Tensor>>();
  Tensor rows = arguments.read<Tensor>();
  std::optional<Tensor> initial_ids = arguments.read<std::optional<Tensor>>();
  std::optional<Tensor> offsets = arguments.read<std::optional<Tensor>>();
  std::optional<Tensor> bag_weights = arguments.read<std::optional<Tensor>>();
  Tensor segments = arguments.read<Tensor>();
  Handles::Shared tables = Handles::all().get(kOp, arguments.read<Tensor>());
  bool mean = arguments.read<bool>();

  PooledBags bags(bool reads_offsets) const {
    PooledBags given{kOp, *tables, rows, mean};
    check_pooled_type(kOp, out.scalar_type());
    check_tensor(kOp, "out", out, out.scalar_type(), tables->device);
    SeparateMemory memory;
    memory.writes(out).reads(rows, offsets, bag_weights, new_index, initial_ids).check(kOp, &tables->written);
    check_numbers(kOp, "new_index", new_index, ScalarType::Long, rows.numel(), tables->device);
    given.new_index = const_data<int64_t>(new_index);
    given.read_bags_of(offsets, segments, out.numel(), reads_offsets);
    given.read_initial_ids(initial_ids);
    given.bag_weights = bag_weight_data(kOp, bag_weights, rows.numel(), tables->device);
    given.is_checked = true;
    return given;
  }
};

struct WeightsGradCall {
  static constexpr const char* kOp = "weights_grad_prepared";

  ArgumentReader arguments;

  Tensor grad = arguments.read<Tensor>();
  Tensor rows = arguments.read<Tensor>();
  std::optional<Tensor> initial_ids = arguments.read<std::optional<Tensor>>();
  std::optional<Tensor> offsets = arguments.read<std::optional<Tensor>>();
  Tensor segments = arguments.read<Tensor>();
  Handles::Shared tables = Handles::all().get(kOp, arguments.read<Tensor>());
  bool mean = arguments.read<bool>();

  PooledBags bags(bool reads_offsets) const {
    PooledBags given{kOp, *tables, rows, mean};
    check_tensor(kOp, "grad", grad, ScalarType::Float, tables->device);
    given.read_bags_of(offsets, segments, grad.numel(), reads_offsets);
    given.read_initial_ids(initial_ids);
    return given;
  }
};

}  // namespace torchrec_dyn
