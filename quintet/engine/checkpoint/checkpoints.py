"""An engine's checkpoints: what is saved of it and when what was saved fits it. `Engine.save` and `Engine.load`."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import megatron.core
import torch
from torch import Tensor

from quintet.engine.agree import run_on_all_or_raise
from quintet.engine.checkpoint.format import CHECKSUMS, STATE
from quintet.engine.checkpoint.loader import Load
from quintet.engine.checkpoint.parts import Holding
from quintet.engine.checkpoint.reader import Reader
from quintet.engine.checkpoint.saver import Saver
from quintet.engine.checkpoint.slots import Slot, moment_names, slots
from quintet.errors import DamagedCheckpoint, UserError

if TYPE_CHECKING:
    from quintet.engine.engine import Engine

log = logging.getLogger(__name__)
FORMAT = 1


class Checkpoints:
    """Saves and loads one engine's model, optimizer, step and random states. One save at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._saver = Saver()
        self._held: Holding | None = None

    def start(self, path: Path, *, aside: bool) -> None:
        """Begin to write the state. Collective. aside: copy it to the host first, so that training may go on meanwhile."""
        engine = self._engine
        moments = self._moments() if engine.steps else ()
        holding = self._holding()
        parts = list(holding.weights())
        for one in self._states(holding, self._slots()):
            parts += [one.part(kind, tensor) for kind, tensor in one.slot.tensors(moments).items()]
        self._saver.start(path, parts, random_states(), self._description(moments), aside=aside)

    def finished(self, wait: bool) -> bool:
        """Return whether this rank has written its part. No collective. Raises what went wrong."""
        return self._saver.finished(wait)

    def load(self, path: Path) -> int:
        """Fill the engine from a checkpoint; returns the optimizer steps it was saved after. Collective.

        Raises DamagedCheckpoint on every rank, with the engine as it was, when what one of them reads is not what was written;
        another UserError when a rank cannot read it, or it is whole and of another model, optimizer or version.
        """
        engine = self._engine
        reader, state = run_on_all_or_raise(lambda: self._open(path))
        steps, moments = int(state["steps"]), tuple(state["moments"])
        slots = self._slots()
        load = run_on_all_or_raise(lambda: self._fitting(reader, state, slots))
        states = run_on_all_or_raise(lambda: self._read(load, state))
        engine._incomplete = f"{path} could not be loaded to its end"
        load.commit(slots, lambda slot: slot.begin(moments, steps))
        engine._incomplete = None
        if states is not None:
            set_random_states(states)
        elif engine.mesh.rank == 0:
            log.info("%s was saved in another layout: random states stay as they are", path)
        return steps

    def _open(self, path: Path) -> tuple[Reader, dict[str, Any]]:
        reader = Reader(path)
        state = reader.state()
        if state.get("format") != FORMAT:
            raise UserError(
                f"{path} is not a checkpoint of this version of quintet: format {state.get('format')}, not {FORMAT}"
            )
        lost = [name for name in ("steps", "optimizer", "moments", "layout") if name not in state]
        if lost:
            raise UserError(f"{path / STATE} is damaged: it does not say {', '.join(lost)}")
        if not reader.checked:
            raise DamagedCheckpoint(
                f"{path / CHECKSUMS} is missing: whether the other files are whole cannot be told"
            )
        return reader, state

    def _fitting(self, reader: Reader, state: dict[str, Any], slots: Sequence[Slot]) -> Load:
        """What this rank will take, once it is sure that it is of this model and optimizer."""
        engine, path, holding = self._engine, reader.path, self._holding()
        self._check_adapters(path, state)
        if engine._optimizer is not None:
            self._check_optimizer(path, state)
        load = Load(reader, holding)
        load.want_weights(holding, from_masters=engine._optimizer is not None)
        load.want_states(self._states(holding, slots), state["moments"])
        return load

    def _check_adapters(self, path: Path, state: dict[str, Any]) -> None:
        """Raise UserError when the adapters are others than those saved, or beside other weights."""
        saved, mine = state.get("adapters"), self._adapters()
        if (saved is None) != (mine is None):
            what = "a whole model" if saved is None else "adapters alone"
            raise UserError(
                f"{path} holds {what}; {'remove' if saved is None else 'give'} the recipe's section lora to load it"
            )
        if saved is None or mine is None:
            return
        for key in ("rank", "scale", "targets"):
            if saved[key] != mine[key]:
                raise UserError(
                    f"{path} was saved with adapters of {key} {saved[key]}, this engine's have {mine[key]}: set the recipe's "
                    "section lora back"
                )
        if None not in (saved["base"], mine["base"]) and saved["base"] != mine["base"]:
            raise UserError(
                f"{path} holds adapters alone, beside the weights of {saved['base_path']}; those of {mine['base_path']} are "
                "others. Set model.path back"
            )

    def _adapters(self) -> dict[str, Any] | None:
        """What adapters are beside, for a checkpoint that holds nothing else."""
        engine = self._engine
        if engine.lora is None:
            return None
        path, fingerprint = engine.base or (None, None)
        return {
            "rank": engine.lora.rank,
            "scale": engine.lora.scale,
            "targets": list(engine.lora.targets),
            "base_path": path,
            "base": fingerprint,
        }

    def _check_optimizer(self, path: Path, state: dict[str, Any]) -> None:
        """Raise UserError when the optimizer has other state than what was saved."""
        saved, recipe = state["optimizer"], self._engine._optimizer_recipe
        assert recipe is not None
        if saved is None:
            raise UserError(
                f"{path} holds weights alone, without an optimizer's state: training cannot go on from it. Load it into "
                "an engine without an optimizer, or convert it and start from the Hugging Face directory"
            )
        if state["steps"] and tuple(state["moments"]) != moment_names(recipe):
            raise UserError(
                f"{path} was saved with {recipe.key}.name={saved}, whose state is {', '.join(state['moments']) or 'none'}; "
                f"{recipe.key}.name={recipe.name} needs {', '.join(moment_names(recipe)) or 'none'}. Set it and its momentum back"
            )

    def _read(self, load: Load, state: dict[str, Any]) -> Any:
        """Read and check all that is wanted; this rank's random states, where the layout is the same."""
        load.read()
        same = state["layout"] == self._layout()
        return load.reader.json(f"rng-{self._engine.mesh.rank:05d}.json") if same else None

    def _holding(self) -> Holding:
        if self._held is None:  # of a model with many experts it is some 10⁵ names
            self._held = Holding(self._engine.chunks, self._engine.shape, self._engine.mesh)
        return self._held

    def _slots(self) -> list[Slot]:
        engine = self._engine
        if engine._optimizer is None:
            return []
        return list(slots(engine._optimizer, [p for chunk in engine.chunks for p in chunk.parameters()]))

    def _states(self, holding: Holding, slots: Sequence[Slot]) -> list[Any]:
        return list(holding.states(slots, distributed=self._engine.recipe.distributed_optimizer))

    def _moments(self) -> tuple[str, ...]:
        recipe = self._engine._optimizer_recipe
        return () if recipe is None else moment_names(recipe)

    def _layout(self) -> dict[str, Any]:
        layout = self._engine.layout
        uneven = {} if layout.stage_layers is None else {"stage_layers": layout.stage_layers}
        return dataclasses.asdict(self._engine.mesh.sizes) | {"vpp": layout.vpp} | uneven

    def _description(self, moments: Sequence[str]) -> dict[str, Any]:
        """Content of state.json."""
        engine = self._engine
        recipe = engine._optimizer_recipe if engine._optimizer is not None else None
        return {
            "format": FORMAT,
            "steps": engine.steps,
            "optimizer": recipe.name if recipe is not None else None,
            "moments": list(moments),
            "dtype": str(engine.dtype).removeprefix("torch."),
            "layout": self._layout(),
            "family": engine.shape.family,
            "adapters": self._adapters(),
            "versions": {"torch": torch.__version__, "megatron-core": megatron.core.__version__},
        }


def random_states() -> dict[str, Any]:
    """Return the states of all random number generators, as JSON can hold them."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": _text(torch.get_rng_state())}
    if torch.cuda.is_available():
        states["cuda"] = _text(torch.cuda.get_rng_state())
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Undo all drawing since `random_states`. A GPU's state stays where there is none, or was none."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(_tensor(states["torch"]))
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(_tensor(states["cuda"]))


def _text(state: Tensor) -> str:
    return bytes(state.numpy()).hex()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
