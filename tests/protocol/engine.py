"""Partitions of one block that share memory: every interleaving legal, every race an error.

Partitions run as threads that take turns at random (seeded), one operation at a time; loads and
stores of the copy engine and products of the tensor cores are agents of their own, which end when
a barrier or a wait says so. Vector clocks (Lamport's happens-before) decide whether two accesses of
overlapping shared memory are ordered: if they are not and one of them writes, that is a race,
whether or not this interleaving got it wrong. Three more rules are kept: what plain stores wrote
and the asynchronous proxy reads needs `fence.proxy.async` by the writer in between; nobody may
arrive too often at a barrier; and at the end every barrier is at rest.

A partition counts as one thread: races between its own warps are not seen.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

Clock = dict[int, int]
Box = tuple[tuple[int, int], ...]


class ProtocolError(Exception):
    """A race, a deadlock, or a barrier that is used wrongly."""


class _Stop(BaseException):
    """Ends a thread whose simulation is over."""


def join(clock: Clock, other: Clock) -> None:
    """Make `clock` know what `other` knows."""
    for agent, time in other.items():
        clock[agent] = max(clock.get(agent, 0), time)


@dataclass
class Agent:
    """A partition: its clock, what it has in flight, and what it waits for."""

    number: int
    name: str
    threads: int
    clock: Clock = field(default_factory=dict)
    fences: list[int] = field(default_factory=list)
    products: list[list[int]] = field(default_factory=list)
    stores: list[int] = field(default_factory=list)
    ready: Callable[[], bool] = lambda: True
    waits_for: str = ""
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    done: bool = False


@dataclass
class Access:
    """One access of shared memory by an agent or by an asynchronous operation."""

    agent: int
    time: int
    box: Box
    writes: bool
    plain: bool
    what: str


@dataclass
class Mbarrier:
    """Arrivals and bytes that its current phase still needs."""

    count: int
    arrived: int = 0
    bytes: int = 0
    completed: int = 0
    clock: Clock = field(default_factory=dict)
    known: Clock = field(default_factory=dict)


@dataclass
class HardwareBarrier:
    """One of the block's numbered barriers."""

    threads: int = 0
    needed: int = 0
    generation: int = 0
    there: set[int] = field(default_factory=set)
    clock: Clock = field(default_factory=dict)
    known: list[Clock] = field(default_factory=list)  # by generation


class Simulation:
    """One block. Operations are called from the threads of its partitions."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.agents: list[Agent] = []
        self.accesses: dict[str, list[Access]] = {}
        self.mbarriers: dict[tuple[str, Box], Mbarrier] = {}
        self.barriers: dict[int, HardwareBarrier] = {}
        self.copies: list[Callable[[], None]] = []
        self.numbers = 0
        self.operations = 0
        self._local = threading.local()
        self._main = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._stopped = False
        self._local.agent = self._new_agent("block", 0)

    @property
    def me(self) -> Agent:
        """The partition whose thread this is."""
        return self._local.agent

    def _new_agent(self, name: str, threads: int) -> Agent:
        agent = Agent(self.number(), name, threads)
        agent.clock[agent.number] = 1
        return agent

    def number(self) -> int:
        """A number for a new agent or asynchronous operation."""
        self.numbers += 1
        return self.numbers

    def step(self, ready: Callable[[], bool] = lambda: True, waits_for: str = "") -> Agent:
        """Let others go first; return when it is this partition's turn and `ready` holds."""
        me = self.me
        if me.threads:
            me.ready, me.waits_for = ready, waits_for
            self._main.release()
            me.turn.acquire()
            if self._stopped:
                raise _Stop
        self.operations += 1
        me.clock[me.number] += 1
        return me

    def run(self, partitions: list[tuple[str, int, Callable[[], None]]]) -> None:
        """Run partitions (name, threads, body) to their ends; a deadlock is an error too."""
        threads = []
        for name, count, body in partitions:
            agent = self._new_agent(name, count)
            join(agent.clock, self.me.clock)
            agent.fences = list(self.me.fences)
            self.agents.append(agent)
            thread = threading.Thread(target=self._body, args=(agent, body), daemon=True)
            threads.append(thread)
            thread.start()
            self._main.acquire()
        try:
            self._schedule()
        finally:
            self._stopped = True
            for agent in self.agents:
                agent.turn.release()
            for thread in threads:
                thread.join()
        if self._error:
            raise self._error
        self._at_rest()

    def _body(self, agent: Agent, body: Callable[[], None]) -> None:
        self._local.agent = agent
        try:
            self.step()
            body()
        except _Stop:
            return
        except BaseException as error:
            self._error = self._error or error
        agent.done = True
        self._main.release()

    def _schedule(self) -> None:
        while not self._error:
            able = [agent for agent in self.agents if not agent.done and agent.ready()]
            choices = [*able, *self.copies]
            if not choices:
                break
            choice = self.random.choice(choices)
            if isinstance(choice, Agent):
                choice.turn.release()
                self._main.acquire()
            else:
                self.copies.remove(choice)
                choice()
        stuck = [f"{a.name} waits for {a.waits_for}" for a in self.agents if not a.done]
        if stuck and not self._error:
            raise ProtocolError("deadlock: " + "; ".join(stuck))

    def _at_rest(self) -> None:
        for number, barrier in self.barriers.items():
            if barrier.threads:
                raise ProtocolError(f"barrier {number} is left with {barrier.threads} arrivals")
        for (name, _), barrier in self.mbarriers.items():
            if barrier.arrived or barrier.bytes:
                raise ProtocolError(f"mbarrier {name} is left in the middle of a phase")
        for agent in self.agents:
            if agent.products or agent.stores:
                raise ProtocolError(f"{agent.name} ends with products or stores in flight")
