// The admission of new ids on the CPU, of all tables in one call.
#include <algorithm>
#include <array>
#include <tuple>
#include <vector>

#include "lookup/admission_arguments.h"
#include "parallel.h"
#include "simd.h"
#include "storage/find_rows_cpu.h"

namespace torchrec_dyn {
namespace {

// Reads the counters of ids: their rows, kNoRow for none, and their counts.
void read_counters(const AdmitCall& call, const PreparedTables& waiting, std::vector<int64_t>& rows,
                   std::vector<int64_t>& counts) {
  std::vector<int64_t> absent(waiting.count());
  find_rows(waiting.maps, const_data<int64_t>(call.new_ids), call.offsets(), rows.data(), absent.data());
  for (size_t t = 0; t < waiting.count(); ++t) {
    const ScoreBlocks& words = waiting.scores[t];
    const int64_t begin = call.offsets()[t], end = call.offsets()[t + 1];
    for (int64_t i = begin; i < end; ++i) {
      if ((i - begin) % kScoreBurst == 0) prefetch_scores(words, rows.data(), i, end);
      const int64_t row = rows[static_cast<size_t>(i)];
      TORCHREC_DYN_CHECK(row == kNoRow || words.holds(row), AdmitCall::kOp, ": expected counters in rows below ",
                         words.capacity, ", got one in row ", row, ".");
      if (row != kNoRow) counts[static_cast<size_t>(i)] = static_cast<int64_t>(count_of(*words.word(row)));
    }
  }
}

struct AdmittedList {
  std::vector<int64_t> first, second;

  void add(int64_t a, int64_t b) {
    first.push_back(a);
    second.push_back(b);
  }
};

Tensor joined(const std::array<AdmittedList, kAdmittedLists>& lists, std::vector<int64_t> AdmittedList::* numbers) {
  size_t size = 0;
  for (const AdmittedList& list : lists) size += (list.*numbers).size();
  Tensor result = new_int64(static_cast<int64_t>(size));
  auto* out = mutable_data<int64_t>(result);
  for (const AdmittedList& list : lists) out = std::copy((list.*numbers).begin(), (list.*numbers).end(), out);
  return result;
}

AdmitResult admit(const AdmitCall& call) {
  const Handles::Shared waiting = call.read_counters();
  call.check(waiting.get(), waiting ? waiting->device : Device(DeviceType::CPU));
  const std::vector<AdmissionRule> rules = call.read_rules();
  const NewIdsToAdmit given = call.new_ids_to_admit(rules.data(), const_data<double>(call.squares));
  const auto count = static_cast<size_t>(call.ids());
  std::vector<int64_t> rows(count, kNoRow), in_counters(count), places;
  if (waiting) read_counters(call, *waiting, rows, in_counters);
  Tensor numbers = new_int64(call.tables() * kAdmissionNumbers);
  auto* const number = mutable_data<int64_t>(numbers);
  std::fill(number, number + numbers.numel(), int64_t{0});
  std::array<AdmittedList, kAdmittedLists> lists;
  for (int64_t t = 0; t < call.tables(); ++t) {
    int64_t* const own = number + t * kAdmissionNumbers;
    for (int64_t i = call.offsets()[t]; i < call.offsets()[t + 1]; ++i) {
      const auto place = static_cast<size_t>(i);
      const int64_t sum = given.count(i, in_counters[place]), row = rows[place];
      const Admitted outcome = given.decide(i, t, sum, row != kNoRow);
      if (is_admitted(outcome)) {
        places.push_back(i);
        lists[0].add(given.ids[i], sum);
      }
      if (outcome == Admitted::kCounted) lists[1].add(given.ids[i], row);
      if (outcome == Admitted::kSeen) lists[2].add(row, given.occurred(i));
      if (outcome == Admitted::kBegun) lists[3].add(given.ids[i], sum);
      for (int64_t list = 0; list < kAdmittedLists; ++list) own[list] += is_in_list(outcome, list);
      own[kAdmittedLists] += call.sums ? given.occurrences[i] : 0;
      own[kAdmittedLists + 1] += is_admitted(outcome) ? 0 : given.occurrences[i];
    }
  }
  Tensor all_places = new_int64(static_cast<int64_t>(places.size()));
  std::copy(places.begin(), places.end(), mutable_data<int64_t>(all_places));
  return {all_places, joined(lists, &AdmittedList::first), joined(lists, &AdmittedList::second), numbers};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torchrec_dyn, CPU, m) { m.impl(TORCHREC_DYN_STRUCT_KERNEL("admit", &admit)); }

}  // namespace torchrec_dyn
