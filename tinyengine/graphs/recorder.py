"""What a capture sees: every kernel of a function, in order, and the allocations and frees between them.

One recorder serves two ends, which differ only in where an output lives (`Home`). On meta tensors it predicts the
allocator's events of a CUDA capture of the same function; on the CPU it is the tape's. As on CUDA nothing is computed,
and what a capture refuses, reading a value or a shape that depends on one, is refused by operator and line.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tinyengine.errors import CaptureError
from tinyengine.graphs.allocations import Free, allocations
from tinyengine.graphs.arena import Event

aten = torch.ops.aten
# One kernel each, though PyTorch can also take them apart.
WHOLE = {aten.rms_norm.default, aten.scaled_dot_product_attention.default}
ALLOCATES_ONLY = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default}
READS_A_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# `lift_fresh` is torch.tensor(list), a copy from the host.
ALSO_REFUSED = {aten.equal.default, aten.lift_fresh.default, aten._linalg_check_errors.default}
HOST_READS = {  # ways to the host that the dispatcher never sees
    Tensor.tolist: "tolist",
    Tensor.numpy: "numpy",
    Tensor.cpu: "cpu",
    Tensor.__repr__: "__repr__",
    Tensor.__dlpack__: "__dlpack__",
}
# What CUDA could capture and a recording by address cannot: a tensor that changes its memory, or reads it negated.
NOT_RECORDED = {"aten::set_", "aten::resize_", "aten::resize_as_", "aten::_conj", "aten::_neg_view"}


class Kernel(NamedTuple):
    """One launch: the operator, what it was given, and the tensors that it made (none if it writes in place).

    Every fork and every join begins a section. Kernels of one section on different streams may run in any order.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Tensor, ...]
    stream: int
    section: int


class Live(NamedTuple):
    """An output that somebody may still hold: its storage, the id of its allocation, and the stream that made it."""

    ref: StorageWeakRef
    allocation: int
    stream: int


class Home(Protocol):
    """Where the outputs of a recording live. `live` outlasts a recording, as an output may."""

    live: dict[int, Live]  # by storage

    def allocate(self, nbytes: int, stream: int) -> int:
        """Take room for an output; the id of the allocation."""

    def tensor(self, allocation: int, like: Tensor) -> Tensor:
        """A tensor of the shape, strides and dtype of `like` in that room."""

    def free(self, allocation: int) -> None:
        """Nobody holds the output any more."""


class MetaHome:
    """Nowhere: shapes alone."""

    def __init__(self) -> None:
        self.live: dict[int, Live] = {}
        self._count = 0

    def allocate(self, nbytes: int, stream: int) -> int:
        """The next id."""
        self._count += 1
        return self._count

    def tensor(self, allocation: int, like: Tensor) -> Tensor:
        """The shape itself, which is a meta tensor."""
        return like

    def free(self, allocation: int) -> None:
        """Nothing to do."""


def sweep(home: Home) -> list[int]:
    """Free what nobody holds any more; the ids of those allocations."""
    dead = [storage for storage, output in home.live.items() if output.ref.expired()]
    freed = [home.live.pop(storage).allocation for storage in dead]
    for allocation in freed:
        home.free(allocation)
    return freed


@contextlib.contextmanager
def recording(home: Home, on_kernel: Callable[[Kernel], None], stream: int = 0) -> Iterator[Recorder]:
    """Within it everything is recorded on `stream`, and nothing computed. CaptureError where a capture would fail.

    It runs under `inference_mode`, where composite operators are seen whole and are taken apart by the recorder:
    otherwise a copying `reshape` passes as a view.
    """
    recorder = Recorder(home, on_kernel, stream)
    recorder.sweep()
    try:
        with torch.inference_mode(), RefuseHostReads(), recorder:
            yield recorder
        recorder.check_joined()
    finally:
        recorder.sweep()


class Recorder(TorchDispatchMode):
    """Sees every operator in place of its kernel. Entered by `recording`."""

    def __init__(self, home: Home, on_kernel: Callable[[Kernel], None], stream: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self._home = home
        self._on_kernel = on_kernel
        self._stream = self._base = stream
        self._section = 0
        self._cases: dict[Hashable, Any] = {}
        self._branches: list[int] = []  # streams that were forked and not joined yet

    def sweep(self) -> None:
        """Free what nobody holds any more. The recorder itself holds no tensor."""
        self.events += [Event(allocation, 0) for allocation in sweep(self._home)]

    def fork(self, n: int) -> list[contextlib.AbstractContextManager[None]]:
        """n branches to be entered: what is done within one runs beside the others, on a stream of its own."""
        if self._branches:
            raise CaptureError(_message("a fork within a fork", "join the first one before"))
        self._branches = [branch_stream(i) for i in range(n)]
        self._section += 1
        return [self._branch(stream) for stream in self._branches]

    def join(self) -> None:
        """What follows waits for all branches."""
        if not self._branches:
            raise CaptureError(_message("a join with nothing forked", "call fork before"))
        self._branches = []
        self._section += 1

    def check_joined(self) -> None:
        """CUDA ends no capture whose streams have not come together again."""
        if self._branches:
            raise CaptureError("the capture ends with forked streams that were never joined: call join() within it")

    @contextlib.contextmanager
    def _branch(self, stream: int) -> Iterator[None]:
        self._stream = stream
        try:
            yield
        finally:
            self._stream = self._base

    def _check_order(self, args: Any) -> None:
        """Between fork and join a branch may use its own outputs and what was there before; the rest is a race."""
        if not self._branches:
            return
        if self._stream == self._base:
            raise CaptureError(_message("work beside the branches of a fork", "do it in a branch, or after the join"))
        for storage in _storages(args):
            made = self._home.live.get(storage)
            if made is not None and made.stream in self._branches and made.stream != self._stream:
                raise CaptureError(_message("a branch that reads another one's output", "join them first"))

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.sweep()
        traits = _traits(op)
        if traits.is_composite:
            with self:
                return op.decompose(*args, **kwargs)
        refuse(op, args)
        if op._schema.name in NOT_RECORDED:
            raise CaptureError(_message(str(op), "a recording keeps addresses: make a new tensor instead"))
        if traits.is_view:
            return op(*args, **kwargs)  # no kernel
        self._check_order((args, kwargs))
        if traits.writes:
            self._on_kernel(Kernel(op, args, kwargs, (), self._stream, self._section))
            written = [args[at] if at < len(args) else kwargs[name] for at, name in traits.writes]
            returns = len(op._schema.returns)
            return None if not returns else written[0] if returns == 1 else tuple(written)
        shapes = self._shapes(op, args, kwargs)
        if shapes is None:
            return op(*args, **kwargs)  # a view whose schema does not say so, as `_unsafe_view`
        outputs = self._outputs(op, args, shapes)
        if op not in ALLOCATES_ONLY:
            made = tuple(t for t in tree_leaves(outputs) if isinstance(t, Tensor))
            self._on_kernel(Kernel(op, args, kwargs, made, self._stream, self._section))
        return outputs

    def _shapes(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The outputs on meta, or None if they are the inputs' own memory. Layers repeat, so each case runs once."""
        case = (op, _spec(args), _spec(kwargs))
        if case not in self._cases:
            meta_args, meta_kwargs = _on_meta((args, kwargs))
            shapes = op(*meta_args, **meta_kwargs)
            is_view = bool(_storages(shapes) & _storages((meta_args, meta_kwargs)))
            self._cases[case] = None if is_view else shapes
        return tree_map_only(Tensor, _meta_like, self._cases[case])

    def _outputs(self, op: Any, args: tuple[Any, ...], shapes: Any) -> Any:
        """The outputs of a kernel, each with somewhere to live; what else it allocates comes and goes."""
        placed: dict[int, Tensor] = {}
        scratch: dict[int, int] = {}
        steps = allocations(op, args, [t for t in tree_leaves(shapes) if isinstance(t, Tensor)])
        for number, step in enumerate(steps):
            if isinstance(step, Tensor):
                placed[id(step)] = self._place(step)
            elif isinstance(step, Free):
                self._free(scratch.pop(step.step))
            else:
                scratch[number] = self._allocate(step)
        for allocation in scratch.values():
            self._free(allocation)
        return tree_map_only(Tensor, lambda like: placed[id(like)], shapes)

    def _place(self, like: Tensor) -> Tensor:
        """An output, somewhere to live."""
        nbytes = like.untyped_storage().nbytes()
        if not nbytes:
            return self._home.tensor(0, like)
        allocation = self._allocate(nbytes)
        tensor = self._home.tensor(allocation, like)
        ref = StorageWeakRef(tensor.untyped_storage())
        self._home.live[ref.cdata] = Live(ref, allocation, self._stream)
        return tensor

    def _allocate(self, nbytes: int) -> int:
        allocation = self._home.allocate(nbytes, self._stream)
        self.events.append(Event(allocation, nbytes, self._stream))
        return allocation

    def _free(self, allocation: int) -> None:
        self._home.free(allocation)
        self.events.append(Event(allocation, 0))


def trace(fn: Callable[[], object]) -> list[Event]:
    """The allocator's events while `fn` is captured; fn works on meta tensors. What it returns is freed last."""
    with recording(MetaHome(), lambda kernel: None) as recorder:
        fn()
    return recorder.events


def _meta_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _on_meta(given: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments as shapes alone: the operator then computes its output's shape and nothing else."""
    args, kwargs = tree_map_only(Tensor, _meta_like, given)
    return args, {**kwargs, "device": "meta"} if "device" in kwargs else kwargs


def _spec(value: Any) -> Hashable:
    """What an operator's output shapes depend on: the shapes of tensors, and every other argument as it is."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_spec, value))
    if isinstance(value, dict):
        return tuple((name, _spec(item)) for name, item in value.items())
    return type(value), value  # 1, 1.0 and True are equal, but make different dtypes


def _storages(values: Any) -> set[int]:
    """Which storages the tensors among these have."""
    return {t.untyped_storage()._cdata for t in tree_leaves(values) if isinstance(t, Tensor)}


class _Traits(NamedTuple):
    """What an operator's schema says of it."""

    is_composite: bool  # made of other operators
    is_view: bool
    writes: tuple[tuple[int, str], ...]  # position and name of the arguments that it writes in place, `out` among them


@functools.cache
def _traits(op: Any) -> _Traits:
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
    returns = op._schema.returns
    return _Traits(
        is_composite=composite and op not in WHOLE,
        is_view=torch.Tag.inplace_view in op.tags
        or (bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)),
        writes=tuple(
            (position, argument.name)
            for position, argument in enumerate(op._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ),
    )


def branch_stream(i: int) -> int:
    """The number of the stream of the i-th branch of a fork; a capture's own streams count from 0 up."""
    return -1 - i


def refuse(op: Any, args: tuple[Any, ...]) -> None:
    """CaptureError for an operator that reads a value back. `index` does so only for a mask, though always tagged."""
    if op is aten.index.Tensor:
        refused = any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
    else:
        refused = op in ALSO_REFUSED or bool(READS_A_VALUE & set(op.tags))
    if refused:
        raise CaptureError(_message(str(op), WHY))


class RefuseHostReads(TorchFunctionMode):
    """Catches the ways to the host that are no operators."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in HOST_READS:
            raise CaptureError(_message(f"Tensor.{HOST_READS[func]}", WHY))
        return func(*args, **(kwargs or {}))


WHY = "a capture computes no value that the host could read: keep it in a tensor, or do this before the capture"


def _message(what: str, why: str) -> str:
    """What was refused, the user's line that asked for it, and why or what to do."""
    return f"{what} cannot be captured ({user_line(traceback.extract_stack())}): {why}"


def user_line(frames: traceback.StackSummary) -> str:
    """The innermost line of a stack that is neither PyTorch's nor of this folder."""
    outside = (str(Path(torch.__file__).parent), str(Path(__file__).parent), contextlib.__file__)
    users = [frame for frame in frames if not frame.filename.startswith(outside)]
    return f"{users[-1].filename}:{users[-1].lineno}: {users[-1].line}" if users else "an unknown line"
