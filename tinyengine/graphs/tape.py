"""CUDA graphs without CUDA: a capture records, a replay runs the same kernels over the same addresses, on the CPU.

It is `torch.cuda.CUDAGraph` in meaning and in bytes, never in speed. A pool is an arena with host memory behind it: an
output has an address, and what was freed is used again, within a capture and by the next one. What nothing has
written reads as NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from tinyengine.errors import CaptureError
from tinyengine.graphs.arena import Address, Arena, PoolBytes
from tinyengine.graphs.backend import HostBackend, Result
from tinyengine.graphs.recorder import Kernel, Live, sweep

POISON = 0xFF  # bytes of this read as NaN in every float dtype, and as -1 in every signed integer one


class TapePool:
    """A private pool: the arena's rules, and memory behind its segments. The `Home` of a capture's outputs."""

    def __init__(self, arena: Arena | None = None) -> None:
        self.arena = arena or Arena()
        self.graphs = 0
        self.live: dict[int, Live] = {}
        self._memory: list[npt.NDArray[np.uint8]] = []
        self._addresses: dict[int, Address] = {}
        self._count = 0

    def allocate(self, nbytes: int, stream: int) -> int:
        """Take a block; memory comes with each new segment."""
        self._count += 1
        self._addresses[self._count] = self.arena.allocate(nbytes, stream)
        for segment in self.arena.segments[len(self._memory) :]:
            self._memory.append(np.full(segment.nbytes, POISON, np.uint8))
        return self._count

    def tensor(self, allocation: int, like: Tensor) -> Tensor:
        """A tensor over the block. Its storage is a view that dies with it; the bytes stay the pool's."""
        if not allocation:
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        segment, offset = self._addresses[allocation]
        block = self._memory[segment][offset : offset + like.untyped_storage().nbytes()]
        return torch.from_numpy(block).view(like.dtype).as_strided(like.shape, like.stride(), 0)

    def free(self, allocation: int) -> None:
        """Give the block back to the arena."""
        self.arena.free(self._addresses.pop(allocation))

    def find(self, tensor: Tensor) -> Address | None:
        """Where a tensor begins in this pool, or None if it lies elsewhere."""
        start = tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.element_size()
        for segment, memory in enumerate(self._memory):
            if 0 <= start - memory.ctypes.data < memory.nbytes:
                return Address(segment, int(start) - memory.ctypes.data)
        return None

    def alias(self, tensor: Tensor) -> Tensor:
        """The same bytes in a tensor that keeps no block alive, as a recorded address does not; others unchanged."""
        address = self.find(tensor)
        if address is None:
            return tensor
        whole = torch.from_numpy(self._memory[address.segment]).view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), address.offset // tensor.element_size())


class TapeGraph:
    """A recorded function. `replay` runs its kernels; `print(graph)` lists them with shapes and addresses.

    `sections` has one entry up to each fork or join, with a list of kernels for each stream in it. The lists of one
    section could run in any order, or at once as on the device.
    """

    def __init__(self, pool: TapePool) -> None:
        self.sections: list[dict[int, list[Kernel]]] = []
        self._pool = pool
        self._is_reset = False

    @property
    def kernels(self) -> list[Kernel]:
        """All kernels, in the order of replay."""
        return [kernel for section in self.sections for stream in section.values() for kernel in stream]

    def add(self, kernel: Kernel) -> None:
        """Record a kernel by the addresses of its tensors."""
        args, kwargs, outputs = tree_map_only(Tensor, self._pool.alias, (kernel.args, kernel.kwargs, kernel.outputs))
        self.sections += [{} for _ in range(len(self.sections), kernel.section + 1)]
        stream = self.sections[kernel.section].setdefault(kernel.stream, [])
        stream.append(kernel._replace(args=args, kwargs=kwargs, outputs=outputs))

    @torch.inference_mode()
    def replay(self) -> None:
        """Run every kernel again, over what its addresses hold now. CaptureError after a reset."""
        if self._is_reset:
            raise CaptureError("the graph was reset: capture it again")
        for kernel in self.kernels:
            result = kernel.op(*kernel.args, **kernel.kwargs)
            if kernel.outputs:
                results = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
                for place, value in zip(kernel.outputs, results, strict=True):
                    place.copy_(value)

    def reset(self) -> None:
        """Forget the kernels, and with them the hold on the pool's memory."""
        self.sections.clear()
        self._pool.graphs -= not self._is_reset
        self._is_reset = True

    def __str__(self) -> str:
        return "\n".join(f"{i:4}  {self._line(kernel)}" for i, kernel in enumerate(self.kernels))

    def _line(self, kernel: Kernel) -> str:
        """`aten.mm(a, b) -> c`, each tensor as dtype[shape]@address; `host` marks one that is not the pool's."""

        def word(value: Any) -> str:
            if isinstance(value, list | tuple):
                return f"[{', '.join(map(word, value))}]"
            if not isinstance(value, Tensor):
                return repr(value)
            address = self._pool.find(value)
            where = "host" if address is None else f"{address.segment}:{address.offset:#x}"
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}@{where}"

        inputs = [word(value) for value in kernel.args]
        inputs += [f"{name}={word(value)}" for name, value in kernel.kwargs.items()]
        outputs = ", ".join(word(t) for t in kernel.outputs) or "in place"
        stream = f"[stream {kernel.stream}] " if kernel.stream else ""
        return f"{stream}{kernel.op}({', '.join(inputs)}) -> {outputs}"


class TapeBackend(HostBackend):
    """CUDA graphs' stand-in on the CPU; see `graphs.backend.Backend`. arena: makes what each pool is ruled by."""

    def __init__(self, arena: Callable[[], Arena] = Arena) -> None:
        super().__init__()
        self._arena = arena

    def new_pool(self) -> TapePool:
        """A private pool."""
        return TapePool(self._arena())

    def capture(self, fn: Callable[[], Result], pool: TapePool, stream: int = 0) -> tuple[TapeGraph, Result]:
        """Record `fn` into a graph whose outputs live in `pool`; the graph, and what fn returned (nothing is in it).

        Raises CaptureError if fn does what a capture cannot; the pool then holds nothing more than before.
        """
        graph = TapeGraph(pool)
        result, _ = self.record(fn, pool, graph.add, stream)
        pool.graphs += 1
        return graph, result

    def pool_bytes(self, pool: TapePool) -> PoolBytes:  # type: ignore[override]
        """Reserved and live bytes, now that what nobody holds any more is free."""
        sweep(pool)
        return super().pool_bytes(pool)
