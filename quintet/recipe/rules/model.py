"""Rules of the model: where it comes from and what must be there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from quintet.errors import UserError
from quintet.models import check_weights
from quintet.models.family import VALUE_MODEL
from quintet.recipe.paths import is_file
from quintet.recipe.problem import Problem
from quintet.recipe.rules.facts import Facts, rule
from quintet.recipe.user_family import use_family


@rule
def one_model(facts: Facts) -> Iterator[Problem]:
    """A model is read from model.path or made by model.build, exactly one of them."""
    model = facts.recipe.model
    if model.path is None and model.build is None:
        yield Problem(
            "no model: set model.path to a Hugging Face directory or a model of the hub, or model.build to make a small one from nothing"
        )
    if model.path is not None and model.build is not None:
        yield Problem("both model.path and model.build are set; set one of them to null")


@rule
def own_family_is_used(facts: Facts) -> Iterator[Problem]:
    """A family that the recipe names is the one that the model is of."""
    model = facts.recipe.model
    if model.family is None or facts.shape is None:
        return
    if model.directory is None:
        yield Problem(
            f"model.family={model.family}: model.build makes models of quintet's own families; set model.family=null, or name a model.path"
        )
        return
    named = use_family(model.family)
    if named is not None and facts.shape.family != named.name:
        yield Problem(
            f"model.family={model.family} answers to {', '.join(named.architectures)}, but {model.directory / 'config.json'} names "
            f"an architecture of the family {facts.shape.family}; set model.family=null, or mend config.json"
        )


@rule
def weights_are_there(facts: Facts) -> Iterator[Problem]:
    """A Hugging Face directory holds a tokenizer and safetensors weights whose headers fit config.json."""
    if facts.read is None or (path := facts.recipe.model.directory) is None:
        return
    if not any(path.glob("*.safetensors")):
        yield Problem(
            f"model.path: {path} has no *.safetensors; download the weights, or convert them with transformers' save_pretrained"
        )
    else:
        try:
            new = facts.recipe.mtp is not None and facts.recipe.mtp.init_layers is not None
            check_weights(path, facts.read.without_mtp() if new else facts.read)
        except UserError as error:
            yield Problem(f"model.path: {error}")
    code_may_read_others = facts.recipe.model.trust_remote_code
    if not code_may_read_others and not any((path / name).is_file() for name in _TOKENIZER_FILES):
        yield Problem(
            f"model.path: {path} has no tokenizer (none of {', '.join(_TOKENIZER_FILES)}); copy it from the model's page"
        )


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@rule
def code_comes_with_a_directory(facts: Facts) -> Iterator[Problem]:
    """Only a model that is read can bring code along."""
    model = facts.recipe.model
    if model.trust_remote_code and model.path is None:
        yield Problem(
            "model.trust_remote_code=true: a model that is built brings no code; remove it, or name a model.path"
        )


@rule
def policies_predict_tokens(facts: Facts) -> Iterator[Problem]:
    """The model of every command has an LM head: a value model is made beside a policy, not named in a recipe."""
    if facts.read is not None and facts.read.head == "value":
        yield Problem(
            f"model.path: {facts.recipe.model.path} holds a value model (its architecture ends with {VALUE_MODEL}), which "
            "gives one number a token and predicts none; name a model whose architecture ends with ForCausalLM"
        )


@rule
def stop_tokens_exist(facts: Facts) -> Iterator[Problem]:
    """A token that ends a response is one that the model can generate."""
    if facts.read is None:
        return
    unknown = [one for one in facts.recipe.rollout.stop_token_ids if one >= facts.read.vocab_size]
    if unknown:
        yield Problem(
            f"rollout.stop_token_ids: {', '.join(map(str, unknown))} is never generated, the model has token ids 0 to "
            f"{facts.read.vocab_size - 1}; remove it"
        )


@rule
def built_model_is_sound(facts: Facts) -> Iterator[Problem]:
    """KV heads divide the heads of a built model, and rotary embedding needs an even head size."""
    build = facts.recipe.model.build
    if build is None:
        return
    if build.heads % build.kv_heads:
        yield Problem(
            f"model.build.heads={build.heads} is not divisible by model.build.kv_heads={build.kv_heads}; each KV head serves a whole number of heads"
        )
    if build.head_dim % 2:
        yield Problem(
            f"model.build.head_dim={build.head_dim} is odd; rotary embedding turns pairs, so make it even"
        )


@rule
def chat_template_exists(facts: Facts) -> Iterator[Problem]:
    """A chat template that reads like a file name is a file."""
    template = facts.recipe.model.chat_template
    if template and "{" not in template and "\n" not in template and not is_file(template):
        yield Problem(
            f"model.chat_template: there is no file {template:.200} (looked in {Path.cwd()}); Jinja text would have a {{ in it"
        )
