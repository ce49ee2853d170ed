"""A call measured in a Python process of its own, where nothing that ran before can help or hinder it."""

import importlib
import json
import os
import subprocess
import sys
from typing import Any

import torch

from nalaformer.timing import median_ms

from .memory import peak_extra_mib


def in_fresh_process(target: str, arguments: dict[str, Any], *, seconds: float) -> tuple[float, float]:
    """Peak extra MiB and median milliseconds (repeated for about `seconds`) of a call in a new Python process.

    Time too: what earlier calls have left in the C library's heap spares later ones many page faults, or not, by their order.
    target: "package.module:function"; the function gets the arguments (plain values) and returns the call.
    """
    request = json.dumps({"target": target, "arguments": arguments, "threads": torch.get_num_threads(), "seconds": seconds})
    command = [sys.executable, "-c", f"from {__name__} import answer_request; answer_request()"]
    # it finds modules where this process finds them
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, input=request, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last_line = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise RuntimeError(f"the measurement of {target} with {arguments} failed: {last_line}")
    mebibytes, milliseconds = done.stdout.splitlines()[-1].split()
    return float(mebibytes), float(milliseconds)


def answer_request() -> None:
    """Measure in the fresh process: read a request from stdin, write MiB and milliseconds to stdout."""
    request = json.load(sys.stdin)
    torch.set_num_threads(request["threads"])
    module, function = request["target"].split(":")
    call = getattr(importlib.import_module(module), function)(**request["arguments"])
    mebibytes = peak_extra_mib(call)
    sys.stdout.write(f"{mebibytes} {median_ms(call, seconds=request['seconds'])}\n")
