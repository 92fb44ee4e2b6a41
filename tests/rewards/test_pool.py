"""Rewards in processes of their own: in order, begun with the first group, and no reward can hang, corrupt or outlive a run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from quintet.errors import UserError
from quintet.recipe.schema import Reward
from quintet.rewards.load import load_reward
from quintet.rewards.pool import RewardPool, Unscored
from quintet.rewards.result import RewardResult
from tests.patience import BUSY

Make = Callable[..., RewardPool]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """A pool of a function with this body, or of the reward of this name; its logs are in logs/."""
    with ExitStack() as stack:

        def pool(body: str, workers: int = 1, **settings: Any) -> RewardPool:
            spec = body
            if not re.fullmatch(r"[\w.]+(:\w+)?", body):
                (tmp_path / "mine.py").write_text(body)
                spec = f"{tmp_path / 'mine.py'}:reward"
            given = {"timeout_s": 15.0 * BUSY, "step_timeout_s": 30.0 * BUSY} | settings
            reward = load_reward(spec)
            return stack.enter_context(RewardPool(reward, Reward(**given), tmp_path / "logs", workers))

        yield pool


def texts(*responses: str) -> list[Unscored]:
    return [Unscored("my prompt", one, "my answer", f"prompts.jsonl:{n}") for n, one in enumerate(responses)]


def score(pool: RewardPool, *responses: str) -> list[RewardResult]:
    return pool.results([pool.submit(texts(*responses))])


def until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 10 * BUSY
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def processes(of: int | None = None) -> list[psutil.Process]:
    """Reward processes of a process, by default of this one."""
    found = []
    for one in psutil.Process(of).children():
        with suppress(psutil.Error):
            if any(word.endswith("pool_worker.py") for word in one.cmdline()):
                found.append(one)
    return found


SLOW_IF_ASKED = """
import os, signal, sys, time
def reward(prompt, response, answer):
    if response == "loop":
        while True: pass
    if response == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
    if response == "raise": raise ValueError("no good")
    if response == "nan": return float("nan")
    if response == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if response == "_exit": os._exit(7)
    if response == "exit": sys.exit(3)
    if response == "pid": return os.getpid()
    return float(response)
"""


def test_results_are_in_the_order_of_submission(make: Make) -> None:
    pool = make(
        "import time\ndef reward(p, r, a):\n    time.sleep(0.001 * (int(r) % 3))\n"
        "    return {'reward': int(r) / 3, 'double': 2 * int(r)}",
        workers=3,
    )
    groups = [pool.submit(texts(*(f"{4 * g + i}" for i in range(4)))) for g in range(30)]
    results = pool.results(groups)
    assert [one.reward for one in results] == [n / 3 for n in range(120)]
    assert [one.metrics["double"] for one in results] == [2 * n for n in range(120)]
    assert not any(one.timed_out or one.failure for one in results)
    assert pool.results([]) == []


def test_many_quick_samples_are_not_asked_for_one_by_one(make: Make) -> None:
    pool = make("length", workers=2)
    score(pool, "")
    began = time.perf_counter()
    results = score(pool, *("x" * (n % 50) for n in range(20_000)))
    assert time.perf_counter() - began < 2 * BUSY
    assert [one.reward for one in results] == [100 / (100 + n % 50) for n in range(20_000)]


def test_text_travels_as_it_is(make: Make) -> None:
    pool = make("def reward(p, r, a):\n    return {'reward': len(r), r[:3]: len(p + a)}")
    odd = ["\n\r\u2028" * 3, "\ud800\x00é", "\U0001f600" * 300_000]
    assert [(one.reward, one.metrics) for one in score(pool, *odd)] == [
        (len(one), {name: len("my promptmy answer")})
        for one, name in zip(odd, ("\n\r\u2028", "\\ud800\x00é", "\U0001f600" * 3), strict=True)
    ]


def test_what_a_function_says_travels_whole(make: Make) -> None:
    """Whether a response is correct, and numbers of any name."""
    body = "def reward(p, response, a):\n    return {'reward': -0.5, 'correct': response == 'x', 'words': 3}"
    pool = make(body)
    assert score(pool, "x", "y") == [RewardResult(-0.5, {"words": 3.0}, one) for one in (True, False)]
    assert score(make("length"), "x")[0].correct is None


def test_the_first_group_is_scored_before_the_last_is_submitted(make: Make) -> None:
    pool = make(SLOW_IF_ASKED)
    first = pool.submit(texts("1", "2"))
    until(lambda: first.done)
    last = pool.submit(texts("3"))
    assert [one.reward for one in pool.results([first, last])] == [1, 2, 3]


@pytest.mark.parametrize(
    ("response", "said"),
    [
        ("raise", r"reward \S+/mine\.py:reward \(\S+:\d+\) raised ValueError: no good\n  prompt:   'my prompt'"),
        ("nan", r"returned nan; expected a number"),
        ("kill", r"lost its process, killed by SIGKILL \(as for want of memory\); it printed nothing"),
        ("_exit", r"ended its process with code 7; it printed nothing"),
        ("exit", r"raised SystemExit: 3"),
    ],
)  # fmt: skip
def test_a_sample_that_cannot_be_scored_is_named_and_the_others_are_scored(
    make: Make, response: str, said: str
) -> None:
    responses = ["1", "x" * 90 + response, "2", "3"]
    with pytest.raises(UserError) as caught:
        score(
            make(SLOW_IF_ASKED.replace('response == "', 'response.strip("x") == "')),
            *responses,
        )
    named = f"sample 1, {responses[1][-80:]!r}, to prompts.jsonl:1: reward "
    assert str(caught.value).startswith(named)
    assert re.search(said, str(caught.value))
    assert str(caught.value).endswith("reward.on_error=zero would count it as 0, and go on")

    goes_on = make(SLOW_IF_ASKED.replace('response == "', 'response.strip("x") == "'), on_error="zero")
    results = score(goes_on, *responses)
    assert [one.reward for one in results] == [1, 0, 2, 3]
    assert [one.failure is None for one in results] == [True, False, True, True]
    assert re.search(said, results[1].failure or "")
    assert [one.reward for one in score(goes_on, "4")] == [4]


@pytest.mark.parametrize("response", ["loop", "deaf"])
def test_a_sample_that_takes_too_long_is_replaced_with_its_process(
    make: Make, response: str, tmp_path: Path
) -> None:
    pool = make(SLOW_IF_ASKED, timeout_s=2.0, on_error="zero")
    (before,) = score(pool, "pid")
    began = time.monotonic()
    late, right, after = score(pool, response, "2", "pid")
    assert time.monotonic() - began < 5 * BUSY
    assert (late.reward, right.reward) == (0, 2)
    assert after.reward != before.reward
    assert not psutil.pid_exists(int(before.reward))
    log = tmp_path / "logs" / "reward-0.log"
    assert f"took longer than reward.timeout_s=2; its stacks are in {log}" in (late.failure or "")
    assert re.search(r'mine\.py", line \d+ in reward', log.read_text())


def test_what_is_not_scored_when_the_steps_time_is_over_has_failed(make: Make) -> None:
    pool = make(SLOW_IF_ASKED, step_timeout_s=2.0, on_error="zero")
    until_started(pool, 1)
    began = time.monotonic()
    results = score(pool, "1", "loop", "2")
    assert 2 <= time.monotonic() - began < 2 + 5 * BUSY
    assert [one.reward for one in results] == [1, 0, 0]
    why = "took longer than reward.step_timeout_s=2 for all samples of the step; "
    assert (results[1].failure or "").endswith(why + "it was being scored")
    assert (results[2].failure or "").endswith(why + "it had not begun")
    until(lambda: score(pool, "3")[0].reward == 3)  # its process is another, which has to load


def test_and_that_ends_the_run_unless_zero(make: Make) -> None:
    pool = make(SLOW_IF_ASKED, step_timeout_s=2.0)
    until_started(pool, 1)
    said = r"sample 0, 'loop', to prompts\.jsonl:0: .*reward\.step_timeout_s=2 "
    with pytest.raises(UserError, match=said):
        score(pool, "loop")


def test_a_process_that_is_killed_from_outside_costs_the_sample_it_was_at(make: Make) -> None:
    pool = make(SLOW_IF_ASKED, on_error="zero")
    (process,) = until_started(pool, 1)
    group = pool.submit(texts("deaf", "2"))
    until(lambda: pool._processes[0].job is not None)
    process.kill()
    lost, right = pool.results([group])
    assert "killed by SIGKILL" in (lost.failure or "")
    assert (lost.reward, right.reward) == (0, 2)


def test_one_that_dies_between_two_steps_costs_at_most_a_sample_and_is_replaced(make: Make) -> None:
    pool = make(SLOW_IF_ASKED, on_error="zero")
    assert score(pool, "1")[0].reward == 1
    (process,) = processes()
    process.kill()
    until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
    assert [one.reward for one in score(pool, "1", "2", "3")][1:] == [2, 3]


def until_started(pool: RewardPool, count: int) -> list[psutil.Process]:
    pool.start()
    until(lambda: pool._loaded and len(processes()) == count)
    return processes()


def test_what_a_reward_prints_is_in_its_log_and_nothing_else(make: Make, tmp_path: Path) -> None:
    pool = make(
        "import os, subprocess, sys\n"
        "def reward(p, r, a):\n"
        "    print('{\"reward\": 99.0}')\n"
        "    print('to stderr', file=sys.stderr)\n"
        "    subprocess.run(['echo', 'from a process'])\n"
        "    os.write(1, b'raw')\n"
        "    return float(sys.stdin.read() == '' and r)\n"
    )
    assert [one.reward for one in score(pool, "1", "2")] == [1, 2]
    said = (tmp_path / "logs" / "reward-0.log").read_text()
    for text in ('{"reward": 99.0}', "to stderr", "from a process", "raw"):
        assert said.count(text) == 2


def test_a_log_with_nothing_in_it_is_not_left(make: Make, tmp_path: Path) -> None:
    with make("length", workers=2) as pool:
        score(pool, "1")
    assert list((tmp_path / "logs").iterdir()) == []


def test_what_writes_into_the_pipe_of_the_answers_has_failed(make: Make) -> None:
    pool = make(
        "import os\ndef reward(p, r, a):\n"
        "    for pipe in range(3, 1024):\n"
        "        try: os.write(pipe, b'rubbish\\n')\n"
        "        except OSError: pass\n"
        "    return 1"
    )
    with pytest.raises(UserError, match="wrote into the pipe that its process answers by"):
        score(pool, "1")


def test_a_child_that_a_reward_forks_answers_nothing_and_holds_up_nothing(make: Make) -> None:
    pool = make(
        "import os, time\ndef reward(p, r, a):\n"
        "    if r == 'returns': return float(os.fork() > 0)\n"
        "    if r == 'stays' and os.fork() == 0: time.sleep(1000)\n"
        "    if r == 'stays': os._exit(1)\n"
        "    return 2",
        on_error="zero",
    )
    results = score(pool, "returns", "", "stays", "")
    assert [one.reward for one in results] == [1, 2, 0, 2]


def test_a_file_by_a_relative_path_with_its_neighbour(make: Make, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "neighbour_of_the_pool.py").write_text("BONUS = 0.5")
    (tmp_path / "mine.py").write_text(
        "from neighbour_of_the_pool import BONUS\ndef reward(p, r, a): return BONUS"
    )
    monkeypatch.chdir(tmp_path)
    with RewardPool(load_reward("mine.py:reward"), Reward(), tmp_path, 1) as pool:
        monkeypatch.chdir("/")
        assert score(pool, "")[0].reward == 0.5


def test_a_module_of_the_runs_path_and_none_of_the_working_directory(
    make: Make, tmp_path: Path, monkeypatch: Any
) -> None:
    on_path, here = tmp_path / "path", tmp_path / "here"
    for one in (on_path, here):
        one.mkdir()
    (on_path / "module_of_the_pool.py").write_text("import fractions\ndef one(p, r, a): return 1")
    (here / "fractions.py").write_text("raise AssertionError('from the working directory')")
    monkeypatch.syspath_prepend(str(on_path))
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.chdir(here)
    assert score(make("module_of_the_pool:one"), "")[0].reward == 1


def test_torch_is_not_imported_and_no_gpu_is_there(make: Make) -> None:
    pool = make(
        "import os, sys\ndef reward(p, r, a):\n"
        "    return {'reward': 1, **{name: name in sys.modules for name in ('torch', 'ray', 'pydantic', 'numpy')},\n"
        "            'gpus': len(os.environ['CUDA_VISIBLE_DEVICES']), 'threads': int(os.environ['OMP_NUM_THREADS']),\n"
        "            'safe_path': 'PYTHONSAFEPATH' in os.environ}"
    )
    assert score(pool, "")[0].metrics == {
        "torch": 0, "ray": 0, "pydantic": 0, "numpy": 0, "gpus": 0, "threads": 1,
        "safe_path": float("PYTHONSAFEPATH" in os.environ),
    }  # fmt: skip


def test_math_gives_up_after_its_own_time_and_that_is_no_failure(make: Make) -> None:
    pool = make("math")
    sample = Unscored("", "\\boxed{9^{9^{9^{3}}}}", "\\sqrt{12}", "here")
    right = Unscored("", "\\boxed{2\\sqrt{3}}", "\\sqrt{12}", "here")
    late, scored = pool.results([pool.submit([sample, right])])
    assert (late.reward, late.timed_out, late.failure) == (0, True, None)
    assert (scored.reward, scored.timed_out) == (1, False)


def test_a_reward_that_cannot_be_loaded_ends_the_run_whatever_on_error_says(
    make: Make, tmp_path: Path
) -> None:
    pool = make("def reward(p, r, a): return 1", on_error="zero")
    (tmp_path / "mine.py").write_text("import no_such_thing")
    with pytest.raises(UserError, match=r"importing .*mine\.py failed with ModuleNotFoundError"):
        score(pool, "1")
    with pytest.raises(UserError, match="ModuleNotFoundError"):
        score(pool, "1")


def test_nor_one_that_dies_of_it_or_never_comes_to_an_end(make: Make, tmp_path: Path) -> None:
    pool = make("def reward(p, r, a): return 1", on_error="zero")
    (tmp_path / "mine.py").write_text("import os; print('my words'); os._exit(5)")
    with pytest.raises(
        UserError, match=r"ended its process with code 5 while it was loaded; .*reward-0\.log"
    ):
        score(pool, "1")
    assert (tmp_path / "logs" / "reward-0.log").read_text() == "my words\n"
    pool = make("def reward(p, r, a): return 1", on_error="zero", step_timeout_s=2.0)
    # Of another length than the reward: by that and the second of its writing Python tells whether bytecode is of it.
    (tmp_path / "mine.py").write_text("import time; time.sleep(10_000)")
    with pytest.raises(UserError, match="none of its processes has come to its end of loading"):
        score(pool, "1")


def test_a_missing_package_is_no_samples_fault(make: Make) -> None:
    pool = make(
        "from quintet.errors import UserError\ndef reward(p, r, a): raise UserError('install it')",
        on_error="zero",
    )
    with pytest.raises(UserError, match=r"^install it$"):
        score(pool, "1")


@pytest.mark.parametrize("response", ["1", "deaf", "loop"])
def test_nothing_is_left_when_it_is_closed(make: Make, response: str) -> None:
    with make(SLOW_IF_ASKED, workers=2) as pool:
        here = until_started(pool, 2)
        group = pool.submit(texts(response))
        until(lambda: group.done or any(process.job for process in pool._processes))
        began = time.monotonic()
    assert time.monotonic() - began < 2 * BUSY
    assert not [one for one in here if one.is_running()]
    assert not [thread for thread in pool._threads if thread.is_alive()]


def test_a_pool_that_was_never_asked_has_no_processes(make: Make, tmp_path: Path) -> None:
    with make("length"):
        assert processes() == []
    assert not (tmp_path / "logs").exists()


PARENT = """
import sys, time
from pathlib import Path
from quintet.recipe.schema import Reward
from quintet.rewards.load import load_reward
from quintet.rewards.pool import RewardPool, Unscored
with RewardPool(load_reward(sys.argv[1]), Reward(), Path(sys.argv[2]), 2) as pool:
    pool.submit([Unscored("", one, "", "") for one in sys.argv[3:]])
    print(flush=True)
    time.sleep(1000)
"""


def test_they_end_with_a_parent_that_is_killed_whatever_they_do(tmp_path: Path) -> None:
    """And so does what they have started."""
    marks = [tmp_path / "loop", tmp_path / "deaf"]
    file = tmp_path / "mine.py"
    file.write_text(
        "import subprocess\n"
        + SLOW_IF_ASKED.replace(
            "    if",
            f"    subprocess.Popen(['sleep', '1000'])\n    open({str(tmp_path)!r} + '/' + response, 'w')\n    if",
            1,
        )
    )
    words = [sys.executable, "-c", PARENT, f"{file}:reward", str(tmp_path / "logs"), "loop", "deaf"]
    parent = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    try:
        parent.stdout.readline()
        until(lambda: all(mark.exists() for mark in marks))
        left = processes(parent.pid)
        left[1].send_signal(signal.SIGSTOP)
        left += [child for one in left for child in one.children()]
        assert len(left) == 4
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    until(lambda: not [one for one in left if one.is_running() and one.status() != psutil.STATUS_ZOMBIE])
