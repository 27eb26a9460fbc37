// The arguments of update_rows_ and update_prepared_, checked and read for every device.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "checks.h"
#include "lookup/bags_arguments.h"
#include "lookup/prepared_tables.h"
#include "lookup/row_update.h"
#include "storage/blocks_arguments.h"
#include "storage/row_marks.h"
#include "struct_kernel.h"

namespace torchrec_dyn {

// A batch whose gradients are written: the first arguments of both ops, in the order of the schema.
struct UpdateBatch {
  ArgumentReader& arguments;

  Tensor grad = arguments.read<Tensor>();
  Tensor ids = arguments.read<Tensor>();
  Tensor rows = arguments.read<Tensor>();
  std::optional<Tensor> offsets = arguments.read<std::optional<Tensor>>();
  std::optional<Tensor> bag_weights = arguments.read<std::optional<Tensor>>();
  Tensor segments = arguments.read<Tensor>();
  Tensor streams = arguments.read<Tensor>();
  bool mean = arguments.read<bool>();
  std::vector<double> hyper = arguments.read<std::vector<double>>();
  std::vector<double> grad_scales = arguments.read<std::vector<double>>();
  std::optional<Tensor> senders = arguments.read<std::optional<Tensor>>();
  std::vector<Tensor> marks = arguments.read<std::vector<Tensor>>();
  std::optional<Tensor> mark_layout = arguments.read<std::optional<Tensor>>();
};

struct UpdateCall {
  ArgumentReader arguments;

  UpdateBatch batch{arguments};
  std::vector<Tensor> weights = arguments.read<std::vector<Tensor>>();
  std::vector<Tensor> states = arguments.read<std::vector<Tensor>>();
  Tensor layout = arguments.read<Tensor>();
  int64_t optimizer = arguments.read<int64_t>();
  std::vector<int64_t> on_nonfinite = arguments.read<std::vector<int64_t>>();
  std::vector<Tensor> nonfinite = arguments.read<std::vector<Tensor>>();

  PreparedTables tables(const Device& device) const {
    const char* op = "update_rows_";
    PreparedTables tables = rows_of(op, weights, layout, device);
    read_states(op, tables, optimizer, weights, states, on_nonfinite, nonfinite);
    tables.written.writes(weights).writes(states).writes(nonfinite).check(op);
    return tables;
  }
};

struct PreparedUpdateCall {
  ArgumentReader arguments;

  UpdateBatch batch{arguments};
  Handles::Shared tables = Handles::all().get("update_prepared_", arguments.read<Tensor>());
};

// What the host has read of the arguments.
struct UpdateArguments {
  std::vector<TableLayout> marks;  // empty: no table keeps marks
  BagLists bags;
  const float* bag_weights;  // or null
  UpdateRule rule;
};

inline bool has(const std::vector<OnNonfinite>& tables, OnNonfinite what) {
  return std::ranges::find(tables, what) != tables.end();
}

inline UpdateRule read_rule(const char* op, Optimizer optimizer, const std::vector<double>& hyper) {
  UpdateRule rule{optimizer, {}};
  check_size(op, "the number of hyper-parameters", rule_facts(rule.optimizer).hyper_count,
             static_cast<int64_t>(hyper.size()));
  std::ranges::transform(hyper, rule.hyper, [](double number) { return static_cast<float>(number); });
  if (rule.optimizer == Optimizer::kRowwiseAdagrad) {
    const double mode = hyper[3];  // as it was sent, not as a float
    TORCHREC_DYN_CHECK(mode == 0.0 || mode == 1.0 || mode == 2.0, op, ": expected weight_decay_mode in [0, 2], got ",
                       mode, ".");
  }
  TORCHREC_DYN_CHECK(rule.optimizer != Optimizer::kFtrl || rule.hyper[0] > 0.0f, op,
                     ": expected a learning rate above 0 with FTRL, which divides by it, got ", hyper[0],
                     ". Begin a warm-up above 0, and freeze tables that must not learn.");
  return rule;
}

// Reads the marks of T tables; empty if no table keeps marks.
inline std::vector<TableLayout> read_mark_layout(const char* op, const std::optional<Tensor>& layout, size_t tables) {
  if (!layout) return {};
  // No list of blocks: the last block has all its bytes, since its stripes lie all over it.
  const std::vector<TableLayout> marks = read_layout(op, *layout, {}, true);
  check_size(op, "the lines of mark_layout", static_cast<int64_t>(tables), static_cast<int64_t>(marks.size()));
  for (const TableLayout& table : marks)
    TORCHREC_DYN_CHECK(table.shift >= kLeastMarkShift, op, ": expected a shift of at least ", kLeastMarkShift,
                       " in mark_layout, got ", table.shift, ".");
  return marks;
}

// streams [T, 3]: rounding key, first column, step.
inline void check_streams(const char* op, const Tensor& streams, size_t tables) {
  check_size(op, "the elements of streams", 3 * static_cast<int64_t>(tables), streams.numel());
  const int64_t* stream = const_data<int64_t>(streams);
  for (size_t table = 0; table < tables; ++table, stream += 3)
    TORCHREC_DYN_CHECK(stream[1] >= 0 && stream[1] < (int64_t{1} << 31), op,
                       ": expected a first column in [0, 2^31) in streams, got ", stream[1], ".");
}

// A table without rows in the batch may be at step 0: it has not been trained yet.
inline bool may_have_rows(const UpdateRule& rule, int64_t step) {
  return !rule_facts(rule.optimizer).counts_steps || step >= 1;
}
inline void check_step(const char* op, bool is_valid, int64_t step) {
  TORCHREC_DYN_CHECK(is_valid, op, ": expected a step of at least 1 in streams, got ", step, ".");
}

// `lowest` and `highest`: of all senders and -1.
inline void check_sender_range(const char* op, int64_t lowest, int64_t highest) {
  TORCHREC_DYN_CHECK(lowest == -1 && highest < kMostSenders, op, ": expected senders in [-1, ", kMostSenders, "), got ",
                     lowest, " to ", highest, ".");
}

inline void check_nonfinite(const char* op, int64_t rows) {
  TORCHREC_DYN_CHECK(
      rows == 0, op, ": expected finite weights and optimizer states after the update, got NaN or infinity in ", rows,
      " rows of tables with on_nonfinite=\"error\". No row of the tables that are updated together has ",
      "changed; \"nonfinite\" in the tables' stats() counts the rows. Look for the loss or the input that is "
      "not finite, or set on_nonfinite=\"skip\".");
}

// The error of ReportWrongUpdate.
inline void raise_wrong_update(const int64_t* words) {
  const auto* op = reinterpret_cast<const char*>(words[0]);
  const int64_t* numbers = words + 2;
  switch (static_cast<WrongContents>(words[1])) {
    case WrongContents::kOffsets:
      return check_offsets(op, numbers, 1, numbers[2]);
    case WrongContents::kRows:
      return check_rows_inside(op, false, numbers[0]);
    case WrongContents::kSenders:
      return check_sender_range(op, numbers[0], numbers[1]);
    case WrongContents::kStep:
      return check_step(op, false, numbers[0]);
    case WrongContents::kNonfinite:
      return check_nonfinite(op, numbers[0]);
  }
}

// Checks all arguments but the contents of ids, rows and senders, and of offsets unless `reads_offsets`.
inline UpdateArguments read_update(const char* op, const UpdateBatch& call, const PreparedTables& tables,
                                   bool reads_offsets) {
  const Device& device = tables.device;
  const int64_t ids = call.ids.numel();
  check_tensor(op, "grad", call.grad, ScalarType::Float, device);
  check_tensor(op, "ids", call.ids, ScalarType::Long, device);
  check_numbers(op, "rows", call.rows, ScalarType::Long, ids, device);
  check_numbers(op, "senders", call.senders, ScalarType::Int, ids, device);
  check_tensor(op, "streams", call.streams, ScalarType::Long);
  TORCHREC_DYN_CHECK(ids < std::numeric_limits<uint32_t>::max(), op, ": expected fewer than 2^32 - 1 ids, got ", ids,
                     ". Split the batch.");
  TORCHREC_DYN_CHECK(!call.offsets || call.offsets->numel() <= int64_t{1} << 32, op,
                     ": expected fewer than 2^32 bags, got ", call.offsets->numel() - 1, ". Split the batch.");
  UpdateArguments read;
  check_streams(op, call.streams, tables.count());
  read.bags = read_bags(op, call.offsets, call.segments, tables.layout, ids, call.grad.numel(), device, reads_offsets);
  read.marks = read_mark_layout(op, call.mark_layout, tables.count());
  read.bag_weights = bag_weight_data(op, call.bag_weights, ids, device);
  read.rule = read_rule(op, tables.optimizer, call.hyper);
  check_size(op, "the number of grad_scales", static_cast<int64_t>(tables.count()),
             static_cast<int64_t>(call.grad_scales.size()));
  SeparateMemory memory;
  memory.writes(call.marks).reads(call.grad, call.ids, call.rows, call.offsets, call.bag_weights, call.senders);
  memory.check(op, &tables.written);
  return read;
}

// The tables with the capacities that rows must be below: the marks of a table may have fewer rows.
inline std::vector<TableLayout> updated_rows(const UpdateArguments& read, std::vector<TableLayout> tables) {
  for (size_t t = 0; t < read.marks.size(); ++t)
    if (const TableLayout& marks = read.marks[t]; marks.blocks > 0 && marks.capacity() < (tables[t].capacity() + 7) / 8)
      tables[t] = {0, marks.blocks, marks.shift + 3, 1};
  return tables;
}

// The tables of a call, and the marks that they read. T: the element type of rows.
template <typename T>
struct UpdatedTables {
  UpdatedTables(const char* op, const UpdateBatch& call, const UpdateArguments& read, const PreparedTables& prepared)
      : marks(op, "marks", call.marks, prepared.device) {
    const RuleFacts facts = rule_facts(prepared.optimizer);
    const int64_t* stream = const_data<int64_t>(call.streams);
    tables.reserve(prepared.count());
    for (size_t t = 0; t < prepared.count(); ++t, stream += 3) {
      tables.push_back({prepared.rows<T>(t),
                        {},
                        read.marks.empty() ? MarkBits{} : bits_of(marks.words(read.marks[t])),
                        Stream{static_cast<uint64_t>(stream[0]), stream[1], stream[2]},
                        bias_correction(read.rule, stream[2]),
                        static_cast<float>(call.grad_scales[t])});
      for (int s = 0; s < facts.state_count(); ++s) tables.back().states[s] = prepared.state(t, s, facts.states[s]);
    }
  }
  UpdatedTables(const UpdatedTables&) = delete;
  UpdatedTables& operator=(const UpdatedTables&) = delete;

  BlockList<uint8_t> marks;
  std::vector<UpdatedTable<T>> tables;
};

}  // namespace torchrec_dyn
