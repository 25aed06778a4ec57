"""attn_backend: nests, restores, is re-entrant, stays in its thread and task."""

from __future__ import annotations

import asyncio
import threading

import pytest

from hf_attn_backends.dispatch import attn_backend, get_backend


def current():
    backend = get_backend(use_default=False)
    return None if backend is None else backend.name


def test_it_nests_and_restores():
    with attn_backend("eager"):
        with attn_backend("sdpa"):
            assert current() == "sdpa"
        assert current() == "eager"
    assert current() is None


def test_it_restores_on_exceptions():
    with pytest.raises(KeyError), attn_backend("eager"), attn_backend("sdpa"):
        raise KeyError
    assert current() is None


def test_one_instance_can_be_entered_inside_itself():
    context = attn_backend("eager")
    with context:
        with attn_backend("sdpa"), context:
            assert current() == "eager"
            with context:
                assert current() == "eager"
        assert current() == "eager"
    assert current() is None


def test_entering_does_not_ask_whether_it_can_serve():
    with attn_backend("flash_attention_3"):
        assert current() == "flash_attention_3"


def test_it_is_a_decorator():
    @attn_backend("eager")
    def inside():
        return current()

    assert inside() == "eager"
    assert inside() == "eager"
    assert current() is None


def test_threads_do_not_see_each_other():
    seen, entered, looked = {}, threading.Event(), threading.Event()

    def one():
        with attn_backend("eager"):
            entered.set()
            looked.wait(10)
            seen["one"] = current()

    def other():
        entered.wait(10)
        seen["other"] = current()
        with attn_backend("sdpa"):
            seen["other inside"] = current()
        looked.set()

    threads = [threading.Thread(target=target) for target in (one, other)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert seen == {"one": "eager", "other": None, "other inside": "sdpa"}
    assert current() is None


def test_one_instance_in_two_threads():
    context, barrier, seen = attn_backend("eager"), threading.Barrier(2), []

    def use():
        with context:
            barrier.wait(10)
            seen.append(current())
        barrier.wait(10)
        seen.append(current())

    threads = [threading.Thread(target=use) for _ in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert seen == ["eager", "eager", None, None]


def test_tasks_do_not_see_each_other():
    seen = []

    async def use(name, turns):
        with attn_backend(name):
            for _ in range(turns):
                await asyncio.sleep(0)
                seen.append((name, current()))

    async def both():
        await asyncio.gather(use("eager", 3), use("sdpa", 4))

    asyncio.run(both())
    assert len(seen) == 7
    assert all(asked == found for asked, found in seen)
    assert current() is None
