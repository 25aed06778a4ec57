"""What partitions do to shared memory and barriers, on top of `engine.Simulation`."""

from __future__ import annotations

from engine import Access, Box, HardwareBarrier, Mbarrier, ProtocolError, Simulation, join


def overlap(one: Box, other: Box) -> bool:
    """Whether two boxes of one allocation share an element."""
    return all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True))


def access(
    sim: Simulation, name: str, box: Box, what: str, *, writes: bool, operation: int | None = None
) -> None:
    """Record an access by the current partition, or by an asynchronous operation it starts now.

    Raises:
        ProtocolError: It races with an earlier one, or lacks a proxy fence.
    """
    me = sim.me
    what = f"{what} by {me.name}"
    past = sim.accesses.setdefault(name, [])
    for other in past:
        if not overlap(other.box, box):
            continue
        known = other.time <= me.clock.get(other.agent, 0)
        if (writes or other.writes) and not known:
            raise ProtocolError(f"race on {name}{list(box)}: {what} is not ordered to {other.what}")
        if operation is not None and other.plain and other.writes:
            fences = next((a.fences for a in sim.agents if a.number == other.agent), [])
            if not any(other.time <= fence <= me.clock[other.agent] for fence in fences):
                raise ProtocolError(f"no proxy fence on {name}: {other.what}, then {what}")
    if writes:  # everything inside is ordered before this write, which stands for it from now on
        inside = [
            all(a <= c and d <= b for (a, b), (c, d) in zip(box, other.box, strict=True))
            for other in past
        ]
        past[:] = [other for other, gone in zip(past, inside, strict=True) if not gone]
    if operation is None:
        past.append(Access(me.number, me.clock[me.number], box, writes, True, what))
    else:
        past.append(Access(operation, 1, box, writes, False, what))


def barrier_sync(sim: Simulation, number: int, needed: int) -> None:
    """`bar.sync number, needed`."""
    me = sim.step()
    barrier = sim.barriers.setdefault(number, HardwareBarrier())
    generation = barrier.generation
    _arrive(sim, barrier, number, needed)
    if barrier.generation == generation:
        sim.step(lambda: barrier.generation > generation, f"barrier {number}")
    join(me.clock, barrier.known[generation])


def barrier_arrive(sim: Simulation, number: int, needed: int) -> None:
    """`bar.arrive number, needed`."""
    sim.step()
    _arrive(sim, sim.barriers.setdefault(number, HardwareBarrier()), number, needed)


def _arrive(sim: Simulation, barrier: HardwareBarrier, number: int, needed: int) -> None:
    me = sim.me
    if barrier.threads and barrier.needed != needed:
        raise ProtocolError(f"barrier {number} is asked for {barrier.needed} and {needed} threads")
    if me.number in barrier.there or barrier.threads + me.threads > needed:
        raise ProtocolError(f"{me.name} arrives too often at barrier {number}")
    barrier.needed = needed
    barrier.there.add(me.number)
    barrier.threads += me.threads
    join(barrier.clock, me.clock)
    if barrier.threads == needed:
        barrier.generation += 1
        barrier.known.append(barrier.clock)
        barrier.clock, barrier.threads, barrier.there = {}, 0, set()


def mbarrier_arrive(sim: Simulation, key: tuple[str, Box], count: int, expected: int = 0) -> None:
    """`mbarrier.arrive`, with `expected` bytes announced to it."""
    me = sim.step()
    barrier = sim.mbarriers[key]
    barrier.arrived += count
    barrier.bytes += expected
    if barrier.arrived > barrier.count:
        raise ProtocolError(f"{me.name} arrives too often at mbarrier {key[0]}")
    join(barrier.clock, me.clock)
    _complete(barrier)


def mbarrier_wait(sim: Simulation, key: tuple[str, Box], parity: int) -> None:
    """`mbarrier.try_wait.parity` until the phase of that parity is over."""
    barrier = sim.mbarriers[key]
    waits_for = f"mbarrier {key[0]}{list(key[1])} parity {parity}"
    me = sim.step(lambda: barrier.completed & 1 != parity, waits_for)
    join(me.clock, barrier.known)


def _complete(barrier: Mbarrier) -> None:
    if barrier.arrived == barrier.count and not barrier.bytes:
        barrier.completed += 1
        join(barrier.known, barrier.clock)
        barrier.clock, barrier.arrived = {}, 0


def copy_in(sim: Simulation, name: str, box: Box, key: tuple[str, Box], size: int) -> None:
    """A load by the copy engine; ends some time later, on an mbarrier."""
    sim.step()
    operation = sim.number()
    access(sim, name, box, "TMA load", writes=True, operation=operation)
    barrier = sim.mbarriers[key]

    def end() -> None:
        if barrier.bytes < size:
            raise ProtocolError(f"mbarrier {key[0]} expects {barrier.bytes} bytes, got {size}")
        barrier.bytes -= size
        join(barrier.clock, {operation: 1})
        _complete(barrier)

    sim.copies.append(end)


def copy_out(sim: Simulation, name: str, box: Box) -> None:
    """A store or a reduction by the copy engine; ends with `stores_wait`."""
    me = sim.step()
    operation = sim.number()
    access(sim, name, box, "TMA store", writes=False, operation=operation)
    me.stores.append(operation)


def stores_wait(sim: Simulation, pending: int) -> None:
    """Wait until at most `pending` stores of this partition are in flight."""
    me = sim.step()
    keep = len(me.stores) - min(pending, len(me.stores))
    for operation in me.stores[:keep]:
        me.clock[operation] = 1
    del me.stores[:keep]


def product(sim: Simulation, operands: list[tuple[str, Box]]) -> None:
    """An asynchronous wgmma that reads its operands until `products_wait`."""
    me = sim.step()
    operation = sim.number()
    for name, box in operands:
        access(sim, name, box, "wgmma", writes=False, operation=operation)
    me.products.append([operation])


def products_wait(sim: Simulation, pending: int) -> None:
    """Wait until at most `pending` products of this partition are in flight."""
    me = sim.step()
    keep = len(me.products) - min(pending, len(me.products))
    for group in me.products[:keep]:
        for operation in group:
            me.clock[operation] = 1
    del me.products[:keep]


def proxy_fence(sim: Simulation) -> None:
    """`fence.proxy.async`: this partition's plain writes so far, for the asynchronous proxy."""
    me = sim.step()
    me.fences.append(me.clock[me.number])
