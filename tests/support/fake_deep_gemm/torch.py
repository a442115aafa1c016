"""A stand-in for torch: what the benchmark's products of DeepGEMM need of it, on NumPy arrays."""

import types

import numpy as np

bfloat16, int32, float8_e4m3fn = "bfloat16", "int32", "FP8"
cuda = types.SimpleNamespace(synchronize=lambda: None)


class Tensor(np.ndarray):
    dtype_name = None

    def to(self, dtype):
        return _tensor(self, dtype)

    def __array_finalize__(self, source):
        self.dtype_name = getattr(source, "dtype_name", None)


def _tensor(array, dtype):
    result = np.array(array).view(Tensor)
    result.dtype_name = dtype
    return result


def empty(*shape, device, dtype):
    return tensor(np.zeros(shape, np.float32), device=device, dtype=dtype)


def tensor(values, device, dtype):
    assert device == "cuda"
    return _tensor(values, dtype)


def randn(*shape, device, dtype):
    return empty(*shape, device=device, dtype=dtype)


def rand(*shape, device):
    return empty(*shape, device=device, dtype="float32")
