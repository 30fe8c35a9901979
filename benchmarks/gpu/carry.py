"""Collect what `benchmarks.gpu.report` and a Ray run need on a GPU machine without network.

    python -m benchmarks.gpu.carry --out build/gpu-carry       # here, with a package index
    python benchmarks/gpu/carry.py --unpack /tmp/site          # there; then PYTHONPATH=/tmp/site

The machine has Python, torch, transformers, numba, safetensors, jinja2, PyYAML, rich, pytest,
pytest-xdist and hypothesis. The folder gets wheels of hydra-core, omegaconf, pydantic, math-verify
and Megatron-Core; Ray without what a run does not use; and the FlashAttention 3 of xformers, built
for torch's stable ABI. Versions come from constraints.txt where it has them.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = (
    "hydra-core",
    "omegaconf",
    "pydantic",
    "pydantic-core",
    "annotated-types",
    "typing-inspection",
    "math-verify",
    "latex2sympy2-extended",
    "pint",
    "flexcache",
    "flexparser",
    "platformdirs",
    "megatron-core",
    "jsonschema",
    "jsonschema-specifications",
    "referencing",
    "rpds-py",
)
_SOURCE_PACKAGE = "antlr4-python3-runtime==4.9.3"
"""A dependency of omegaconf without a wheel."""
_RAY_PARTS = ("jars", "rllib", "tune", "cpp", "dashboard/client", "llm", "serve", "workflow")
"""Folders of Ray that a run does not use: about 60 % of its size."""
_XFORMERS = "xformers==0.0.34"
_CUDA_RUNTIME = "nvidia-cuda-runtime-cu12==12.8.90"
"""The build of xformers needs it beside the CUDA 13 of torch."""
_FA3_MODULE = '''"""FlashAttention 3 of xformers under the name that torch looks up."""

import ctypes
import importlib.util
from pathlib import Path

_FOLDER = Path(__file__).parent
ctypes.CDLL(str(_FOLDER / "libcudart.so.12"), mode=ctypes.RTLD_GLOBAL)
import torch  # noqa: E402

torch.ops.load_library(str(_FOLDER / "fa3.so"))
'''
_GLIBC_TAGS = ("manylinux_2_28", "manylinux_2_24", "manylinux_2_17", "manylinux2014")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-carry")
    parser.add_argument("--python", default="3.12", help="Python of the machine; default 3.12")
    parser.add_argument("--unpack", type=Path, help="unpack --out into this folder instead")
    arguments = parser.parse_args(argv)
    if arguments.unpack is not None:
        unpack(arguments.out, arguments.unpack)
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    versions = constraints(ROOT / "constraints.txt")
    packages = [f"{name}=={versions[name]}" if name in versions else name for name in _PACKAGES]
    download(packages, arguments.out, arguments.python)
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*wheel, "--wheel-dir", str(arguments.out), _SOURCE_PACKAGE], check=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        download([f"ray=={versions['ray']}"], folder, arguments.python)
        download([_XFORMERS, _CUDA_RUNTIME], folder, arguments.python)
        write_archive(arguments.out / "ray.tar.xz", ray_files(folder))
        write_archive(arguments.out / "fa3.tar.xz", fa3_files(folder))
    for path in sorted(arguments.out.iterdir()):
        print(f"{path.stat().st_size / 1e6:8.1f} MB  {path.name}")
    print(
        f"{arguments.out}: copy it and the repository to a machine with Python {arguments.python};"
        " there python benchmarks/gpu/carry.py --unpack /tmp/site, and PYTHONPATH=/tmp/site"
    )
    return 0


def constraints(path: Path) -> dict[str, str]:
    """Return package -> version of a file of `name==version` lines."""
    lines = path.read_text(encoding="utf-8")
    return dict(re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;]+)", lines, re.MULTILINE))


def download(packages: Sequence[str], folder: Path, python: str) -> None:
    """Download wheels for Linux x86-64. Raises CalledProcessError if one does not exist."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    command += [str(folder), "--only-binary=:all:", "--python-version", python]
    for abi in (f"cp{python.replace('.', '')}", "abi3", "none"):
        command += ["--abi", abi]
    for tag in _GLIBC_TAGS:
        command += ["--platform", f"{tag}_x86_64"]
    subprocess.run([*command, *packages], check=True)


def ray_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the files of Ray's wheel that a run uses."""
    dropped = tuple(f"ray/{part}/" for part in _RAY_PARTS)
    with zipfile.ZipFile(next(folder.glob("ray-*.whl"))) as wheel:
        for name in wheel.namelist():
            if not name.endswith("/") and not name.startswith(dropped):
                yield name, wheel.read(name)


def fa3_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the module of FlashAttention 3, its library and the CUDA runtime that this needs."""
    yield "flash_attn_interface.py", _FA3_MODULE.encode()
    with zipfile.ZipFile(next(folder.glob("xformers-*.whl"))) as wheel:
        yield "fa3.so", wheel.read("xformers/flash_attn_3/_C.so")
    with zipfile.ZipFile(next(folder.glob("nvidia_cuda_runtime*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith("/libcudart.so.12"))
        yield "libcudart.so.12", wheel.read(name)


def write_archive(path: Path, files: Iterator[tuple[str, bytes]]) -> None:
    """Write files as an archive that Python alone can unpack; all are executable."""
    with tarfile.open(path, "w:xz") as archive:
        for name, content in files:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            entry.mode = 0o755
            archive.addfile(entry, io.BytesIO(content))


def unpack(folder: Path, site: Path) -> None:
    """Install the wheels and archives of `folder` into the folder `site`, without network."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-compile", "--upgrade", "--target", str(site)]
    subprocess.run([*command, *map(str, sorted(folder.glob("*.whl")))], check=True)
    for path in sorted(folder.glob("*.tar.xz")):
        with tarfile.open(path) as archive:
            archive.extractall(site, filter="data")


if __name__ == "__main__":
    sys.exit(main())
