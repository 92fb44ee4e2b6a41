"""What leaves the devices while a rollout generates on them, where `engine.offload_*` is auto: the least that has to. And whether the
rollout sleeps while others compute, where `rollout.sleep_level` is auto: where it has to.

Rollout and training state share a device. What training keeps follows from the memory formula; what vLLM or SGLang takes is a share of
the device, what a native rollout takes its weights, its KV cache and a prefill. With several roles one computes while the others rest
beside it, and offload is what makes room for that as well. Gradients leave first, for they carry nothing between steps, then optimizer
state, then parameters, which are read last while the rollout takes its weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from quintet.models import ModelShape
from quintet.plan.activations import workspace
from quintet.plan.fullest import kinds_of, memories, setup_of
from quintet.plan.rollout import PREFILL_TOKENS, bytes_under_way, rollout_bytes
from quintet.recipe.offload import KINDS, NAMES, most_shares, on_auto, shares_asked
from quintet.recipe.rollout import placement_of
from quintet.recipe.rules import Command
from quintet.recipe.schema import Layout, Recipe

GIB = 1 << 30
SPARE_BYTES = 4 * GIB
SPARE_SHARE = 0.05
"""Of the device: the margin, for what no formula counts: what CUDA and NCCL need in each process, a rollout that sleeps, buckets of
weights under way, fragmentation."""
_MOST_GIB = 1024
"""Largest device that is looked at."""


@dataclass(frozen=True)
class Moment:
    """A phase in which a device is full. movable: bytes of training state that may be away then, by kind; fixed: of all else, and
    share: of the device, besides."""

    name: str
    movable: Mapping[str, int]
    fixed: int = 0
    share: float = 0.0

    def needs(self, total: int) -> int:
        """Return the bytes that it takes of a device of `total` bytes while nothing is away."""
        return sum(self.movable.values()) + self.fixed + math.ceil(self.share * total)


class Offload:
    """The shares that leave, by the size of the device."""

    def __init__(self, recipe: Recipe, shape: ModelShape, command: Command) -> None:
        self.kinds = on_auto(recipe, command)
        """On auto, and able to leave."""
        self._asked, self.most = shares_asked(recipe), most_shares(recipe, command)
        self.moments = list(_moments(recipe, shape, command)) if self.kinds else []
        self._level = placement_of(recipe).sleep_level
        self.training = None if any(self._asked.values()) else _training(recipe, shape, command)

    def shares(self, total: int) -> dict[str, float]:
        """Return the share of each kind that leaves a device of `total` bytes: never more of a larger one."""
        shares = dict(self._asked)
        for moment in self.moments:
            need = moment.needs(total) + spare(total) - total
            need -= sum(int(share * moment.movable[kind]) for kind, share in self._asked.items())
            for kind in self.kinds:
                size = moment.movable[kind]
                share = min(1.0, math.ceil(100 * max(0, need) / size) / 100) if size else 0.0
                shares[kind] = max(shares[kind], share)
                need -= int(share * size)
        for kind in self.kinds:
            # What stays of a tensor that is cut is copied once more when the rest comes back.
            all_of_it = sum(self.moments[0].movable.values())
            again = math.ceil((1 - shares[kind]) * self.moments[0].movable[kind])
            if shares[kind] and all_of_it + again > total - spare(total):
                shares[kind] = 1.0
        return shares

    def level(self, total: int) -> int:
        """Return how deep the rollout sleeps on a device of `total` bytes: see `rollout.sleep_level`."""
        fits = self.training is not None and self.training.needs(total) + spare(total) <= total
        return 0 if fits else self._level

    def lacking(self, total: int, shares: Mapping[str, float]) -> int:
        """Return the bytes by which the fullest moment does not fit a device of `total` bytes with these shares away, or 0."""
        return max(
            0,
            *(
                moment.needs(total)
                + spare(total)
                - total
                - sum(int(shares[kind] * size) for kind, size in moment.movable.items())
                for moment in self.moments
            ),
        )

    def reason(self, total: int) -> str | None:
        """Return what leaves devices of `total` bytes and whether the rollout sleeps, and why, in sentences; None where a recipe says both."""
        said = []
        if self.kinds:
            shares = self.shares(total)
            leaves = [f"{NAMES[kind]} {shares[kind]:.0%}" for kind in self.kinds if shares[kind]]
            needs = ", ".join(f"{one.name} {one.needs(total) / GIB:.1f}" for one in self.moments)
            said.append(
                f"Offload while others need the devices: {', '.join(leaves) or 'nothing'}; needed with nothing away: {needs} GiB."
            )
            if lacking := self.lacking(total, shares):
                asleep = "" if self._level else "rollout.sleep_level=auto, "
                share = "memory_fraction" if self.moments[0].share else "sequences_per_rank"
                said.append(
                    f"By the memory formula {lacking / GIB:.1f} GiB are missing even so: {asleep}a smaller rollout.{share}, or what quintet plan "
                    "--gpu-gib names, needs less."
                )
        if one := self.training:
            word = "sleeps while others compute" if self.level(total) else "stays awake"
            said.append(f"The rollout {word}: {one.name} needs {one.needs(total) / GIB:.1f} GiB.")
        margin = f"Of {total / GIB:.1f} GiB {spare(total) / GIB:.1f} are a margin."
        return " ".join([*said, margin]) if said else None

    def sizes(self) -> str:
        """Return for which devices nothing leaves, and which are too small, in a sentence."""
        sizes = [n * GIB for n in range(1, _MOST_GIB + 1)]
        least = next((n for n in sizes if not self.lacking(n, self.most)), None)
        nothing = next((n for n in sizes if not any(self.shares(n)[kind] for kind in self.kinds)), None)
        at = (
            "all of it leaves"
            if nothing is None
            else f"nothing leaves devices of {nothing // GIB} GiB or more"
        )
        enough = "does not suffice" if least is None else f"suffices on {least // GIB} GiB or more"
        return f"Offload while others need the devices: {at}; by the memory formula all away {enough}. --gpu-gib says what leaves others."


def leaves(recipe: Recipe, shape: ModelShape, device_bytes: int | None) -> tuple[dict[str, float], int]:
    """Return the share of each kind that leaves in training, and how deep the rollout sleeps then: on devices of so many bytes, or where that
    is not known at most."""
    if device_bytes is None:
        return most_shares(recipe, "train"), placement_of(recipe).sleep_level
    offload = Offload(recipe, shape, "train")
    return offload.shares(device_bytes), offload.level(device_bytes)


def spare(total: int) -> int:
    """Return the bytes of a device that nothing is planned into."""
    return SPARE_BYTES + math.ceil(SPARE_SHARE * total)


def with_shares(
    recipe: Recipe, shape: ModelShape, command: Command, total: int | None
) -> tuple[Recipe, str | None]:
    """Return the recipe with a number for each `engine.offload_*` and for `rollout.sleep_level`, and why, where either is on auto. total:
    bytes of the smallest device; None on CPU ranks, where nothing would be gained."""
    shares, level, why = shares_asked(recipe), placement_of(recipe).sleep_level, None
    if total is not None:
        found = Offload(recipe, shape, command)
        shares, level = found.shares(total), found.level(total)
        why = found.reason(total)
    engine = recipe.engine.model_copy(update={f"offload_{kind}": share for kind, share in shares.items()})
    rollout = recipe.rollout.model_copy(update={"sleep_level": level})
    return recipe.model_copy(update={"engine": engine, "rollout": rollout}), why


def _moments(recipe: Recipe, shape: ModelShape, command: Command) -> list[Moment]:
    """Generating comes first. Of each kind the stage counts that has the most."""
    held = memories(recipe, shape, command)
    kinds = {
        role: {kind: max(kinds_of(one)[kind] for one in ranks) for kind in KINDS}
        for role, ranks in held.items()
    }

    def of(roles: list[str]) -> dict[str, int]:
        return {kind: sum(kinds[role][kind] for role in roles) for kind in KINDS}

    native = recipe.rollout.backend == "native"
    fixed, share = (_native(recipe, shape), 0.0) if native else (0, recipe.rollout.memory_fraction)
    found = [Moment("generating", of(list(held)), fixed, share)]
    awake = command == "train" and recipe.rollout.sleep_level == 0
    beside = (fixed, share) if awake else (0, 0.0)
    """What a rollout that never sleeps keeps of the device, whoever computes."""
    if not placement_of(recipe).shares_weights:
        # Beside a rollout without its cache the policy's parameters are read: what else may be away is.
        setup = setup_of(recipe, shape)
        movable = of(list(held))
        movable["params"] -= kinds["policy"]["params"]
        own = beside[0] if awake else rollout_bytes(recipe, setup, None)[0]
        held_too = kinds["policy"]["params"] + own + bytes_under_way(recipe, setup)
        found.append(Moment("bringing weights", movable, held_too, beside[1]))
    for role, ranks in held.items() if len(held) > 1 or awake else ():
        what = "log-probs of the reference policy" if role == "reference" else f"training the {role}"
        others = [one for one in held if one != role]
        found.append(Moment(what, of(others), max(one.peak for one in ranks) + beside[0], beside[1]))
    return found


def _training(recipe: Recipe, shape: ModelShape, command: Command) -> Moment | None:
    """Training at its fullest, of each role beside the others that rest, and a rollout that keeps what it generates with; None where it is not
    to."""
    rollout = recipe.rollout
    if command != "train" or (rollout.backend, rollout.placement, rollout.sleep_level) != (
        "vllm",
        "colocated",
        "auto",
    ):
        return None
    held = memories(recipe, shape, command)
    static = {role: max(one.static for one in ranks) for role, ranks in held.items()}
    rest = sum(static.values())
    peaks = [max(one.peak for one in ranks) + rest - static[role] for role, ranks in held.items()]
    peaks.append(rest + bytes_under_way(recipe, setup_of(recipe, shape)))
    return Moment("training beside it", dict.fromkeys(KINDS, 0), max(peaks), rollout.memory_fraction)


def _native(recipe: Recipe, shape: ModelShape) -> int:
    """Bytes of a native rollout: its own weights, if it has some, the KV cache, a prefill, and a few copies of logits in fp32."""
    row = recipe.engine.model_copy(
        update={"tokens_per_microbatch_per_rank": PREFILL_TOKENS, "recompute": "none"}
    )
    layout = placement_of(recipe).layout
    setup = replace(
        setup_of(recipe, shape),
        layout=Layout(tp=layout.tp, pp=layout.pp),
        engine=row,
        optimizer=None,
        ranks=layout.tp * layout.pp,
    )
    logits = 4 * 4 * recipe.rollout.sequences_per_rank * shape.vocab_size
    return sum(rollout_bytes(recipe, setup, None)) + workspace(setup) + logits
