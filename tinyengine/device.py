"""Where to run, and how much room there is."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from tinyengine.errors import ConfigError


def pick_device(name: str) -> torch.device:
    """The device called `name`; `auto` is CUDA where there is one, else the CPU. ConfigError if it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if device.type not in present:
        raise ConfigError(f"there is no device {name!r}: choose auto, cpu, cuda or mps")
    if not present[device.type] or (device.index or 0) >= max(1, torch.cuda.device_count()):
        raise ConfigError(f"PyTorch sees no device {name!r} on this machine: choose cpu or auto")
    return device


def free_bytes(device: torch.device) -> int:
    """Memory that can still be taken on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What PyTorch's allocator holds but nobody uses is free to us as well.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return _free_host_bytes()


def _free_host_bytes() -> int:
    """What Linux calls MemAvailable, else all physical memory."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if hasattr(os, "sysconf"):  # macOS
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 16 << 30  # Windows tells only through another library


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on a device. The copy is queued behind what the device has to do, and nobody waits for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
