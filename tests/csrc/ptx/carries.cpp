// PTX ISA, "Extended-Precision Integer Arithmetic Instructions": sums and differences of several words. `.cc` writes
// the carry of each lane, addc and subc read it. A difference carries if it borrows.
#include "elementwise.h"

namespace torchrec_dyn::ptx {
namespace {

struct Result {
  uint64_t word;
  bool carry;
};

template <typename U, bool is_difference>
Result with_carry(U a, U b, bool carry) {
  const auto one = static_cast<U>(carry);
  if constexpr (is_difference) {
    return {static_cast<U>(a - b - one), a < b || (a == b && carry)};
  } else {
    const U sum = a + b;
    return {static_cast<U>(sum + one), sum < a || (sum == ~U{0} && carry)};
  }
}

template <typename U, bool is_difference, bool reads_carry, bool writes_carry>
void compute(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  uint64_t* out = written(warp, instruction.destination[0]);
  const uint64_t *a = read(warp, instruction.source[0]), *b = read(warp, instruction.source[1]);
  const uint32_t before = reads_carry ? warp.predicates[kCarry] : 0;
  uint32_t after = 0;
  for_lanes(lanes, [&](int lane) {
    const Result result = with_carry<U, is_difference>(as<U>(a[lane]), as<U>(b[lane]), has_lane(before, lane));
    out[lane] = result.word;
    after |= static_cast<uint32_t>(result.carry) << lane;
  });
  if (writes_carry) warp.predicates[kCarry] = (warp.predicates[kCarry] & ~lanes) | after;
}

template <typename U, bool is_difference>
Handler handler_of(bool reads_carry, bool writes_carry) {
  if (!reads_carry) return compute<U, is_difference, false, true>;
  return writes_carry ? compute<U, is_difference, true, true> : compute<U, is_difference, true, false>;
}

}  // namespace

Handler carry_handler(Opcode& opcode) {
  const bool reads_carry = opcode.is("addc") || opcode.is("subc");
  const bool is_difference = opcode.is("sub") || opcode.is("subc");
  if (!reads_carry && !opcode.is("add") && !is_difference) return nullptr;
  const bool writes_carry = opcode.has("cc");
  if (!reads_carry && !writes_carry) return nullptr;
  return for_integer(opcode.type(), [&]<typename T>() -> Handler {
    if constexpr (sizeof(T) >= 4) {
      using U = std::make_unsigned_t<T>;
      return is_difference ? handler_of<U, true>(reads_carry, writes_carry)
                           : handler_of<U, false>(reads_carry, writes_carry);
    }
    return nullptr;
  });
}

}  // namespace torchrec_dyn::ptx
