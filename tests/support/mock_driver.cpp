// CUDA without a GPU, for the address ranges of csrc: the emulated driver of tests/csrc/ptx with three GPUs, of
// which neighbours reach each other's memory. A test reads the calls, makes them fail, and captures streams.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <string_view>

#include "device_errors.h"
#include "../csrc/ptx/driver.h"
#include "../csrc/ptx/emulator.h"
#include "storage/address_range.h"

namespace {

struct Asked {
  std::string calls;               // and what was wrong in them
  std::string failing;             // the name of a function
  int error = 0;                   // that it returns
  std::set<const void*> captured;  // streams
  void* current = nullptr;         // stream of this thread
} asked;

// Notes a call. Returns the error that a test wants from it.
int called(std::string_view name, const std::string& arguments = "") {
  asked.calls += std::string(name) + arguments + "\n";
  return asked.failing == name ? asked.error : 0;
}

template <size_t kSize>
struct Name {
  char text[kSize] = {};
  constexpr Name(const char (&name)[kSize]) { std::copy(name, name + kSize, text); }
};

std::string described(...) { return ""; }
std::string described(CUdeviceptr, size_t, const CUmemAccessDesc* access, size_t count) {
  std::string devices;
  for (size_t i = 0; i < count; ++i) devices += " " + std::to_string(access[i].location.id);
  return devices;
}

template <Name kName, typename... Arguments>
CUresult noted(Arguments... arguments) {
  if (const int error = called(kName.text, described(arguments...))) return static_cast<CUresult>(error);
  return reinterpret_cast<CUresult (*)(Arguments...)>(torchrec_dyn::ptx::driver_function(kName.text))(arguments...);
}

template <Name kName, typename... Arguments>
std::pair<const std::string, void*> entry(CUresult (*)(Arguments...)) {
  return {kName.text, reinterpret_cast<void*>(&noted<kName, Arguments...>)};
}

bool find_stream(int32_t, void** stream) {
  *stream = asked.current;
  return true;
}

template <typename Call>
const char* error_of(const Call& call) {
  static std::string text;
  try {
    call();
    return "";
  } catch (const std::bad_alloc&) {
    return "no memory";
  } catch (const std::exception& error) {
    return (text = error.what()).c_str();
  }
}

}  // namespace

void torchrec_dyn::ptx::report(const std::string& line) { asked.calls += "WRONG: " + line + "\n"; }

extern "C" {

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
#define TORCHREC_DYN_NOTED(name) entry<#name>(static_cast<decltype(&::name)>(nullptr))
  static const std::map<std::string, void*> functions{
      TORCHREC_DYN_NOTED(cuDeviceGetCount),
      TORCHREC_DYN_NOTED(cuDeviceCanAccessPeer),
      TORCHREC_DYN_NOTED(cuDevicePrimaryCtxRetain),
      TORCHREC_DYN_NOTED(cuDevicePrimaryCtxRelease),
      TORCHREC_DYN_NOTED(cuCtxPushCurrent),
      TORCHREC_DYN_NOTED(cuCtxPopCurrent),
      TORCHREC_DYN_NOTED(cuMemGetAllocationGranularity),
      TORCHREC_DYN_NOTED(cuMemAddressReserve),
      TORCHREC_DYN_NOTED(cuMemAddressFree),
      TORCHREC_DYN_NOTED(cuMemCreate),
      TORCHREC_DYN_NOTED(cuMemRelease),
      TORCHREC_DYN_NOTED(cuMemMap),
      TORCHREC_DYN_NOTED(cuMemUnmap),
      TORCHREC_DYN_NOTED(cuMemSetAccess),
      TORCHREC_DYN_NOTED(cuMemHostAlloc),
      TORCHREC_DYN_NOTED(cuMemFreeHost),
  };
#undef TORCHREC_DYN_NOTED
  const auto place = functions.find(name);
  *found = place == functions.end() ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  *function = place == functions.end() ? nullptr : place->second;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorIllegalAddress ? "an illegal memory access was encountered" : "another error";
}
cudaError_t cudaMemGetInfo(size_t*, size_t*) { return static_cast<cudaError_t>(called("cudaMemGetInfo")); }

cudaError_t cudaDeviceSynchronize() {
  if (!asked.captured.empty()) torchrec_dyn::ptx::report("a wait while a stream is captured");
  return static_cast<cudaError_t>(called("cudaDeviceSynchronize"));
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const bool captured = asked.captured.contains(stream);
  *status = captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

// What tests call. A text is an error; "" is none.

const char* raise_lost_device() {
  return error_of([] { torchrec_dyn::simt::raise_lost_device(); });
}

const char* new_range(int64_t bytes, int64_t committed, bool on_host, void** begin) {
  return error_of([&] {
    const auto reserve = on_host ? &torchrec_dyn::reserve_host_memory : &torchrec_dyn::reserve_cuda_addresses;
    *begin = torchrec_dyn::GrowingBlocks::shared().add(reserve(bytes, 0, &find_stream), committed);
  });
}

const char* extend(void* begin, int64_t bytes) {
  return error_of([&] { torchrec_dyn::GrowingBlocks::shared().extend(begin, bytes); });
}

void give_back(void* begin) { torchrec_dyn::GrowingBlocks::shared().give_back(begin); }
void free_left() { torchrec_dyn::GrowingBlocks::shared().free_left(); }

// All calls of a function return an error from now on; "": no more.
void fail(const char* function, int error) {
  asked.failing = function;
  asked.error = error;
}

void set_stream(void* current, bool is_captured) {
  asked.current = current;
  if (is_captured) asked.captured.insert(current);
}

void end_captures() { asked.captured.clear(); }

// The calls since the last call of this function.
const char* calls() {
  static std::string calls;
  calls = std::move(asked.calls);
  asked.calls.clear();
  return calls.c_str();
}

int64_t contexts() { return torchrec_dyn::ptx::held().contexts; }
int64_t ranges() { return torchrec_dyn::ptx::held().ranges; }
int64_t pieces() { return torchrec_dyn::ptx::held().pieces; }
}
