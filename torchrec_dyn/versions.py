"""Check that the installed torch, torchrec and fbgemm belong together, made before torchrec is imported.

Of versions that do not, fbgemm's library does not load, or parts of torchrec are missing later. Metadata of
packages cannot bind three versions together, and fbgemm has two package names. Only releases are judged:
nightlies, builds from source and packages without metadata are accepted.
"""

from __future__ import annotations

import contextlib
import os
import re
from importlib import metadata

OVERRIDE = "TORCHREC_DYN_ANY_VERSION"

# The end of an error of the import: `python -m torchrec_dyn` imports the package, so it cannot run then.
REPORT = "For a report, run: python " + os.path.join(
    os.path.dirname(os.path.abspath(__file__)), "tools", "doctor.py"
)

# Minor versions of releases that belong together, the newest first.
TRIOS = (
    {"torch": "2.14", "torchrec": "1.9", "fbgemm": "1.9"},
    {"torch": "2.13", "torchrec": "1.8", "fbgemm": "1.8"},
    {"torch": "2.12", "torchrec": "1.7", "fbgemm": "1.7"},
)
_PACKAGES = {
    "torch": ("torch",),
    "torchrec": ("torchrec",),
    "fbgemm": ("fbgemm-gpu", "fbgemm-gpu-cpu"),  # for CUDA, for the CPU
}

# Releases: 2.13.0, 2.13.0+cu130, 1.9.2.post1.
# No releases: 2.14.0a0+git12ab, 1.9.0.dev20260801, 1.9.0+git12ab, 2026.8.1.
_RELEASE = re.compile(r"(\d{1,3}\.\d+)(\.\d+)*(\.post\d+)?(\+(?!git).*)?")


def check_versions() -> str:
    """Checks the installed versions, unless TORCHREC_DYN_ANY_VERSION is 1; returns their trio as text."""
    if os.environ.get(OVERRIDE, "0") not in ("", "0"):
        return f"not checked, since {OVERRIDE} is set"
    installed = {part: _installed(*names) for part, names in _PACKAGES.items()}
    minors = {part: {*map(_minor, releases.values())} for part, releases in installed.items()}
    # Of two fbgemm packages one may be a leftover: one that fits is enough.
    for trio in TRIOS:
        if all(not minors[part] or minors[part] & {None, minor} for part, minor in trio.items()):
            if {trio["torch"], trio["torchrec"]} <= minors["torch"] | minors["torchrec"]:
                return ", ".join(f"{part} {minor}" for part, minor in trio.items())
            return "none: these versions are not judged"
    raise _fault(installed, minors)


def _fault(installed: dict[str, dict[str, str]], minors: dict[str, set[str | None]]) -> ImportError:
    nearest = max(TRIOS, key=lambda trio: sum(trio[part] in minors[part] for part in trio))
    releases_text = ", ".join(
        f"{name} {said}" for releases in installed.values() for name, said in releases.items()
    )
    return ImportError(
        f"torchrec_dyn: expected torch, torchrec and fbgemm-gpu that belong together, got {releases_text}. "
        f"Install torch {nearest['torch']}.*, torchrec {nearest['torchrec']}.* and fbgemm-gpu "
        f"{nearest['fbgemm']}.* (for the CPU fbgemm-gpu-cpu), or set {OVERRIDE}=1 to skip this check. "
        f"{REPORT}"
    )


def _installed(*names: str) -> dict[str, str]:
    """Returns the versions of the packages that are installed and have metadata."""
    releases = {}
    for name in names:
        with contextlib.suppress(Exception):  # damaged metadata raise errors of many types
            releases[name] = metadata.version(name)
    return {name: version for name, version in releases.items() if version}


def _minor(version: str) -> str | None:
    """Returns the minor version of a release; None: no release."""
    release = _RELEASE.fullmatch(version)
    return release[1] if release else None
