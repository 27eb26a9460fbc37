// The driver's virtual memory by mmap, for the address ranges of csrc/storage/address_range.cu. Addresses are reserved,
// pieces of memory are made, mapped there and opened; a touch of what is not open is a fault. And memory of the host,
// which is one piece, and a fault once it is freed. A call that the driver's documentation does not allow is reported
// and returns its error.
#include <cuda.h>
#include <sys/mman.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "driver.h"
#include "emulator.h"

namespace torchrec_dyn::ptx {
namespace {

constexpr size_t kPage = size_t{2} << 20;         // as on GPUs
constexpr size_t kMostMemory = size_t{64} << 30;  // of one piece
#if defined(TORCHREC_DYN_PTX_DEVICES)             // tests/support/mock_driver.cpp
constexpr int kDevices = TORCHREC_DYN_PTX_DEVICES;
#else
constexpr int kDevices = 1;
#endif

std::mutex memory_lock;
std::map<CUdeviceptr, size_t> ranges;                   // reserved addresses, by their begin
std::map<CUmemGenericAllocationHandle, size_t> pieces;  // memory with a handle
std::map<CUdeviceptr, size_t> mappings;                 // by their begin
std::map<void*, size_t> host_pieces;                    // memory of the host, by its begin
CUmemGenericAllocationHandle next_piece = 1;

CUresult refused(const char* function, const char* rule, CUresult error = CUDA_ERROR_INVALID_VALUE) {
  report(std::string(function) + ": expected " + rule + ".");
  return error;
}

bool are_pages(uint64_t number) { return number % kPage == 0; }

// The last of the entries that begin at or before an address, if it holds all bytes from there.
bool is_within(const std::map<CUdeviceptr, size_t>& areas, CUdeviceptr begin, size_t bytes) {
  auto area = areas.upper_bound(begin);
  if (area == areas.begin()) return false;
  --area;
  return begin + bytes <= area->first + area->second;
}

bool meets(const std::map<CUdeviceptr, size_t>& areas, CUdeviceptr begin, size_t bytes) {
  const auto after = areas.lower_bound(begin + bytes);
  if (after == areas.begin()) return false;
  const auto last = std::prev(after);
  return last->first + last->second > begin;
}

bool is_area(const std::map<CUdeviceptr, size_t>& areas, CUdeviceptr begin, size_t bytes) {
  const auto area = areas.find(begin);
  return area != areas.end() && area->second == bytes;
}

// Addresses without memory. Null if there are none left.
void* take_addresses(void* place, size_t bytes) {
  const int fixed = place == nullptr ? 0 : MAP_FIXED;
  void* begin = mmap(place, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | fixed, -1, 0);
  return begin == MAP_FAILED ? nullptr : begin;
}

bool is_device(const CUmemLocation& location) {
  return location.type == CU_MEM_LOCATION_TYPE_DEVICE && location.id >= 0 && location.id < kDevices;
}

// ---- devices: each reaches its neighbours' memory

CUresult device_count(int* count) {
  *count = kDevices;
  return CUDA_SUCCESS;
}

CUresult can_access_peer(int* can, CUdevice device, CUdevice peer) {
  if (device < 0 || device >= kDevices || peer < 0 || peer >= kDevices || device == peer)
    return refused("cuDeviceCanAccessPeer", "two devices", CUDA_ERROR_INVALID_DEVICE);
  *can = device - peer == 1 || peer - device == 1;
  return CUDA_SUCCESS;
}

// ---- contexts: one for each device, as long as it is retained

int retained = 0;
thread_local int pushed = 0;

CUcontext primary() {
  static int context;
  return reinterpret_cast<CUcontext>(&context);
}

CUresult retain(CUcontext* context, CUdevice device) {
  if (device < 0 || device >= kDevices)
    return refused("cuDevicePrimaryCtxRetain", "a device", CUDA_ERROR_INVALID_DEVICE);
  const std::lock_guard<std::mutex> hold(memory_lock);
  ++retained;
  *context = primary();
  return CUDA_SUCCESS;
}

CUresult release(CUdevice device) {
  const std::lock_guard<std::mutex> hold(memory_lock);
  if (device < 0 || device >= kDevices || retained == 0)
    return refused("cuDevicePrimaryCtxRelease", "a device that is retained", CUDA_ERROR_INVALID_CONTEXT);
  --retained;
  return CUDA_SUCCESS;
}

CUresult push(CUcontext context) {
  const std::lock_guard<std::mutex> hold(memory_lock);
  if (context != primary() || retained == 0)
    return refused("cuCtxPushCurrent", "a context that is retained", CUDA_ERROR_INVALID_CONTEXT);
  ++pushed;
  return CUDA_SUCCESS;
}

CUresult pop(CUcontext* context) {
  if (pushed == 0) return refused("cuCtxPopCurrent", "a context that was pushed", CUDA_ERROR_INVALID_CONTEXT);
  --pushed;
  *context = primary();
  return CUDA_SUCCESS;
}

// ---- addresses, pieces of memory, and where they are mapped

CUresult granularity(size_t* page, const CUmemAllocationProp* kind, CUmemAllocationGranularity_flags) {
  if (kind->type != CU_MEM_ALLOCATION_TYPE_PINNED || !is_device(kind->location))
    return refused("cuMemGetAllocationGranularity", "pinned memory of a device");
  *page = kPage;
  return CUDA_SUCCESS;
}

CUresult reserve(CUdeviceptr* begin, size_t bytes, size_t alignment, CUdeviceptr hint, unsigned long long flags) {
  if (bytes == 0 || !are_pages(bytes) || !are_pages(alignment) || hint != 0 || flags != 0)
    return refused("cuMemAddressReserve", "whole pages, no hint and no flags");
  const std::lock_guard<std::mutex> hold(memory_lock);
  void* taken = take_addresses(nullptr, bytes + kPage);
  if (taken == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  // mmap aligns to its own small pages: the parts before and after the first large page go back.
  const auto from = reinterpret_cast<CUdeviceptr>(taken);
  *begin = (from + kPage - 1) / kPage * kPage;
  if (*begin > from) munmap(taken, *begin - from);
  if (from + kPage > *begin) munmap(reinterpret_cast<void*>(*begin + bytes), from + kPage - *begin);
  ranges[*begin] = bytes;
  return CUDA_SUCCESS;
}

CUresult free_addresses(CUdeviceptr begin, size_t bytes) {
  const std::lock_guard<std::mutex> hold(memory_lock);
  if (!is_area(ranges, begin, bytes)) return refused("cuMemAddressFree", "a range as it was reserved");
  if (meets(mappings, begin, bytes)) return refused("cuMemAddressFree", "a range without mapped memory");
  ranges.erase(begin);
  munmap(reinterpret_cast<void*>(begin), bytes);
  return CUDA_SUCCESS;
}

CUresult create(CUmemGenericAllocationHandle* piece, size_t bytes, const CUmemAllocationProp* kind,
                unsigned long long flags) {
  if (bytes == 0 || !are_pages(bytes) || flags != 0) return refused("cuMemCreate", "whole pages and no flags");
  if (kind->type != CU_MEM_ALLOCATION_TYPE_PINNED || !is_device(kind->location))
    return refused("cuMemCreate", "pinned memory of a device");
  if (bytes > kMostMemory) return CUDA_ERROR_OUT_OF_MEMORY;
  const std::lock_guard<std::mutex> hold(memory_lock);
  *piece = next_piece++;
  pieces[*piece] = bytes;
  return CUDA_SUCCESS;
}

// A mapping keeps the memory of its piece.
CUresult release_piece(CUmemGenericAllocationHandle piece) {
  const std::lock_guard<std::mutex> hold(memory_lock);
  if (pieces.erase(piece) == 0) return refused("cuMemRelease", "a piece that was not released");
  return CUDA_SUCCESS;
}

CUresult map(CUdeviceptr begin, size_t bytes, size_t offset, CUmemGenericAllocationHandle piece,
             unsigned long long flags) {
  const std::lock_guard<std::mutex> hold(memory_lock);
  const auto made = pieces.find(piece);
  if (made == pieces.end() || made->second != bytes || offset != 0 || flags != 0)
    return refused("cuMemMap", "a whole piece that was not released, no offset and no flags");
  if (!are_pages(begin) || !is_within(ranges, begin, bytes)) return refused("cuMemMap", "pages of one reserved range");
  if (meets(mappings, begin, bytes)) return refused("cuMemMap", "addresses without mapped memory");
  mappings[begin] = bytes;
  return CUDA_SUCCESS;
}

CUresult unmap(CUdeviceptr begin, size_t bytes) {
  const std::lock_guard<std::mutex> hold(memory_lock);
  if (!is_area(mappings, begin, bytes)) return refused("cuMemUnmap", "a piece as it was mapped");
  mappings.erase(begin);
  take_addresses(reinterpret_cast<void*>(begin), bytes);  // in the place of the memory, which is lost
  return CUDA_SUCCESS;
}

CUresult set_access(CUdeviceptr begin, size_t bytes, const CUmemAccessDesc* descriptions, size_t count) {
  const std::lock_guard<std::mutex> hold(memory_lock);
  if (!is_area(mappings, begin, bytes)) return refused("cuMemSetAccess", "a piece as it was mapped");
  if (count == 0) return refused("cuMemSetAccess", "a device");
  for (size_t i = 0; i < count; ++i) {
    if (!is_device(descriptions[i].location) || descriptions[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
      return refused("cuMemSetAccess", "devices that read and write");
  }
  const int failed = mprotect(reinterpret_cast<void*>(begin), bytes, PROT_READ | PROT_WRITE);
  return failed != 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

// ---- memory of the host

CUresult allocate_host(void** begin, size_t bytes, unsigned flags) {
  if (pushed == 0) return refused("cuMemHostAlloc", "a current context", CUDA_ERROR_INVALID_CONTEXT);
  // Of other contexts, too: blocks of a table that two GPUs reach.
  if (bytes == 0 || flags != CU_MEMHOSTALLOC_PORTABLE) return refused("cuMemHostAlloc", "bytes for all contexts");
  if (bytes > kMostMemory) return CUDA_ERROR_OUT_OF_MEMORY;
  void* taken = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (taken == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const std::lock_guard<std::mutex> hold(memory_lock);
  *begin = taken;
  host_pieces[taken] = bytes;
  return CUDA_SUCCESS;
}

CUresult free_host(void* begin) {
  if (pushed == 0) return refused("cuMemFreeHost", "a current context", CUDA_ERROR_INVALID_CONTEXT);
  const std::lock_guard<std::mutex> hold(memory_lock);
  const auto piece = host_pieces.find(begin);
  if (piece == host_pieces.end()) return refused("cuMemFreeHost", "memory of the host that was not freed");
  munmap(begin, piece->second);
  host_pieces.erase(piece);
  return CUDA_SUCCESS;
}

// The type of the driver's function is checked here.
template <typename Function>
void* entry(Function* emulated, Function* /*of the driver*/) {
  return reinterpret_cast<void*>(emulated);
}

}  // namespace

void* driver_function(const std::string& name) {
  using Driver = std::map<std::string, void*>;
#define TORCHREC_DYN_ENTRY(name, emulated)                           \
  {                                                                  \
    #name, entry(&emulated, static_cast<decltype(&::name)>(nullptr)) \
  }
  // The names are strings before CUDA's header can rename them to those of a second version.
  static const auto* functions = new Driver{
      TORCHREC_DYN_ENTRY(cuDeviceGetCount, device_count),
      TORCHREC_DYN_ENTRY(cuDeviceCanAccessPeer, can_access_peer),
      TORCHREC_DYN_ENTRY(cuDevicePrimaryCtxRetain, retain),
      TORCHREC_DYN_ENTRY(cuDevicePrimaryCtxRelease, release),
      TORCHREC_DYN_ENTRY(cuCtxPushCurrent, push),
      TORCHREC_DYN_ENTRY(cuCtxPopCurrent, pop),
      TORCHREC_DYN_ENTRY(cuMemGetAllocationGranularity, granularity),
      TORCHREC_DYN_ENTRY(cuMemAddressReserve, reserve),
      TORCHREC_DYN_ENTRY(cuMemAddressFree, free_addresses),
      TORCHREC_DYN_ENTRY(cuMemCreate, create),
      TORCHREC_DYN_ENTRY(cuMemRelease, release_piece),
      TORCHREC_DYN_ENTRY(cuMemMap, map),
      TORCHREC_DYN_ENTRY(cuMemUnmap, unmap),
      TORCHREC_DYN_ENTRY(cuMemSetAccess, set_access),
      TORCHREC_DYN_ENTRY(cuMemHostAlloc, allocate_host),
      TORCHREC_DYN_ENTRY(cuMemFreeHost, free_host),
  };
#undef TORCHREC_DYN_ENTRY
  const auto found = functions->find(name);
  return found == functions->end() ? nullptr : found->second;
}

Held held() {
  const std::lock_guard<std::mutex> hold(memory_lock);
  return {retained, static_cast<int64_t>(ranges.size()),
          static_cast<int64_t>(pieces.size() + mappings.size() + host_pieces.size())};
}

}  // namespace torchrec_dyn::ptx
