"""Tells which instructions of the kernels' PTX were executed.

python tests/csrc/ptx/coverage.py FOLDER [--left]

The folder has a file of each process (tests/csrc/ptx/coverage.h); they are added up.
"""

import argparse
import collections
from pathlib import Path
from typing import NamedTuple


class Instruction(NamedTuple):
    line: int  # in the text that nvcc made
    text: str


class Kernel:
    """A kernel in all processes: its launches, and how often warps executed each instruction."""

    def __init__(self, name):
        self.name = name
        self.launches = 0
        self.most_blocks = 0
        self.times = collections.Counter()
        self.instructions = []

    def left(self):
        return [one for one in self.instructions if not self.times[one]]

    def executed(self):
        return len(self.instructions) - len(self.left())


def read(folder):
    """Returns the kernels of all processes by their mangled names."""
    kernels = {}
    for path in sorted(Path(folder).glob("*.tsv")):
        kernel, is_new = None, False
        for text in path.read_text().splitlines():
            first, *rest = text.split("\t")
            if first == "K":
                target, mangled, name, launches, most_blocks = rest
                key = target, mangled
                is_new = key not in kernels
                kernel = kernels.setdefault(key, Kernel(name))
                kernel.launches += int(launches)
                kernel.most_blocks = max(kernel.most_blocks, int(most_blocks))
            else:
                one = Instruction(int(rest[0]), rest[1])
                kernel.times[one] += int(first)
                if is_new:
                    kernel.instructions.append(one)
    return list(kernels.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--left", action="store_true", help="each instruction that was left, too")
    options = parser.parse_args()
    kernels = read(options.folder)
    launched = [kernel for kernel in kernels if kernel.launches]
    for kernel in sorted(launched, key=lambda kernel: kernel.executed() / len(kernel.instructions)):
        share = 100 * kernel.executed() / len(kernel.instructions)
        counts = f"{kernel.executed()} of {len(kernel.instructions)} ({share:.0f} %)"
        print(f"{counts:>22} {kernel.launches:>7} x {kernel.most_blocks:<5} {kernel.name}")
        for one in kernel.left() if options.left else ():
            print(f"    {one.line:>6}: {one.text}")
    for kernel in kernels:
        if not kernel.launches:
            print(f"never launched: {kernel.name}")
    every = sum(len(kernel.instructions) for kernel in kernels)
    executed = sum(kernel.executed() for kernel in kernels)
    print(
        f"{len(launched)} of {len(kernels)} kernels launched, "
        f"{executed} of {every} instructions executed ({100 * executed / max(every, 1):.1f} %)"
    )


if __name__ == "__main__":
    main()
