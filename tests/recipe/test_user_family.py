"""model.family: what is wrong with a family of the user's own is told before anything starts."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from quintet.errors import UserError
from quintet.models import family_of, register
from quintet.models.llama import Llama
from quintet.recipe.loader import load_recipe
from quintet.recipe.user_family import use_family
from tests.models.directory import QWEN3, write_model

pytestmark = pytest.mark.usefixtures("families_forgotten")

GOOD = """
from quintet.models import Family, dense_shape, register

class {name}(Family):
    name = {family!r}
    architectures = {architectures}

    def shape(self, config):
        return dense_shape(config, self.name, qk_norm=True, qkv_bias=False, tied_by_default=False)
"""


def family_file(tmp_path: Path, body: str, name: str = "mine.py") -> Path:
    file = tmp_path / name
    file.write_text(body)
    return file


def good(name: str = "Mine", family: str = "mine", architectures: str = '("MineForCausalLM",)') -> str:
    return GOOD.format(name=name, family=family, architectures=architectures)


def refused(spec: str) -> str:
    with pytest.raises(UserError) as caught:
        use_family(spec)
    assert str(caught.value).startswith("model.family: ")
    return str(caught.value)


def test_a_class_of_a_file_becomes_a_family(tmp_path: Path) -> None:
    spec = f"{family_file(tmp_path, good())}:Mine"
    use_family(spec)
    use_family(spec)  # once more, as every process that reads a model does
    config = QWEN3 | {"architectures": ["MineForCausalLM"]}
    assert family_of(config).shape_of(config).family == "mine"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("class Other: pass", "has no class 'Mine'; it has Other"),
        ("", "has no class 'Mine'; it has none"),
        ("Mine = 3", "'Mine' in .* is int, not a class"),
        ("class Mine: pass", "is not a subclass of quintet.models.Family"),
        ("from quintet.models import Family as Mine", "is not a subclass of quintet.models.Family"),
        ("1 / 0", r"importing .*mine\.py failed with ZeroDivisionError"),
        ("from quintet.models import Family\nclass Mine(Family): pass", "a family has a name"),
        (good(architectures='"MineForCausalLM"'), "a family has the architectures it answers to"),
        (good(architectures="()"), "architectures is empty"),
        (good().partition("    def")[0], r"shape\(\) is not defined"),
        (
            good(architectures='("LlamaForCausalLM",)'),
            r"LlamaForCausalLM is an architecture of .*llama\.Llama",
        ),
        (good(family="qwen3"), r"its name 'qwen3' is that of .*qwen3\.Qwen3"),
        (
            good(family="qwen3").replace("class Mine", "@register\nclass Mine"),
            r"mine\.py: .*its name 'qwen3'",
        ),
    ],
)
def test_what_is_no_family_is_refused(tmp_path: Path, body: str, message: str) -> None:
    said = refused(f"{family_file(tmp_path, body)}:Mine")
    assert re.search(message, said), said


def test_what_is_not_there(tmp_path: Path) -> None:
    assert "there is no file" in refused(f"{tmp_path / 'none.py'}:Mine")
    assert "there is no module 'no_such_thing'" in refused("no_such_thing:Mine")
    assert "is not module:Class or file.py:Class" in refused("llama")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1 / 0", r"Broken\.shape raised ZeroDivisionError"),
        ("return None", r"must give a ModelShape of the family 'broken', not None"),
        (
            "return dense_shape(config, 'qwen3', qk_norm=True, qkv_bias=False, tied_by_default=False)",
            "not one of",
        ),
    ],
)
def test_a_shape_that_cannot_be_used_is_refused(tmp_path: Path, body: str, message: str) -> None:
    text = (
        good("Broken", "broken", '("BrokenForCausalLM",)').partition("        return")[0]
        + f"        {body}\n"
    )
    use_family(f"{family_file(tmp_path, text, 'broken.py')}:Broken")
    with pytest.raises(UserError, match=message):
        family_of({"architectures": ["BrokenForCausalLM"]}).shape_of(QWEN3)


def test_two_families_of_one_architecture(tmp_path: Path) -> None:
    body = good("Two", "two", '("TwoForCausalLM",)')
    use_family(f"{family_file(tmp_path, body, 'two.py')}:Two")
    other = family_file(tmp_path, good("Second", "second", '("TwoForCausalLM",)'), "second.py")
    said = refused(f"{other}:Second")
    assert re.search(r"TwoForCausalLM is an architecture of quintet_user_two_[0-9a-f]{8}\.Two already", said)


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(good("Mine", "mine", f'("{name.title()}ForCausalLM",)'))
    use_family(f"{tmp_path / 'one' / 'mine.py'}:Mine")
    assert "mine" in refused(f"{tmp_path / 'other' / 'mine.py'}:Mine")
    first = type(family_of({"architectures": ["OneForCausalLM"]}))
    assert sys.modules[first.__module__].Mine is first  # and is what pickling finds


def test_built_in_families_stay_what_they_are() -> None:
    assert register(Llama) is Llama
    assert family_of({"architectures": ["LlamaForCausalLM"]}).name == "llama"


def recipe(tmp_path: Path, config: dict, *overrides: str) -> str:
    """What is wrong with a recipe that names the family, or its dump."""
    path = write_model(tmp_path / "model") if not (tmp_path / "model").exists() else tmp_path / "model"
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").touch()
    file = tmp_path / "my.yaml"
    file.write_text("data: {task: addition, max_prompt_tokens: 8}\nreward: {function: addition}\n")
    try:
        return str(load_recipe(file, [f"model.path={path}", *overrides]).model.family)
    except UserError as error:
        return str(error)


def test_the_recipe_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    family_file(tmp_path, good("Named", "named", '("NamedForCausalLM",)'), "named.py")
    own, spec = QWEN3 | {"architectures": ["NamedForCausalLM"]}, "model.family=named.py:Named"
    assert "NamedForCausalLM is not supported" in recipe(tmp_path, own)
    assert recipe(tmp_path, own, spec) == f"{tmp_path / 'named.py'}:Named"  # which other processes find
    said = recipe(tmp_path, QWEN3, spec)
    assert "answers to NamedForCausalLM, but" in said
    assert "names an architecture of the family qwen3" in said
    assert "model.build makes models of quintet's own families" in recipe(
        tmp_path, own, spec, "model.path=null", "model.build={}"
    )
    assert "model.family: there is no file" in recipe(tmp_path, own, "model.family=other.py:Named")


def test_a_file_that_is_loaded_again_answers_to_what_it_says_now() -> None:
    for architecture in ("FormerForCausalLM", "LatterForCausalLM"):
        register(type("Mine", (Llama,), {"name": "mine", "architectures": (architecture,)}))
    assert family_of({"architectures": ["LatterForCausalLM"]}).name == "mine"
    with pytest.raises(UserError, match="FormerForCausalLM is not supported"):
        family_of({"architectures": ["FormerForCausalLM"]})
    for name in ("other", "mine"):
        register(type("Mine", (Llama,), {"name": name, "architectures": ("LatterForCausalLM",)}))
        assert family_of({"architectures": ["LatterForCausalLM"]}).name == name
