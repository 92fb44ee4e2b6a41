"""A fall of the share of accepted drafts is told, once."""

from __future__ import annotations

from quintet.observe.acceptance import DRAFTED, ENOUGH, METRIC, AcceptanceFalls


def said(*steps: tuple[float, float] | None) -> list[bool]:
    """Whether each step brings a warning. steps: share and tokens; None of one without drafts."""
    watch = AcceptanceFalls()
    return [watch({} if one is None else {METRIC: one[0], DRAFTED: one[1]}) is not None for one in steps]


def test_a_fall_by_half_is_told_once() -> None:
    assert said((0.8, 1000), (0.7, 1000), (0.35, 1000), (0.3, 1000), (0.8, 1000), (0.0, 1000)) == [
        False,
        False,
        True,
        False,
        False,
        True,
    ]


def test_a_slow_fall_few_tokens_and_steps_without_drafts_say_nothing() -> None:
    assert not any(said((0.8, 1000), (0.5, 1000), (0.3, 1000), (0.2, 1000)))
    assert not any(said((0.8, 1000), (0.1, ENOUGH - 1), None, (0.7, 1000)))
    assert said((0.8, 1000), None, (0.1, 1000)) == [False, False, True]
    assert not any(said((0.0, 1000), (0.0, 1000)))  # new layers


def test_it_says_both_shares() -> None:
    watch = AcceptanceFalls()
    watch({METRIC: 0.8, DRAFTED: 1000})
    warning = watch({METRIC: 0.25, DRAFTED: 1000}) or ""
    assert warning.startswith("warning: 25.0% of drafted tokens are accepted, 80.0% in the step before")


def test_a_run_tells_it_among_its_steps(observe) -> None:
    observer, printed = observe(width=200)
    with observer:
        for step, share in enumerate((0.8, 0.79, 0.2), start=1):
            observer.step(step, {METRIC: share, DRAFTED: 1000, "loss": 1.0})
            assert ("20.0% of drafted tokens" in printed.getvalue()) == (step == 3)
