"""Make the environment that quintet runs in: a virtual environment with the pinned packages and the right torch.

`make` calls this file; it needs nothing but Python's standard library. It decides which build of torch fits the
machine, because the default package index serves the CUDA build on Linux: gigabytes that a machine without
an NVIDIA GPU cannot use. Nothing is downloaded to decide; the package's metadata say what it would pull in.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH_VERSION = "2.13.0"
PIP_VERSION = "26.3"  # older pips download a whole wheel to read its metadata
TORCH_INDEX = {
    "cpu": "https://download.pytorch.org/whl/cpu",
    "cuda": "https://download.pytorch.org/whl/cu130",
}
OF_A_RUN = [
    "ray.dashboard.agent",
    "transformers.tokenization_utils_tokenizers",
    "quintet.cli",
    "quintet.train.ppo",
    "quintet.cluster.group",
    "quintet.controller.worker",
]
PIP_OPTIONS = ["--disable-pip-version-check", "--no-input", "--retries", "5"]


def main() -> int:
    """Make or check one environment; print a single line when there is nothing to do."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--venv", type=Path, default=ROOT / ".venv", help="where the environment is (default .venv)"
    )
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt", help="pinned versions")
    parser.add_argument(
        "--lock", action="store_true", help="resolve anew and write the pins to --constraints"
    )
    parser.add_argument(
        "what", nargs="*", default=["-e", f"{ROOT}[dev]"], help="what to install (pip's arguments)"
    )
    # pip's own options stand after `--`, so that `-e` is not taken for one of ours.
    args = parser.parse_args()
    stamp = args.venv / ".quintet-stamp"
    wanted = fingerprint(args.constraints, args.what)
    if not args.lock and stamp.exists() and stamp.read_text() == wanted:
        return 0
    started = time.monotonic()
    python = make_venv(args.venv)
    torch, index, reason = choose_torch(python)
    say(f"torch: {torch} ({reason})")
    install(python, torch, index, [] if args.lock else ["-c", str(args.constraints)], args.what)
    if args.lock:
        write_lock(python, args.constraints)
    else:
        stamp.write_text(wanted)
    say(f"{display(args.venv)} is ready ({time.monotonic() - started:.0f} s)")
    return 0


def say(text: str) -> None:
    print(f"[setup] {text}", flush=True)


def fail(text: str) -> None:
    print(f"[setup] error: {text}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def display(path: Path) -> str:
    return os.path.relpath(path)


def fingerprint(constraints: Path, what: list[str]) -> str:
    """Everything that decides what the environment holds, as one hash."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    parts = [
        platform.python_version(),
        str(ROOT),
        os.environ.get("QUINTET_TORCH", ""),
        *what,
        json.dumps(project),
    ]
    parts += [path.read_text() if path.exists() else "" for path in (constraints, Path(__file__))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


# --- the virtual environment -------------------------------------------------------------------------------------


def make_venv(venv: Path) -> Path:
    """Create the environment, with a pip new enough to read metadata alone; return its interpreter."""
    python = venv / "bin" / "python"
    if not works(python):
        say(f"making {display(venv)} with Python {platform.python_version()}")
        command = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(venv)]
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode:
            fail(f"`{' '.join(command)}` failed:\n{made.stderr}{made.stdout}")
    have = subprocess.run([*module_pip(python), "--version"], capture_output=True, text=True)
    if have.returncode or not have.stdout.startswith(f"pip {PIP_VERSION} "):
        install_pip(python, has_pip=have.returncode == 0)
    return python


def works(python: Path) -> bool:
    """Whether the interpreter is there, runs, and is of the version that called us (a moved or stale one is remade)."""
    if not python.exists():
        return False
    probe = "import sys; print(*sys.version_info[:2])"
    try:
        answer = subprocess.run([str(python), "-c", probe], capture_output=True, text=True).stdout.split()
    except OSError:
        return False
    return answer == [str(part) for part in sys.version_info[:2]]


def install_pip(python: Path, *, has_pip: bool) -> None:
    """Put the pinned pip into the environment, with whichever pip is at hand, else from the index by hand.

    Debian's and Ubuntu's bare `python3` has neither pip nor ensurepip: there its wheel is fetched and run from the file.
    """
    command = ["install", "--upgrade", f"pip=={PIP_VERSION}"]
    if has_pip:
        run_pip(module_pip(python), command)
    elif succeeds(sys.executable, "-m", "pip", "--python", str(python), "--version"):
        run_pip([sys.executable, "-m", "pip", "--python", str(python)], command)
    elif succeeds(str(python), "-m", "ensurepip"):
        run_pip(module_pip(python), command)
    else:
        with tempfile.TemporaryDirectory() as folder:
            run_pip([str(python), str(fetch_pip_wheel(Path(folder)) / "pip")], command)


def succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True).returncode == 0


def fetch_pip_wheel(folder: Path) -> Path:
    """Download pip's wheel from the package index (PIP_INDEX_URL, else PyPI)."""
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    name = f"pip-{PIP_VERSION}-py3-none-any.whl"
    try:
        with urllib.request.urlopen(f"{index}/pip/", timeout=60) as page:
            found = re.search(rf'href="([^"#]*{re.escape(name)})', page.read().decode())
            if found is None:
                fail(
                    f"{index}/pip/ does not list {name}; install Python's venv and pip packages and run make again."
                )
            address = urllib.request.urljoin(page.geturl(), found[1])
        with urllib.request.urlopen(address, timeout=120) as source, (folder / name).open("wb") as target:
            shutil.copyfileobj(source, target)
    except OSError as error:
        fail(
            f"cannot fetch pip from {index}: {error}. Check the network, or set PIP_INDEX_URL to an index you can reach."
        )
    return folder / name


# --- torch ----------------------------------------------------------------------------------------------------------


def choose_torch(python: Path) -> tuple[str, str | None, str]:
    """Return the requirement for torch, an extra index or None, and the reason in words.

    QUINTET_TORCH=cpu or =cuda overrides what the machine says; QUINTET_TORCH_INDEX names another index
    (a mirror, or another CUDA version) for when the default one serves the wrong build.
    """
    wanted, reason = device_wanted()
    plain = f"torch=={TORCH_VERSION}"
    version, pulls_cuda = default_build(python, plain)
    if platform.system() != "Linux":
        return plain, None, f"the default index's build for {platform.system()}"
    build = f"{wanted.upper()} build, because {reason}"
    if pulls_cuda == (wanted == "cuda"):
        return plain, None, f"{build}; the default index serves it as {version}"
    index = os.environ.get("QUINTET_TORCH_INDEX", TORCH_INDEX[wanted])
    # A local version is asked for by name: both builds are `2.13.0` to a resolver that sees both indexes.
    local = "cpu" if wanted == "cpu" else index.rstrip("/").rsplit("/", 1)[-1]
    return (
        f"{plain}+{local}",
        index,
        f"{build}; taken from {index}, as the default index serves the other one",
    )


def device_wanted() -> tuple[str, str]:
    """Return "cpu" or "cuda", and why."""
    override = os.environ.get("QUINTET_TORCH", "").lower()
    if override in ("cpu", "cuda"):
        return override, f"QUINTET_TORCH={override}"
    if override:
        fail(f"QUINTET_TORCH={override!r}: say cpu or cuda, or leave it unset.")
    if Path("/dev/nvidia0").exists():
        return "cuda", "/dev/nvidia0 is there"
    smi = shutil.which("nvidia-smi")
    try:
        if smi and "GPU 0" in subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=30).stdout:
            return "cuda", "nvidia-smi lists a GPU"
    except (OSError, subprocess.TimeoutExpired):
        pass
    return "cpu", "no NVIDIA GPU found"


def default_build(python: Path, requirement: str) -> tuple[str, bool]:
    """Ask pip what the default index would install: its version, and whether it needs CUDA packages.

    Only metadata travel: pip reads them beside the wheel, not out of it.
    """
    options = ["--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-"]
    report = json.loads(run_pip(module_pip(python), ["install", *options, requirement]))
    metadata = report["install"][0]["metadata"]
    needed = [line.lower() for line in metadata.get("requires_dist", []) if "extra ==" not in line]
    return metadata["version"], any(line.startswith(("nvidia-", "cuda-")) for line in needed)


# --- pip ----------------------------------------------------------------------------------------------------


def install(python: Path, torch: str, index: str | None, constraints: list[str], what: list[str]) -> None:
    """Install torch and the rest in one resolution.

    Compiling all of torch and transformers takes longer than compiling the part that is used: what a run imports
    is imported once. Else the first run would compile it, and every run where PYTHONDONTWRITEBYTECODE is set.
    """
    say("installing the pinned packages (about 1.5 GB on disk)")
    extra = ["--extra-index-url", index] if index else []
    run_pip(module_pip(python), ["install", "--no-compile", *extra, *constraints, torch, *what])
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    # Other environments than quintet's lack some of it, and do without.
    subprocess.run([str(python), "-c", f"import {', '.join(OF_A_RUN)}"], env=env, stderr=subprocess.DEVNULL)


def module_pip(python: Path) -> list[str]:
    return [str(python), "-m", "pip"]


def run_pip(pip: list[str], command: list[str]) -> str:
    """Run pip and return its stdout; show its large downloads as they come, and everything if it fails."""
    line = [*pip, command[0], *PIP_OPTIONS, *command[1:]]
    out: list[str] = []
    with tempfile.TemporaryFile("w+") as err:
        with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=err, text=True) as process:
            for text in process.stdout or ():
                out.append(text)
                if re.match(r"\s*Downloading .*\((\d{2,}(\.\d)? MB|.* GB)\)", text):
                    say(text.strip())
                elif text.startswith("Installing collected packages:") and text.count(",") > 9:
                    say("unpacking")
        if process.returncode:
            err.seek(0)
            print("".join(out[-20:]), err.read()[-8000:], sep="\n", file=sys.stderr)
            fail(
                f"pip could not do `{' '.join(command)}`; what it said stands above. Check that the package index can "
                "be reached, and download.pytorch.org where the command names it (PIP_INDEX_URL names another index, "
                "PIP_FIND_LINKS a directory with torch's wheel), and that the disk is not full, then run make again: "
                "what was downloaded is kept."
            )
    return "".join(out)


def write_lock(python: Path, constraints: Path) -> None:
    """Write what is installed as pins: without torch, so that one lock serves its CPU and CUDA builds."""
    frozen = run_pip(module_pip(python), ["freeze", "--all", "--exclude-editable"]).splitlines()
    skip = re.compile(r"(torch|triton|pip|quintet-rl|(nvidia|cuda)-[\w-]+)(==| @)", re.IGNORECASE)
    pins = [line for line in frozen if "==" in line and not skip.match(line)]
    header = "# Written by `make lock`; do not edit. torch is pinned in tools/bootstrap.py, for CPU and CUDA alike.\n"
    constraints.write_text(header + "\n".join(sorted(pins, key=str.lower)) + "\n")
    say(f"{display(constraints)}: {len(pins)} pins")


if __name__ == "__main__":
    raise SystemExit(main())
