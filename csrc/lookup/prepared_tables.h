// The tables of a group, checked once for many calls: their maps, and the blocks of their rows, optimizer states and
// scores.
//
// prepare_tables returns a handle: a tensor [1] int64 with a random number, by which later ops find the tables as long
// as the handle lives. A copy of the handle does not keep them. Prepared tables never change: a table that gets other
// slots or blocks is prepared anew (docs/dev/decisions/0046).
#pragma once

#include <pthread.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "checks.h"
#include "life/scores.h"
#include "lookup/row_update.h"
#include "storage/blocks_arguments.h"
#include "storage/id_map_arguments.h"
#include "storage/row_store_arguments.h"
#include "struct_kernel.h"

namespace torchrec_dyn {

struct PreparedTables {
  Device device = DeviceType::CPU;
  std::vector<IdMapView> maps;      // [T], or none for ops that find no ids
  std::vector<TableLayout> layout;  // [T]
  std::variant<std::vector<float*>, std::vector<Float16*>, std::vector<BFloat16*>> weights;
  ScalarType row_type = ScalarType::Float;
  Optimizer optimizer = Optimizer::kSgd;
  std::vector<float*> states;             // of each state of the optimizer, one block for each block of `weights`
  std::vector<OnNonfinite> on_nonfinite;  // [T]
  std::vector<int64_t*> nonfinite;        // [T] where the refused rows of a table are counted; empty: all are kWrite
  std::vector<InitialTable> initial;      // [T], or none
  std::vector<int64_t> frozen;            // [T], 1 for a table that gets no rows for absent ids; empty: none is one
  std::vector<float> initial_states;      // the number in each state of the optimizer
  std::vector<uint64_t*> score_blocks;    // of all tables
  std::vector<ScoreBlocks> scores;        // [T], or none; capacity 0: the table keeps no scores
  SeparateMemory written;                 // what calls write of the tables
  std::vector<Tensor> kept;               // the tensors of all pointers, if the tables outlive the call

  size_t count() const { return layout.size(); }

  template <typename T>
  const std::vector<T*>& blocks() const {
    return std::get<std::vector<T*>>(weights);
  }

  template <typename T>
  RowBlocks<T> rows(size_t t) const {
    const TableLayout& table = layout[t];
    return {blocks<T>().data() + table.first_block, table.shift, table.columns, table.capacity()};
  }

  template <typename T>
  std::vector<RowBlocks<T>> all_rows() const {
    std::vector<RowBlocks<T>> all;
    all.reserve(count());
    for (size_t t = 0; t < count(); ++t) all.push_back(rows<T>(t));
    return all;
  }

  // True if ids of a table that gets rows for them are absent; absent [T].
  bool has_new(const int64_t* absent) const {
    for (size_t t = 0; t < count(); ++t)
      if (absent[t] > 0 && (frozen.empty() || frozen[t] == 0)) return true;
    return false;
  }

  // The state number `s` of a table, a rule's state of this width.
  RowBlocks<float> state(size_t t, int s, StateWidth width) const {
    const TableLayout& table = layout[t];
    const auto blocks = static_cast<int64_t>(states.size()) / rule_facts(optimizer).state_count();
    return {states.data() + s * blocks + table.first_block, table.shift, state_columns(width, table.columns),
            table.capacity()};
  }
};

// Reads the rows of T tables.
inline PreparedTables rows_of(const char* op, const std::vector<Tensor>& weights, const Tensor& layout,
                              const Device& device) {
  PreparedTables tables;
  tables.device = device;
  tables.layout = read_layout(op, layout, weights);
  if (!weights.empty()) tables.row_type = weights.front().scalar_type();
  dispatch_row_type(op, weights, [&](auto zero) {
    using T = decltype(zero);
    BlockList<T> blocks(op, "weights", weights, device);
    blocks.rows_of(tables.layout);
    tables.weights = blocks.pointers();
  });
  return tables;
}

// Reads the optimizer states of tables whose rows are read, and what becomes of rows that are not finite.
inline void read_states(const char* op, PreparedTables& tables, int64_t optimizer, const std::vector<Tensor>& weights,
                        const std::vector<Tensor>& states, const std::vector<int64_t>& on_nonfinite,
                        const std::vector<Tensor>& nonfinite) {
  constexpr auto kLast = static_cast<int64_t>(kLastOptimizer);
  TORCHREC_DYN_CHECK(optimizer >= 0 && optimizer <= kLast, op, ": expected optimizer in [0, ", kLast, "], got ",
                     optimizer, ".");
  tables.optimizer = static_cast<Optimizer>(optimizer);
  const RuleFacts facts = rule_facts(tables.optimizer);
  const auto blocks = static_cast<int64_t>(weights.size());
  check_size(op, "the number of blocks of states", facts.state_count() * blocks, static_cast<int64_t>(states.size()));
  BlockList<float> list(op, "states", states, tables.device);
  for (TableLayout table : tables.layout) {
    TORCHREC_DYN_CHECK(table.capacity() <= (int64_t{1} << 32), op,
                       ": expected at most 2^32 rows a table, got room for ", table.capacity(), ".");
    for (int s = 0; s < facts.state_count(); ++s, table.first_block += blocks)
      list.rows(table, state_columns(facts.states[s], table.columns));
  }
  tables.states = list.pointers();
  tables.on_nonfinite.assign(tables.count(), OnNonfinite::kWrite);
  if (on_nonfinite.empty() && nonfinite.empty()) return;
  const auto count = static_cast<int64_t>(tables.count());
  check_size(op, "the number of on_nonfinite", count, static_cast<int64_t>(on_nonfinite.size()));
  check_size(op, "the tensors of nonfinite", count, static_cast<int64_t>(nonfinite.size()));
  for (size_t t = 0; t < tables.count(); ++t) {
    const int64_t what = on_nonfinite[t];
    TORCHREC_DYN_CHECK(what >= 0 && what <= static_cast<int64_t>(OnNonfinite::kError), op,
                       ": expected on_nonfinite in [0, 2], got ", what, ".");
    tables.on_nonfinite[t] = static_cast<OnNonfinite>(what);
    check_tensor(op, "nonfinite", nonfinite[t], ScalarType::Long, tables.device);
    check_size(op, "the elements of nonfinite", 1, nonfinite[t].numel());
    tables.nonfinite.push_back(mutable_data<int64_t>(nonfinite[t]));
  }
}

// initial [T, 4]: kind, key, first column, and the sum of 1 if ids without a row read as initial rows, and 2 if they
// get no rows; parameters [T, 6]. states: the number in each state of the optimizer.
inline void read_initial(const char* op, PreparedTables& tables, const Tensor& initial, const Tensor& parameters,
                         const std::vector<double>& states) {
  const auto count = static_cast<int64_t>(tables.count());
  check_tensor(op, "initial", initial, ScalarType::Long);
  check_tensor(op, "parameters", parameters, ScalarType::Double);
  check_size(op, "the elements of initial", 4 * count, initial.numel());
  check_size(op, "the elements of parameters", 6 * count, parameters.numel());
  check_size(op, "the number of initial_states", rule_facts(tables.optimizer).state_count(),
             static_cast<int64_t>(states.size()));
  const int64_t* word = const_data<int64_t>(initial);
  const double* own = const_data<double>(parameters);
  for (int64_t t = 0; t < count; ++t, word += 4, own += 6) {
    tables.initial.push_back(
        {initial_rows_of(op, word[2], word[0], own), static_cast<uint64_t>(word[1]), word[2], (word[3] & 1) != 0});
    tables.frozen.push_back(word[3] >> 1 & 1);
  }
  for (const double number : states) tables.initial_states.push_back(static_cast<float>(number));
}

inline void read_scores_of(const char* op, PreparedTables& tables, const std::vector<Tensor>& scores,
                           const Tensor& layout) {
  const std::vector<TableLayout> layouts = read_layout(op, layout, scores, true);
  check_size(op, "the lines of score_layout", static_cast<int64_t>(tables.count()),
             static_cast<int64_t>(layouts.size()));
  BlockList<uint64_t> blocks(op, "scores", scores, tables.device);
  for (const TableLayout& table : layouts) tables.scores.push_back(blocks.words(table));
  tables.score_blocks = blocks.pointers();
  for (ScoreBlocks& words : tables.scores)
    words.blocks = tables.score_blocks.data() + (words.blocks - blocks.pointers().data());
}

// The prepared tables of this process, by the numbers of their handles.
class Handles {
 public:
  using Shared = std::shared_ptr<const PreparedTables>;

  static Handles& all() {
    static auto* handles = [] {
      // A child process has only the thread that forked: the lock must not be another one's at that moment.
      pthread_atfork([] { all().mutex_.lock(); }, [] { all().mutex_.unlock(); }, [] { all().mutex_.unlock(); });
      return new Handles;  // never destroyed: handles may outlive the library's statics
    }();
    return *handles;
  }

  // Returns the handle.
  Tensor add(Shared tables) {
    auto memory = std::make_unique<int64_t>();
    int64_t number = 0;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      do number = static_cast<int64_t>(uint64_t{words_()} << 32 | words_());
      while (tables_.contains(number));
      tables_.emplace(number, std::move(tables));
    }
    int64_t* const word = memory.release();
    *word = number;
    return tensor_of(word, {1}, {1}, ScalarType::Long, [word, number] {
      all().drop(number);
      delete word;
    });
  }

  Shared get(const char* op, const Tensor& handle) {
    check_tensor(op, "tables", handle, ScalarType::Long);
    check_size(op, "the elements of tables", 1, handle.numel());
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto place = tables_.find(*const_data<int64_t>(handle));
    TORCHREC_DYN_CHECK(place != tables_.end(), op, ": expected the result of prepare_tables in this process, got ",
                       "another tensor, or one whose tables were dropped. Prepare the tables again.");
    return place->second;
  }

 private:
  void drop(int64_t number) {
    Shared last;  // dropped after the lock is released: the memory of tensors may be Python's
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto place = tables_.find(number);
    if (place == tables_.end()) return;
    last = std::move(place->second);
    tables_.erase(place);
  }

  std::mutex mutex_;
  std::random_device words_;  // not seeded by torch: a number is never used twice
  std::unordered_map<int64_t, Shared> tables_;
};

struct PrepareTablesCall {
  ArgumentReader arguments;

  std::vector<Tensor> slots = arguments.read<std::vector<Tensor>>();
  Tensor moved = arguments.read<Tensor>();
  std::vector<Tensor> weights = arguments.read<std::vector<Tensor>>();
  std::vector<Tensor> states = arguments.read<std::vector<Tensor>>();
  Tensor layout = arguments.read<Tensor>();
  int64_t optimizer = arguments.read<int64_t>();
  std::vector<int64_t> on_nonfinite = arguments.read<std::vector<int64_t>>();
  std::vector<Tensor> nonfinite = arguments.read<std::vector<Tensor>>();
  std::optional<Tensor> initial = arguments.read<std::optional<Tensor>>();
  std::optional<Tensor> parameters = arguments.read<std::optional<Tensor>>();
  std::vector<double> initial_states = arguments.read<std::vector<double>>();
  std::vector<Tensor> scores = arguments.read<std::vector<Tensor>>();
  std::optional<Tensor> score_layout = arguments.read<std::optional<Tensor>>();

  // Returns the handle.
  Tensor prepare(const Device& device) const {
    const char* op = "prepare_tables";
    auto tables = std::make_shared<PreparedTables>(rows_of(op, weights, layout, device));
    tables->maps = views_of(op, slots, moved, device);
    if (moved.numel() > 0)
      check_size(op, "the number of maps", static_cast<int64_t>(tables->count()),
                 static_cast<int64_t>(tables->maps.size()));
    read_states(op, *tables, optimizer, weights, states, on_nonfinite, nonfinite);
    if (initial && parameters) read_initial(op, *tables, *initial, *parameters, initial_states);
    if (score_layout) read_scores_of(op, *tables, scores, *score_layout);
    tables->written.writes(slots).writes(weights).writes(states).writes(nonfinite).writes(scores).check(op);
    for (const std::vector<Tensor>* list : {&slots, &weights, &states, &nonfinite, &scores})
      tables->kept.insert(tables->kept.end(), list->begin(), list->end());
    return Handles::all().add(std::move(tables));
  }
};

}  // namespace torchrec_dyn
