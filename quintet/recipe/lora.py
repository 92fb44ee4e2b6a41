"""From the recipe's section `lora` to the adapters of a model."""

from __future__ import annotations

from quintet.errors import UserError
from quintet.models import ModelShape, table_of
from quintet.models.lora import ALL_LINEAR, LoraShape, adapter_weights, check_targets
from quintet.models.peft import read_adapter
from quintet.recipe.schema import Recipe

RANK = 16


def lora_shape(recipe: Recipe, shape: ModelShape) -> LoraShape | None:
    """Return the adapters that a recipe asks for; None without a section `lora`. Reads lora.path's config and headers.

    Raises UserError for targets that fit no linear layer, and for what lora.path has otherwise than the recipe says.
    """
    asked = recipe.lora
    if asked is None:
        return None
    weights = table_of(shape)
    if asked.targets is not None:
        try:
            check_targets(weights, _patterns(asked.targets))
        except UserError as error:
            raise UserError(f"lora.targets: {error}") from None
    if asked.path is None:
        rank = asked.rank or RANK
        targets = _patterns(asked.targets or ALL_LINEAR)
        return LoraShape(rank, asked.alpha or 2.0 * rank, targets, bool(asked.rslora))
    try:
        there, _ = read_adapter(asked.path, weights)
    except UserError as error:
        raise UserError(f"lora.path: {error}") from None
    for key, wanted, found in (
        ("rank", asked.rank, there.rank),
        ("alpha", asked.alpha, there.alpha),
        ("rslora", asked.rslora, there.rslora),
    ):
        if wanted is not None and wanted != found:
            raise UserError(
                f"lora.{key} is {wanted}, and the adapters in lora.path={asked.path} have {found}; set lora.{key} to that or null"
            )
    if asked.targets is not None:
        mine = LoraShape(there.rank, there.alpha, _patterns(asked.targets), there.rslora)
        mine_names = {name for w in adapter_weights(weights, mine) for name in w.hf}
        names = {name for w in adapter_weights(weights, there) for name in w.hf}
        if differing := sorted(mine_names ^ names):
            side = "recipe" if differing[0] in mine_names else "directory"
            raise UserError(
                f"lora.targets: the adapters in lora.path={asked.path} are beside other layers ({differing[0]} is in the {side} "
                "alone); set lora.targets=null to take theirs"
            )
    return there


def _patterns(targets: str | list[str]) -> tuple[str, ...]:
    return (targets,) if isinstance(targets, str) else tuple(targets)
