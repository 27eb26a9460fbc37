// PTX ISA, "Integer Arithmetic Instructions" and the shifts of "Logic and Shift Instructions". Sums and products wrap.
#include <limits>

#include "elementwise.h"

namespace torchrec_dyn::ptx {
namespace {

// The type that the arithmetic of T is done in: unsigned, so that it wraps, and not of 16 bits, which C++ would promote
// to int.
template <typename T>
using Wrapping = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <typename T>
struct WideOf;
template <>
struct WideOf<uint16_t> {
  using Type = uint32_t;
};
template <>
struct WideOf<int16_t> {
  using Type = int32_t;
};
template <>
struct WideOf<uint32_t> {
  using Type = uint64_t;
};
template <>
struct WideOf<int32_t> {
  using Type = int64_t;
};
template <>
struct WideOf<uint64_t> {
  using Type = unsigned __int128;
};
template <>
struct WideOf<int64_t> {
  using Type = __int128;
};
// Twice the bits.
template <typename T>
using Wide = typename WideOf<T>::Type;

template <typename T>
T low_product(T a, T b) {
  return static_cast<T>(static_cast<Wrapping<T>>(a) * static_cast<Wrapping<T>>(b));
}

template <typename T>
T high_product(T a, T b) {
  return static_cast<T>((static_cast<Wide<T>>(a) * static_cast<Wide<T>>(b)) >> (8 * sizeof(T)));
}

template <typename T>
T sum(T a, T b) {
  return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
}

template <typename T>
T difference(T a, T b) {
  return static_cast<T>(static_cast<Wrapping<T>>(a) - static_cast<Wrapping<T>>(b));
}

// "Division by zero yields an unspecified, machine-specific value": all bits set, as GPUs return. The least number by
// -1 would end the process on x86.
template <typename T>
T quotient(T a, T b) {
  if (b == 0) return static_cast<T>(~T{0});
  if (std::is_signed_v<T> && b == static_cast<T>(-1)) return difference(T{0}, a);
  return static_cast<T>(a / b);
}

template <typename T>
T remainder(T a, T b) {
  if (b == 0) return a;
  if (std::is_signed_v<T> && b == static_cast<T>(-1)) return 0;
  return static_cast<T>(a % b);
}

template <typename T>
Handler product_handler(Opcode& opcode) {
  const bool adds = opcode.is("mad");
  if (opcode.has("lo"))
    return adds ? ternary<T>([](T a, T b, T c) { return sum(low_product(a, b), c); })
                : binary<T>([](T a, T b) { return low_product(a, b); });
  if (opcode.has("hi"))
    return adds ? ternary<T>([](T a, T b, T c) { return sum(high_product(a, b), c); })
                : binary<T>([](T a, T b) { return high_product(a, b); });
  if constexpr (sizeof(T) < 8) {
    using W = Wide<T>;
    if (opcode.has("wide"))
      return adds ? ternary<T, W>([](T a, T b, W c) { return sum(static_cast<W>(W{a} * W{b}), c); })
                  : binary<T>([](T a, T b) { return static_cast<W>(W{a} * W{b}); });
  }
  return nullptr;
}

// Amounts beyond the width count as the width.
template <typename T>
Handler shift_handler(const Opcode& opcode) {
  constexpr uint32_t kBits = 8 * sizeof(T);
  if (opcode.is("shl"))
    return binary<T, uint32_t>([](T a, uint32_t amount) {
      return amount < kBits ? static_cast<T>(static_cast<Wrapping<T>>(a) << amount) : T{0};
    });
  return binary<T, uint32_t>([](T a, uint32_t amount) {
    const T filled = static_cast<T>(std::is_signed_v<T> && a < 0 ? -1 : 0);
    return amount < kBits ? static_cast<T>(a >> amount) : filled;
  });
}

template <typename T>
Handler typed_handler(Opcode& opcode) {
  if (opcode.is("add")) return binary<T>([](T a, T b) { return sum(a, b); });
  if (opcode.is("sub")) return binary<T>([](T a, T b) { return difference(a, b); });
  if (opcode.is("mul") || opcode.is("mad")) return product_handler<T>(opcode);
  if (opcode.is("div")) return binary<T>([](T a, T b) { return quotient(a, b); });
  if (opcode.is("rem")) return binary<T>([](T a, T b) { return remainder(a, b); });
  if (opcode.is("min")) return binary<T>([](T a, T b) { return a < b ? a : b; });
  if (opcode.is("max")) return binary<T>([](T a, T b) { return a > b ? a : b; });
  if (opcode.is("neg")) return unary<T>([](T a) { return difference(T{0}, a); });
  if (opcode.is("abs")) return unary<T>([](T a) { return a < 0 ? difference(T{0}, a) : a; });
  if (opcode.is("shl") || opcode.is("shr")) return shift_handler<T>(opcode);
  return nullptr;
}

}  // namespace

Handler integer_handler(Opcode& opcode) {
  return for_integer(opcode.type(), [&]<typename T>() { return typed_handler<T>(opcode); });
}

}  // namespace torchrec_dyn::ptx
