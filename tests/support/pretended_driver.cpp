// A CUDA driver without a GPU, for the address ranges of csrc: it checks how they call it, and fails on demand.
//
// GPU 1 can reach the memory of GPU 0, GPU 2 cannot. Memory is none: a range is a number of addresses.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <map>
#include <set>
#include <string>

#include "device_errors.h"
#include "storage/growing_blocks.h"

namespace {

constexpr int kDevices = 3;
constexpr size_t kPage = 2 << 20;

struct Driver {
  std::string log;           // of calls, and of wrong uses
  std::string failing;       // the name of a function
  int error = 0;             // that it returns
  std::set<void*> captured;  // streams
  void* current = nullptr;   // stream of this thread
  int contexts = 0, pushed = 0;
  std::map<CUdeviceptr, size_t> reserved, mapped;
  std::map<CUmemGenericAllocationHandle, size_t> pieces;
} driver;

// Notes a call. Returns the error that a test wants from it.
int called(const char* name, const std::string& arguments = "") {
  driver.log += name + arguments + "\n";
  return driver.failing == name ? driver.error : 0;
}

void expect(bool right, const char* rule) {
  if (!right) driver.log += std::string("WRONG: ") + rule + "\n";
}

CUresult device_count(int* count) {
  *count = kDevices;
  return static_cast<CUresult>(called("cuDeviceGetCount"));
}

CUresult can_access(int* can, CUdevice device, CUdevice peer) {
  *can = device != 2 && peer != 2;
  return static_cast<CUresult>(called("cuDeviceCanAccessPeer"));
}

CUresult retain(CUcontext* context, CUdevice device) {
  const int error = called("cuDevicePrimaryCtxRetain");
  if (error == 0) ++driver.contexts;
  *context = reinterpret_cast<CUcontext>(static_cast<uintptr_t>(device) + 1);
  return static_cast<CUresult>(error);
}

CUresult release(CUdevice) {
  --driver.contexts;
  return static_cast<CUresult>(called("cuDevicePrimaryCtxRelease"));
}

CUresult push(CUcontext) {
  const int error = called("cuCtxPushCurrent");
  if (error == 0) ++driver.pushed;
  return static_cast<CUresult>(error);
}

CUresult pop(CUcontext*) {
  --driver.pushed;
  return static_cast<CUresult>(called("cuCtxPopCurrent"));
}

CUresult granularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = kPage;
  return static_cast<CUresult>(called("cuMemGetAllocationGranularity"));
}

CUresult reserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  static CUdeviceptr next = CUdeviceptr{1} << 40;
  if (const int error = called("cuMemAddressReserve")) return static_cast<CUresult>(error);
  driver.reserved[*address = next] = bytes;
  next += bytes + kPage;
  return CUDA_SUCCESS;
}

CUresult free_addresses(CUdeviceptr address, size_t bytes) {
  const auto range = driver.reserved.find(address);
  expect(range != driver.reserved.end() && range->second == bytes, "a range is freed as it was reserved");
  for (const auto& [begin, size] : driver.mapped)
    expect(begin + size <= address || begin >= address + bytes, "what is freed is not mapped");
  driver.reserved.erase(address);
  return static_cast<CUresult>(called("cuMemAddressFree"));
}

CUresult create(CUmemGenericAllocationHandle* piece, size_t bytes, const CUmemAllocationProp*, unsigned long long) {
  static CUmemGenericAllocationHandle next = 1;
  if (const int error = called("cuMemCreate")) return static_cast<CUresult>(error);
  driver.pieces[*piece = next++] = bytes;
  return CUDA_SUCCESS;
}

CUresult release_piece(CUmemGenericAllocationHandle piece) {
  expect(driver.pieces.erase(piece) == 1, "a piece is released once");
  return static_cast<CUresult>(called("cuMemRelease"));
}

CUresult map(CUdeviceptr address, size_t bytes, size_t, CUmemGenericAllocationHandle piece, unsigned long long) {
  if (const int error = called("cuMemMap")) return static_cast<CUresult>(error);
  expect(driver.pieces[piece] == bytes, "a piece is mapped whole");
  driver.mapped[address] = bytes;
  return CUDA_SUCCESS;
}

CUresult unmap(CUdeviceptr address, size_t bytes) {
  const auto piece = driver.mapped.find(address);
  expect(piece != driver.mapped.end() && piece->second == bytes, "a piece is unmapped as it was mapped");
  driver.mapped.erase(address);
  return static_cast<CUresult>(called("cuMemUnmap"));
}

CUresult set_access(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access, size_t count) {
  std::string devices;
  for (size_t i = 0; i < count; ++i) devices += " " + std::to_string(access[i].location.id);
  expect(driver.mapped[address] == bytes, "access is for a piece");
  return static_cast<CUresult>(called("cuMemSetAccess", devices));
}

bool find_stream(int32_t, void** stream) {
  *stream = driver.current;
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

extern "C" {

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  static const std::map<std::string, void*> functions{
      {"cuDeviceGetCount", reinterpret_cast<void*>(&device_count)},
      {"cuDeviceCanAccessPeer", reinterpret_cast<void*>(&can_access)},
      {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(&retain)},
      {"cuDevicePrimaryCtxRelease", reinterpret_cast<void*>(&release)},
      {"cuCtxPushCurrent", reinterpret_cast<void*>(&push)},
      {"cuCtxPopCurrent", reinterpret_cast<void*>(&pop)},
      {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(&granularity)},
      {"cuMemAddressReserve", reinterpret_cast<void*>(&reserve)},
      {"cuMemAddressFree", reinterpret_cast<void*>(&free_addresses)},
      {"cuMemCreate", reinterpret_cast<void*>(&create)},
      {"cuMemRelease", reinterpret_cast<void*>(&release_piece)},
      {"cuMemMap", reinterpret_cast<void*>(&map)},
      {"cuMemUnmap", reinterpret_cast<void*>(&unmap)},
      {"cuMemSetAccess", reinterpret_cast<void*>(&set_access)},
  };
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
  expect(driver.pushed > 0, "the range's GPU is waited for");
  expect(driver.captured.empty(), "nothing is waited for while a stream is captured");
  return static_cast<cudaError_t>(called("cudaDeviceSynchronize"));
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const bool captured = driver.captured.contains(stream);
  *status = captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

// What tests call. A text is an error; "" is none.

const char* raise_lost_device() {
  return error_of([] { torchrec_dyn::simt::raise_lost_device(); });
}

const char* new_range(int64_t bytes, int64_t committed, void** begin) {
  return error_of([&] {
    *begin = torchrec_dyn::GrowingBlocks::shared().add(torchrec_dyn::reserve_cuda_addresses(bytes, 0, &find_stream),
                                                       committed);
  });
}

const char* extend(void* begin, int64_t bytes) {
  return error_of([&] { torchrec_dyn::GrowingBlocks::shared().extend(begin, bytes); });
}

void give_back(void* begin) { torchrec_dyn::GrowingBlocks::shared().give_back(begin); }
void free_left() { torchrec_dyn::GrowingBlocks::shared().free_left(); }

// All calls of a function return an error from now on; "": no more.
void fail(const char* function, int error) {
  driver.failing = function;
  driver.error = error;
}

void set_stream(void* current, bool is_captured) {
  driver.current = current;
  if (is_captured) driver.captured.insert(current);
}

void end_captures() { driver.captured.clear(); }

// The calls since the last call of this function.
const char* calls() {
  static std::string log;
  log = std::move(driver.log);
  driver.log.clear();
  return log.c_str();
}

int64_t contexts() { return driver.contexts; }
int64_t contexts_pushed() { return driver.pushed; }
int64_t ranges() { return static_cast<int64_t>(driver.reserved.size()); }
int64_t pieces() { return static_cast<int64_t>(driver.mapped.size() + driver.pieces.size()); }
}
