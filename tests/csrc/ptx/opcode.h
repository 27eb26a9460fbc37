// The words of an opcode, `atom.global.add.u64`, and the handlers for them.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "program.h"

namespace torchrec_dyn::ptx {

// PTX ISA, "Fundamental Types". The kB types are bits of no type.
enum class Type : uint8_t {
  kNone,
  kPredicate,
  kB8,
  kU8,
  kS8,
  kB16,
  kU16,
  kS16,
  kF16,
  kBF16,
  kB32,
  kU32,
  kS32,
  kF32,
  kB64,
  kU64,
  kS64,
  kF64,
};

Type type_named(std::string_view word);
int bits_of(Type type);

// A modifier that no decoder asked about makes the instruction an unsupported one: none is ever ignored by accident.
class Opcode {
 public:
  explicit Opcode(std::string_view text);

  const std::string& name() const { return words_[0]; }
  bool is(std::string_view name) const { return words_[0] == name; }
  bool has(std::string_view modifier);
  bool has_any(std::initializer_list<std::string_view> modifiers);
  void ignore(std::initializer_list<std::string_view> modifiers) { has_any(modifiers); }
  void ignore_starting_with(std::string_view prefix);
  // The place in the list of the first of these modifiers; -1: none.
  int one_of(std::initializer_list<std::string_view> modifiers);
  // The last type, or the one before it.
  Type type(int before_last = 0);
  bool is_all_known() const;

 private:
  std::vector<std::string> words_;
  std::vector<bool> is_known_;
};

// Each returns null for what it does not know.
Handler integer_handler(Opcode& opcode);    // integer_arithmetic.cpp
Handler carry_handler(Opcode& opcode);      // carries.cpp
Handler bit_handler(Opcode& opcode);        // bits.cpp
Handler float_handler(Opcode& opcode);      // float_arithmetic.cpp
Handler predicate_handler(Opcode& opcode);  // comparisons.cpp
Handler setp_handler(Opcode& opcode, Instruction& instruction);
Handler selp_handler(Opcode& opcode);
Handler cvt_handler(Opcode& opcode, Instruction& instruction);  // conversions.cpp
Handler mov_handler(Type type, int destinations, int sources);  // moves.cpp
Handler cvta_handler(Opcode& opcode);
Handler load_handler(Type type);  // memory.cpp
Handler store_handler(Type type);
Handler atomic_handler(Type type, Reduction reduction);  // atomics.cpp
Handler fence_handler();                                 // races.cpp
Handler warp_barrier_handler();
Handler shuffle_handler();  // warp_functions.cpp
Handler vote_handler();
Handler match_handler(Type type, bool is_all);
Handler redux_handler();
Handler active_mask_handler();
Handler trap_handler();

}  // namespace torchrec_dyn::ptx
