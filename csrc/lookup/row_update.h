// The update rules: one row, its summed gradient, its optimizer state. n is the number of columns here.
//
// g gradient, w weight, m1 and m2 optimizer state, t step (from 1), lr learning rate, wd weight decay.
//   SGD                w -= lr g
//   ADAGRAD            m1 += g^2;  w -= lr g / (sqrt(m1) + eps)
//   ROWWISE_ADAGRAD    m1 += mean(g'^2), g' = g + wd w under L2;  k = lr / (sqrt(m1) + eps)
//                      w = (1 - k wd) w - k g under L2, (1 - lr wd) w - k g when decoupled
//   ADAM               m1 = b1 m1 + (1 - b1) g;  m2 = b2 m2 + (1 - b2) g^2
//                      w -= lr (m1 / (1 - b1^t) / (sqrt(m2 / (1 - b2^t)) + eps) + wd w)
//                      (torch's ADAMW is this rule: its decay is decoupled)
//   PARTIAL_ROWWISE_ADAM  as ADAM, with one m2 for each row, from mean(g^2) in place of g^2
//   FTRL               n = m1 + g^2;  m2 += g - (sqrt(n) - sqrt(m1)) / lr w;  m1 = n
//                      w = (sign(m2) l1 - m2) / (sqrt(n) / lr + 2 l2), or 0 where |m2| <= l1
//   LAMB               m1 and m2 as ADAM;  d = m1 / (1 - b1^t) / (sqrt(m2 / (1 - b2^t)) + eps) + wd w
//                      w -= lr r d, where r = |w| / |d|, or 1 where a norm is 0
//   PARTIAL_ROWWISE_LAMB  as LAMB, with the m2 of PARTIAL_ROWWISE_ADAM
// After ROWWISE_ADAGRAD with max_norm > 0, a row with a norm above max_norm is multiplied by max_norm / |w|.
// Source: FBGEMM fbgemm_gpu/codegen/genscript/optimizers.py, the CUDA rules (its CPU rules leave out parts). There r is
// 0 / 0 for a gradient of zeros. You et al., "Large batch optimization for deep learning", ICLR 2020 (LAMB). FTRL:
// McMahan et al., "Ad click prediction", KDD 2013, as TensorFlow's ApplyFtrl computes it with lr_power -0.5.
//
// The gradient of a row is the sum over its ids in the batch, each gradient of a bag times the weight of the id (and
// 1 / length for the mean). The order of additions is the same on every device (docs/dev/decisions/0004): a piece is
// kPieceIds ids of the row that follow each other in the batch, whoever sent them, and the last piece the rest; each
// piece is summed in order, then the sums of the pieces in order. The total is then multiplied once, by the factor of
// the table divided by the distinct senders of the row.
//
// A table may refuse updates after which a weight, as it is stored, or a state would be NaN or infinite. Such an update
// is tried on a copy of the row. Under OnNonfinite::kSkip that row stays as it was, under kError all rows of the call.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "simd.h"
#include "storage/blocks.h"
#include "storage/row_marks.h"

namespace torchrec_dyn {

constexpr int64_t kPieceIds = 256;
// Ranks that send ids. On a CPU every task keeps one number for each.
constexpr int32_t kMostSenders = 1 << 20;

// An error in the contents of an update, as kernels report it (device_errors.h), after the name of the op. Then
// follow two offsets and the end of their range; the rows of a table; the lowest and the highest sender; a step; how
// many rows.
enum class WrongContents : int64_t { kOffsets, kRows, kSenders, kStep, kNonfinite };

// What becomes of a row that an update would make NaN or infinite.
enum class OnNonfinite : int64_t { kWrite = 0, kSkip = 1, kError = 2 };

TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE bool is_finite(float number) { return std::fabs(number) <= FLT_MAX; }

// A rule is told here and in `RULES` of torchrec_dyn/optimizers.py (compared by tests/ops/test_optimizer_states.py):
// its number, its hyperparameters, its line of rule_facts, and its formula in update_row.
enum class Optimizer : int64_t {
  kSgd = 0,
  kAdagrad = 1,
  kRowwiseAdagrad = 2,
  kAdam = 3,
  kPartialRowwiseAdam = 4,
  kFtrl = 5,
  kLamb = 6,
  kPartialRowwiseLamb = 7,
  kAdamByRow = 8
};
constexpr Optimizer kLastOptimizer = Optimizer::kAdamByRow;

// The hyperparameters of a rule, in the order in which Python sends them.
struct SgdHyper {
  float learning_rate;
};
struct AdagradHyper {
  float learning_rate, eps;
};
struct RowwiseAdagradHyper {
  float learning_rate, eps, weight_decay, weight_decay_mode, max_norm;

  TORCHREC_DYN_BOTH bool has_l2() const { return weight_decay_mode == 1.0f; }
  TORCHREC_DYN_BOTH bool is_decoupled() const { return weight_decay_mode == 2.0f; }
};
struct AdamHyper {  // a rule that counts steps begins with these
  float learning_rate, eps, beta1, beta2, weight_decay;
};
struct FtrlHyper {
  float learning_rate, l1, l2;
};

// The width of an optimizer state in a row: no number, one number, or one number for each column.
enum class StateWidth : int64_t { kNone, kRow, kColumns };

// The most states of a rule. The kernels of the common rules have no code for a third.
constexpr int kMostStates = 3, kMostCommonStates = 2;

template <typename Hyper>
constexpr int64_t kNumbersOf = sizeof(Hyper) / sizeof(float);

struct RuleFacts {
  int64_t hyper_count;
  StateWidth states[kMostStates] = {};  // in the order of the rule's states in Python; at most one is kRow
  bool counts_steps = false;            // the formula divides by 1 - beta^t, t being the table's step
  bool has_square = false;              // the formula reads the row's square (row_square)

  TORCHREC_DYN_BOTH constexpr int state_count() const {
    int count = 0;
    while (count < kMostStates && states[count] != StateWidth::kNone) ++count;
    return count;
  }
  TORCHREC_DYN_BOTH constexpr bool is_rowwise() const {
    for (const StateWidth width : states)
      if (width == StateWidth::kRow) return true;
    return false;
  }
};

TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE constexpr RuleFacts rule_facts(Optimizer optimizer) {
  using enum StateWidth;
  switch (optimizer) {
    case Optimizer::kSgd:
      return {.hyper_count = kNumbersOf<SgdHyper>};
    case Optimizer::kAdagrad:
      return {.hyper_count = kNumbersOf<AdagradHyper>, .states = {kColumns}};
    case Optimizer::kRowwiseAdagrad:
      return {.hyper_count = kNumbersOf<RowwiseAdagradHyper>, .states = {kRow}, .has_square = true};
    case Optimizer::kAdam:
    case Optimizer::kLamb:
      return {.hyper_count = kNumbersOf<AdamHyper>, .states = {kColumns, kColumns}, .counts_steps = true};
    case Optimizer::kPartialRowwiseAdam:
    case Optimizer::kPartialRowwiseLamb:
      return {
          .hyper_count = kNumbersOf<AdamHyper>, .states = {kColumns, kRow}, .counts_steps = true, .has_square = true};
    case Optimizer::kFtrl:
      return {.hyper_count = kNumbersOf<FtrlHyper>, .states = {kColumns, kColumns}};
    case Optimizer::kAdamByRow:
      return {.hyper_count = kNumbersOf<AdamHyper>, .states = {kColumns, kColumns, kRow}};
  }
  return {};
}

TORCHREC_DYN_BOTH constexpr int64_t state_columns(StateWidth width, int64_t columns) {
  return width == StateWidth::kColumns ? columns : static_cast<int64_t>(width == StateWidth::kRow);
}

struct UpdateRule {
  static constexpr int kMostHyper = 8;

  Optimizer optimizer;
  float hyper[kMostHyper];

  // The hyperparameters by name; Hyper: the struct of the rule.
  template <typename Hyper>
  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE Hyper named() const {
    static_assert(kNumbersOf<Hyper> <= kMostHyper);
    return named_by<Hyper>(std::make_index_sequence<kNumbersOf<Hyper>>{});
  }

  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE bool square_reads_weights() const {
    return optimizer == Optimizer::kRowwiseAdagrad && named<RowwiseAdagradHyper>().has_l2();
  }
  // The update multiplies a row by its ratio (ratio_of).
  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE bool has_ratio() const {
    if (optimizer == Optimizer::kRowwiseAdagrad) return named<RowwiseAdagradHyper>().max_norm > 0.0f;
    return optimizer == Optimizer::kLamb || optimizer == Optimizer::kPartialRowwiseLamb;
  }
  // The update of rules that are not common stands apart: it would make that of the others longer.
  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE bool is_common() const {
    return optimizer <= Optimizer::kPartialRowwiseAdam && !has_ratio();
  }
  // The factor of these weights in the square.
  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE float square_decay() const { return named<RowwiseAdagradHyper>().weight_decay; }

 private:
  template <typename Hyper, size_t... kPlaces>
  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE Hyper named_by(std::index_sequence<kPlaces...>) const {
    return {hyper[kPlaces]...};
  }
};

// 1 - beta^t for the table's step, in double because beta2 is near 1. Rules that count steps read it, and ADAM by row
// has one for each row.
struct BiasCorrection {
  float first;
  float second;
};

inline BiasCorrection bias_correction(const UpdateRule& rule, int64_t step) {
  if (!rule_facts(rule.optimizer).counts_steps) return {};
  const auto hyper = rule.named<AdamHyper>();
  const auto t = static_cast<double>(step);
  return {static_cast<float>(1.0 - std::pow(static_cast<double>(hyper.beta1), t)),
          static_cast<float>(1.0 - std::pow(static_cast<double>(hyper.beta2), t))};
}

// 1 - beta^count for the updates of a row. A table may hold any count: one that is not a number is taken as the
// largest. Products of doubles alone, in a fixed order, so that the bits are the same on every device.
TORCHREC_DYN_BOTH inline float rest_of_power(float beta, float count) {
  constexpr float kMost = 1 << 24;  // a float32 counts no further
  if (!(count < kMost)) count = kMost;
  auto left = static_cast<uint32_t>(count < 1.0f ? 1.0f : count + 0.5f);
  double power = 1.0;
  for (double factor = beta; left > 0; left >>= 1, factor *= factor)
    if (left % 2 == 1) power *= factor;
  return static_cast<float>(1.0 - power);
}

// The sum of (g + decay w)^2; w is not read if kDecays is false. Sixteen partial sums in a fixed order: the loop
// vectorises, and the bits are the same at every vector width and on both devices.
template <bool kDecays>
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE float sum_of_squares(const float* g, const float* w, float decay, int64_t n) {
  float sums[kLanes] = {};
  int64_t c = 0;
  for (; c + kLanes <= n; c += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const float value = kDecays ? g[c + lane] + decay * w[c + lane] : g[c + lane];
      sums[lane] += value * value;
    }
  for (int64_t lane = 0; c < n; ++c, ++lane) {
    const float value = kDecays ? g[c] + decay * w[c] : g[c];
    sums[lane] += value * value;
  }
  return sum_of_lanes(sums);
}

template <bool kDecays>
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE float mean_square(const float* g, const float* w, float decay, int64_t n) {
  return sum_of_squares<kDecays>(g, w, decay, n) / static_cast<float>(n);
}

// The mean square of a row, of which a rule that has_square keeps a state. It depends on the gradient only, except
// under the L2 decay of ROWWISE_ADAGRAD. 0 for other rules.
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE float row_square(const UpdateRule& rule, const float* g, const float* w,
                                                       int64_t n) {
  if (rule.square_reads_weights()) return mean_square<true>(g, w, rule.square_decay(), n);
  return rule_facts(rule.optimizer).has_square ? mean_square<false>(g, nullptr, 0.0f, n) : 0.0f;
}

// The factors of weight and gradient in ROWWISE_ADAGRAD, by the new state of the row.
struct RowwiseFactors {
  float keep, multiplier;

  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE RowwiseFactors(const RowwiseAdagradHyper& hyper, float state) {
    multiplier = hyper.learning_rate / (std::sqrt(state) + hyper.eps);
    keep = hyper.has_l2() ? 1.0f - multiplier * hyper.weight_decay
                          : (hyper.is_decoupled() ? 1.0f - hyper.learning_rate * hyper.weight_decay : 1.0f);
  }
};

TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE float moving_mean(float beta, float mean, float number) {
  return beta * mean + (1.0f - beta) * number;
}

// The direction of LAMB in a column, by the new states.
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE float lamb_direction(const AdamHyper& hyper, const BiasCorrection& correction,
                                                           float m1, float m2, float w) {
  return m1 / correction.first / (std::sqrt(m2 / correction.second) + hyper.eps) + hyper.weight_decay * w;
}

// Writes the numbers whose norm decides the ratio of a row, for a rule that has_ratio: the direction of LAMB, and the
// new weights for max_norm. `states`: by place, before the update. `square`: row_square of the same g and w.
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE void measure_columns(const UpdateRule& rule, const BiasCorrection& correction,
                                                           float square, const float* __restrict__ g,
                                                           const float* __restrict__ w, const float* const* states,
                                                           float* __restrict__ to, int64_t n) {
  const float* __restrict__ const m1 = states[0];
  const float* __restrict__ const m2 = states[1];
  switch (rule.optimizer) {
    case Optimizer::kRowwiseAdagrad: {
      const RowwiseFactors factors(rule.named<RowwiseAdagradHyper>(), m1[0] + square);
      for (int64_t c = 0; c < n; ++c) to[c] = factors.keep * w[c] - factors.multiplier * g[c];
      return;
    }
    case Optimizer::kLamb: {
      const auto hyper = rule.named<AdamHyper>();
      for (int64_t c = 0; c < n; ++c)
        to[c] = lamb_direction(hyper, correction, moving_mean(hyper.beta1, m1[c], g[c]),
                               moving_mean(hyper.beta2, m2[c], g[c] * g[c]), w[c]);
      return;
    }
    case Optimizer::kPartialRowwiseLamb: {
      const auto hyper = rule.named<AdamHyper>();
      const float of_row = moving_mean(hyper.beta2, m2[0], square);
      for (int64_t c = 0; c < n; ++c)
        to[c] = lamb_direction(hyper, correction, moving_mean(hyper.beta1, m1[c], g[c]), of_row, w[c]);
      return;
    }
    default:
      return;
  }
}

// The ratio of a row, by the sums of the squares of its measured columns and of its weights before the update.
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE float ratio_of(const UpdateRule& rule, float measured, float weights) {
  const float norm = std::sqrt(measured), weight_norm = std::sqrt(weights);
  if (rule.optimizer == Optimizer::kRowwiseAdagrad) {
    const float most = rule.named<RowwiseAdagradHyper>().max_norm;
    return norm > most ? most / norm : 1.0f;
  }
  return norm > 0.0f && weight_norm > 0.0f ? weight_norm / norm : 1.0f;
}

TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE void update_by_adam(const AdamHyper& hyper, const BiasCorrection& correction,
                                                          const float* __restrict__ g, float* __restrict__ w,
                                                          float* __restrict__ m1, float* __restrict__ m2, int64_t n) {
  for (int64_t c = 0; c < n; ++c) {
    m1[c] = hyper.beta1 * m1[c] + (1.0f - hyper.beta1) * g[c];
    m2[c] = hyper.beta2 * m2[c] + (1.0f - hyper.beta2) * (g[c] * g[c]);
    const float direction = m1[c] / correction.first / (std::sqrt(m2[c] / correction.second) + hyper.eps);
    w[c] -= hyper.learning_rate * (direction + hyper.weight_decay * w[c]);
  }
}

// Updates one row by a rule that is_common. `square`: row_square of the same g and w.
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE void update_common_row(const UpdateRule& rule, const BiasCorrection& correction,
                                                             float square, const float* __restrict__ g,
                                                             float* __restrict__ w, float* __restrict__ m1,
                                                             float* __restrict__ m2, int64_t n) {
  switch (rule.optimizer) {
    case Optimizer::kSgd: {
      const auto hyper = rule.named<SgdHyper>();
      for (int64_t c = 0; c < n; ++c) w[c] -= hyper.learning_rate * g[c];
      return;
    }
    case Optimizer::kAdagrad: {
      const auto hyper = rule.named<AdagradHyper>();
      for (int64_t c = 0; c < n; ++c) {
        m1[c] += g[c] * g[c];
        w[c] -= hyper.learning_rate * g[c] / (std::sqrt(m1[c]) + hyper.eps);
      }
      return;
    }
    case Optimizer::kRowwiseAdagrad: {
      const auto hyper = rule.named<RowwiseAdagradHyper>();
      m1[0] += square;
      const RowwiseFactors factors(hyper, m1[0]);
      for (int64_t c = 0; c < n; ++c) w[c] = factors.keep * w[c] - factors.multiplier * g[c];
      return;
    }
    case Optimizer::kAdam:
      return update_by_adam(rule.named<AdamHyper>(), correction, g, w, m1, m2, n);
    case Optimizer::kPartialRowwiseAdam: {
      const auto hyper = rule.named<AdamHyper>();
      m2[0] = hyper.beta2 * m2[0] + (1.0f - hyper.beta2) * square;
      const float denominator = std::sqrt(m2[0] / correction.second) + hyper.eps;
      for (int64_t c = 0; c < n; ++c) {
        m1[c] = hyper.beta1 * m1[c] + (1.0f - hyper.beta1) * g[c];
        w[c] -= hyper.learning_rate * (m1[c] / correction.first / denominator + hyper.weight_decay * w[c]);
      }
      return;
    }
    default:
      return;
  }
}

// The same for the other rules. `ratio`: of a rule that has_ratio; 1 for others. `states`: by place.
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE void update_rare_row(const UpdateRule& rule, const BiasCorrection& correction,
                                                           float square, float ratio, const float* __restrict__ g,
                                                           float* __restrict__ w, float* const* states, int64_t n) {
  float* __restrict__ const m1 = states[0];
  float* __restrict__ const m2 = states[1];
  switch (rule.optimizer) {
    case Optimizer::kRowwiseAdagrad: {
      m1[0] += square;
      const RowwiseFactors factors(rule.named<RowwiseAdagradHyper>(), m1[0]);
      for (int64_t c = 0; c < n; ++c) w[c] = ratio * (factors.keep * w[c] - factors.multiplier * g[c]);
      return;
    }
    case Optimizer::kAdamByRow: {
      const auto hyper = rule.named<AdamHyper>();
      const float count = states[2][0] += 1.0f;
      const BiasCorrection own = {rest_of_power(hyper.beta1, count), rest_of_power(hyper.beta2, count)};
      return update_by_adam(hyper, own, g, w, m1, m2, n);
    }
    case Optimizer::kFtrl: {
      const auto hyper = rule.named<FtrlHyper>();
      for (int64_t c = 0; c < n; ++c) {
        const float sum = m1[c] + g[c] * g[c], root = std::sqrt(sum);
        m2[c] += g[c] - (root - std::sqrt(m1[c])) / hyper.learning_rate * w[c];
        m1[c] = sum;
        // 0 only before the first gradient whose square is above 0. A NaN of m2 is not 0: it must be seen.
        const float divisor = root / hyper.learning_rate + 2.0f * hyper.l2;
        const bool is_zero = std::fabs(m2[c]) <= hyper.l1 || divisor == 0.0f;
        w[c] = is_zero ? 0.0f : (std::copysign(hyper.l1, m2[c]) - m2[c]) / divisor;
      }
      return;
    }
    case Optimizer::kLamb: {
      const auto hyper = rule.named<AdamHyper>();
      const float rate = hyper.learning_rate * ratio;
      for (int64_t c = 0; c < n; ++c) {
        m1[c] = moving_mean(hyper.beta1, m1[c], g[c]);
        m2[c] = moving_mean(hyper.beta2, m2[c], g[c] * g[c]);
        w[c] -= rate * lamb_direction(hyper, correction, m1[c], m2[c], w[c]);
      }
      return;
    }
    case Optimizer::kPartialRowwiseLamb: {
      const auto hyper = rule.named<AdamHyper>();
      const float rate = hyper.learning_rate * ratio, of_row = moving_mean(hyper.beta2, m2[0], square);
      m2[0] = of_row;
      for (int64_t c = 0; c < n; ++c) {
        m1[c] = moving_mean(hyper.beta1, m1[c], g[c]);
        w[c] -= rate * lamb_direction(hyper, correction, m1[c], of_row, w[c]);
      }
      return;
    }
    default:
      return;
  }
}

// Updates one row by any rule.
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE void update_row(const UpdateRule& rule, const BiasCorrection& correction,
                                                      float square, float ratio, const float* __restrict__ g,
                                                      float* __restrict__ w, float* const* states, int64_t n) {
  if (rule.is_common())
    update_common_row(rule, correction, square, g, w, states[0], states[1], n);
  else
    update_rare_row(rule, correction, square, ratio, g, w, states, n);
}

// The arguments of stochastic rounding and bias correction: one line of `streams` [T, 3] int64.
struct Stream {
  uint64_t rounding_key;
  int64_t first_column;
  int64_t step;
};

// A table of an update: the blocks of its rows, states and marks, and the numbers that all its rows share.
template <typename T>
struct UpdatedTable {
  RowBlocks<T> weights;
  RowBlocks<float> states[kMostStates];  // without blocks: the rule has no such state
  MarkBits marks;                        // without blocks: the table keeps no marks
  Stream stream;
  BiasCorrection correction;
  float grad_scale;  // factor of a row's gradient sum
};

}  // namespace torchrec_dyn
