// The arguments of admit, checked for every device.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "checks.h"
#include "life/admission.h"
#include "lookup/prepared_tables.h"
#include "struct_kernel.h"

namespace torchrec_dyn {

struct AdmitCall {
  static constexpr const char* kOp = "admit";

  ArgumentReader arguments;

  Tensor new_ids = arguments.read<Tensor>();
  Tensor occurrences = arguments.read<Tensor>();
  Tensor new_offsets = arguments.read<Tensor>();
  std::optional<Tensor> asks = arguments.read<std::optional<Tensor>>();
  std::optional<Tensor> counted = arguments.read<std::optional<Tensor>>();
  Tensor rules = arguments.read<Tensor>();
  Tensor squares = arguments.read<Tensor>();
  Tensor counters = arguments.read<Tensor>();
  bool sums = arguments.read<bool>();

  int64_t ids() const { return new_ids.numel(); }
  int64_t tables() const { return new_offsets.numel() - 1; }
  const int64_t* offsets() const { return const_data<int64_t>(new_offsets); }

  // The counters of waiting ids; null if no table has any.
  Handles::Shared read_counters() const { return counters.numel() == 0 ? nullptr : Handles::all().get(kOp, counters); }

  // `device` has the ids.
  void check(const PreparedTables* waiting, const Device& device) const {
    check_tensor(kOp, "new_ids", new_ids, ScalarType::Long, device);
    check_numbers(kOp, "occurrences", occurrences, ScalarType::Long, ids(), device);
    TORCHREC_DYN_CHECK(tables() >= 0, kOp, ": expected new_offsets [T + 1], got none.");
    check_table_offsets(kOp, new_offsets, tables(), ids());
    check_numbers(kOp, "asks", asks, ScalarType::Bool, ids(), device);
    check_numbers(kOp, "counted", counted, ScalarType::Long, ids(), device);
    check_tensor(kOp, "rules", rules, ScalarType::Long);
    check_size(kOp, "the elements of rules", 4 * tables(), rules.numel());
    check_tensor(kOp, "squares", squares, ScalarType::Double);
    check_size(kOp, "the elements of squares", kMostSquares * tables(), squares.numel());
    for (const AdmissionRule& rule : read_rules()) {
      const auto kind = static_cast<int64_t>(rule.kind);
      TORCHREC_DYN_CHECK(kind >= 0 && kind <= 3 && rule.squares >= 0 && rule.squares <= kMostSquares &&
                             (kind != 2 || rule.squares > 0) && (rule.has_counters == 0 || waiting != nullptr),
                         kOp, ": expected rules of kind, number, squares and whether they have counters, got ", kind,
                         ", ", rule.number, ", ", rule.squares, " and ", rule.has_counters, ".");
    }
    if (waiting == nullptr) return;
    check_size(kOp, "the tables of counters", tables(), static_cast<int64_t>(waiting->count()));
    check_size(kOp, "the scores of counters", tables(), static_cast<int64_t>(waiting->scores.size()));
    check_size(kOp, "the maps of counters", tables(), static_cast<int64_t>(waiting->maps.size()));
  }

  std::vector<AdmissionRule> read_rules() const {
    std::vector<AdmissionRule> read;
    const int64_t* word = const_data<int64_t>(rules);
    for (int64_t t = 0; t < tables(); ++t, word += 4)
      read.push_back({static_cast<AdmissionKind>(word[0]), word[1], word[2], word[3]});
    return read;
  }

  // True if all ids get rows, whatever they are.
  bool admits_all() const {
    if (asks) return false;
    const std::vector<AdmissionRule> read = read_rules();
    for (size_t t = 0; t < read.size(); ++t)
      if (offsets()[t] < offsets()[t + 1] && read[t].kind != AdmissionKind::kAll) return false;
    return true;
  }

  NewIdsToAdmit new_ids_to_admit(const AdmissionRule* own_rules, const double* own_squares) const {
    return {const_data<int64_t>(new_ids),
            const_data<int64_t>(occurrences),
            const_data<bool>(asks),
            const_data<int64_t>(counted),
            own_rules,
            own_squares};
  }
};

// places, first, second, numbers (csrc/library.cpp).
using AdmitResult = std::tuple<Tensor, Tensor, Tensor, Tensor>;

}  // namespace torchrec_dyn
