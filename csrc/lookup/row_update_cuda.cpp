// The backward of a lookup on a device: row_update_cpu.cpp for CUDA.
#include <algorithm>
#include <bit>
#include <limits>
#include <span>
#include <type_traits>
#include <vector>

#include "device_call.h"
#include "lookup/row_update_arguments.h"
#include "lookup/row_update_kernels.h"
#include "sent_lists.h"

namespace torchrec_dyn {
namespace {

// Where rows of the list of the host are on the device. Rows in one block need no look at the list.
template <typename T>
TileRows<T> moved(const RowBlocks<T>& rows, const std::vector<T*>& host, T* const* device) {
  if (rows.blocks == nullptr) return {};
  const bool is_single = rows.capacity > 0 && (rows.capacity - 1) >> rows.shift == 0;
  return {is_single ? rows.blocks[0] : nullptr, device + (rows.blocks - host.data()), static_cast<uint32_t>(rows.shift),
          static_cast<uint32_t>(rows.columns)};
}

// True if units of columns can be read and written as one piece of memory.
template <typename T>
bool are_whole_units(std::span<T* const> blocks) {
  return std::ranges::all_of(
      blocks, [](T* block) { return reinterpret_cast<uintptr_t>(block) % (kUnitColumns * sizeof(T)) == 0; });
}
template <typename T>
bool has_whole_units(const PreparedTables& tables, const RuleFacts& facts) {
  const std::span<T* const> weights = tables.blocks<T>();
  bool is_whole = are_whole_units(weights);
  for (int s = 0; s < facts.state_count(); ++s) {
    const auto states = std::span<float* const>(tables.states).subspan(s * weights.size(), weights.size());
    is_whole = is_whole && (facts.states[s] == StateWidth::kRow || are_whole_units(states));
  }
  return is_whole;
}

// The ids of all tables: what the tables must be, and their first keys.
struct KeyedTables {
  std::vector<KeyedTable> tables;
  std::vector<uint64_t> first_keys;
  uint64_t end = 0;  // of the keys

  KeyedTables(const UpdateArguments& read, const PreparedTables& prepared, const Tensor& streams) {
    const std::vector<TableLayout> updated = updated_rows(read, prepared.layout);
    for (size_t t = 0; t < updated.size(); ++t) {
      const int64_t capacity = updated[t].capacity(), step = const_data<int64_t>(streams)[3 * t + 2];
      const OnNonfinite what = prepared.on_nonfinite[t];
      int64_t* const nonfinite = what == OnNonfinite::kWrite ? nullptr : prepared.nonfinite[t];
      tables.push_back({capacity, prepared.layout[t].columns, step, may_have_rows(read.rule, step), what, nonfinite});
      first_keys.push_back(end);
      end += static_cast<uint64_t>(capacity);
    }
  }
};

// The columns of the tables that have rows and bags, and the places of their gradients.
struct WidthOfRows {
  int64_t most = 0;
  bool is_whole = true;  // units of columns are pieces of memory

  WidthOfRows(const UpdateArguments& read, const PreparedTables& prepared, const float* grad) {
    is_whole = reinterpret_cast<uintptr_t>(grad) % (kUnitColumns * sizeof(float)) == 0;
    for (const Segment& segment : read.bags.segments) {
      const TableLayout& table = prepared.layout[static_cast<size_t>(segment.table)];
      if (segment.bags == 0 || table.capacity() == 0) continue;
      most = std::max(most, table.columns);
      is_whole &= (table.columns | segment.out_offset | segment.out_stride) % kUnitColumns == 0;
    }
  }
};

// Calls `run` with the shape of tiles that rows need (tile_columns.h).
template <typename Key, typename Run>
void with_tile(const WidthOfRows& width, const Run& run) {
  if constexpr (sizeof(Key) == sizeof(uint32_t)) {
    if (width.is_whole && width.most <= Tile16::kColumns) return run(Tile16{});
    if (width.is_whole && width.most <= Tile32::kColumns) return run(Tile32{});
    if (width.is_whole && width.most <= Tile64::kColumns) return run(Tile64{});
    if (width.is_whole && width.most <= Tile128::kColumns) return run(Tile128{});
    if (width.is_whole && width.most <= Tile256::kColumns) return run(Tile256{});
    if (width.is_whole) return run(WideTile{});
  }
  run(AnyTile{});
}

// The sums of pieces: no piece but the first of a row begins before place kPieceIds.
int64_t lines_of_pieces(int64_t ids) { return ids == 0 ? 0 : (ids - 1) / kPieceIds; }
int64_t columns_of_pieces(const WidthOfRows& width) {
  return (width.most + kUnitColumns - 1) / kUnitColumns * kUnitColumns;
}

// Returns the distinct senders of each row, at the place where the row begins.
template <typename Key>
const int64_t* count_senders(DeviceCall& call, const SortedIds<Key>& sorted) {
  const int64_t n = sorted.ids.count;
  auto* distinct = call.zeros<int64_t>(n);
  simt::Pairs pairs{call.allocate_for<uint64_t>(n), call.allocate_for<int64_t>(n)};
  simt::launch(call.stream(), n, KeySenders<Key>{sorted, pairs});
  pairs = simt::sort_pairs(call.stream(), pairs, n, 0, kSenderBits + std::bit_width(static_cast<uint64_t>(n)));
  simt::launch(call.stream(), n, CountSenders{pairs.keys, distinct});
  return distinct;
}

// What a call has sent to the device.
template <typename T>
struct SentUpdate {
  UpdatedIds ids;
  const TileTable<T>* tables;
  WidthOfRows width;
};

template <Visit kVisit>
using VisitOf = std::integral_constant<Visit, kVisit>;

// Sorts the ids and updates their rows. Key: an unsigned word for keys.
template <typename Key, typename T>
void update_sorted(DeviceCall& call, const UpdateBatch& given, const UpdateArguments& read, const SentUpdate<T>& sent,
                   const std::vector<OnNonfinite>& on_nonfinite) {
  const UpdatedIds& ids = sent.ids;
  const int64_t n = ids.count;
  // Kernels that need the position of an id look its gradient up by it; else the gradient is the value of its key.
  const bool by_position = given.mean || read.bag_weights != nullptr || ids.senders != nullptr || sizeof(T) < 4;
  float* mean_factors = given.mean ? call.allocate_for<float>(n) : nullptr;
  const IdTerms<Key> terms{by_position ? call.allocate_for<ValueOf<Key>>(n) : nullptr,
                           given.mean ? mean_factors : read.bag_weights};
  KeyPairs<Key> pairs{call.allocate_for<Key>(n), call.allocate_for<ValueOf<Key>>(n)};
  simt::launch(call.stream(), ids.bags.offsets == nullptr ? n : std::max(n, ids.bags.count + 1),
               KeyIds<Key>{ids, pairs, terms, read.bag_weights, mean_factors});
  if (n == 0) return;
  pairs = simt::sort_pairs(call.stream(), pairs, n, 0, std::bit_width(ids.absent));
  const SortedIds<Key> sorted{ids, pairs.keys, pairs.values};
  const int64_t* divisors = ids.senders == nullptr ? nullptr : count_senders(call, sorted);
  if (ids.absent == 0) return;  // no table has rows, or there is none, and tiles read the first key of a table
  const int64_t lines = lines_of_pieces(n), columns = columns_of_pieces(sent.width);
  auto* pieces = call.allocate_for<float>(lines * columns);
  const auto grads = [&]<typename Shape>(Shape) {
    return SortedGrads<Key, Shape>{sorted, terms, const_data<float>(given.grad), pieces, columns};
  };
  const RuleFacts facts = rule_facts(read.rule.optimizer);
  const bool may_fail = has(on_nonfinite, OnNonfinite::kError);
  float* const ratios = read.rule.has_ratio() ? call.allocate_for<float>(n) : nullptr;
  int64_t* const tried = may_fail || has(on_nonfinite, OnNonfinite::kSkip) ? call.allocate_for<int64_t>(n) : nullptr;
  const auto visit_rows = [&]<Visit kVisit, typename Shape>(VisitOf<kVisit>, Shape shape) {
    simt::launch_tiles(call.stream(), n,
                       UpdateRows<T, Key, Shape, kVisit>{grads(shape), sent.tables, read.rule, facts,
                                                         facts.is_rowwise(), !read.marks.empty(),
                                                         const_data<int64_t>(given.ids), divisors, tried, ratios});
  };
  with_tile<Key>(sent.width, [&]<typename Shape>(Shape shape) {
    simt::launch_tiles(call.stream(), lines, SumPieces<Key, Shape>{grads(shape)});
  });
  if (ratios != nullptr) visit_rows(VisitOf<Visit::kMeasure>{}, AnyTile{});
  if (tried != nullptr) {
    visit_rows(VisitOf<Visit::kTry>{}, AnyTile{});
    if (may_fail) simt::launch(call.stream(), 1, RefuseNonfinite{ids.wrong});
    divisors = tried;
  }
  if (read.rule.is_common())
    with_tile<Key>(sent.width, [&](auto shape) { visit_rows(VisitOf<Visit::kUpdate>{}, shape); });
  else
    visit_rows(VisitOf<Visit::kUpdateByAny>{}, AnyTile{});
}

template <typename T>
void update(const char* op, const UpdateBatch& given, const UpdateArguments& read, const PreparedTables& prepared) {
  DeviceCall call(given.rows);
  UpdatedTables<T> updated(op, given, read, prepared);
  std::vector<Segment> segments = read.bags.segments;
  std::erase_if(segments, [](const Segment& segment) { return segment.bags == 0; });
  const KeyedTables keyed(read, prepared, given.streams);
  std::vector<TileTable<T>> tables(updated.tables.size());
  SentLists sent(call, bytes_of(segments) + bytes_of(keyed.tables) + bytes_of(keyed.first_keys) + bytes_of(tables) +
                           bytes_of(prepared.blocks<T>()) + bytes_of(prepared.states) +
                           bytes_of(updated.marks.pointers()));
  T* const* weights = sent.add(prepared.blocks<T>());
  float* const* states = sent.add(prepared.states);
  uint8_t* const* marks = sent.add(updated.marks.pointers());
  const RuleFacts facts = rule_facts(read.rule.optimizer);
  for (size_t t = 0; t < tables.size(); ++t) {
    UpdatedTable<T>& table = updated.tables[t];
    if (table.marks.blocks != nullptr)
      table.marks.blocks = marks + (table.marks.blocks - updated.marks.pointers().data());
    const TileRows<T> rows = moved(table.weights, prepared.blocks<T>(), weights);
    // Any address will do for a state that no row has.
    auto* row_state = reinterpret_cast<float*>(rows.only);
    TileTable<T> tile = {{rows.only, row_state, keyed.first_keys[t], rows.columns, table.grad_scale},
                         rows,
                         {},
                         {},
                         table.correction,
                         table.stream,
                         table.marks};
    for (int s = 0; s < facts.state_count(); ++s) {
      tile.states[s] = moved(table.states[s], prepared.states, states);
      if (facts.states[s] == StateWidth::kRow) {
        tile.row_state = tile.states[s];
        tile.head.row_state = tile.row_state.only;
      }
    }
    tables[t] = tile;
  }
  const int64_t n = given.ids.numel();
  const BagLists& bags = read.bags;
  auto* wrong = call.zeros<WrongUpdate>(1);
  SentUpdate<T> update{{{sent.add(segments), nullptr, static_cast<int64_t>(segments.size()), bags.offsets, bags.count},
                        sent.add(keyed.tables),
                        sent.add(keyed.first_keys),
                        static_cast<int64_t>(keyed.tables.size()),
                        n,
                        const_data<int64_t>(given.rows),
                        const_data<int32_t>(given.senders),
                        keyed.end,
                        wrong},
                       sent.add(tables),
                       WidthOfRows(read, prepared, const_data<float>(given.grad))};
  update.width.is_whole &= has_whole_units<T>(prepared, facts);
  sent.send();
  constexpr uint64_t kShortEnd = std::numeric_limits<uint32_t>::max();
  const auto numbers =
      static_cast<uint64_t>(std::max(given.grad.numel(), lines_of_pieces(n) * columns_of_pieces(update.width)));
  if (keyed.end <= kShortEnd && numbers <= kShortEnd)
    update_sorted<uint32_t>(call, given, read, update, prepared.on_nonfinite);
  else
    update_sorted<uint64_t>(call, given, read, update, prepared.on_nonfinite);
  simt::launch(call.stream(), 1, ReportWrongUpdate{update.ids, op, call.errors(raise_wrong_update)});
  call.finish();
}

void update(const char* op, const UpdateBatch& given, const PreparedTables& prepared) {
  const UpdateArguments read = read_update(op, given, prepared, false);
  dispatch_row_type(op, prepared.row_type, [&](auto zero) { update<decltype(zero)>(op, given, read, prepared); });
}

void update_rows_(const UpdateCall& given) {
  check_tensor("update_rows_", "grad", given.batch.grad, ScalarType::Float, kDevice);
  update("update_rows_", given.batch, given.tables(given.batch.grad.device()));
}

void update_prepared_(const PreparedUpdateCall& given) { update("update_prepared_", given.batch, *given.tables); }

}  // namespace

TORCHREC_DYN_DEVICE_KERNELS(m) {
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("update_rows_", &update_rows_));
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("update_prepared_", &update_prepared_));
}

}  // namespace torchrec_dyn
