"""How the models of a worker are loaded again. Like `compat`, and a part of it by its length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quintet.errors import SyncMismatch
from quintet.rollout.vllm.worker_models import WorkerModels


def models_of(runner: Any, speculative: Any) -> WorkerModels:
    """Return the models of the worker with this runner. speculative: vLLM's SpeculativeConfig, or None.

    Raises SyncMismatch where a model was to draft and there is none: vLLM would go on without.
    """
    proposer = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)  # the second runner's
    drafter = getattr(proposer, "model", None)
    models = WorkerModels(runner.get_model(), drafter if isinstance(drafter, torch.nn.Module) else None)
    if models.drafter is None and speculative is not None and speculative.use_eagle():  # MTP as well
        raise SyncMismatch(
            f"vLLM was to draft with {speculative.method}, and a worker of it has no model that does: there is no place for its weights"
        )
    return models


@contextmanager
def kernels_kept(model: torch.nn.Module) -> Iterator[None]:
    """Keep experts' kernels while weights are loaded again: made as at the first load; afterwards the first ones are back.

    vLLM 0.32.0 for CPU packs experts only where no kernel exists yet, and otherwise keeps them unpacked in silence
    (tests/rollout/vllm/test_worker.py::test_new_weights). vLLM 0.20.2 makes a new kernel each time, which refers to
    tensors that only look like the layer's, while captured graphs have the first one's.
    """
    kept = []
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            kept.append((method, {k: getattr(method, k) for k in ("moe_kernel", "moe_quant_config")}))
            method.moe_kernel = None
    yield
    for method, attributes in kept:
        for name, value in attributes.items():
            setattr(method, name, value)


@contextmanager
def absorbed_kept(model: torch.nn.Module) -> Iterator[None]:
    """Have the matrices that latent attention decodes with stay where they are while weights are loaded again.

    vLLM makes them of `kv_b_proj` after each load; where that is in 8 bits, 0.20.2 takes new memory, while captured graphs know the first (
    test_fp8.py::test_matrices_made_of_weights_stay_where_graphs_know_them).
    """
    kept = [
        (module, name, matrix)
        for module in model.modules()
        for name in ("W_UV", "W_UK_T")
        if isinstance(matrix := getattr(module, name, None), torch.Tensor)
    ]
    yield
    for module, name, first in kept:
        if (now := getattr(module, name)).data_ptr() != first.data_ptr():
            first.copy_(now)
            setattr(module, name, first)


@contextmanager
def scales_kept() -> Iterator[None]:
    """Keep weights of 8 bits, where their scales are powers of two already, as they came.

    For DeepGEMM vLLM (0.20.2, 0.32.0) quantises them once more, to powers of two by a rule of its own: a block whose largest number was
    rounded down gets other bytes, and one of tiny numbers other numbers (test_fp8.py::test_scales_that_are_powers_of_two_stay).
    """
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    quantise: Any = fp8_utils.requant_weight_ue8m0_inplace

    def unless_powers_of_two(weight: torch.Tensor, scales: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if not (torch.frexp(scales).mantissa == 0.5).all():
            quantise(weight, scales, *args, **kwargs)

    with mock.patch.object(fp8_utils, "requant_weight_ue8m0_inplace", unless_powers_of_two):
        yield


class DirectCopies(TorchDispatchMode):
    """Have what a model's loader copies into parameters by itself go through loaders, which the layerwise reload waits for.

    So does that of gpt-oss (0.20.2, 0.32.0) with experts, their biases and sinks: to the meta device, where they would be lost (
    test_gpt_oss.py::test_new_weights).
    """

    def __init__(self, model: torch.nn.Module) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import make_online_process_loader

        super().__init__()
        self._loaders: dict[int, Any] = {}
        one: Any
        for layer in model.modules() if type(model).__name__ == "GptOssForCausalLM" else ():
            for name, one in layer.named_parameters(recurse=False):
                if name == "sinks" or name.startswith(("w13_", "w2_")):
                    one.weight_loader = lambda param, loaded: param.data.copy_(loaded)
                    one.weight_loader = make_online_process_loader(layer, name)
                    self._loaders[one.untyped_storage()._cdata] = partial(one.weight_loader, one)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        copies = func is torch.ops.aten.copy_.default
        if not copies or (load := self._loaders.get(args[0].untyped_storage()._cdata)) is None:
            return func(*args, **(kwargs or {}))
        load(args[1])
        return args[0]


Loading = tuple[Any, Iterable[tuple[str, torch.Tensor]], Any]
"""A model, whole tensors for it by their Hugging Face names, and vLLM's ModelConfig of it."""


def load_again(loads: Sequence[Loading]) -> None:
    """Load models' weights in place, one model after another, through their loaders and what follows these, layer by layer. What
    an earlier model shares with a later one is loaded with the earlier.

    This is what the worker's own `reload_weights` does with one model: that of 0.20.2 and 0.32.0 knows the policy only, not
    what drafts for it (tests/rollout/vllm/test_drafting.py::test_new_weights_reach_the_drafter).
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    with ExitStack() as kept:
        kept.enter_context(scales_kept())
        for model, _, _ in loads:
            kept.enter_context(kernels_kept(model))
            kept.enter_context(absorbed_kept(model))
            initialize_layerwise_reload(model)
        for model, weights, _ in loads:
            coming = iter(weights)
            with DirectCopies(model):
                model.load_weights(coming)
            if next(coming, None) is not None:
                raise RuntimeError(
                    f"the loader of vLLM's {type(model).__name__} did not take all tensors that came"
                )
        for model, _, config in loads:
            finalize_layerwise_reload(model, config)
    for model, _, _ in loads:
        _pack_shared(model)


def _pack_shared(model: torch.nn.Module) -> None:
    """Have layers on the CPU that share a parameter with others take their own copy of it again.

    vLLM 0.32.0 does not where the weights were loaded into one of the others: a head that is tied to the embedding then goes on
    with the old ones (test_worker.py::test_new_weights).
    """
    packing: Any
    holders: dict[int, list[Any]] = {}
    for packing in model.modules():
        if "cpu_linear" in vars(packing):  # its own: what wraps a layer to add adapters shows the layer's
            holders.setdefault(id(packing.weight), []).append(packing)
    for layers in holders.values():
        for layer in layers if len(layers) > 1 else ():
            layer.quant_method.process_weights_after_loading(layer)
