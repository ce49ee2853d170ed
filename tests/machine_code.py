"""What a fault of an assembler leaves in a compiled kernel.

A product of warp groups finds its tile in shared memory by a descriptor of 64 bits: a place in the lower half, constants and a
carry in the upper one. ptxas 12.8, which Triton 3.6 and 3.7 bring for Hopper GPUs, at times adds the constants to a register
that holds something else instead of zero (it forgets to clear it), and the product reads any memory. It was seen for tiles of
16 columns, in kernels that have wider ones too. ptxas 12.9 and 13.4, of Triton 3.8 and 3.9, were right with the same code.
"""

import re
import subprocess
import tempfile
from pathlib import Path

INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+ )?(\S+)\s*(.*?)\s*;")
# the upper halves for tiles whose rows are 128, 64 and 32 bytes
CONSTANTS = (0x40000040, 0x80000020, 0xC0000010)
UPPER_HALF = re.compile(r"R\d+, (R\d+)(?:\.reuse)?, (-?0x[0-9a-f]+), RZ")
CLEARED = re.compile(r"R\d+, (RZ, RZ, RZ|RZ|SRZ|-RZ, RZ, 0, 0)")


def disassembled(cubin: bytes) -> str:
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).with_name("bin") / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout


def undefined_descriptors(code: str) -> list[str]:
    """Instructions that make a descriptor's upper half from a register that was not cleared just before."""
    cleared: set[int] = set()
    faults = []
    for predicate, name, operands in INSTRUCTION.findall(code):
        half = UPPER_HALF.match(operands)
        if name == "IADD3.X" and half and int(half[2], 16) % 2**32 in CONSTANTS and int(half[1][1:]) not in cleared:
            faults.append(f"{name} {operands}")
        written = re.match(r"(?:P\w+, )?R(\d+)\b", operands)
        if written and not name.startswith(("ST", "RED")):
            first = int(written[1])
            cleared -= set(range(first, first + registers_written(name)))
            if CLEARED.fullmatch(operands) and not predicate:
                cleared |= {first, first + 1} if name == "CS2R" else {first}
    return faults


def registers_written(name: str) -> int:
    if product := re.match(r"HGMMA\.64x(\d+)x", name):
        return int(product[1]) // 2
    if ".128" in name or name.startswith("LDSM"):
        return 4
    return 2 if ".64" in name or "WIDE" in name or name == "CS2R" else 1
