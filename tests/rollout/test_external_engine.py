"""What back ends on others' engines share, with an engine that counts: each token is the one before it and one more."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from quintet.errors import QuintetError, UserError
from quintet.recipe import schema
from quintet.rollout.base import Request, Sampling
from quintet.rollout.external_engine import Answer, ExternalEngineRollout, Job, policy_sample
from quintet.rollout.seeds import sample_seeds
from tests.models.directory import write_model

LONGEST = 8 + 4 + 1
SHORT = Sampling(max_response_tokens=2)


class Counting:
    """The engine: what it was asked, and what it came to."""

    def __init__(self):
        self.jobs, self.log, self.tokens, self.finish = [], [], 0, "length"
        self.order = list  # of places
        self.together = lambda places: [[place] for place in places]
        self.asked = []
        self.closed, self.forgotten = False, []

    def run(self, jobs):
        self.jobs += jobs
        try:
            for some in self.together(self.order(range(len(jobs)))):
                yield {place: self._one(jobs[place]) for place in some}
        finally:
            self.closed = True

    def _one(self, job):
        ids = [job.prompt_ids[-1] + 1 + at for at in range(job.parameters["most"])]
        self.tokens += len(ids)
        scored = [-float(token) for token in job.prompt_ids[1:]]
        return Answer(ids, [-float(token) for token in ids], self.finish, scored)

    def pause(self):
        self.log.append("pause")

    def resume(self):
        self.log.append("resume")

    def abort(self):
        self.log.append("abort")

    def close(self):
        self.log.append("close")


class CountingRollout(ExternalEngineRollout):
    title = "the counter"

    def _to_write(self, request, number, seed, sampling):
        return Job(request.prompt_ids, {"most": request.limits(sampling)[number], "seed": seed})

    def _to_score(self, ids):
        return Job(ids, {"most": 0})

    def _completed(self, jobs, answers):
        self._engine.asked.append(len(jobs))
        return [replace(one, routes=len(job.prompt_ids)) for job, one in zip(jobs, answers, strict=True)]

    def _forget(self, jobs):
        assert self._engine.closed
        self._engine.forgotten += [job.name for job in jobs]

    def _routes_of(self, told, tokens):
        return told, tokens

    def _counts(self):
        return {"drafts": float(self._engine.tokens)}

    def sleep(self):
        self._asleep = {"weights", "kv_cache"}

    def wake(self, part):
        self._asleep.discard(part)
        self._go_on()


@pytest.fixture
def make(tmp_path):
    def one(**rollout):
        recipe = schema.Recipe.model_validate(
            {"data": {"max_prompt_tokens": 8}, "rollout": {"max_response_tokens": 4} | rollout}
        )
        model = write_model(tmp_path / "model")
        return CountingRollout(recipe, model, Counting(), str, lambda done: None)

    return one


def test_each_sample_is_a_job_with_its_own_seed_and_limit(make):
    rollout = make()
    requests = [Request([1, 2], samples=2, seed=7, max_response_tokens=(1, 3)), Request([5], seed=9)]
    first, second = rollout.generate(requests, Sampling(max_response_tokens=2))
    assert [sample.response_ids for sample in first] == [[3], [3, 4, 5]]
    assert [sample.response_ids for sample in second] == [[6, 7]]
    assert first[1].policy_logprobs == [-3.0, -4.0, -5.0]
    assert first[0].text == "[3]"
    asked = [job.parameters["seed"] for job in rollout._engine.jobs]
    assert asked == [*sample_seeds(7, 2), *sample_seeds(9, 1)]


THREE = [Request([at], samples=2, seed=at) for at in (10, 20, 30)]


def test_a_group_is_told_when_its_last_sample_is_done(make):
    rollout = make()
    rollout._engine.order = lambda places: [4, 0, 2, 5, 3, 1]
    counted = []
    rollout._progress = counted.append
    groups = [(number, len(counted), samples) for number, samples in rollout.stream(THREE, SHORT)]
    assert [(number, done) for number, done, _ in groups] == [(2, 4), (1, 5), (0, 6)]
    in_order = make().generate(THREE, SHORT)
    assert {number: samples for number, _, samples in groups} == dict(enumerate(in_order))
    assert rollout.generate(THREE, SHORT) == in_order


def test_groups_that_are_done_together_are_completed_together(make):
    rollout = make(return_routes=True)
    rollout._engine.together = lambda places: [[3], [0, 1, 2, 5], [4]]
    groups = list(rollout.stream(THREE, SHORT))
    assert [number for number, _ in groups] == [0, 1, 2]
    assert rollout._engine.asked == [4, 2]
    assert [samples for _, samples in groups] == make(return_routes=True).generate(THREE, SHORT)


def test_who_stops_listening_gives_the_rest_up(make):
    rollout = make()
    groups = rollout.stream(THREE, SHORT)
    next(groups)
    assert not rollout._engine.closed
    groups.close()
    assert rollout._engine.closed
    assert rollout._engine.forgotten == [job.name for job in rollout._engine.jobs[2:]]
    rollout.generate(THREE, SHORT)
    assert len(rollout._engine.forgotten) == 4
    assert len({job.name for job in rollout._engine.jobs}) == 12


def test_routes_of_a_group_come_with_it(make):
    rollout = make(return_routes=True)
    rollout._engine.order = lambda places: list(reversed(places))
    groups = rollout.stream(THREE, SHORT)
    number, samples = next(groups)
    assert not rollout._engine.closed
    assert [sample.response_ids[0] for sample in samples] == [10 * number + 11] * 2
    assert [sample.routes for sample in samples] == [(1, 3), (1, 3)]


def test_routes_are_asked_for_where_the_recipe_does(make):
    assert make(return_routes=True).generate([Request([1, 2])], SHORT)[0][0].routes == (2, 4)
    assert make().generate([Request([1, 2])], SHORT)[0][0].routes is None


@pytest.mark.parametrize(
    ("request_", "sampling", "sentence"),
    [
        (Request([]), SHORT, "prompt 1 has no tokens"),
        (
            Request([1] * 12),
            SHORT,
            f"prompt 1 has 12 tokens and its response may have 2; the counter was made for {LONGEST} in all",
        ),
        (
            Request([1]),
            Sampling(max_response_tokens=2, stop=("x",)),
            r"the counter was made without a tokenizer.* rollout\.stop",
        ),
    ],
)
def test_what_the_engine_was_not_made_for_never_reaches_it(make, request_, sampling, sentence):
    rollout = make()
    with pytest.raises(UserError, match=sentence):
        rollout.generate([Request([1]), request_], sampling)
    assert not rollout._engine.jobs


def test_scores_are_of_every_token_but_the_first(make):
    rollout = make()
    assert rollout.score([[4, 5, 6], [1], [7, 8]]) == [[-5.0, -6.0], [], [-8.0]]
    with pytest.raises(UserError, match=f"sequence 1 has {LONGEST} tokens; the counter was made for"):
        rollout.score([[1, 2], [1] * LONGEST])
    rollout._engine.finish = "abort"
    with pytest.raises(QuintetError, match="given up by `abort`"):
        rollout.score([[1, 2]])


def test_nothing_is_generated_asleep_nor_without_weights(make):
    rollout = make()
    rollout.sleep()
    rollout.wake("weights")
    with pytest.raises(QuintetError, match="kv_cache are asleep"):
        rollout.score([[1, 2]])
    rollout.wake("kv_cache")
    rollout._forgot = True
    with pytest.raises(QuintetError, match="weights are undefined"):
        rollout.generate([Request([1])], SHORT)
    assert not rollout._engine.jobs


def test_what_is_held_goes_on_once_all_is_awake(make):
    rollout = make()
    rollout.pause()
    rollout.sleep()
    rollout.resume()
    rollout.wake("kv_cache")
    assert rollout._engine.log == ["pause"]
    rollout.wake("weights")
    assert rollout._engine.log == ["pause", "resume"]
    rollout.pause()
    rollout.sleep()
    rollout.wake("weights")
    rollout.wake("kv_cache")
    assert rollout._engine.log[2:] == ["pause"], "who was held before it slept is held still"


def test_what_is_held_waits_for_weights_that_arrived_whole(make):
    rollout = make()
    rollout.pause()
    with pytest.raises(ConnectionError), rollout._weights_arriving():
        raise ConnectionError
    rollout.resume()
    assert rollout._engine.log == ["pause"]
    with pytest.raises(QuintetError, match="did not arrive whole"):
        rollout.score([[1, 2]])
    with rollout._weights_arriving():
        assert rollout._engine.log == ["pause"]
    assert rollout._engine.log == ["pause", "resume"]
    assert rollout.score([[1, 2]]) == [[-2.0]]
    with pytest.raises(ConnectionError), rollout._weights_arriving():
        raise ConnectionError
    assert rollout._engine.log[2:] == ["pause"], "nobody held it, and half-new weights generate nothing"


def test_weights_do_not_come_to_one_that_has_no_memory_for_them(make):
    rollout = make()
    rollout.sleep()
    with pytest.raises(QuintetError, match="weights are asleep"), rollout._weights_arriving():
        raise AssertionError


@pytest.mark.parametrize("told", [[-1.0], [-1.0, math.nan], [-math.inf, -1.0]])
def test_logprobs_that_cannot_be_trained_on_are_told(told):
    with pytest.raises(QuintetError, match="log-probs of 2 tokens"):
        policy_sample([3, 4], told, "stop", Sampling(), str)


def test_counts_are_since_the_last_call(make):
    rollout = make()
    rollout.generate([Request([1])], Sampling(max_response_tokens=3))
    assert rollout.metrics() == {"drafts": 3.0}
    rollout.generate([Request([1])], Sampling(max_response_tokens=2))
    assert rollout.metrics() == {"drafts": 2.0}
    assert rollout.metrics() == {"drafts": 0.0}


def test_it_closes_once(make):
    rollout = make()
    rollout.close()
    rollout.close()
    assert rollout._engine.log == ["close"]
