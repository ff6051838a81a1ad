"""Device memory of another process: one handle for each allocation, through CUDA's driver library.

torch's own sharing makes a handle, an event and a reference count for every tensor; a model has hundreds of them in a
few dozen allocations, and what keeps the memory alive here is the transfer's own protocol.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch

from powertrain.errors import TransferError

_HANDLE_BYTES: Final = 64
_LAZY_PEER_ACCESS: Final = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


@cache
def _driver() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    address, size, pointer = ctypes.c_uint64, ctypes.c_size_t, ctypes.POINTER
    library.cuMemGetAddressRange_v2.argtypes = [pointer(address), pointer(size), address]
    library.cuIpcGetMemHandle.argtypes = [pointer(_Handle), address]
    library.cuIpcOpenMemHandle_v2.argtypes = [pointer(address), _Handle, ctypes.c_uint]
    library.cuIpcCloseMemHandle.argtypes = [address]
    library.cuGetErrorName.argtypes = [ctypes.c_int, pointer(ctypes.c_char_p)]
    return library


def _check(name: str, code: int, hint: str = "") -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(text))
        message = f"{name} answered {(text.value or b'?').decode()} ({code}){hint}"
        raise TransferError(message, phase="gather")


def allocation(address: int) -> tuple[int, int]:
    """Return the first address and the bytes of the allocation that a device address lies in."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _check("cuMemGetAddressRange", _driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address))
    return base.value, size.value


def export_handle(base: int) -> bytes:
    """Return the handle of an allocation that begins at `base`, for `Mapped` in another process."""
    handle = _Handle()
    hint = (
        "; memory of expandable segments cannot be shared: take expandable_segments:True out of "
        "PYTORCH_CUDA_ALLOC_CONF in the trainer's environment, or use the transfer shm"
    )
    _check("cuIpcGetMemHandle", _driver().cuIpcGetMemHandle(ctypes.byref(handle), base), hint)
    return bytes(handle.reserved)


class Mapped:
    """An allocation of another process, mapped into this one until `close`. device: index of this process's card.

    The exporting process must keep the allocation until the mapping is closed.
    """

    def __init__(self, handle: bytes, size: int, device: int) -> None:
        assert len(handle) == _HANDLE_BYTES
        self.size, self.device = size, device
        self._address: int | None = None
        found = ctypes.c_uint64()
        given = _Handle((ctypes.c_ubyte * _HANDLE_BYTES).from_buffer_copy(handle))
        hint = "; both engines must be on one card of one host, in containers that share its IPC namespace"
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes torch's context this thread's
            opened = _driver().cuIpcOpenMemHandle_v2(ctypes.byref(found), given, _LAZY_PEER_ACCESS)
        _check("cuIpcOpenMemHandle", opened, hint)
        self._address = found.value

    def view(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `count` elements that begin `offset` bytes into the allocation, as a flat tensor that owns nothing."""
        size = count * dtype.itemsize
        assert self._address is not None
        assert offset + size <= self.size, (offset, size, self.size)
        if not size:
            return torch.empty(0, dtype=dtype, device=f"cuda:{self.device}")
        raw = torch.as_tensor(_Raw(self._address + offset, size), device=f"cuda:{self.device}")
        return raw.view(dtype)

    def close(self) -> None:
        """Unmap, once what reads it has finished; tensors made by `view` are void from then on. May be called twice."""
        if self._address is not None:
            with torch.cuda.device(self.device):
                torch.cuda.synchronize()
                closed: Callable[[int], int] = _driver().cuIpcCloseMemHandle
                address, self._address = self._address, None
                _check("cuIpcCloseMemHandle", closed(address))


class _Raw:
    """Device bytes by their address, in the form in which array libraries take one another's memory."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }
