"""Sizes inside of the package: they bound memory or time and change no result. Tests set them small.

They are read at their use, as `knobs.NAME`.
"""

# Memory of rows (storage).
RANGE_DEVICES = {"cuda"}  # types of devices whose blocks are in ranges of addresses
RANGE_BYTES = 32 << 30  # most of a range: few blocks for any GPU, and addresses for 4,000 stores
PAGE_BYTES = 2 << 20  # a GPU commits memory in such pages; a block of one page needs no range
AHEAD_BYTES = 256 << 20  # most memory that is committed before rows need it
# Most of a block: a table has few blocks, and its last, partly used block costs little.
BLOCK_BYTES = 32 << 20
# In files: a process can map some 65,000 of them, and an op takes a microsecond for each block.
FILE_BYTES = 256 << 20
ROWS_READ_TOGETHER = 8192  # from files: their pages, at most 4 KiB each, are in memory together
CROSSING_BYTES = 64 << 20  # rows that cross between a GPU and the host at a time

# Id maps and scans of them (storage).
LARGE_MAP_SLOTS = 1 << 16  # smaller maps double at once, larger ones grow by a quarter, bit by bit
# By one call on the CPU: fast within the caches of a core (28 ns an id; 70 for 2 million ids at once).
IDS_INSERTED_TOGETHER = 1 << 15
ROWS_SCANNED = 2 << 20  # rows whose ids are listed by one scan of the slots, 9 bytes a row
KEPT_ROWS = 4 << 20  # in windows of canonical order of all tables together, 16 bytes a row
MARKED_ROWS = 1 << 18  # rows of a block of marks: 1 MiB
LEAST_UNSIFTED_IDS = 1 << 12  # in a GPU's log of changes: 48 KiB
LEAST_COMPACTED_IDS = 1 << 12  # in a list of touched rows

# Policies and steps.
LEAST_COUNTERS = 1 << 16  # the least default of AdmitAfter.counters
IDS_SCORED_TOGETHER = 1 << 20
IDS_SAMPLED_TOGETHER = 1 << 20
# Types of devices on which prefetching takes the steps of tables: there the host waits where it reads. On the
# CPU nothing is gained, and a call between two batches (erase, save) would find the second's step done.
PREFETCHED_STEPS_ON = {"cuda"}

# Saving, loading, and other reads and writes of rows.
CHUNK_BYTES = 32 << 20  # rows that are read, checked or written together
SUMMED_BYTES = 4 << 20  # on the CPU, copied and summed together: they stay in the caches
SAVED_CHUNK_BYTES = 16 << 20  # of a chunk of a saved tensor: it is in memory a second time
LAST_CHUNK_BYTES = 1 << 20  # DCP's writer keeps the last chunk of every key until all are written
IDS_READ_TOGETHER = 1 << 14  # to find the place of an id among saved ones
IDS_LOADED_TOGETHER = 1 << 20  # to find the rows that they have, or get
LOADED_ROWS = 1 << 18  # rows of a window of a load
LOADED_PIECE_BYTES = 2 << 20  # are summed and copied before they leave the caches
ROUND_BYTES = 8 << 20  # merged rows that a rank receives from each replica at a time
SEEN_WITHIN_SECONDS = 30.0  # for file systems that show new files late

# Served tables.
SERVED_CHUNK_BYTES = 8 << 20  # rows that are encoded together; a few copies of them are in memory
MAP_PIECE_BYTES = 4 << 20  # slots, and the rows that are read with them, in memory together
WASTE_BYTES = 1 << 20  # a rows file is rewritten if more bytes are unused than in use and these
# Linux keeps what a write fills in pages of 2 MiB, if it begins at a multiple of them (ext4 since 6.16).
HUGE_PAGE_BYTES = 2 << 20
