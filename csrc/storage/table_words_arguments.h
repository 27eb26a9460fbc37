// The scores or the marks of several tables as arguments of an op on a device.
#pragma once

#include <cstdint>
#include <vector>

#include "device_call.h"
#include "storage/blocks_arguments.h"
#include "storage/table_words.h"

namespace torchrec_dyn {

// Checks the blocks of all tables. `now`: one number a table.
template <typename Word>
std::vector<TableWords<Word>> read_word_tables(BlockList<Word>& blocks, const std::vector<TableLayout>& layouts,
                                               const int64_t* table_offsets, const int64_t* now) {
  std::vector<TableWords<Word>> tables;
  for (size_t t = 0; t < layouts.size(); ++t) tables.push_back({table_offsets[t], blocks.words(layouts[t]), now[t]});
  return tables;
}

// The tables on the device, with the pointers to their blocks.
template <typename Word>
WordTables<Word> send_word_tables(DeviceCall& call, const BlockList<Word>& blocks,
                                  std::vector<TableWords<Word>> tables) {
  Word* const* pointers = call.copy_of(blocks.pointers());
  for (TableWords<Word>& table : tables)
    table.words.blocks = pointers + (table.words.blocks - blocks.pointers().data());
  return {call.copy_of(tables), static_cast<int64_t>(tables.size())};
}

}  // namespace torchrec_dyn
