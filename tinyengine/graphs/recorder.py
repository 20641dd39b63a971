"""What a capture sees: every kernel of a function, in order, and the allocations and frees between them.

One recorder serves two ends, which differ only in where an output lives (`Home`). On meta tensors it predicts the
allocator's events of a CUDA capture of the same function; on the CPU it is the tape's. As on CUDA nothing is computed,
and what a capture refuses, reading a value or a shape that depends on one, is refused by operator and line.
"""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tinyengine.errors import CaptureError
from tinyengine.graphs.arena import Event

aten = torch.ops.aten
# One kernel each, though PyTorch can also take them apart.
WHOLE = {aten.rms_norm.default, aten.scaled_dot_product_attention.default}
READS_A_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
ALSO_REFUSED = {aten.equal.default, aten.lift_fresh.default}  # the second is torch.tensor(list): a copy from the host
HOST_READS = {Tensor.tolist: "tolist", Tensor.numpy: "numpy", Tensor.cpu: "cpu"}  # which the dispatcher never sees


class Kernel(NamedTuple):
    """One launch: the operator, what it was given, and the tensors that it made (none if it writes in place)."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Tensor, ...]
    stream: int


class Home(Protocol):
    """Where the outputs of a recording live. `live` outlasts a recording, as an output may."""

    live: dict[int, tuple[StorageWeakRef, int]]  # by storage: whether it still lives, and the id of its allocation

    def allocate(self, nbytes: int, stream: int) -> int:
        """Take room for an output; the id of the allocation."""

    def tensor(self, allocation: int, like: Tensor) -> Tensor:
        """A tensor of the shape, strides and dtype of `like` in that room."""

    def free(self, allocation: int) -> None:
        """Nobody holds the output any more."""


class MetaHome:
    """Nowhere: shapes alone."""

    def __init__(self) -> None:
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._count = 0

    def allocate(self, nbytes: int, stream: int) -> int:
        """The next id."""
        self._count += 1
        return self._count

    def tensor(self, allocation: int, like: Tensor) -> Tensor:
        """Another meta tensor."""
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")

    def free(self, allocation: int) -> None:
        """Nothing to do."""


@contextlib.contextmanager
def recording(home: Home, on_kernel: Callable[[Kernel], None]) -> Iterator[Recorder]:
    """Within it everything is recorded and nothing computed. Raises CaptureError where a capture would fail.

    It runs under `inference_mode`, where composite operators are seen whole and are taken apart by the recorder:
    otherwise a copying `reshape` passes as a view.
    """
    recorder = Recorder(home, on_kernel)
    recorder.sweep()
    try:
        with torch.inference_mode(), _RefuseHostReads(), recorder:
            yield recorder
    finally:
        recorder.sweep()


class Recorder(TorchDispatchMode):
    """Sees every operator in place of its kernel. Entered by `recording`."""

    def __init__(self, home: Home, on_kernel: Callable[[Kernel], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.stream = 0
        self._home = home
        self._on_kernel = on_kernel

    def sweep(self) -> None:
        """Free what nobody holds any more. The recorder itself holds no tensor."""
        for storage in [s for s, (ref, _) in self._home.live.items() if ref.expired()]:
            self._free(self._home.live.pop(storage)[1])

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.sweep()
        if op not in WHOLE and torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):
            with self:
                return op.decompose(*args, **kwargs)
        _refuse(op, args)
        returns = op._schema.returns
        if returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns):
            return op(*args, **kwargs)  # a view: no kernel
        if written := _written(op, args, kwargs):
            self._on_kernel(Kernel(op, args, kwargs, (), self.stream))
            return None if not returns else written[0] if len(returns) == 1 else tuple(written)
        given = _on_meta((args, kwargs))
        shapes = op(*given[0], **given[1])
        if _storages(shapes) & _storages(given):
            return op(*args, **kwargs)  # a view whose schema does not say so, as `_unsafe_view`
        scratch = _scratch_bytes(op, args)
        before = [self._allocate(n) for n in scratch.before]
        outputs = tree_map_only(Tensor, self._place, shapes)
        after = [self._allocate(n) for n in scratch.after]
        for allocation in before + after:
            self._free(allocation)
        made = tuple(t for t in tree_leaves(outputs) if isinstance(t, Tensor))
        self._on_kernel(Kernel(op, args, kwargs, made, self.stream))
        return outputs

    def _place(self, like: Tensor) -> Tensor:
        """An output, somewhere to live."""
        nbytes = like.untyped_storage().nbytes()
        if not nbytes:
            return self._home.tensor(0, like)
        allocation = self._allocate(nbytes)
        tensor = self._home.tensor(allocation, like)
        ref = StorageWeakRef(tensor.untyped_storage())
        self._home.live[ref.cdata] = (ref, allocation)
        return tensor

    def _allocate(self, nbytes: int) -> int:
        allocation = self._home.allocate(nbytes, self.stream)
        self.events.append(Event(allocation, nbytes, self.stream))
        return allocation

    def _free(self, allocation: int) -> None:
        self._home.free(allocation)
        self.events.append(Event(allocation, 0))


def trace(fn: Callable[[], object]) -> list[Event]:
    """The allocator's events while `fn` is captured; fn works on meta tensors. What it returns is freed last."""
    with recording(MetaHome(), lambda kernel: None) as recorder:
        fn()
    return recorder.events


class _Scratch(NamedTuple):
    """Bytes that a CUDA kernel allocates beside its outputs and frees at once, before and after them."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


def _scratch_bytes(op: Any, args: tuple[Any, ...]) -> _Scratch:
    """`rms_norm` and `roll` copy an input that is not contiguous; `rms_norm` also keeps a float32 for each row."""
    if op not in (aten.rms_norm.default, aten.roll.default):
        return _Scratch()
    x = args[0]
    copy = () if x.is_contiguous() else (x.numel() * x.element_size(),)
    rows = (x.numel() // math.prod(args[1]) * 4,) if op is aten.rms_norm.default else ()
    return _Scratch(copy, rows)


def _on_meta(given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    """The same arguments as shapes alone: the operator then computes its output's shape and nothing else."""

    def shape(t: Tensor) -> Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")

    args, kwargs = tree_map_only(Tensor, shape, given)
    return args, {**kwargs, "device": "meta"} if "device" in kwargs else kwargs


def _storages(values: Any) -> set[int]:
    """Which storages the tensors among these have."""
    return {t.untyped_storage()._cdata for t in tree_leaves(values) if isinstance(t, Tensor)}


def _written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that the operator writes in place, `out` among them."""
    written = []
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[position] if position < len(args) else kwargs[argument.name])
    return written


def _refuse(op: Any, args: tuple[Any, ...]) -> None:
    """CaptureError for an operator that reads a value back. `index` does so only for a mask, though always tagged."""
    if op is aten.index.Tensor:
        refused = any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
    else:
        refused = op in ALSO_REFUSED or bool(READS_A_VALUE & set(op.tags))
    if refused:
        raise CaptureError(_message(str(op)))


class _RefuseHostReads(TorchFunctionMode):
    """Catches the ways to the host that are no operators."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in HOST_READS:
            raise CaptureError(_message(f"Tensor.{HOST_READS[func]}"))
        return func(*args, **(kwargs or {}))


def _message(what: str) -> str:
    """What was refused, and the user's line that asked for it."""
    outside = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    frames = [f for f in traceback.extract_stack() if not f.filename.startswith(outside)]
    where = f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "an unknown line"
    return (
        f"{what} cannot be captured: it needs a value on the host, and a capture computes none ({where}); "
        "keep the value in a tensor, or do this before the capture"
    )
