#include "decoder.h"

#include <algorithm>

#include "warp.h"

namespace torchrec_dyn::ptx {
namespace {

using Texts = std::vector<std::string_view>;

// An instruction while it is decoded. PTX ISA, "Instruction Statements": @guard opcode operands.
struct Draft {
  Operands& operands;
  Instruction& instruction;
  Opcode& opcode;
  const Texts& texts;
  std::string& branch;

  void expect(bool holds, const char* rule) const {
    if (!holds) throw Unsupported(std::string("expected ") + rule);
  }
  void expect_operands(size_t count) const { expect(texts.size() == count, "another number of operands"); }
};

// d or d|p
void decode_result(Draft& draft, std::string_view text) {
  const size_t bar = text.find('|');
  draft.operands.destinations(text.substr(0, bar), draft.instruction);
  if (bar != std::string_view::npos) draft.instruction.result[0] = draft.operands.predicate(text.substr(bar + 1));
}

void decode_exit(Draft& draft) {
  draft.opcode.ignore({"uni"});
  draft.instruction.control = Control::kExit;
}

void decode_branch(Draft& draft) {
  draft.opcode.ignore({"uni"});
  draft.expect_operands(1);
  draft.instruction.control = Control::kBranch;
  draft.branch = draft.texts[0];
}

void decode_sleep(Draft& draft) {
  draft.opcode.type();
  draft.instruction.control = Control::kYield;
}

void decode_trap(Draft& draft) { draft.instruction.run = trap_handler(); }

void decode_fence(Draft& draft) {
  draft.instruction.is_for_block = draft.opcode.has("cta");
  draft.opcode.ignore({"gl", "sys", "gpu", "acq_rel", "sc", "cluster"});
  draft.instruction.control = Control::kYield;
  draft.instruction.run = fence_handler();
}

void decode_prefetch(Draft& draft) {
  draft.opcode.ignore({"global", "local", "L1", "L2"});
  draft.instruction.run = +[](Warp&, const Instruction&, uint32_t) {};
}

// bar.warp.sync mask; bar.sync a{, b}; bar.red.op.type d, a{, b}, {!}c. Barriers of part of a block are refused when
// they are executed (barriers.cpp).
void decode_barrier(Draft& draft) {
  Instruction& instruction = draft.instruction;
  const Texts& texts = draft.texts;
  if (draft.opcode.has("warp")) {
    draft.expect(draft.opcode.has("sync"), "bar.warp.sync");
    draft.expect_operands(1);
    instruction.control = Control::kWarpSync;
    instruction.is_warp_barrier = true;
    instruction.member_mask = draft.operands.source(texts[0]);
    instruction.run = warp_barrier_handler();
    return;
  }
  instruction.control = Control::kBarrier;
  instruction.is_aligned = draft.opcode.is("bar") || draft.opcode.has("aligned");
  draft.opcode.ignore({"cta", "sync"});
  size_t first = 0, end = texts.size();
  if (draft.opcode.has("red")) {
    const int reduction = draft.opcode.one_of({"and", "or", "popc"});
    draft.expect(reduction >= 0 && texts.size() >= 3, "bar.red of and, or, popc");
    instruction.reduction = reduction == 0 ? Reduction::kAnd : reduction == 1 ? Reduction::kOr : Reduction::kCount;
    draft.opcode.type();
    if (reduction == 2)
      draft.operands.destinations(texts[0], instruction);
    else
      instruction.result[0] = draft.operands.predicate(texts[0]);
    instruction.condition[0] = draft.operands.predicate(texts.back());
    first = 1, end = texts.size() - 1;
  }
  draft.expect(end - first == 1 || end - first == 2, "a barrier and a number of threads");
  for (size_t i = first; i < end; ++i) draft.operands.sources(texts[i], instruction);
}

void decode_shuffle(Draft& draft) {
  Instruction& instruction = draft.instruction;
  draft.expect_operands(5);
  const int kind = draft.opcode.one_of({"up", "down", "bfly", "idx"});
  draft.expect(draft.opcode.has("sync") && kind >= 0 && draft.opcode.type() == Type::kB32, "shfl.sync of b32");
  instruction.control = Control::kWarpSync;
  instruction.shuffle = static_cast<Shuffle>(kind);
  decode_result(draft, draft.texts[0]);
  for (size_t i = 1; i < 4; ++i) draft.operands.sources(draft.texts[i], instruction);
  instruction.member_mask = draft.operands.source(draft.texts[4]);
  instruction.run = shuffle_handler();
}

void decode_vote(Draft& draft) {
  Instruction& instruction = draft.instruction;
  draft.expect_operands(3);
  const int kind = draft.opcode.one_of({"ballot", "any", "all", "uni"});
  draft.expect(draft.opcode.has("sync") && kind >= 0, "vote.sync");
  draft.opcode.type();
  instruction.control = Control::kWarpSync;
  instruction.vote = static_cast<Vote>(kind);
  if (kind == 0)
    draft.operands.destinations(draft.texts[0], instruction);
  else
    instruction.result[0] = draft.operands.predicate(draft.texts[0]);
  instruction.condition[0] = draft.operands.predicate(draft.texts[1]);
  instruction.member_mask = draft.operands.source(draft.texts[2]);
  instruction.run = vote_handler();
}

void decode_match(Draft& draft) {
  Instruction& instruction = draft.instruction;
  draft.expect_operands(3);
  const bool is_all = draft.opcode.has("all");
  draft.expect(draft.opcode.has("sync") && is_all != draft.opcode.has("any"), "match.sync of any or all");
  instruction.control = Control::kWarpSync;
  decode_result(draft, draft.texts[0]);
  draft.operands.sources(draft.texts[1], instruction);
  instruction.member_mask = draft.operands.source(draft.texts[2]);
  instruction.run = match_handler(draft.opcode.type(), is_all);
}

void decode_redux(Draft& draft) {
  constexpr Reduction kReductions[] = {Reduction::kAdd, Reduction::kMin, Reduction::kMax,
                                       Reduction::kAnd, Reduction::kOr,  Reduction::kXor};
  Instruction& instruction = draft.instruction;
  draft.expect_operands(3);
  const int reduction = draft.opcode.one_of({"add", "min", "max", "and", "or", "xor"});
  const Type type = draft.opcode.type();
  draft.expect(draft.opcode.has("sync") && reduction >= 0 && bits_of(type) == 32 && type != Type::kF32,
               "redux.sync of 32-bit integers");
  instruction.control = Control::kWarpSync;
  instruction.reduction = kReductions[reduction];
  instruction.is_signed = type == Type::kS32;
  draft.operands.destinations(draft.texts[0], instruction);
  draft.operands.sources(draft.texts[1], instruction);
  instruction.member_mask = draft.operands.source(draft.texts[2]);
  instruction.run = redux_handler();
}

void decode_active_mask(Draft& draft) {
  draft.expect_operands(1);
  draft.opcode.type();
  draft.operands.destinations(draft.texts[0], draft.instruction);
  draft.instruction.run = active_mask_handler();
}

Space space_of(Opcode& opcode) {
  if (opcode.has("global")) return Space::kGlobal;
  if (opcode.has_any({"shared", "shared::cta"})) return Space::kShared;
  if (opcode.has("local")) return Space::kLocal;
  if (opcode.has_any({"param", "param::entry"})) return Space::kParameter;
  return opcode.has("const") ? Space::kConstant : Space::kGeneric;
}

// Of an access: where, how strong, and what only caches care for.
void decode_access(Draft& draft) {
  Instruction& instruction = draft.instruction;
  Opcode& opcode = draft.opcode;
  instruction.space = space_of(opcode);
  const int order = opcode.one_of({"weak", "relaxed", "acquire", "release", "acq_rel"});
  if (order >= 0) instruction.order = static_cast<Order>(order);
  if (opcode.has("volatile")) instruction.order = Order::kRelaxed;
  instruction.is_for_block = opcode.has("cta");
  opcode.ignore({"cluster", "gpu", "sys"});
}

void decode_load_or_store(Draft& draft) {
  Instruction& instruction = draft.instruction;
  Opcode& opcode = draft.opcode;
  draft.expect_operands(2);
  decode_access(draft);
  opcode.ignore({"ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc"});
  opcode.ignore_starting_with("L1::");
  opcode.ignore_starting_with("L2::");
  constexpr uint8_t kVectors[] = {2, 4, 8};
  const int vector = opcode.one_of({"v2", "v4", "v8"});
  if (vector >= 0) instruction.vector = kVectors[vector];
  if (opcode.is("st")) {
    draft.expect(instruction.space != Space::kParameter && instruction.space != Space::kConstant, "memory to write");
    draft.operands.address(draft.texts[0], instruction);
    draft.operands.sources(draft.texts[1], instruction);
    draft.expect(instruction.sources == instruction.vector + 1, "an operand for each element");
    instruction.run = store_handler(opcode.type());
  } else {
    draft.operands.destinations(draft.texts[0], instruction);
    draft.operands.address(draft.texts[1], instruction);
    draft.expect(instruction.destinations == instruction.vector, "an operand for each element");
    instruction.run = load_handler(opcode.type());
  }
}

void decode_atomic(Draft& draft) {
  Instruction& instruction = draft.instruction;
  Opcode& opcode = draft.opcode;
  instruction.order = Order::kRelaxed;  // without another one
  decode_access(draft);
  const int reduction = opcode.one_of({"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"});
  draft.expect(reduction >= 0, "an atomic function");
  instruction.is_atomic = true;
  instruction.reduction = static_cast<Reduction>(reduction + 1);
  const size_t first = opcode.is("atom") ? 1 : 0;
  draft.expect_operands(first + 2 + (instruction.reduction == Reduction::kCompareExchange ? 1 : 0));
  if (first == 1) draft.operands.destinations(draft.texts[0], instruction);
  draft.operands.address(draft.texts[first], instruction);
  for (size_t i = first + 1; i < draft.texts.size(); ++i) draft.operands.sources(draft.texts[i], instruction);
  instruction.run = atomic_handler(opcode.type(), instruction.reduction);
}

void decode_move(Draft& draft) {
  Instruction& instruction = draft.instruction;
  draft.expect_operands(2);
  const Type type = draft.opcode.type();
  if (type == Type::kPredicate) {
    instruction.result[0] = draft.operands.predicate(draft.texts[0]);
    instruction.condition[0] = draft.operands.predicate(draft.texts[1]);
    instruction.run = predicate_handler(draft.opcode);
    return;
  }
  draft.operands.destinations(draft.texts[0], instruction);
  draft.operands.sources(draft.texts[1], instruction);
  const int parts = std::max(instruction.destinations, instruction.sources);
  draft.expect(std::min(instruction.destinations, instruction.sources) == 1, "one vector");
  instruction.part_bits = static_cast<uint8_t>(bits_of(type) / parts);
  instruction.run = mov_handler(type, instruction.destinations, instruction.sources);
}

void decode_address_conversion(Draft& draft) {
  draft.expect_operands(2);
  draft.instruction.space = space_of(draft.opcode);
  draft.operands.destinations(draft.texts[0], draft.instruction);
  draft.operands.sources(draft.texts[1], draft.instruction);
  draft.instruction.run = cvta_handler(draft.opcode);
}

void decode_comparison(Draft& draft) {
  Instruction& instruction = draft.instruction;
  instruction.run = setp_handler(draft.opcode, instruction);
  const bool has_third = instruction.combination != Combination::kNone;
  draft.expect_operands(has_third ? 4 : 3);
  const size_t bar = draft.texts[0].find('|');
  instruction.result[0] = draft.operands.predicate(draft.texts[0].substr(0, bar));
  if (bar != std::string_view::npos) instruction.result[1] = draft.operands.predicate(draft.texts[0].substr(bar + 1));
  draft.operands.sources(draft.texts[1], instruction);
  draft.operands.sources(draft.texts[2], instruction);
  if (has_third) instruction.condition[0] = draft.operands.predicate(draft.texts[3]);
}

void decode_selection(Draft& draft) {
  draft.expect_operands(4);
  draft.operands.destinations(draft.texts[0], draft.instruction);
  draft.operands.sources(draft.texts[1], draft.instruction);
  draft.operands.sources(draft.texts[2], draft.instruction);
  draft.instruction.condition[0] = draft.operands.predicate(draft.texts[3]);
  draft.instruction.run = selp_handler(draft.opcode);
}

void decode_conversion(Draft& draft) {
  Instruction& instruction = draft.instruction;
  instruction.run = cvt_handler(draft.opcode, instruction);
  draft.expect_operands(draft.opcode.has_any({"f16x2", "bf16x2"}) ? 3 : 2);
  draft.operands.destinations(draft.texts[0], instruction);
  for (size_t i = 1; i < draft.texts.size(); ++i) draft.operands.sources(draft.texts[i], instruction);
}

void decode_logic_of_predicates(Draft& draft) {
  draft.instruction.result[0] = draft.operands.predicate(draft.texts[0]);
  for (size_t i = 1; i < draft.texts.size(); ++i)
    draft.instruction.condition[i - 1] = draft.operands.predicate(draft.texts[i]);
  draft.instruction.run = predicate_handler(draft.opcode);
}

// Modules are parsed while the program starts, so tables are constants: nothing here waits for a constructor.
template <typename Value>
struct Named {
  std::string_view name;
  Value value;
};

template <typename Value, size_t count>
const Value* find_named(const Named<Value> (&table)[count], std::string_view name) {
  for (const Named<Value>& named : table)
    if (named.name == name) return &named.value;
  return nullptr;
}

// Functions of the operands of one lane, by their number.
constexpr Named<size_t> kElementwise[] = {
    {"add", 2},  {"addc", 2},  {"sub", 2},  {"subc", 2}, {"mul", 2},      {"mad", 3},  {"div", 2},
    {"rem", 2},  {"min", 2},   {"max", 2},  {"neg", 1},  {"abs", 1},      {"shl", 2},  {"shr", 2},
    {"and", 2},  {"or", 2},    {"xor", 2},  {"not", 1},  {"cnot", 1},     {"popc", 1}, {"clz", 1},
    {"brev", 1}, {"bfind", 1}, {"bfi", 4},  {"bfe", 3},  {"bmsk", 2},     {"prmt", 3}, {"shf", 3},
    {"lop3", 4}, {"fma", 3},   {"sqrt", 1}, {"rcp", 1},  {"copysign", 2},
};

void decode_elementwise(Draft& draft) {
  const size_t* operands = find_named(kElementwise, draft.opcode.name());
  draft.expect(operands != nullptr, "a known instruction");
  draft.expect_operands(*operands + 1);
  if (draft.opcode.type() == Type::kPredicate) return decode_logic_of_predicates(draft);
  draft.operands.destinations(draft.texts[0], draft.instruction);
  for (size_t i = 1; i < draft.texts.size(); ++i) draft.operands.sources(draft.texts[i], draft.instruction);
  for (const auto find : {carry_handler, integer_handler, bit_handler, float_handler}) {
    draft.instruction.run = find(draft.opcode);
    if (draft.instruction.run != nullptr) return;
  }
}

using Decode = void (*)(Draft&);
constexpr Named<Decode> kDecoders[] = {
    {"ret", decode_exit},
    {"exit", decode_exit},
    {"bra", decode_branch},
    {"nanosleep", decode_sleep},
    {"trap", decode_trap},
    {"membar", decode_fence},
    {"fence", decode_fence},
    {"prefetch", decode_prefetch},
    {"prefetchu", decode_prefetch},
    {"bar", decode_barrier},
    {"barrier", decode_barrier},
    {"shfl", decode_shuffle},
    {"vote", decode_vote},
    {"match", decode_match},
    {"redux", decode_redux},
    {"activemask", decode_active_mask},
    {"ld", decode_load_or_store},
    {"ldu", decode_load_or_store},
    {"st", decode_load_or_store},
    {"atom", decode_atomic},
    {"red", decode_atomic},
    {"mov", decode_move},
    {"cvta", decode_address_conversion},
    {"setp", decode_comparison},
    {"selp", decode_selection},
    {"cvt", decode_conversion},
};

// One line, as a report shows it.
std::string one_line(std::string_view text) {
  std::string line(text);
  for (char& letter : line)
    if (letter == '\n' || letter == '\t') letter = ' ';
  return line;
}

std::string_view take_word(std::string_view& text) {
  const size_t end = std::min(text.find_first_of(" \t\r\n"), text.size());
  const std::string_view word = text.substr(0, end);
  text = trimmed(text.substr(end));
  return word;
}

void decode_into(Instruction& instruction, Operands& operands, std::string_view text, std::string& branch) {
  if (text.starts_with('@')) instruction.guard = operands.predicate(take_word(text).substr(1));
  Opcode opcode(take_word(text));
  const Texts texts = text.empty() ? Texts{} : split_operands(text);
  Draft draft{operands, instruction, opcode, texts, branch};
  const Decode* decode = find_named(kDecoders, opcode.name());
  decode == nullptr ? decode_elementwise(draft) : (*decode)(draft);
  const bool needs_handler = instruction.control == Control::kPlain || instruction.control == Control::kWarpSync;
  draft.expect(!needs_handler || instruction.run != nullptr, "a known instruction");
  draft.expect(opcode.is_all_known(), "known modifiers");
}

}  // namespace

Instruction decode(Operands& operands, std::string_view text, int line, std::string& branch) {
  Instruction instruction;
  text = trimmed(text);
  try {
    decode_into(instruction, operands, text, branch);
  } catch (const Unsupported&) {
    const Predicate guard = instruction.guard;
    instruction = {};
    instruction.guard = guard;
    instruction.run = run_unsupported;
    branch.clear();
  }
  instruction.line = line;
  instruction.text = one_line(text);
  return instruction;
}

}  // namespace torchrec_dyn::ptx
