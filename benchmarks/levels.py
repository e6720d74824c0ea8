"""Each level of instructions that this processor has, beside transformers under the same instructions.

    python benchmarks/levels.py MODEL [--levels NAME ...] [--prefix 2000] [--rounds 5] [--out FILE]

MODEL is a folder. For every level a process of its own measures what `families.py` does, with the level's default
dtype. On x86-64 torch's libraries are held to about the level's instructions: AVX2, or AVX-512 with or without
products of bfloat16. With AMX they take what they find. Prints one JSON line per figure.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from families import measured

from keepwarm.core.levels import TILES, VARIABLE, Level
from keepwarm.runtime.native.build import levels_here

_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
_AVX512, _PAIRS = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}


def surroundings(level: Level) -> dict[str, str]:
    """What holds a process to a level."""
    if level.machine != "x86_64" or level.narrow == TILES:
        return {VARIABLE: level.name}
    wide = _PAIRS if level.narrow else _AVX512
    return {VARIABLE: level.name} | (wide if "avx512f" in level.needs else _AVX2)


def main() -> None:
    here = {level.name: level for level in levels_here()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder, say the demo's in ~/.cache/keepwarm/models")
    parser.add_argument("--levels", nargs="+", choices=here, default=list(here), help="those to measure")
    parser.add_argument("--prefix", type=int, default=2000, help="tokens before the question")
    parser.add_argument("--rounds", type=int, default=5, help="how often")
    parser.add_argument("--out", type=Path, help="a file to append the lines to")
    parser.add_argument("--this", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.this:
        dtype = "bfloat16" if here[options.this].narrow else "float32"
        for figures in measured(options.model, dtype, options.prefix, options.rounds):
            print(json.dumps({"level": options.this} | figures), flush=True)
        return
    for name in options.levels:
        command = [sys.executable, __file__, str(options.model), "--this", name]
        command += ["--prefix", str(options.prefix), "--rounds", str(options.rounds)]
        done = subprocess.run(
            command, env=os.environ | surroundings(here[name]), stdout=subprocess.PIPE, text=True, check=True
        )
        print(done.stdout, end="", flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(done.stdout)


if __name__ == "__main__":
    main()
