// The text of a module: variables and kernels. PTX ISA, "Syntax" and "Directives". Functions (.func) are passed over: a
// call of one is an unsupported instruction.
#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "decoder.h"
#include "emulator.h"

namespace torchrec_dyn::ptx {
namespace {

// Comments become spaces, so that lines keep their numbers. The text ends at a 0.
std::string without_comments(const std::string& text) {
  std::string result(text, 0, text.find('\0'));
  for (size_t i = 0; i + 1 < result.size(); ++i) {
    if (result[i] != '/') continue;
    if (result[i + 1] == '/') {
      for (; i < result.size() && result[i] != '\n'; ++i) result[i] = ' ';
    } else if (result[i + 1] == '*') {
      const size_t end = std::min(result.find("*/", i + 2), result.size() - 2) + 2;
      for (; i < end; ++i)
        if (result[i] != '\n') result[i] = ' ';
    }
  }
  return result;
}

size_t aligned(size_t offset, size_t alignment) { return (offset + alignment - 1) / alignment * alignment; }

// `.align 8 .b8 name[24] = {1, 2}`
struct Declaration {
  std::string name;
  size_t alignment = 1, element_bytes = 0, bytes = 0;
  std::string_view initial;
};

class Parser {
 public:
  Parser(const std::string& text, Module& module) : text_(text), module_(module) {}

  void parse_module() {
    bool is_external = false;
    for (skip_space(); place_ < text_.size(); skip_space()) {
      const std::string word = take_word();
      if (word == ".extern") {
        is_external = true;
        continue;
      }
      if (word == ".entry") {
        parse_kernel();
      } else if (word == ".global" || word == ".const") {
        const Declaration variable = parse_declaration(take_until(';'));
        if (!is_external) add_variable(variable);
      } else if (word == ".shared") {
        // Of the whole module: nvcc declares shared memory in kernels, but for the memory that a launch adds.
        if (!is_external) fail("expected .shared in a kernel");
        const Declaration added = parse_declaration(take_until(';'));
        added_shared_.push_back(added.name);
      } else if (word == ".target") {
        module_.target = std::string(trimmed(take_until('\n')));
      } else if (word == ".func") {
        skip_function();
      } else if (word == ".section") {
        take_until('{');
        skip_block();
      } else if (word == ".version" || word == ".address_size" || word == ".file") {
        take_until('\n');
      } else if (word == ".pragma" || word == ".alias") {
        take_until(';');
      } else if (word != ".visible" && word != ".weak" && word != ".common") {
        fail("expected a directive of a module, got " + (word.empty() ? text_.substr(place_, 20) : word));
      }
      is_external = false;
    }
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error("PTX line " + std::to_string(line_) + ": " + what + ".");
  }

  char letter(size_t place) const { return place < text_.size() ? text_[place] : '\0'; }

  void skip_space() {
    for (; std::isspace(static_cast<unsigned char>(letter(place_))) != 0; ++place_) line_ += text_[place_] == '\n';
  }

  static bool is_of_name(char letter) {
    return std::isalnum(static_cast<unsigned char>(letter)) != 0 || letter == '_' || letter == '$' || letter == '%';
  }

  // A name or a directive.
  std::string take_word() {
    skip_space();
    const size_t begin = place_;
    while (is_of_name(letter(place_)) || letter(place_) == '.') ++place_;
    return text_.substr(begin, place_ - begin);
  }

  // The text before `end`, which is taken too.
  std::string_view take_until(char end) {
    const size_t begin = place_;
    for (; place_ < text_.size() && text_[place_] != end; ++place_) line_ += text_[place_] == '\n';
    if (place_ == text_.size() && end != '\n') fail(std::string("expected ") + end + ", got the end");
    const std::string_view taken(text_.data() + begin, place_ - begin);
    line_ += end == '\n';
    ++place_;
    return taken;
  }

  // After a '{': all up to its '}'.
  void skip_block() {
    for (int depth = 1; depth > 0; ++place_) {
      if (place_ >= text_.size()) fail("expected }, got the end");
      depth += text_[place_] == '{' ? 1 : text_[place_] == '}' ? -1 : 0;
      line_ += text_[place_] == '\n';
    }
  }

  void skip_function() {
    while (place_ < text_.size() && text_[place_] != ';' && text_[place_] != '{') line_ += text_[place_++] == '\n';
    if (letter(place_++) == '{') skip_block();
  }

  // What follows .global, .shared, .param and the like.
  Declaration parse_declaration(std::string_view text) const {
    Declaration found;
    if (const size_t equals = text.find('='); equals != std::string_view::npos) {
      found.initial = trimmed(text.substr(equals + 1));
      text = text.substr(0, equals);
    }
    size_t elements = 1;
    if (const size_t bracket = text.find('['); bracket != std::string_view::npos) {
      for (size_t at = bracket; at != std::string_view::npos; at = text.find('[', at + 1))
        elements *= std::strtoull(std::string(text.substr(at + 1, 20)).c_str(), nullptr, 0);
      text = text.substr(0, bracket);
    }
    bool is_pointer = false;  // .ptr .align: of what the parameter points to
    text = trimmed(text);
    while (!text.empty()) {
      const size_t end = std::min(text.find_first_of(" \t\r\n"), text.size());
      const std::string_view word = text.substr(0, end);
      text = trimmed(text.substr(end));
      if (word == ".ptr") is_pointer = true;
      if (word == ".align") {
        const size_t number_end = std::min(text.find_first_of(" \t\r\n"), text.size());
        if (!is_pointer) found.alignment = whole_number(text.substr(0, number_end));
        text = trimmed(text.substr(number_end));
      } else if (word[0] != '.') {
        found.name = word;
      } else if (const int bits = bits_of(type_named(word.substr(1))); bits >= 8) {
        found.element_bytes = static_cast<size_t>(bits) / 8;
      }
    }
    if (found.name.empty() || found.element_bytes == 0) fail("expected a declaration of a known type");
    found.bytes = elements * found.element_bytes;
    found.alignment = std::max(found.alignment, found.element_bytes);
    return found;
  }

  // Memory of a variable lives as long as the process: kernels of other launches may hold its address.
  void add_variable(const Declaration& variable) {
    const size_t bytes = aligned(std::max<size_t>(variable.bytes, 1), 256);
    auto* memory = static_cast<uint8_t*>(std::aligned_alloc(256, bytes));
    std::memset(memory, 0, bytes);
    module_.variables[variable.name] = {memory, variable.bytes};
    std::string_view initial = variable.initial;
    if (initial.empty()) return;
    if (initial.starts_with('{')) initial = initial.substr(1, initial.size() - 2);
    size_t offset = 0;
    for (const std::string_view element : split_operands(initial)) {
      if (offset + variable.element_bytes > variable.bytes) fail("expected as many numbers as elements");
      uint64_t number = 0;
      try {
        number = whole_number(element);
      } catch (const Unsupported&) {
        fail("expected whole numbers as first values of " + variable.name + ", got " + std::string(element));
      }
      std::memcpy(memory + offset, &number, variable.element_bytes);
      offset += variable.element_bytes;
    }
  }

  void parse_kernel() {
    auto kernel = std::make_unique<Kernel>();
    kernel_ = kernel.get();
    kernel_->name = take_word();
    kernel_->target = module_.target;
    Operands operands(*kernel_, module_.variables);
    operands_ = &operands;
    skip_space();
    if (letter(place_) == '(') {
      ++place_;
      parse_parameters(take_until(')'));
    }
    parse_bounds(take_until('{'));
    parse_body();
    // A kernel may end without ret.
    kernel_->code.emplace_back();
    kernel_->code.back().control = Control::kExit;
    kernel_->code.back().is_meeting_point = true;
    kernel_->code.back().line = line_;
    kernel_->code.back().text = "(the end of the kernel)";
    next_is_meeting_point_ = false;
    kernel_->executed.resize(kernel_->code.size());
    module_.kernels[kernel_->name] = std::move(kernel);
  }

  void parse_parameters(std::string_view text) {
    if (trimmed(text).empty()) return;
    for (const std::string_view each : split_operands(text)) {
      const Declaration parameter = parse_declaration(each);
      const size_t offset = aligned(kernel_->parameter_bytes, parameter.alignment);
      kernel_->parameters.push_back({parameter.name, parameter.bytes, offset});
      kernel_->parameter_bytes = offset + parameter.bytes;
      operands_->declare_address(parameter.name, offset);
    }
  }

  // "Performance-Tuning Directives". .maxntid and .reqntid have up to three numbers.
  void parse_bounds(std::string_view text) {
    for (const std::string_view directive : {".maxntid", ".reqntid"}) {
      const size_t at = text.find(directive);
      if (at == std::string_view::npos) continue;
      int x = 1, y = 1, z = 1;
      const std::string numbers(text.substr(at + directive.size(), 60));
      std::sscanf(numbers.c_str(), " %d , %d , %d", &x, &y, &z);
      kernel_->max_threads = x * y * z;
    }
  }

  // A label belongs to the {} around it: nvcc repeats the labels of inline assembly.
  struct Scope {
    std::map<std::string, uint32_t> labels;
    std::vector<std::pair<size_t, std::string>> branches;
  };

  void parse_body() {
    std::vector<Scope> scopes(1);
    while (!scopes.empty()) {
      skip_space();
      const char next = letter(place_);
      if (next == '\0') fail("expected }, got the end");
      if (next == '{') {
        ++place_;
        scopes.emplace_back();
        operands_->open_scope();
      } else if (next == '}') {
        ++place_;
        close_scope(scopes);
        operands_->close_scope();
      } else if (next == ';') {
        ++place_;
      } else if (next == '.') {
        parse_directive();
      } else if (!parse_label(scopes.back())) {
        parse_instruction(scopes.back());
      }
    }
  }

  void close_scope(std::vector<Scope>& scopes) {
    Scope closed = std::move(scopes.back());
    scopes.pop_back();
    for (auto& [instruction, label] : closed.branches) {
      if (const auto found = closed.labels.find(label); found != closed.labels.end()) {
        kernel_->code[instruction].target = found->second;
      } else if (scopes.empty()) {
        fail("expected a label " + label);
      } else {
        scopes.back().branches.emplace_back(instruction, label);
      }
    }
  }

  void parse_directive() {
    const std::string word = take_word();
    if (word == ".loc" || word == ".file") {
      take_until('\n');
      return;
    }
    const std::string_view text = take_until(';');
    if (word == ".reg") {
      parse_registers(trimmed(text));
    } else if (word == ".shared") {
      if (!kernel_->code.empty() && !added_shared_.empty()) fail("expected .shared before the first instruction");
      declare_memory(parse_declaration(text), kernel_->shared_bytes);
    } else if (word == ".local") {
      declare_memory(parse_declaration(text), kernel_->local_bytes);
    } else if (word != ".pragma" && word != ".param" && word != ".branchtargets" && word != ".callprototype") {
      fail("expected a directive of a kernel, got " + word);
    }
  }

  void declare_memory(const Declaration& declared, size_t& bytes) {
    bytes = aligned(bytes, declared.alignment);
    operands_->declare_address(declared.name, bytes);
    bytes += declared.bytes;
  }

  // `.b32 %r<10>` or `.b32 a, b`
  void parse_registers(std::string_view text) {
    const size_t end = std::min(text.find_first_of(" \t"), text.size());
    const Type type = type_named(text.substr(1, end - 1));
    if (type == Type::kNone) fail("expected registers of at most 64 bits, got " + std::string(text));
    for (const std::string_view each : split_operands(trimmed(text.substr(end)))) {
      const size_t bracket = each.find('<');
      if (bracket == std::string_view::npos) {
        operands_->declare_register(std::string(each), type);
        continue;
      }
      const uint64_t count = std::strtoull(std::string(each.substr(bracket + 1, 20)).c_str(), nullptr, 10);
      for (uint64_t i = 0; i < count; ++i)
        operands_->declare_register(std::string(each.substr(0, bracket)) + std::to_string(i), type);
    }
  }

  bool parse_label(Scope& scope) {
    size_t end = place_;
    while (is_of_name(letter(end))) ++end;
    size_t colon = end;
    while (std::isspace(static_cast<unsigned char>(letter(colon))) != 0) ++colon;
    if (end == place_ || letter(colon) != ':' || letter(colon + 1) == ':') return false;
    scope.labels[text_.substr(place_, end - place_)] = static_cast<uint32_t>(kernel_->code.size());
    next_is_meeting_point_ = true;
    place_ = colon + 1;
    return true;
  }

  void parse_instruction(Scope& scope) {
    if (kernel_->code.empty()) declare_added_shared();
    const int line = line_;
    std::string branch;
    Instruction instruction = decode(*operands_, take_until(';'), line, branch);
    if (!branch.empty()) scope.branches.emplace_back(kernel_->code.size(), branch);
    instruction.is_meeting_point =
        std::exchange(next_is_meeting_point_, instruction.control == Control::kBranch && instruction.guard.exists());
    kernel_->code.push_back(std::move(instruction));
  }

  // Memory that a launch adds follows the kernel's own.
  void declare_added_shared() {
    for (const std::string& name : added_shared_)
      operands_->declare_address(name, aligned(kernel_->shared_bytes, kAddedSharedAlignment));
  }

  const std::string text_;
  Module& module_;
  size_t place_ = 0;
  int line_ = 1;
  std::vector<std::string> added_shared_;

  // of the kernel that is parsed
  Kernel* kernel_ = nullptr;
  Operands* operands_ = nullptr;
  bool next_is_meeting_point_ = false;
};

}  // namespace

Module::Module() = default;
Module::~Module() = default;

std::unique_ptr<Module> parse(const std::string& text) {
  auto module = std::make_unique<Module>();
  Parser(without_comments(text), *module).parse_module();
  return module;
}

}  // namespace torchrec_dyn::ptx
