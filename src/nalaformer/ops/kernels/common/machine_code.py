"""Find compiled kernels that a faulty assembler has broken, before they run.

A product of warp groups finds its tile in shared memory by a descriptor of 64 bits: an address in the lower half, constants and
a carry in the upper one. ptxas 12.8, which Triton 3.6 and 3.7 ship for Hopper GPUs, at times adds the constants to a register
that it did not clear, so that the product reads any memory. This happened for tiles of 16 columns, in kernels that have wider
ones too. ptxas 12.9 and 13.4, of Triton 3.8 and 3.9, compile the same code correctly. Which kernels break depends on sizes,
strides and tiles, so every kernel is checked when it is compiled.
"""

import re
import subprocess
import tempfile
import warnings
from hashlib import sha256
from pathlib import Path

import triton
from triton.runtime.cache import get_cache_manager

IS_FOUND_HERE = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)

INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+ )?(\S+)\s*(.*?)\s*;")
# the upper halves for tiles whose rows are 128, 64 and 32 bytes
CONSTANTS = (0x40000040, 0x80000020, 0xC0000010)
# in registers of a thread, R, or in those that a warp shares, UR
UPPER_HALF = re.compile(r"U?R\d+, (U?R)(\d+)(?:\.reuse)?, (-?0x[0-9a-f]+), U?RZ")
CLEARED = re.compile(r"U?R\d+, (RZ, RZ, RZ|RZ|SRZ|-RZ, RZ, 0, 0|URZ)")
# An instruction has 16 bytes: the opcode in the first 12 bits, the register of the first operand in the fourth byte, a
# constant in the next four. This table has, by opcode of an addition of a constant, the register that is always zero.
ZERO_REGISTERS = {0x810: 0xFF, 0x890: 0x3F}


def is_miscompiled(cubin: bytes) -> bool:
    """True if a kernel has the fault. Disassembling takes half a second, so Triton's cache stores the result."""
    if not may_have_descriptors(cubin):
        return False
    answers = get_cache_manager(sha256(cubin).hexdigest())
    if known := answers.get_file("descriptors"):
        return Path(known).read_text() == "undefined"
    try:
        is_wrong = bool(undefined_descriptors(disassemble(cubin)))
    except OSError as error:
        warnings.warn(
            f"the assembler of Triton {triton.__version__} may break kernels, and its cuobjdump, which would tell, cannot run "
            f"({error}): kernels take a slower form that is correct; Triton 3.8 or newer needs no such check",
            stacklevel=2,
        )
        return True
    answers.put("undefined" if is_wrong else "defined", "descriptors", binary=False)
    return is_wrong


def may_have_descriptors(cubin: bytes) -> bool:
    """True if some instruction adds the upper half of a descriptor to a register other than zero."""
    for constant in CONSTANTS:
        wanted = constant.to_bytes(4, "little")
        place = cubin.find(wanted)
        while place >= 0:
            first = int.from_bytes(cubin[place - 4 : place], "little")
            if place % 16 == 4 and ZERO_REGISTERS.get(first & 0xFFF, first >> 24) != first >> 24:
                return True
            place = cubin.find(wanted, place + 1)
    return False


def disassemble(cubin: bytes) -> str:
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).with_name("bin") / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout


def undefined_descriptors(code: str) -> list[str]:
    """Return the instructions that make a descriptor's upper half from a register that was not cleared just before."""
    cleared: set[tuple[str, int]] = set()
    faults = []
    for predicate, name, operands in INSTRUCTION.findall(code):
        half = UPPER_HALF.match(operands)
        is_sum = name in ("IADD3.X", "UIADD3.X") and half and int(half[3], 16) % 2**32 in CONSTANTS
        if is_sum and half and (half[1], int(half[2])) not in cleared:
            faults.append(f"{name} {operands}")
        written = re.match(r"(?:U?P\w+, )*(U?R)(\d+)\b", operands)
        if written and not name.startswith(("ST", "RED")):
            first = int(written[2])
            cleared -= {(written[1], number) for number in range(first, first + registers_written(name))}
            if CLEARED.fullmatch(operands) and not predicate:
                cleared |= {(written[1], first + place) for place in range(2 if name == "CS2R" else 1)}
    return faults


def registers_written(name: str) -> int:
    if product := re.match(r"HGMMA\.64x(\d+)x", name):
        return int(product[1]) // 2
    if ".128" in name or name.startswith("LDSM"):
        return 4
    return 2 if ".64" in name or "WIDE" in name or name == "CS2R" else 1
