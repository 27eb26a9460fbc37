// The names and numbers in the body of a kernel, as rows of registers and constants.
#pragma once

#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "opcode.h"
#include "program.h"

namespace torchrec_dyn::ptx {

// Thrown for what the emulator does not know in one instruction: an error only if it is executed.
struct Unsupported : std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::string_view trimmed(std::string_view text);
// Splits at commas that are not within {} or [].
std::vector<std::string_view> split_operands(std::string_view text);
// A whole number of PTX: decimal, 0x or octal, with a sign and a U at the end.
uint64_t whole_number(std::string_view text);

class Operands {
 public:
  Operands(Kernel& kernel, const std::map<std::string, Variable>& variables)
      : kernel_(kernel), variables_(variables), scopes_(1) {}

  void open_scope() { scopes_.emplace_back(); }
  void close_scope() { scopes_.pop_back(); }
  void declare_register(const std::string& name, Type type);
  // The address of a parameter, of shared or of local memory, in its space.
  void declare_address(const std::string& name, uint64_t address) { addresses_[name] = address; }

  // A register, a special register, a number, or the address of a symbol.
  Operand source(std::string_view text);
  Operand destination(std::string_view text);  // `_`: a row that nobody reads
  Predicate predicate(std::string_view text);  // with or without `!`
  // [base], [base+offset]
  void address(std::string_view text, Instruction& instruction);
  // {a, b} or one operand
  void sources(std::string_view text, Instruction& instruction);
  void destinations(std::string_view text, Instruction& instruction);

 private:
  struct Register {
    bool is_predicate;
    int number;
  };
  const Register* find_register(std::string_view name) const;
  Operand constant(uint64_t word);
  Operand special(std::string_view name);
  uint64_t symbol(std::string_view name) const;

  Kernel& kernel_;
  const std::map<std::string, Variable>& variables_;
  std::vector<std::unordered_map<std::string, Register>> scopes_;
  std::unordered_map<std::string, uint64_t> addresses_;
  std::unordered_map<uint64_t, Operand> constants_;
  std::unordered_map<std::string, Operand> specials_;
};

}  // namespace torchrec_dyn::ptx
