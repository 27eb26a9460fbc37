// Single rows on the CPU: initial rows, reads and writes by row, and their pages. One table in each call.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "kernel.h"
#include "output_memory.h"
#include "parallel.h"
#include "storage/initial_writes_cpu.h"
#include "storage/row_access_cpu.h"
#include "storage/row_store_arguments.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace torchrec_dyn {
namespace {

constexpr int64_t kGrain = 512;
constexpr int64_t kMostCached = 8 << 20;  // larger outputs are written past the caches
constexpr int64_t kBurst = 32;            // rows prefetched together, before their values are computed
constexpr int64_t kLineBytes = 64;

// Writes rows of whole cache lines past the caches, and other rows as usual. An ordinary write reads the line first; a
// streamed one does not, which takes half of the time where rows are not in the caches (a prefetch does not help:
// benchmarks/DEAD_ENDS.md). The memory is seen by other threads after this object's end.
class RowStream {
 public:
  // `bytes`: of all rows. Few rows may be read again before they leave the caches.
  explicit RowStream(int64_t bytes) : is_large_(bytes >= kLeastBytes) {}
  RowStream(const RowStream&) = delete;
  RowStream& operator=(const RowStream&) = delete;
  ~RowStream() {
#if defined(__SSE2__)
    if (is_large_) _mm_sfence();
#endif
  }

  template <typename T>
  void write(const T* from, int64_t columns, T* to) const {
#if defined(__SSE2__)
    const int64_t bytes = columns * static_cast<int64_t>(sizeof(T));
    if (is_large_ && bytes % kLineBytes == 0 && reinterpret_cast<uintptr_t>(to) % kLineBytes == 0) {
      const auto* unit = reinterpret_cast<const __m128i*>(from);
      auto* out = reinterpret_cast<__m128i*>(to);
      for (const auto* end = unit + bytes / static_cast<int64_t>(sizeof(__m128i)); unit < end; ++unit, ++out)
        _mm_stream_si128(out, _mm_loadu_si128(unit));
      return;
    }
#endif
    std::copy(from, from + columns, to);
  }

 private:
  static constexpr int64_t kLeastBytes = 1 << 19;
  bool is_large_;
};

TORCHREC_DYN_SIMD bool are_between(const int64_t* rows, int64_t count, int64_t lowest, int64_t end) noexcept {
  int64_t outside = 0;  // a sum, not a branch: the compiler makes vectors of it
  for (int64_t i = 0; i < count; ++i) outside += (rows[i] < lowest) | (rows[i] >= end);
  return outside == 0;
}

void check_rows(const char* op, const Tensor& rows, int64_t lowest, int64_t capacity) {
  check_tensor(op, "rows", rows, ScalarType::Long);
  const int64_t* row = const_data<int64_t>(rows);
  if (are_between(row, rows.numel(), lowest, capacity)) return;
  for (int64_t i = 0; i < rows.numel(); ++i) check_row(op, row[i], lowest, capacity);
}

void init_rows_(const Tensor& ids, const Tensor& rows, std::vector<Tensor> blocks, int64_t shift, int64_t columns,
                int64_t first_column, int64_t kind, std::vector<double> parameters, int64_t key) {
  check_tensor("init_rows_", "ids", ids, ScalarType::Long);
  check_size("init_rows_", "the number of rows", ids.numel(), rows.numel());
  check_size("init_rows_", "the number of parameters", 6, static_cast<int64_t>(parameters.size()));
  const InitialRows initial = initial_rows_of("init_rows_", first_column, kind, parameters.data());
  dispatch_row_type("init_rows_", blocks, [&](auto zero) {
    using T = decltype(zero);
    BlockList<T> list("init_rows_", "blocks", blocks);
    const RowBlocks<T> table = list.rows(layout_of_one("init_rows_", blocks, shift, columns), columns);
    check_rows("init_rows_", rows, 0, table.capacity);
    SeparateMemory().writes(blocks).reads(ids).reads(rows).check("init_rows_");
    const int64_t* id = const_data<int64_t>(ids);
    const int64_t* row = const_data<int64_t>(rows);
    write_initial_rows(initial, static_cast<uint64_t>(key), first_column, id, row, rows.numel(), table);
  });
}

Tensor gather_rows(const Tensor& rows, std::vector<Tensor> blocks, int64_t shift, int64_t columns, ScalarType dtype) {
  check_gathered_type(blocks, dtype);
  std::optional<Tensor> out;
  dispatch_row_type("gather_rows", dtype, [&](auto zero) {
    using T = decltype(zero);
    BlockList<T> list("gather_rows", "blocks", blocks);
    const RowBlocks<T> table = list.rows(layout_of_one("gather_rows", blocks, shift, columns), columns);
    check_rows("gather_rows", rows, -1, table.capacity);
    out = new_output(rows.numel(), dtype, columns);
    const int64_t* row = const_data<int64_t>(rows);
    T* values = mutable_data<T>(*out);
    const int64_t bytes = rows.numel() * columns * static_cast<int64_t>(sizeof(T));
    for_each_range(rows.numel(), kGrain, [&](int64_t begin, int64_t end) {
      const RowStream stream(bytes > kMostCached ? bytes : 0);
      for (int64_t i = begin; i < end; ++i) {
        if ((i - begin) % kBurst == 0)  // rows in canonical order lie anywhere
          for (int64_t next = i + kBurst; next < end && next < i + 2 * kBurst; ++next)
            if (row[next] >= 0) prefetch_row(table, row[next]);
        if (row[i] < 0)
          std::fill(values + i * columns, values + (i + 1) * columns, T{});
        else
          stream.write(table.row(row[i]), columns, values + i * columns);
      }
    });
  });
  return *out;
}

void scatter_rows_(const Tensor& rows, const Tensor& values, std::vector<Tensor> blocks, int64_t shift,
                   int64_t columns) {
  check_scattered_size(rows, values, shift, columns);
  dispatch_row_type("scatter_rows_", blocks, [&](auto zero) {
    using T = decltype(zero);
    check_tensor("scatter_rows_", "values", values, kDtypeOf<T>);
    BlockList<T> list("scatter_rows_", "blocks", blocks);
    const RowBlocks<T> table = list.rows(layout_of_one("scatter_rows_", blocks, shift, columns), columns);
    check_rows("scatter_rows_", rows, 0, table.capacity);
    SeparateMemory().writes(blocks).reads(rows).reads(values).check("scatter_rows_");
    const int64_t* row = const_data<int64_t>(rows);
    const T* value = const_data<T>(values);
    // In order and on one thread: if a row is given twice, its last values stay.
    const RowStream stream(values.numel() * static_cast<int64_t>(sizeof(T)));
    for (int64_t i = 0; i < rows.numel(); ++i) stream.write(value + i * columns, columns, table.row(row[i]));
  });
}

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

// Asks the system to read the pages of rows that are mapped from files: it reads many at once, and a touch of a page
// that is not in memory would wait for that page alone (docs/dev/decisions/0043).
void ask_for_rows(const Tensor& rows, std::vector<Tensor> blocks, int64_t shift, int64_t columns) {
  constexpr const char* op = "ask_for_rows";
  std::vector<uint64_t> pages;
  const uint64_t bytes = page_bytes();
  dispatch_row_type(op, blocks, [&](auto zero) {
    using T = decltype(zero);
    BlockList<T> list(op, "blocks", blocks);
    const RowBlocks<T> table = list.rows(layout_of_one(op, blocks, shift, columns), columns);
    check_rows(op, rows, -1, table.capacity);
    const int64_t* row = const_data<int64_t>(rows);
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

STABLE_TORCH_LIBRARY_IMPL(torchrec_dyn, CPU, m) {
  m.impl(TORCHREC_DYN_KERNEL("init_rows_", &init_rows_));
  m.impl(TORCHREC_DYN_KERNEL("gather_rows", &gather_rows));
  m.impl(TORCHREC_DYN_KERNEL("scatter_rows_", &scatter_rows_));
  m.impl(TORCHREC_DYN_KERNEL("ask_for_rows", &ask_for_rows));
}

}  // namespace torchrec_dyn
