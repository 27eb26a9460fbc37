#include "fat_binaries.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>

namespace torchrec_dyn::ptx {
namespace {

// The layout of a fat binary, which NVIDIA does not document: cuobjdump and other readers agree on it.
struct Wrapper {
  uint32_t magic;  // 0x466243b1
  uint32_t version;
  const unsigned char* contents;
  const void* unused;
};

struct Header {
  uint32_t magic;  // 0xba55ed50
  uint16_t version;
  uint16_t header_bytes;
  uint64_t bytes;  // of the entries after the header
};

struct Entry {
  uint16_t kind;  // 1: PTX, 2: machine code
  uint16_t unused;
  uint32_t header_bytes;
  uint64_t bytes;  // after the header of the entry
};

constexpr uint32_t kWrapperMagic = 0x466243b1;
constexpr uint32_t kHeaderMagic = 0xba55ed50;
constexpr uint16_t kPtx = 1;

[[noreturn]] void refuse(const std::string& what) {
  report(what);
  std::abort();
}

template <typename Record>
Record record_at(const unsigned char* place) {
  Record record;
  std::memcpy(&record, place, sizeof record);
  return record;
}

// The last text: of several it is that of the newest architecture.
std::string ptx_of(const void* wrapper) {
  const auto outer = record_at<Wrapper>(static_cast<const unsigned char*>(wrapper));
  if (outer.magic != kWrapperMagic) refuse("expected a fat binary of nvcc, got other bytes. Is this nvcc newer?");
  const auto header = record_at<Header>(outer.contents);
  if (header.magic != kHeaderMagic) refuse("expected a fat binary of nvcc, got other bytes. Is this nvcc newer?");
  const unsigned char* place = outer.contents + header.header_bytes;
  const unsigned char* end = place + header.bytes;
  std::string text;
  while (place < end) {
    const auto entry = record_at<Entry>(place);
    const unsigned char* contents = place + entry.header_bytes;
    if (entry.kind == kPtx) text.assign(contents, contents + entry.bytes);
    place = contents + entry.bytes;
  }
  if (text.empty()) refuse("expected PTX in a fat binary, got machine code only. Compile with code=compute_80.");
  if (text.find(".version") == std::string::npos)
    refuse("expected PTX as a text, got a compressed one. Compile with --no-compress.");
  text.resize(std::strlen(text.c_str()));  // zeros fill it up
  return text;
}

std::recursive_mutex& parsing() {
  static auto* mutex = new std::recursive_mutex;
  return *mutex;
}

}  // namespace

FatBinary::FatBinary(const void* wrapper) : text_(ptx_of(wrapper)) {}

Module& FatBinary::module() {
  const std::lock_guard<std::recursive_mutex> hold(parsing());
  try {
    if (module_ == nullptr) module_ = parse(text_);
  } catch (const std::exception& error) {
    refuse(std::string("expected PTX that the emulator can read, got: ") + error.what());
  }
  return *module_;
}

FatBinaries& FatBinaries::shared() {
  static auto* binaries = new FatBinaries;
  return *binaries;
}

FatBinary* FatBinaries::add(const void* wrapper) {
  return binaries_.emplace_back(std::make_unique<FatBinary>(wrapper)).get();
}

void FatBinaries::name_kernel(const void* stub, FatBinary* binary, const char* name) {
  kernels_.insert_or_assign(stub, Name{binary, name});
}

void FatBinaries::name_variable(const void* shadow, FatBinary* binary, const char* name) {
  variables_.insert_or_assign(shadow, Name{binary, name});
}

Kernel* FatBinaries::kernel(const void* stub) {
  const auto named = kernels_.find(stub);
  if (named == kernels_.end()) return nullptr;
  auto& kernels = named->second.binary->module().kernels;
  const auto kernel = kernels.find(named->second.name);
  return kernel == kernels.end() ? nullptr : kernel->second.get();
}

const Variable* FatBinaries::variable(const void* shadow) {
  const auto named = variables_.find(shadow);
  if (named == variables_.end()) return nullptr;
  const auto& variables = named->second.binary->module().variables;
  const auto variable = variables.find(named->second.name);
  return variable == variables.end() ? nullptr : &variable->second;
}

int FatBinaries::compute_capability() {
  const std::string& target = binaries_.front()->module().target;
  return std::atoi(target.c_str() + std::strlen("sm_"));
}

std::vector<Module*> FatBinaries::modules() {
  std::vector<Module*> all;
  for (const auto& binary : binaries_) all.push_back(&binary->module());
  return all;
}

}  // namespace torchrec_dyn::ptx
