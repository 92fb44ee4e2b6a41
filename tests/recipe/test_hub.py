"""`model.path` as a model of the hub: downloaded once, the same commit from then on, and told where it cannot be had."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from quintet.errors import UserError
from quintet.recipe.hub import snapshot
from quintet.recipe.loader import dump_resolved, load_recipe
from quintet.recipe.schema import Recipe
from tests.hub import COMMIT, Hub, serving
from tests.models.directory import write_model

NAME = "some-one/Tiny_1.5"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one model, a cache that is empty, and a working directory beside."""
    model = write_model(tmp_path / "model")
    (model / "tokenizer.json").write_text("{}")
    hub = Hub()
    hub.repos[NAME] = {file.name: file.read_bytes() for file in model.iterdir()}
    hub.repos[NAME] |= {"pytorch_model.bin": b"no", "onnx/model.safetensors": b"no", "README.md": b"no"}
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    snapshot.cache_clear()
    with serving(hub):
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        yield hub
    snapshot.cache_clear()


def load(*overrides: str) -> Recipe:
    return load_recipe(None, [f"model.path={NAME}", *overrides], command="generate")


def test_a_model_is_downloaded_and_pinned(hub: Hub, tmp_path: Path) -> None:
    model = load().model
    assert (str(model.path), model.revision) == (NAME, COMMIT)
    assert model.directory is not None
    assert model.directory.parent == tmp_path / "cache" / "models--some-one--Tiny_1.5" / "snapshots"
    names = {"config.json", "model.safetensors", "tokenizer.json"}
    assert {file.name for file in model.directory.iterdir()} == names


def test_the_resolved_recipe_is_the_same_commit_and_needs_no_network(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(dump_resolved(load()))
    snapshot.cache_clear()
    del hub.repos[NAME]
    hub.asked.clear()
    again = load_recipe(tmp_path / "r.yaml", command="generate")
    assert again.model.revision == COMMIT
    assert hub.asked == []


def test_without_a_network_the_cache_counts(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(UserError) as caught:
            load()
    for part in (NAME, "revision main", "HF_HOME", constants.HF_HUB_CACHE, f"hf download {NAME}"):
        assert part in str(caught.value)
    load()
    snapshot.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load().model.revision == COMMIT


def test_what_the_hub_does_not_have(hub: Hub) -> None:
    with pytest.raises(
        UserError, match=r"Tiny_1\.5 is no .*\(revision v9\) it has no such revision; set model\.revision"
    ):
        load("model.revision=v9")
    hub.repos.clear()
    with pytest.raises(UserError, match=r"model\.path: .*was not found: check the id on http.*HF_TOKEN"):
        load()


def test_what_is_here_comes_first(hub: Hub) -> None:
    write_model(Path(NAME)).joinpath("tokenizer.json").touch()
    assert load().model.directory == Path(NAME)
    assert hub.asked == []
    with pytest.raises(
        UserError, match=r"model\.revision=main is not read by a model that is a directory here"
    ):
        load("model.revision=main")


@pytest.mark.parametrize(
    "path",
    ["/nowhere/model", "./some/model", "runs/demo/checkpoint", "model", "~/model", "../x", "models/typo"],
)
def test_what_looks_like_a_path_is_one(hub: Hub, path: str) -> None:
    Path("models").mkdir()
    with pytest.raises(UserError, match=r"does not exist: name a Hugging Face directory"):
        load(f"model.path={path}")
    assert hub.asked == []
