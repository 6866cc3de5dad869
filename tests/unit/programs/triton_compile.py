"""Compile the Triton kernels for GPUs that are not here, and note what came out; run by tests/unit/test_triton.py.

python -m tests.unit.programs.triton_compile FACTS.json        without TRITON_INTERPRET
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from alto_distributed.kernels.triton import kernel as kernels
from alto_distributed.kernels.triton.elements import element_type
from alto_distributed.kernels.triton.launch import options_for
from alto_distributed.kernels.triton.table import Dtypes

TARGETS = {f"sm_{number}": GPUTarget("cuda", number, 32) for number in (80, 86, 89, 90, 100, 120)}
TARGETS.update({f"gfx{name}": GPUTarget("hip", f"gfx{name}", 64) for name in ("90a", "942", "950")})
TARGETS["gfx1100"] = GPUTarget("hip", "gfx1100", 32)
USUAL = Dtypes(torch.float32, torch.float32, torch.float32, torch.float32)
SMALL_STATES = Dtypes(torch.float32, torch.bfloat16, torch.bfloat16, torch.bfloat16)
BUILDS = [(target, "float32", USUAL) for target in TARGETS]
for some in ("sm_80", "sm_90", "sm_100", "gfx90a"):
    BUILDS += [(some, "bfloat16", SMALL_STATES)]
    BUILDS += [(some, "guarded", USUAL)]  # programs end at once if a flag on the device says so

TABLES = {"chunks": "*i64", "shards": "*i64", "coefficients": "*fp64"}
SUMS = {"totals": "*i64", "partials": "*fp64", "places": "i32", "sums": "*fp64", "slots": "i32"}


def source(kernel, dtypes, tile, guarded=False):
    """A kernel as a launch asks for it."""
    known = {name.upper(): element_type(dtype) for name, dtype in dtypes._asdict().items()}
    known = {name: value for name, value in {**known, "TILE": tile}.items() if name in kernel.arg_names}
    known = known if guarded else {**known, "skip": None}
    types = {**TABLES, **SUMS, "step_sizes": "*fp64", "inverse_scale": "*fp32", "skip": "*fp32"}
    signature = {name: "constexpr" if name in known else types[name] for name in kernel.arg_names}
    return ASTSource(fn=kernel, signature=signature, constexprs=known)


def facts(compiled, target):
    """What can be read off the assembler, and what NVIDIA's assembler says of it."""
    if "ptx" not in compiled.asm:
        text = compiled.asm["amdgcn"]
        spilled = {int(n) for n in re.findall(r"(?:spill_count|private_segment_fixed_size): +(\d+)", text)}
        return {"text": text, "binary": len(compiled.asm["hsaco"]), "spilled": max(spilled)}
    text = compiled.asm["ptx"]
    with tempfile.TemporaryDirectory() as directory:
        ptx = Path(directory, "kernel.ptx")
        ptx.write_text(text)
        architecture = re.search(r"\.target (\w+)", text)[1]
        command = [
            get_ptxas(TARGETS[target].arch).path,
            "-v",
            f"-arch={architecture}",
            str(ptx),
            "-o",
            str(Path(directory, "cubin")),
        ]
        said = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True).stderr
    return {
        "text": text,
        "binary": len(compiled.asm["cubin"]),
        "spilled": max(int(n) for n in re.findall(r"(\d+) bytes (?:stack|spill)", said)),
        "registers": int(re.search(r"Used (\d+) registers", said)[1]),
    }


def main():
    found = {}
    for target, name, dtypes in BUILDS:
        tile = 16 * TARGETS[target].warp_size
        for kernel in (kernels.phase_one, kernels.finish, kernels.phase_two):
            code = source(kernel, dtypes, tile, name == "guarded")
            compiled = triton.compile(
                code, target=TARGETS[target], options=options_for("cuda", target.startswith("gfx"))
            )
            found[f"{kernel.__name__} {name} {target}"] = facts(compiled, target)
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
