"""Generation that is listened to, and spoken to, while it lasts: real ranks, in the trainer's processes and in their own."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import quintet
from quintet.controller.finished_groups import FinishedGroups
from quintet.controller.messages import SampleInfo
from quintet.controller.rollouts import Generating, Rollouts
from quintet.controller.samples import Samples
from quintet.data.stream import PromptStream
from quintet.errors import QuintetError, UserError
from quintet.recipe.schema import Reward
from quintet.rewards.load import load_reward
from quintet.rewards.pool import RewardPool
from quintet.train.algorithms import algorithm_of
from quintet.train.ppo import take_step
from quintet.train.session import Session
from quintet.train.source import Source
from quintet.train.steps import Step
from tests.patience import BUSY
from tests.train.runs import process_of, run

LONG = 1200
OWN = ["rollout.own_processes=true", "rollout.restart=true", "rollout.layout.tp=1"]
REWARD = """
import time

def score(prompt, response, answer):
    if "made up" in response: return 0.0  # before the start
    with open({log!r}, "a") as log:
        log.write(f"{{time.time()}} {{len(response)}} {{hash(prompt)}}\\n")
    time.sleep({seconds})
    return float(len(response))
"""


def rewarded(tmp_path: Path, seconds: float = 0.0) -> str:
    """A reward that writes down when it is asked."""
    (tmp_path / "told.py").write_text(REWARD.format(log=str(tmp_path / "asked.log"), seconds=seconds))
    return f"reward.function={tmp_path / 'told.py'}:score"


def asked(tmp_path: Path) -> list[tuple[float, int]]:
    """When the reward was asked, and for a response of which length."""
    log = tmp_path / "asked.log"
    lines = log.read_text().splitlines() if log.exists() else []
    return [(float(at), int(length)) for at, length, _ in (line.split() for line in lines)]


def generate(s: Session, seed: str = "seed", longest: int = LONG, shortest: int | None = None) -> Samples:
    """Two samples of each of six prompts; the first prompt's are short, the last one's long."""
    assert s.inputs.train is not None
    prompts = list(s.inputs.train)[:6]
    lengths = [[longest * (n + 1) // 6] * 2 for n in range(6)]
    lengths[0] = [shortest or lengths[0][0]] * 2
    sampling = replace(s.sampling(), ignore_end=True, max_response_tokens=longest)
    return s.controller.generate(prompts, sampling, 2, seed, lengths)


def beside(act: Callable[[], Any]) -> threading.Thread:
    """Do something in another thread, a second from now."""
    thread = threading.Timer(1.0, act)
    thread.start()
    return thread


def texts(samples: Samples) -> list[str]:
    return [made.text for made in samples.generated]


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    "where",
    [["layout.tp=2"], pytest.param([*OWN, "rollout.layout.tp=2"], marks=pytest.mark.nightly)],
    ids=["in-process", "own"],
)
def test_a_call_under_way_is_held_let_go_and_given_up(tmp_path: Path, where: list[str]) -> None:
    with run(tmp_path, "cluster.ranks=2", rewarded(tmp_path), *where) as s:
        rollouts = s.controller.rollouts
        with s.controller.generating():
            began = time.monotonic()
            plain = generate(s)
            alone_s = time.monotonic() - began

            times: dict[str, float] = {}

            def hold() -> None:
                began = time.monotonic()
                rollouts.pause()
                times["pause"] = time.monotonic() - began
                time.sleep(2 * alone_s + 1)
                times["let go"] = time.monotonic()
                rollouts.resume()

            thread = beside(hold)
            held = generate(s)
            ended = time.monotonic()
            thread.join()
            assert times["pause"] < 1.0 * BUSY, "it waited for the call"
            assert ended > times["let go"], "it went on while it was held"
            assert texts(held) == texts(plain)
            s.controller.reward(held)
            assert [r.reward for r in held.rewards] == [float(len(text)) for text in texts(plain)]

            thread = beside(rollouts.abort)
            given_up = generate(s, longest=40 * LONG)
            thread.join()
            finishes = {made.finish for made in given_up.generated}
            assert "abort" in finishes
            again = generate(s, longest=given_up.generated[-1].response_tokens + 6)
            assert again.generated[-1].text.startswith(given_up.generated[-1].text)
            with pytest.raises(QuintetError, match=r"responses were aborted .* nothing is trained on"):
                s.controller.reward(given_up)
            rollouts.pause()  # nothing is under way
            rollouts.resume()
            assert texts(generate(s)) == texts(plain)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    "where", [[], pytest.param(OWN, marks=pytest.mark.nightly)], ids=["in-process", "own"]
)
def test_rewards_begin_with_the_first_group_that_is_finished(tmp_path: Path, where: list[str]) -> None:
    with run(tmp_path, "cluster.ranks=2", rewarded(tmp_path, 0.05), *where) as s, s.controller.generating():
        samples = generate(s, longest=2 * LONG)
        generated = time.time()
        s.controller.reward(samples)
        when = asked(tmp_path)
        assert len(when) == 12
        before = [length for at, length in when if at < generated]
        assert len(before) >= 6, "the rewards waited for the last response"
        assert [r.reward for r in samples.rewards] == [float(len(text)) for text in texts(samples)]

        if where:  # one dies on the way, with groups that were told before
            heard: list[int] = []
            add = FinishedGroups.add

            def killing(self: FinishedGroups, number: int, group: list[SampleInfo]) -> None:
                add(self, number, group)
                heard.append(number)
                if heard.count(3) == 1 and number == 3:
                    os.kill(process_of(s, "rollout-1"), signal.SIGKILL)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(FinishedGroups, "add", killing)
                again = generate(s, longest=2 * LONG)
            s.controller.reward(again)
            assert heard.count(3) == 2, "it did not die half way"
            assert (again.generated, again.rewards) == (samples.generated, samples.rewards)
            assert len(asked(tmp_path)) == 24, "a response was scored twice, or not at all"


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("refills", [False, True], ids=["grpo", "dapo"])
def test_training_state_comes_back_while_rewards_are_computed(tmp_path: Path, refills: bool) -> None:
    """But for an algorithm that selects by rewards, and may generate more: it needs the rollouts until the last is there."""
    wanted = ["engine.offload_grads=1", "engine.offload_optimizer=1", "train.prompts_per_step=4"]
    named = ["algorithm.name=dapo"] if refills else []
    with run(tmp_path, "cluster.ranks=2", rewarded(tmp_path, 0.5), *wanted, *named) as s:
        assert s.inputs.train is not None
        told: list[str] = []
        events, results = s.controller.handover._log_event, RewardPool.results

        def collected(self: RewardPool, scorings: Any) -> Any:
            told.append("rewards are waited for")
            found = results(self, scorings)
            told.append("rewards are there")
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(s.controller.handover, "_log_event", lambda *a: (told.append(a[0]), events(*a)))
            patch.setattr(RewardPool, "results", collected)
            step, algorithm = Step(1), algorithm_of(s.recipe, s.controller.roles)
            take_step(s, algorithm, Source(s, PromptStream(s.inputs.train, seed=0)), step)
            back = told.index("training state is back: grads")
            assert (back > told.index("rewards are there")) == refills, told
            if not refills:
                assert told[back - 1 : back + 3] == [
                    "rollouts sleep",
                    "training state is back: grads",
                    "rewards are waited for",
                    "rewards are there",
                ]
        assert step.samples is not None
        assert len(step.samples.rewards) == len(step.samples.generated) == 8
        assert len(step.rewards) >= 8


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_reward_that_fails_ends_what_is_under_way(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(
        "def score(prompt, response, answer):\n    if 'made up' not in response: raise ValueError('no')\n    return 0.0\n"
    )
    with run(tmp_path, f"reward.function={tmp_path / 'wrong.py'}:score") as s:
        began = time.monotonic()
        with pytest.raises(UserError, match=r"sample \d+, "), s.controller.generating():
            generate(s, longest=60 * LONG, shortest=20)
        assert time.monotonic() - began < 20 * BUSY
        assert len(generate_again(s)) == 12


def generate_again(s: Session) -> list[SampleInfo]:
    """The ranks go on after what they gave up."""
    s.controller._rewards = None
    with s.controller.generating():
        return generate(s, "other", longest=12).generated


# without ranks


def info(text: str, finish: str = "stop") -> SampleInfo:
    return SampleInfo(2, 1, finish, text, None, None)


@pytest.fixture
def made(tmp_path: Path) -> Any:
    """Three prompts' groups, and a pool that writes down what it is asked."""
    function = load_reward(rewarded(tmp_path).partition("=")[2])
    prompts: list[Any] = [
        SimpleNamespace(text=f"{n}", answer="", source=f"p:{n}", row={"n": n}) for n in range(5)
    ]
    with RewardPool(function, Reward(), tmp_path / "logs", workers=2) as pool:
        yield prompts, pool


def test_results_do_not_depend_on_who_finishes_first(made: Any) -> None:
    prompts, pool = made
    groups = [[info("x" * (3 * n + k)) for k in range(2)] for n in range(5)]
    found = []
    for seed in range(3):
        finished = FinishedGroups(prompts, pool)
        order = list(range(5))
        random.Random(seed).shuffle(order)
        for number in order:
            finished.add(number, groups[number])
        assert [group for group, _ in finished.in_order()] == groups
        found.append([r.reward for r in pool.results([one for _, one in finished.in_order() if one])])
    assert found == [[float(3 * n + k) for n, k in itertools.product(range(5), range(2))]] * 3


def test_a_reward_gets_the_row_of_its_prompt(made: Any, tmp_path: Path) -> None:
    prompts, _ = made
    (tmp_path / "rows.py").write_text("def score(prompt, response, row):\n    return 10 * row['n']\n")
    with RewardPool(load_reward(f"{tmp_path / 'rows.py'}:score"), Reward(), tmp_path, workers=1) as pool:
        finished = FinishedGroups(prompts, pool)
        for number in range(5):
            finished.add(number, [info("a"), info("b")])
        rewards = [r.reward for r in pool.results([one for _, one in finished.in_order() if one])]
    assert rewards == [10.0 * (n // 2) for n in range(10)]


def test_a_group_that_comes_again_is_scored_once_unless_it_is_another(made: Any, tmp_path: Path) -> None:
    prompts, pool = made
    finished = FinishedGroups(prompts[:2], pool)
    finished.add(1, [info("aa"), info("b")])
    finished.add(1, [info("aa"), info("b")])
    first = finished.scorings[1]
    pool.results([first])
    assert len(asked(tmp_path)) == 2
    finished.add(1, [info("aa"), info("cccc")])
    finished.add(0, [info("d"), info("", "abort")])
    assert list(finished.scorings) == [1]
    assert finished.scorings[1] is not first
    assert [r.reward for r in pool.results([finished.scorings[1]])] == [2.0, 4.0]


def test_a_failure_is_told_before_the_last_group_is_there(made: Any, tmp_path: Path) -> None:
    prompts, _ = made
    (tmp_path / "wrong.py").write_text("def score(prompt, response, answer):\n    raise ValueError('no')\n")
    with RewardPool(load_reward(f"{tmp_path / 'wrong.py'}:score"), Reward(), tmp_path, workers=1) as pool:
        finished = FinishedGroups(prompts, pool)
        finished.add(3, [info("x"), info("y")])
        deadline = time.monotonic() + 30 * BUSY
        while not finished.scorings[3].done and time.monotonic() < deadline:
            time.sleep(0.02)
        with pytest.raises(UserError, match=r"sample 6, 'x', to p:3: "):
            finished.check()


class OneWord:
    """A group that hears the last word said alone, a moment after it was said: what is said sooner is lost."""

    def __init__(self) -> None:
        self.word = ""
        self.heard: list[str] = []

    def interject(self, call: Any, name: str, verb: str, ranks: Any) -> bool:
        self.word = verb
        time.sleep(0.2)
        if self.word == verb:
            self.heard.append(verb)
            return True
        return False  # as at the end of the call


@pytest.mark.parametrize("second", ["resume", "abort"])
def test_what_two_threads_say_at_once_is_heard_word_by_word(second: str) -> None:
    asked: list[Any] = []
    alone: Any = type("Alone", (Rollouts,), {"ask": lambda self, verb, phase: lambda: asked.append(phase)})
    alone.__abstractmethods__ = frozenset()
    rollouts, group = alone(), OneWord()
    rollouts._under_way = [Generating(group, None, "call", [0])]  # type: ignore[arg-type]
    pausing = threading.Thread(target=rollouts.pause)
    pausing.start()
    time.sleep(0.05)
    getattr(rollouts, second)()
    pausing.join()
    assert group.heard == ["pause", second]
    assert not asked, "it pauses what comes after the call"


def test_a_verb_is_written_in_four_files_beside_its_callers() -> None:
    package = Path(quintet.__file__).parent
    written = {
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        if "def abort(self" in file.read_text() and file.parent.name not in ("vllm", "sglang")  # engines
    }
    assert written - {"controller/colocation.py"} == {  # which asks for it
        "controller/rollouts.py",
        "rollout/base.py",
        "rollout/external_engine.py",
        "rollout/native/rollout.py",
    }
