"""Imported together with torch._dynamo: functions that torch.compile calls as they are, since they read numbers on the host.

As a decorator torch.compiler.disable would import torch._dynamo with this library, which takes as long as torch itself.
"""

import torch

from . import delta, interface

for _module in (delta, interface):
    # the lengths and the longest are part of the launch: traced, every packing would be another program
    setattr(_module, "_packed", torch.compiler.disable(_module._packed))  # noqa: B010
