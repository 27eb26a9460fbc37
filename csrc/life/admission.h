// Which ids without a row are admitted (torchrec_dyn/life/admission.py): the rules, one for each table.
#pragma once

#include <cstdint>

#include "both_devices.h"
#include "life/scores.h"
#include "mix64.h"

namespace torchrec_dyn {

enum class AdmissionKind : int64_t {
  kAll,     // of the ids that ask
  kCount,   // from `number` counted occurrences on
  kChance,  // with 1 - (1 - p)^occurrences, by a draw from the mixed word `number`
  kOwn,     // waiting ids that ask: the user's code has said so
};

// Powers (1 - p)^(2^bit) of a chance of refusal, for the bits of a count.
constexpr int64_t kMostSquares = 33;

struct AdmissionRule {
  AdmissionKind kind;
  int64_t number;
  int64_t squares;       // number of powers of a chance; a count above 2^(squares - 1) has the same chance
  int64_t has_counters;  // 1: ids that are refused get counters
};

// True if the draw of an id admits it. By multiplications alone: `pow` may differ in its last bit.
TORCHREC_DYN_BOTH inline bool is_drawn(const AdmissionRule& rule, const double* squares, int64_t id, int64_t count) {
  const int64_t most = int64_t{1} << (rule.squares - 1);
  const int64_t bits = count < most ? count : most;
  double refusal = 1.0;
  for (int64_t bit = 0; bit < rule.squares; ++bit)
    if ((bits >> bit & 1) != 0) refusal *= squares[bit];
  const uint64_t word = mix64(mix64(mix64(static_cast<uint64_t>(id)) ^ static_cast<uint64_t>(rule.number)));
  const double limit = (1.0 - refusal) * 9007199254740992.0;  // 2^53
  return static_cast<double>(word >> 11) < limit;
}

// What becomes of a new id.
enum class Admitted : int64_t {
  kPlain,    // admitted; it has no counter
  kCounted,  // admitted; its counter is dropped
  kSeen,     // refused; its counter goes up
  kBegun,    // refused; it gets a counter
  kLeft,     // nothing: it does not ask, or its table has no counters
};

TORCHREC_DYN_BOTH constexpr bool is_admitted(Admitted outcome) {
  return outcome == Admitted::kPlain || outcome == Admitted::kCounted;
}

// The lists of the result of `admit`, one after the other: admitted ids and their counts, ids and rows of counters that
// are dropped, rows of those that go up and by how much, ids and counts of those that begin.
constexpr int64_t kAdmittedLists = 4;

// The new ids of a batch with what decides about them. `t` is the table of id `i`.
struct NewIdsToAdmit {
  const int64_t* ids;
  const int64_t* occurrences;  // in this step
  const bool* asks;            // null: all ask
  const int64_t* counted;      // null: `occurrences`
  const AdmissionRule* rules;  // [T]
  const double* squares;       // [T, kMostSquares]

  // The occurrences that count, with those of the id's counter.
  TORCHREC_DYN_BOTH int64_t count(int64_t i, int64_t in_counter) const {
    const int64_t sum = (counted == nullptr ? occurrences[i] : counted[i]) + in_counter;
    return sum < static_cast<int64_t>(kMostCount) ? sum : static_cast<int64_t>(kMostCount);
  }
  TORCHREC_DYN_BOTH int64_t occurred(int64_t i) const { return count(i, 0); }

  TORCHREC_DYN_BOTH bool admits(const AdmissionRule& rule, const double* own_squares, int64_t i, int64_t count,
                                bool has_counter) const {
    if (rule.kind == AdmissionKind::kCount) return count >= rule.number;
    if (rule.kind == AdmissionKind::kChance) return is_drawn(rule, own_squares, ids[i], count);
    return has_counter && asks != nullptr && asks[i];
  }

  TORCHREC_DYN_BOTH Admitted decide(int64_t i, int64_t t, int64_t count, bool has_counter) const {
    const AdmissionRule& rule = rules[t];
    if (rule.kind == AdmissionKind::kAll) return asks == nullptr || asks[i] ? Admitted::kPlain : Admitted::kLeft;
    // An id of which no occurrence counts is never admitted, and its counter stays as it is.
    if (counted != nullptr && counted[i] <= 0) return Admitted::kLeft;
    if (admits(rule, squares + t * kMostSquares, i, count, has_counter))
      return has_counter ? Admitted::kCounted : Admitted::kPlain;
    if (rule.has_counters == 0) return Admitted::kLeft;
    return has_counter ? Admitted::kSeen : Admitted::kBegun;
  }
};

// True if an id is in a list.
TORCHREC_DYN_BOTH constexpr bool is_in_list(Admitted outcome, int64_t list) {
  return list == 0 ? is_admitted(outcome) : static_cast<int64_t>(outcome) == list;
}

// Numbers of a table: the ids of each list; the occurrences of all its ids, and of those that are not admitted.
constexpr int64_t kAdmissionNumbers = kAdmittedLists + 2;

}  // namespace torchrec_dyn
