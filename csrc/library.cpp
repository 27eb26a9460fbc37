// The table of contents of the core: every op, by rooms, with the shapes of its tensors. The kernels of a room are in
// its folder, files *_cpu.cpp, and for CUDA *_cuda.cpp. A trailing underscore means in place.
//
// Legend: T tables of one call, N ids in table order, M new or chosen ids, C slots of a map, B bags, S segments.
// `slots` [C, 2] int64 is an id map (storage/id_map.h). A list of `slots` holds the slots of T maps, then the outgoing
// slots of each map that grows. `moved` [T, 2] is the number of outgoing slots that have moved, -1 for a map that does
// not grow. `blocks` are rows of one table; `layout` [T, 4] describes the blocks of several tables (storage/blocks.h),
// `segments` [S, 5] their bags (lookup/bags.h).
#if !defined(TORCHREC_DYN_SIMT)
#include <Python.h>
#pragma weak PyModule_Create2  // a program without Python may load this library for its ops
#endif

#include <torch/csrc/stable/library.h>

// The library of simt.h's tests has the same ops under another name.
#if defined(TORCHREC_DYN_SIMT)
#define TORCHREC_DYN_OPS torchrec_dyn_simt
#else
#define TORCHREC_DYN_OPS torchrec_dyn
#endif
#define TORCHREC_DYN_LIBRARY(name, m) STABLE_TORCH_LIBRARY(name, m)  // the macro above is expanded on the way

TORCHREC_DYN_LIBRARY(TORCHREC_DYN_OPS, m) {
  // ---- storage: id maps, canonical order, content sums, rows, marks

  // ids [N] -> [N]: the bijection of mix64.h.
  m.def("mix64(Tensor ids) -> Tensor");

  // Raises the first error that ops have found on the GPU of `like` since the last such call (device_errors.h); waits
  // for this GPU. Does nothing on the CPU.
  m.def("raise_errors(Tensor like) -> ()");

  // ids [N], table_offsets [T + 1] -> rows [N] (-1 where absent), absent [T] (number of absent ids of each table). On a
  // GPU a pending error sets the sign bit of absent[0]: the lookup of a step is where the host reads anyway.
  m.def("lookup(Tensor ids, Tensor table_offsets, Tensor[] slots, Tensor moved) -> (Tensor rows, Tensor absent)");
  // The distinct absent ids: new_ids [M] in order of first sight, new_counts [M] their occurrences,
  // new_offsets [T + 1] where the new ids of each table begin, new_index [N] the place of an absent id in new_ids,
  // -1 for other ids.
  m.def(
      "collect_new(Tensor ids, Tensor rows, Tensor table_offsets) -> "
      "(Tensor new_ids, Tensor new_counts, Tensor new_offsets, Tensor new_index)");
  // Inserts new_ids [M], distinct and absent, into the maps with their new_rows [M].
  m.def("insert(Tensor new_ids, Tensor new_rows, Tensor new_offsets, Tensor(a!)[] slots, Tensor moved) -> ()");
  // Removes ids [M] from one map -> [M] their former rows, -1 where absent.
  m.def("erase(Tensor ids, Tensor(a!)[] slots, Tensor moved) -> Tensor");
  // A map of `capacity` empty slots, on the device of `slots`. Memory is committed where ids are written.
  m.def("new_slots(Tensor slots, int capacity) -> Tensor");
  // Maps with the keys [M] -> copies of `capacities` [M] slots.
  m.def("grown_slots(Tensor[] slots, int[] capacities, int[] keys) -> Tensor[]");
  // Moves outgoing slots [moved, until), or a few more, into `slots` -> [1] the new `moved`. No kernel for CUDA.
  m.def("move_slots(Tensor(a!) outgoing, Tensor(b!) slots, int moved, int until, int key=0) -> Tensor");
  // -> [3]: number of ids, sum of their probe lengths (storage/id_map.h), the longest probe length; measured on one in
  // `every` runs of 4096 slots.
  m.def("probe_lengths(Tensor slots, int every, int key=0) -> Tensor");

  // The ids of some whole lines of slots -> ids [K] in the order of the slots, rows [K].
  m.def("used_slots(Tensor slots) -> (Tensor ids, Tensor rows)");
  // The ids of one map by row, of R = last - first rows from `first` on -> ids [R], 0 for a row without an id; has_id
  // [R] bool.
  m.def("ids_of_rows(Tensor[] slots, Tensor moved, int first, int last) -> (Tensor ids, Tensor has_id)");
  // Counts the ids of one map by cell, the top `bits` bits (0 to 16) of the mixed id -> [2^bits].
  m.def("count_cells(Tensor[] slots, Tensor moved, int bits) -> Tensor");
  // The ids of one map with first <= mixed id <= last, unsigned words passed as int64 -> ids [K] in canonical order,
  // rows [K]. No ids if first > last.
  m.def("ids_between(Tensor[] slots, Tensor moved, int first, int last) -> (Tensor ids, Tensor rows)");
  // ids [M], values [M, D] float32, float16, bfloat16 or int64, whose column 0 is column `first_column` of the table
  // -> []: the content sum (storage/content_sum.h). For any cut of a table into rows and columns, the sums of the parts
  // add up, modulo 2^64, to the sum of the table.
  m.def("content_sum(Tensor ids, Tensor values, int first_column, int key) -> Tensor");

  // block [R, D] of any dtype -> [rows, D]: a block of more rows, the first R as in `block`. If `block` begins
  // where a result of this op does, and its addresses suffice, the address stays the same and both tensors share
  // memory. Otherwise the rows are copied to a new range of addresses, for `limit` rows. Other rows are not
  // initialised. Memory is committed for `rows` rows (storage/address_range.h).
  // on_host: in memory of the host that the GPU reads and writes, for `limit` rows at once.
  m.def("grow_block(Tensor block, int rows, int limit, bool on_host=False) -> Tensor");
  // Writes the initial rows of ids [M] to rows [M]. parameters: low, high, mean, deviation, low and high
  // probability (storage/initial_rows.h). key: 64 bits made of the seed and the table's name.
  m.def(
      "init_rows_(Tensor ids, Tensor rows, Tensor(a!)[] blocks, int shift, int columns, int first_column, int kind, "
      "float[] parameters, int key) -> ()");
  // Asks the system to read the pages of rows [M] (-1: none) of blocks mapped from files. Changes no value. Without a
  // kernel for devices.
  m.def("ask_for_rows(Tensor rows, Tensor[] blocks, int shift, int columns) -> ()");
  // rows [M] (-1 reads as zeros) -> [M, columns].
  m.def("gather_rows(Tensor rows, Tensor[] blocks, int shift, int columns, ScalarType dtype) -> Tensor");
  m.def("scatter_rows_(Tensor rows, Tensor values, Tensor(a!)[] blocks, int shift, int columns) -> ()");

  // Marks are blocks [2^shift, 1] int32: the version with which each row was last marked (storage/row_marks.h).
  //
  // rows [N] in table order, negative rows are skipped; versions [T], in [0, 2^31). A table with 0 blocks in `layout`
  // keeps no marks.
  m.def("mark_rows_(Tensor rows, Tensor table_offsets, Tensor(a!)[] marks, Tensor layout, Tensor versions) -> ()");
  // Sets the bit of each row in marks, blocks [2^shift] uint8, 8 rows each; shift >= 6 -> places [K], of which the
  // first begins[T] are, ascending, the first places of the rows whose bit was clear, the others -1; begins [T + 1],
  // where the places of each table begin. A table with 0 blocks in `layout` keeps no marks. No kernel for CUDA.
  m.def(
      "mark_new_(Tensor rows, Tensor table_offsets, Tensor(a!)[] marks, Tensor layout) -> "
      "(Tensor places, Tensor begins)");

  // ---- ranks: the owners of ids

  // ids [N] in bags of lengths [B], int32 or int64, weights [N] -> the batch that goes to `ranks` owners: ids [N] by
  // owner (ranks/owner.h), then in the order of the batch; lengths [ranks * B]; weights [N], [0] without weights;
  // where [N], the place of each id of the batch, [0] without `positions`.
  m.def(
      "sort_by_owner(Tensor ids, Tensor lengths, Tensor? weights, int ranks, bool positions=False) -> "
      "(Tensor ids, Tensor lengths, Tensor weights, Tensor where)");

  // ---- lookup: forward and backward
  //
  // Ops named `prepared` take the maps and the rows of T tables as `tables`, the result of prepare_tables [1], on the
  // CPU.

  // Checks maps, rows and optimizer states, as those of update_rows_, once for many calls (lookup/prepared_tables.h).
  // initial [T, 4]: kind, key and first column, and parameters [T, 6], of init_rows_, and the sum of 1 if ids without a
  // row read as initial rows, and 2 if find_and_pool does not list them, as of a frozen table. initial_states: the
  // number in each state of a new row; without them add_rows_ is an error. scores, score_layout [T, 4]: the scores of
  // rows, which touch_scores_ needs; a table with 0 blocks keeps none.
  m.def(
      "prepare_tables(Tensor[] slots, Tensor moved, Tensor[] weights, Tensor[] states, Tensor layout, int optimizer, "
      "int[] on_nonfinite, Tensor[] nonfinite, Tensor? initial, Tensor? parameters, float[] initial_states, "
      "Tensor[] scores, Tensor? score_layout) -> Tensor");
  // rows [N] in table order, -1 is skipped; steps [T]; times [N], all 1 if left out. Each occurrence sets last_seen to
  // the step and adds its times to the count.
  m.def("touch_scores_(Tensor rows, Tensor table_offsets, Tensor steps, Tensor? times, Tensor tables) -> ()");
  // Scores are blocks [2^shift, 1] int64, one word a row: last_seen << 32 | count (life/scores.h). A free row has no
  // score.
  //
  // rows [N] in table order -> last_seen [N], counts [N]: -1 and 0 for a free row, row -1, and a row of a table without
  // scores.
  m.def("read_scores(Tensor rows, Tensor table_offsets, Tensor tables) -> (Tensor last_seen, Tensor counts)");
  // Writes the scores of rows [N] in table order, -1 is skipped; equal rows have equal scores.
  m.def("write_scores_(Tensor rows, Tensor table_offsets, Tensor last_seen, Tensor counts, Tensor tables) -> ()");
  // Gives rows to new ids [M], the new ids of each table from new_offsets [T + 1] on: their numbers, initial rows and
  // states, scores with last_seen of steps [T] and counts [M] (0 if left out), and slots. A table takes the rows
  // `reused` first, its own from reused_offsets [T + 1] on, then those from first_rows [T] on. new_rows [M]: the rows
  // are written there, and to rows [N] of a batch whose absent ids have places new_index [N], as collect_new and
  // find_and_pool list them; places [M], ascending: those of the new ids, 0, 1, ... if left out.
  // initial_places [M]: where initial rows and states are written, in the rows if left out.
  m.def(
      "add_rows_(Tensor(a!) new_rows, Tensor new_ids, int[] new_offsets, int[] first_rows, Tensor reused, "
      "int[] reused_offsets, int[] steps, Tensor? counts, Tensor(b!)? rows, Tensor? new_index, Tensor? places, "
      "Tensor? initial_places, Tensor tables) -> ()");
  // Removes distinct ids [M], those of each table from offsets [T + 1] on, which have rows [M], and their scores.
  m.def("remove_rows_(Tensor ids, Tensor rows, int[] offsets, Tensor tables) -> ()");
  // The commit of a training step, in this order: counters of waiting ids are seen, dropped and begun; rows are seen,
  // removed and given to new ids: as touch_scores_, remove_rows_ and add_rows_ of each. All memory is taken before the
  // first write. counters: as of admit; without any, the lists of counters are empty.
  m.def(
      "commit_step_(Tensor removed_ids, Tensor removed_rows, int[] removed_offsets, Tensor seen_rows, "
      "Tensor table_offsets, Tensor steps, Tensor? times, Tensor(a!) new_rows, Tensor new_ids, int[] new_offsets, "
      "int[] first_rows, Tensor reused, int[] reused_offsets, int[] new_steps, Tensor? counts, Tensor(b!)? rows, "
      "Tensor? new_index, Tensor? places, Tensor? initial_places, Tensor tables, Tensor dropped_ids, "
      "Tensor dropped_rows, int[] dropped_offsets, Tensor waiting_rows, Tensor waiting_offsets, Tensor waiting_steps, "
      "Tensor? waiting_times, Tensor(c!) begun_rows, Tensor begun_ids, int[] begun_offsets, int[] begun_first_rows, "
      "Tensor begun_reused, int[] begun_reused_offsets, int[] begun_steps, Tensor? begun_counts, "
      "Tensor(d!)? begun_fills, Tensor? begun_index, Tensor? begun_places, Tensor? begun_initial_places, Tensor "
      "counters) -> ()");
  // Decides which of new ids [M] get rows. occurrences [M]: in this step; asks [M] bool: false for ids that no feature
  // that inserts has, and under a policy of the user for those that it refuses; counted [M]: the occurrences that
  // count. rules [T, 4]: kind, number, number of squares, 1 if the table has counters; squares [T, 33]
  // (life/admission.h). counters: the prepared maps and scores of waiting ids, [0] without any. -> places [K] of the
  // admitted ids. first and second: four lists, one after the other: admitted ids and counts; ids and rows of counters
  // that are not needed any more; rows of other counters, and what they count more; ids and counts of new counters.
  // numbers [T * 6] on the CPU: ids of each list; occurrences of all ids if `sums`, else 0; and of those that are not
  // admitted. A GPU's host waits for these, but if all ids are admitted and nothing is summed.
  m.def(
      "admit(Tensor new_ids, Tensor occurrences, Tensor new_offsets, Tensor? asks, Tensor? counted, Tensor rules, "
      "Tensor squares, Tensor counters, bool sums=False) -> (Tensor places, Tensor first, Tensor second, Tensor "
      "numbers)");
  // `like` is any tensor on the device of the tables. Answers questions [Q, 5]: the `most` lowest rows of a table by
  // count or last_seen, then by mixed id, unsigned, among rows [0, rows) with last_seen < before (or = before and count
  // 0); all of these if there are fewer. A question is table, rows, 1 to compare counts or 0, before, most. half_lives
  // [Q, 40]: the first steps of the half-lives of counts (life/scores.h), -1 for counts that do not decay. -> ids [K],
  // rows [K] of all questions; offsets [Q + 1] on the CPU. last_seen: [K] if in_order, when each answer is by
  // last_seen, then by mixed id; else [0], and the order is any. A GPU's host waits for the offsets. kept [N], from
  // kept_offsets [T + 1] on for each table: rows that are not chosen, -1 is skipped; meanwhile their scores are hidden.
  m.def(
      "lowest_rows(Tensor like, Tensor questions, Tensor? half_lives, bool in_order, Tensor tables, "
      "Tensor? kept=None, Tensor? kept_offsets=None) -> (Tensor ids, Tensor rows, Tensor last_seen, Tensor offsets)");
  // listed: lists [3, M] of ids, rows and last_seen; spans [L, 4]: the table of each, entries [begin, end), most. ->
  // the ids [K] and rows [K] of the first `most` of these entries whose rows still have the listed last_seen; offsets
  // [L + 1] and firsts [L], the first such entry of each list or `end`, on the CPU. A GPU's host waits for these. kept:
  // as of lowest_rows.
  m.def(
      "choose_listed(Tensor[] listed, Tensor spans, Tensor tables, Tensor? kept=None, Tensor? kept_offsets=None) -> "
      "(Tensor ids, Tensor rows, Tensor offsets, Tensor firsts)");
  // Finds the rows of ids [N] and pools them as gather_pool. lengths [B] or offsets [B + 1] of the bags, int32 or
  // int64, or both; first_bags [F + 1] of each feature; first_features [T + 1] of each table. Without segments each id
  // is a bag, and its row an output. pools: 0 nothing, 1 a batch without absent ids, 2 any batch, with zeros for absent
  // ids, as a GPU does for 1, too. collects: 1 if absent ids are listed, 2 if some are expected, 0 if not.
  // -> out [output_rows, columns], or [output_rows] if columns is 0, which is not initialised if it is not pooled; [0]
  // for pools 0; [N, columns of the tables] without segments; rows [N], -1 where absent; offsets [B + 1]; numbers [F +
  // 3 T + 3] on the CPU: where the ids of each feature begin, and the end of the last; the same of each table; the
  // number of absent ids of each table; new_offsets of collect_new. numbers [0] if lengths or offsets are wrong: then
  // nothing else means anything. new_ids, new_counts and new_index of collect_new without the ids of frozen tables, [0]
  // if there are none. A GPU's host waits for the numbers, and for the number of new ids if it was not told to expect
  // them.
  m.def(
      "find_and_pool(Tensor ids, Tensor? lengths, Tensor? offsets, Tensor? bag_weights, Tensor first_bags, "
      "Tensor first_features, Tensor? segments, Tensor tables, bool mean, int pools, int collects, "
      "SymInt output_rows, int columns, ScalarType dtype) -> (Tensor out, Tensor rows, Tensor offsets, Tensor numbers, "
      "Tensor new_ids, "
      "Tensor new_counts, Tensor new_index)");
  // As gather_pool, into `out` [elements], for offsets that are right. With initial_ids [N], the ids of `rows`, an
  // absent row is what its table has for an id without a row. With new_index [N] or initial_ids a GPU may leave bags as
  // they are that have neither an id with another new_index than -1, nor an initial row.
  m.def(
      "pool_prepared_(Tensor(a!) out, Tensor? new_index, Tensor rows, Tensor? initial_ids, Tensor? offsets, "
      "Tensor? bag_weights, Tensor segments, Tensor tables, bool mean) -> ()");
  // grad [elements] -> the gradient of the bag weights [N]. initial_ids as for pool_prepared_.
  m.def(
      "weights_grad_prepared(Tensor grad, Tensor rows, Tensor? initial_ids, Tensor? offsets, Tensor segments, "
      "Tensor tables, bool mean) -> Tensor");
  // As update_rows_.
  m.def(
      "update_prepared_(Tensor grad, Tensor ids, Tensor rows, Tensor? offsets, Tensor? bag_weights, Tensor segments, "
      "Tensor streams, bool mean, float[] hyper, float[] grad_scales, Tensor? senders, Tensor(a!)[] marks, "
      "Tensor? mark_layout, Tensor tables) -> ()");
  // Rows of tables in host memory, of which frames in a GPU's memory hold some: among the rows of a table, as `tables`
  // and block lists have them, the rows come first and the frames from `base` on. caches: five tensors for each table
  // with a cache: places [R] int32, the frame + 1 of each row, or 0; owners [F] int64, the row of each frame, or -1;
  // used [F] int32, the call that used it last; free [F] int32, of which the first counts[0] are the free frames;
  // counts [4] int64: of free frames, of frames that were ever used, of rows loaded and of rows written back.
  // cache_layout [C, 3]: table, number of the call modulo 2^32, base. Gives frames to rows [N] of a batch in table
  // order, -1 is skipped, and copies the rows there, unless not `loads`. Frames of the longest unused rows make room,
  // of equally old ones those of the lowest rows; their rows are copied back. Rows that find no frame stay where they
  // are. No kernel for the CPU.
  m.def(
      "cache_rows_(Tensor rows, Tensor table_offsets, Tensor(a!)[] caches, Tensor cache_layout, bool loads, "
      "Tensor tables) -> ()");
  // rows [N] in table order -> [N]: base + frame of a row in a frame, other numbers as they are. No kernel for the CPU.
  m.def("row_places(Tensor rows, Tensor table_offsets, Tensor[] caches, Tensor cache_layout) -> Tensor");

  // rows [N], offsets [B + 1] or none for sequences, bag_weights [N] -> [elements] of dtype.
  m.def(
      "gather_pool(Tensor rows, Tensor? offsets, Tensor? bag_weights, Tensor[] weights, Tensor layout, "
      "Tensor segments, bool mean, SymInt elements, ScalarType dtype) -> Tensor");
  // Sums grad [elements] over the ids of each row and applies the optimizer. states: for each state of the rule
  // (lookup/row_update.h), in its order, one block for each block of `weights`. streams [T, 3]: rounding key,
  // first column, step. hyper: the hyperparameters of the rule (lookup/row_update.h). Sets the bit of each updated row
  // in marks, blocks [2^shift] uint8 (storage/row_marks.h); a table with 0 blocks in mark_layout [T, 4] keeps no marks.
  // on_nonfinite [T] (lookup/row_update.h) and nonfinite, a tensor [1] int64 for each table: both empty, or neither.
  m.def(
      "update_rows_(Tensor grad, Tensor ids, Tensor rows, Tensor? offsets, Tensor? bag_weights, Tensor segments, "
      "Tensor streams, bool mean, float[] hyper, float[] grad_scales, Tensor? senders, Tensor(a!)[] marks, "
      "Tensor? mark_layout, Tensor(b!)[] weights, Tensor(c!)[] states, Tensor layout, int optimizer, "
      "int[] on_nonfinite, Tensor(d!)[] nonfinite) -> ()");
}

#if !defined(TORCHREC_DYN_SIMT)
// An empty Python module: importing torchrec_dyn._C loads this library and with it the ops.
extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
#endif
