#include "operands.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <iterator>
#include <utility>

namespace torchrec_dyn::ptx {
namespace {

// PTX ISA, "Special Registers". Clocks and the like have no meaning here.
constexpr std::pair<std::string_view, Special> kSpecials[] = {
    {"%tid.x", Special::kThreadX},
    {"%tid.y", Special::kThreadY},
    {"%tid.z", Special::kThreadZ},
    {"%ntid.x", Special::kBlockSizeX},
    {"%ntid.y", Special::kBlockSizeY},
    {"%ntid.z", Special::kBlockSizeZ},
    {"%ctaid.x", Special::kBlockX},
    {"%ctaid.y", Special::kBlockY},
    {"%ctaid.z", Special::kBlockZ},
    {"%nctaid.x", Special::kGridSizeX},
    {"%nctaid.y", Special::kGridSizeY},
    {"%nctaid.z", Special::kGridSizeZ},
    {"%laneid", Special::kLane},
    {"%warpid", Special::kWarp},
    {"%nwarpid", Special::kWarps},
    {"%lanemask_eq", Special::kMaskEqual},
    {"%lanemask_lt", Special::kMaskLess},
    {"%lanemask_le", Special::kMaskLessEqual},
    {"%lanemask_gt", Special::kMaskGreater},
    {"%lanemask_ge", Special::kMaskGreaterEqual},
};

[[noreturn]] void refuse(std::string_view rule, std::string_view text) {
  throw Unsupported("expected " + std::string(rule) + ", got " + std::string(text));
}

bool begins_number(std::string_view text) {
  return !text.empty() && (std::isdigit(static_cast<unsigned char>(text[0])) != 0 || text[0] == '-');
}

// A whole number, or the bits of a floating-point one: 0f3F800000, 0d3FF0000000000000.
uint64_t number(std::string_view text) {
  const bool is_negative = text[0] == '-';
  const std::string_view digits = text.substr(is_negative ? 1 : 0);
  const char kind = digits.size() > 2 && digits[0] == '0' ? digits[1] : ' ';
  if (kind == 'f' || kind == 'F' || kind == 'd' || kind == 'D') {
    const bool is_double = kind == 'd' || kind == 'D';
    const uint64_t sign = uint64_t{is_negative} << (is_double ? 63 : 31);
    return std::strtoull(std::string(digits.substr(2)).c_str(), nullptr, 16) ^ sign;
  }
  return whole_number(text);
}

}  // namespace

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n";
  const size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

std::vector<std::string_view> split_operands(std::string_view text) {
  std::vector<std::string_view> parts;
  int depth = 0;
  size_t begin = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '{' || text[i] == '[') ++depth;
    if (text[i] == '}' || text[i] == ']') --depth;
    if (text[i] != ',' || depth != 0) continue;
    parts.push_back(trimmed(text.substr(begin, i - begin)));
    begin = i + 1;
  }
  parts.push_back(trimmed(text.substr(begin)));
  return parts;
}

uint64_t whole_number(std::string_view text) {
  const bool is_negative = !text.empty() && text[0] == '-';
  const std::string digits(text.substr(is_negative ? 1 : 0));
  char* end = nullptr;
  const uint64_t number = std::strtoull(digits.c_str(), &end, 0);
  if (*end == 'U') ++end;
  if (digits.empty() || *end != 0) refuse("a whole number", text);
  return is_negative ? -number : number;
}

void Operands::declare_register(const std::string& name, Type type) {
  const bool is_predicate = type == Type::kPredicate;
  if (type == Type::kNone) refuse("a register of at most 64 bits", name);
  scopes_.back()[name] = {is_predicate, is_predicate ? kernel_.predicates++ : kernel_.registers++};
}

const Operands::Register* Operands::find_register(std::string_view name) const {
  const std::string key(name);
  for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope)
    if (const auto found = scope->find(key); found != scope->end()) return &found->second;
  return nullptr;
}

Operand Operands::constant(uint64_t word) {
  const auto [found, is_new] = constants_.try_emplace(word, 0);
  if (is_new) {
    found->second = ~static_cast<Operand>(kernel_.constants.size() / kLanes);
    kernel_.constants.resize(kernel_.constants.size() + kLanes, word);
  }
  return found->second;
}

Operand Operands::special(std::string_view name) {
  const auto* special = std::ranges::find(kSpecials, name, &std::pair<std::string_view, Special>::first);
  if (special == std::end(kSpecials)) refuse("a register", name);
  const auto [found, is_new] = specials_.try_emplace(std::string(name), 0);
  if (is_new) {
    found->second = kernel_.registers++;
    kernel_.specials.emplace_back(special->second, found->second);
  }
  return found->second;
}

uint64_t Operands::symbol(std::string_view name) const {
  const std::string key(name);
  if (const auto address = addresses_.find(key); address != addresses_.end()) return address->second;
  if (const auto variable = variables_.find(key); variable != variables_.end())
    return reinterpret_cast<uint64_t>(variable->second.memory);
  refuse("an operand", name);
}

Operand Operands::source(std::string_view text) {
  text = trimmed(text);
  if (const Register* found = find_register(text)) {
    if (found->is_predicate) refuse("a register of a number", text);
    return found->number;
  }
  if (begins_number(text)) return constant(number(text));
  if (text == "WARP_SZ") return constant(kLanes);
  if (text.starts_with('%')) return special(text);
  const size_t plus = text.find('+');
  const uint64_t offset = plus == std::string_view::npos ? 0 : whole_number(trimmed(text.substr(plus + 1)));
  return constant(symbol(trimmed(text.substr(0, plus))) + offset);
}

Operand Operands::destination(std::string_view text) {
  text = trimmed(text);
  if (text == "_") return kernel_.registers++;
  const Register* found = find_register(text);
  if (found == nullptr || found->is_predicate) refuse("a register of a number", text);
  return found->number;
}

Predicate Operands::predicate(std::string_view text) {
  text = trimmed(text);
  const bool is_negated = text.starts_with('!');
  if (is_negated) text = trimmed(text.substr(1));
  Predicate predicate{kNoOperand, is_negated ? kAllLanes : 0};
  if (const Register* found = find_register(text); found != nullptr && found->is_predicate)
    predicate.number = found->number;
  else if (begins_number(text))
    predicate.number = whole_number(text) == 0 ? kNever : kAlways;
  else
    refuse("a predicate", text);
  return predicate;
}

void Operands::address(std::string_view text, Instruction& instruction) {
  text = trimmed(text);
  if (!text.starts_with('[') || !text.ends_with(']')) refuse("an address in []", text);
  text = trimmed(text.substr(1, text.size() - 2));
  if (const size_t plus = text.find('+'); plus != std::string_view::npos) {
    instruction.offset = static_cast<int64_t>(whole_number(trimmed(text.substr(plus + 1))));
    text = text.substr(0, plus);
  }
  instruction.source[instruction.sources++] = source(text);
}

void Operands::sources(std::string_view text, Instruction& instruction) {
  text = trimmed(text);
  if (text.starts_with('{')) text = text.substr(1, text.size() - 2);
  for (const std::string_view part : split_operands(text)) {
    if (instruction.sources >= 8) refuse("at most 8 operands", text);
    instruction.source[instruction.sources++] = source(part);
  }
}

void Operands::destinations(std::string_view text, Instruction& instruction) {
  text = trimmed(text);
  if (text.starts_with('{')) text = text.substr(1, text.size() - 2);
  for (const std::string_view part : split_operands(text)) {
    if (instruction.destinations >= 8) refuse("at most 8 operands", text);
    instruction.destination[instruction.destinations++] = destination(part);
  }
}

}  // namespace torchrec_dyn::ptx
