// Handlers that compute the result of each lane by a function of its operands.
#pragma once

#include "opcode.h"
#include "warp.h"

namespace torchrec_dyn::ptx {

// The operation is a lambda without captures, so that a handler is a plain function. Its result decides how it is
// stored.
template <typename T, typename Operation>
Handler unary(Operation) {
  return +[](Warp& warp, const Instruction& instruction, uint32_t lanes) {
    uint64_t* out = written(warp, instruction.destination[0]);
    const uint64_t* a = read(warp, instruction.source[0]);
    for_lanes(lanes, [=](int lane) { out[lane] = word_of(Operation{}(as<T>(a[lane]))); });
  };
}

template <typename T, typename U = T, typename Operation>
Handler binary(Operation) {
  return +[](Warp& warp, const Instruction& instruction, uint32_t lanes) {
    uint64_t* out = written(warp, instruction.destination[0]);
    const uint64_t *a = read(warp, instruction.source[0]), *b = read(warp, instruction.source[1]);
    for_lanes(lanes, [=](int lane) { out[lane] = word_of(Operation{}(as<T>(a[lane]), as<U>(b[lane]))); });
  };
}

template <typename T, typename U = T, typename Operation>
Handler ternary(Operation) {
  return +[](Warp& warp, const Instruction& instruction, uint32_t lanes) {
    uint64_t* out = written(warp, instruction.destination[0]);
    const uint64_t *a = read(warp, instruction.source[0]), *b = read(warp, instruction.source[1]);
    const uint64_t* c = read(warp, instruction.source[2]);
    for_lanes(lanes,
              [=](int lane) { out[lane] = word_of(Operation{}(as<T>(a[lane]), as<T>(b[lane]), as<U>(c[lane]))); });
  };
}

template <typename T, typename Operation>
Handler quaternary(Operation) {
  return +[](Warp& warp, const Instruction& instruction, uint32_t lanes) {
    uint64_t* out = written(warp, instruction.destination[0]);
    const uint64_t *a = read(warp, instruction.source[0]), *b = read(warp, instruction.source[1]);
    const uint64_t *c = read(warp, instruction.source[2]), *d = read(warp, instruction.source[3]);
    for_lanes(lanes, [=](int lane) {
      out[lane] = word_of(
          Operation{}(as<T>(a[lane]), as<T>(b[lane]), static_cast<uint32_t>(c[lane]), static_cast<uint32_t>(d[lane])));
    });
  };
}

// make.operator()<T>() for the integer type; null for another type.
template <typename Make>
Handler for_integer(Type type, const Make& make) {
  switch (type) {
    case Type::kB16:
    case Type::kU16:
      return make.template operator()<uint16_t>();
    case Type::kS16:
      return make.template operator()<int16_t>();
    case Type::kB32:
    case Type::kU32:
      return make.template operator()<uint32_t>();
    case Type::kS32:
      return make.template operator()<int32_t>();
    case Type::kB64:
    case Type::kU64:
      return make.template operator()<uint64_t>();
    case Type::kS64:
      return make.template operator()<int64_t>();
    default:
      return nullptr;
  }
}

}  // namespace torchrec_dyn::ptx
