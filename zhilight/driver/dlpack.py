"""DLPack, the exchange of device arrays between libraries, both ways and without a compiled helper.

Layouts and element codes follow dlpack.h of DLPack 1.1 (https://dmlc.github.io/dlpack/latest/c_api.html). A capsule named
"dltensor" (or "dltensor_versioned") holds a managed tensor; who takes it over renames it "used_..." and later calls its
deleter. An exported tensor is kept alive by a reference that the deleter gives back.
"""

from __future__ import annotations

import ctypes
from typing import Any

from zhilight.driver.dtype import (
    DType,
    bfloat16,
    float16,
    float32,
    fp8_e4m3,
    int8,
    int32,
    int64,
    uint8,
    uint32,
    uint64,
)
from zhilight.driver.tensor import Tensor
from zhilight.errors import ShapeError

CUDA = 2
"""kDLCUDA."""
READ_ONLY = 1
"""DLPACK_FLAG_BITMASK_READ_ONLY."""

_INT, _UINT, _FLOAT, _BFLOAT, _FLOAT8_E4M3FN = 0, 1, 2, 4, 10
_CODES: dict[DType, tuple[int, int]] = {
    bfloat16: (_BFLOAT, 16), float16: (_FLOAT, 16), float32: (_FLOAT, 32), fp8_e4m3: (_FLOAT8_E4M3FN, 8),
    int8: (_INT, 8), int32: (_INT, 32), int64: (_INT, 64), uint8: (_UINT, 8), uint32: (_UINT, 32), uint64: (_UINT, 64)}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}

_PLAIN, _USED_PLAIN = b"dltensor", b"used_dltensor"
_VERSIONED, _USED_VERSIONED = b"dltensor_versioned", b"used_dltensor_versioned"


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64))


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


class _ManagedVersioned(ctypes.Structure):
    _fields_ = (("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
                ("deleter", _Deleter), ("flags", ctypes.c_uint64), ("tensor", _DLTensor))


# Prototypes of our own: setting argtypes on ctypes.pythonapi's would change them for the whole process. Capsules go by
# address, because a destructor runs when its capsule's reference count is already 0.
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi))
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi))
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_SetName", ctypes.pythonapi))
_increase = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))
_decrease = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_DecRef", ctypes.pythonapi))


class _Exported:
    """The C structures of one export and the tensor they describe; alive until the deleter runs."""

    def __init__(self, tensor: Tensor, versioned: bool):
        self.tensor = tensor
        ndim = len(tensor.shape)
        self.shape = (ctypes.c_int64 * max(1, ndim))(*tensor.shape)
        self.strides = (ctypes.c_int64 * max(1, ndim))(*tensor.strides)
        self.managed = _ManagedVersioned() if versioned else _Managed()
        if versioned:
            self.managed.major, self.managed.minor = 1, 0
        code, bits = _CODES[tensor.dtype]
        self.managed.tensor = _DLTensor(
            tensor.address, CUDA, tensor.device, ndim, code, bits, 1,
            ctypes.cast(self.shape, ctypes.POINTER(ctypes.c_int64)),
            ctypes.cast(self.strides, ctypes.POINTER(ctypes.c_int64)), 0)
        self.managed.context = id(self)
        self.managed.deleter = _delete_versioned if versioned else _delete_plain


@_Deleter
def _delete_plain(address: int) -> None:
    _decrease(ctypes.cast(_Managed.from_address(address).context, ctypes.py_object).value)


@_Deleter
def _delete_versioned(address: int) -> None:
    _decrease(ctypes.cast(_ManagedVersioned.from_address(address).context, ctypes.py_object).value)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _destroy_capsule(capsule: int) -> None:
    """Nobody took the capsule: give the tensor back here."""
    if _is_valid(capsule, _PLAIN):
        _delete_plain(_get_pointer(capsule, _PLAIN))
    elif _is_valid(capsule, _VERSIONED):
        _delete_versioned(_get_pointer(capsule, _VERSIONED))


def export(tensor: Tensor, versioned: bool) -> Any:
    """A capsule over `tensor`. Raises ShapeError for int4, which other libraries read in their own ways."""
    if tensor.dtype not in _CODES:
        raise ShapeError(f"DLPack export of {tensor.dtype} is ambiguous; export tensor.view(uint8) instead.")
    exported = _Exported(tensor, versioned)
    _increase(exported)
    return _new_capsule(ctypes.addressof(exported.managed), _VERSIONED if versioned else _PLAIN,
                        ctypes.cast(_destroy_capsule, ctypes.c_void_p))


class Adopted:
    """Another library's tensor: gives it back when the last of our views is gone."""

    def __init__(self, managed: _Managed | _ManagedVersioned):
        self.managed = managed

    def __del__(self) -> None:
        if self.managed.deleter:
            self.managed.deleter(ctypes.addressof(self.managed))


def adopt(source: Any, stream_handle: int) -> Tensor:
    """A Tensor over `source`'s memory; see Tensor.from_dlpack."""
    device_type, _ = source.__dlpack_device__()
    if device_type != CUDA:
        raise ShapeError(f"from_dlpack: the array is on DLPack device type {int(device_type)}, not in CUDA device memory "
                         "(2); copy it to the GPU first.")
    stream = stream_handle or 1  # the protocol calls the default stream 1
    try:
        capsule = source.__dlpack__(stream=stream, max_version=(1, 0))
    except TypeError:  # a producer from before version 1.0 knows no max_version
        capsule = source.__dlpack__(stream=stream)
    managed = take(capsule)
    keeper = Adopted(managed)
    if isinstance(managed, _ManagedVersioned) and managed.flags & READ_ONLY:
        raise ShapeError("from_dlpack: the array is read-only, and a Tensor can be written.")
    address, shape, strides, code, device = describe(managed)
    if code not in _DTYPES:
        raise ShapeError(f"from_dlpack: element type (code {code[0]}, {code[1]} bits) is none of "
                         f"{', '.join(map(repr, _CODES))}.")
    return Tensor(address, shape, _DTYPES[code], device, keeper, strides)


def take(capsule: Any) -> _Managed | _ManagedVersioned:
    """Take a capsule's managed tensor over: from now on its deleter is ours to call. Raises ShapeError for a used one."""
    address = id(capsule)
    for name, used, kind in ((_VERSIONED, _USED_VERSIONED, _ManagedVersioned), (_PLAIN, _USED_PLAIN, _Managed)):
        if _is_valid(address, name):
            managed = kind.from_address(_get_pointer(address, name))
            if kind is _ManagedVersioned and managed.major != 1:
                raise ShapeError(f"DLPack version {managed.major}.{managed.minor} is not known; 1.x is.")
            _set_name(address, used)
            return managed
    raise ShapeError(f"not an unused DLPack capsule: {capsule!r}.")


def describe(managed: _Managed | _ManagedVersioned) -> tuple[int, tuple, tuple | None, tuple[int, int], int]:
    """(address, shape, strides or None, (type code, bits), device index) of a managed tensor."""
    tensor = managed.tensor
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    strides = tuple(tensor.strides[axis] for axis in range(tensor.ndim)) if tensor.strides else None
    if tensor.lanes != 1:
        raise ShapeError(f"DLPack vectors of {tensor.lanes} lanes are not supported.")
    return (tensor.data or 0) + tensor.byte_offset, shape, strides, (tensor.code, tensor.bits), tensor.device_id
