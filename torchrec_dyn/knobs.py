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
KEPT_ROWS = (
    4 << 20
)  # in windows and lists of canonical order of all tables together, 16 bytes a row
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
