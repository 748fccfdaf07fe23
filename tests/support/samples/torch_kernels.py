"""The Gram engine's kernel on PyTorch, imported where it is used: other tests need no PyTorch."""

from __future__ import annotations

from fairfleet.server.gram.kernel import Kernel


def torch_kernel() -> Kernel:
    """Return the kernel on the processor. Without PyTorch, the test that calls this is skipped."""
    from fairfleet.server.gram.torch_kernel import TorchKernel

    return TorchKernel("cpu")
