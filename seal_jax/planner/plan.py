"""The plan of a run on a slice: its programs compiled, its memory added up, its rounds' least time, and what to change.

`make_plan` compiles, for the buckets of an average episode and for the largest that the config declares, the programs
that a round calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh
from ml_collections import ConfigDict

from seal_jax.assembly import check_mesh
from seal_jax.planner import work
from seal_jax.planner.chips import GIB
from seal_jax.planner.measure import Measured, measure
from seal_jax.planner.programs import Abstract, Grid, bytes_per_chip
from seal_jax.planner.shapes import policy_config
from seal_jax.planner.topology import Topology, devices, one_host
from seal_jax.planner.work import Episodes, Round
from seal_jax.policy.config import PolicyConfig
from seal_jax.policy.sharding import make_mesh, vocab_parts

ROLLOUT, UPDATE = "rollouts", "update"
Told = Callable[[str], None]


@dataclass(frozen=True)
class Program:
    """A compiled program. `flops`: by formula, per chip; of `decode`, of one step."""

    name: str
    moment: str
    shapes: str
    measured: Measured
    flops: float
    outside: int  # bytes per chip that live beside it

    @property
    def total(self) -> int:
        """Bytes per chip while it runs, with everything that lives at that time."""
        if self.measured.refused is not None:
            return self.measured.refused + self.outside
        return self.measured.arguments + self.measured.own + self.outside


@dataclass(frozen=True)
class Phase:
    """Least seconds of a round's phase, by what bounds it."""

    name: str
    calls: int
    compute: float
    memory: float
    network: float

    @property
    def seconds(self) -> float:
        return max(self.compute, self.memory, self.network)

    @property
    def bound(self) -> str:
        return {self.compute: "compute", self.memory: "HBM", self.network: "interconnect"}[self.seconds]


@dataclass(frozen=True)
class Plan:
    topology: Topology
    policy: PolicyConfig
    mesh: dict[str, int]
    hosts: int
    episodes: Episodes
    round: Round
    resident: dict[str, int]  # bytes per chip that live all the time
    caches: dict[str, int]  # bytes per chip of the largest session
    programs: list[Program]
    phases: list[Phase]
    at_once: int  # groups that fit at once
    mends: list[str]

    @property
    def hbm(self) -> int:
        return self.topology.chip.hbm_bytes

    def worst(self, moment: str) -> Program:
        return max((p for p in self.programs if p.moment == moment), key=lambda p: p.total)

    @property
    def fits(self) -> bool:
        return all(p.measured.refused is None and p.total <= self.hbm for p in self.programs)


class Planner:
    """One config on one slice; compiles on demand and only once."""

    def __init__(self, config: ConfigDict, topology: Topology, made: list[Any], told: Told):
        self.config, self.topology, self.told, self._devices = config, topology, told, made
        shape = (config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
        self.mesh: Mesh = make_mesh(shape, made)
        hosts = len({d.process_index for d in made})
        check_mesh(config, self.mesh, len(made), hosts)
        self.policy = policy_config(config, vocab_parts(self.mesh))
        host = devices(one_host(topology)) if hosts > 1 else ()
        self.abstract = a = Abstract(config, self.policy, self.mesh, host)
        self.hosts = self.mesh.size // a.playing.size
        self.resident = {
            "parameters": bytes_per_chip(a.params),
            "optimiser": bytes_per_chip(a.state.opt_state),
            # of a policy with adapters, adapters of zeros beside the same base
            "reference": bytes_per_chip(a.trained) if a.kl else 0,
        }
        self._made: dict[str, Program] = {}

    @property
    def chips(self) -> int:
        """Chips of the mesh; a slice may have more."""
        return self.mesh.devices.size

    def _program(
        self, name: str, moment: str, shapes: str, lower: Callable[[], Any], flops: float, taken: float = 1.0
    ) -> Program:
        key = f"{name} {shapes} {taken:g}"
        if key not in self._made:
            outside = self.resident["optimiser"] + self.resident["reference"]
            if name == "apply":  # its arguments are the whole train state
                outside = self.resident["reference"] + bytes_per_chip(self.abstract.base)
            elif moment == ROLLOUT and self.hosts > 1:  # its parameters are the host's copy
                outside += self.resident["parameters"]
            chips = self.abstract.playing.size if moment == ROLLOUT else self.chips
            measured = measure(lower(), taken)
            self._made[key] = Program(name, moment, shapes, measured, flops / chips, outside)
            self.told(f"compiled {name} {shapes}: {measured.seconds:.0f} s of one core")
        return self._made[key]

    # --- one program each ---
    def accumulate(self, grid: Grid, scored: int) -> Program:
        taken = scored / grid.suffix  # chunks of the head without a loss token are skipped
        flops = work.accumulate_flops(self.policy, grid, scored, adapters=bool(self.abstract.base))
        return self._program("accumulate", UPDATE, str(grid), lambda: self.abstract.accumulate(grid), flops, taken)

    def score(self, grid: Grid, scored: int) -> Program:
        taken = scored / grid.suffix
        flops = work.score_flops(self.policy, grid, scored)
        return self._program("score", UPDATE, str(grid), lambda: self.abstract.score(grid), flops, taken)

    def apply(self) -> Program:
        return self._program("apply", UPDATE, "", self.abstract.apply, 0.0)

    def prefill(self, grid: Grid) -> Program:
        shapes = f"{grid.groups} prompts of {grid.prompt:,}"
        flops = work.prefill_flops(self.policy, grid)
        return self._program("prefill", ROLLOUT, shapes, lambda: self.abstract.prefill(grid), flops)

    def extend(self, grid: Grid, chunk: int) -> Program:
        flops = work.extend_flops(self.policy, grid, chunk)
        shapes = f"{grid}, chunk {chunk:,}"
        return self._program("extend", ROLLOUT, shapes, lambda: self.abstract.extend(grid, chunk), flops)

    def decode(self, grid: Grid) -> Program:
        flops = work.decode_step_flops(self.policy, grid, self.abstract.decode_size)
        return self._program("decode", ROLLOUT, str(grid), lambda: self.abstract.decode(grid), flops)

    # --- together ---
    def largest(self, moment: str) -> Iterator[Program]:
        """The programs that need most memory: at the largest buckets that the config declares."""
        buckets, rows = self.config.buckets, self.config.rollouts
        prompt, suffix = buckets.prompt[-1], buckets.suffix[-1]
        if moment == UPDATE:
            grid = Grid(self.config.learner.prompts_per_micro, rows, prompt, suffix)
            yield self.accumulate(grid, suffix)
            yield self.apply()
            return
        grid = Grid(buckets.groups[-1], rows, prompt, suffix)
        yield self.decode(grid)
        yield self.prefill(grid)
        yield self.extend(grid, buckets.chunk[-1])

    def fits(self, moment: str) -> bool:
        hbm = self.topology.chip.hbm_bytes
        return all(p.measured.refused is None and p.total <= hbm for p in self.largest(moment))

    def phases(self, round: Round) -> list[Phase]:
        """The roofline of a round of average episodes."""
        chip = self.topology.chip

        def phase(name: str, calls: int, program: Program, steps: int = 0) -> Phase:
            m = program.measured
            moved = (m.call + m.step * steps) * calls
            flops = program.flops * (steps or 1) * calls
            return Phase(
                name, calls, flops / chip.flops, moved.hbm / chip.hbm_bandwidth, moved.ici / chip.ici_bandwidth
            )

        acts = round.waves * round.messages
        return [
            phase("prefill", round.waves, self.prefill(round.rollout)),
            phase("extend", acts, self.extend(round.rollout, round.chunk)),
            phase("decode", acts, self.decode(round.rollout), round.steps),
            phase("score", round.scores, self.score(round.micro, round.scored)),
            phase("update", round.micros, self.accumulate(round.micro, round.scored)),
            phase("apply", round.applies, self.apply()),
        ]

    def groups_at_once(self) -> int:
        """Groups that sessions of the largest buckets can hold, on all hosts together, by arithmetic from the largest
        group bucket.

        What does not grow with the groups (state, the parameters in the compute dtype) is told from what does.
        """
        grid = Grid(
            self.config.buckets.groups[-1],
            self.config.rollouts,
            self.config.buckets.prompt[-1],
            self.config.buckets.suffix[-1],
        )
        playing = self.abstract.playing
        ways = playing.shape["data"] * playing.shape["fsdp"]
        acting = bytes_per_chip(self.abstract.acting)
        cast = acting / 2 if self.policy.compute_dtype == "bfloat16" and not self.abstract.base else 0
        kv = bytes_per_chip(self.abstract.caches(grid))
        own = max(p.measured.own for p in self.largest(ROLLOUT))
        each = (kv + max(own - cast, 0)) / (grid.groups / ways)
        free = self.topology.chip.hbm_bytes - sum(self.resident.values()) - cast - (acting if self.hosts > 1 else 0)
        return max(0, int(free // each)) * ways * self.hosts


def make_plan(config: ConfigDict, topology: Topology, episodes: Episodes, told: Told = lambda line: None) -> Plan:
    """Compiles, adds up, and searches for a mend where something does not fit. ValueError as a run would raise it."""
    made = devices(topology)
    planner = Planner(config, topology, made, told)
    episodes = work.cut(episodes, config)
    round = work.plan_round(config, episodes, kl=planner.abstract.kl, hosts=planner.hosts)
    phases = planner.phases(round)
    failing = [moment for moment in (UPDATE, ROLLOUT) if not planner.fits(moment)]
    mends = [mend(planner, moment) for moment in failing]
    buckets = config.buckets
    copied = {"parameters of the host's own": bytes_per_chip(planner.abstract.acting)} if planner.hosts > 1 else {}
    prompt, rows = planner.abstract.caches(
        Grid(buckets.groups[-1], config.rollouts, buckets.prompt[-1], buckets.suffix[-1])
    )
    return Plan(
        topology=topology,
        policy=planner.policy,
        mesh=dict(planner.mesh.shape),
        hosts=planner.hosts,
        episodes=episodes,
        round=round,
        resident=planner.resident,
        caches={**copied, "prompts' KV": bytes_per_chip(prompt), "rows' KV": bytes_per_chip(rows)},
        programs=sorted(planner._made.values(), key=lambda p: (p.moment != ROLLOUT, p.name)),
        phases=phases,
        at_once=planner.groups_at_once() if ROLLOUT not in failing else 0,
        mends=mends,
    )


def mend(planner: Planner, moment: str) -> str:
    """The first change with which `moment` fits, found by compiling it so."""
    tried = []
    for what, config in changes(planner, moment):
        planner.told(f"the {moment} does not fit; trying {what}")
        try:
            changed = Planner(config, planner.topology, planner._devices, planner.told)
        except ValueError:
            continue
        if changed.fits(moment):
            worst = max(changed.largest(moment), key=lambda p: p.total).total
            return f"{what}: the {moment} then fits ({worst / GIB:.1f} GiB a chip, compiled so)"
        tried.append(what)
    whole = sum(planner.resident.values()) * planner.chips
    text = f"none of these is enough for the {moment}: {'; '.join(tried)}. " if tried else ""
    needed = -(-whole // planner.topology.chip.hbm_bytes)
    return text + (
        f"Parameters, optimiser and reference alone are {whole / GIB:.0f} GiB, "
        f"the whole memory of {needed} chips: take a larger slice"
    )


def changes(planner: Planner, moment: str) -> Iterator[tuple[str, ConfigDict]]:
    """What may help, cheapest in speed first; each builds on nothing but the config."""
    config, mesh, playing = planner.config, planner.mesh.shape, planner.abstract.playing.shape
    ways, playing_ways = mesh["data"] * mesh["fsdp"], playing["data"] * playing["fsdp"]

    def changed(**settings: Any) -> tuple[str, ConfigDict]:
        new = ConfigDict(config.to_dict())
        for name, value in settings.items():
            room, key = name.split("__")
            new[room][key] = value
        flags = (f"--config.{name.replace('__', '.')}={_flag(value)}" for name, value in settings.items())
        return " ".join(flags), new

    small: dict[str, Any] = {}
    if moment == UPDATE:
        if config.learner.prompts_per_micro > ways:
            small["learner__prompts_per_micro"] = ways
            yield changed(**small)
        if config.policy.remat == "none":
            small["policy__remat"] = "block"
            yield changed(**small)
        if config.policy.head_chunk > 128:
            small["policy__head_chunk"] = 128
            yield changed(**small)
    else:
        if config.buckets.groups[-1] > playing_ways:
            small["buckets__groups"] = (playing_ways,)
            yield changed(**small)
        if config.buckets.chunk[-1] > 1024:
            small["buckets__chunk"] = tuple(size for size in config.buckets.chunk if size <= 1024)
            yield changed(**small)
    tensor = 2 * mesh["tensor"]
    while planner.chips % tensor == 0 and planner.policy.n_kv_heads % tensor == 0:
        rest = planner.chips // tensor
        per_micro, groups = max(rest, 1), (max(rest, 1),)
        shape = {"mesh__data": 1, "mesh__fsdp": rest, "mesh__tensor": tensor}
        yield changed(**{**small, **shape, "learner__prompts_per_micro": per_micro, "buckets__groups": groups})
        tensor *= 2
    if len(config.buckets.suffix) > 1:
        shorter = tuple(config.buckets.suffix[:-1])
        fewer = min(config.limits.max_new_tokens, shorter[-1] // 2)
        yield changed(**{**small, "buckets__suffix": shorter, "limits__max_new_tokens": fewer})


def _flag(value: Any) -> str:
    return f"'{value}'" if isinstance(value, tuple) else str(value)
