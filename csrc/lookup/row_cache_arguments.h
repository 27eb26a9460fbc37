// The arguments of cache_rows_ and row_places. A cache is five tensors on the device, RowCache of row_cache_kernels.h:
// places [rows] int32, owners [frames] int64, used [frames] int32, free [frames] int32, counts [4] int64.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "checks.h"
#include "lookup/prepared_tables.h"
#include "lookup/row_cache_kernels.h"
#include "struct_kernel.h"

namespace torchrec_dyn {

constexpr size_t kCacheTensors = 5;

// rows [N] in table order, with the caches of some of the tables; cache_layout [C, 3]: table, number of the call, and
// base of each.
struct CachedBatch {
  CachedBatch(const char* op, ArgumentReader& arguments) : op(op), arguments(arguments) {}

  const char* op;
  ArgumentReader& arguments;

  Tensor rows = arguments.read<Tensor>();
  Tensor table_offsets = arguments.read<Tensor>();
  std::vector<Tensor> caches = arguments.read<std::vector<Tensor>>();
  Tensor cache_layout = arguments.read<Tensor>();

  int64_t count() const { return cache_layout.size(0); }
  const int64_t* line(int64_t c) const { return const_data<int64_t>(cache_layout) + 3 * c; }

  // Checks all but the contents of tensors on the device, and returns the caches without plans and stores.
  std::vector<RowCache> read(const Device& device) const {
    check_tensor(op, "rows", rows, ScalarType::Long, device);
    check_tensor(op, "cache_layout", cache_layout, ScalarType::Long);
    TORCHREC_DYN_CHECK(cache_layout.dim() == 2 && cache_layout.size(1) == 3, op,
                       ": expected cache_layout of shape [C, 3], got ", cache_layout.dim(), " dimensions.");
    const int64_t tables = table_offsets.numel() - 1;
    TORCHREC_DYN_CHECK(tables >= 0, op, ": expected at least one of table_offsets, got none.");
    check_table_offsets(op, table_offsets, tables, rows.numel());
    check_size(op, "the tensors of caches", count() * static_cast<int64_t>(kCacheTensors),
               static_cast<int64_t>(caches.size()));
    const int64_t* const offset = const_data<int64_t>(table_offsets);
    std::vector<RowCache> all;
    int64_t first_frame = 0, before = -1;
    for (int64_t c = 0; c < count(); ++c) {
      const int64_t table = line(c)[0], now = line(c)[1], base = line(c)[2];
      TORCHREC_DYN_CHECK(table > before && table < tables, op, ": expected ascending tables below ", tables, ", got ",
                         table, " after ", before, ".");
      const Tensor* const tensors = caches.data() + static_cast<size_t>(c) * kCacheTensors;
      const Tensor &places = tensors[0], &owners = tensors[1], &used = tensors[2], &free = tensors[3];
      const int64_t frames = owners.numel();
      check_tensor(op, "places", places, ScalarType::Int, device);
      check_tensor(op, "owners", owners, ScalarType::Long, device);
      check_numbers(op, "used", used, ScalarType::Int, frames, device);
      check_numbers(op, "free", free, ScalarType::Int, frames, device);
      check_numbers(op, "counts", tensors[4], ScalarType::Long, kCacheCounts, device);
      TORCHREC_DYN_CHECK(frames < std::numeric_limits<int32_t>::max(), op, ": expected less than 2^31 frames, got ",
                         frames, ".");
      TORCHREC_DYN_CHECK(base >= places.numel() && base < (int64_t{1} << 62), op, ": expected a base of at least the ",
                         places.numel(), " rows of the cache, got ", base, ".");
      all.push_back({mutable_data<int32_t>(places), places.numel(), mutable_data<int64_t>(owners),
                     mutable_data<int32_t>(used), mutable_data<int32_t>(free), mutable_data<int64_t>(tensors[4]),
                     frames, base, static_cast<uint32_t>(now), offset[table], offset[table + 1], first_frame, nullptr,
                     0, 0});
      first_frame += frames;
      before = table;
    }
    return all;
  }
};

struct RowPlacesCall {
  ArgumentReader arguments;

  CachedBatch batch{"row_places", arguments};
};

struct CacheRowsCall {
  static constexpr const char* kOp = "cache_rows_";

  ArgumentReader arguments;

  CachedBatch batch{kOp, arguments};
  bool loads = arguments.read<bool>();
  Handles::Shared tables = Handles::all().get(kOp, arguments.read<Tensor>());

  // As CachedBatch::read; the frames are among the rows of the tables.
  std::vector<RowCache> read() const {
    std::vector<RowCache> all = batch.read(tables->device);
    check_size(kOp, "the number of tables", static_cast<int64_t>(tables->count()), batch.table_offsets.numel() - 1);
    for (int64_t c = 0; c < batch.count(); ++c) {
      const RowCache& cache = all[static_cast<size_t>(c)];
      const int64_t capacity = tables->layout[static_cast<size_t>(batch.line(c)[0])].capacity();
      TORCHREC_DYN_CHECK(cache.base <= capacity && cache.frames <= capacity - cache.base, kOp, ": expected ",
                         cache.frames, " frames from row ", cache.base, " on, got room for ", capacity, " rows.");
    }
    SeparateMemory()
        .writes(batch.caches)
        .reads(batch.rows, batch.table_offsets, batch.cache_layout)
        .check(kOp, &tables->written);
    return all;
  }
};

}  // namespace torchrec_dyn
