// PTX ISA, "Floating Point Instructions". Rounding is to nearest even, and subnormal numbers are kept: what nvcc writes
// without -use_fast_math. Other roundings, .ftz, .sat and .approx are unsupported.
#include <cmath>

#include "elementwise.h"

namespace torchrec_dyn::ptx {
namespace {

template <typename T>
using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
template <typename T>
constexpr Bits<T> kSign = Bits<T>{1} << (8 * sizeof(T) - 1);

// The operand that is not a NaN; -0 is less than +0.
template <typename T>
T lesser(T a, T b) {
  if (std::isnan(a)) return b;
  if (std::isnan(b)) return a;
  return a < b || (a == b && std::signbit(a)) ? a : b;
}

template <typename T>
T greater(T a, T b) {
  if (std::isnan(a)) return b;
  if (std::isnan(b)) return a;
  return a > b || (a == b && std::signbit(b)) ? a : b;
}

template <typename T>
Handler sign_handler(const Opcode& opcode) {
  if (opcode.is("neg")) return unary<Bits<T>>([](Bits<T> a) { return a ^ kSign<T>; });
  if (opcode.is("abs")) return unary<Bits<T>>([](Bits<T> a) { return a & ~kSign<T>; });
  if (opcode.is("copysign"))
    return binary<Bits<T>>([](Bits<T> a, Bits<T> b) { return (b & ~kSign<T>) | (a & kSign<T>); });
  return nullptr;
}

template <typename T>
Handler float_handler_of(Opcode& opcode) {
  if (const Handler handler = sign_handler<T>(opcode)) return handler;
  if (opcode.is("min"))
    return opcode.has("NaN") ? binary<T>([](T a, T b) { return std::isunordered(a, b) ? a + b : lesser(a, b); })
                             : binary<T>([](T a, T b) { return lesser(a, b); });
  if (opcode.is("max"))
    return opcode.has("NaN") ? binary<T>([](T a, T b) { return std::isunordered(a, b) ? a + b : greater(a, b); })
                             : binary<T>([](T a, T b) { return greater(a, b); });
  const bool is_rounded = opcode.has("rn");
  if (opcode.is("add")) return binary<T>([](T a, T b) { return a + b; });
  if (opcode.is("sub")) return binary<T>([](T a, T b) { return a - b; });
  if (opcode.is("mul")) return binary<T>([](T a, T b) { return a * b; });
  // Without .rn these are approximations.
  if (!is_rounded) return nullptr;
  if (opcode.is("div")) return binary<T>([](T a, T b) { return a / b; });
  if (opcode.is("rcp")) return unary<T>([](T a) { return T{1} / a; });
  if (opcode.is("sqrt")) return unary<T>([](T a) { return std::sqrt(a); });
  if (opcode.is("fma") || opcode.is("mad")) return ternary<T>([](T a, T b, T c) { return std::fma(a, b, c); });
  return nullptr;
}

}  // namespace

Handler float_handler(Opcode& opcode) {
  const Type type = opcode.type();
  if (type == Type::kF32) return float_handler_of<float>(opcode);
  if (type == Type::kF64) return float_handler_of<double>(opcode);
  return nullptr;
}

}  // namespace torchrec_dyn::ptx
