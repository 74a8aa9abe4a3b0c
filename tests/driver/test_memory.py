"""The pools' bookkeeping over the fake driver, with virtual memory and with plain allocations."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from cuda.bindings import driver as real
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zhilight.driver.dtype import bfloat16, float32, int4, uint8
from zhilight.driver.memory import GROWTH, MIB, MemoryPool, PinnedPool, human
from zhilight.driver.region import MemoryFault
from zhilight.errors import OutOfMemory

BUDGET = 512 * MIB
reuse_the_fake = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)


@pytest.fixture(params=[True, False], ids=["virtual", "plain"])
def virtual(request):
    return request.param


@pytest.fixture
def pool(fake, fake_device, virtual):
    with MemoryPool(fake_device, BUDGET, virtual=virtual) as pool:
        yield pool
    nothing_left(fake)


def nothing_left(fake) -> None:
    assert not fake.physical and not fake.mapped and not fake.reserved and not fake.plain


def spans(tensors) -> list[tuple[int, int]]:
    return sorted((t.address, t.address + t.nbytes) for t in tensors)


def test_what_is_handed_out_is_mapped_aligned_and_writable(pool, fake_stream, virtual):
    assert pool.virtual is virtual
    for region in ("weights", "kv", "comm", "workspace"):
        tensor = pool.allocate(region, (3, 1000), float32, alignment=1024)
        assert tensor.address % 1024 == 0
        values = np.random.default_rng(1).random((3, 1000), np.float32)
        tensor.copy_from_host(values, fake_stream)
        np.testing.assert_array_equal(tensor.to_host(fake_stream), values)


sizes = st.sampled_from([0, 1, 255, 256, 257, MIB - 1, 2 * MIB, 3 * MIB + 1, GROWTH - 1, GROWTH + 1])


@reuse_the_fake
@given(steps=st.lists(st.tuples(st.sampled_from(["weights", "kv", "comm"]), sizes, st.sampled_from([256, 1024]),
                                st.integers(0, 9)), max_size=20))
def test_live_allocations_never_overlap(fake, fake_device, virtual, steps):
    """Takes and releases in any order; at the end, releasing all brings every region back to nothing."""
    with MemoryPool(fake_device, BUDGET, virtual=virtual) as pool:
        live = []
        for region, size, alignment, victim in steps:
            try:
                live.append(pool.allocate(region, (size,), uint8, alignment))
            except OutOfMemory:
                assert pool.free_bytes < size + alignment + 2 * MIB
            else:
                assert live[-1].address % alignment == 0
            if victim < len(live):
                pool.release(live.pop(victim))
            order = [span for span in spans(live) if span[0] != span[1]]
            assert all(before[1] <= after[0] for before, after in pairwise(order))
            figures = pool.statistics()
            assert sum(each.mapped for each in figures.values()) == BUDGET - pool.free_bytes <= BUDGET
            assert fake.used() == BUDGET - pool.free_bytes
            assert sum(each.allocations for each in figures.values()) == len(live)
            assert all(each.used <= each.peak and each.used <= each.mapped for each in figures.values())
        for tensor in live:
            pool.release(tensor)
        assert all(each.used == 0 for each in pool.statistics().values())
        pool.trim()
        assert pool.free_bytes == BUDGET and fake.used() == 0


@reuse_the_fake
@given(tree=st.recursive(sizes, lambda inner: st.lists(inner, max_size=4), max_leaves=10), noise=st.lists(sizes, max_size=4))
def test_equal_request_sequences_get_equal_workspace(fake, fake_device, virtual, tree, noise):
    """A nested list is a scope, a number a request. Other steps in between change nothing."""
    with MemoryPool(fake_device, BUDGET, virtual=virtual) as pool:

        def run(node) -> list[int]:
            if isinstance(node, int):
                return [pool.workspace((node,), uint8).address]
            with pool.scope():
                return [address for child in node for address in run(child)]

        first = run([tree])
        run(noise)
        assert run([tree]) == first
        assert pool.statistics()["workspace"].used == 0


def test_nested_scopes_reuse_and_keep(pool):
    with pool.scope():
        outer = pool.workspace((100,), bfloat16)
        with pool.scope():
            inner = pool.workspace((100,), bfloat16)
        again = pool.workspace((100,), bfloat16)
        assert inner.address == again.address != outer.address
        with pytest.raises(ZeroDivisionError), pool.scope():
            pool.workspace((1000,), bfloat16)
            _ = 1 / 0
        assert pool.workspace((8,), bfloat16).address == again.address + 256
    assert pool.statistics()["workspace"].used == 0 < pool.statistics()["workspace"].peak


def test_kept_workspace_is_mapped_again_after_a_trim(pool):
    def ask():
        with pool.scope():
            pool.workspace((5,), uint8)
            return pool.workspace((MIB,), uint8)

    kept = ask()
    assert ask() is kept and pool.statistics()["workspace"].peak == MIB + 256
    pool.trim()
    assert pool.statistics()["workspace"].mapped == 0
    ask()
    assert pool.statistics()["workspace"].mapped >= MIB + 256


def test_regions_grow_without_moving(fake, fake_device):
    with MemoryPool(fake_device, BUDGET) as pool:
        first = pool.allocate("kv", (GROWTH,), uint8)
        pool.allocate("weights", (GROWTH,), uint8)
        second = pool.allocate("kv", (GROWTH,), uint8)
        assert second.address == first.address + GROWTH  # contiguous though weights grew in between


def test_reserve_maps_ahead(pool, fake):
    pool.reserve("workspace", 100 * MIB)
    fake.calls.clear()
    with pool.scope():
        pool.workspace((60 * MIB,), uint8)
        pool.workspace((30 * MIB,), uint8)
    assert fake.calls == []


def test_trim_gives_memory_to_other_regions(fake, fake_device, virtual):
    with MemoryPool(fake_device, BUDGET, virtual=virtual) as pool:
        big = pool.allocate("weights", (BUDGET - 4 * MIB,), uint8)
        pool.release(big)
        with pytest.raises(OutOfMemory):
            pool.allocate("kv", (BUDGET // 2,), uint8)
        pool.trim()
        pool.allocate("kv", (BUDGET // 2,), uint8)


# ---- exhaustion -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("region", "setting"), [
    ("weights", "gpu_memory_utilization"), ("kv", "num_kv_blocks"), ("workspace", "max_num_batched_tokens")])
def test_exhaustion_says_need_have_and_the_setting(pool, region, setting):
    pool.allocate("weights", (400 * MIB,), uint8)
    with pytest.raises(OutOfMemory) as caught:
        pool.allocate(region, (200 * MIB,), uint8)
    message = str(caught.value)
    assert region in message and "200.0 MiB" in message and "512.0 MiB" in message and "weights 4" in message
    assert "112.0 MiB left" in message and setting in message
    pool.allocate(region, (100 * MIB,), uint8)  # the failure took nothing


def test_a_region_can_have_its_own_limit(fake, fake_device, virtual):
    with MemoryPool(fake_device, BUDGET, limits={"workspace": 8 * MIB}, virtual=virtual) as pool:
        with pytest.raises(OutOfMemory, match=r"left of its limit of 8\.0 MiB"), pool.scope():
            pool.workspace((9 * MIB,), uint8)
        assert pool.statistics()["workspace"].capacity == 8 * MIB
    with pytest.raises(MemoryFault, match="no region scratch"):
        MemoryPool(fake_device, BUDGET, limits={"scratch": 1}, virtual=virtual)


def test_another_process_took_the_memory(fake, fake_device, virtual):
    fake.total_bytes = 100 * MIB
    with MemoryPool(fake_device, BUDGET, virtual=virtual) as pool:
        pool.allocate("weights", (70 * MIB,), uint8)
        pool.allocate("kv", (20 * MIB,), uint8)  # the usual growth is not to be had, the need is
        with pytest.raises(OutOfMemory, match=r"only 10\.0 MiB of 100\.0 MiB free.*Another process"):
            pool.allocate("kv", (60 * MIB,), uint8)
    nothing_left(fake)


def test_budget_for_counts_what_others_use(fake, fake_device):
    fake.total_bytes = 1000 * MIB
    fake.physical[99] = 300 * MIB
    assert MemoryPool.budget_for(fake_device, 0.9) == 600 * MIB
    with pytest.raises(OutOfMemory, match=r"gpu_memory_utilization is 0\.3.*300\.0 MiB are in use"):
        MemoryPool.budget_for(fake_device, 0.3)


# ---- the fallback -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_refused_virtual_memory_falls_back_and_says_so(fake, fake_device, caplog, call):
    fake.refuse[call] = real.CUresult.CUDA_ERROR_NOT_SUPPORTED
    with MemoryPool(fake_device, BUDGET) as pool:
        assert not pool.virtual and call in caplog.text
        assert not fake.reserved and not fake.physical  # the probe left nothing
        pool.allocate("weights", (10,), uint8)
    nothing_left(fake)


def test_a_failure_in_the_middle_of_mapping_leaks_nothing(fake, fake_device):
    with MemoryPool(fake_device, BUDGET) as pool:
        for call in ("cuMemMap", "cuMemSetAccess"):
            fake.refuse[call] = real.CUresult.CUDA_ERROR_UNKNOWN
            with pytest.raises(RuntimeError, match=call):
                pool.allocate("weights", (10,), uint8)
            assert not fake.physical and not fake.mapped
            fake.refuse.clear()
        pool.allocate("weights", (10,), uint8)
    nothing_left(fake)


# ---- misuse -----------------------------------------------------------------------------------------------------


def test_double_free_is_always_noticed(pool):
    first, second = (pool.allocate("weights", (10, 4), float32) for _ in range(2))
    pool.release(first[2:])  # any view names its allocation
    with pytest.raises(MemoryFault, match=r"double free: \[10, 4\] float32"):
        pool.release(first)
    pool.release(second)
    with pytest.raises(MemoryFault, match="double free"):
        pool.release(second)


def test_release_refuses_workspace_and_foreign_tensors(pool, fake_device):
    with pool.scope(), pytest.raises(MemoryFault, match="given back by its scope"):
        pool.release(pool.workspace((4,), uint8))
    with MemoryPool(fake_device, BUDGET, virtual=False) as other, pytest.raises(MemoryFault, match="another pool"):
        pool.release(other.allocate("weights", (4,), uint8))
    with pytest.raises(MemoryFault, match="no region 'scratch'"):
        pool.allocate("scratch", (4,), uint8)


def test_debug_mode_notices_use_after_release(fake, fake_device, fake_stream, virtual):
    with MemoryPool(fake_device, BUDGET, debug=True, stream=fake_stream, virtual=virtual) as pool:
        kept = pool.allocate("weights", (4,), float32)
        assert np.isnan(kept.to_host(fake_stream)).all()  # poisoned when handed out
        kept.fill_zero(fake_stream)
        freed = pool.allocate("weights", (4, 4), float32)
        view, address = freed[1:].reshape(-1), freed.address
        freed.fill_zero(fake_stream)
        pool.release(freed)
        for dead in (freed, view):
            with pytest.raises(MemoryFault, match=r"use after release: \[4, 4\] float32 at 0x.*region weights"):
                dead.fill_zero(fake_stream)
        heir = pool.allocate("weights", (4, 4), float32)
        assert heir.address == address and np.isnan(heir.to_host(fake_stream)).all()
        with pytest.raises(MemoryFault, match="use after release"):
            _ = freed.address  # though the same bytes are alive again, for another owner
        with pool.scope():
            outer = pool.workspace((4,), float32)
            with pool.scope():
                inner = pool.workspace((4,), float32)
            with pytest.raises(MemoryFault, match="region workspace"):
                _ = inner.address
            assert outer.address
        with pytest.raises(MemoryFault):
            outer.to_host(fake_stream)
        assert (kept.to_host(fake_stream) == 0).all()
    with pytest.raises(MemoryFault):
        _ = kept.address
    with pytest.raises(MemoryFault, match="closed"):
        pool.allocate("weights", (4,), uint8)
    nothing_left(fake)


def test_scopes_that_end_out_of_order_are_noticed(pool):
    outer, inner = pool.scope(), pool.scope()
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(MemoryFault, match="inner one was open"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)
    with pytest.raises(MemoryFault, match="or twice"):
        outer.__exit__(None, None, None)


def test_packed_types_are_counted_in_bytes(pool):
    first, second = (pool.allocate("weights", (3, 1024), int4) for _ in range(2))
    assert first.nbytes == 1536 and second.address - first.address == 1536


# ---- pinned memory ----------------------------------------------------------------------------------------------


def test_pinned_pool(fake, fake_device, fake_stream):
    pinned = PinnedPool(fake_device, 200 * MIB)
    arrays = [pinned.allocate((3, 5), bfloat16), pinned.allocate((7,), np.int64), pinned.allocate((0, 4), float32)]
    assert [a.shape for a in arrays] == [(3, 5), (7,), (0, 4)] and arrays[0].dtype == bfloat16.numpy
    for array in arrays:
        assert array.flags.writeable and array.ctypes.data % 256 == 0
    arrays[1][:] = range(7)
    assert pinned.statistics().allocations == 3
    pinned.release(arrays[0])
    with pytest.raises(MemoryFault, match="double free"):
        pinned.release(arrays[0])
    with pytest.raises(MemoryFault, match="foreign"):
        pinned.release(np.zeros(4))
    assert arrays[1].tolist() == list(range(7))
    with pytest.raises(OutOfMemory, match="max_num_batched_tokens"):
        pinned.allocate((201 * MIB,), np.uint8)
    fake.refuse["cuMemHostAlloc"] = real.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(OutOfMemory, match=r"system refused 70\.0 MiB.*ulimit -l"):
        pinned.allocate((70 * MIB,), np.uint8)
    pinned.release(arrays[1])
    pinned.release(arrays[2])
    assert pinned.statistics().used == 0
    pinned.close()
    assert not fake.pinned


def test_human():
    assert [human(n) for n in (17, 2048, 3 * MIB // 2, 5 << 30)] == ["17 bytes", "2.0 KiB", "1.5 MiB", "5.0 GiB"]
