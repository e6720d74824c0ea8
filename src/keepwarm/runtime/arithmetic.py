"""The arithmetic identity: what decides the last bits of a loaded model's numbers, besides the model itself.

There are two kinds; `arithmetic_of` returns the one that applies. *Invariant* is the arithmetic of our own kernels: a
row's bits depend only on the tokens at and before it. These kernels set rounding themselves and call no library, so the
environment cannot affect them, and the identity names only their code and tables. *Scheduled* is the arithmetic of
other kernels: they choose the order of additions by a step's shape, the processor, libraries, environment variables and
torch's switches. The identity names all of that, as far as it affects the computing device.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar

import torch
import transformers

from keepwarm.core.identity import ArithmeticIdentity, ModelIdentity, canonical_json, json_digest
from keepwarm.runtime import attention
from keepwarm.runtime.processor import processor
from keepwarm.runtime.runner import Runner

_Value = TypeVar("_Value")

# Packages whose kernels transformers uses if they are installed: module -> distributions that may provide it.
KERNELS = {
    "causal_conv1d": ("causal-conv1d",),
    "fla": ("flash-linear-attention", "fla-core"),
    "mamba_ssm": ("mamba-ssm",),
    "flash_attn": ("flash-attn",),
    "kernels": ("kernels",),
    "triton": ("triton", "pytorch-triton"),
}
_ADAPTING = {"peft": ("peft",)}
_QUANTIZING = {
    "bitsandbytes": ("bitsandbytes",),
    "torchao": ("torchao",),
    "gptqmodel": ("gptqmodel",),
    "compressed_tensors": ("compressed-tensors",),
    "optimum": ("optimum-quanto", "optimum"),
    "hqq": ("hqq",),
}

# Prefixes of environment variables that affect the choice of kernels. `MKL_NUM_THREADS` does: MKL has its own threads
# besides torch's.
_VARIABLES = {
    "cpu": ("MKL_", "DNNL_", "ONEDNN_", "OPENBLAS_", "BLIS_", "ATEN_CPU_CAPABILITY", "TORCH_MKLDNN_"),
    "cuda": (
        "CUBLAS",
        "CUDNN_",
        "NVIDIA_TF32_OVERRIDE",
        "CUDA_FORCE_",
        "TORCH_CUDNN_",
        "TORCH_BLAS_",
        "TORCH_CUBLAS",
        "HIPBLAS",
        "ROCBLAS_",
        "MIOPEN_",
        "TORCH_ROCM_",
    ),
    "mps": ("PYTORCH_MPS_",),
}
_TELLING = ("VERBOSE", "DUMP", "PROFILE", "LOG")  # these only make a library print

# Getters of torch's switches; this torch may lack some. Attention on the processor reads the SDP switches, too.
_SDP = (
    "_get_flash_sdp_enabled",
    "_get_mem_efficient_sdp_enabled",
    "_get_math_sdp_enabled",
    "_get_overrideable_sdp_enabled",
    "_get_fa3_sdp_enabled",
    "_get_math_sdp_allow_fp16_bf16_reduction",
    "_get_sdp_priority_order",
)
_GETTERS = {
    "cpu": ("_get_mkldnn_enabled", "_get_mkldnn_deterministic", "_get_cpu_allow_fp16_reduced_precision_reduction"),
    "cuda": (
        "_get_cublas_allow_tf32",
        "_get_cublas_allow_fp16_reduced_precision_reduction",
        "_get_cublas_allow_bf16_reduced_precision_reduction",
        "_get_cublas_allow_fp16_accumulation",
        "_get_blas_preferred_backend",
        "_get_cudnn_enabled",
        "_get_cudnn_benchmark",
        "_get_cudnn_deterministic",
        "_get_cudnn_allow_tf32",
        "_cuda_getCublasWorkspaceSize",
        "_cuda_getCublasLtWorkspaceSize",
    ),
}
_PRECISIONS = {"cpu": "mkldnn", "cuda": "cuda"}  # the backend for which torch has a float32 precision per operator
_PRECISE = ("all", "matmul", "conv", "rnn")

_SMALLEST = sys.float_info.min


class Invariant(NamedTuple):
    """Our own kernels' arithmetic, as it is set now."""

    kernels: str  # digest of their machine code; of the code and its compiler for a GPU
    constants: str  # digest of the tables and scalars that they take from the model's modules
    decoder: str = "lean"  # which one runs them
    device: str = "cpu"

    @property
    def identity(self) -> ArithmeticIdentity:
        return ArithmeticIdentity(
            torch="",
            device=self.device,
            instruction_set="",  # the machine code's digest covers it
            threads=0,
            attention=f"{self.decoder}:{self.kernels}",
            constants=self.constants,
        )


class Scheduled(NamedTuple):
    """The arithmetic of other kernels, as it is set now; switches and the thread count may change at run time.

    It is read for every request, so values are kept raw; `identity` converts them.
    """

    surroundings: Surroundings
    attention: str
    compiled: bool
    threads: int  # 0 if the processor does not compute
    switches: tuple[Any, ...]

    @property
    def identity(self) -> ArithmeticIdentity:
        around = self.surroundings
        names = (name for name, _ in around.readers)
        return ArithmeticIdentity(
            torch=around.build,
            device=around.device,
            instruction_set=around.instruction_set,
            threads=self.threads,
            attention=self.attention,
            mode="compiled" if self.compiled else "eager",
            libraries=canonical_json(around.libraries),
            environment=canonical_json(around.environment),
            switches=canonical_json(dict(zip(names, self.switches, strict=True))),
            constants=around.constants,
        )


@dataclass(frozen=True, eq=False)
class Surroundings:
    """What other kernels depend on and what does not change while a model is loaded."""

    build: str  # of torch
    device: str
    instruction_set: str
    libraries: Mapping[str, str]
    environment: Mapping[str, str]
    constants: str  # digest of the tables that the model's modules made from its configuration
    compiled: bool  # parts of the model are compiled
    threaded: bool  # the processor's threads compute
    readers: tuple[tuple[str, Callable[[], Any]], ...] = field(repr=False)  # torch's switches

    @classmethod
    def of(
        cls, model: torch.nn.Module, where: Mapping[str, torch.device], identity: ModelIdentity, constants: str
    ) -> Surroundings:
        """Read the surroundings now: by the time a model is loaded, libraries have read their variables. `where` says
        which device computes with each parameter (`runtime.dispatch.devices`)."""
        kinds = sorted({device.type for device in where.values()})
        packages = KERNELS | (_ADAPTING if identity.lora != "none" else {})
        packages |= _QUANTIZING if identity.quantization != "none" else {}
        name, instruction_set = _devices(where)
        return cls(
            build=" ".join(map(_build, kinds)),
            device=name,
            instruction_set=instruction_set,
            libraries={"transformers": transformers.__version__}
            | installed(packages)
            | _merged(map(_of_device, kinds)),
            environment=_merged(map(_variables, kinds)),
            constants=constants,
            compiled=any(module._compiled_call_impl is not None for module in model.modules()),
            threaded="cpu" in kinds,
            readers=tuple(_merged(map(dict, map(_readers, kinds))).items()),
        )


def arithmetic_of(runner: Runner, surroundings: Surroundings) -> Invariant | Scheduled:
    """Return the arithmetic of a runner, as it is set now."""
    if (lean := runner.lean) is not None:
        return Invariant(lean.digest, lean.constants, lean.name, runner.device.type)
    own = f"transformers:{runner.model.config._attn_implementation}"
    return Scheduled(
        surroundings,
        own if runner.attention is None else attention.KERNEL,
        surroundings.compiled or runner.model._compiled_call_impl is not None,
        torch.get_num_threads() if surroundings.threaded else 0,
        tuple(read() for _, read in surroundings.readers),
    )


def _devices(where: Mapping[str, torch.device]) -> tuple[str, str]:
    """Return name and instruction set of all devices together. If they differ, the name says which computes what."""
    made = {device: _device(device) for device in set(where.values())}
    if len(set(made.values())) == 1:
        return next(iter(made.values()))
    names, sets = (" + ".join(sorted(set(each))) for each in zip(*made.values(), strict=True))
    parts = json_digest("keepwarm placement 1", sorted((name, made[device][0]) for name, device in where.items()))
    return f"{names}: {parts[:16]}", sets


def _device(device: torch.device) -> tuple[str, str]:
    """Return a device's name and its instruction set or architecture."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return f"cuda:{found.name}", f"{found.major}.{found.minor}, {found.multi_processor_count} multiprocessors"
    if device.type == "cpu":
        return "cpu", f"{processor()} {torch.backends.cpu.get_cpu_capability()}"
    return device.type, f"{processor()} {platform.mac_ver()[0]}".strip()  # Metal's kernels are the system's


def _build(kind: str) -> str:
    """Return torch's build; for the processor it covers the libraries it was built with (MKL, oneDNN, versions)."""
    made: Any = torch.version
    with_what = json_digest("torch", torch.__config__.show())[:16] if kind == "cpu" else made.git_version
    return f"{torch.__version__}:{made.cuda or made.hip or 'cpu'}:{with_what}"


def _merged(found: Iterable[Mapping[str, _Value]]) -> dict[str, _Value]:
    return {name: value for each in found for name, value in each.items()}


def installed(packages: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Return the versions of those packages that can be imported."""
    return {name: _version(names) for name, names in packages.items() if find_spec(name) is not None}


def _version(distributions: tuple[str, ...]) -> str:
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def _of_device(kind: str) -> dict[str, str]:
    """Return the versions of a device's own libraries."""
    if kind != "cuda":
        return {}
    return {"cudnn": str(torch.backends.cudnn.version()), "cublas": _cublas()}


def _cublas() -> str:
    """Return the version of the cuBLAS that torch has loaded; "unknown" if it cannot be read."""
    major = str(torch.version.cuda).partition(".")[0]
    try:
        library = ctypes.CDLL(f"libcublas.so.{major}", mode=getattr(os, "RTLD_NOLOAD", 0))
        parts = [ctypes.c_int() for _ in range(3)]  # major, minor, patch
        for which, part in enumerate(parts):
            library.cublasGetProperty(which, ctypes.byref(part))
    except (OSError, AttributeError):
        return "unknown"
    return ".".join(str(part.value) for part in parts)


def _variables(kind: str) -> dict[str, str]:
    """Return the environment variables that change how libraries compute on a kind of device."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_VARIABLES.get(kind, ())) and not any(word in name for word in _TELLING)
    }


def _readers(kind: str) -> tuple[tuple[str, Callable[[], Any]], ...]:
    """Return torch's switches that affect a kind of device, by name."""
    getters = {name: getattr(torch._C, name) for name in (*_SDP, *_GETTERS.get(kind, ())) if hasattr(torch._C, name)}
    getters["float32_matmul_precision"] = torch.get_float32_matmul_precision
    getters["deterministic_algorithms"] = torch.are_deterministic_algorithms_enabled
    if kind == "cpu":
        getters["flushes_denormals"] = lambda: _SMALLEST / 2 == 0
    if (precision := getattr(torch._C, "_get_fp32_precision_getter", None)) is not None and kind in _PRECISIONS:
        for backend in ("generic", _PRECISIONS[kind]):
            for operator in _PRECISE if backend != "generic" else _PRECISE[:1]:
                getters[f"fp32_precision.{backend}.{operator}"] = partial(precision, backend, operator)
    return tuple((name.removeprefix("_get_"), partial(_read, getter)) for name, getter in getters.items())


def _read(getter: Callable[[], Any]) -> Any:
    """Return a switch's value in a form that JSON has. torch raises if a newer switch contradicts an older one."""
    try:
        value = getter()
    except RuntimeError:
        return "mixed"
    if value == "none":  # no precision is set, which means full precision
        return "ieee"
    if isinstance(value, list):
        return tuple(value)
    return value if isinstance(value, bool | int | float | str | tuple) else str(value)
