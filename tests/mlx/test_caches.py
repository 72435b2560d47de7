"""Rows into live caches and out of them, without a model."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.mlx

# MLX threads and interpreter exit do not mix, so that what needs MLX itself runs in a process of its own.
PRELUDE = """
import numpy as np
from kvnet.engine.mlx import runtime
runtime.import_mlx_lm()
import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache
from kvnet.engine.mlx.caches import *
from kvnet.engine.mlx.caches import all_finite, as_batch, memory_is_shared
from kvnet.engine.mlx.unfilled import unfilled
from kvnet.engine.mlx.leaving import leave
from kvnet.errors import CompatibilityError
from kvnet.format.fingerprint import LayerLayout
from kvnet.format.tensor import DType, LayerKind

def refused(action):
    try:
        action()
    except CompatibilityError as error:
        return error.message
    raise AssertionError("not refused")
"""


def run(code: str, root: Path) -> str:
    program = f"{PRELUDE}{code}\nleave(0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("dtype", ["FLOAT32", "FLOAT16", "BFLOAT16"])
def test_rows_put_into_a_cache_come_out_again(repository_root: Path, dtype: str, *, in_place: bool) -> None:
    code = f"""
kind = LayerKind(cache="kv", heads=2, k_dim=4, v_dim=3, dtype=DType.{dtype})
generator = np.random.default_rng(0)
keys, values = (
    generator.integers(0, 1 << 14, (2, 300, dim)).astype(np.uint16).view(numpy_dtype(kind))
    if kind.dtype is not DType.FLOAT32 else generator.random((2, 300, dim), np.float32)
    for dim in (4, 3)
)
[builder] = cache_builders(LayerLayout((kind,), bytes(1)), 290, 500, in_place={in_place})
builder.put(256, keys[:, 256:], values[:, 256:])
builder.put(0, keys[:, :256], values[:, :256])
builder.clear_rest()
cache = builder.finish()
assert cache.offset == 290 and cache.keys.shape == (1, 2, 768, 4) and cache.values.shape == (1, 2, 768, 3)
out = rows_of(cache, 0, 290)
assert out[0].tobytes() == keys[:, :290].tobytes() and out[1].tobytes() == values[:, :290].tobytes()
# Rows beyond the token count were left out.
assert not np.asarray(memoryview(cache.keys.view(mx.uint8)))[0, :, 290:].any()
assert layout_of([cache]).kinds == (kind,)
assert "within 290 tokens" in refused(lambda: rows_of(cache, 200, 91))
print(cache.keys.dtype)
"""
    assert run(code, repository_root) == f"mlx.core.{dtype.lower()}"


def test_rows_read_to_their_places_are_those_of_a_put(repository_root: Path) -> None:
    code = """
kind = LayerKind(cache="kv", heads=2, k_dim=4, v_dim=3, dtype=DType.BFLOAT16)
keys, values = (np.arange(2 * 300 * dim, dtype=np.uint16).reshape(2, 300, dim) for dim in (4, 3))
layers = LayerLayout((kind,), bytes(2))
put, read = cache_builders(layers, 290, 300, in_place=True)
put.put(0, keys, values)
for first, n in ((0, 256), (256, 34)):
    places = read.places(first, n)
    tile = [*keys[:, first : first + n], *values[:, first : first + n]]
    for place, rows in zip(places, tile, strict=True):
        memoryview(place).cast("B")[:] = rows.tobytes()
del places, place
assert read.places(256, 35) is None
assert CacheBuilder(kind, 290, 300).places(0, 256) is None
caches = [builder.finish() for builder in (put, read)]
[one, other] = [[rows.tobytes() for rows in rows_of(cache, 0, 290)] for cache in caches]
print(one == other)
"""
    assert run(code, repository_root) == "True"


def test_unfilled_arrays_are_memory_to_write(repository_root: Path) -> None:
    code = """
for dtype in (mx.float32, mx.float16, mx.bfloat16):
    wanted = [((1, 2, 300, 4), dtype), ((3,), mx.float16), ((1,), dtype)]
    arrays = unfilled(wanted)
    assert [(array.shape, array.dtype) for array in arrays] == wanted
    for array in arrays:
        np.asarray(memoryview(array.view(mx.uint8)))[...] = 0
    assert all(mx.all(array == 0).item() for array in arrays)
print(memory_is_shared())
"""
    assert run(code, repository_root) in {"True", "False"}


def test_unfilled_memory_is_not_touched_and_is_there_where_mlx_reads_no_such_file(repository_root: Path) -> None:
    code = """
import resource

def touched_bytes():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = unfilled([((1 << 24,), mx.float32)])
    assert arrays[0].shape == (1 << 24,)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize()

unfilled([((1,), mx.float32)])
print(touched_bytes() < 1 << 22)

def refuse(*_, **__):
    raise RuntimeError("no such file")

mx.load = refuse
print([(array.shape, mx.all(array == 0).item()) for array in unfilled([((3, 2), mx.float16)])])
"""
    assert run(code, repository_root) == "True\n[((3, 2), True)]"


def test_no_thread_of_mlx_holds_the_file_of_unfilled_memory_any_more(repository_root: Path) -> None:
    # One that lets go of it while the process ends aborts it. A thread that has the interpreter keeps it here, so that
    # what is left to others is seen.
    code = """
import gc
import sys
from kvnet.engine.mlx.unfilled import _NothingToRead
sys.setswitchinterval(10)
gc.freeze()
held = 0
for _ in range(1000):
    unfilled([((1, 3, 356, 64), mx.float32)] * 4)
    held += any(type(each) is _NothingToRead for each in gc.get_objects())
print(held)
"""
    assert run(code, repository_root) == "0"


def test_free_buffers_are_given_back_while_another_thread_gets_unfilled_memory(repository_root: Path) -> None:
    # A process that waits for ever says where, and fails.
    code = """
import faulthandler
import threading
from kvnet.engine.mlx.unfilled import clear_cache
faulthandler.dump_traceback_later(120, exit=True)
done = threading.Event()

def get() -> None:
    for _ in range(500):
        unfilled([((1, 3, 356, 64), mx.float32)] * 4)
    done.set()

mx.eval(mx.zeros(4) + 1)
threading.Thread(target=get, daemon=True).start()
cleared = 0
while not done.is_set():
    clear_cache()
    cleared += 1
print(cleared > 0)
"""
    assert run(code, repository_root) == "True"


def test_position_is_set_explicitly_whatever_the_class_does_with_its_state(repository_root: Path) -> None:
    code = """
import mlx_lm.models.cache as module

class Forgetful(KVCache):
    # A class whose state setter does nothing to the counter.
    state = property(lambda self: (self.keys, self.values), lambda self, v: None)

import kvnet.engine.mlx.caches as caches
caches.KVCache = Forgetful
kind = LayerKind(cache="kv", heads=1, k_dim=4, v_dim=4, dtype=DType.FLOAT32)
print(caches.cache_builders(LayerLayout((kind,), bytes(1)), 100, 100, in_place=True)[0].finish().offset)
"""
    assert run(code, repository_root) == "100"


def test_subclasses_and_other_kinds_are_refused_by_name(repository_root: Path) -> None:
    code = """
class Relative(KVCache):
    pass
print(refusal_of([KVCache()]) == "")
print(refused(lambda: layout_of([KVCache(), Relative()])))
print(refused(lambda: layout_of([QuantizedKVCache()])))
print(refusal_of([]))
"""
    lines = run(code, repository_root).splitlines()
    assert lines[0] == "True"
    assert "layer 1 of 2 keeps its state in Relative" in lines[1]
    assert "QuantizedKVCache (quantised K/V)" in lines[2]
    assert "no attention layers" in lines[3]


def test_values_that_are_not_finite_are_found_in_every_dtype(repository_root: Path) -> None:
    code = """
for dtype, infinity in ((DType.FLOAT32, np.float32("inf")), (DType.FLOAT16, np.float16("nan")),
                        (DType.BFLOAT16, np.uint16(0x7F80)), (DType.BFLOAT16, np.uint16(0xFFC1))):
    kind = LayerKind(cache="kv", heads=1, k_dim=4, v_dim=4, dtype=dtype)
    values = np.ones(8, numpy_dtype(kind))
    assert all_finite(kind, values)
    values[5] = infinity
    assert not all_finite(kind, values)
    # The sign bit, and the largest numbers there are.
    bits = int(np.array([infinity]).view(f"u{values.dtype.itemsize}")[0])
    sign = 1 << (8 * values.dtype.itemsize - 1)
    for each, finite in ((bits | sign, False), (bits & ~sign, False), (0, True), (sign, True)):
        values.view(f"u{values.dtype.itemsize}")[5] = each
        assert all_finite(kind, values) is finite
    largest = {DType.FLOAT32: 0x7F7FFFFF, DType.FLOAT16: 0x7BFF, DType.BFLOAT16: 0x7F7F}[dtype]
    values.view(f"u{values.dtype.itemsize}")[5:7] = largest, largest | sign
    assert all_finite(kind, values)
print(memory_is_shared())
"""
    assert run(code, repository_root) in {"True", "False"}
