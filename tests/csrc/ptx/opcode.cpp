#include "opcode.h"

#include <algorithm>
#include <functional>

namespace torchrec_dyn::ptx {
namespace {

struct NamedType {
  std::string_view name;
  Type type;
  int bits;
};

constexpr NamedType kTypes[] = {
    {"pred", Type::kPredicate, 1}, {"b8", Type::kB8, 8},    {"u8", Type::kU8, 8},    {"s8", Type::kS8, 8},
    {"b16", Type::kB16, 16},       {"u16", Type::kU16, 16}, {"s16", Type::kS16, 16}, {"f16", Type::kF16, 16},
    {"bf16", Type::kBF16, 16},     {"b32", Type::kB32, 32}, {"u32", Type::kU32, 32}, {"s32", Type::kS32, 32},
    {"f32", Type::kF32, 32},       {"b64", Type::kB64, 64}, {"u64", Type::kU64, 64}, {"s64", Type::kS64, 64},
    {"f64", Type::kF64, 64},
};

}  // namespace

Type type_named(std::string_view word) {
  for (const NamedType& named : kTypes)
    if (named.name == word) return named.type;
  return Type::kNone;
}

int bits_of(Type type) {
  for (const NamedType& named : kTypes)
    if (named.type == type) return named.bits;
  return 0;
}

Opcode::Opcode(std::string_view text) {
  while (true) {
    const size_t dot = text.find('.');
    words_.emplace_back(text.substr(0, dot));
    if (dot == std::string_view::npos) break;
    text.remove_prefix(dot + 1);
  }
  is_known_.resize(words_.size());
  is_known_[0] = true;
}

bool Opcode::has(std::string_view modifier) {
  bool found = false;
  for (size_t i = 1; i < words_.size(); ++i)
    if (words_[i] == modifier) found = is_known_[i] = true;
  return found;
}

bool Opcode::has_any(std::initializer_list<std::string_view> modifiers) {
  bool found = false;
  for (const std::string_view modifier : modifiers) found |= has(modifier);
  return found;
}

void Opcode::ignore_starting_with(std::string_view prefix) {
  for (size_t i = 1; i < words_.size(); ++i)
    if (words_[i].starts_with(prefix)) is_known_[i] = true;
}

int Opcode::one_of(std::initializer_list<std::string_view> modifiers) {
  for (size_t i = 0; i < modifiers.size(); ++i)
    if (has(modifiers.begin()[i])) return static_cast<int>(i);
  return -1;
}

Type Opcode::type(int before_last) {
  if (words_.size() < static_cast<size_t>(before_last) + 2) return Type::kNone;
  const size_t place = words_.size() - 1 - static_cast<size_t>(before_last);
  const Type type = type_named(words_[place]);
  if (type != Type::kNone) is_known_[place] = true;
  return type;
}

bool Opcode::is_all_known() const { return std::ranges::all_of(is_known_, std::identity{}); }

}  // namespace torchrec_dyn::ptx
