"""A run seen from outside: what is in its directory and on the screen, however it ended."""

import contextlib
import json
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from quintet.cli import main
from quintet.errors import UserError
from quintet.observe.numbers import duration, percent, points, scientific, short
from quintet.observe.observer import Observer
from quintet.recipe.loader import load_recipe
from quintet.recipe.schema import Recipe, Run
from quintet.runs.directory import RunDirectory
from quintet.runs.ledger import CLOCK_KEYS, read_jsonl, read_metrics
from quintet.runs.left_behind import where_to_look

STEP = {
    "reward/mean": 0.25,
    "loss": 0.1,
    "response_tokens/mean": 5.0,
    "mismatch/kl_k3": 2e-7,
    "kl/reference": None,
    "grad_norm": 0.5,
    "lr": 1e-3,
    "tokens": 140,
    "tokens_trained": 100,
}


def run(observer: Observer, steps: int, error: BaseException | None = None) -> None:
    with observer:
        for step in (1, 2):
            observer.step(
                step, {"loss": 1.0 / step, "tokens": 25, "tokens_trained": 10}, stage="sft", show=False
            )
        observer.evaluation(0, {"accuracy": 0.3, "greedy": 0.4, "well_formed": 1.0})
        for step in range(1, steps + 1):
            with observer.phase("generate"):
                pass
            with observer.phase("train"):
                if error is not None and step == steps:
                    raise error
            observer.step(step, {**STEP, "reward/mean": 0.1 * step, "memory/host_gib": 1.5}, total=steps)
            observer.samples(step, [{"prompt": "1+1=", "response": "<2>", "answer": "2", "reward": 1.0}])
        observer.evaluation(steps, {"accuracy": 0.75, "greedy": 0.7, "well_formed": 1.0})


def test_a_finished_run_leaves_everything(observe) -> None:
    observer, printed = observe()
    run(observer, 3)
    directory = observer.directory
    summary = json.loads(directory.summary.read_text())
    wanted = {
        "status": "finished",
        "eval_before": 0.3,
        "eval_after": 0.75,
        "greedy_before": 0.4,
        "greedy_after": 0.7,
        "steps": 3,
        "tokens_trained": 300,
        "sft_steps": 2,
        "sft_tokens_trained": 20,
    }
    wanted |= {"eval_is": "accuracy"}
    assert {key: summary[key] for key in wanted} == wanted
    assert set(summary["seconds_by_phase"]) == {"generate", "train"}
    assert summary["seconds_total"] >= sum(summary["seconds_by_phase"].values()) - 0.01
    assert summary["host_gib_peak"] == 1.5
    assert [line["step"] for line in read_jsonl(directory.samples)] == [1, 2, 3]
    assert load_recipe(directory.recipe) == observer.recipe
    assert json.loads(directory.environment.read_text())["versions"]["pydantic"]
    assert "<svg" in directory.report.read_text()
    text = printed.getvalue()
    for said in (
        "accuracy, sampled",
        "30.0%",
        "75.0%",
        "+45.0",
        str(directory.path),
        "report.html in a browser",
    ):
        assert said in text


def test_a_run_that_ends_before_it_has_done_anything_left_nothing_to_tell_of(observe) -> None:
    observer, printed = observe(width=1000)
    with pytest.raises(UserError), observer:
        raise UserError("no GPU")
    assert "none" not in printed.getvalue()


def test_report_and_summary_are_there_from_the_first_step_on(observe, monkeypatch) -> None:
    observer, _ = observe()
    directory = observer.directory
    with observer:
        assert not directory.summary.exists()
        observer.samples(1, [{"prompt": "1+1=", "response": "<2>", "reward": 1.0}])
        observer.step(1, STEP)
        summary = json.loads(directory.summary.read_text())
        assert (summary["status"], summary["steps"], summary["ledger_lines"]) == ("running", 1, 1)
        report = directory.report.read_text()
        assert '<span class="badge running">running</span>' in report
        assert f"as of {summary['written']}" in report
        assert "&lt;2&gt;" not in report
        assert '"response": "\\u003c2>"' in report
        observer.step(2, STEP)
        assert json.loads(directory.summary.read_text())["steps"] == 1, "too soon after the last one"
        monkeypatch.setattr(observer, "_report_due", 0.0)
        observer.evaluation(2, {"accuracy": 0.5})
        summary = json.loads(directory.summary.read_text())
        assert (summary["steps"], summary["eval_before"]) == (2, 0.5)
    assert json.loads(directory.summary.read_text())["status"] == "finished"
    assert "running" not in directory.report.read_text().split("<section", 1)[0].rsplit("</style>", 1)[1]


KILLED = """
import os, signal, sys
from pathlib import Path
from quintet.observe.observer import Observer
from quintet.recipe.schema import Recipe, Run

observer = Observer(Recipe(run=Run(dir=Path(sys.argv[1]))))
for step in range(1, 8):
    with observer.phase("train"):
        pass
    observer.samples(step, [{"prompt": "1+1=", "response": str(step)}])
    observer.step(step, {"loss": 1.0 / step, "tokens_trained": 10}, total=9)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_has_a_report_and_one_made_anew_has_all_of_it(tmp_path, capsys) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.DEVNULL, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    (run_directory,) = tmp_path.iterdir()
    directory = RunDirectory(run_directory)
    before = json.loads(directory.summary.read_text())
    assert (before["status"], before["steps"] >= 1) == ("running", True)
    assert "<svg" in directory.report.read_text()
    assert main(["report", str(run_directory)]) == 0
    told = json.loads(directory.summary.read_text())
    assert (told["status"], told["steps"], told["tokens_trained"]) == ("unfinished", 7, 70)
    assert told["seconds_total"] >= before["seconds_total"]
    report = directory.report.read_text()
    assert '<span class="badge unfinished">unfinished</span>' in report
    assert '"response": "7"' in report


def test_a_report_that_cannot_be_made_does_not_end_the_run(observe, monkeypatch) -> None:
    def fail(path: Path) -> Path:
        raise ZeroDivisionError("an axis without length")

    monkeypatch.setattr("quintet.observe.observer.write_report", fail)
    observer, printed = observe(width=1000)
    observer.step(1, STEP)
    assert (
        "warning: no report of the run so far: ZeroDivisionError: an axis without length\n"
        in printed.getvalue()
    )


def test_a_report_is_made_so_seldom_that_it_takes_a_hundredth_of_the_time(observe, monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr("quintet.observe.observer.time", SimpleNamespace(monotonic=lambda: now[0]))

    def write(path: Path) -> None:
        now[0] += 3.0

    monkeypatch.setattr("quintet.observe.observer.write_report", write)
    observer, _ = observe()
    made = []
    for step in range(1, 1000):
        before = now[0]
        observer.step(step, STEP, show=False)
        made += [step] * (now[0] > before)
        now[0] += 1.0
    assert made == [1, 301, 601, 901]


def test_only_clock_keys_differ_between_two_equal_runs(observe) -> None:
    ledgers = []
    for _ in range(2):
        observer, _ = observe()
        run(observer, 2)
        ledgers.append(
            [
                {key: value for key, value in line.items() if not key.startswith(CLOCK_KEYS)}
                for line in read_metrics(observer.directory.metrics)
            ]
        )
    assert ledgers[0] == ledgers[1]
    assert ledgers[0][-2] == {"stage": "rl", "step": 2, **STEP, "reward/mean": 0.2}


def test_steps_carry_what_the_clock_says(observe) -> None:
    observer, _ = observe()
    run(observer, 1)
    line = next(
        one for one in read_metrics(observer.directory.metrics) if one["stage"] == "rl" and "loss" in one
    )
    assert {"seconds/generate", "seconds/train", "seconds/step", "tokens_per_s"} <= set(line)
    assert line["tokens_per_s"] == pytest.approx(140 / line["seconds/step"])


def test_what_passes_before_the_first_step_is_not_its_time(observe) -> None:
    observer, _ = observe()
    with observer:
        with observer.phase("start"):
            time.sleep(0.5)
        observer.begin_steps()
        with observer.phase("train"):
            pass
        observer.step(1, {"loss": 1.0, "tokens": 100})
    (line,) = read_metrics(observer.directory.metrics)
    assert line["seconds/train"] <= line["seconds/step"]
    assert line["tokens_per_s"] == pytest.approx(100 / line["seconds/step"])
    assert "seconds/start" not in line
    summary = json.loads(observer.directory.summary.read_text())
    assert summary["seconds_by_phase"]["start"] >= 0.5
    assert line["seconds/step"] + summary["seconds_by_phase"]["start"] <= summary["seconds_total"]


def evaluated(observe, *metrics: dict[str, float]) -> tuple[dict, str, str]:
    observer, printed = observe(width=200)
    with observer:
        for at, one in enumerate(metrics):
            observer.step(at + 1, STEP | {"reward/words": 3.0})
            observer.evaluation(at, one)
    return (
        json.loads(observer.directory.summary.read_text()),
        printed.getvalue(),
        re.sub("<script>.*?</script>", "", observer.directory.report.read_text(), flags=re.DOTALL),
    )


def test_a_mean_reward_is_never_called_accuracy(observe) -> None:
    """Rewards of 5 and -1 are no shares: neither percent nor points are theirs."""
    summary, said, report = evaluated(
        observe,
        {"reward": -1.0, "greedy_reward": -1.0, "reward/words": 9.0},
        {"reward": 2.705, "greedy_reward": 5.0, "reward/words": 12.5},
    )
    assert (summary["eval_is"], summary["eval_before"], summary["eval_after"]) == ("reward", -1, 2.705)
    assert summary["evaluation"]["reward/words"] == {"before": 9.0, "after": 12.5}
    for text in (said, report.lower()):
        assert "accuracy" not in text
        assert "270.5" not in text
    table = said[said.index("Run finished") :]
    assert re.search(r"reward, sampled\W+-1\W+2\.71\W+\+3\.7", table)
    assert re.search(r"reward, greedy\W+-1\W+5\W+\+6", table)
    assert re.search(r"words\W+9\W+12\.5\W+\+3\.5", table)
    assert "Held-out reward" in report
    assert "<h3>words</h3>" in report


def test_a_reward_beside_the_accuracy_is_told_where_it_says_more(observe) -> None:
    both = {"accuracy": 0.25, "greedy": 0.5, "reward": 0.4, "greedy_reward": 0.5}
    summary, said, report = evaluated(observe, both, both | {"accuracy": 0.5, "reward": 0.75})
    assert (summary["eval_is"], summary["eval_after"]) == ("accuracy", 0.5)
    assert re.search(r"accuracy, sampled\W+25\.0%\W+50\.0%\W+\+25\.0", said)
    assert re.search(r"reward, sampled\W+0\.4\W+0\.75\W+\+0\.35", said)
    assert "reward, greedy" not in said  # it is the greedy accuracy again
    assert "Held-out reward" in report


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), "interrupted"), (RuntimeError("rank 1 died\nmore"), "failed")]
)
def test_a_run_cut_short_stays_readable(observe, error: BaseException, status: str) -> None:
    observer, printed = observe()
    with pytest.raises(type(error)):
        run(observer, 3, error)
    summary = json.loads(observer.directory.summary.read_text())
    assert summary["status"] == status
    assert summary["phase"] == "train"
    assert (summary["steps"], summary["eval_before"], summary["eval_after"]) == (2, 0.3, None)
    report = observer.directory.report.read_text()
    assert f">{status}</span>" in report
    assert ("rank 1 died" in report) == (status == "failed")
    assert str(observer.directory.path) in printed.getvalue()
    assert "trained model   none was written\n" in printed.getvalue()
    assert "nothing to go on from; checkpoint.every_steps=20 would save some\n" in printed.getvalue()
    observer.directory.checkpoint.mkdir()
    (observer.directory.hf / "step-000002").mkdir(parents=True)
    (observer.directory.hf / "step-000002-adapter").mkdir()
    assert f"trained model   {observer.directory.checkpoint}" in where_to_look(
        observer.directory, observer.recipe
    )
    observer.directory.checkpoint.rmdir()
    said = f"trained model   none was written; the last export is {observer.directory.hf}/step-000002"
    assert said in where_to_look(observer.directory, observer.recipe)


@pytest.mark.parametrize("error", [None, KeyboardInterrupt(), RuntimeError("rank 1 died")])
def test_without_keep_nothing_is_left_and_standard_output_stays_clean(
    recipe: Recipe, capsys: pytest.CaptureFixture[str], error: BaseException | None
) -> None:
    recipe.run.trackers = ["tensorboard"]
    observer = Observer(recipe, keep=False)
    with pytest.raises(type(error)) if error else contextlib.nullcontext():
        run(observer, 2, error)
    assert not observer.directory.path.exists()
    assert not recipe.run.dir.exists()
    out, err = capsys.readouterr()
    assert out == ""
    assert "1/2" in err
    assert "evaluation after" not in err
    assert "report" not in err


def test_an_evaluations_memory_keeps_its_name_and_stays_off_its_line(observe) -> None:
    observer, printed = observe()
    with observer:
        memory = {"memory/host_gib": 1.5, "memory/device_gib": 20.0}
        observer.evaluation(0, {"accuracy": 0.25, "reward/level[easy]": 0.5, **memory})
    (line,) = read_metrics(observer.directory.metrics)
    assert {"eval/accuracy": 0.25, "memory/host_gib": 1.5, "memory/device_gib": 20.0}.items() <= line.items()
    assert json.loads(observer.directory.summary.read_text())["device_gib_peak"] == 20.0
    said = next(one for one in printed.getvalue().splitlines() if one.startswith("evaluation after"))
    assert said.split("  ")[1:] == ["accuracy 0.250", "reward/level[easy] 0.500"]


def test_sft_alone_is_the_main_stage(observe) -> None:
    observer, _ = observe()
    with observer:
        observer.step(1, {"loss": 2.0, "tokens": 9, "tokens_trained": 7}, stage="sft")
    summary = json.loads(observer.directory.summary.read_text())
    assert (summary["steps"], summary["tokens_trained"], "sft_steps" in summary) == (1, 7, False)
    assert summary["eval_before"] is None


def test_step_lines_are_aligned_with_their_header(observe) -> None:
    observer, printed = observe()
    run(observer, 25)
    lines = [line for line in printed.getvalue().splitlines() if re.match(r" *(rl|\d+/25) ", line)]
    assert len(lines) == 25 + 2  # the header comes back after 20 lines
    assert len({len(line) for line in lines}) == 1
    header, first = lines[:2]
    for name in ("reward", "length", "KL r↔t", "grad", "tok/s", "s/step", "generate", "train", "host GiB"):
        assert name in header
    end = header.index("KL r↔t") + len("KL r↔t")
    assert first[:end].endswith("  2.0e-7")
    assert "\x1b" not in printed.getvalue()


def test_a_narrow_terminal_drops_columns_and_has_colour(observe) -> None:
    observer, printed = observe(force_terminal=True, width=60, color_system="standard")
    run(observer, 2)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", printed.getvalue())
    header = next(line for line in plain.splitlines() if "reward" in line)
    assert len(header) <= 60
    assert "s/step" in header
    assert "host GiB" not in header
    assert "\x1b[32m" in printed.getvalue()


def test_progress_is_plain_lines_off_a_terminal(observe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quintet.observe.progress.PLAIN_EVERY_S", 0.0)
    observer, printed = observe()
    with observer.progress.task("warm-up", total=3, unit="steps") as task:
        task.advance()
        task.note("loss 0.5")
        task.advance(2)
    with pytest.raises(ValueError), observer.progress.task("download"):
        raise ValueError
    with observer.progress.task("rollout", quiet=True):
        pass
    lines = printed.getvalue().splitlines()[1:]
    assert lines[0].startswith("warm-up: 1/3 steps, ")
    assert re.fullmatch(r"warm-up: 3 steps, in \S+ s, loss 0.5", lines[-1])
    assert "download" not in printed.getvalue()
    assert "rollout" not in printed.getvalue()


def test_progress_bars_share_the_terminal_with_lines(observe) -> None:
    observer, printed = observe(force_terminal=True, width=120)
    with observer.progress.task("train", total=2, unit="steps") as outer:
        with observer.progress.task("generate", quiet=True):
            observer.note("a line among bars")
        outer.advance(2)
        assert observer.progress.bars is not None
    assert observer.progress.bars is None
    assert "a line among bars" in printed.getvalue()
    assert "train: 2 steps" in printed.getvalue()


def test_bars_call_elapsed_what_is_elapsed_and_left_what_is_left(observe) -> None:
    observer, printed = observe(force_terminal=True, width=120, color_system=None)
    with observer.progress.task("train", total=4, unit="steps") as task:
        bars = observer.progress.bars
        assert bars is not None
        for _ in range(2):
            time.sleep(0.01)
            task.advance()
        bars.refresh()
        with observer.progress.task("start", quiet=True):  # no one knows how much there is
            bars.refresh()
    shown = printed.getvalue()
    assert re.search(r"train .* 2/4 steps 0:00:0\d elapsed 0:00:0\d left", shown)
    assert not re.search(r"start [^\r\n]*(left|-:--)", shown)


def test_the_end_names_the_adapter(observe, tmp_path: Path) -> None:
    observer, printed = observe()
    with observer:
        observer.directory.checkpoint.mkdir()
        adapter = observer.directory.path / "adapter"
        adapter.mkdir()
    assert re.search(rf"adapter +{re.escape(str(adapter))}", printed.getvalue())


def test_run_directories_never_collide(recipe: Recipe, tmp_path: Path) -> None:
    assert len({RunDirectory.create(recipe).path for _ in range(3)}) == 3
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"run\.dir: cannot make .*: Not a directory"):
        RunDirectory.create(recipe.model_copy(update={"run": Run(dir=tmp_path / "file")}))


def test_a_run_goes_on_with_the_chat_template_it_began_with(recipe: Recipe) -> None:
    from quintet.engine.convert.to_hf import _template_of_run

    directory = RunDirectory.create(recipe)
    assert _template_of_run(directory.checkpoints / "step-000001" / "policy") is None
    for _ in range(2):
        directory.keep_chat_template("{{ messages }}\r\n")
        directory.keep_chat_template("{{ messages }}\r\n")  # as a run that goes on does
    with pytest.raises(
        UserError, match=r"model\.chat_template: it is not what the run began with.*resume=null"
    ):
        directory.keep_chat_template("{{ messages[0] }}")
    assert _template_of_run(directory.checkpoints / "step-000001" / "policy") == "{{ messages }}\r\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (0.4123, "0.412"),
        (4.5e-5, "4.5e-5"),
        (12.34, "12.3"),
        (999.9, "1,000"),
        (6144, "6,144"),
        (12345, "12.3k"),
        (999_999, "1M"),
        (1.234e6, "1.23M"),
        (-0.5, "-0.5"),
        (float("nan"), "nan"),
    ],
)
def test_short_numbers(value: float | None, text: str) -> None:
    assert short(value) == text


def test_other_numbers() -> None:
    assert [duration(one) for one in (0.474, 12.34, 252, 7500)] == [
        "0.47 s",
        "12.3 s",
        "4 min 12 s",
        "2 h 05 min",
    ]
    assert (percent(0.7183), percent(None), points(0.4, 0.718), points(None, 1)) == (
        "71.8%",
        "–",
        "+31.8",
        "–",
    )
    assert scientific(1.25e-12) == "1.2e-12"


@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_a_disk_that_takes_no_more_records_ends_the_run_or_does_not(recipe, observe, on_error) -> None:
    """A limit on the size of files stands for the disk: it takes the first part of a line and then refuses."""
    recipe.checkpoint.on_error = on_error
    observer, printed = observe(width=1000)
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    observer.step(1, STEP)
    whole = observer.directory.metrics.read_bytes()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 20, limits[1]))
        with (
            contextlib.nullcontext()
            if on_error == "continue"
            else pytest.raises(UserError, match=r"metrics\.jsonl")
        ):
            for step in (2, 3):
                observer.step(step, STEP)
                observer.samples(step, [{"prompt": "x" * 2 * len(whole)}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert observer.directory.metrics.read_bytes() == whole
    with observer:
        observer.step(4, STEP)
    assert [line["step"] for line in read_metrics(observer.directory.metrics)] == [1, 4]
    if on_error == "continue":
        assert printed.getvalue().count("warning: ") == 1
        assert json.loads(observer.directory.summary.read_text())["records_left_out"] == 4


def idle_run(observe, shares: list[float], reward: float = 0.0) -> tuple[dict, str, str]:
    observer, printed = observe(width=1000)
    with observer:
        observer.evaluation(0, {"accuracy": 0.0, "greedy": 0.0})
        for number, share in enumerate(shares, start=1):
            told = {"reward/mean": reward, "reward/std": 0.0, "frac_groups_zero_std": share}
            observer.step(number, STEP | told, total=len(shares))
        observer.evaluation(len(shares), {"accuracy": 0.0, "greedy": 0.0})
    return (
        json.loads(observer.directory.summary.read_text()),
        printed.getvalue(),
        observer.directory.report.read_text(),
    )


def test_a_run_that_learnt_nothing_says_so(observe) -> None:
    summary, said, report = idle_run(observe, [1.0] * 11)
    assert said.count("warning: 5 steps in a row without signal: every response got the reward 0.") == 1
    said_last = said[said.index("Run finished") :]
    for text in (summary["nothing_learnt"], said_last, report):
        assert "Nothing was learnt from rewards: in every step every response got the reward 0" in text
        assert "rollout.temperature" in text
    assert re.search(r"^ *rl +reward +no signal", said, re.MULTILINE)
    assert re.search(r"^ *1/11 +0\.000 +100\.0%", said, re.MULTILINE)


@pytest.mark.parametrize("shares", [[1.0] * 4 + [0.5] + [1.0] * 4, [0.75], [None] * 6])
def test_a_step_with_a_signal_is_something(observe, shares: list[float]) -> None:
    summary, said, report = idle_run(observe, shares)
    assert "nothing_learnt" not in summary
    for text in (said, report):
        assert "othing was learnt" not in text
        assert "steps in a row" not in text


def test_no_change_is_neither_green_nor_red(observe) -> None:
    observer, printed = observe(force_terminal=True, width=120, color_system="standard")
    with observer:
        observer.step(1, STEP)
        for at, one in enumerate((0.25, 0.25004)):
            observer.evaluation(at, {"accuracy": one, "greedy": one})
    (row,) = [line for line in printed.getvalue().splitlines() if "accuracy, sampled" in line]
    assert "+0.0" in row
    assert "\x1b[32m" not in row
    assert 'class="up"' not in observer.directory.report.read_text()
