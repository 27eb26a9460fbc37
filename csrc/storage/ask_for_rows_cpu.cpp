// Asks the system to read the pages of rows that are mapped from files: it reads many at once, and a touch of a page
// that is not in memory would wait for that page alone (docs/decisions/0043).
#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernel.h"
#include "storage/row_store_arguments.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace torchrec_dyn {
namespace {

// Advice only: memory that is not mapped from a file stays as it is.
void ask_for_pages([[maybe_unused]] uint64_t first, [[maybe_unused]] uint64_t end, [[maybe_unused]] uint64_t bytes) {
#if defined(__linux__)
  madvise(reinterpret_cast<void*>(first * bytes), (end - first) * bytes, MADV_WILLNEED);
#endif
}

uint64_t page_bytes() {
#if defined(__linux__)
  return static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
#else
  return 4096;
#endif
}

void ask_for_rows(const Tensor& rows, std::vector<Tensor> blocks, int64_t shift, int64_t columns) {
  constexpr const char* op = "ask_for_rows";
  std::vector<uint64_t> pages;
  const uint64_t bytes = page_bytes();
  dispatch_row_type(op, blocks, [&](auto zero) {
    using T = decltype(zero);
    BlockList<T> list(op, "blocks", blocks);
    const RowBlocks<T> table = list.rows(layout_of_one(op, blocks, shift, columns), columns);
    check_tensor(op, "rows", rows, ScalarType::Long);
    const int64_t* row = const_data<int64_t>(rows);
    for (int64_t i = 0; i < rows.numel(); ++i) check_row(op, row[i], -1, table.capacity);
    pages.reserve(static_cast<size_t>(rows.numel()));
    for (int64_t i = 0; i < rows.numel(); ++i) {
      if (row[i] < 0) continue;
      const auto begin = reinterpret_cast<uint64_t>(table.row(row[i]));
      const uint64_t last = begin + static_cast<uint64_t>(columns) * sizeof(T) - 1;
      for (uint64_t page = begin / bytes; page <= last / bytes; ++page) pages.push_back(page);
    }
  });
  std::sort(pages.begin(), pages.end());
  pages.erase(std::unique(pages.begin(), pages.end()), pages.end());
  for (size_t i = 0; i < pages.size();) {
    size_t next = i + 1;
    while (next < pages.size() && pages[next] == pages[next - 1] + 1) ++next;
    ask_for_pages(pages[i], pages[next - 1] + 1, bytes);
    i = next;
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torchrec_dyn, CPU, m) { m.impl(TORCHREC_DYN_KERNEL("ask_for_rows", &ask_for_rows)); }

}  // namespace torchrec_dyn
