"""Rules of adapters: what they are beside, what they start from, and who needs them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from quintet.errors import UserError
from quintet.models import table_of
from quintet.models.lora import adapted, linears
from quintet.recipe.lora import lora_shape
from quintet.recipe.problem import Problem
from quintet.recipe.rules.facts import Facts, rule


@rule
def adapters_fit(facts: Facts) -> Iterator[Problem]:
    """Adapters are beside linear layers that the model has, and are those in lora.path where it is given."""
    if facts.recipe.lora is None or facts.shape is None:
        return
    try:
        lora_shape(facts.recipe, facts.shape)
    except UserError as error:
        found = re.match(r"lora\.\w+", str(error))
        yield Problem(str(error), found[0] if found else "lora")


@rule
def every_stage_has_adapters(facts: Facts) -> Iterator[Problem]:
    """Each pipeline stage, and each of its interleaved parts, has something to train."""
    shape, layout = facts.shape, facts.recipe.layout
    if shape is None or layout.pp == 1 or not layout.holds(shape.layers) or (lora := facts.lora) is None:
        return
    on = {int(one.name.split(".")[2]) for one in linears(table_of(shape)) if adapted(one, lora)}
    parts = (layers for stage in range(layout.pp) for layers in layout.layers_of(shape.layers, stage))
    for layers in parts:
        if not on & set(layers):
            which = f"layer of {layers[0]} to {layers[-1]}" if layers else "layer of an empty stage"
            yield Problem(
                f"lora.targets: no {which} has adapters, and with layout.pp={layout.pp} and layout.vpp={layout.vpp} these are a part "
                "of a stage, which would have nothing to train; choose targets in every part, a smaller pp or other "
                "layout.stage_layers",
                "layout.stage_layers",
            )
            return


@rule
def adapters_are_given_where_none_are_trained(facts: Facts) -> Iterator[Problem]:
    """A command that does not train has adapters to read."""
    lora = facts.recipe.lora
    if facts.command in ("generate", "eval") and lora is not None and lora.path is None:
        yield Problem(
            f"lora: quintet {facts.command} trains nothing, and fresh adapters change nothing; set lora.path to a directory with "
            "adapters, or lora=null"
        )
