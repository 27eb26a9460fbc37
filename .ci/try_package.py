"""Installs a wheel or a source package in a fresh environment, by the guide's commands, and uses it there.

`python .ci/try_package.py dist/torchrec_dyn-*.whl python3.12`, as `make release` calls it. The program
that runs is README's.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def blocks(page: str, language: str, heading: str) -> list[str]:
    """Returns the code of a language below a heading, up to the next heading."""
    [section] = re.findall(
        rf"^## {heading}$(.*?)(?=^## |\Z)", (ROOT / page).read_text(), re.M | re.S
    )
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.M | re.S)


def main() -> None:
    """Ends with an error if a command fails."""
    package, python = Path(sys.argv[1]).resolve(), sys.argv[2]
    guide = "docs/guide/start/install.md"
    [for_wheel] = blocks(guide, "bash", "A wheel")
    [for_source] = blocks(guide, "bash", "A source package")
    [extras] = blocks(guide, "bash", "Extras")
    is_wheel = package.suffix == ".whl"
    install = for_wheel if is_wheel else "".join(for_wheel.splitlines(True)[:2]) + for_source
    name = "torchrec_dyn-*.whl" if is_wheel else "torchrec_dyn-*.tar.gz"
    assert name in install
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", f"{folder}/env"], check=True)
        path = f"{folder}/env/bin{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "PIP_QUIET": "1", "TORCHREC_DYN_BUILD": "cpu"}
        commands = (
            install.replace(name, str(package)),
            extras,
            "python -c 'import matplotlib, safetensors.torch, xxhash, torch.utils.tensorboard'",
            f"python {folder}/program.py",
            "python -m torchrec_dyn doctor",
        )
        Path(folder, "program.py").write_text(blocks("README.md", "python", "Example")[0])
        for command in commands:
            subprocess.run(["bash", "-euc", command], check=True, cwd=folder, env=env)
    print(f"{package.name} on {python}: installed and used")


if __name__ == "__main__":
    main()
