"""Nothing that quintet reads is run: what could do that is listed here, each with its reason, and is nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PICKLERS = {"cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "pickle", "shelve"}
PICKLE_IN = {"all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"}
PICKLE_IN |= {"recv_object_list", "send_object_list"}

ALLOWED = {
    (
        "engine/checkpoint/unpickle.py",
        "import pickle",
    ): "the unpickler that knows classes of checkpoint metadata alone",
    ("engine/checkpoint/unpickle.py", "pickle.Unpickler"): "of which it is made",
    ("engine/checkpoint/unpickle.py", "pickle.UnpicklingError"): "what it raises",
    ("engine/checkpoint/reader.py", "import pickle"): "for the error of that unpickler",
    ("engine/checkpoint/reader.py", "pickle.UnpicklingError"): "which it catches",
    (
        "engine/checkpoint/format.py",
        "import pickle",
    ): "to write: PyTorch's format of a checkpoint's index is a pickle",
    ("engine/checkpoint/format.py", "pickle.dumps"): "the index is written",
    (
        "cluster/group.py",
        "ray.cloudpickle",
    ): "the class of a rank's worker, which goes through Ray's own channel",
    ("cluster/rank_actor.py", "ray.cloudpickle"): "where it arrives",
    (
        "recipe/user_code.py",
        "spec.loader.exec_module",
    ): "files that a recipe names: a recipe is trusted as code is",
}
"""File and what it does there: why it may."""


def dangers(tree: ast.AST) -> Iterator[str]:
    """What could run what it reads: by pickles, as code, or by YAML's tags."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (f"import {one.name}" for one in names if one.name.split(".")[0] in PICKLERS)
            case ast.ImportFrom(module=module, names=names):
                for one in names:
                    if PICKLERS & {*(module or "").split("."), one.name} or one.name in PICKLE_IN:
                        yield f"from {module} import {one.name}"
            case ast.Attribute(attr=name, value=owner):
                whole = ast.unparse(node)
                if name in PICKLE_IN or name == "cloudpickle" or ast.unparse(owner) in PICKLERS:
                    yield whole
            case ast.Call(func=function, args=arguments, keywords=keywords):
                yield from _call(ast.unparse(function), arguments, {one.arg: one.value for one in keywords})


def _call(name: str, arguments: list[ast.expr], keywords: dict[str | None, ast.expr]) -> Iterator[str]:
    *owner, last = name.split(".")
    safe = keywords.get("weights_only")
    if name in ("eval", "exec", "compile", "__import__") or last in ("exec_module", "run_path"):
        yield name
    if name in ("torch.load", "torch.jit.load") and not (
        isinstance(safe, ast.Constant) and safe.value is True
    ):
        yield f"{name} without weights_only=True"
    if last in ("load", "fromfile", "read_array") and "allow_pickle" in keywords:
        yield f"{name} with allow_pickle"
    if last in ("load", "load_all", "unsafe_load", "full_load") and owner == ["yaml"]:
        yield name
    # Of a multiprocessing.Connection, which pickles; a socket's recv has a size, and its sendall another name.
    if owner and last == "recv" and not arguments and not keywords:
        yield f"{name}()"
    if owner and last == "send" and len(arguments) == 1 and not keywords:
        yield f"{name}(…)"
    if last in ("Pool", "Queue", "SimpleQueue", "JoinableQueue", "Manager") and "multiprocessing" in owner:
        yield name
    if "shell" in keywords or name in ("os.system", "os.popen"):
        yield f"{name} through a shell"
    if isinstance(trusted := keywords.get("trust_remote_code"), ast.Constant) and trusted.value is True:
        yield f"{name} with trust_remote_code"


def test_what_could_run_what_it_reads_is_known_and_has_a_reason():
    found = set[tuple[str, str]]()
    for file in (ROOT / "quintet").rglob("*.py"):
        where = str(file.relative_to(ROOT / "quintet"))
        found |= {(where, danger) for danger in dangers(ast.parse(file.read_text(encoding="utf-8")))}
    assert sorted(found - set(ALLOWED)) == [], "new: is there another way?"
    assert sorted(set(ALLOWED) - found) == [], "gone: strike them off"


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from cloudpickle import loads",
        "from torch.distributed import all_gather_object",
        "dist.broadcast_object_list(x, 0)",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "np.load(file, allow_pickle=True)",
        "yaml.load(text, Loader)",
        "eval(text)",
        "connection.recv()",
        "self._lines[one].send(what)",
        "ray.cloudpickle.loads(blob)",
        "multiprocessing.Queue()",
        "subprocess.run(command, shell=True)",
        "AutoTokenizer.from_pretrained(path, trust_remote_code=True)",
    ],
)
def test_it_would_be_seen(code):
    assert list(dangers(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "torch.load(file, weights_only=True)",
        "channel.recv(64)",
        "connection.recv_bytes(64)",
        "dist.send(tensor, dst=1)",
        "model.eval()",
        "yaml.safe_load(text)",
        "re.compile(pattern)",
    ],
)
def test_what_is_harmless_is_not_seen(code):
    assert not list(dangers(ast.parse(code)))
