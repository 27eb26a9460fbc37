// The backward of a lookup on a device: row_update_cpu.cpp for CUDA.
#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "device_call.h"
#include "kernel.h"
#include "lookup/row_update_arguments.h"
#include "lookup/row_update_kernels.h"
#include "lookup/senders_arguments.h"

namespace torchrec_dyn {
namespace {

// Lists of the host in one piece of memory of the device: one send, that does not wait. Requires elements of whole
// words.
class SentLists {
 public:
  // `bytes`: of all lists together.
  SentLists(DeviceCall& call, size_t bytes)
      : call_(call), host_(bytes), memory_(static_cast<std::byte*>(call.take(static_cast<int64_t>(bytes)))) {}

  // Returns the place of the list in the memory of the device.
  template <typename T>
  T* add(const std::vector<T>& list) {
    static_assert(sizeof(T) % sizeof(int64_t) == 0);
    const size_t bytes = list.size() * sizeof(T);
    if (bytes > 0) std::memcpy(host_.data() + used_, list.data(), bytes);
    return reinterpret_cast<T*>(memory_ + std::exchange(used_, used_ + bytes));
  }

  void send() { simt::send(call_.queue(), memory_, host_.data(), static_cast<int64_t>(used_)); }

 private:
  DeviceCall& call_;
  std::vector<std::byte> host_;
  std::byte* memory_;
  size_t used_ = 0;
};

// Moves the blocks of a table from the list of the host to its copy on the device.
template <typename T>
void move_blocks(T* const*& blocks, const std::vector<T*>& host, T* const* device) {
  if (blocks != nullptr) blocks = device + (blocks - host.data());
}

template <typename T>
size_t bytes_of(const std::vector<T>& list) {
  return list.size() * sizeof(T);
}

// The keys of all tables. Returns the end of the keys.
uint64_t key_tables(const UpdateArguments& read, const Tensor& streams, std::vector<KeyedTable>& keyed) {
  const std::vector<TableLayout> updated = updated_rows(read);
  uint64_t end = 0;
  for (size_t t = 0; t < updated.size(); ++t) {
    const int64_t capacity = updated[t].capacity(), step = const_data<int64_t>(streams)[3 * t + 2];
    keyed.push_back({end, capacity, read.tables[t].columns, step, may_have_rows(read.rule, step)});
    end += static_cast<uint64_t>(capacity);
  }
  return end;
}

// The columns of the widest table that has rows and bags.
int64_t most_columns(const UpdateArguments& read) {
  int64_t most = 0;
  for (const Segment& segment : read.bags.segments)
    if (const TableLayout& table = read.tables[static_cast<size_t>(segment.table)];
        segment.bags > 0 && table.capacity() > 0)
      most = std::max(most, table.columns);
  return most;
}

// Returns the distinct senders of each row, at the place where the row begins.
const int64_t* count_senders(DeviceCall& call, const SortedIds& sorted) {
  const int64_t n = sorted.ids.count;
  auto* distinct = call.zeros<int64_t>(n);
  simt::Pairs pairs{call.take_for<uint64_t>(n), call.take_for<int64_t>(n)};
  simt::each(call.queue(), n, KeySenders{sorted, pairs.keys});
  pairs = simt::sort_pairs(call.queue(), pairs, n, 0, kSenderBits + std::bit_width(static_cast<uint64_t>(n)));
  simt::each(call.queue(), n, CountSenders{pairs.keys, distinct});
  return distinct;
}

template <typename T>
void update(const char* op, const UpdateCall& given, const UpdateArguments& read) {
  DeviceCall call(given.rows);
  UpdatedTables<T> updated(op, given, read, call.device());
  std::vector<Segment> segments = read.bags.segments;
  std::erase_if(segments, [](const Segment& segment) { return segment.bags == 0; });
  std::vector<KeyedTable> keyed;
  const uint64_t end = key_tables(read, given.streams, keyed);
  SentLists sent(call, bytes_of(segments) + bytes_of(keyed) + bytes_of(updated.tables) +
                           bytes_of(updated.weights.pointers()) + bytes_of(updated.momentum1.pointers()) +
                           bytes_of(updated.momentum2.pointers()) + bytes_of(updated.marks.pointers()));
  T* const* weights = sent.add(updated.weights.pointers());
  float* const* momentum1 = sent.add(updated.momentum1.pointers());
  float* const* momentum2 = sent.add(updated.momentum2.pointers());
  uint8_t* const* marks = sent.add(updated.marks.pointers());
  for (UpdatedTable<T>& table : updated.tables) {
    move_blocks(table.weights.blocks, updated.weights.pointers(), weights);
    move_blocks(table.momentum1.blocks, updated.momentum1.pointers(), momentum1);
    move_blocks(table.momentum2.blocks, updated.momentum2.pointers(), momentum2);
    move_blocks(table.marks.blocks, updated.marks.pointers(), marks);
  }
  const int64_t n = given.ids.numel();
  const BagLists& bags = read.bags;
  auto* wrong = call.zeros<WrongUpdate>(1);
  const UpdatedIds ids{{sent.add(segments), nullptr, static_cast<int64_t>(segments.size()), bags.offsets, bags.count},
                       sent.add(keyed),
                       static_cast<int64_t>(keyed.size()),
                       n,
                       const_data<int64_t>(given.rows),
                       sender_data(op, given.senders, n, call.device()),
                       read.bag_weights,
                       given.mean,
                       end,
                       wrong};
  const UpdatedTable<T>* tables = sent.add(updated.tables);
  sent.send();
  simt::Pairs pairs{call.take_for<uint64_t>(n), call.take_for<int64_t>(n)};
  simt::each(call.queue(), bags.offsets == nullptr ? n : std::max(n, bags.count + 1),
             KeyIds{ids, pairs.keys, pairs.values});
  if (n > 0) {
    pairs = simt::sort_pairs(call.queue(), pairs, n, 0, std::bit_width(end));
    const SortedIds sorted{ids, pairs.keys, pairs.values};
    const int64_t* distinct = ids.senders == nullptr ? nullptr : count_senders(call, sorted);
    const int64_t lines = (n - 1) / kPieceIds, columns = most_columns(read);
    const SortedGrads grads{sorted, const_data<float>(given.grad), call.take_for<float>(lines * columns), columns};
    simt::tiles(call.queue(), lines, SumPieces{grads});
    simt::tiles(call.queue(), n,
                UpdateRows<T>{grads, tables, read.rule, state_widths(read.rule.optimizer),
                              const_data<int64_t>(given.ids), distinct});
  }
  simt::each(call.queue(), 1, ReportWrongUpdate{ids, call.errors(raise_wrong_update)});
  call.finish();
}

void update_rows_(const Tensor& grad, const Tensor& ids, const Tensor& rows, const std::optional<Tensor>& offsets,
                  const std::optional<Tensor>& bag_weights, std::vector<Tensor> weights, std::vector<Tensor> momentum1,
                  std::vector<Tensor> momentum2, const Tensor& layout, const Tensor& segments, const Tensor& streams,
                  bool mean, int64_t optimizer, std::vector<double> hyper, std::vector<double> grad_scales,
                  const std::optional<Tensor>& senders, std::vector<Tensor> marks,
                  const std::optional<Tensor>& mark_layout) {
  const char* op = "update_rows_";
  check_tensor(op, "grad", grad, ScalarType::Float, kDevice);
  const UpdateCall given{grad,      ids,       rows,        offsets,  bag_weights, weights,
                         momentum1, momentum2, layout,      segments, streams,     mean,
                         optimizer, hyper,     grad_scales, senders,  marks,       mark_layout};
  const UpdateArguments read = read_update(op, given, grad.device(), false);
  dispatch_row_type(op, weights, [&](auto zero) { update<decltype(zero)>(op, given, read); });
}

}  // namespace

TORCHREC_DYN_DEVICE_KERNELS(m) { m.impl(TORCHREC_DYN_KERNEL("update_rows_", &update_rows_)); }

}  // namespace torchrec_dyn
