// The arguments of lowest_rows and choose_listed, checked for every device.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "checks.h"
#include "life/scores.h"
#include "lookup/prepared_tables.h"
#include "lookup/table_scores_arguments.h"
#include "struct_kernel.h"

namespace torchrec_dyn {

// What is asked of one table: the `most` lowest of rows [0, rows) with last_seen < before.
struct LowestQuestion {
  int64_t table, rows, by_count, before, most;
};

struct LowestRowsCall {
  static constexpr const char* kOp = "lowest_rows";

  ArgumentReader arguments;

  Tensor like = arguments.read<Tensor>();  // on the device of the tables
  Tensor questions = arguments.read<Tensor>();
  std::optional<Tensor> half_lives = arguments.read<std::optional<Tensor>>();
  bool in_order = arguments.read<bool>();
  Handles::Shared tables = Handles::all().get(kOp, arguments.read<Tensor>());
  KeptRows kept{arguments};

  std::vector<LowestQuestion> read() const {
    const auto count = static_cast<int64_t>(tables->count());
    check_size(kOp, "the number of maps", count, static_cast<int64_t>(tables->maps.size()));
    check_size(kOp, "the tables with scores", count, static_cast<int64_t>(tables->scores.size()));
    kept.check(kOp, *tables);
    const bool is_there = like.is_cpu() == tables->device.is_cpu() &&
                          (like.is_cpu() || like.get_device_index() == tables->device.index());
    TORCHREC_DYN_CHECK(is_there, kOp, ": expected like on the device of the tables, got a tensor of another one.");
    check_tensor(kOp, "questions", questions, ScalarType::Long);
    const int64_t asked = questions.numel() / 5;
    check_size(kOp, "the elements of questions", 5 * asked, questions.numel());
    if (half_lives) {
      check_tensor(kOp, "half_lives", *half_lives, ScalarType::Long);
      check_size(kOp, "the elements of half_lives", kMostHalvings * asked, half_lives->numel());
    }
    std::vector<LowestQuestion> read;
    const int64_t* word = const_data<int64_t>(questions);
    for (int64_t q = 0; q < asked; ++q, word += 5) {
      const LowestQuestion question{word[0], word[1], word[2], word[3], word[4]};
      TORCHREC_DYN_CHECK(question.table >= 0 && question.table < count, kOp, ": expected tables in [0, ", count,
                         "), got ", question.table, ".");
      const int64_t capacity = tables->scores[static_cast<size_t>(question.table)].capacity;
      TORCHREC_DYN_CHECK(question.rows >= 0 && question.rows <= capacity, kOp, ": expected rows in [0, ", capacity,
                         "], got ", question.rows, ".");
      TORCHREC_DYN_CHECK(question.most >= 0, kOp, ": expected most >= 0, got ", question.most, ".");
      read.push_back(question);
    }
    return read;
  }

  // The first steps of the half-lives of the counts that a question compares; null if they do not decay.
  const int64_t* begins(size_t q) const {
    if (!half_lives) return nullptr;
    const int64_t* begins = const_data<int64_t>(*half_lives) + static_cast<int64_t>(q) * kMostHalvings;
    return begins[0] < 0 ? nullptr : begins;
  }
};

// ids, rows, last_seen, offsets (csrc/library.cpp).
using LowestRows = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// A part of a list of rows: entries [begin, end), of which the first `most` are chosen that still have the listed
// last_seen.
struct ListedSpan {
  int64_t table, begin, end, most;
};

struct ChooseListedCall {
  static constexpr const char* kOp = "choose_listed";

  ArgumentReader arguments;

  std::vector<Tensor> listed = arguments.read<std::vector<Tensor>>();
  Tensor spans = arguments.read<Tensor>();
  Handles::Shared tables = Handles::all().get(kOp, arguments.read<Tensor>());
  KeptRows kept{arguments};

  std::vector<ListedSpan> read() const {
    const auto count = static_cast<int64_t>(tables->count()), lists = static_cast<int64_t>(listed.size());
    check_size(kOp, "the tables with scores", count, static_cast<int64_t>(tables->scores.size()));
    kept.check(kOp, *tables);
    check_tensor(kOp, "spans", spans, ScalarType::Long);
    check_size(kOp, "the elements of spans", 4 * lists, spans.numel());
    std::vector<ListedSpan> read;
    const int64_t* word = const_data<int64_t>(spans);
    for (int64_t l = 0; l < lists; ++l, word += 4) {
      const Tensor& list = listed[static_cast<size_t>(l)];
      check_tensor(kOp, "listed", list, ScalarType::Long, tables->device);
      TORCHREC_DYN_CHECK(list.dim() == 2 && list.size(0) == 3, kOp, ": expected lists of shape [3, M], got ",
                         list.dim(), " dimensions.");
      const ListedSpan span{word[0], word[1], word[2], word[3]};
      TORCHREC_DYN_CHECK(span.table >= 0 && span.table < count && span.begin >= 0 && span.begin <= span.end &&
                             span.end <= list.size(1) && span.most >= 0,
                         kOp, ": expected spans of table, begin, end and number inside of tables and lists, got ",
                         span.table, ", ", span.begin, ", ", span.end, " and ", span.most, ".");
      read.push_back(span);
    }
    return read;
  }
};

// ids, rows, offsets, firsts (csrc/library.cpp).
using ChosenRows = std::tuple<Tensor, Tensor, Tensor, Tensor>;

}  // namespace torchrec_dyn
