// Memory that reads as zeros and is committed page by page when it is first written: an empty map of any size
// costs nothing until ids are inserted. Parts of such memory can be given back; they then read as zeros again.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#include "huge_pages.h"

namespace torchrec_dyn {

struct ZeroedMemory {
  void* begin;  // on a 2 MiB boundary if the memory is at least that large, else on the boundary of a cache line
  void* mapping;
  size_t mapped_bytes;  // 0: from the heap
};

inline ZeroedMemory take_zeroed_memory(int64_t bytes) {
#if defined(__linux__)
  if (bytes >= kHugePage) {
    const size_t mapped = static_cast<size_t>(bytes + kHugePage);
    void* mapping = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) throw std::bad_alloc();
    auto* begin = reinterpret_cast<void*>(HugePages(mapping, bytes + kHugePage).begin);
    ask_for_huge_pages(begin, bytes);
    return {begin, mapping, mapped};
  }
#endif
  constexpr size_t kLine = 64;
  const size_t lines = (static_cast<size_t>(bytes) / kLine + 1) * kLine;
  void* memory = std::aligned_alloc(kLine, lines);
  if (memory == nullptr) throw std::bad_alloc();
  std::memset(memory, 0, lines);
  return {memory, memory, 0};
}

inline void free_zeroed_memory(const ZeroedMemory& memory) {
#if defined(__linux__)
  if (memory.mapped_bytes > 0) {
    munmap(memory.mapping, memory.mapped_bytes);
    return;
  }
#endif
  std::free(memory.mapping);
}

}  // namespace torchrec_dyn
